"""Sizes, tiles and inputs on which the kernels of `decode_attention` are tried."""

from __future__ import annotations

import dataclasses
from itertools import product

import mlx.core as mx
import numpy as np

from engine.kernels import attention
from engine.ops import OPS
from engine.ops.registry import Case
from engine.pages import PAGE, Paged, Recent

OP = OPS["decode_attention"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
SCALAR = ("coalesced", "apart")
MATRIX = ("tiles", "tiles_ahead")
TILES = [*product(attention.HEADS, attention.SPLITS, SCALAR), *product(("8",), attention.SPLITS, MATRIX)]
PAGED_TILES = [tile for tile in TILES if tile[2] in SCALAR]
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
PAGED_SIZES = [(1, 600, 1, -1, 0), (1, 512, 2, 299, 0), (2, 770, 1, 700, 0)]
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


def paged_arguments(given: tuple, seed: int = 0) -> tuple:
    """The same arguments with keys and values in pages, in an order of their own, the last of several in an extension.

    What lies past the shown positions is NaN, and so are pages that no position belongs to.
    """
    q, keys, values, scale, position = given
    positions, dim = keys.shape[2], keys.shape[3]
    pages = -(-positions // PAGE) or 1
    more = 1 if pages > 1 else 0
    order = np.random.default_rng(seed).permutation(pages - more + 1)[: pages - more]
    table = mx.array([*order.tolist(), *([-2] if more else [])], dtype=mx.int32)

    def paged(rows: mx.array) -> Paged:
        nothing = mx.full((1, rows.shape[1], PAGE, dim), float("nan"), rows.dtype)
        rest = mx.full((1, rows.shape[1], pages * PAGE - positions, dim), float("nan"), rows.dtype)
        padded = mx.concatenate([rows, rest], axis=2)
        cut = [padded[:, :, i * PAGE : (i + 1) * PAGE] for i in range(pages)]
        places = {int(place): part for place, part in zip(order, cut)}
        pool = mx.concatenate([places.get(i, nothing) for i in range(pages - more + 1)], axis=2)
        held = mx.concatenate([nothing, cut[-1]], axis=2) if more else None
        return Paged(pool, held, table, positions, min(positions, (pages - more) * PAGE))

    return q, paged(keys), paged(values), scale, position


def recent_arguments(
    size: tuple[int, int, int, int], apart: int, dtype: mx.Dtype, paged: bool = False
) -> tuple[tuple, tuple]:
    """The variant's arguments with the last `apart` cached positions apart, and the op's that ask for the same.

    What is stale in the cache, and what has no position yet in the rows apart, is NaN.
    """
    (q, keys, values, scale, position), fresh, whole = fresh_arguments(size, dtype)
    rows, before, kv, _ = size
    first = before - apart
    room = max(size[3], rows)

    def parted(stored: mx.array, new: mx.array) -> Recent:
        stale = mx.full((1, kv, apart + room, 256), float("nan"), dtype)
        # As planes of the array of all layers lie.
        rest = mx.full((1, kv, 5, 256), float("nan"), dtype)
        recent = mx.concatenate([stored[:, :, first:before], rest], axis=2)
        planes = mx.concatenate([mx.full(recent.shape, float("nan"), dtype), recent], axis=1)[:, kv:]
        return Recent(mx.concatenate([stored[:, :, :first], stale], axis=2), planes, mx.array([first] * 4), new)

    parts = parted(keys, fresh[0]), parted(values, fresh[1])
    if paged:
        _, *pages, _, _ = paged_arguments((q, *(part.stored for part in parts), scale, None))
        parts = tuple(dataclasses.replace(part, stored=held) for part, held in zip(parts, pages))
    given = (q, *parts, scale, mx.array([before], dtype=mx.int32))
    return given, whole
