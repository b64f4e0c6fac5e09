"""Prefill attention by tiles: equal to the reference wherever a tile ends, within the room for scores it may take."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine.config import EngineConfig
from engine.ops import OPS, attention, bind, relative_rms

OP = OPS["prefill_attention"]


def given(rows: int, n: int, dtype: mx.Dtype = mx.float32, kv: int = 1) -> tuple:
    """The op's arguments."""
    return OP.inputs(attention._case(rows, n, kv), dtype, 0)


def test_a_tile_has_as_many_rows_as_fit():
    assert attention.tile_rows(16, 2048, 2) == 256
    assert attention.tile_rows(16, 131_072, 2) == 64
    assert attention.tile_rows(16, 1 << 24, 2) == 16


@pytest.mark.parametrize("rows", [9, 15, 16, 17, 31, 33, 48])
@pytest.mark.parametrize("before", [0, 1, 40])
def test_tiles_agree_with_the_reference_at_their_edges(rows, before, monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 1)
    for dtype, kv in ((mx.float32, 1), (mx.bfloat16, 2)):
        arguments = given(rows, rows + before, dtype, kv)
        error = relative_rms(attention.attention_tiled(*arguments), OP.reference.run(*arguments))
        assert error <= OP.tolerance[str(dtype).rpartition(".")[2]]


def test_room_for_scores_does_not_grow_with_rows_times_positions(monkeypatch):
    """All scores at once would take 38 MB, twelve times what is allowed."""
    monkeypatch.setattr(attention, "SCORE_BYTES", 3 << 20)
    arguments = given(600, 2000)
    mx.eval(arguments)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attention.attention_tiled(*arguments))
    # A tile's scores and weights, of two tiles, and the outputs.
    assert mx.get_peak_memory() - before < 4 * (3 << 20) + 2 * arguments[0].nbytes


def test_cuda_where_mlx_keeps_all_scores_takes_tiles():
    """MLX's fused kernel ends at a head dim of 128 there. Past 8192 positions ours is slower than products."""
    bound, named = (bind(EngineConfig(prefill_attention=name), "cuda").prefill_attention for name in ("best", "metal"))

    def at(positions: int) -> tuple[str, str]:
        given = (None, mx.zeros((1, 1, positions, 1)))
        return bound.pick(512, given)[0].name, named.pick(512, given)[0].name

    assert [at(512), at(8192), at(8193)] == [("metal", "metal"), ("metal", "metal"), ("tiled", "metal")]
