"""The guard's driver, the baseline's correctness gate, and the arithmetic of its rates."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from ablations.guard import Check
from engine.cache import PagedCache
from engine.config import EngineConfig
from engine.generate import Engine
from engine.ops.registry import OPS
from engine.synthetic import tiny_config, write_checkpoint
from sweeps import baseline, reach
from sweeps.clock import ManualClock
from sweeps.guard import PointGuard, Scope, _chunks, paths, same_path
from sweeps.layers import Recording, steps
from sweeps.points import Arm, Contrast, Job, Point
from sweeps.prompts import Prompts, WordEncoder
from sweeps.store import write_job
from sweeps.subjects import make
from sweeps.subjects.base import SubjectUnsupported
from sweeps.subjects.mlx_lm import MlxLm
from sweeps.subjects.remote import ROOT
from sweeps.subjects.shared import Shared, build_lm_model
from sweeps.worker import build, without

CONFIG = tiny_config(4, hidden_size=128, experts=8, num_experts_per_tok=2)
TEXT = [(i * 2654435761) % 2**32 % 440 for i in range(300)]
SMALL = Scope(positions=192, contexts=(8,), rows=16, steps=3)


def engine_arm(name="full", hash="e", **fields) -> Arm:
    config = EngineConfig().to_dict()
    config["prefill"]["chunk"] = 64
    return Arm(name, "engine", config=config | fields, hash=hash)


BASELINE = Arm("mlx_lm", "mlx_lm", options={"chunk": 64}, hash="m")
SYNTHETIC = {"name": "tiny", "kind": "synthetic", "seed": 3, "config": dataclasses.asdict(CONFIG)}


def job(model, arms, contrasts=()) -> Job:
    return Job("/run", "r", model, {"kind": "text"}, list(arms), list(contrasts), [], 1, 0, 60.0, 60.0)


def guard_for(shared, made: Job, scope=SMALL) -> PointGuard:
    return PointGuard(made, shared, Prompts(WordEncoder(shared.real_vocab), 0, "text", CONFIG.vocab_size), scope)


def exact(shared: Shared) -> Shared:
    """Float32 on a GPU too, so that tolerances are the same everywhere."""
    shared.dtype = mx.float32
    return shared


@pytest.fixture(scope="module")
def synthetic() -> Shared:
    return exact(Shared(SYNTHETIC))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Shared:
    path = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, seed=3)
    return exact(Shared({"name": "disk", "kind": "checkpoint", "path": str(path)}))


# -- a point's guard ------------------------------------------------------------------------------


def test_random_weights_are_checked_layer_by_layer_once_for_all_frontiers(synthetic, monkeypatch):
    arms = [engine_arm(), BASELINE, dataclasses.replace(engine_arm("full.again"), aa=True)]
    guard = guard_for(
        synthetic, job(SYNTHETIC, arms, [Contrast("c", "full", "mlx_lm"), Contrast("A/A", "full.again", "full")])
    )
    made = guard(Point("p", "decode", 256, 1))
    assert {name: check["name"] for name, check in made.items()} == {
        "full": "layers",
        "mlx_lm": "baseline",
        "full.again": "layers",
    }
    assert all(check["passed"] for check in made.values()), made
    assert made["full"]["figures"]["rows"] == SMALL.steps
    assert made["full"]["figures"]["end_to_end_error"] < 1e-4
    json.dumps(made)

    def again(*_):
        raise AssertionError("made a second time")

    monkeypatch.setattr(PointGuard, "_layers", again)
    assert guard(Point("q", "decode", 512, 1)) == made


ARMS = [
    engine_arm("full", "e"),
    engine_arm("plain", "p", gated_delta="reference"),
    engine_arm("routed", "r", route="reference"),
]


def count_passes(monkeypatch, shared) -> dict[str, int]:
    """Counts, from now on, rows through MLX-LM's first layer and passes of the oracle over a text."""
    counts = {"mlx_lm": 0, "oracle": 0}
    mixer = shared.lm_model.language_model.model.layers[0].linear_attn
    run, make_oracle = type(mixer).__call__, baseline.make_oracle

    def mixed(self, x, *rest):
        counts["mlx_lm"] += x.shape[1] if self is mixer else 0
        return run(self, x, *rest)

    def counted(shared):
        oracle = make_oracle(shared)
        logits = oracle.logits

        def passed(*given):
            counts["oracle"] += 1
            return logits(*given)

        oracle.logits = passed  # type: ignore[method-assign]
        return oracle

    monkeypatch.setattr(type(mixer), "__call__", mixed)
    monkeypatch.setattr(baseline, "make_oracle", counted)
    return counts


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_more_arms_take_no_more_passes_of_what_they_are_held_against(synthetic, monkeypatch, phase):
    """And each arm's check is what it would be alone."""
    alone, point = {}, Point("p", phase, 256, 1)
    for arm in ARMS:
        alone |= guard_for(synthetic, job(SYNTHETIC, [arm]))(point)
    counts = count_passes(monkeypatch, synthetic)
    guard = guard_for(synthetic, job(SYNTHETIC, ARMS))
    assert guard(point) == alone and all(check["passed"] for check in alone.values())
    assert "end_to_end_error" in alone["full"]["figures"] and alone["full"] != alone["plain"]
    rows, single = SMALL.rows, SMALL.steps
    # A layer at a time and end to end: what is compared twice, what comes before it once.
    assert counts == {"mlx_lm": 2 * rows if phase == "prefill" else rows + 2 * single, "oracle": 1}
    assert not guard._recordings and guard._oracle is None, "held while windows are timed"


