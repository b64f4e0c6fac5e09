"""`decode_attention` by our own kernels: the variant `metal`, one text for Metal and CUDA.

Its settings choose template instances, so that each can be switched: how many query heads share a fetch, how positions
are divided, and whether a simdgroup's lanes read neighbouring words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch
from engine.pages import Paged, Recent

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.ops.registry import Case

TOPIC = "attention_decode"
HEAD_DIM = 256
CHUNK = 256
"""Positions per part when keys are split in chunks."""
HEADS = ("8", "4", "2", "1")
SPLITS = ("none", "chunks", "blocks")
LANES = ("coalesced", "apart", "tiles", "tiles_ahead")
SPACE = (
    *({"heads": heads, "split": "blocks", "lanes": "coalesced"} for heads in HEADS),
    *({"heads": "8", "split": split, "lanes": lanes} for lanes in LANES[2:] for split in SPLITS),
    *({"heads": "8", "split": split, "lanes": "coalesced"} for split in ("none", "chunks")),
)
"""What the tuner tries; lanes that read apart are there to be compared with, not to be chosen."""
TILE_HEADS = 8
"""Query heads of a matrix tile."""
NO_PAGED_TILES = "matrix tiles read keys and values in one piece, not in pages; take coalesced or apart"
LEAST_PART = {"coalesced": 32, "apart": 32, "tiles": 64, "tiles_ahead": 64}
"""Positions of a part below which another part costs more than it saves."""
SPLIT_SIMDGROUPS = 4
MERGE_SIMDGROUPS = 8
_LOG2_E = 1.4426950408889634


def supports(case: Case | None, device: str) -> str | None:
    """Needs a GPU."""
    return None if device in ("metal", "cuda") else "the kernel runs on Metal and CUDA, not on a CPU"


def defaults(device: str) -> dict[str, str]:
    """Settings that are left at ``"best"``; `heads` depends on the model, so it stays ``"best"`` until a call."""
    return {"split": "blocks", "lanes": "best" if device == "cuda" else "coalesced"}


@lru_cache(maxsize=64)
def _at(position: int) -> mx.array:
    """int32 ``[1]``, kept evaluated: made afresh it is a launch in every layer."""
    made = loader.in_device_memory(mx.array([position], dtype=mx.int32))
    mx.eval(made)
    return made


def heads_per_fetch(heads: str, group: int) -> int:
    """Query heads that share a fetch: `heads`, or for ``"best"`` as many as the group of a key/value head allows.

    Raises:
        KernelError: `heads` is no such number, or does not divide the group.
    """
    if heads == "best":
        return next(int(h) for h in HEADS if group % int(h) == 0)
    if heads not in HEADS or group % int(heads):
        raise KernelError(f"decode_attention.heads={heads}: {group} query heads share a key/value head; take a divisor")
    return int(heads)


Pair = tuple[mx.array, mx.array]
Kept = mx.array | Paged | Recent


@dataclass(frozen=True)
class _Rows:
    """Keys and values as the kernels read them; what is None is not read, and no input.

    more, table: of pages. recent, first: of rows that stand apart.
    """

    stored: Pair
    fresh: Pair | None = None
    more: Pair | None = None
    table: mx.array | None = None
    recent: Pair | None = None
    first: mx.array | None = None

    @property
    def inputs(self) -> list[mx.array]:
        """In the order of the kernels' texts."""
        tables = [() if array is None else (array,) for array in (self.table, self.first)]
        return [
            *self.stored,
            *(self.fresh or ()),
            *(self.more or ()),
            *tables[0],
            *(self.recent or ()),
            *tables[1],
        ]


def _rows(keys: Kept, values: Kept, fresh: Pair | None) -> _Rows:
    if isinstance(keys, Recent) and isinstance(values, Recent):
        held = _rows(keys.stored, values.stored, (keys.fresh, values.fresh))
        return replace(held, recent=(keys.recent, values.recent), first=keys.first)
    if isinstance(keys, Paged) and isinstance(values, Paged):
        stored = keys.pool, values.pool
        more = stored if keys.more is None or values.more is None else (keys.more, values.more)
        return _Rows(stored, fresh, more, keys.table)
    assert isinstance(keys, mx.array) and isinstance(values, mx.array)
    return _Rows((keys, values), fresh)


