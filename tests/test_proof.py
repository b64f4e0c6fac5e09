"""Kernels are tried once before use: one that fails is refused by name, the rest run, and the answer is kept."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import pytest

from engine import proof, tuned
from engine.config import CacheConfig, DecodeConfig, EngineConfig
from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import OPS, VariantUnsupported, bind
from engine.ops.choice import Choice, Tuned

MESSAGE = "program_source:12: error: use of undeclared identifier 'simd_summ'"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """As on a Mac that has never seen the kernels."""
    monkeypatch.setattr(proof, "device_kind", lambda: "metal")
    monkeypatch.setattr(proof, "FOLDER", tmp_path)


def reject(call: Launch) -> list[mx.array]:
    raise RuntimeError(f"[metal::Device] Unable to build metal library from source\n{MESSAGE}")


def wrong(call: Launch) -> list[mx.array]:
    return [mx.full(shape, 0.5, dtype) for shape, dtype in zip(call.shapes, call.dtypes)]


def test_what_does_not_compile_is_refused_with_the_compilers_message(monkeypatch):
    monkeypatch.setattr(loader, "launch", reject)
    reason = proof.refusal("decode_attention", "metal")
    assert reason is not None and MESSAGE in reason
    config = EngineConfig()
    config.decode_attention.variant = "metal"
    with pytest.raises(VariantUnsupported, match="decode_attention=metal cannot run here: its self-test failed"):
        bind(config, "metal", refuses=proof.refusal)


def test_what_computes_wrong_is_refused_with_its_error(monkeypatch):
    monkeypatch.setattr(loader, "launch", wrong)
    for part, name in (("decode_attention", "metal"), ("unit", "rotary"), ("unit", "recent")):
        reason = proof.refusal(part, name)
        assert reason is not None and "exceeds" in reason


def test_every_instance_of_a_kernel_is_tried_on_metal(monkeypatch):
    """One of several instances that fails is enough, and is named."""
    op = OPS["decode_attention"]
    right = op.reference.run

    def run(*given, lanes="coalesced", **settings):
        if lanes == "tiles":
            raise RuntimeError(MESSAGE)
        return right(*given)

    variant = dataclasses.replace(op.variants["metal"], run=run)
    monkeypatch.setitem(OPS, "decode_attention", dataclasses.replace(op, variants={**op.variants, "metal": variant}))
    reason = proof.refusal("decode_attention", "metal")
    assert reason is not None and "'lanes': 'tiles'" in reason and MESSAGE in reason


def test_kernels_of_many_rows_are_tried_even_where_few_rows_take_none(monkeypatch):
    monkeypatch.setattr(loader, "launch", wrong)
    monkeypatch.setattr("engine.ops.gated_delta.device_kind", lambda: "metal")
    monkeypatch.setattr(proof, "activation_dtype", lambda: mx.bfloat16)
    reason = proof.refusal("gated_delta", "chunked")
    assert reason is not None and "exceeds" in reason
    assert bind(EngineConfig(), "cuda", refuses=proof.refusal).gated_delta.prefill.name == "products"


def test_the_rest_still_run(monkeypatch):
    """``best`` passes over what failed, in the declared order, in a tuned file and in fusion."""
    monkeypatch.setattr(loader, "launch", reject)
    paged = EngineConfig(cache=CacheConfig(layout="paged"))
    assert bind(paged, "metal").decode_attention.decode.name == "metal"
    assert bind(paged, "metal", refuses=proof.refusal).decode_attention.decode.name == "gathered"
    measured = Tuned(choices={"decode_attention": (Choice("decode", 1, 256, "metal", {}),)}, fusion="full")
    bound = bind(EngineConfig(), "metal", measured, proof.refusal)
    assert bound.fusion == "off" and bound.decode_attention.pick(1)[0].name == "mlx"
    for op in bound.all():
        assert proof.refusal(op.op.name, op.decode.name) is None


def test_an_untuned_folded_step_takes_other_attention_where_ours_fails():
    only = {("decode_attention", "metal"): "its self-test failed here, no keys"}
    assert bind(EngineConfig(), "cuda", folds=True).decode_attention.always("metal")
    bound = bind(EngineConfig(), "cuda", refuses=lambda *part: only.get(part), folds=True)
    assert bound.fusion == "full" and bound.decode_attention.decode.name == "matmul"


@pytest.mark.parametrize("trace", ["replay", "step"])
def test_a_tuned_recording_keeps_the_attention_that_it_was_timed_with(trace):
    """Attention alone may be faster otherwise; a step with it could not be recorded."""
    choices = {"decode_attention": (Choice("decode", 1, 256, "matmul", {}),)}
    bound = bind(EngineConfig(), "cuda", Tuned(choices, fusion="full", trace=trace), folds=True)
    assert bound.fusion == "full" and bound.decode_attention.always("metal") == (trace == "replay")


def test_fusion_names_the_kernel_that_fails_it(monkeypatch):
    monkeypatch.setattr(loader, "launch", reject)
    with pytest.raises(VariantUnsupported, match="decode.fusion=full cannot run here: linear=metal: its self-test"):
        bind(EngineConfig(decode=DecodeConfig(fusion="full")), "metal", refuses=proof.refusal)
    only = {("unit", "rotary"): "its self-test failed here, no sine"}
    with pytest.raises(VariantUnsupported, match="rotary: its self-test failed here, no sine"):
        bind(EngineConfig(decode=DecodeConfig(fusion="full")), "metal", refuses=lambda *part: only.get(part))


def test_an_answer_is_kept_until_the_code_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "launch", reject)
    first = proof.refusal("decode_attention", "metal")
    monkeypatch.setattr(loader, "launch", lambda call: pytest.fail("asked again"))
    assert proof.refusal("decode_attention", "metal") == first
    # Variants that are not ours are never asked about.
    assert proof.refusal("decode_attention", "mlx") is None
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(loader, "launch", wrong)
    monkeypatch.setattr(tuned, "identity", lambda name: "another")
    reason = proof.refusal("decode_attention", "metal")
    assert reason is not None and "exceeds" in reason


def test_a_trial_that_took_the_process_down_is_remembered(monkeypatch, tmp_path):
    def crash(call: Launch) -> list[mx.array]:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "launch", crash)
    with pytest.raises(KeyboardInterrupt):
        proof.refusal("unit", "rotary")
    reason = proof.refusal("unit", "rotary")
    assert reason is not None and "the process ended during its self-test" in reason


def test_a_torn_answer_is_no_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "launch", reject)
    proof.refusal("unit", "rotary")
    (path,) = tmp_path.iterdir()
    path.write_text("{", encoding="utf-8")
    assert MESSAGE in str(proof.refusal("unit", "rotary"))
    assert MESSAGE in json.loads(path.read_text(encoding="utf-8"))["reason"]


def test_on_cuda_the_doctor_tries_and_engines_go_by_it(monkeypatch):
    monkeypatch.setattr(proof, "device_kind", lambda: "cuda")
    monkeypatch.setattr(loader, "launch", reject)
    assert proof.refusal("decode_attention", "metal") is None
    proof.verdict("decode_attention", "metal", again=True)
    assert MESSAGE in str(proof.refusal("decode_attention", "metal"))


def test_no_gpu_no_trial(monkeypatch, tmp_path):
    monkeypatch.setattr(proof, "device_kind", lambda: "cpu")
    monkeypatch.setattr(loader, "launch", lambda call: pytest.fail("tried on a CPU"))
    assert proof.refusal("decode_attention", "metal") is None and not list(tmp_path.iterdir())


def test_the_compiled_step_of_the_embedded_model_passes(monkeypatch):
    """The unit itself, with the compiled step of separate ops: it has to be able to pass."""
    monkeypatch.setattr(proof, "STEPS", 20)
    verdict = proof.verdict("unit", "step")
    assert verdict.reason == "" and verdict.worst == 0


def test_a_step_that_goes_wrong_late_is_caught(monkeypatch):
    from engine.generate import Engine

    monkeypatch.setattr(proof, "STEPS", 5)
    decode = Engine.decode
    monkeypatch.setattr(Engine, "decode", lambda self, first, count: [*decode(self, first, count)[:-1], 7])
    assert "exceeds" in proof.verdict("unit", "step").reason
