"""Launches of a decode step: predicted from graphs without a GPU, held by a profiler on one, kept in rows."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import sessions

from ablations.arms import preset
from engine.checkpoint import load
from engine.config import EngineConfig, ModelConfig
from engine.device import activation_dtype
from engine.generate import Engine
from engine.synthetic import REAL, make_weights
from engine.tiny import CHECKPOINT
from sweeps import launches
from sweeps.launches import Uncounted, counted, launches_of, of_engine, of_geometry, of_subject, on_device, written
from sweeps.subjects.engine import EngineSubject

ARM = sessions.arm("one")

MOST = 300
"""Launches that a fused step of the real model may have."""


def fused() -> EngineConfig:
    """Our own kernels in the whole step."""
    config = EngineConfig()
    config.decode.fusion, config.decode_attention.variant = "full", "metal"
    return config


def test_a_graph_is_read_as_it_is_computed():
    x = mx.ones((4, 4))
    mx.eval(x)
    left, right = mx.exp(x), mx.sin(x)
    joined = mx.concatenate([left.reshape(2, 8), right.reshape(2, 8)])
    names = Counter(node.name for node in written(mx.abs(joined)))
    assert names == {"Exp": 1, "Sin": 1, "Reshape": 2, "Concatenate": 1, "Abs": 1}
    step = counted(written(mx.abs(joined)), lambda node: launches_of(node.name, node.inputs, "cuda"))
    # Two beside one another, a copy of each, one after them; views launch nothing.
    assert (step.launches, step.stages) == (5, 3)
    assert step.by_operation == {"Exp": 1, "Sin": 1, "Concatenate": 2, "Abs": 1}


@pytest.mark.parametrize(
    ("operation", "inputs", "device", "keys", "cost"),
    [
        ("Reshape", 1, "cuda", 0, (0, 0)),
        ("CompiledBroadcastAdd", 2, "metal", 0, (1, 1)),
        ("ScatterAxis", 3, "cuda", 0, (1, 1)),
        ("DynamicSliceUpdate", 3, "cuda", 0, (2, 2)),
        ("Concatenate", 3, "metal", 0, (3, 1)),
        ("ScaledDotProductAttention", 4, "metal", 256, (1, 1)),
        ("ScaledDotProductAttention", 4, "metal", 4096, (2, 2)),
        ("ScaledDotProductAttention", 4, "cuda", 4096, (1, 1)),
    ],
)
def test_what_an_operation_costs(operation, inputs, device, keys, cost):
    assert launches_of(operation, inputs, device, keys) == cost


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_the_fused_step_of_the_real_model_stays_under_300_launches(device):
    step = of_geometry(REAL, fused(), device, 4096)
    layers, full = REAL.num_hidden_layers, len(REAL.attention_layers)
    linear = layers - full
    by = step.by_operation
    # The products of a mixer and its end, the router beside the shared expert; the head's products are one more.
    assert by["linear_decode_products"] == 3 * layers + 1
    assert by["gated_delta_decode_step"] == linear
    assert by["experts_decode_up"] == by["experts_decode_down"] == layers
    read = "attention_decode_tiles" if device == "cuda" else "attention_decode_split"
    assert by["rotary_decode_rotate"] == by[read] == full
    ours = sum(n for name, n in by.items() if "_decode_" in name)
    assert sum(by.values()) == step.launches <= MOST
    # What MLX launches beside our kernels: at most the cache's rows, position and finiteness.
    assert step.launches - ours <= 2 * full + 8
    assert 6 * layers <= step.stages <= step.launches


def test_a_replayed_step_is_told_by_its_recording():
    """Nothing but our own kernels, each after the one before; as many on an engine as from its geometry."""
    traced = fused()
    traced.decode.trace = "step"
    replayed, compiled = (of_geometry(REAL, config, "cuda") for config in (fused(), traced))
    assert replayed.stages == replayed.launches == sum(replayed.by_operation.values())
    assert all("_decode_" in name for name in replayed.by_operation)
    assert compiled.stages < compiled.launches and replayed.launches <= compiled.launches + len(REAL.attention_layers)


def test_longer_contexts_launch_no_more():
    short, long = (of_geometry(REAL, fused(), "metal", at) for at in (256, 131_072))
    assert short == long


def test_pages_cost_no_launches():
    """A fused step writes the rows of all layers in one launch, and finds what it reads by the table."""
    small = dataclasses.replace(REAL, num_hidden_layers=4)
    paged = fused()
    paged.cache.layout = "paged"
    whole, pages = (of_geometry(small, config, "metal", 4096) for config in (fused(), paged))
    assert whole.launches == pages.launches
    for step in (whole, pages):
        assert step.by_operation["recent_decode_update"] == 1 and "ScatterAxis" not in step.by_operation


def test_fusion_is_told_by_the_count():
    small = dataclasses.replace(REAL, num_hidden_layers=8)
    off, whole = (of_geometry(small, config, "metal") for config in (EngineConfig(), fused()))
    assert off.launches > 3 * whole.launches
    assert off.stages < off.launches


def test_a_prediction_takes_no_memory_and_leaves_mlx_as_it_was():
    before, rms_norm = mx.get_active_memory(), mx.fast.rms_norm
    weights = launches.shapes(REAL)
    assert weights.nbytes == pytest.approx(19_508_789_376, rel=1e-6)
    assert mx.get_active_memory() - before < 1e6
    of_geometry(dataclasses.replace(REAL, num_hidden_layers=4), fused(), "metal")
    assert mx.fast.rms_norm is rms_norm


def test_the_committed_counts_are_of_this_engine():
    """Fails when a step has changed: ``python -m sweeps.launches reports/published/launches.json``, then
    ``python -m reports predict``."""
    path = Path(__file__).parents[1] / "reports" / "published" / "launches.json"
    told = json.loads(path.read_text(encoding="utf-8"))["steps"]
    for name, config in {"fused": fused(), "full": preset("full"), "mlx": preset("mlx")}.items():
        step = of_geometry(ModelConfig(), config, "metal", 32_768)
        assert told[name]["32768"] == [step.launches, step.stages], name


# -- live engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded():
    return load(CHECKPOINT, activation_dtype())


def engine_of(loaded, config: EngineConfig | None = None) -> Engine:
    return Engine(loaded.config, loaded.weights, config, dtype=activation_dtype())


def answer(engine: Engine) -> object:
    return engine.decode(engine.prefill([5, 6, 7]) or 0, 3)


def test_a_live_step_is_counted_and_the_engine_goes_on(loaded):
    engine = engine_of(loaded)
    expected = answer(engine)
    step = of_engine(engine, 100)
    assert step.launches > step.stages > loaded.config.num_hidden_layers
    engine.reset()
    assert answer(engine) == expected
    assert of_engine(engine, 101) == step


def test_what_is_no_single_graph_has_no_count(loaded):
    engine = engine_of(loaded, preset("plain"))
    engine.cache.reserve(256)
    with pytest.raises(Uncounted, match="route reads back to the host"):
        of_engine(engine, 10)
    full = engine_of(loaded)
    with pytest.raises(Uncounted, match="the cache holds 0 positions"):
        of_engine(full, 10)


def test_rows_say_what_is_known_and_why_the_rest_is_not(loaded):
    subject = EngineSubject(engine_of(loaded))
    subject.engine.cache.reserve(256)
    facts = of_subject(subject, [64, 4096], lambda count: list(range(5, 5 + count)))
    assert facts[64]["launches_predicted"] > facts[64]["stages_predicted"] > 0
    assert sum(facts[64]["operations"].values()) == facts[64]["launches_predicted"]
    assert facts[4096]["launches_predicted"] is None
    assert facts[4096]["launches_unpredicted"] == "the cache holds 256 positions"
    if not mx.cuda.is_available():
        assert facts[64]["launches_device"] is None and "CUDA only" in facts[64]["launches_uncounted"]
    assert subject.position() == 0


def test_the_device_is_asked_by_difference(monkeypatch):
    """What a stretch begins and ends with is in both stretches and in no step."""
    seen: list[int] = []

    def records(profile, work):
        work()
        return Counter({"kernel": 7 * seen[-1] + 3, "end": 2})

    monkeypatch.setattr(launches, "_profiler", lambda: None)
    monkeypatch.setattr(launches, "_records", records)
    each, kernels = on_device(seen.append)
    assert each == 7 and kernels == {"kernel": 7.0}
    assert seen == [launches.LONG, launches.SHORT, launches.LONG]
    monkeypatch.setattr(launches, "_records", lambda profile, work: Counter())
    with pytest.raises(Uncounted, match="recorded no kernel"):
        on_device(seen.append)


def test_kernels_of_a_profile_are_told_from_calls_of_the_host_and_copies():
    """Read from the profiler's own records: torch's list of events takes many times as long to make."""

    def record(name, device):
        return SimpleNamespace(name=lambda: name, device_type=lambda: SimpleNamespace(name=device))

    host = [record("cudaLaunchKernel", "CPU")] * 5
    gpu = [record(name, "CUDA") for name in ("gemv", "Memcpy DtoD", "gemv", "Memset (Device)", "norm")]
    results = SimpleNamespace(events=lambda: [*host, *gpu])
    assert launches._kernels(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))) == {
        "gemv": 2,
        "norm": 1,
    }


@pytest.mark.full
def test_torch_keeps_the_records_that_kernels_are_read_from():
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.zeros(3) + 1
    profiler: Any = seen.profiler
    events: Any = seen.events()
    names = Counter(record.name() for record in profiler.kineto_results.events())
    assert names["aten::add"] == 1 and names == Counter(event.name for event in events)
    assert launches._kernels(seen) == {}


def test_a_session_asks_once_after_its_last_window(run_dir):
    bench = sessions.Bench(sessions.job(run_dir, [ARM, sessions.arm("aa", aa=True)], sessions.points([256, 512])))
    asked: list[tuple[list[int], int]] = []

    def counter(subject, frontiers, prompt):
        done = len(bench.rows(block=1))
        asked.append((list(frontiers), done))
        assert len(prompt(100)) == 100
        return {at: {"launches_predicted": at} for at in frontiers}

    assert bench.run(launches=counter)
    # Four points, two windows of each arm in the last block of each; the repeat of an arm is not asked.
    assert asked == [([256, 512], 16)]
    told = [row for row in bench.rows(block=-1) if "launches" in row.flags]
    assert [(row.arm, row.phase, row.extra["launches_predicted"]) for row in told] == [
        ("one", "decode", 256),
        ("one", "decode", 512),
    ]
    assert bench.run(launches=counter) and bench.run(session=1, launches=counter)
    assert len(asked) == 1


def test_a_count_that_fails_costs_no_window(run_dir):
    def broken(subject, frontiers, prompt):
        raise RuntimeError("no profiler\nat all")

    bench = sessions.Bench(sessions.job(run_dir, [ARM], sessions.points([256])))
    assert bench.run(launches=broken)
    (row,) = (row for row in bench.rows(block=-1) if "launches" in row.flags)
    assert row.extra["launches_unpredicted"] == "RuntimeError: no profiler at all"


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "most"), [(fused(), 0.03), (EngineConfig(), 0.06)], ids=["fused", "off"])
def test_the_device_launches_what_is_predicted(config, most):
    """Both kinds of layer at the real sizes. MLX's ops also copy inputs with strides, which no graph tells."""
    if not mx.cuda.is_available():
        pytest.skip("launches are recorded on CUDA only")
    pytest.importorskip("torch")
    geometry = dataclasses.replace(REAL, num_hidden_layers=8, num_experts=32)
    engine = Engine(geometry, make_weights(geometry), config)
    facts = of_subject(EngineSubject(engine), [256], lambda count: list(range(5, 5 + count)))
    engine.cache.reserve(512)
    step = of_engine(engine, 256)
    assert facts[256].get("launches_uncounted") is None
    assert facts[256]["launches_device"] == pytest.approx(step.launches, rel=most), facts[256]["kernels"]
