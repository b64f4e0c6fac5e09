"""Sizes, tiles and inputs on which the kernels of `gated_delta` over many rows are tried."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
from gated_delta_cases import OP, arguments, error

from engine.kernels import gated_delta_prefill as prefill

FORMS = {
    "scan": (prefill.scan, prefill.SCAN_TILES, ("bfloat16", "float32", "float16")),
    "chunked": (prefill.chunked, prefill.CHUNK_TILES, ("bfloat16", "float16")),
}
"""Function, tiles and types of each form."""
CHOICES = [(form, tile) for form, (_, tiles, _) in FORMS.items() for tile in tiles]
SIZES = [
    # rows, key heads, value heads, how slow the state decays (negative: g underflows); one a tile
    (9, 1, 2, 4),
    (1, 2, 4, 8),
    (31, 1, 3, 4),
    (2, 1, 1, 8),
    (16, 2, 2, -20),
    (3, 1, 4, 4),
    (24, 1, 2, 12),
    (63, 1, 2, 8),
    (64, 1, 1, -20),
    (65, 2, 4, 4),
    (33, 1, 3, 12),
    (129, 1, 1, 8),
    (47, 2, 2, 4),
]


def extreme(name: str, size: tuple[int, int, int, int], dtype: mx.Dtype) -> tuple:
    """Arguments whose gates stand at an end, or whose rows are all alike."""
    qkv, z, b, a, conv, state, w, sizes = arguments(size, dtype)
    if "deaf" in name:
        b = mx.full(b.shape, -1e4, dtype)
    if "eager" in name:
        b = mx.full(b.shape, 1e4, dtype)
    if "lasting" in name:
        a = mx.full(a.shape, -1e4, dtype)
    if "fleeting" in name:
        a, w = mx.full(a.shape, 50, dtype), replace(w, a_log=mx.full(w.a_log.shape, 3.0))
    if "abrupt" in name:
        # The state goes within a row now and then, and stays otherwise.
        forgets = (mx.arange(a.shape[1]) % 5 == 3)[None, :, None]
        a, w = (
            mx.where(forgets, 50, mx.full(a.shape, -1e4)).astype(dtype),
            replace(w, a_log=mx.full(w.a_log.shape, 3.0)),
        )
    if "alike" in name:
        qkv = mx.contiguous(mx.broadcast_to(qkv[:, :1], qkv.shape))
    return qkv, z, b, a, conv, state, w, sizes


EXTREMES = ("deaf", "eager lasting", "fleeting", "eager abrupt", "eager lasting alike", "lasting")


def worst(form: str, given: tuple, tile: str) -> float:
    """Worst relative RMS error of a form, as a part of the op's tolerance."""
    result = FORMS[form][0](*given, tile=tile)
    return error(given, result) / OP.tolerance[str(given[0].dtype).rpartition(".")[2]]
