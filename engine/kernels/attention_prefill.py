"""`prefill_attention` by our own kernel: the variant `metal`, with no array of scores at any length.

Two launches: keys and values are laid out as matrix tiles, then each simdgroup walks over them with the tokens of a
head. The room it takes beside its result is as much as the keys and values that it is shown.

On an H200, 16 heads over 2 key/value heads, bfloat16, 2048 rows: over 2048 keys 0.45 ms (16x4; 16x8 0.53) where MLX's
op takes 0.66 and products over tiles of rows 1.35; over 8192 1.79 and 1.74; over 32,768 11.8 and 3.75, over 131,072
49.8 and 18.8: past 8192 keys products win.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.ops.registry import Case

TOPIC = "attention_prefill"
HEAD_DIM = 256
TILES = ("16x4", "16x8", "8x8", "8x4")
"""Tokens of a simdgroup, simdgroups (heads) of a threadgroup; the first is the default."""
KEYS = 32
"""Keys of one step."""
LAY_SIMDGROUPS = 2


def supports(case: Case | None, device: str) -> str | None:
    """Needs a GPU."""
    return None if device in ("metal", "cuda") else "the kernel runs on Metal and CUDA, not on a CPU"


def attention_metal(q: mx.array, keys: mx.array, values: mx.array, scale: float, *, tile: str = TILES[0]) -> mx.array:
    """Causal softmax attention of new rows that are the last of the keys; shapes as the op says, head_dim 256.

    Types of 16 bits. q, keys and values may be parts of larger arrays whose last axis is dense, else NaN comes out. The
    result is a view of an array laid out ``[1, rows, heads, 256]``.

    tile: one of `TILES`; simdgroups beyond the heads that share a key/value head, or not their divisor, are fewer.

    Raises:
        KernelError: another head_dim or type, or a tile that does not exist.
    """
    _, heads, rows, dim = q.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    kinds = {q.dtype, keys.dtype, values.dtype}
    if dim != HEAD_DIM or len(kinds) > 1 or q.dtype not in (mx.bfloat16, mx.float16):
        raise KernelError(
            f"prefill_attention=metal takes head_dim {HEAD_DIM} and one type of 16 bits, "
            f"not {dim} and {', '.join(sorted(map(str, kinds)))}"
        )
    if tile not in TILES:
        raise KernelError(f"prefill_attention=metal has no tile {tile}; there are {', '.join(TILES)}")
    tokens, simdgroups = map(int, tile.split("x"))
    simdgroups = math.gcd(simdgroups, heads // kv_heads)
    blocks = -(-n // KEYS) * KEYS // 16
    kernels = loader.load(TOPIC)
    laid = loader.launch(
        Launch(
            kernels["lay"],
            (keys, values),
            kernels["lay"].arguments(T=q.dtype, SIMDGROUPS=LAY_SIMDGROUPS),
            grid=(blocks * SIMD, kv_heads, 1),
            threadgroup=(LAY_SIMDGROUPS * SIMD, 1, 1),
            shapes=[(kv_heads, blocks, 16, SIMD, 8)] * 2,
            dtypes=[q.dtype] * 2,
        )
    )
    (out,) = loader.launch(
        Launch(
            kernels["attend"],
            (q, keys, *laid),
            kernels["attend"].arguments(
                T=q.dtype,
                TOKENS=tokens,
                SIMDGROUPS=simdgroups,
                SCALE_BITS=loader.float_bits(scale * math.log2(math.e)),
            ),
            grid=(-(-rows // tokens) * simdgroups * SIMD, heads // simdgroups, 1),
            threadgroup=(simdgroups * SIMD, 1, 1),
            shapes=[(1, rows, heads, HEAD_DIM)],
            dtypes=[q.dtype],
        )
    )
    return out.swapaxes(1, 2)
