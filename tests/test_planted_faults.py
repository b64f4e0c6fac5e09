"""Each fault that once shipped somewhere is planted in a right engine, and the guard must block it.

Both guards are tried: layer by layer on MLX-LM's inputs, and logits over text. Everything is float32, on a GPU too, so
that a right engine passes both with digits to spare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from ablations.guard import Thresholds
from engine.config import EngineConfig
from engine.generate import Engine
from engine.synthetic import make_weights, tiny_config
from engine.weights import Matrix, Weights
from sweeps.guard import compare_logits, layerwise
from sweeps.layers import Recording
from sweeps.subjects.engine import EngineSubject
from sweeps.subjects.mlx_lm import MlxLm
from sweeps.subjects.shared import build_lm_model

CONFIG = tiny_config(4, experts=8, num_experts_per_tok=2)
CONTEXT, STEPS = 48, 6
TOKENS = [(i * 2654435761) % 2**32 % CONFIG.vocab_size for i in range(400)]
DTYPE = mx.float32


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights.from_tensors(CONFIG, make_weights(CONFIG, seed=5).tensors, DTYPE)


@pytest.fixture(scope="module")
def model(weights):
    return build_lm_model(CONFIG, weights.tensors)


def engine_with(weights: Weights) -> Engine:
    config = EngineConfig()
    config.prefill.chunk = 16
    return Engine(CONFIG, weights, config, dtype=DTYPE)


class Wrapped:
    """A bound op whose result, or whose call, is bent."""

    def __init__(self, op: Any, bend: Callable[..., Any]):
        self._op, self._bend = op, bend

    def __call__(self, *arguments: Any, rows: int, residual: Any = None) -> Any:
        out = self._bend(lambda *a: self._op(*a, rows=rows), *arguments)
        return out if residual is None else residual + out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


def bend(engine: Engine, op: str, how: Callable[..., Any]) -> Engine:
    engine.model.ops = dataclasses.replace(engine.model.ops, **{op: Wrapped(getattr(engine.model.ops, op), how)})
    return engine


def scale_off_by_one_group(weights: Weights) -> Engine:
    name = "model.layers.1.mlp.switch_mlp.gate_proj.scales"
    scales = mx.array(weights.tensors[name])
    expert = 3
    scales[expert] = mx.roll(scales[expert], 1, axis=-1)
    return engine_with(Weights.from_tensors(CONFIG, {**weights.tensors, name: scales}))


def shared_gate_skipped(weights: Weights) -> Engine:
    hidden, wide = CONFIG.hidden_size, CONFIG.shared_expert_intermediate_size

    def how(run, x, routing, w):
        half = run(x, routing, dataclasses.replace(w, shared_gate=Matrix(mx.zeros((1, hidden), DTYPE))))
        none = run(x, routing, dataclasses.replace(w, shared_down_proj=Matrix(mx.zeros((hidden, wide), DTYPE))))
        return none + 2 * (half - none)

    return bend(engine_with(weights), "experts", how)


def key_value_block_dropped(weights: Weights) -> Engine:
    def how(run, q, keys, values, *rest):
        def kept(x):
            return mx.concatenate([x[..., :16, :], x[..., 32:, :]], axis=2) if x.shape[2] > CONTEXT else x

        return run(q, kept(keys), kept(values), *rest)

    return bend(engine_with(weights), "decode_attention", how)


def state_in_bfloat16(weights: Weights) -> Engine:
    def how(run, *arguments):
        out, conv, state = run(*arguments)
        return out, conv, state.astype(mx.bfloat16).astype(mx.float32)

    return bend(engine_with(weights), "gated_delta", how)


def position_off_by_one(weights: Weights) -> Engine:
    engine = engine_with(weights)
    rotate = engine.model._rotate

    def off(x, view):
        # Off in the decode step only: shifted everywhere, relative positions would be right again.
        if x.shape[2] > 1:
            return rotate(x, view)
        view.offset += 1
        try:
            return rotate(x, view)
        finally:
            view.offset -= 1

    engine.model._rotate = off  # type: ignore[method-assign]
    return engine


FAULTS = [
    scale_off_by_one_group,
    shared_gate_skipped,
    key_value_block_dropped,
    state_in_bfloat16,
    position_off_by_one,
]
PREFILL_TOO = [scale_off_by_one_group, shared_gate_skipped, state_in_bfloat16]


def by_layers(engine: Engine, model: Any, phase: str):
    if phase == "prefill":
        return layerwise(engine, Recording(model, TOKENS[:CONTEXT], chunk=16))
    return layerwise(engine, Recording(model, TOKENS[: CONTEXT + STEPS], context=CONTEXT, chunk=16))


def by_logits(engine: Engine, model: Any, phase: str):
    arm, reference = EngineSubject(engine), MlxLm(model, CONFIG, chunk=16)
    context = CONTEXT if phase == "decode" else 0
    return compare_logits(
        arm,
        reference,
        TOKENS,
        phase,  # type: ignore[arg-type]
        contexts=[context],
        positions=64,
        chunk=16,
        thresholds=Thresholds(min_positions=64),
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("guard", [by_layers, by_logits])
def test_right_engine_passes(weights, model, guard, phase):
    check = guard(engine_with(weights), model, phase)
    assert check.passed, check.reason


@pytest.mark.parametrize("guard", [by_layers, by_logits])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_blocked(weights, model, fault, guard):
    check = guard(fault(weights), model, "decode")
    assert not check.passed
    print(f"{fault.__name__}: {check.reason}")


@pytest.mark.parametrize("fault", PREFILL_TOO)
def test_fault_is_blocked_in_prefill(weights, model, fault):
    check = by_layers(fault(weights), model, "prefill")
    assert not check.passed
