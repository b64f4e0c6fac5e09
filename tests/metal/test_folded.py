"""The folded decode step on the simulator: the same hidden rows, caches and tokens as the model of separate ops."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import simulator
from simulator import Simulator

from engine import generate, proof
from engine.cache import Apart, RecentCache, RecentPages
from engine.config import CacheConfig, DecodeAttentionConfig, DecodeConfig, EngineConfig, SpeculativeConfig
from engine.folded import FoldedModel
from engine.generate import Engine
from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import BoundOps, bind, relative_rms
from engine.ops.choice import Tuned
from engine.synthetic import make_weights, tiny_config
from sweeps import reach
from sweeps.guard import paths

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

TINY = tiny_config(4)
IDS = np.random.default_rng(3).integers(0, 440, 40).tolist()
VOCABULARY = 453


@pytest.fixture(scope="module")
def weights():
    return make_weights(TINY, 0, dtype=mx.float32)


def engines(weights, monkeypatch, fusion: str) -> tuple[Engine, Engine, list[Launch]]:
    """An engine of separate ops and one with the folded model, kernels on the simulator."""
    plain, folded = (
        Engine(TINY, weights, EngineConfig(decode=DecodeConfig(trace="eager")), vocabulary=VOCABULARY) for _ in "ab"
    )
    config = EngineConfig(decode=DecodeConfig(trace="eager", fusion=fusion))
    # Prefill and what is not folded stay as a CPU has them.
    ops = dataclasses.replace(folded.ops, fusion=bind(config, "cuda").fusion)
    folded.ops, folded.model = ops, FoldedModel(TINY, weights, ops, VOCABULARY)
    simulated, seen = Simulator(), []

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call)
        return simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    return plain, folded, seen


@pytest.mark.parametrize("fusion", ["full", "partial"])
def test_steps_agree_with_the_separate_ops(weights, monkeypatch, fusion):
    plain, folded, seen = engines(weights, monkeypatch, fusion)
    first = plain.prefill(IDS)
    assert folded.prefill(IDS) == first
    folds = ["linear_decode_products"] if fusion == "full" else []
    assert [call.kernel.name for call in seen] == folds, "of a long pass only the last row's logits are folded"
    made = [[], []]
    for engine, rows in zip((plain, folded), made):
        engine.cache.state["token"] = mx.array([first], mx.uint32)
        for _ in range(3):
            rows.append(engine.score())
            engine.cache.state["token"] = mx.argmax(rows[-1], axis=-1).astype(mx.uint32)
    assert relative_rms(mx.concatenate(made[1]), mx.concatenate(made[0])) < 1e-4
    for name, arrays in plain.export_state().items():
        assert relative_rms(folded.export_state()[name], arrays) < 1e-4, name


def test_several_rows_at_once_agree_too(weights, monkeypatch):
    plain, folded, seen = engines(weights, monkeypatch, "full")
    for engine in (plain, folded):
        engine.prefill(IDS)
    both = [engine.logits(IDS[:5]) for engine in (plain, folded)]
    assert seen and relative_rms(both[1], both[0]) < 1e-4


def test_the_greedy_token_comes_without_logits(weights, monkeypatch):
    plain, folded, seen = engines(weights, monkeypatch, "full")
    first = plain.prefill(IDS)
    folded.prefill(IDS)
    assert folded.decode(first, 4) == plain.decode(first, 4)
    assert seen and not any(size >= VOCABULARY for call in seen[-2:] for shape in call.shapes for size in shape)


def test_a_step_is_six_launches_a_gated_delta_layer(weights, monkeypatch):
    _, folded, seen = engines(weights, monkeypatch, "full")
    folded.prefill(IDS)
    seen.clear()
    folded.decode(1, 1)
    names = [call.kernel.name for call in seen]
    assert len(names) == 1 + 3 * 6 + 6 + 2, names
    executed = {(line["op"], line["variant"]) for line in folded.executed()}
    assert {("linear", "metal"), ("experts", "metal"), ("gated_delta", "registers"), ("head", "metal")} <= executed


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"linear": "mlx"}, "linear=mlx"), ({"route": "host"}, "route=host"), ({"gated_delta": "mlx"}, "gated_delta=mlx")],
)
def test_fusion_beside_a_variant_that_it_replaces_is_refused(fields, said):
    from engine.ops import VariantUnsupported

    with pytest.raises(VariantUnsupported, match=said):
        bind(EngineConfig(**fields, decode=DecodeConfig(fusion="full")), "cuda")


def traced(weights, monkeypatch, room: int, **fields) -> tuple[Engine, Engine]:
    """An engine of separate ops and a folded one whose steps are traced, MLX's compiler left out: kernels must run."""
    config = EngineConfig(decode=DecodeConfig(trace="step", fusion="full"), **fields)
    config.decode_attention = dataclasses.replace(config.decode_attention, variant="metal")
    plain = EngineConfig(decode=DecodeConfig(trace="step"), **fields)

    def bound(asked: EngineConfig, device: str, tuned: Tuned, *_: object) -> BoundOps:
        ops = bind(plain, device, tuned)
        if asked is plain:
            return ops
        there = bind(config, "cuda")
        attention = dataclasses.replace(there.decode_attention, recorder=ops.recorder)
        return dataclasses.replace(ops, fusion=there.fusion, decode_attention=attention)

    monkeypatch.setattr(mx, "compile", lambda run, **_: run)
    monkeypatch.setattr(Apart, "ROOM", room)
    monkeypatch.setattr(generate, "bind", bound)
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    return Engine(TINY, weights, plain, vocabulary=VOCABULARY), Engine(TINY, weights, config, vocabulary=VOCABULARY)


