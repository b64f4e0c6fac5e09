"""The folded decode step on the simulator: the same hidden rows, caches and tokens as the model of separate ops."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import simulator
from simulator import Simulator

from engine.config import DecodeConfig, EngineConfig
from engine.folded import FoldedModel
from engine.generate import Engine
from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import bind, relative_rms
from engine.synthetic import make_weights, tiny_config

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
    assert folded.prefill(IDS) == first and not seen, "a long pass is not folded"
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
    assert len(names) == 3 * 6 + 6 + 2, names
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
