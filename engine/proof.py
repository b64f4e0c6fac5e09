"""Whether our kernels compile and compute right on this machine: each is tried once, at first use, and the answer kept.

A kernel that was never seen by this machine's compiler is a claim. Before an engine binds a variant of our own, that is
run on its op's smallest cases against the reference; `UNITS` are what belongs to no single op, and the whole compiled
step. One that fails is refused by name, with the compiler's message, and everything else still runs. Answers are kept
in `FOLDER` by chip, version of MLX and identity of the code, so that a change of any of them asks again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine import tuned
from engine.config import DecodeAttentionConfig, DecodeConfig, EngineConfig, ExpertsConfig, SpeculativeConfig
from engine.device import activation_dtype, device_kind
from engine.kernels import attention, recent, rotary
from engine.kernels.loader import KernelError
from engine.ops import OPS, relative_rms, selftest
from engine.ops.registry import DECODE_ROWS, Case, Op, Variant
from engine.ops.selftest import case_error
from engine.pages import Recent

FOLDER = Path.home() / ".cache" / "lilybench" / "proof"
"""Where answers are kept."""

SMALL_CASES = 2
"""Cases of an op that are tried, the smallest ones."""

STEPS = 200
"""Tokens that the compiled step makes: hidden copies freed while in use have been seen to show only after many."""

NEAR_TIE = 0.05
"""Two logits closer than this share of the largest may change places by rounding."""

MOST_TIES = STEPS // 10
"""Tokens of them that may be near-ties; a wrong kernel makes every one wrong."""


@dataclass(frozen=True)
class Verdict:
    """What came of a trial: `reason` is empty if it passed. worst: relative RMS error, over `cases` cases."""

    reason: str
    worst: float = 0.0
    cases: int = 0


_UNFINISHED = "the process ended during its self-test; `python -m engine doctor` tries again"


def refusal(part: str, name: str) -> str | None:
    """Why a variant of an op, or ``("unit", name)``, is not to be used on this machine; None if it may.

    Only kernels of a GPU are asked about. On Metal the trial runs if no answer is kept; on CUDA, where compiling takes
    minutes, it is `python -m engine doctor` that makes it, and no answer is no refusal.
    """
    device = device_kind()
    if device == "cpu" or (device == "cuda" and _read(_path(part, name)) is None):
        return None
    if part != "unit" and not for_a_gpu(OPS[part].variants[name]):
        return None
    reason = verdict(part, name).reason
    return f"its self-test failed here, {reason}" if reason else None


def for_a_gpu(variant: Variant) -> bool:
    """Whether a variant needs a GPU, or is a kernel with tiles there and something else on a CPU."""
    return bool(variant.tiles) or variant.supports(None, "cpu") is not None


def verdict(part: str, name: str, again: bool = False) -> Verdict:
    """The kept answer, or that of a trial made now (`again`: whatever was kept)."""
    path = _path(part, name)
    if not again and (kept := _read(path)) is not None:
        return kept
    # Written first: a kernel that takes the process down is known by it the next time.
    _write(path, Verdict(_UNFINISHED))
    made = _trial(part, name)
    _write(path, made)
    return made


def _trial(part: str, name: str) -> Verdict:
    if part != "unit":
        op = OPS[part]
        device, variant = device_kind(), op.variants[name]
        cases = [case for case in op.cases if variant.supports(case, device) is None]
        cases = sorted(cases, key=op.least_flops)
        # Many rows may take other kernels of the variant than few.
        many = next((case for case in cases[SMALL_CASES:] if case.sizes.get("rows", 0) > DECODE_ROWS), None)
        cases = [*cases[:SMALL_CASES], *([many] if many is not None else [])]
        test = selftest(op, variant, device, activation_dtype(), cases)
        # Metal compiles an instance in a moment; CUDA takes seconds for each, and has the default ones only tried.
        points = variant.points[1:] if device == "metal" and cases else ()
        tried = (_point(op, variant, case, point) for point in points for case in (cases[0], cases[-1]))
        reason = test.error or next(filter(None, tried), "")
        return Verdict(reason, test.worst, test.cases)
    try:
        worst = UNITS[name]()
    except Exception as raised:
        return Verdict(str(raised) or type(raised).__name__)
    bound = BOUNDS.get(name, OPS["decode_attention"].tolerance["bfloat16"])
    return Verdict("" if worst <= bound else f"error {worst:.2g} exceeds {bound:.2g}", worst, 1)


def _point(op: Op, variant: Variant, case: Case, point: Mapping[str, Any]) -> str:
    """What is wrong with a variant under one of its settings; one that it refuses by itself for the case is right."""
    dtype = activation_dtype()
    bound = op.tolerance[str(dtype).rpartition(".")[2]]
    try:
        error = case_error(op, variant, case, dtype, **point)
    except KernelError:
        return ""
    except Exception as raised:
        return f"{dict(point)}: {raised}"
    return "" if error <= bound else f"{dict(point)}: relative RMS error {error:.2g} exceeds {bound:.2g}"


def _path(part: str, name: str) -> Path:
    code = tuned.identity(part if part in OPS else tuned.STEP)
    told = (tuned.chip(), tuned.mlx_version(), code, part, name)
    return FOLDER / f"{part}-{name}-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:16]}.json"


@lru_cache(maxsize=256)
def _parsed(path: Path, _: int) -> Verdict | None:
    try:
        return Verdict(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _read(path: Path) -> Verdict | None:
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except OSError:
        return None


def _write(path: Path, made: Verdict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(made.__dict__), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        # Nowhere to keep it: asked again by the next process.
        return


# -- units -------------------------------------------------------------------------------------------


def _rotary() -> float:
    """Norm and rotary embedding against MLX's own, at a far position."""
    rows, heads, kv, at, dim = 2, 4, 1, 70_001, attention.HEAD_DIM
    dtype = activation_dtype()
    q = mx.random.normal((1, rows, heads * 2 * dim), key=mx.random.key(0)).astype(dtype)
    k = mx.random.normal((1, rows, kv * dim), key=mx.random.key(1)).astype(dtype)
    gain = mx.random.normal((dim,), key=mx.random.key(2)).astype(dtype)
    position = mx.array([at] * 4, dtype=mx.int32)
    got = rotary.rotate_metal(q, k, gain, gain, position, eps=1e-6, base=1e7)
    split = q.reshape(1, rows, heads, 2 * dim)[..., :dim], k.reshape(1, rows, kv, dim)
    worst = 0.0
    for made, given in zip(got, split, strict=True):
        normed = mx.fast.rms_norm(given.astype(mx.float32), gain.astype(mx.float32), 1e-6).swapaxes(1, 2)
        turned = mx.fast.rope(normed, rotary.ROTARY_DIMS, traditional=False, base=1e7, scale=1.0, offset=at)
        worst = max(worst, relative_rms(made, turned.astype(dtype)))
    return worst


