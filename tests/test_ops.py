"""Every variant of every op against its float32 reference, and the registry's own rules."""

from __future__ import annotations

import io

import mlx.core as mx
import numpy as np
import pytest

from engine.config import DecodeConfig, EngineConfig, ExpertsConfig
from engine.device import activation_dtype, device_kind
from engine.generate import Engine
from engine.ops import OPS, bind, relative_rms, selftest
from engine.ops.gated_delta import _unit_lower_inverse
from engine.ops.registry import Case, Recorder, VariantUnsupported, declare
from engine.ops.route import Routing
from engine.ops.selftest import case_error
from engine.synthetic import make_weights, tiny_config

PAIRS = [(op, name) for op in OPS.values() for name in op.variants if name != "reference"]


@pytest.mark.parametrize(("op", "name"), PAIRS, ids=lambda v: v if isinstance(v, str) else v.name)
def test_variant_agrees_with_its_reference(op, name):
    variant, device = op.variants[name], device_kind()
    reason = variant.supports(None, device)
    if reason is not None:
        with pytest.raises(VariantUnsupported, match="cannot run here"):
            op.choose(name, device, "prefill")
        return
    result = selftest(op, variant, device, activation_dtype())
    assert result.error is None
    assert result.cases == len(op.cases)


@pytest.mark.parametrize("split", ["chunks", "blocks"])
def test_split_attention_agrees_with_its_reference(split):
    op = OPS["decode_attention"]
    for case in op.cases:
        error = case_error(op, op.variants["matmul"], case, mx.float32, split=split, blocks=3)
        assert error <= op.tolerance["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), PAIRS, ids=lambda v: v if isinstance(v, str) else v.name)
def test_variant_agrees_in_bfloat16_on_a_gpu(op, name):
    device = device_kind()
    if op.variants[name].supports(None, device) is not None:
        pytest.skip(op.variants[name].supports(None, device))
    assert selftest(op, op.variants[name], device, mx.bfloat16).error is None


def test_selftest_names_the_case_of_a_wrong_variant():
    op = OPS["linear"]
    broken = type(op.variants["mlx"])("broken", lambda x, w: op.variants["mlx"].run(x, w) * 1.001, "off by 0.1 %")
    result = selftest(op, broken, "cpu", mx.float32)
    assert result.error is not None and op.cases[0].name in result.error


def test_relative_rms_never_passes_nan_or_a_wrong_shape():
    want = mx.ones((3,))
    assert relative_rms(mx.array([1.0, float("nan"), 1.0]), want) == float("inf")
    assert relative_rms(mx.ones((4,)), want) == float("inf")


@pytest.mark.parametrize("variant", ["mlx", "topk", "host"])
def test_equal_logits_choose_the_highest_experts(variant):
    """A routing that breaks ties the other way changes tokens without any error showing."""
    routing: Routing = OPS["route"].variants[variant].run(mx.zeros((2, 32)), 8, True)
    assert np.array_equal(np.sort(np.array(routing.ids)), np.tile(np.arange(24, 32), (2, 1)))
    assert np.allclose(np.array(routing.weights), 1 / 8)


@pytest.mark.parametrize("variant", ["mlx", "topk", "host"])
def test_weights_without_renormalising_are_the_softmax_probabilities(variant):
    logits = mx.random.normal((5, 32), key=mx.random.key(3))
    routing = OPS["route"].variants[variant].run(logits, 8, False)
    want = mx.take_along_axis(mx.softmax(logits, axis=-1), routing.ids, axis=-1)
    assert np.allclose(np.array(routing.weights), np.array(want), rtol=1e-5)


def test_triangular_inverse_is_exact_where_a_neumann_series_would_overflow():
    n = 64
    lower = mx.tri(n, k=-1) * mx.random.uniform(-1, 1, (2, n, n), key=mx.random.key(0)) * 0.9
    inverse = np.array(_unit_lower_inverse(lower), dtype=np.float64)
    want = np.linalg.inv(np.eye(n) + np.array(lower, dtype=np.float64))
    assert np.linalg.norm(inverse - want) / np.linalg.norm(want) < 1e-5


def test_recurrent_state_error_stays_flat_over_a_thousand_steps():
    """A state rounded to 16 bits drifts; one in float32 does not."""
    op = OPS["gated_delta"]
    case = op.cases[0]
    arguments = list(op.inputs(case, mx.float32, 0))
    exact, fast = list(arguments), list(arguments)
    errors = []
    for step in range(1000):
        row = op.inputs(case, mx.float32, 100 + step)[:4]
        exact[:4], fast[:4] = row, row
        _, exact[4], exact[5] = op.reference.run(*exact)
        _, fast[4], fast[5] = op.variants["chunked"].run(*fast)
        if step in (9, 999):
            errors.append(relative_rms(fast[5], exact[5]))
    assert errors[1] < 1e-5 and errors[1] < 20 * max(errors[0], 1e-8)


def test_the_recurrence_compiled_for_a_gpu_is_the_recurrence(monkeypatch):
    op = OPS["gated_delta"]
    arguments = op.inputs(next(case for case in op.cases if case["rows"] == 5), mx.float32, 0)
    want = op.variants["recurrence"].run(*arguments)
    monkeypatch.setattr("engine.ops.gated_delta.device_kind", lambda: "cuda")
    got = op.variants["recurrence"].run(*arguments)
    for mine, theirs in ((got[0], want[0]), (got[2], want[2])):
        assert relative_rms(mine, theirs) < 1e-6


def test_an_unknown_variant_is_refused_with_the_names_there_are():
    with pytest.raises(VariantUnsupported, match="no such variant; there are reference, mlx, expanded"):
        bind(EngineConfig(linear="mxl"), "cpu")


@pytest.mark.parametrize("device", ["metal", "cuda", "cpu"])
def test_every_op_has_a_best_variant_on_every_device(device):
    for bound in bind(EngineConfig(), device).all():
        assert bound.decode.supports(None, device) is None
        assert bound.prefill.supports(None, device) is None
        assert bound.decode.name != "reference"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decode_attention.heads", "4"),
        ("decode_attention.lanes", "apart"),
        ("decode_attention.min_context", 4096),
        ("decode_attention.split", "blocks"),
        ("decode_attention.split", "halves"),
        ("cache.layout", "paged"),
        ("experts.tile", "64x64"),
        ("decode.fusion", "full"),
    ],
)
def test_a_setting_that_no_variant_honours_is_refused(field, value):
    """A switch that is accepted and then ignored would be measured as a difference of nothing."""
    config = EngineConfig()
    config.decode_attention.variant = "mlx"
    *path, name = field.split(".")
    owner = config
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    with pytest.raises(VariantUnsupported):
        bind(config, "cpu")


