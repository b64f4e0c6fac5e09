"""`gated_delta` by our own kernel: the variant `registers`, one text for Metal and CUDA.

One launch does all of a Gated DeltaNet layer between its projections, for any number of rows, with the state in
registers from the first row to the last. Its tile says how many value columns a simdgroup holds and how many
simdgroups share the convolution of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.ops.registry import Case
    from engine.weights import GatedDelta

TOPIC = "gated_delta_decode"
DIM = 128
"""Key and value dim of a head."""
TILES = ((4, 2), (4, 4), (4, 8), (8, 2), (8, 4), (8, 8), (16, 2), (16, 4))
"""(value columns of a simdgroup, simdgroups of a threadgroup) where the gated norm is left to the next product."""
NORMED_TILES = ((8, 16), (16, 8))
"""The same where the kernel applies it: a threadgroup then holds all columns of a head."""
STAGED = 8
"""Rows that are convolved at once where there are several."""


def supports(case: Case | None, device: str) -> str | None:
    """Needs a GPU."""
    return None if device in ("metal", "cuda") else "the kernel runs on Metal and CUDA, not on a CPU"


def gated_delta_metal(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv: Sequence[mx.array],
    state: mx.array,
    w: GatedDelta,
    sizes: tuple[int, int, int, int],
    *,
    columns: int = 8,
    simdgroups: int | None = None,
    normed: bool = True,
    dtype: mx.Dtype | None = None,
) -> tuple[mx.array, list[mx.array], mx.array]:
    """Arguments and result as the op says; heads of 128. With `normed` False the read-out is returned ungated.

    A state of several, ``[rows, value heads, 128, 128]``, of which the first is read, asks for the state after every
    row: the result has that shape, the state after all rows first, that after fewer rows at their number.

    The state must be row-contiguous; qkv, z, b and a may be parts of larger arrays whose last axis is dense, else NaN
    comes out. Up to eight rows the new convolution rows are views of `qkv`, not copies.

    columns, simdgroups: one of `TILES` or, with `normed`, of `NORMED_TILES`; simdgroups None takes 4 or what is
        left to make 128 columns.
    dtype: of the result; None: as qkv.

    Raises:
        KernelError: another head size, types that differ, as many states as neither one nor rows, or a tile that does
            not exist.
    """
    key_heads, key_dim, value_heads, value_dim = sizes
    check(qkv, z, conv, state, w, sizes)
    tile = (columns, simdgroups or (DIM // columns if normed else 4))
    if tile not in (NORMED_TILES if normed else TILES):
        raise KernelError(f"gated_delta=registers has no tile of {tile[0]} columns x {tile[1]} simdgroups")
    rows, states = qkv.shape[1], state.shape[0]
    if states not in (1, rows):
        raise KernelError(f"gated_delta=registers keeps the last state or one for each of {rows} rows, not {states}")
    kernel = loader.load(TOPIC)["step"]
    out, new = loader.launch(
        Launch(
            kernel,
            (qkv, z, b, a, *conv, state, w.conv, w.a_log, w.dt_bias, w.norm),
            kernel.arguments(
                T=qkv.dtype,
                O=dtype or qkv.dtype,
                ROWS=1 if rows == 1 else STAGED,
                COLUMNS=columns,
                SIMDGROUPS=tile[1],
                NORMED=normed,
                EACH=states > 1,
            ),
            grid=(DIM // columns * SIMD, value_heads, 1),
            threadgroup=(tile[1] * SIMD, 1, 1),
            shapes=[(1, rows, value_heads * DIM), state.shape],
            dtypes=[dtype or qkv.dtype, mx.float32],
        )
    )
    return out, _last_rows(qkv, conv), new


def check(
    qkv: mx.array, z: mx.array, conv: Sequence[mx.array], state: mx.array, w: GatedDelta, sizes: tuple[int, ...]
) -> None:
    """Refuse what the kernels of this op would misread.

    Raises:
        KernelError: another head size or convolution, or types that differ.
    """
    if sizes[1] != DIM or sizes[3] != DIM or w.conv.shape[1] != 4:
        raise KernelError(
            f"the kernels of gated_delta take heads of {DIM} and a convolution of 4, not {sizes[1]}, {sizes[3]} "
            f"and {w.conv.shape[1]}"
        )
    kinds = [array.dtype for array in (qkv, z, *conv, w.conv)]
    if len(set(kinds)) > 1 or state.dtype != mx.float32:
        raise KernelError(
            f"the kernels of gated_delta take one type for rows and convolution and a float32 state, "
            f"not {', '.join(map(str, [*kinds, state.dtype]))}"
        )


def _last_rows(qkv: mx.array, conv: Sequence[mx.array]) -> list[mx.array]:
    """The three rows that the next call convolves with."""
    rows = qkv.shape[1]
    if rows == 1:
        return [*conv[1:], qkv]
    last = [qkv[:, row : row + 1] for row in range(max(rows - 3, 0), rows)]
    if rows > STAGED:
        # A view would keep every row alive in the cache.
        last = [mx.contiguous(row) for row in last]
    return [*conv, *last][-3:]
