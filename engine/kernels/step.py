"""What a recorded decode step does beside its layers, by our own kernels; see ``step_decode.metal``.

All but `embed_metal` write into arrays that are there already. MLX's launches only make fresh ones, so these run where
a step is recorded (`engine.replay`) and raise elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.config import GROUP_SIZE
from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch
from engine.weights import Matrix

TOPIC = "step_decode"
HEAD_DIM = 256
RING = 64
"""Tokens that the host may be behind."""
MOST_LAYERS = 15
"""Layers of one `slide_metal`."""


def embed_metal(token: mx.array, table: Matrix) -> mx.array:
    """Rows ``[1, rows, hidden]`` of a packed table ``[tokens, hidden]``, token uint32 ``[rows]``, in the scales' type.

    Raises:
        KernelError: a table that is not packed in 4 or 8 bits and groups of 64.
    """
    width = table.shape[1]
    if table.scales is None or table.biases is None or table.bits not in (4, 8) or table.group_size != GROUP_SIZE:
        raise KernelError(f"embed_metal reads a table packed in 4 or 8 bits and groups of {GROUP_SIZE}")
    kernel, rows = loader.load(TOPIC)["embed"], token.shape[0]
    (out,) = loader.launch(
        Launch(
            kernel,
            (token, table.weight, table.scales, table.biases),
            kernel.arguments(T=table.scales.dtype, BITS=table.bits, INPUTS=width),
            grid=(-(-width // (8 * SIMD)) * SIMD, rows, 1),
            threadgroup=(SIMD, 1, 1),
            shapes=[(1, rows, width)],
            dtypes=[table.scales.dtype],
        )
    )
    return out


def keep_metal(k: mx.array, v: mx.array, position: mx.array, room: mx.array, keys: mx.array, values: mx.array) -> None:
    """Put rows ``[1, kv heads, rows, 256]`` into `keys` and `values` ``[1, kv heads, room, 256]`` at `position`.

    position, room: int32, of which the first number counts.

    Raises:
        KernelError: heads of another size, types that differ, or a launch that is not recorded.
    """
    if k.shape != v.shape or k.shape[3] != HEAD_DIM or len({a.dtype for a in (k, v, keys, values)}) > 1:
        raise KernelError(f"keep_metal takes rows of heads of {HEAD_DIM} and one type")
    kernel = loader.load(TOPIC)["keep"]
    loader.launch(
        Launch(
            kernel,
            (k, v, position, room),
            kernel.arguments(T=k.dtype),
            grid=(k.shape[1] * SIMD, k.shape[2], 1),
            threadgroup=(SIMD, 1, 1),
            shapes=[keys.shape, values.shape],
            dtypes=[keys.dtype, values.dtype],
            into=(keys, values),
        )
    )


def settle_metal(chosen: mx.array, best: mx.array, into: tuple[mx.array, mx.array, mx.array, mx.array]) -> None:
    """Hand tokens on, chosen uint32 ``[rows]``: `into` is token, position, finite and ring, as the kernel says.

    Raises:
        KernelError: a launch that is not recorded.
    """
    kernel = loader.load(TOPIC)["settle"]
    loader.launch(
        Launch(
            kernel,
            (chosen, best),
            kernel.arguments(RING=RING, ROWS=chosen.shape[0]),
            grid=(SIMD, 1, 1),
            threadgroup=(SIMD, 1, 1),
            shapes=[array.shape for array in into],
            dtypes=[array.dtype for array in into],
            into=into,
        )
    )


def slide_metal(new: Sequence[mx.array], kept: mx.array, now: mx.array, before: mx.array, *, back: bool) -> None:
    """Move the convolutions' rows on by new ones, or back to as if there had been fewer.

    Args:
        new: of each layer ``[1, rows, channels]``, row-contiguous. kept: uint32, how many count where they go `back`.
        now, before: ``[layers, 3, channels]``, written: what is read next, and what was before the new rows.

    Raises:
        KernelError: more than `MOST_LAYERS` layers, shapes and types that differ, or a launch that is not recorded.
    """
    layers, (_, rows, channels) = len(new), new[0].shape
    fits = all(array.shape == (1, rows, channels) for array in new) and now.shape == before.shape == (
        layers,
        3,
        channels,
    )
    kinds = {array.dtype for array in (*new, now, before)}
    if not 0 < layers <= MOST_LAYERS or not fits or len(kinds) > 1 or channels % 8:
        raise KernelError(
            f"slide_metal takes rows [1, rows, channels] of 1 to {MOST_LAYERS} layers, one type, for {list(now.shape)}"
        )
    kernel = loader.load(TOPIC)["slide"]
    threads = -(-channels * now.dtype.size // 16 // 128) * 128
    loader.launch(
        Launch(
            kernel,
            (*new, *[new[0]] * (MOST_LAYERS - layers), kept),
            kernel.arguments(T=now.dtype, LAYERS=layers, ROWS=rows, BACK=back),
            grid=(threads, layers, 1),
            threadgroup=(128, 1, 1),
            shapes=[now.shape, before.shape],
            dtypes=[now.dtype, before.dtype],
            into=(now, before),
        )
    )


def back_metal(kept: mx.array, states: mx.array) -> None:
    """Make number `kept` (uint32) of each layer's states, float32 ``[layers, slots, heads, 128, 128]``, the first.

    Raises:
        KernelError: another type or size, or a launch that is not recorded.
    """
    layers, slots = states.shape[:2]
    numbers = states.size // (layers * slots)
    if states.dtype != mx.float32 or numbers % 1024:
        raise KernelError(f"back_metal takes float32 states of a multiple of 1024 numbers, not {list(states.shape)}")
    kernel = loader.load(TOPIC)["back"]
    loader.launch(
        Launch(
            kernel,
            (kept,),
            kernel.arguments(SLOTS=slots, NUMBERS=numbers),
            grid=(numbers // 4, layers, 1),
            threadgroup=(256, 1, 1),
            shapes=[states.shape],
            dtypes=[states.dtype],
            into=(states,),
        )
    )