def test_the_baselines_gate_shares_the_passes_of_a_prefill(synthetic, monkeypatch):
    counts = count_passes(monkeypatch, synthetic)
    made = guard_for(synthetic, job(SYNTHETIC, [BASELINE, ARMS[0]]))(Point("p", "prefill", 256, 1))
    assert all(check["passed"] for check in made.values())
    assert counts == {"mlx_lm": 2 * SMALL.rows, "oracle": 1}


@pytest.mark.parametrize("context", [0, 20])
def test_a_recording_holds_every_layer_as_it_was(synthetic, context):
    """MLX-LM's cache advances under the recorded states; what they hold must not."""
    model, cache, text = synthetic.lm_model, synthetic.lm_model.make_cache(), TEXT[:24]
    pieces = [[token] for token in text[20:]] if context else [text[at : at + 7] for at in range(0, 24, 7)]
    for at in range(0, context, 7):
        model(mx.array([text[at : min(at + 7, context)]]), cache=cache)
    live = []
    for piece in pieces:
        for step in steps(model, cache, piece):
            live.append([np.array(x) for x in (step.before, step.after, *(step.state or ()), *step.made)])
    recording = Recording(model, text, context=context, chunk=7)
    held = [step for passed in recording.steps for step in passed]
    end_to_end = recording.baseline
    for step, want in zip(held, live, strict=True):
        got = [np.array(x) for x in (step.before, step.after, *(step.state or ()), *step.made)]
        assert all(np.array_equal(*both) for both in zip(got, want, strict=True))
    outer = model.language_model
    rows = [np.array(outer.lm_head(outer.model.norm(passed[-1].after))[0]) for passed in recording.steps]
    np.testing.assert_allclose(end_to_end, np.concatenate(rows), rtol=1e-5, atol=1e-5)


