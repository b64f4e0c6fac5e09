"""Sizes, tiles and inputs on which the kernels of `decode_attention` are tried."""

from __future__ import annotations

from itertools import product

import mlx.core as mx

from engine.kernels import attention
from engine.ops import OPS
from engine.ops.registry import Case

OP = OPS["decode_attention"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
TILES = list(product(attention.HEADS, attention.SPLITS, attention.LANES))
BLOCKS = 3
SIZES = [
    # rows, keys, key/value heads, position (-1: none), positions the cache has room for past the keys it shows
    (1, 1, 2, -1, 0),
    (1, 63, 2, -1, 0),
    (1, 77, 1, 76, 3),
    (1, 300, 1, 130, 20),
    (1, 260, 2, 0, 0),
    (3, 259, 1, -1, 5),
    (2, 66, 2, 31, 0),
]


def settings(tile: tuple[str, str, str]) -> dict[str, object]:
    heads, split, lanes = tile
    return {"heads": heads, "split": split, "lanes": lanes, "blocks": BLOCKS}


def arguments(size: tuple[int, int, int, int, int], dtype: mx.Dtype) -> tuple:
    """The op's arguments; keys and values show a part of a larger cache."""
    rows, n, kv, at, room = size
    case = Case("", {"rows": rows, "n": n + room, "kv": kv, "at": at})
    q, keys, values, scale, position = OP.inputs(case, dtype, 0)
    if room:
        # What lies past the shown part must not be read.
        keys[:, :, n:], values[:, :, n:] = float("nan"), float("nan")
    return q, keys[:, :, :n], values[:, :, :n], scale, position
