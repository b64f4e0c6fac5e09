"""The engine as a subject, and both subjects on one copy of the weights."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest

from ablations.arms import TOGGLES
from engine.config import EngineConfig
from engine.synthetic import make_weights, tiny_config, write_checkpoint
from sweeps import toggles
from sweeps.points import Arm, Job
from sweeps.subjects import make, share
from sweeps.subjects.base import SubjectError, SubjectUnsupported
from sweeps.subjects.shared import Shared

CONFIG = tiny_config(4, hidden_size=128, experts=8, num_experts_per_tok=2)
PROMPT = [(i * 2654435761) % 2**32 % 440 for i in range(40)]


def job(model, *arms) -> Job:
    return Job("/run", "r", model, {}, list(arms), [], [], 1, 0, 60.0, 60.0)


def engine_arm(**config) -> Arm:
    values = EngineConfig().to_dict()
    values["prefill"]["chunk"] = 8
    return Arm("engine", "engine", config=values | config)


BASELINE = Arm("mlx_lm", "mlx_lm", options={"chunk": 8})


def synthetic(**more):
    return {"name": "tiny", "kind": "synthetic", "seed": 3, "config": dataclasses.asdict(CONFIG), **more}


@pytest.fixture(scope="module", params=["synthetic", "checkpoint"])
def shared(request, tmp_path_factory) -> Shared:
    if request.param == "synthetic":
        made = Shared(synthetic())
    else:
        path = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, seed=3, vision=True)
        made = Shared({"name": "disk", "kind": "checkpoint", "path": str(path)})
    made.dtype = mx.float32  # on a GPU too, so that tolerances are the same everywhere
    return made


@pytest.fixture
def pair(shared):
    arms = engine_arm(), BASELINE
    return [make(arm, job(shared.spec, *arms), shared) for arm in arms]


def test_both_run_on_the_same_arrays(shared):
    held = shared.lm_model.language_model
    assert held.lm_head.weight is shared.weights.tensors["lm_head.weight"]
    layer = held.model.layers[0].mlp.switch_mlp.down_proj
    assert layer.scales is shared.weights.tensors["model.layers.0.mlp.switch_mlp.down_proj.scales"]
    assert layer.scales.dtype == shared.dtype


@pytest.mark.parametrize("stored", ["synthetic", True, "side"])
def test_a_draft_head_runs_beside_mlx_lm(stored, tmp_path):
    """MLX-LM's loader drops the head; it is read beside what is borrowed, and random weights have one if asked."""
    if stored == "synthetic":
        model = synthetic()
    else:
        weights = make_weights(CONFIG, 3, mtp=True)
        folder = write_checkpoint(tmp_path, CONFIG, weights, mtp=stored)
        model = {"name": "disk", "kind": "checkpoint", "path": str(folder)}
    arms = engine_arm(speculative={"drafter": "mtp", "depth": 2}, decode={"trace": "eager"}), BASELINE
    both = share(job(model, *arms))
    assert both is not None
    engine, baseline = (make(arm, job(model, *arms), both) for arm in arms)
    made = make_weights(CONFIG, 3, mtp=True).mtp
    head = both.weights.mtp
    assert head is not None and made is not None and head.fc.scales is not None and head.fc.scales.dtype == both.dtype
    assert mx.array_equal(head.fc.weight, made.fc.weight)
    assert mx.array_equal(head.norm_hidden, made.norm_hidden.astype(both.dtype))
    first = engine.prefill(PROMPT).next_token
    assert first == baseline.prefill(PROMPT).next_token
    # Five: MLX-LM scores padded ids too, and the next would be one.
    assert engine.decode(first, 5).tokens == baseline.decode(first, 5).tokens


def test_both_say_the_same_and_count_alike(pair):
    engine, baseline = pair
    done = [s.prefill(PROMPT) for s in pair]
    assert done[0].next_token == done[1].next_token
    assert done[0].chunks == [8] * 5 and done[1].chunks == [8, 8, 8, 8, 7, 1]
    mine, theirs = (s.decode(done[0].next_token, 8).tokens for s in pair)
    # MLX-LM also picks ids of the padded tail, which random weights make likely; from there on texts differ.
    alike = next((i for i, token in enumerate(theirs) if token >= engine.engine.vocabulary), len(theirs))
    assert alike > 2 and mine[:alike] == theirs[:alike]
    assert engine.position() == baseline.position() == 48


def test_state_is_exchanged_both_ways(pair):
    for source, target in (pair, pair[::-1]):
        for s in pair:
            s.reset()
        first = source.prefill(PROMPT).next_token
        target.import_state(source.export_state())
        assert target.position() == source.position() == 40
        mine, theirs = target.logits([first, 5, 6]), source.logits([first, 5, 6])
        shared_rows = min(mine.shape[1], theirs.shape[1])
        difference = mine[:, :shared_rows] - theirs[:, :shared_rows]
        assert mx.sqrt(mx.mean(difference**2) / mx.mean(theirs**2)).item() < 1e-4


def test_restore_is_bit_exact(pair):
    engine = pair[0]
    engine.reset()
    first = engine.prefill(PROMPT).next_token
    mark, before = engine.snapshot(), engine.export_state()
    tokens = engine.decode(first, 5).tokens
    engine.restore(mark)
    after = engine.export_state()
    assert list(after.tokens) == list(before.tokens) == PROMPT
    for name in ("keys", "values", "state", "conv"):
        assert mx.array_equal(getattr(after, name), getattr(before, name)).item(), name
    assert engine.decode(first, 5).tokens == tokens