def _recent() -> float:
    """Rows that stand apart, made anew and attended over, against the op's reference over all of them in one piece."""
    op, first, apart, rows = OPS["decode_attention"], 90, 10, 2
    before = first + apart
    q, keys, values, scale, _ = op.inputs(
        Case("", {"rows": rows, "n": before + rows, "kv": 1, "at": -1}), activation_dtype(), 0
    )
    spare = mx.zeros((1, 2, 16 - apart, attention.HEAD_DIM), keys.dtype)
    held = mx.concatenate([mx.concatenate([keys, values], axis=1)[:, :, first:before], spare], axis=2)
    starts = mx.array([first] * 4, dtype=mx.int32)
    at = mx.array([before] * 4, dtype=mx.int32)
    new = [mx.contiguous(keys[:, :, before:]), mx.contiguous(values[:, :, before:])]
    k, v = (Recent(whole, held[:, i : i + 1], starts, new[i]) for i, whole in enumerate((keys, values)))
    want = op.reference.run(q, keys, values, scale)
    error = relative_rms(attention.attention_metal(q, k, v, scale, at), want)
    anew = recent.update_metal(held, starts, at, new[:1], [new[1].reshape(1, rows, -1)])
    exact = mx.array_equal(anew[:, :, apart : apart + rows], mx.concatenate(new, axis=1)).item()
    return error if exact else float("inf")