def test_rows_that_stand_apart_are_put_in_their_place_now_and_then(weights, monkeypatch):
    """Steps, going back to before and after the seam, long passes in between: as ever."""
    plain, folded = traced(weights, monkeypatch, room=8)
    assert type(folded.cache) is RecentCache and type(plain.cache) is not RecentCache
    made = []
    for engine in (plain, folded):
        first = engine.prefill(IDS)
        mark = engine.snapshot()
        tokens = engine.decode(first, 9)
        engine.restore(mark)
        tokens += engine.decode(first, 2)
        later = engine.snapshot()
        tokens += engine.decode(7, 1)
        engine.restore(later)
        tokens += engine.decode(9, 1)
        engine.prefill(IDS[:9], last=False)
        made.append([*tokens, *engine.decode(2, 1)])
    assert made[0] == made[1]
    assert folded.cache.first > len(IDS)
    want, got = plain.export_state(), folded.export_state()
    for name, arrays in want.items():
        assert relative_rms(got[name], arrays) < 1e-4, name


def test_verified_drafts_stand_apart_too(weights, monkeypatch):
    drafting = SpeculativeConfig(drafter="ngram", depth=3)
    plain, folded = traced(weights, monkeypatch, room=16, speculative=drafting)
    scores = []
    for engine in (plain, folded):
        engine.prefill(IDS)
        scores.append(engine.logits(IDS[:5], phase="decode"))
        assert any(line["op"] == "verify" for line in engine.executed())
    assert relative_rms(scores[1], scores[0]) < 1e-4


def test_a_step_writes_its_rows_in_one_launch(weights, monkeypatch):
    _, folded = traced(weights, monkeypatch, room=8)
    folded.prefill(IDS)
    seen: list[str] = []
    simulated = Simulator()
    monkeypatch.setattr(loader, "launch", lambda call: seen.append(call.kernel.name) or simulated.launch(call))
    keys = [id(array) for array in folded.cache.state["keys"]]
    folded.decode(1, 1)
    assert seen.count("recent_decode_update") == 1
    assert [id(array) for array in folded.cache.state["keys"]] == keys


def test_rows_that_stand_apart_go_into_their_pages(weights, monkeypatch):
    """On both sides of the seam between a pool and its extension."""
    plain, folded = traced(weights, monkeypatch, room=8, cache=CacheConfig(layout="paged"))
    made = []
    for engine in (plain, folded):
        engine.cache.reserve(256)
        engine.prefill(IDS)
        engine.cache.seek(254)
        made.append(engine.decode(1, 4))
    assert made[0] == made[1] and type(folded.cache) is RecentPages
    want, got = (engine.export_state()["keys"][:, :, 254:] for engine in (plain, folded))
    assert folded.cache.first == 258
    assert relative_rms(got, want) < 1e-4


@pytest.mark.parametrize("unit", ["rotary", "recent"])
def test_kernels_of_no_single_op_pass_their_self_test(unit, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    assert proof.UNITS[unit]() < 1e-4


@pytest.mark.parametrize(("layout", "kind"), [("contiguous", RecentCache), ("paged", RecentPages)])
def test_attention_of_a_folded_step_is_held_at_the_contexts_that_are_timed(weights, monkeypatch, layout, kind):
    """By the name that the step records, over keys as its cache shows them, on both sides of a change of the split."""
    attention = DecodeAttentionConfig(split="blocks", min_context=300)
    _, folded = traced(weights, monkeypatch, 8, cache=CacheConfig(layout=layout), decode_attention=attention)
    assert type(folded.cache) is kind
    for frontier, split in ((20, "chunks"), (256, "blocks")):
        folded.reset()
        first = folded.prefill((IDS * 7)[:frontier])
        folded.reset_executed()
        folded.decode(first or 0, 1)
        ran = [tuple(line) for line in paths(folded.executed()) if line[0] == "decode_attention"]
        tried = reach._attention(folded, frontier, 1)
        assert ran == [line for line, _ in tried] and ran[0][2].startswith(split)
        assert all(reach._attention_error(folded, call) < 1e-5 for _, call in tried)
