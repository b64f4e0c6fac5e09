"""Is the baseline itself right, and are its rates what MLX-LM says of itself?

`gate` holds MLX-LM against the oracle, a float32 pass of the engine's reference ops over weights that were read
without MLX-LM's loader, before anything of it is timed: a mis-loaded baseline (gains shifted twice, say) loads
cleanly, runs at full speed, and emits noise.

`compare_rates` runs ``mlx_lm.stream_generate`` in a process of its own beside windows of this project's clock, on the
same prompt. Two conventions differ and are accounted for: its generation rate divides N tokens by N - 1 gaps, and its
prompt time ends when the first token is handed over, by when the next step has been submitted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablations.guard import Check, SyntheticThresholds, first_divergence, relative_rms, synthetic_check
from sweeps.clock import Clock, SystemClock, timed
from sweeps.points import Job
from sweeps.store import read_job

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.generate import Engine
    from sweeps.layers import Recording
    from sweeps.subjects.base import Subject
    from sweeps.subjects.shared import Shared

TOLERANCE = 0.05
"""Share by which the two ways of timing MLX-LM may differ."""

EXACT_LAYERS = 8
"""Up to this many layers of float32 the whole pass is compared end to end; deeper random stacks amplify rounding."""

EXACT_ERROR = 1e-3
"""Largest relative RMS error of such a pass (two right implementations were seen at 2e-5)."""


# -- correctness ----------------------------------------------------------------------------------


def make_oracle(shared: Shared) -> Engine:
    """A float32 engine of reference ops on independently read weights."""
    import mlx.core as mx

    from engine.generate import Engine

    return Engine(shared.config, shared.independent(), _reference_config(), shared.real_vocab, mx.float32)


def reference_subject(shared: Shared) -> Subject:
    """An engine of reference ops on the weights and in the type of every arm."""
    from engine.generate import Engine
    from sweeps.subjects.engine import EngineSubject

    return EngineSubject(Engine(shared.config, shared.weights, _reference_config(), shared.real_vocab, shared.dtype))


def _reference_config() -> EngineConfig:
    from engine.config import DecodeAttentionConfig, DecodeConfig, EngineConfig, ExpertsConfig

    return EngineConfig(
        linear="reference",
        route="reference",
        experts=ExpertsConfig(variant="reference"),
        decode_attention=DecodeAttentionConfig(variant="reference"),
        prefill_attention="reference",
        gated_delta="reference",
        head="reference",
        decode=DecodeConfig(trace="eager"),
    )


def gate(shared: Shared, text: Sequence[int] | Recording, *, model: Any = None) -> Check:
    """Whether MLX-LM computes this model: every layer against the oracle, on MLX-LM's own inputs.

    A float32 model of at most 8 layers is also compared end to end, logits and greedy tokens.

    Args:
        text: ids of a real prompt, or MLX-LM's passes over one, recorded with an oracle.
        model: the mlx_lm model where `text` is ids; default the shared one.
    """
    from sweeps.guard import judged
    from sweeps.layers import Recording, compare

    if not isinstance(text, Recording):
        model = shared.lm_model if model is None else model
        text = Recording(model, text, chunk=len(text), oracle=make_oracle(shared))
    assert text.oracle is not None
    limits = SyntheticThresholds.for_dtype(str(shared.weights.norm.dtype).removeprefix("mlx.core."))
    made = compare(text.oracle, text, limits=limits, judged="baseline")
    check = judged(synthetic_check(made.pairs, made.routed, None, limits), made)
    if check.passed and limits.relative_rms < 1e-2 and shared.config.num_hidden_layers <= EXACT_LAYERS:
        check = _end_to_end(check, text)
    reason = (
        f"MLX-LM agrees with the float32 oracle: {check.reason}"
        if check.passed
        else (f"MLX-LM does not compute this model: {check.reason}")
    )
    return replace(check, name="baseline", reason=reason)


def _end_to_end(check: Check, recording: Recording) -> Check:
    wanted = recording.exact
    got = recording.baseline[:, : wanted.shape[1]]
    error = relative_rms(got, wanted)
    figures = check.figures | {"end_to_end_error": error}
    if error > EXACT_ERROR:
        return Check(check.name, False, f"logits are off by {error:.1e} relative RMS end to end", figures)
    part = first_divergence(wanted.argmax(axis=1).tolist(), got.argmax(axis=1).tolist(), wanted, near_tie=1e-2)
    if part is not None and not part.near_tie:
        lead = f"the oracle's {part.reference_token} leads by {part.gap:.2f}"
        reason = f"greedy choice {part.index} is {part.arm_token}, {lead}"
        return Check(check.name, False, reason, figures)
    return replace(check, figures=figures)


# -- rates ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Tokens a second of one trial. prefill: prompt over its time. decode: gaps over their time."""

    prefill: float
    decode: float


def measure(subject: Any, prompt: Sequence[int], count: int, clock: Clock, drain: Any = lambda: None) -> Rates:
    """A prefill and a decode of `count` tokens in two windows of the sweep's clock, on an `MlxLm` subject."""
    subject.reset()
    first = timed(clock, lambda: subject.prefill(prompt), drain)
    rest = timed(clock, lambda: subject.decode(first.value.next_token, count), drain)
    return Rates(len(prompt) / (first.elapsed_ns / 1e9), count / (rest.elapsed_ns / 1e9))