def _step(fusion: str, trace: str = "step", drafted: bool = False) -> float:
    """Share of tokens that the embedded model's compiled step makes wrong, by the float32 reference of every op.

    `MOST_TIES` near-ties are not wrong. A logit that is not finite raises. drafted: tokens are those of recorded
    verifications instead, of which some rows are taken back.
    """
    from engine.checkpoint import load
    from engine.generate import Engine
    from engine.tiny import CHECKPOINT

    loaded = load(CHECKPOINT, activation_dtype(), mtp=False)
    settings = EngineConfig(decode=DecodeConfig(trace=trace, fusion=fusion))  # type: ignore[arg-type]
    if fusion != "off":
        settings.decode_attention.variant = "metal"
    named: dict[str, Any] = {
        name: "reference" for name in ("linear", "route", "prefill_attention", "gated_delta", "head")
    }
    plain = EngineConfig(
        **named,
        experts=ExpertsConfig("reference"),
        decode_attention=DecodeAttentionConfig("reference"),
        decode=DecodeConfig(trace="eager", fusion="off"),
    )
    made, judge = (
        Engine(loaded.config, loaded.weights, each, tuned=tuned.Tuned(), refuses=None) for each in (settings, plain)
    )
    prompt = list(range(40, 60))
    first = made.prefill(prompt)
    assert first is not None
    ids = made.decode(first, STEPS)
    if drafted:
        settings.speculative = SpeculativeConfig("ngram", DECODE_ROWS - 1)
        made = Engine(loaded.config, loaded.weights, settings, tuned=tuned.Tuned(), refuses=None)
        made.prefill(prompt, last=False)
        ids = _drafted(made, [*prompt, first, *ids])
    judge.prefill(prompt, last=False)
    logits = judge.logits([first, *ids[:-1]])
    taken = mx.take_along_axis(logits, mx.array(ids, dtype=mx.uint32)[:, None], axis=-1)
    behind = (mx.max(logits, axis=-1, keepdims=True) - taken) / mx.max(mx.abs(logits))
    wrong = int((behind > NEAR_TIE).sum().item())  # pyright: ignore[reportArgumentType]
    ties = int((behind > 0).sum().item()) - wrong  # pyright: ignore[reportArgumentType]
    return (wrong + max(0, ties - MOST_TIES)) / STEPS


def _drafted(engine: Any, text: list[int]) -> list[int]:
    """The last `STEPS` tokens of `text` again, drafted from it with 0, 1, … right ones before a wrong one.

    Raises:
        RuntimeError: it was not verified by recorded passes.
    """
    from engine.speculative import RECORDED, Draft

    def draft(history: Any, token: int, depth: int, *_: Any) -> Draft:
        at = len(history) + 1
        found = text[at : at + depth] or [0]
        right = len(history) % (len(found) + 1)
        found = tuple(each ^ 1 if i == right else each for i, each in enumerate(found))
        return Draft(found)

    engine.speculator.drafter.draft = draft
    made = engine.decode(text[-STEPS - 1], STEPS)
    if ("verify", RECORDED) not in {(row["op"], row["variant"]) for row in engine.executed()}:
        raise RuntimeError("no verification was recorded")
    return made


UNITS: dict[str, Callable[[], float]] = {
    "rotary": _rotary,
    "recent": _recent,
    "step": lambda: _step("off"),
    "folded_step": lambda: _step("full"),
    "replayed_step": lambda: _step("full", "replay"),
    "recorded_rows": lambda: _step("full", "replay", drafted=True),
}
"""What is tried beside the variants: errors, or for a step the share of its tokens that is wrong."""

CUDA_ONLY = ("replayed_step", "recorded_rows")
"""Units that only CUDA has."""

BOUNDS = {"step": 0.0, "folded_step": 0.0, "replayed_step": 0.0, "recorded_rows": 0.0}
"""Largest error of a unit, where it is not that of an op."""
