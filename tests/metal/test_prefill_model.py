"""Prefill of a whole model with every variant that a GPU takes, on the simulator and on a GPU."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics

import mlx.core as mx
import numpy as np
import pytest
import simulator
from simulator import Simulator

from engine import generate
from engine.checkpoint import load
from engine.config import DecodeConfig, EngineConfig, ExpertsConfig, ModelConfig, PrefillConfig
from engine.device import activation_dtype
from engine.generate import Engine
from engine.kernels import experts_prefill, loader
from engine.kernels.loader import Launch
from engine.memory import prefill_room
from engine.ops import attention, gated_delta, relative_rms
from engine.ops.choice import Tuned
from engine.ops.route import Routing
from engine.synthetic import make_weights, tiny_config
from engine.tiny import CHECKPOINT
from engine.tokenizer import Tokenizer

TINY = tiny_config(4)
CHUNK = 64
EAGER = DecodeConfig(trace="eager", fusion="off")
CHOSEN = {"linear": "expanded", "experts": "packed", "gated_delta": "registers", "prefill_attention": "metal"}
IDS = np.random.default_rng(3).integers(0, 440, 200).tolist()


@pytest.fixture(scope="module")
def weights():
    return make_weights(TINY, 0)


def as_on_cuda(monkeypatch, launch) -> None:
    """The device's kind in every module that asks, and something that takes its launches."""
    for module in (generate, attention, gated_delta):
        monkeypatch.setattr(module, "device_kind", lambda: "cuda")
    monkeypatch.setattr(loader, "launch", launch)


def on_cuda(weights, submission="chunk", **ops) -> Engine:
    config = EngineConfig(decode=EAGER, prefill=PrefillConfig(CHUNK, submission), **ops)
    return Engine(TINY, weights, config, dtype=mx.bfloat16, tuned=Tuned(), refuses=None)


def zeros(call: Launch) -> list[mx.array]:
    return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]


def named(variant: str, attention: str) -> EngineConfig:
    """An engine of one kind of variant throughout; MLX's gathered packed product is no yardstick on CUDA."""
    experts = ExpertsConfig("expanded" if variant == "mlx" and mx.cuda.is_available() else variant)
    config = EngineConfig(linear=variant, experts=experts, prefill_attention=attention, head=variant)
    config.prefill.chunk, config.decode = CHUNK, EAGER
    config.route, config.decode_attention.variant = variant, variant
    config.gated_delta = "reference" if variant == "reference" else "recurrence"
    return config


@pytest.mark.parametrize(("submission", "waits"), [("chunk", 0), ("layer", 4)])
def test_a_chunk_waits_for_the_device_only_where_it_is_told_to(weights, monkeypatch, submission, waits):
    as_on_cuda(monkeypatch, zeros)
    engine = on_cuda(weights, submission)
    engine.cache.reserve(2 * CHUNK)
    # What is made once and kept is made here.
    engine._pass(IDS[:CHUNK])
    seen: list[str] = []
    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, lambda *_, name=name: seen.append(name))
    monkeypatch.setattr(np, "array", lambda *_: seen.append("read"))
    engine._pass(IDS[CHUNK : 2 * CHUNK])
    assert seen == ["eval"] * waits


@pytest.mark.parametrize(("stretch", "submitted"), [(1, 3), (2, 1), (3, 1), (4, 0), (40, 0)])
def test_a_chunk_is_submitted_in_stretches_that_nothing_waits_for(weights, monkeypatch, stretch, submitted):
    as_on_cuda(monkeypatch, zeros)
    engine = on_cuda(weights)
    assert (engine._stretch(512), engine._stretch(2048)) == (4, 8)
    engine.engine.prefill.stretch = stretch
    engine.cache.reserve(CHUNK)
    seen: list[str] = []
    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, lambda *_, name=name: seen.append(name))
    engine._pass(IDS[:CHUNK])
    assert seen == ["async_eval"] * submitted


def test_at_most_two_chunks_are_in_flight(weights, monkeypatch):
    as_on_cuda(monkeypatch, zeros)
    engine, flying, most = on_cuda(weights), 0, []
    engine.cache.reserve(4 * CHUNK)

    def submit(*_: mx.array) -> None:
        nonlocal flying
        flying += 1
        most.append(flying)

    def wait(*_: mx.array) -> None:
        nonlocal flying
        flying -= 1

    wait_for = mx.eval
    monkeypatch.setattr(mx, "async_eval", submit)
    monkeypatch.setattr(mx, "eval", lambda *given: (wait(), wait_for(*given)))
    engine.prefill(IDS[: 3 * CHUNK + 1], last=False)
    assert max(most) == 2 and len(most) == 3


class SameRoutes:
    """Ops of which the first engine's routing decides for all: a near-tie of the router is no error of theirs."""

    def __init__(self, ops, decided: list[mx.array] | None):
        self._ops, self._decided, self.seen = ops, decided, []

    def __getattr__(self, name: str):
        return getattr(self._ops, name)

    def route(self, logits: mx.array, k: int, renormalise: bool, rows: int) -> Routing:
        routing = self._ops.route(logits, k, renormalise, rows=rows)
        if self._decided is not None:
            ids = self._decided[len(self.seen)]
            chosen = mx.take_along_axis(logits.astype(mx.float32), ids, axis=-1)
            routing = Routing(ids, mx.softmax(chosen, axis=-1).astype(logits.dtype))
        self.seen.append(routing.ids)
        return routing