def test_trained_weights_are_checked_by_their_logits_against_the_contrasts_reference(checkpoint):
    arms = [engine_arm(), BASELINE, engine_arm("aa", hash="e")]
    arms[2].aa = True
    contrasts = [Contrast("c", "full", "mlx_lm"), Contrast("A/A", "aa", "full")]
    points = [Point("p", "prefill", 256, 1), Point("p", "decode", 300, 1)]
    guard = guard_for(checkpoint, dataclasses.replace(job(checkpoint.spec, arms, contrasts), points=points))
    for phase in ("prefill", "decode"):
        made = guard(Point("p", phase, 256, 1))
        check = made["full"]
        assert check["name"] == "logits" and check["passed"], check["reason"]
        assert check["figures"]["reference"] == "mlx_lm" and check["figures"]["positions"] == 192
        assert check["figures"]["contexts"] == ([8] if phase == "decode" else [0])
        assert check["figures"]["lengths"] == ([300] if phase == "decode" else [256])
        assert check["figures"]["first_192"]["kl_mean"] == check["figures"]["kl_mean"]
        assert made["aa"] == check


def test_what_else_an_arm_was_held_against_goes_along_and_the_worst_decides(checkpoint, monkeypatch):
    """One reference of two, and MLX-LM where it is no arm: a report shows all, the first that failed blocks."""
    arms = [engine_arm("a", hash="a"), engine_arm("b", hash="b"), engine_arm("c", hash="c")]
    contrasts = [Contrast("1", "c", "a"), Contrast("2", "c", "b")]
    guard = guard_for(checkpoint, job(checkpoint.spec, arms, contrasts))
    monkeypatch.setattr(PointGuard, "_shows_mlx_lm", lambda self: True)

    def logits(self, arm, reference, phase, scope=None):
        if reference.name == "mlx_lm":
            raise RuntimeError("no memory")
        return Check("logits", reference.name == "a", "", {"reference": reference.name})

    monkeypatch.setattr(PointGuard, "_logits", logits)
    monkeypatch.setattr(PointGuard, "_anchored", lambda self, arm, phase: Check("logits", True, "", {}))
    check = guard(Point("p", "decode", 256, 1))["c"]
    assert not check["passed"] and check["figures"]["reference"] == "b"
    assert [one["figures"]["reference"] for one in check["also"]] == ["a", "mlx_lm"]
    assert "not compared: no memory" in check["also"][1]["reason"]


def test_guard_leaves_live_subjects_alone(synthetic):
    arms = [engine_arm(), BASELINE]
    made = job(SYNTHETIC, arms, [Contrast("c", "full", "mlx_lm")])
    live = [make(arm, made, synthetic) for arm in arms]
    firsts = [s.prefill(TEXT[:20]).next_token for s in live]
    before = [s.export_state().state for s in live]
    guard_for(synthetic, made)(Point("p", "prefill", 256, 1))
    for subject, state, first in zip(live, before, firsts):
        assert subject.position() == 20 and mx.array_equal(subject.export_state().state, state).item()
        assert subject.decode(first, 1).tokens


def test_skipped_arms_and_stubs_have_no_check(synthetic):
    assert guard_for(synthetic, job(SYNTHETIC, [engine_arm()]))(Point("p", "decode", 256, 1, skip={"full": "no"})) == {}
    stubs = job({}, [Arm("a", "stub")])
    assert PointGuard(stubs, None, Prompts(WordEncoder(64)))(Point("p", "decode", 256, 1)) == {}


def test_an_arm_that_cannot_be_built_blocks_no_other(synthetic):
    """A draft head that the weights lack once blocked every arm of the question, as a guard that failed."""
    drafts = {"speculative": EngineConfig().to_dict()["speculative"] | {"drafter": "model"}}
    arms = [engine_arm("off"), engine_arm("drafting", "d", **drafts), engine_arm("plain", "p", linear="mlx")]
    pairs = [Contrast("a", "drafting", "off"), Contrast("b", "plain", "drafting"), Contrast("c", "plain", "off")]
    made, point = job(SYNTHETIC, arms, pairs), Point("p", "prefill", 256, 1)
    absent = build(made, synthetic)[1]
    assert list(absent) == ["drafting"]
    with pytest.raises(SubjectUnsupported):
        guard_for(synthetic, made)(point)
    left = without(made, absent)
    assert [one.name for one in left.contrasts] == ["c"]
    checks = guard_for(synthetic, left)(point)
    assert {name: check["passed"] for name, check in checks.items()} == {"off": True, "plain": True}


