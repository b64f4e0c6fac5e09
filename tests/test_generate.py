"""Prefill, decode and sampling: the same tokens by every path, nothing that grows, clear refusals."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import psutil
import pytest
from scipy import stats

from engine.checkpoint import load
from engine.config import (
    ConfigError,
    DecodeAttentionConfig,
    DecodeConfig,
    EngineConfig,
    ExpertsConfig,
    PrefillConfig,
    SpeculativeConfig,
)
from engine.device import activation_dtype, second_stream
from engine.generate import MOST_TRACES, Engine, NonFinite, Sampling, sample
from engine.ops import VariantUnsupported, experts
from engine.synthetic import make_weights, tiny_config
from engine.tiny import CHECKPOINT

TINY = tiny_config(4)
IDS = np.random.default_rng(7).integers(0, 440, 200).tolist()


@pytest.fixture(scope="module")
def weights():
    return make_weights(TINY, 0, dtype=mx.float32)


def make(weights, **fields) -> Engine:
    return Engine(TINY, weights, EngineConfig(**{"decode": DecodeConfig(trace="eager"), **fields}), vocabulary=453)


@pytest.fixture(scope="module")
def expected(weights):
    engine = make(weights)
    return engine.decode(engine.prefill(IDS), 24)


@pytest.mark.parametrize("trace", ["eager", "layer", "step"])
@pytest.mark.parametrize("feedback", ["device", "host"])
def test_every_way_of_driving_a_step_gives_the_same_tokens(weights, expected, trace, feedback):
    engine = make(weights, decode=DecodeConfig(trace=trace, feedback=feedback, in_flight=3))
    assert engine.decode(engine.prefill(IDS), 24) == expected


@pytest.mark.parametrize("submission", ["chunk", "layer"])
@pytest.mark.parametrize("chunk", [512, 64, 199])
def test_chunks_and_waits_do_not_change_the_tokens(weights, expected, chunk, submission):
    engine = make(weights, prefill=PrefillConfig(chunk=chunk, submission=submission))
    assert engine.decode(engine.prefill(IDS), 24) == expected
    assert ("prefill_pass", f"chunk={chunk}") in {(e["op"], e["tile"]) for e in engine.executed()}


def test_stretches_do_not_change_the_tokens_and_are_told(weights, expected):
    engine = make(weights, prefill=PrefillConfig(chunk=64, stretch=1))
    assert engine.decode(engine.prefill(IDS), 24) == expected
    assert ("prefill_pass", "chunk=64 stretch=1") in {(e["op"], e["tile"]) for e in engine.executed()}


def test_generate_yields_what_decode_does_and_ends_at_a_stop_id(weights, expected):
    first = make(weights).prefill(IDS)
    engine = make(weights)
    assert list(engine.generate(IDS, 25)) == [first, *expected]
    engine.reset()
    stop = expected[5]
    want = [first, *expected]
    assert list(engine.generate(IDS, 25, stop_ids=[stop])) == want[: want.index(stop)]


def test_a_seed_fixes_the_sampled_tokens(weights):
    how = Sampling(temperature=0.9, top_k=20, top_p=0.95)
    runs = [list(make(weights).generate(IDS[:20], 12, how, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_padded_tail_is_never_generated(weights):
    tokens = list(make(weights).generate(IDS[:5], 60, Sampling(temperature=50.0), seed=3))
    assert max(tokens) < 453


def test_stamps_are_read_once_a_token_in_order(weights):
    engine = make(weights)
    ticks = iter(range(100))
    ids, stamps = engine.decode(engine.prefill(IDS[:9]), 5, clock=lambda: next(ticks))
    assert len(ids) == 5 and stamps == [0, 1, 2, 3, 4]


def test_progress_reports_every_chunk(weights):
    seen = []
    make(weights, prefill=PrefillConfig(chunk=512)).prefill(IDS, progress=lambda d, t: seen.append((d, t)))
    engine = make(weights)
    engine.engine.prefill.chunk = 90
    engine.prefill(IDS, progress=lambda d, t: seen.append((d, t)))
    assert seen == [(200, 200), (90, 200), (180, 200), (200, 200)]


def test_hundreds_of_steps_leave_memory_and_objects_flat(weights):
    engine = make(weights, decode=DecodeConfig(trace="step"))
    engine.prefill(IDS)
    engine.cache.reserve(700)
    engine.decode(5, 64)
    gc.collect()
    objects, resident, active = len(gc.get_objects()), psutil.Process().memory_info().rss, mx.get_active_memory()
    engine.decode(5, 400)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert psutil.Process().memory_info().rss - resident < 8 << 20
    assert mx.get_active_memory() - active < 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", ["off", "full"])
def test_twenty_thousand_steps_leave_memory_and_objects_flat(fusion):
    """A counter left lazy once leaked one buffer a layer and step: bytes stayed flat until the device had no more."""
    loaded = load(CHECKPOINT, activation_dtype(), mtp=False)
    settings = EngineConfig(decode=DecodeConfig(trace="step", fusion=fusion))
    if fusion == "full":
        settings.decode_attention.variant = "metal"
    engine = Engine(loaded.config, loaded.weights, settings)
    first = engine.prefill(list(range(40, 60)))
    assert first is not None
    engine.cache.reserve(4200)
    begin = engine.snapshot()
    engine.decode(first, 4000)
    gc.collect()
    objects, resident, active = len(gc.get_objects()), psutil.Process().memory_info().rss, mx.get_active_memory()
    for _ in range(5):
        engine.restore(begin)
        engine.decode(first, 4000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
    assert psutil.Process().memory_info().rss - resident < 32 << 20
    assert mx.get_active_memory() - active < 1 << 20


def test_log_probabilities_are_computed_when_asked_for(weights, expected):
    engine = make(weights, decode=DecodeConfig(trace="eager", logprobs=True))
    assert engine.decode(engine.prefill(IDS), 24) == expected
    assert abs(float(mx.exp(engine.cache.state["logprobs"]).sum().item()) - 1) < 1e-3


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least one token"),
        ([-1], "token id -1"),
        ([512], "token id 512"),
        ([1] * 5000, "context of 4096"),
        ([1, 2.5], "type int, got float, int"),
        ([None], "type int, got NoneType"),
        (np.array([1, 2]), "got int64; .tolist"),
    ],
)
def test_bad_tokens_are_refused_by_name(weights, tokens, message):
    with pytest.raises(ValueError, match=message):
        make(weights).prefill(tokens)


@pytest.mark.parametrize("first", [-1, 512, 10**7, 1.5])
@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_a_token_to_decode_from_is_looked_at_too(weights, first, drafter):
    """An embedding row far outside its matrix ends the process."""
    engine = make(weights, speculative=SpeculativeConfig(drafter))
    engine.prefill(IDS[:4])
    with pytest.raises(ValueError, match="token id"):
        engine.decode(first, 2)
    assert engine.position == 4 and len(engine.decode(5, 2)) == 2


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_is_none_is_refused(weights, seed):
    with pytest.raises(ValueError, match="seed must be from 0"):
        next(make(weights).generate(IDS[:4], 2, Sampling(1.0), seed=seed))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": PrefillConfig(chunk=0)}, "engine.prefill.chunk=0: must be at least 1"),
        ({"prefill": PrefillConfig(chunk=-5)}, "prefill.chunk=-5"),
        ({"prefill": PrefillConfig(stretch=-1)}, "prefill.stretch=-1: must be at least 0"),
        ({"prefill": PrefillConfig(submission="never")}, "submission='never': must be one of chunk, layer"),
        ({"speculative": SpeculativeConfig("mtp3")}, "drafter='mtp3': must be one of off, mtp"),
        ({"speculative": SpeculativeConfig("ngram", depth=0)}, "depth=0: must be at least 1"),
        ({"speculative": SpeculativeConfig("ngram", depth=2.5)}, "depth=2.5: must be of type int"),
        ({"speculative": SpeculativeConfig("ngram", rollback="none")}, "rollback='none': must be one of"),
    ],
)
def test_settings_given_in_python_are_checked_as_those_of_files_are(weights, fields, message):
    """A negative chunk once failed by an assertion, and a depth of 0 drafted nothing without a word."""
    with pytest.raises(ConfigError, match=message):
        make(weights, **fields)


def test_a_non_finite_logit_stops_the_run(weights):
    broken = dict(weights.tensors)
    broken["model.norm.weight"] = broken["model.norm.weight"] * float("nan")
    engine = make(type(weights).from_tensors(TINY, broken))
    with pytest.raises(NonFinite, match="not finite"):
        engine.prefill(IDS[:4])


@pytest.mark.parametrize("trace", ["eager", "layer", "step"])
def test_a_state_gone_bad_stops_a_decode_and_a_stream(weights, trace):
    """NaN in one layer's state once made an engine go on with noise at full speed."""
    engine = make(weights, decode=DecodeConfig(trace=trace))
    engine.prefill(IDS[:20])
    engine.cache.state["recurrent"][1] = engine.cache.state["recurrent"][1] * float("nan")
    with pytest.raises(NonFinite, match="not finite"):
        engine.decode(5, 4)
    engine.reset()
    stream = engine.generate(IDS[:20], 8)
    next(stream)
    engine.cache.state["recurrent"][1] = engine.cache.state["recurrent"][1] * float("nan")
    with pytest.raises(NonFinite, match="not finite"):
        list(stream)


