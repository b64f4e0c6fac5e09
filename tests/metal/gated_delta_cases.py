"""Sizes, tiles and inputs on which the kernel of `gated_delta` is tried."""

from __future__ import annotations

import mlx.core as mx

from engine.kernels import gated_delta
from engine.ops import OPS, relative_rms
from engine.ops.gated_delta import _gated_norm
from engine.ops.registry import Case

OP = OPS["gated_delta"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
Tile = tuple[int, int, bool]
TILES: list[Tile] = [
    *((columns, simdgroups, False) for columns, simdgroups in gated_delta.TILES),
    *((columns, simdgroups, True) for columns, simdgroups in gated_delta.NORMED_TILES),
]
"""(value columns, simdgroups, whether the gated norm is applied)."""
SIZES = [
    # rows, key heads, value heads, how slow the state decays (negative: g underflows)
    (1, 1, 2, 4),
    (3, 2, 4, 4),
    (1, 2, 2, -20),
    (2, 1, 1, 8),
    (11, 1, 2, 4),
    (8, 1, 2, 4),
    (5, 1, 4, 8),
]


def named(tile: Tile) -> str:
    columns, simdgroups, normed = tile
    return f"{columns}x{simdgroups}{'n' if normed else ''}"


def settings(tile: Tile) -> dict[str, object]:
    return dict(zip(("columns", "simdgroups", "normed"), tile))


def arguments(
    size: tuple[int, int, int, int], dtype: mx.Dtype, seed: int = 0, apart: bool = True, faint: bool = False
) -> tuple:
    """The op's arguments; unless `apart`, qkv, z, b and a are parts of one array, as one product leaves them.

    With `faint` the rows are so small that the ε of the l2 norm counts.
    """
    rows, key_heads, value_heads, slow = size
    case = Case("", {"rows": rows, "key_heads": key_heads, "value_heads": value_heads, "slow": slow})
    given = OP.inputs(case, dtype, seed)
    if faint:
        given = (0.01 * given[0], *given[1:4], [0.01 * row for row in given[4]], *given[5:])
    if apart:
        return given
    widths = [part.shape[-1] for part in given[:4]]
    ends = [sum(widths[: i + 1]) for i in range(4)]
    # Rows start on a line of 128 bytes, as they do in the full model.
    rest = mx.full((1, rows, -ends[3] % 64), float("nan"), dtype)
    return (*mx.split(mx.concatenate([*given[:4], rest], axis=-1), ends, axis=-1)[:4], *given[4:])


def error(given: tuple, result: tuple, want: tuple | None = None, normed: bool = True) -> float:
    """Worst relative RMS error of output, convolution rows and state; a read-out is normed here first."""
    out, conv, state = result
    want = OP.reference.run(*given) if want is None else want
    if not normed:
        out = _gated_norm(out.reshape(1, out.shape[1], -1, gated_delta.DIM), given[1], given[6])
    rows = [relative_rms(got, kept) for got, kept in zip(conv, want[1], strict=True)]
    return max(relative_rms(out, want[0]), relative_rms(state, want[2]), *rows)