def test_blocks_apply_from_min_context_positions_up():
    """Below it the same variant splits in chunks; what ran is what the record says."""
    config = EngineConfig()
    config.decode_attention.variant = "matmul"
    config.decode_attention.split = "blocks"
    config.decode_attention.min_context = 512
    bound = bind(config, "cpu")
    for shown in (511, 512):
        given = OPS["decode_attention"].inputs(Case("", {"rows": 1, "n": shown, "kv": 1, "at": -1}), mx.float32, 0)
        got = bound.decode_attention(*given, rows=1)
        assert relative_rms(got, OPS["decode_attention"].reference.run(*given)) < 1e-5
    assert [line["tile"] for line in bound.recorder.executed()] == ["blocks", "chunks"]


def test_min_context_without_a_named_split_is_refused():
    config = EngineConfig()
    config.decode_attention.min_context = 512
    with pytest.raises(VariantUnsupported, match="name a split"):
        bind(config, "cpu")


@pytest.mark.parametrize(("op", "wanted"), [("decode_attention", "matmul"), ("prefill_attention", "tiled")])
def test_a_variant_that_reads_keys_in_one_piece_refuses_pages(op, wanted):
    config = EngineConfig()
    config.cache.layout = "paged"
    if op == "decode_attention":
        config.decode_attention.variant = wanted
    else:
        config.prefill_attention = wanted
    with pytest.raises(VariantUnsupported, match="in one piece, not in pages; take"):
        bind(config, "cpu")


