"""A copy and a read of device memory and nothing else: the bandwidth that other kernels are held against."""

from __future__ import annotations

from itertools import product

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch

TOPIC = "bandwidth"
TILES = tuple(product((2, 4, 8), (4, 8)))
"""Words of 16 bytes of a lane, simdgroups of a threadgroup. The defaults are those that were fastest on an H200."""


def copy_metal(source: mx.array, *, each: int = 2, simdgroups: int = 4) -> mx.array:
    """A copy of `source`, uint32 ``[n]``, n a multiple of ``each · simdgroups · 128``.

    Args:
        each, simdgroups: one of `TILES`.

    Raises:
        KernelError: another type, shape or size, or no such tile.
    """
    return _launch("copy", source, each, simdgroups, source.size)


def read_metal(source: mx.array, *, each: int = 4, simdgroups: int = 4) -> mx.array:
    """The exclusive or of every ``each · 128`` numbers that a simdgroup reads, uint32; otherwise as `copy_metal`."""
    return _launch("read", source, each, simdgroups, source.size // (4 * each * SIMD))


def _launch(name: str, source: mx.array, each: int, simdgroups: int, outputs: int) -> mx.array:
    if (each, simdgroups) not in TILES:
        raise KernelError(f"{name} has no tile of {each} words and {simdgroups} simdgroups; there are {TILES}")
    share = 4 * each * simdgroups * SIMD
    if source.dtype != mx.uint32 or source.ndim != 1 or source.size % share or not source.size:
        raise KernelError(f"{name} takes uint32 [n], n a multiple of {share}, not {source.dtype} {list(source.shape)}")
    kernel = loader.load(TOPIC)[name]
    (made,) = loader.launch(
        Launch(
            kernel,
            (source,),
            kernel.arguments(EACH=each, SIMDGROUPS=simdgroups),
            grid=(source.size // (4 * each), 1, 1),
            threadgroup=(simdgroups * SIMD, 1, 1),
            shapes=[(outputs,)],
            dtypes=[mx.uint32],
        )
    )
    return made
