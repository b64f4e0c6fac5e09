"""`decode_attention` and `prefill_attention`: softmax attention of new rows over the cache.

Both take ``q [1, heads, rows, head_dim]``, ``keys`` and ``values [1, kv heads, n, head_dim]``, the score scale,
and `position`. With `position` None the last new row sees all n keys and earlier rows see fewer (causal, lower
right). With `position` an int32 array ``[1]`` (the cache position of the first new row, on the device) keys past
each row's own are masked, so that one traced step serves every position below n. They return
``[1, heads, rows, head_dim]``. Variants that `reads_pages` also take keys and values as `engine.pages.Paged`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from engine.device import device_kind
from engine.kernels import attention as kernels
from engine.kernels import attention_prefill as prefill
from engine.memory import SCORE_BYTES
from engine.ops import geometry
from engine.ops.registry import Case, Op, Variant, declare, same_order
from engine.pages import Paged

SPLIT_CHUNK = 256
"""Positions per part when keys are split in chunks."""


@lru_cache(maxsize=64)
def _count(n: int) -> mx.array:
    """``0 … n-1``, kept evaluated: made afresh it is a launch in every layer."""
    made = mx.arange(n)
    mx.eval(made)
    return made


def _visible(rows: int, n: int, position: mx.array | None) -> mx.array | None:
    """Boolean ``[rows, n]``: which keys each row sees; None if all see all."""
    if position is None:
        if rows == 1:
            return None
        position = mx.array([n - rows], dtype=mx.int32)
    last = position if rows == 1 else position + _count(rows)[:, None]
    return _count(n)[None] <= last


def attention_reference(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, position: mx.array | None = None
) -> mx.array:
    """Scores, softmax and sum in float32, one query head at a time per key/value head."""
    groups = q.shape[1] // keys.shape[1]
    wide_k = mx.repeat(keys.astype(mx.float32), groups, axis=1)
    wide_v = mx.repeat(values.astype(mx.float32), groups, axis=1)
    scores = (q.astype(mx.float32) * scale) @ wide_k.swapaxes(-1, -2)
    visible = _visible(q.shape[2], keys.shape[2], position)
    if visible is not None:
        scores = mx.where(visible, scores, -mx.inf)
    return (mx.softmax(scores, axis=-1) @ wide_v).astype(q.dtype)


def attention_mlx(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, position: mx.array | None = None
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`; MLX picks its fused kernel or its composition by shape and device."""
    rows = q.shape[2]
    if position is None:
        mask: Any = "causal" if rows > 1 else None
    else:
        mask = _visible(rows, keys.shape[2], position)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def attention_matmul(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    position: mx.array | None = None,
    *,
    split: str = "none",
    blocks: int = 128,
) -> mx.array:
    """All query heads of a key/value head as the rows of one product, so that each key and value is read once.

    split: how the sum over positions is divided: ``none`` (one product), ``chunks`` (256 positions each) or
    ``blocks`` (a fixed number); partial sums are then added. The last part may be shorter.
    """
    _, heads, rows, dim = q.shape
    kv, n = keys.shape[1], keys.shape[2]
    # Squeezed, never indexed: an integer index is a gather, and here a copy of the whole cache.
    k, v = keys.squeeze(0), values.squeeze(0)
    packed = q.reshape(kv, heads // kv * rows, dim)
    scores = (packed @ k.swapaxes(-1, -2)).reshape(kv, heads // kv, rows, n) * scale
    visible = _visible(rows, n, position)
    if visible is not None:
        scores = mx.where(visible, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(kv, -1, n)
    part = {"none": n, "chunks": SPLIT_CHUNK, "blocks": -(-n // blocks)}[split]
    if part >= n:
        out = weights @ v
    else:
        whole = n // part * part
        parts = weights[..., :whole].reshape(kv, -1, whole // part, part).swapaxes(1, 2)
        # Partial sums are added in float32: in bfloat16 hundreds of them would lose what splitting gains.
        sums = (parts @ v[:, :whole].reshape(kv, whole // part, part, dim)).astype(mx.float32).sum(axis=1)
        if whole < n:
            sums = sums + (weights[..., whole:] @ v[:, whole:]).astype(mx.float32)
        out = sums.astype(q.dtype)
    return out.reshape(1, heads, rows, dim)


def tile_rows(heads: int, n: int, size: int) -> int:
    """New rows whose scores over n positions, `size` bytes each, fill at most `SCORE_BYTES`: 16 to 256."""
    return max(16, min(256, SCORE_BYTES // (heads * n * size) // 16 * 16))


def attention_tiled(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, position: mx.array | None = None
) -> mx.array:
    """Packed products over tiles of new rows, each seeing only the keys it may: at most `SCORE_BYTES` of scores a tile.

    Where all scores would take more than twice that, the host waits for each tile while the next one runs: MLX makes
    room for whatever is submitted, whether its turn has come or not.
    """
    _, heads, rows, dim = q.shape
    kv, n = keys.shape[1], keys.shape[2]
    if position is not None:
        return attention_matmul(q, keys, values, scale, position)
    k, v = keys.squeeze(0).swapaxes(-1, -2), values.squeeze(0)
    # Scaled before the product: it is the smaller array by far.
    q = (q * scale).reshape(kv, heads // kv, rows, dim)
    tile, out = tile_rows(heads, n, q.dtype.size), []
    crowded = heads * rows * n * q.dtype.size > 2 * SCORE_BYTES
    for start in range(0, rows, tile):
        part = q[:, :, start : start + tile]
        count = part.shape[2]
        first, end = n - rows + start, n - rows + start + count
        packed = part.reshape(kv, -1, dim)
        scores = packed @ k[:, :, :end]
        if count > 1:
            # Only the last keys are hidden from any row. Their scores are made anew and put in place, so that no pass
            # over all scores is spent on a mask.
            own = (packed @ k[:, :, first:end]).reshape(kv, -1, count, count)
            own = mx.where(mx.tri(count, dtype=mx.bool_), own, mx.finfo(own.dtype).min)
            scores[:, :, first:end] = own.reshape(kv, -1, count)
        weights = mx.softmax(scores, axis=-1, precise=True)
        out.append((weights @ v[:, :end]).reshape(kv, heads // kv, count, dim))
        if crowded:
            del scores, weights
            mx.async_eval(out[-1])
            mx.eval(out[-2:-1])
    return mx.concatenate(out, axis=2).reshape(1, heads, rows, dim)


def attention_fused(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    position: mx.array | None = None,
    *,
    tile: str = prefill.TILES[0],
) -> mx.array:
    """Our kernel, which keeps no scores, for 16-bit rows whose position the host knows; else `attention_tiled`.

    tile: one of the kernel's.
    """
    if position is not None or q.dtype == mx.float32:
        return attention_tiled(q, keys, values, scale, position)
    return prefill.attention_metal(q, keys, values, scale, tile=tile)


def in_one_piece(rows: mx.array | Paged) -> mx.array:
    """Keys or values as one array, pages gathered."""
    return rows.gathered() if isinstance(rows, Paged) else rows


def attention_gathered(
    q: mx.array,
    keys: mx.array | Paged,
    values: mx.array | Paged,
    scale: float,
    position: mx.array | None = None,
    *,
    split: str = "none",
    blocks: int = 128,
) -> mx.array:
    """`attention_matmul` over keys and values that are first gathered into one array each, if they lie in pages."""
    return attention_matmul(q, in_one_piece(keys), in_one_piece(values), scale, position, split=split, blocks=blocks)


def attention_gathered_prefill(
    q: mx.array, keys: mx.array | Paged, values: mx.array | Paged, scale: float, position: mx.array | None = None
) -> mx.array:
    """MLX's op on Metal, tiles elsewhere, over keys and values that are first gathered, if they lie in pages."""
    run = attention_mlx if device_kind() == "metal" else attention_tiled
    return run(q, in_one_piece(keys), in_one_piece(values), scale, position)


def settled(arguments: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for the keys that are shown: fewer than `min_context` are split in chunks instead of blocks.

    What is shown is part of a trace's shapes, so a traced step never changes its split.
    """
    settings = dict(settings)
    if settings.pop("min_context") > arguments[1].shape[2] and settings["split"] == "blocks":
        settings["split"] = "chunks"
    return settings


def _inputs(case: Case, dtype: mx.Dtype, seed: int) -> tuple[Any, ...]:
    dim, n, rows = 256, case["n"], case["rows"]
    k1, k2, k3 = (mx.random.key(seed + i) for i in range(3))
    q = mx.random.normal((1, 8 * case["kv"], rows, dim), key=k1).astype(dtype)
    keys = mx.random.normal((1, case["kv"], n, dim), key=k2).astype(dtype)
    values = mx.random.normal((1, case["kv"], n, dim), key=k3).astype(dtype)
    at = case["at"]
    return q, keys, values, dim**-0.5, None if at < 0 else mx.array([at], dtype=mx.int32)


def _case(rows: int, n: int, kv: int = 2, at: int = -1) -> Case:
    """`at` is the device position of the first row, -1 for none."""
    return Case(f"{rows}over{n}kv{kv}" + (f"at{at}" if at >= 0 else ""), {"rows": rows, "n": n, "kv": kv, "at": at})


def _op(
    name: str, summary: str, variants: tuple[Variant, ...], cases: tuple[Case, ...], order: Any, far: Any = None
) -> Op:
    return declare(
        Op(
            name=name,
            summary=summary,
            variants={v.name: v for v in variants},
            cases=cases,
            inputs=_inputs,
            timing=getattr(geometry, name),
            context=lambda q, keys, *_: keys.shape[2],
            order=order,
            far=far or {},
            tolerance={"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3},
            least_bytes=lambda c: 2 * 256 * (2 * c["kv"] * c["n"] + 2 * 8 * c["kv"] * c["rows"]),
            least_flops=lambda c: 4 * 256 * 8 * c["kv"] * c["n"] * c["rows"],
        )
    )


def _matmul_defaults(device: str) -> dict[str, Any]:
    return {"split": "chunks" if device == "cuda" else "none"}


_REFERENCE = Variant("reference", attention_reference, "float32 scores, softmax and sum")
_MLX = Variant("mlx", attention_mlx, "mx.fast.scaled_dot_product_attention")

DECODE_ATTENTION = _op(
    "decode_attention",
    "attention of 1 to 8 new rows over the cache",
    (
        _REFERENCE,
        _MLX,
        Variant(
            "matmul",
            attention_matmul,
            "query heads of a key/value head packed as rows of one product",
            space=tuple({"split": split} for split in kernels.SPLITS),
            settings=("split", "blocks", "min_context"),
            defaults=_matmul_defaults,
            settled=settled,
        ),
        Variant(
            "metal",
            kernels.attention_metal,
            "our kernel: query heads packed on one fetch, positions divided, one text for Metal and CUDA",
            supports=kernels.supports,
            space=kernels.SPACE,
            settings=("heads", "split", "lanes", "blocks", "min_context"),
            defaults=kernels.defaults,
            settled=settled,
            reads_pages=True,
        ),
        Variant(
            "gathered",
            attention_gathered,
            "pages gathered into one array, then as matmul; a contiguous cache is read as it lies",
            settings=("split", "blocks", "min_context"),
            defaults=_matmul_defaults,
            settled=settled,
            reads_pages=True,
        ),
    ),
    (_case(1, 1), _case(1, 63), _case(1, 512, at=300), _case(1, 768, kv=1, at=0), _case(5, 77), _case(8, 512, at=200)),
    # On CUDA and on a CPU the masked form of MLX's op is no fused kernel; packed products read each key once.
    same_order(("mlx",), cuda_decode=("matmul", "mlx"), cpu_decode=("matmul",)),
)

PREFILL_ATTENTION = _op(
    "prefill_attention",
    "causal attention of a chunk over the cache and itself",
    (
        _REFERENCE,
        _MLX,
        Variant("tiled", attention_tiled, "packed products over tiles of up to 256 rows, score memory bounded"),
        Variant(
            "metal",
            attention_fused,
            "our kernel: matrix tiles with a running maximum and sum, no scores kept, one text for Metal and CUDA",
            supports=prefill.supports,
            tiles=prefill.TILES,
        ),
        Variant(
            "gathered",
            attention_gathered_prefill,
            "pages gathered into one array, then mlx on Metal, else tiled; a contiguous cache is read as it lies",
            reads_pages=True,
        ),
    ),
    (_case(9, 9), _case(70, 70), _case(33, 150), _case(300, 300, kv=1), _case(257, 700)),
    # MLX's fused kernel for CUDA ends at a head dim of 128; past it all scores are kept at once. For what ours takes
    # there, and from where products of tiles of rows take less, see `engine.kernels.attention_prefill`.
    same_order(("mlx",), cuda_prefill=("metal", "tiled"), cpu_prefill=("tiled",)),
    far={("cuda", "prefill"): (8192, "tiled")},
)