def stream(model: Any, tokenizer: Any, prompt: Sequence[int], count: int, chunk: int = 2048) -> Rates:
    """The same by `mlx_lm.stream_generate`, with its generation rate corrected to N - 1 gaps.

    Args:
        tokenizer: an mlx_lm tokenizer without end-of-sequence ids (`plain_tokenizer`).
        count: gaps, so that ``count + 1`` tokens are generated.
    """
    import mlx.core as mx
    from mlx_lm.generate import stream_generate

    *_, last = stream_generate(model, tokenizer, mx.array(list(prompt)), count + 1, prefill_step_size=chunk)
    if last.generation_tokens != count + 1:
        raise RuntimeError(f"stream_generate gave {last.generation_tokens} tokens, {count + 1} were asked for")
    return Rates(last.prompt_tps, last.generation_tps * count / (count + 1))


def plain_tokenizer() -> Any:
    """A stand-in tokenizer for `stream_generate`: no end of sequence, no text, so that only the model is timed."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    class Silent:
        last_segment = ""

        def add_token(self, token: int) -> None:
            pass

        def finalize(self) -> None:
            pass

    class Plain(TokenizerWrapper):
        detokenizer = Silent()  # type: ignore[assignment]
        eos_token_ids = frozenset()  # type: ignore[assignment]

        def __init__(self) -> None:
            pass

    return Plain()


def verdict(ours: Sequence[Rates], theirs: Sequence[Rates], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Medians of both, the median ratio of trials side by side, and whether that is within `tolerance`, by phase."""
    made: dict[str, Any] = {"name": "stream_generate", "tolerance": tolerance, "passed": True, "reason": None}
    faults = []
    for phase in ("prefill", "decode"):
        mine = statistics.median(getattr(r, phase) for r in ours)
        other = statistics.median(getattr(r, phase) for r in theirs)
        ratio = math.exp(statistics.median(_log_ratios(ours, theirs, phase)))
        made[phase] = {"sweep": mine, "stream_generate": other, "ratio": ratio}
        if abs(ratio - 1) > tolerance:
            faults.append(f"{phase}: {mine:.4g} tok/s by this clock, {other:.4g} by stream_generate")
    if faults:
        made |= {"passed": False, "reason": "; ".join(faults)}
    return made


def settled(ours: Sequence[Rates], theirs: Sequence[Rates], tolerance: float = TOLERANCE) -> bool:
    """Whether the median ratios are known to half of `tolerance`: a matter of their scatter, not of their value."""
    for phase in ("prefill", "decode"):
        logs = _log_ratios(ours, theirs, phase)
        middle = statistics.median(logs)
        deviation = 1.4826 * statistics.median(abs(value - middle) for value in logs)
        # 95 % half-width of a median of normal values, their spread taken from the median deviation.
        if 1.96 * 1.2533 * deviation / math.sqrt(len(logs)) > tolerance / 2:
            return False
    return True


def _log_ratios(ours: Sequence[Rates], theirs: Sequence[Rates], phase: str) -> list[float]:
    return [math.log(getattr(a, phase) / getattr(b, phase)) for a, b in zip(ours, theirs, strict=True)]


def compare_rates(
    job: Job, frontier: int | None = None, tokens: int = 32, trials: int = 5, most: int = 40
) -> dict[str, Any]:
    """Time MLX-LM both ways on the job's model, trials interleaved, in this process.

    Args:
        frontier: prompt length; default the job's smallest prefill frontier.
        trials: pairs to begin with. most: pairs after which it ends where a noisy machine leaves the ratios unsettled.

    Raises:
        SubjectError, SubjectUnsupported: the model cannot be loaded by MLX-LM.
    """
    import mlx.core as mx

    from sweeps.prompts import Prompts, WordEncoder
    from sweeps.subjects.shared import Shared

    shared = Shared(job.model, baseline=True)
    length = frontier or min(point.frontier for point in job.points)
    encoder = shared.tokenizer or WordEncoder(shared.real_vocab)
    prompts = Prompts(encoder, job.seed, job.prompt.get("kind", "text"), shared.config.vocab_size)
    # Only now, so that a model that is not there is reported before seconds of imports.
    from sweeps.subjects.mlx_lm import MlxLm, set_wired_limit

    set_wired_limit()
    subject = MlxLm(shared.lm_model, shared.config)
    clock, tokenizer = SystemClock(), plain_tokenizer()
    ours, theirs = [], []
    for trial in range(most + 1):
        if trial > trials and settled(ours[1:], theirs[1:]):
            break
        prompt = prompts.take(length, trial)
        for turn in (trial, trial + 1):  # who goes first alternates
            if turn % 2:
                ours.append(measure(subject, prompt, tokens, clock, mx.synchronize))
            else:
                theirs.append(stream(shared.lm_model, tokenizer, prompt, tokens))
            mx.synchronize()
    ours, theirs = ours[1:], theirs[1:]  # the first pair warmed both up
    samples = {"sweep": [asdict(r) for r in ours], "stream_generate": [asdict(r) for r in theirs]}
    scope = {"frontier": length, "tokens": tokens, "trials": len(ours), "chunk": subject.chunk}
    return verdict(ours, theirs) | scope | {"samples": samples}


def check(job_file: Path, frontier: int | None = None, timeout: float = 600.0) -> dict[str, Any]:
    """`compare_rates` in a process of its own.

    Returns:
        Its result; a failure of that process is a result that did not pass, with the reason.
    """
    line = [sys.executable, "-m", "sweeps.baseline", str(job_file.resolve())]
    line += ["--frontier", str(frontier)] if frontier else []
    try:
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"name": "stream_generate", "passed": False, "reason": f"not done after {timeout:.0f} s"}
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"name": "stream_generate", "passed": False, "reason": said[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison for a job file as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.baseline", description=compare_rates.__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--frontier", type=int)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--trials", type=int, default=5)
    given = parser.parse_args(arguments)
    print(json.dumps(compare_rates(read_job(given.job), given.frontier, given.tokens, given.trials)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
