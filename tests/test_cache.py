"""Snapshots, canonical state and files: exact, or refused."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.cache import Cache, CacheError, bucket_for
from engine.config import DecodeConfig, EngineConfig
from engine.generate import Engine
from engine.synthetic import make_weights, tiny_config

TINY = tiny_config(4)
RNG = np.random.default_rng(11)
A, B, C = (RNG.integers(0, 440, n).tolist() for n in (150, 60, 45))


@pytest.fixture(scope="module")
def engine():
    return Engine(TINY, make_weights(TINY, 0, dtype=mx.float32), EngineConfig(decode=DecodeConfig(trace="eager")))


def equal(a: dict, b: dict) -> bool:
    return all(np.array_equal(np.array(a[k]), np.array(b[k])) for k in a)


def test_restore_is_bit_equal_and_another_continuation_equals_a_fresh_one(engine):
    """Keys trimmed while recurrent state stays behind pollutes the next turn; nothing but an exact test shows it."""
    engine.reset()
    engine.prefill(A, last=False)
    snapshot, before = engine.snapshot(), engine.export_state()
    engine.prefill(B, last=False)
    engine.decode(3, 9)
    engine.restore(snapshot)
    assert equal(engine.export_state(), before)
    got = np.array(engine.logits(C))
    after = engine.export_state()
    engine.reset()
    engine.prefill(A, last=False)
    assert np.array_equal(np.array(engine.logits(C)), got)
    assert equal(engine.export_state(), after)


def test_a_snapshot_holds_no_keys(engine):
    engine.reset()
    engine.prefill(A, last=False)
    snapshot = engine.snapshot()
    held = sum(a.nbytes for a in (*snapshot.recurrent, *sum(snapshot.conv, ())))
    assert held == TINY.state_bytes(itemsize=4)


def test_rolling_back_every_step_equals_never_having_stepped(engine):
    engine.reset()
    token = engine.prefill(A)
    plain = engine.snapshot()
    want = engine.decode(token, 20)
    engine.restore(plain)
    got, current = [], token
    for _ in range(20):
        here = engine.snapshot()
        engine.decode(7, 3)
        engine.restore(here)
        current = engine.decode(current, 1)[0]
        got.append(current)
    assert got == want


def test_restoring_past_the_cache_is_refused(engine):
    engine.reset()
    engine.prefill(A, last=False)
    snapshot = engine.snapshot()
    engine.reset()
    with pytest.raises(CacheError, match="position 150, the cache holds 0"):
        engine.restore(snapshot)


def test_a_saved_state_reloads_and_continues_bit_equal(engine, tmp_path):
    engine.reset()
    engine.prefill(A, last=False)
    engine.save(tmp_path / "state.safetensors", A)
    want = np.array(engine.logits(B))
    engine.reset()
    assert engine.load(tmp_path / "state.safetensors") == A
    assert engine.position == len(A)
    assert np.array_equal(np.array(engine.logits(B)), want)


def test_a_state_of_another_model_is_refused(engine, tmp_path):
    other = Cache(tiny_config(8), mx.float32)
    other.reserve(4)
    other.seek(4)
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(CacheError, match="this model needs"):
        engine.load(tmp_path / "other.safetensors")
    (tmp_path / "torn").write_bytes(b"\x00\x01")
    with pytest.raises(CacheError, match="cannot read"):
        engine.load(tmp_path / "torn")


def test_growth_keeps_what_is_cached():
    cache = Cache(TINY, mx.float32, step=16)
    cache.reserve(16)
    filled = mx.random.normal(cache.state["keys"][0].shape, key=mx.random.key(0))
    cache.state["keys"][0] = filled + 0
    cache.seek(16)
    cache.reserve(17)
    assert cache.capacity == 32
    assert np.array_equal(np.array(cache.state["keys"][0][..., :16, :]), np.array(filled))


@pytest.mark.parametrize("positions", [1, 255, 256, 257, 4096, 5000, 32_768, 100_000, 131_073])
def test_a_bucket_covers_the_positions_and_wastes_little(positions):
    bucket = bucket_for(positions)
    assert positions <= bucket <= max(positions * 1.04, positions + 256)
    assert bucket % 256 == 0


def test_state_is_float32_whatever_the_activation_type():
    cache = Cache(TINY, mx.bfloat16)
    assert {a.dtype for a in cache.state["recurrent"]} == {mx.float32}
    assert {a.dtype for rows in cache.state["conv"] for a in rows} == {mx.bfloat16}
