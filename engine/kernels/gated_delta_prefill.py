"""`gated_delta` over many rows by our own kernels: a scan with the state in registers, and the chunked form.

On an H200 a layer of 32 value heads took, over 2048 rows of bfloat16, 0.31 ms in chunks (64x2x2; 64x1x4 0.54) and 0.49
as a scan (8x2x8; 8x2x4 0.52); as mx ops 7.2, by MLX's op 474.

Both begin with one launch that prepares all rows (convolution, norms, gates) and end with one for the gated norm.
Between them the scan takes one launch and runs in any type; the chunked form takes two, on matrix units, which know
16-bit types only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.gated_delta import DIM, check, supports
from engine.kernels.loader import SIMD, KernelError, Launch

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.weights import GatedDelta

__all__ = ["CHUNK_TILES", "SCAN_TILES", "chunked", "scan", "supports"]

TOPIC = "gated_delta_prefill"
SCAN_TILES = ("8x2x8", "8x2x4", "8x2x2", "8x1x4", "8x1x8", "4x1x4", "16x4x4")
"""Lanes that share a value column, columns of a lane, simdgroups of a threadgroup; the first is the default."""
CHUNK_TILES = ("64x2x2", "64x1x4", "64x1x8", "32x1x4", "32x2x4", "16x1x4")
"""Rows of a chunk, column tiles of a simdgroup, simdgroups of a threadgroup; the first is the default."""
STEPS = 8
"""Rows that are prepared, and staged by the scan, as one block."""
SIMDGROUPS = 4
"""Simdgroups of a threadgroup where rows are independent."""

Result = tuple[mx.array, list[mx.array], mx.array]


def scan(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv: Sequence[mx.array],
    state: mx.array,
    w: GatedDelta,
    sizes: tuple[int, int, int, int],
    *,
    tile: str = SCAN_TILES[0],
) -> Result:
    """Arguments and result as the op says, row by row with the state in registers; heads of 128, any number of rows.

    The state must be row-contiguous; qkv, z, b and a may be parts of larger arrays whose last axis is dense, else NaN
    comes out.

    tile: one of `SCAN_TILES`.

    Raises:
        KernelError: another head size, types that differ, or a tile that does not exist.
    """
    check(qkv, z, conv, state, w, sizes)
    lanes, columns, simdgroups = _numbers(tile, SCAN_TILES)
    *prepared, conv = _prepare(qkv, b, a, conv, w, sizes, STEPS)
    kernel = loader.load(TOPIC)["scan"]
    value_heads, padded, _ = prepared[2].shape
    read, new = loader.launch(
        Launch(
            kernel,
            (*prepared, state),
            kernel.arguments(T=qkv.dtype, LANES=lanes, HELD=columns, SIMDGROUPS=simdgroups),
            grid=(DIM // columns * lanes, value_heads, 1),
            threadgroup=(simdgroups * SIMD, 1, 1),
            shapes=[(value_heads, padded, DIM), state.shape],
            dtypes=[mx.float32, mx.float32],
        )
    )
    return _norm(read, z, w), conv, new


def chunked(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv: Sequence[mx.array],
    state: mx.array,
    w: GatedDelta,
    sizes: tuple[int, int, int, int],
    *,
    tile: str = CHUNK_TILES[0],
) -> Result:
    """Like `scan`, in chunks on matrix units; rows of bfloat16 or float16.

    tile: one of `CHUNK_TILES`.

    Raises:
        KernelError: as `scan`, and rows of float32.
    """
    check(qkv, z, conv, state, w, sizes)
    if qkv.dtype not in (mx.bfloat16, mx.float16):
        raise KernelError(f"the chunked kernels of gated_delta take rows of bfloat16 or float16, not {qkv.dtype}")
    chunk, columns, simdgroups = _numbers(tile, CHUNK_TILES)
    *prepared, conv = _prepare(qkv, b, a, conv, w, sizes, chunk)
    kernels = loader.load(TOPIC)
    key_heads, (value_heads, padded, _) = prepared[0].shape[0], prepared[2].shape
    chunks, blocks = padded // chunk, chunk // 16
    made = loader.launch(
        Launch(
            kernels["solve"],
            prepared,
            kernels["solve"].arguments(T=qkv.dtype, CHUNK=chunk),
            grid=(chunks * blocks * SIMD, value_heads, 1),
            threadgroup=(blocks * SIMD, 1, 1),
            shapes=[
                (value_heads, chunks, blocks, 8, SIMD, 8),
                (value_heads, chunks, 16, blocks, SIMD, 4),
                (value_heads, chunks, blocks * (blocks + 1) // 2, SIMD, 8),
                (key_heads, chunks, blocks, 8, SIMD, 8),
                (key_heads, chunks, 8, blocks, SIMD, 8),
                (value_heads, chunks, chunk, 2),
            ],
            dtypes=[qkv.dtype, mx.float32, qkv.dtype, qkv.dtype, qkv.dtype, mx.float32],
        )
    )
    read, new = loader.launch(
        Launch(
            kernels["carry"],
            (*made, state),
            kernels["carry"].arguments(T=qkv.dtype, CHUNK=chunk, TILES=columns, SIMDGROUPS=simdgroups),
            grid=(16 // columns * SIMD, value_heads, 1),
            threadgroup=(simdgroups * SIMD, 1, 1),
            shapes=[(value_heads, padded, DIM), state.shape],
            dtypes=[mx.float32, mx.float32],
        )
    )
    return _norm(read, z, w), conv, new


def _numbers(tile: str, known: tuple[str, ...]) -> tuple[int, ...]:
    """The numbers of a tile that exists."""
    if tile not in known:
        raise KernelError(f"gated_delta over many rows has no tile {tile}; there are {', '.join(known)}")
    return tuple(map(int, tile.split("x")))


def _prepare(
    qkv: mx.array,
    b: mx.array,
    a: mx.array,
    conv: Sequence[mx.array],
    w: GatedDelta,
    sizes: tuple[int, int, int, int],
    block: int,
) -> tuple[mx.array, mx.array, mx.array, mx.array, list[mx.array]]:
    """Queries, keys, values and gates by head, rows rounded up to a multiple of `block`; the new convolution rows."""
    key_heads, _, value_heads, _ = sizes
    padded = -(-qkv.shape[1] // block) * block
    units = key_heads + -(-value_heads // 2)
    kernel = loader.load(TOPIC)["prepare"]
    row = (1, 1, qkv.shape[2])
    queries, keys, values, gates, *rows = loader.launch(
        Launch(
            kernel,
            (qkv, b, a, *conv, w.conv, w.a_log, w.dt_bias),
            kernel.arguments(T=qkv.dtype, SIMDGROUPS=SIMDGROUPS),
            grid=(-(-units // SIMDGROUPS) * SIMDGROUPS * SIMD, padded // STEPS, 1),
            threadgroup=(SIMDGROUPS * SIMD, 1, 1),
            shapes=[*[(key_heads, padded, DIM)] * 2, (value_heads, padded, DIM), (value_heads, padded, 4), *[row] * 3],
            dtypes=[*[qkv.dtype] * 3, mx.float32, *[qkv.dtype] * 3],
        )
    )
    return queries, keys, values, gates, rows


def _norm(read: mx.array, z: mx.array, w: GatedDelta) -> mx.array:
    """The gated norm of a read-out by head, in the rows' own order and type."""
    kernel = loader.load(TOPIC)["norm"]
    units = z.shape[1] * read.shape[0]
    (out,) = loader.launch(
        Launch(
            kernel,
            (read, z, w.norm),
            kernel.arguments(T=z.dtype, O=z.dtype, SIMDGROUPS=SIMDGROUPS),
            grid=(-(-units // (2 * SIMDGROUPS)) * SIMDGROUPS * SIMD, 1, 1),
            threadgroup=(SIMDGROUPS * SIMD, 1, 1),
            shapes=[z.shape],
            dtypes=[z.dtype],
        )
    )
    return out