@pytest.mark.parametrize(("device", "decode"), [("cpu", "gathered"), ("cuda", "metal"), ("metal", "metal")])
def test_the_best_variant_for_pages_reads_them(device, decode):
    config = EngineConfig()
    config.cache.layout = "paged"
    bound = bind(config, device)
    assert (bound.decode_attention.decode.name, bound.prefill_attention.prefill.name) == (decode, "gathered")
    if decode == "metal":
        config.decode_attention.lanes = "tiles"
        with pytest.raises(VariantUnsupported, match="not in pages"):
            bind(config, device)


def test_a_variant_that_reads_the_host_refuses_a_traced_step():
    config, tiny = EngineConfig(route="host", decode=DecodeConfig(trace="step")), tiny_config(4)
    with pytest.raises(VariantUnsupported, match="route reads back to the host"):
        Engine(tiny, make_weights(tiny, 0, dtype=mx.float32), config)


def test_an_op_declared_twice_is_refused():
    with pytest.raises(ValueError, match="declared twice"):
        declare(OPS["linear"])


def test_a_recorder_counts_a_trace_once_for_every_run():
    recorder = Recorder()
    captured = recorder.capture()
    recorder.record("linear", "mlx")
    recorder.release()
    assert recorder.executed() == []
    for _ in range(3):
        recorder.replay(captured)
    assert recorder.executed() == [{"op": "linear", "variant": "mlx", "tile": "", "calls": 3}]


@pytest.mark.parametrize(
    ("config", "op", "variant"),
    [
        (EngineConfig(linear="expanded"), "linear", "expanded"),
        (EngineConfig(route="host"), "route", "host"),
        (EngineConfig(experts=ExpertsConfig("expanded")), "experts", "expanded"),
        (EngineConfig(gated_delta="recurrence"), "gated_delta", "recurrence"),
        (EngineConfig(prefill_attention="mlx"), "prefill_attention", "mlx"),
        (EngineConfig(head="expanded"), "head", "expanded"),
    ],
)
def test_every_named_variant_shows_in_executed(config, op, variant):
    tiny = tiny_config(4)
    engine = Engine(tiny, make_weights(tiny, 0, dtype=mx.float32), config)
    engine.prefill(list(range(1, 20)))
    ran = {(e["op"], e["variant"]) for e in engine.executed()}
    assert (op, variant) in ran
    assert {v for o, v in ran if o == op} == {variant}


@pytest.mark.parametrize("split", ["chunks", "blocks"])
@pytest.mark.parametrize("n", [1, 255, 257, 513, 600])
def test_what_is_recorded_as_split_is_split_at_every_length(n, split):
    op = OPS["decode_attention"]
    q, keys, values, scale, position = op.inputs(Case("", {"rows": 1, "n": n, "kv": 2, "at": -1}), mx.float32, 0)
    made = op.variants["matmul"].run(q, keys, values, scale, position, split=split, blocks=8)
    graph = io.StringIO()
    mx.export_to_dot(graph, made)
    assert relative_rms(made, op.reference.run(q, keys, values, scale, position)) <= op.tolerance["float32"]
    # One product gives the scores; the values take one, and one more for a shorter last part.
    parts = [n] if n <= (256 if split == "chunks" else 1) else [-(-n // 8) if split == "blocks" else 256]
    assert graph.getvalue().count("Matmul") == (2 if n % parts[0] == 0 else 3)
