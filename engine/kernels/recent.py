"""The last positions' keys and values of all layers in one small array, made anew at each step in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.kernels import loader
from engine.kernels.attention import HEAD_DIM
from engine.kernels.loader import SIMD, KernelError, Launch

TOPIC = "recent_decode"
MOST_LAYERS = 10
SIMDGROUPS = 8


def update_metal(
    recent: mx.array, first: mx.array, position: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array]
) -> mx.array:
    """`recent` with new rows put in place.

    Args:
        recent: ``[1, layers * 2 * kv heads, room, 256]``, each layer's key heads, then its value heads; room a multiple
            of 8. Row-contiguous.
        first, position: int32 ``[at least 1]``, the positions of its first row and of the first new row.
        keys: of each layer ``[1, kv heads, rows, 256]``; values: ``[1, rows, kv heads * 256]``. Row-contiguous.

    Raises:
        KernelError: more layers than `MOST_LAYERS`, or shapes and types that do not fit.
    """
    layers, rows = len(keys), keys[0].shape[2]
    _, planes, room, dim = recent.shape
    kv = planes // (2 * layers)
    fits = {k.shape for k in keys} == {(1, kv, rows, dim)} and {v.shape for v in values} == {(1, rows, kv * dim)}
    kinds = {array.dtype for array in (recent, *keys, *values)}
    if not 0 < layers <= MOST_LAYERS or not fits or dim != HEAD_DIM or len(kinds) > 1 or room % SIMDGROUPS:
        raise KernelError(
            f"update_metal takes rows of 1 to {MOST_LAYERS} layers, [1, kv heads, rows, {HEAD_DIM}] and "
            f"[1, rows, kv heads * {HEAD_DIM}] of one type, for {list(recent.shape)}"
        )
    kernel = loader.load(TOPIC)["update"]
    # What is not read is the first layer's again.
    rows_of_all = [[*given, *([given[0]] * (MOST_LAYERS - layers))] for given in (keys, values)]
    (updated,) = loader.launch(
        Launch(
            kernel,
            (recent, first, position, *rows_of_all[0], *rows_of_all[1]),
            kernel.arguments(T=recent.dtype, LAYERS=layers, ROWS=rows, SIMDGROUPS=SIMDGROUPS),
            grid=(room * SIMD, planes, 1),
            threadgroup=(SIMDGROUPS * SIMD, 1, 1),
            shapes=[recent.shape],
            dtypes=[recent.dtype],
        )
    )
    return updated