def attention_metal(
    q: mx.array,
    keys: Kept,
    values: Kept,
    scale: float,
    position: mx.array | None = None,
    *,
    heads: str = "best",
    split: str = "blocks",
    lanes: str = "best",
    blocks: int = 128,
    fresh: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Softmax attention of 1 to 8 new rows; arguments and result as the op says, head_dim 256.

    Every key and value is read once per `heads` query heads and row. Keys and values may be the used part of a larger
    cache, lie in pages of one table, or be `Recent`, which brings its own `fresh`; an input whose last axis is not
    dense gives NaN.

    heads: query heads that share a fetch: ``1``, ``2``, ``4``, ``8``; ``best`` is as many as divide the group.
    split: ``none`` (one part, one launch), ``chunks`` (256 positions each, their number grows with the cache) or
        ``blocks`` (`blocks` parts, their length grows; fewer where the keys shown would leave them too short).
    lanes: ``coalesced`` (neighbouring 16-byte words), ``apart``, or, for 8 heads a fetch and 16-bit types, ``tiles``
        (neighbouring words as matrix tiles) and ``tiles_ahead`` (the same with every load of a step under way first).
        ``best`` is ``tiles_ahead`` where it can be: on an H200 the quickest from 4K on, at 128K 52 us against 185 of
        ``coalesced``, and 1 us behind at 512.
    fresh: keys and values of the new rows themselves, ``[1, kv heads, rows, 256]``; `keys` and `values` then give the
        positions before `position` alone (None: all that they hold), and the new rows need not be in the cache yet.

    Raises:
        KernelError: another head_dim, types that differ, a setting that does not exist, tiles for float32 or for fewer
            than 8 heads a fetch, or other rows than q's in `fresh`.
    """
    _, n_heads, rows, dim = q.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    held = _rows(keys, values, fresh)
    fresh = held.fresh
    kinds = [array.dtype for array in (q, *held.stored, *(held.more or ()), *(held.recent or ()), *(fresh or ()))]
    if dim != HEAD_DIM or len(set(kinds)) > 1:
        raise KernelError(
            f"decode_attention=metal takes head_dim {HEAD_DIM} and one type, not {dim} and {', '.join(map(str, kinds))}"
        )
    if fresh is not None and any(array.shape != (1, kv_heads, rows, dim) for array in fresh):
        shapes = " and ".join(str(list(array.shape)) for array in fresh)
        raise KernelError(f"decode_attention=metal: fresh rows are {[1, kv_heads, rows, dim]}, not {shapes}")
    if lanes == "best":
        packed = heads_per_fetch(heads, n_heads // kv_heads)
        fits = packed == TILE_HEADS and q.dtype != mx.float32 and held.table is None
        lanes = "tiles_ahead" if fits else "coalesced"
    if split not in SPLITS or lanes not in LANES or blocks < 1:
        raise KernelError(f"decode_attention=metal has no split={split} lanes={lanes} blocks={blocks}")
    packed = heads_per_fetch(heads, n_heads // kv_heads)
    tiles = lanes.startswith("tiles")
    if tiles and (packed != TILE_HEADS or q.dtype == mx.float32):
        raise KernelError(
            f"decode_attention.lanes={lanes} takes {TILE_HEADS} heads a fetch and a 16-bit type, "
            f"not {packed} and {q.dtype}; take lanes=coalesced"
        )
    paged = held.more is not None
    if paged and tiles:
        raise KernelError(f"decode_attention.lanes={lanes}: {NO_PAGED_TILES}")
    # Without `fresh` the new rows are the last of the keys.
    start = n - rows if fresh is None else n
    most = -(-(start + rows) // LEAST_PART[lanes])
    parts = {"none": 1, "chunks": -(-(start + rows) // CHUNK), "blocks": min(blocks, most)}[split]
    final = parts == 1
    kernel = loader.load(TOPIC)["tiles" if tiles else "split"]
    own: dict[str, int | bool] = {"AHEAD": lanes == "tiles_ahead"}
    if not tiles:
        own = {"G": packed, "COALESCED": lanes == "coalesced", "PAGED": paged}
    if fresh is None:
        kernel = kernel.without(fresh_keys="keys", fresh_values="values")
    if not paged and not tiles:
        kernel = kernel.without(more_keys="keys", more_values="values", places="position")
    if held.recent is None:
        kernel = kernel.without(recent_keys="keys", recent_values="values", recent_from="position")
    width = SPLIT_SIMDGROUPS * SIMD
    partial, sums = loader.launch(
        Launch(
            kernel,
            (
                q,
                *held.inputs,
                _at(start) if position is None else position,
            ),
            kernel.arguments(
                T=q.dtype,
                O=q.dtype if final else mx.float32,
                SIMDGROUPS=SPLIT_SIMDGROUPS,
                CHUNK=CHUNK if split == "chunks" else 0,
                FINAL=final,
                FRESH=fresh is not None,
                RECENT=held.recent is not None,
                SCALE_BITS=loader.float_bits(scale * _LOG2_E),
                **own,
            ),
            grid=(parts * rows * width, n_heads // packed, 1) if tiles else (parts * width, n_heads // packed, rows),
            threadgroup=(width, 1, 1),
            shapes=[(n_heads, rows, parts, HEAD_DIM), (n_heads, rows, parts, 2)],
            dtypes=[q.dtype if final else mx.float32, mx.float32],
        )
    )
    if final:
        return partial.reshape(1, n_heads, rows, HEAD_DIM)
    kernel = loader.load(TOPIC)["merge"]
    (out,) = loader.launch(
        Launch(
            kernel,
            (partial, sums),
            kernel.arguments(T=q.dtype, SIMDGROUPS=MERGE_SIMDGROUPS),
            grid=(2 * MERGE_SIMDGROUPS * SIMD, n_heads * rows, 1),
            threadgroup=(MERGE_SIMDGROUPS * SIMD, 1, 1),
            shapes=[(n_heads, rows, HEAD_DIM)],
            dtypes=[q.dtype],
        )
    )
    return out.reshape(1, n_heads, rows, HEAD_DIM)