def test_traces_are_kept_in_bounded_number(weights):
    engine = make(weights, decode=DecodeConfig(trace="layer"))
    engine.prefill(IDS[:5])
    engine.cache.reserve(3000)
    for position in range(10, 3000, 256):
        engine.cache.seek(position)
        engine.decode(5, 1)
    assert len(engine._layers) <= MOST_TRACES * TINY.num_hidden_layers


def test_bad_sampling_settings_are_refused():
    for bad in ({"temperature": -1}, {"temperature": float("nan")}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match="must be"):
            Sampling(**bad)


def test_samples_follow_the_truncated_distribution():
    """20,000 draws against the probabilities that temperature, top-k and top-p define."""
    logits = mx.array([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0]])
    how = Sampling(temperature=0.8, top_k=6, top_p=0.9)
    draws = np.array(sample(mx.broadcast_to(logits, (20_000, 8)), how, mx.random.key(0)))
    p = np.exp(np.array(logits[0], dtype=np.float64) / 0.8)
    p[6:] = 0
    p /= p.sum()
    p[np.cumsum(p) - p >= 0.9] = 0
    p /= p.sum()
    counts = np.bincount(draws, minlength=8)
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], 20_000 * p[p > 0]).pvalue > 1e-4


@pytest.mark.parametrize(
    "how", [{"temperature": 1e-38}, {"temperature": 5e-324}, {"temperature": 1.0, "top_p": 1e-300}]
)
def test_the_smallest_settings_are_greedy(how):
    logits = mx.random.normal((8, 500), key=mx.random.key(1)) * 20
    drawn = sample(logits, Sampling(**how), mx.random.key(2))
    assert drawn.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_an_infinite_temperature_is_refused():
    with pytest.raises(ValueError, match="finite"):
        Sampling(float("inf"))