@pytest.mark.parametrize(
    "device, limit, expected",
    [("cuda", 262_144, (2048, (256, 8192))), ("metal", 4096, (2048, (256,))), ("cpu", 4096, (256, (256,)))],
)
def test_scope_follows_device_and_model(device, limit, expected):
    scope = Scope.on(device, limit)
    assert (scope.positions, scope.contexts) == expected


# -- the path that was guarded is the path that was timed -----------------------------------------


def line(op, variant, tile=None, calls=1):
    return {"op": op, "variant": variant, "tile": tile, "calls": calls}


def test_same_path():
    check = {"figures": {"executed": paths([line("head", "mlx"), line("experts", "a", "32x64"), line("head", "mlx")])}}
    assert check["figures"]["executed"] == [["experts", "a", "32x64"], ["head", "mlx", "None"]]
    assert same_path(check, [line("head", "mlx", calls=9), line("experts", "a", "32x64"), line("other", "x")]) is None
    reason = same_path(check, [line("experts", "a", "64x64")])
    assert reason == "experts ran as a 64x64 in the timed window, the guard saw a 32x64"
    assert "head ran as slow" in same_path(check, [line("head", "slow")])  # type: ignore[operator]
    assert same_path({}, [line("head", "x")]) is None


def test_same_path_of_a_prefill_allows_its_last_row_and_a_short_last_chunk():
    executed = paths([line("experts", "grouped"), line("head", "many")])
    check = {"figures": {"executed": executed, "phase": "prefill"}}
    tail = [line("experts", "grouped"), line("experts", "single"), line("head", "one")]
    assert same_path(check, tail) is None
    assert same_path(check, [line("experts", "single")]) is not None
    # Where every length was looked into, nothing is excused by what ran beside it.
    check["figures"]["lengths"] = [64, 66]
    assert same_path(check, tail) == "experts ran as single in the timed window, the guard saw grouped"
    del check["figures"]["lengths"]
    check["figures"]["phase"] = "decode"
    assert same_path(check, tail) == "experts ran as single in the timed window, the guard saw grouped"


def test_chunks_of_a_prefill_that_are_looked_into():
    assert _chunks(64, 2048) == {(64, 64)}
    assert _chunks(4096, 2048) == {(2048, 2048), (2048, 4096)}
    # The last chunk has two rows; the ones before it reach as far.
    assert _chunks(16_386, 2048) == {(2048, 2048), (2, 16_386), (2048, 16_384)}


def test_guarded_path_is_that_of_the_window(synthetic):
    arms = [engine_arm(), BASELINE]
    made = job(SYNTHETIC, arms, [Contrast("c", "full", "mlx_lm")])
    guard, subject = guard_for(synthetic, made), make(arms[0], made, synthetic)
    first = subject.prefill(TEXT[:64])
    assert same_path(guard(Point("p", "prefill", 64, 1))["full"], subject.executed()) is None
    subject.reset_executed()
    subject.decode(first.next_token, 2)
    assert same_path(guard(Point("p", "decode", 64, 1))["full"], subject.executed()) is None


# -- what runs far out is held against the reference there -----------------------------------------

FAR = 600
BLOCKS = {"variant": "matmul", "split": "blocks", "min_context": 512}
POINTS = [Point("near", "decode", 64, 1, decode_tokens=2), Point("far", "decode", FAR, 1, decode_tokens=2)]


def attending(**fields) -> Arm:
    """An arm whose keys are split in chunks in short contexts and in blocks in long ones."""
    arm = engine_arm(**fields)
    arm.config["decode_attention"] |= BLOCKS
    return arm


