"""Sizes, tiles and inputs on which the kernels of `decode_attention` are tried."""

from __future__ import annotations

from itertools import product

import mlx.core as mx

from engine.kernels import attention
from engine.ops import OPS
from engine.ops.registry import Case

OP = OPS["decode_attention"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
SCALAR = ("coalesced", "apart")
MATRIX = ("tiles", "tiles_ahead")
TILES = [*product(attention.HEADS, attention.SPLITS, SCALAR), *product(("8",), attention.SPLITS, MATRIX)]
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
FRESH_SIZES = [
    # rows, positions before them, key/value heads, room past those positions (-1: none, and no position is given)
    (1, 77, 2, 3),
    (8, 130, 1, 20),
    (1, 63, 2, -1),
    (2, 0, 1, 40),
    (3, 255, 1, 1),
]


def kind(tile: tuple[str, str, str], name: str) -> str:
    """The element type to try a tile with when `name` is asked for: matrix tiles have no float32."""
    return "float16" if tile[2] in MATRIX and name == "float32" else name


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


def fresh_arguments(size: tuple[int, int, int, int], dtype: mx.Dtype) -> tuple[tuple, tuple, tuple]:
    """The variant's arguments and its `fresh`, and the op's arguments that ask for the same.

    Fresh values are a view of a product's output, as a layer has them.
    """
    rows, before, kv, room = size
    q, keys, values, scale, _ = OP.inputs(Case("", {"rows": rows, "n": before + rows, "kv": kv, "at": -1}), dtype, 0)
    flat = mx.contiguous(values[:, :, before:].swapaxes(1, 2)).reshape(1, rows, -1)
    fresh = mx.contiguous(keys[:, :, before:]), flat.reshape(1, rows, kv, -1).swapaxes(1, 2)
    # What lies past the positions before the new rows must not be read.
    rest = mx.full((1, kv, max(room, 0), q.shape[3]), float("nan"), dtype)
    cache = [mx.concatenate([part[:, :, :before], rest], axis=2) for part in (keys, values)]
    position = None if room < 0 else mx.array([before], dtype=mx.int32)
    return (q, *cache, scale, position), fresh, (q, keys, values, scale, None)
