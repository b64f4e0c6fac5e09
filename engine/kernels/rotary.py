"""Norm and rotary embedding of new queries and keys by our own kernel: one launch, one text for Metal and CUDA."""

from __future__ import annotations

from math import log2

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.attention import HEAD_DIM
from engine.kernels.loader import SIMD, KernelError, Launch

TOPIC = "rotary_decode"
ROTARY_DIMS = 2 * SIMD
TILES = (1, 2, 4)
"""Simdgroups of a threadgroup, each with a head of a row."""


def rotate_metal(
    q: mx.array,
    k: mx.array,
    q_gain: mx.array,
    k_gain: mx.array,
    position: mx.array,
    *,
    eps: float = 1e-6,
    base: float = 1e7,
    simdgroups: int = 1,
) -> tuple[mx.array, mx.array]:
    """RMSNorm per head and rotary embedding of the leading 64 of 256 dimensions, half-split pairs, in float32.

    Args:
        q: ``[1, rows, heads * 512]``, query and gate per head as `q_proj` gives them; k: ``[1, rows, kv heads * 256]``.
            Any strides.
        q_gain, k_gain: ``[256]``, row-contiguous.
        position: int32 ``[1]``, of the first row.
        simdgroups: one of `TILES`.

    Returns:
        Queries ``[1, heads, rows, 256]`` and keys ``[1, kv heads, rows, 256]``, of the inputs' type.

    Raises:
        KernelError: heads of another size, types that differ, or a tile that does not exist.
    """
    rows, width, kv_width = q.shape[1], q.shape[2], k.shape[2]
    if width % (2 * HEAD_DIM) or kv_width % HEAD_DIM or q_gain.shape != (HEAD_DIM,) or q.dtype != k.dtype:
        raise KernelError(
            f"rotate_metal takes heads of {HEAD_DIM} and one type, not widths {width} and {kv_width}, "
            f"gain {list(q_gain.shape)}, {q.dtype} and {k.dtype}"
        )
    if simdgroups not in TILES:
        raise KernelError(f"rotate_metal has no tile of {simdgroups} simdgroups; there are {TILES}")
    heads, kv_heads = width // (2 * HEAD_DIM), kv_width // HEAD_DIM
    groups = -(-(heads + kv_heads) // simdgroups)
    kernel = loader.load(TOPIC)["rotate"]
    queries, keys = loader.launch(
        Launch(
            kernel,
            (q, k, q_gain, k_gain, position),
            kernel.arguments(
                T=q.dtype,
                SIMDGROUPS=simdgroups,
                EPS_BITS=loader.float_bits(eps),
                BASE_BITS=loader.float_bits(log2(base)),
            ),
            grid=(groups * simdgroups * SIMD, rows, 1),
            threadgroup=(simdgroups * SIMD, 1, 1),
            shapes=[(1, heads, rows, HEAD_DIM), (1, kv_heads, rows, HEAD_DIM)],
            dtypes=[q.dtype, q.dtype],
        )
    )
    return queries, keys