def test_a_split_changes_once_with_the_context_and_costs_no_trace(weights):
    """Blocks from `min_context` on: the record says which ran, and a bucket is traced once as ever."""
    attention = DecodeAttentionConfig("matmul", split="blocks", blocks=4, min_context=512)
    engine = make(weights, decode=DecodeConfig(trace="step"), decode_attention=attention)
    plain = make(weights, decode=DecodeConfig(trace="step"))
    made = []
    for each in (engine, plain):
        each.cache.reserve(300)
        each.cache.seek(252)
        made.append(each.decode(3, 8))
    assert made[0] == made[1]
    lines = [line for line in engine.executed() if line["op"] == "decode_attention"]
    assert {line["tile"]: line["calls"] for line in lines} == {"chunks": 4, "blocks": 4}
    assert len(engine._steps) == len(plain._steps) == 2


@pytest.mark.parametrize("variant", ["best", "mlx", "expanded"])
def test_the_shared_expert_beside_the_others_changes_nothing(weights, variant, monkeypatch):
    """In passes of many rows, on a stream of its own; a step of one row has nothing to hide it behind."""
    made, streams = [], []
    monkeypatch.setattr(experts, "second_stream", lambda: streams.append(second_stream()) or streams[-1])
    for overlap in (False, True):
        engine = make(weights, overlap=overlap, experts=ExpertsConfig(variant))
        first = engine.prefill(IDS)
        made.append([first, *engine.decode(first, 4), np.array(engine.logits(IDS[:20])).tobytes()])
        lines = [line for line in engine.executed() if line["op"] == "experts"]
    assert made[0] == made[1]
    beside = {line["tile"]: line["calls"] for line in lines}
    assert set(streams) == {second_stream()} and second_stream() != mx.default_stream(mx.default_device())
    assert len(streams) == 2 * TINY.num_hidden_layers
    assert beside == {"shared beside": 2 * TINY.num_hidden_layers, "": 4 * TINY.num_hidden_layers}


@pytest.mark.parametrize(
    ("named", "said"),
    [(ExpertsConfig("reference"), "take mlx, expanded, grouped"), (ExpertsConfig(tile="32x64"), "tile")],
)
def test_experts_that_cannot_be_split_are_not_overlapped(weights, named, said):
    with pytest.raises(VariantUnsupported, match=said):
        make(weights, overlap=True, experts=named)