def plant(monkeypatch, name, wrong):
    """Wrap a variant of decode attention: `wrong(keys, settings)` says where its result is twice what it should be."""
    variant = OPS["decode_attention"].variants[name]

    def run(q, keys, values, *rest, **settings):
        return variant.run(q, keys, values, *rest, **settings) * (2 if wrong(q, keys, settings) else 1)

    bad = dataclasses.replace(variant, run=run)
    monkeypatch.setitem(OPS["decode_attention"].variants, name, bad)  # type: ignore[arg-type]


def window(subject, frontier) -> list[dict]:
    """What a timed window behind `frontier` tokens executes."""
    subject.reset()
    first = subject.prefill([at % 440 for at in range(frontier)]).next_token
    subject.reset_executed()
    subject.decode(first, 2)
    return subject.executed()


def reaching(shared, made: Job, *seen: str) -> dict:
    """The check of a job's one arm whose guard saw no more than decode attention by the variant and tile `seen`."""
    told = Check("layers", True, "", {"executed": [["decode_attention", *seen]], "phase": "decode"})
    subject = make(made.arms[0], made, shared)
    return guard_for(shared, made)._at_all_lengths(told, made.arms[0], subject, "decode").to_dict()


def test_the_split_of_long_contexts_is_held_against_the_reference_there(synthetic, monkeypatch):
    arm = attending()
    made = dataclasses.replace(job(SYNTHETIC, [arm]), points=POINTS)
    subject = make(arm, made, synthetic)
    near, far = window(subject, 64), window(subject, FAR)
    assert "blocks" in str(paths(far)) and "chunks" in str(paths(near))
    check = guard_for(synthetic, made)(POINTS[0])["full"]
    assert check["figures"]["lengths"] == [64, FAR] and "off" not in check["figures"]
    assert same_path(check, near, 64) is same_path(check, far, FAR) is None
    plant(monkeypatch, "matmul", lambda q, keys, settings: settings["split"] == "blocks")
    check = reaching(synthetic, made, "matmul", "chunks")
    assert check["passed"] and same_path(check, near, 64) is None
    reason = str(same_path(check, far, FAR))
    assert reason.startswith(
        f"decode_attention ran as matmul blocks behind {FAR} tokens in the timed window: it is off"
    )
    json.dumps(check)


def test_a_path_that_is_wrong_far_out_alone_is_refused_there(synthetic, monkeypatch):
    """Its name says nothing of where: what the guard saw right behind few tokens is no excuse."""
    made = dataclasses.replace(job(SYNTHETIC, [engine_arm()]), points=POINTS)
    ran = [line("decode_attention", "matmul", "none")]
    plant(monkeypatch, "matmul", lambda q, keys, settings: keys.shape[2] > 512)
    check = reaching(synthetic, made, "matmul", "none")
    assert same_path(check, ran, 64) is None
    assert f"behind {FAR} tokens" in str(same_path(check, ran, FAR))


def test_what_cannot_be_tried_at_a_context_is_not_vouched_for_there(synthetic, monkeypatch):
    def fails(self, index, positions):
        raise RuntimeError("no pages there")

    monkeypatch.setattr(PagedCache, "shown", fails)
    skipped = dataclasses.replace(POINTS[1], skip={"full": "no room"})
    for points, tried in ((POINTS, [64, FAR]), ([POINTS[0], skipped], [64])):
        made = job(SYNTHETIC, [engine_arm(cache={"layout": "paged", "step": 256})])
        check = reaching(synthetic, dataclasses.replace(made, points=points), "gathered", "none")
        assert [at for _, _, _, at, _ in check["figures"]["off"]] == tried == check["figures"]["lengths"]
        reason = same_path(check, [line("decode_attention", "gathered", "none")], 64)
        assert str(reason).endswith("it cannot be tried there: RuntimeError: no pages there")


