"""Snapshots, canonical state and files: exact, or refused."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.cache import Cache, CacheError, PagedCache, RecentCache, RecentPages, bucket_for
from engine.config import CacheConfig, DecodeConfig, EngineConfig, SpeculativeConfig
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


def paged(trace: str = "eager", **fields) -> Engine:
    config = EngineConfig(decode=DecodeConfig(trace=trace), cache=CacheConfig(layout="paged"), **fields)
    return Engine(TINY, make_weights(TINY, 0, dtype=mx.float32), config)


def scramble(engine: Engine) -> None:
    """Another order of the pool's pages, with what they hold."""
    cache = engine.cache
    assert isinstance(cache, PagedCache)
    pages = cache.pooled // 256
    order = np.random.default_rng(5).permutation(pages)
    for name in ("keys", "values"):
        for i, pool in enumerate(cache.state[name]):
            cut = pool.reshape(1, pool.shape[1], pages, 256, -1)
            cache.state[name][i] = mx.contiguous(cut[:, :, mx.array(np.argsort(order))]).reshape(pool.shape)
    cache.state["pages"] = mx.array([*order.tolist(), *cache.state["pages"].tolist()[pages:]], dtype=mx.int32)


def some_state(positions: int) -> dict[str, mx.array]:
    """A canonical state of that length, of random numbers."""
    shapes = {
        "keys": (len(TINY.attention_layers), TINY.num_key_value_heads, positions, TINY.head_dim),
        "state": (
            len(TINY.linear_layers),
            TINY.linear_num_value_heads,
            TINY.linear_value_head_dim,
            TINY.linear_key_head_dim,
        ),
        "conv": (len(TINY.linear_layers), TINY.linear_conv_kernel_dim - 1, TINY.conv_dim),
    }
    shapes["values"] = shapes["keys"]
    return {name: mx.random.normal(shape, key=mx.random.key(i)) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("trace", ["eager", "layer", "step"])
def test_pages_in_any_order_give_what_a_contiguous_cache_gives(engine, trace):
    """From the pool into an extension: a pass with rows on both sides of the seam, steps before and behind it."""
    pages = paged(trace)
    made = []
    for each in (engine, pages):
        each.reset()
        each.import_state(some_state(507))
        if each is pages:
            scramble(pages)
        tokens = each.decode(5, 3)
        each.prefill(C[:6], last=False)
        made.append((tokens, each.decode(7, 2)))
    assert isinstance(pages.cache, PagedCache)
    assert made[0] == made[1]
    assert equal(pages.export_state(), engine.export_state())
    assert pages.cache.capacity > pages.cache.pooled == 512
    assert {line["variant"] for line in pages.executed() if line["op"].endswith("attention")} == {"gathered"}


def test_growth_by_pages_leaves_the_others_where_they_are():
    cache = PagedCache(TINY, mx.float32)
    cache.reserve(300)
    assert (cache.capacity, cache.pooled) == (512, 512)
    before = list(cache.state["keys"])
    cache.reserve(513)
    assert (cache.capacity, cache.pooled) == (768, 512)
    assert all(a is b for a, b in zip(before, cache.state["keys"], strict=True))
    cache.reserve(769)
    assert (cache.capacity, cache.pooled) == (1024, 768)
    assert cache.state["pages"].tolist() == [0, 1, 2, -1]


def test_pages_are_restored_exported_and_loaded_like_a_contiguous_cache(engine):
    pages = paged()
    engine.reset()
    state = some_state(600)
    for each in (engine, pages):
        each.import_state(state)
    snapshot = pages.snapshot()
    assert equal(pages.export_state(), state)
    pages.decode(3, 3)
    pages.restore(snapshot)
    assert equal(pages.export_state(), state)
    assert np.array_equal(np.array(pages.logits(C)), np.array(engine.logits(C)))
    pages.reset()
    assert pages.prefill(C[:9]) == paged().prefill(C[:9])


@pytest.mark.parametrize("layout", [RecentCache, RecentPages])
def test_rows_that_stood_apart_are_forgotten_with_their_sequence(layout):
    """One that began without a prefill has all its rows apart, from position 0 on, where the next one's come to lie."""
    config = tiny_config(4)
    told, cache = Cache(config, mx.float32), layout(config, mx.float32)
    told.reserve(3)
    told.state["keys"] = [mx.ones_like(keys) for keys in told.state["keys"]]
    told.seek(3)
    cache.reserve(5)
    cache.moved(5)
    cache.load(told.export())
    assert cache.export()["keys"].min().item() == 1


def test_drafts_are_verified_over_pages():
    """Verifications of several rows whose place is on the device, on both sides of the seam too."""
    tokens, scores = C[:16], []
    for layout in ("contiguous", "paged"):
        drafting = SpeculativeConfig(drafter="ngram", depth=3)
        config = EngineConfig(decode=DecodeConfig(trace="step"), cache=CacheConfig(layout=layout), speculative=drafting)
        made = Engine(TINY, make_weights(TINY, 0, dtype=mx.float32), config)
        made.import_state(some_state(507))
        scores.append(np.array(made.logits(tokens, phase="decode")))
        assert any(line["op"] == "verify" for line in made.executed())
    assert np.array_equal(*scores)