def check(weights, monkeypatch, ids: list[int], **ops) -> Engine:
    """Logits, cache and states are at most a quarter further from float32 than those of MLX's ops of 16 bits."""
    reference = Engine(TINY, weights, named("reference", "reference"), dtype=mx.float32, tuned=Tuned())
    plain = Engine(TINY, weights, named("mlx", "mlx"), dtype=mx.bfloat16, tuned=Tuned())
    reference.model.ops = same = SameRoutes(reference.ops, None)
    made = [held(reference, ids)]
    plain.model.ops = SameRoutes(plain.ops, same.seen)
    made.append(held(plain, ids))
    as_on_cuda(monkeypatch, Simulator().launch)
    ours = on_cuda(weights, **ops)
    ours.model.ops = SameRoutes(ours.ops, same.seen)
    made.append(held(ours, ids))
    for want, mlx, got in zip(*made, strict=True):
        assert relative_rms(got, want) <= max(1.25 * relative_rms(mlx, want), 1e-2)
    return ours


def held(engine: Engine, ids: list[int]) -> list[mx.array]:
    """Logits of the last chunk and all that the cache holds, in float32."""
    engine.reset()
    engine.cache.reserve(len(ids))
    h = None
    for start in range(0, len(ids), CHUNK):
        h = engine._pass(ids[start : start + CHUNK])
    assert h is not None
    s = engine.cache.state
    rows = [part[..., : len(ids), :] for name in ("keys", "values") for part in s[name]]
    return [part.astype(mx.float32) for part in (engine.model.head(h), *rows, *s["recurrent"], *sum(s["conv"], []))]


simulated = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


@simulated
def test_all_that_a_gpu_runs_agrees_with_float32(weights, monkeypatch):
    """A chunk and one row more: what one row takes is another kernel."""
    ours = check(weights, monkeypatch, IDS[: CHUNK + 1])
    ran = {(line["op"], line["variant"]) for line in ours.ops.recorder.executed()}
    assert ran >= set(CHOSEN.items())


@simulated
@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "one token"])
@pytest.mark.parametrize("length", [1, 9, 15, 16, 17, 31, 33, CHUNK - 1, CHUNK, 2 * CHUNK + 9])
def test_chunk_and_tile_edges_agree_with_float32(length, kind, weights, monkeypatch):
    check(weights, monkeypatch, IDS[:length] if kind == "text" else [7] * length)


@simulated
@pytest.mark.full
@pytest.mark.parametrize("tile", experts_prefill.TILES)
def test_every_tile_and_the_other_variants_agree_with_float32(tile, weights, monkeypatch):
    experts, ids = ExpertsConfig("expanded_grouped" if tile == "16" else "packed", tile), IDS[: CHUNK + 33]
    check(weights, monkeypatch, ids, linear="packed", gated_delta="chunked", experts=experts)


# -- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["text", "one token"])
@pytest.mark.parametrize("length", [1, 9, 33, 512, 513, 1100])
def test_the_embedded_models_logits_agree_with_the_reference_on_a_gpu(length, kind):
    """Of every row of the last chunk, and with the same best token wherever float32 has no near-tie."""
    loaded = load(CHECKPOINT, activation_dtype(), mtp=False)
    topics = pydoc_data.topics.topics
    text = Tokenizer.from_path(CHECKPOINT).encode(" ".join(topics[name] for name in sorted(topics)[:20]))
    ids = text[:length] if kind == "text" else [text[0]] * length
    made, decided = [], None
    arms = ((named("reference", "reference"), mx.float32), (named("mlx", "mlx"), None), (EngineConfig(), None))
    for config, dtype in arms:
        config.prefill.chunk = 512
        engine = Engine(loaded.config, loaded.weights, config, dtype=dtype, tuned=Tuned())
        engine.model.ops = same = SameRoutes(engine.ops, decided)
        decided = decided or same.seen
        engine.cache.reserve(length)
        h = None
        for start in range(0, length, 512):
            h = engine._pass(ids[start : start + 512])
        assert h is not None
        made.append(engine.model.head(h)[0].astype(mx.float32))
    want, mlx, got = made
    assert relative_rms(got, want) <= max(1.25 * relative_rms(mlx, want), 2e-2)
    top = mx.topk(want, 2, axis=-1)
    clear = mx.abs(top[:, 0] - top[:, 1]) > 0.05 * mx.abs(top).max(axis=-1)
    assert mx.where(clear, mx.argmax(got, axis=-1) == mx.argmax(want, axis=-1), True).all().item()


@pytest.mark.gpu
def test_peak_memory_at_the_longest_context_falls_with_the_chunk_on_a_gpu():
    """Eight layers of the real width over 128K positions: what a chunk needs for a while lives no longer than a few."""
    config = dataclasses.replace(ModelConfig(), num_hidden_layers=8)
    weights, positions, peaks = make_weights(config), 131_072, {}
    for chunk in (8192, 2048, 512):
        engine = Engine(config, weights, EngineConfig(prefill=PrefillConfig(chunk)), tuned=Tuned())
        engine.cache.reserve(positions)
        mx.eval(engine.cache.arrays())
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.prefill(IDS[:128] * (positions // 128), last=False)
        peaks[chunk] = mx.get_peak_memory() - before
        del engine
    assert peaks[512] < peaks[2048] < peaks[8192]
    assert peaks[2048] <= 2.5e9
    # MLX looks after every operation, but not at a graph that it has cut short to look.
    assert all(peak <= 2 * prefill_room(config, chunk) for chunk, peak in peaks.items())