@pytest.mark.parametrize(("trace", "layout"), [("eager", "paged"), ("step", "contiguous"), ("step", "paged")])
def test_what_is_tried_is_what_a_window_runs(synthetic, trace, layout):
    """By the names that windows record, with drafts and without, on both sides of a change of the split."""
    for drafter in ("off", "ngram"):
        config = EngineConfig.from_dict(engine_arm(cache={"layout": layout, "step": 256}).config)
        config.decode.trace, config.decode_attention.split = trace, "blocks"
        config.decode_attention.min_context = 512
        config.speculative.drafter, config.speculative.depth, config.speculative.force = drafter, 2, "1"
        engine = Engine(CONFIG, synthetic.weights, config, dtype=mx.float32)
        # Two tokens further the bucket of a traced step, and the keys of an eager one, reach the blocks.
        for frontier in (64, 511 if trace == "eager" else 255):
            engine.reset()
            first = engine.prefill([at % 440 for at in range(frontier)])
            engine.reset_executed()
            engine.decode(first or 0, 8)
            ran = {tuple(line) for line in paths(engine.executed()) if line[0] == "decode_attention"}
            tried = reach._attention(engine, frontier, 8)
            assert ran <= {line for line, _ in tried}
            assert {call.rows for _, call in tried} == ({1} if drafter == "off" else {1, 3})
            assert all(reach._attention_error(engine, call) < 1e-5 for _, call in tried)


def test_rows_of_a_verification_are_held_too(synthetic, monkeypatch):
    arm = engine_arm(speculative={"drafter": "ngram", "depth": 2})
    engine = make(arm, job(SYNTHETIC, [arm]), synthetic).engine  # type: ignore[attr-defined]
    seen = [["decode_attention", "matmul", "none"], ["experts", "other", ""]]
    lines, off = reach.reached(engine, seen, [(64, 8)])
    # Ops that attention is not: what two rows run, held against the reference.
    assert off == [] and ["experts", engine.ops.experts.decode.name, ""] in lines
    plant(monkeypatch, "matmul", lambda q, keys, settings: q.shape[2] > 1)
    _, off = reach.reached(make(arm, job(SYNTHETIC, [arm]), synthetic).engine, seen, [(64, 8)])  # type: ignore[attr-defined]
    assert [line[:4] for line in off] == [["decode_attention", "matmul", "none", 64]]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize(
    "attention",
    [{}, {"heads": "1"}, {"lanes": "apart"}, {"split": "none"}, {"split": "chunks"}, {"split": "blocks"}],
    ids=str,
)
def test_our_attention_agrees_at_every_long_context(attention, layout):
    far = dataclasses.replace(CONFIG, max_position_embeddings=262_144)
    arm = engine_arm(cache={"layout": layout, "step": 256})
    arm.config["decode_attention"] |= {"variant": "metal"} | attention
    shared = Shared({**SYNTHETIC, "config": dataclasses.asdict(far)})
    engine = make(arm, job(SYNTHETIC, [arm]), shared).engine  # type: ignore[attr-defined]
    points = [(at, 32) for at in (256, 16_384, 32_768, 131_072)]
    lines, off = reach.reached(engine, [["decode_attention", "none yet", ""]], points)
    assert off == []
    tiles = {tile.split()[0] for _, variant, tile in lines if variant == "metal"}
    assert tiles == ({"chunks", "blocks"} if attention.get("split") == "blocks" else {attention.get("split", "blocks")})


# -- the baseline's correctness -------------------------------------------------------------------


def test_right_baseline_passes_its_gate(checkpoint):
    check = baseline.gate(checkpoint, TEXT[:24])
    assert check.passed, check.reason
    assert check.name == "baseline" and check.figures["end_to_end_error"] < 1e-4


def shift_gains_twice(model):
    def again(name, value):
        return value + 1 if name.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight")) else value

    model.update(tree_map_with_path(again, model.parameters()))


def shift_one_gain(model):
    norm = model.language_model.model.layers[2].post_attention_layernorm
    norm.weight = norm.weight + 0.02


def swap_two_experts(model):
    stack = model.language_model.model.layers[1].mlp.switch_mlp.up_proj
    order = mx.array([1, 0, *range(2, CONFIG.num_experts)])
    for part in ("weight", "scales", "biases"):
        stack[part] = stack[part][order]