def test_stamps_and_whole_chunks(pair):
    engine = pair[0]
    engine.reset()
    seen = []
    assert engine.prefill(PROMPT[:16], last=False, progress=lambda *p: seen.append(p)).next_token == -1
    assert seen == [(8, 16), (16, 16)]
    ticks = iter(range(9))
    assert engine.decode(1, 3, clock=lambda: next(ticks)).stamps == [0, 1, 2]


def test_logits_of_both_agree_on_either_path(pair):
    made = []
    for subject in pair:
        for phase in ("prefill", "decode"):
            subject.reset()
            made.append(subject.logits(PROMPT, phase))
    vocabulary = made[0].shape[1]
    for other in made[1:]:
        difference = other[:, :vocabulary] - made[0]
        assert mx.sqrt(mx.mean(difference**2) / mx.mean(made[0] ** 2)).item() < 1e-3


def test_executed_names_variants(pair):
    engine = pair[0]
    engine.reset()
    engine.reset_executed()
    engine.prefill(PROMPT[:8])
    lines = engine.executed()
    assert {"op", "variant", "tile", "calls"} <= set(lines[0])
    assert any(line["op"] == "gated_delta" for line in lines)


def test_variant_that_cannot_run_is_unsupported_with_its_reason(shared):
    arm = engine_arm(overlap=True, experts={"variant": "reference"})
    with pytest.raises(SubjectUnsupported, match="overlap=on cannot run here: experts=reference has no shared expert"):
        make(arm, job(shared.spec, arm), shared)


def test_engine_alone_does_without_mlx_lms_loader(tmp_path):
    path = write_checkpoint(tmp_path, CONFIG, seed=3)
    alone = share(job({"name": "x", "kind": "checkpoint", "path": str(path)}, engine_arm()))
    assert alone is not None and not alone.baseline
    subject = make(engine_arm(), job(alone.spec, engine_arm()), alone)
    assert subject.prefill(PROMPT).next_token >= 0


def test_folder_that_mlx_lm_refuses_leaves_the_engine_running(tmp_path):
    path = write_checkpoint(tmp_path, CONFIG, seed=3, layout="hf_unfused")
    shared = Shared({"name": "x", "kind": "checkpoint", "path": str(path)})
    with pytest.raises(SubjectUnsupported, match="MLX-LM cannot load"):
        make(BASELINE, job(shared.spec, BASELINE), shared)
    assert make(engine_arm(), job(shared.spec, engine_arm()), shared).prefill(PROMPT).next_token >= 0


def test_stubs_need_no_model():
    assert share(job({}, Arm("a", "stub"))) is None
    assert make(Arm("a", "stub", options={"chunk": 4}), job({})).prefill([1] * 6).chunks == [4, 2]


@pytest.mark.parametrize(
    "model, words",
    [
        ({"name": "m", "kind": "checkpoint"}, "m: kind 'checkpoint'"),
        ({"name": "m", "kind": "other"}, "m: kind 'other'"),
        ({"name": "m", "kind": "checkpoint", "path": "/x", "missing": "not here: fetch it"}, "not here: fetch it"),
    ],
)
def test_model_that_cannot_be_shared_is_named(model, words):
    with pytest.raises(SubjectError, match=words):
        Shared(model)


@pytest.mark.parametrize(
    "arm, words",
    [
        (Arm("a", "llama_bench"), "measure"),
        (Arm("a", "mlx_lm", options={"chnk": 8}), "chnk"),
        (Arm("a", "other"), "unknown subject"),  # type: ignore[arg-type]
    ],
)
def test_arm_that_cannot_be_made_is_named(arm, words, shared):
    with pytest.raises(SubjectError, match=words):
        make(arm, job(shared.spec, arm), shared)


def test_mlx_lm_needs_the_shared_model():
    with pytest.raises(SubjectError, match="shared model"):
        make(BASELINE, job({}, BASELINE))


TOGGLED = {
    "packed_dequant": {"off": ("linear", "expanded"), "packed": ("linear", "mlx")},
    "gpu_routing": {"off": ("route", "host"), "device": ("route", "mlx")},
    "single_submission": {"off": ("prefill_pass", "layer"), "chunk": ("prefill_pass", "chunk")},
    "gdn_scan": {"recurrence": ("gated_delta", "recurrence"), "chunked": ("gated_delta", "chunked")},
    "device_token": {"off": ("token_feedback", "host"), "device": ("token_feedback", "device")},
    "prefill_chunk": {"512": ("prefill_pass", "chunk=512"), "4096": ("prefill_pass", "chunk=4096")},
    "kv_split": {"off": ("decode_attention", "none"), "split": ("decode_attention", "chunks")},
    "fixed_block_layout": {"off": ("decode_attention", "chunks"), "blocks": ("decode_attention", "blocks")},
    "step_trace": {value: ("decode_step", value) for value in ("eager", "layer", "step")},
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, t in TOGGLES.items() for v in t.settings])
def test_a_toggle_shows_in_what_was_executed_or_says_why_it_cannot_run(shared, name, value):
    values = toggles.apply(EngineConfig().to_dict(), {name: value}, {}).to_dict()
    if name == "fixed_block_layout":
        # At the few positions of this test both of its sides would be chunks.
        values["decode_attention"]["min_context"] = 0
    arm = Arm("a", "engine", values)
    try:
        subject = make(arm, job(shared.spec, arm), shared)
    except SubjectUnsupported as error:
        assert "cannot run here: " in str(error)
        return
    subject.decode(subject.prefill(PROMPT[:8]).next_token, 2)
    ran = {(line["op"], word) for line in subject.executed() for word in (line["variant"], line["tile"])}
    wanted = TOGGLED.get(name, {}).get(value)
    assert wanted is None or wanted in ran