def wrong_final_norm(model):
    inner = model.language_model.model
    inner.norm.weight = inner.norm.weight + 1


@pytest.mark.parametrize("fault", [shift_gains_twice, shift_one_gain, swap_two_experts, wrong_final_norm])
def test_misloaded_baseline_is_caught(checkpoint, fault):
    model = build_lm_model(CONFIG, checkpoint.weights.tensors)
    fault(model)
    check = baseline.gate(checkpoint, TEXT[:24], model=model)
    assert not check.passed
    assert check.reason.startswith("MLX-LM does not compute this model")


def test_oracle_reads_gains_by_its_own_road_even_where_codes_are_shared(checkpoint, monkeypatch):
    monkeypatch.setattr("sweeps.subjects.shared.SMALL_BYTES", 0)
    spoiled = exact(Shared(checkpoint.spec))
    shift_gains_twice(spoiled.lm_model)
    spoiled.__dict__.pop("weights")
    assert mx.array_equal(spoiled.weights.layers[0].input_norm, checkpoint.weights.layers[0].input_norm + 1).item()
    assert not baseline.gate(spoiled, TEXT[:12]).passed
    oracle = spoiled.independent()
    assert oracle.lm_head.weight is spoiled.weights.lm_head.weight
    assert len(oracle.layers) == 4 and oracle.layers[2] is oracle.layers[2] is not oracle.layers[1]


def test_distinct_experts_grow_with_the_text(checkpoint):
    one, many = (baseline.gate(checkpoint, TEXT[:n]).figures["distinct_experts"] for n in (1, 48))
    assert one == [CONFIG.num_experts_per_tok] * 4
    assert all(CONFIG.num_experts_per_tok < n <= CONFIG.num_experts for n in many)


# -- the baseline's rates -------------------------------------------------------------------------


@pytest.fixture
def ticking(synthetic, monkeypatch):
    """A clock that a pass of MLX-LM's model moves by one second a row, for the sweep and for stream_generate."""
    clock, original = ManualClock(), type(synthetic.lm_model).__call__

    def call(self, inputs, *args, **kwargs):
        clock.advance(inputs.shape[1] * 1_000_000_000)
        return original(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(synthetic.lm_model), "__call__", call)
    reads = iter(range(1, 1_000_000))
    # Every reading is a nanosecond later: stream_generate divides by the time since the first token at once.
    seconds = types.SimpleNamespace(perf_counter=lambda: (clock.now_ns() + next(reads)) / 1e9)
    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "time", seconds)
    return clock


def test_rates_are_exact_by_either_clock(synthetic, ticking):
    subject = MlxLm(synthetic.lm_model, CONFIG, chunk=8)
    for count in (1, 2, 7):
        assert baseline.measure(subject, TEXT[:20], count, ticking) == baseline.Rates(1.0, 1.0)
        theirs = baseline.stream(synthetic.lm_model, baseline.plain_tokenizer(), TEXT[:20], count, chunk=8)
        # Its prompt time holds the step submitted before the first token is handed over: 21 rows for 20 tokens.
        assert theirs.prefill == pytest.approx(20 / 21) and theirs.decode == pytest.approx(1.0)


def test_verdict_names_the_phase_that_differs():
    ours = [baseline.Rates(100, 10), baseline.Rates(101, 10), baseline.Rates(500, 10)]
    theirs = [baseline.Rates(103, 10), baseline.Rates(103, 11), baseline.Rates(103, 11)]
    made = baseline.verdict(ours, theirs)
    assert made["prefill"]["ratio"] == pytest.approx(101 / 103)
    assert not made["passed"] and made["reason"] == "decode: 10 tok/s by this clock, 11 by stream_generate"
    assert baseline.verdict(ours, ours) == baseline.verdict(ours, ours) | {"passed": True, "reason": None}


def test_check_runs_in_its_own_process_and_reports_its_failure(tmp_path):
    file = tmp_path / "job.json"
    made = job({"name": "gone", "kind": "checkpoint", "path": str(tmp_path / "absent")}, [BASELINE])
    made.points = [Point("p", "prefill", 24, 1)]
    write_job(made, file)
    result = baseline.check(file)
    assert result["passed"] is False and "absent" in result["reason"]


def test_both_ways_of_timing_are_reported_side_by_side(tmp_path):
    made = job(SYNTHETIC, [BASELINE])
    made.points = [Point("p", "prefill", 24, 1)]
    result = baseline.compare_rates(made, tokens=4, trials=2, most=2)
    assert result["frontier"] == 24 and len(result["samples"]["sweep"]) == 2
    # How far apart they are is for a quiet machine to say; that both are rates of this work is not.
    assert all(result[phase][side] > 0 for phase in ("prefill", "decode") for side in ("sweep", "stream_generate"))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_arm_held_against_nothing_else_is_held_against_the_reference_ops(checkpoint, phase, monkeypatch):
    """Without a baseline the first arm of a job is no contrast's: its speed must not stand alone."""
    from engine.model import Model

    made = job(checkpoint.spec, [engine_arm()])
    point = Point("p", phase, 256, 1)
    right = guard_for(exact(checkpoint), made)(point)["full"]
    assert right["passed"] and right["figures"]["reference"] == "reference ops"
    oracle = Model.experts

    def without_the_shared_scale(self, w, x, *residual):
        return oracle(self, w, x, *residual) * (1.0 if self.ops.linear.decode.name == "reference" else 1.5)

    monkeypatch.setattr(Model, "experts", without_the_shared_scale)
    assert not guard_for(exact(checkpoint), made)(point)["full"]["passed"]


def test_copies_take_the_check_of_their_original(checkpoint):
    """An A/A arm and a slowed arm, of this engine or of a checkout in a process of its own."""
    head = dataclasses.replace(engine_arm("head", hash="h"), options={"checkout": "/head", "process": ""})
    base = dataclasses.replace(engine_arm("base", hash="b"), options={"checkout": "/base", "process": ""})
    again = dataclasses.replace(head, name="head.again", options={"checkout": "/head", "process": "again"}, aa=True)
    slowed = dataclasses.replace(base, name="base.slowed", hash="s", options={**base.options, "slowdown": 1.05})
    guard = guard_for(checkpoint, job(checkpoint.spec, [base, head, again, slowed]))
    assert guard._original(again) is head and guard._original(slowed) is base
    plain = [engine_arm(), engine_arm("mlx", hash="m", linear="mlx")]
    copies = [dataclasses.replace(a, name=f"{a.name}.slowed", hash="x", options={"slowdown": 2}) for a in plain]
    guard = guard_for(checkpoint, job(checkpoint.spec, [*plain, *copies]))
    assert [guard._original(copy) for copy in copies] == plain


def test_a_checkout_of_this_very_code_is_looked_into_here(synthetic, checkpoint, tmp_path):
    """The head of a gate: an engine of this process tells what other lengths run. Of other code nothing is known."""
    point = Point("p", "prefill", 66, 1)
    for name, folder, seen in (("head", ROOT, [66]), ("other", tmp_path, None)):
        arm = dataclasses.replace(engine_arm(name, hash=name), options={"checkout": str(folder), "process": ""})
        made = dataclasses.replace(job(SYNTHETIC, [arm]), points=[point])
        check = guard_for(synthetic, made)(point)
        assert (check[name]["figures"]["lengths"] == seen) if seen else check == {}
        told = Check("logits", True, "", {"executed": [["experts", "many", ""]], "phase": "prefill"})
        figures = guard_for(checkpoint, made)._at_all_lengths(told, arm, object(), "prefill").figures  # type: ignore[arg-type]
        assert figures.get("lengths") == seen and (len(figures["executed"]) > 1) == bool(seen)
