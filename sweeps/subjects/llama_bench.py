"""llama.cpp's `llama-bench` as a third subject, different in kind: it times itself, in its own process.

A given binary runs on a given GGUF file; its JSON becomes rows of the same `samples` table, one for each
repetition. Its figures stand beside the others but in no contrast: its weights are other weights, its prompts
random ids, and its repetitions are not interleaved with anybody's (flag ``own_clock``; `slot` is the repetition).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.points import Arm, Job, Point, sample_row
from sweeps.rows import SampleRow, Status
from sweeps.subjects.base import SubjectError, is_out_of_memory

BATCH = 2048
"""Logical batch size; the physical one stays at llama-bench's default."""

REPETITIONS = 5
"""Repetitions of each test; llama-bench warms up by itself before them."""

_NEEDED = ("build_commit", "model_filename", "n_prompt", "n_gen", "n_depth", "samples_ns")
_KEPT = (
    "build_commit",
    "build_number",
    "cpu_info",
    "gpu_info",
    "backends",
    "model_filename",
    "model_type",
    "model_size",
    "model_n_params",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "flash_attn",
    "test_time",
    "n_depth",
)


class LlamaBenchError(SubjectError):
    """llama-bench could not be run or its output not be read; one line with the reason."""


def check(arm: Arm) -> tuple[Path, Path]:
    """The binary and the GGUF file an arm names (``options: binary, gguf``).

    Raises:
        LlamaBenchError: one of them is not named, absent, or not what it should be.
    """
    binary, gguf = arm.options.get("binary"), arm.options.get("gguf")
    if not binary:
        raise LlamaBenchError("llama-bench: no binary given; set subject.binary=/path/to/llama-bench")
    if not gguf:
        raise LlamaBenchError("llama-bench: no model given; set subject.gguf=/path/to/model.gguf")
    binary, gguf = Path(binary).expanduser(), Path(gguf).expanduser()
    if not binary.is_file():
        raise LlamaBenchError(f"llama-bench: there is no file {binary}; set subject.binary to the built binary")
    if not os.access(binary, os.X_OK):
        raise LlamaBenchError(f"llama-bench: {binary} is not executable; run chmod +x on it")
    if not gguf.is_file():
        raise LlamaBenchError(f"llama-bench: there is no file {gguf}; set subject.gguf to a GGUF model")
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LlamaBenchError(f"llama-bench: {gguf} is no GGUF file")
    return binary, gguf


def commands(
    binary: Path, gguf: Path, points: list[Point], repetitions: int = REPETITIONS
) -> list[tuple[list[str], list[Point]]]:
    """Command lines with the points each covers: one over all prompt lengths, one a decode length over its depths."""
    base = [str(binary), "-m", str(gguf), "-o", "json", "-r", str(repetitions), "-fa", "1", "-b", str(BATCH)]
    lines = []
    if prefill := [p for p in points if p.phase == "prefill"]:
        lines.append(([*base, "-p", _listed(prefill), "-n", "0"], prefill))
    decode = [p for p in points if p.phase == "decode"]
    for count in sorted({p.decode_tokens for p in decode}):
        mine = [p for p in decode if p.decode_tokens == count]
        lines.append(([*base, "-p", "0", "-n", str(count), "-d", _listed(mine)], mine))
    return lines


def _listed(points: list[Point]) -> str:
    return ",".join(map(str, sorted({p.frontier for p in points})))


def measure(arm: Arm, job: Job, session: int, points: list[Point] | None = None) -> Iterator[SampleRow]:
    """Run llama-bench over `points` (default: all of the job) and give a row for each repetition.

    A command that fails, runs out of memory or beyond the job's cap, or whose output cannot be read gives one row a
    point with that status and reason; the other commands still run.
    """
    points = job.points if points is None else points
    try:
        binary, gguf = check(arm)
    except LlamaBenchError as error:
        yield from (_row(arm, job, session, p, "skipped", str(error)) for p in points)
        return
    repetitions = int(arm.options.get("repetitions", REPETITIONS))
    for line, mine in commands(binary, gguf, points, repetitions):
        try:
            results = parse(_run(line, job.cap_seconds * len(mine)))
        except subprocess.TimeoutExpired as error:
            reason = f"llama-bench: not done after {error.timeout:.0f} s"
            yield from (_row(arm, job, session, p, "timeout", reason) for p in mine)
        except LlamaBenchError as error:
            status = "oom" if is_out_of_memory(error) else "error"
            yield from (_row(arm, job, session, p, status, str(error)) for p in mine)
        else:
            for point in mine:
                yield from rows(results, arm, job, session, point)


def _run(line: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=seconds, check=False)
    except OSError as error:
        raise LlamaBenchError(f"llama-bench: {line[0]} does not start: {error.strerror}") from error
    if done.returncode != 0:
        said = [text for text in done.stderr.strip().splitlines() if text.strip()]
        telling = [text for text in said if "error" in text.lower() or "memory" in text.lower()]
        why = (telling or said[-1:] or ["nothing on stderr"])[0].strip()
        raise LlamaBenchError(f"llama-bench: exit code {done.returncode}: {why}")
    return done.stdout


def parse(text: str) -> list[dict[str, Any]]:
    """The results in llama-bench's ``-o json`` output.

    Raises:
        LlamaBenchError: no JSON, no list of results, or a result without the fields that are read here.
    """
    try:
        results = json.loads(text)
    except json.JSONDecodeError as error:
        raise LlamaBenchError(f"llama-bench: its output is no JSON ({error.msg} at line {error.lineno})") from None
    if not isinstance(results, list) or not all(isinstance(r, dict) for r in results):
        raise LlamaBenchError("llama-bench: its output is no list of results")
    for result in results:
        missing = [name for name in _NEEDED if name not in result]
        if missing:
            raise LlamaBenchError(f"llama-bench: a result lacks {', '.join(missing)}; is the binary too old?")
        samples = result["samples_ns"]
        if not isinstance(samples, list) or not samples or not all(isinstance(s, int) and s > 0 for s in samples):
            raise LlamaBenchError(f"llama-bench: samples_ns is {samples!r}, expected a list of times above zero")
    return results


def rows(results: list[dict[str, Any]], arm: Arm, job: Job, session: int, point: Point) -> list[SampleRow]:
    """The rows of `point` in parsed results, or one `error` row if the output has nothing for it."""
    wanted = (point.frontier, 0, 0) if point.phase == "prefill" else (0, point.decode_tokens, point.frontier)
    made = []
    for result in results:
        if (result["n_prompt"], result["n_gen"], result["n_depth"]) != wanted:
            continue
        for repetition, elapsed in enumerate(result["samples_ns"]):
            row = _row(arm, job, session, point, "ok", None, repetition)
            row.work_tokens, row.elapsed_ns = max(wanted[0], wanted[1]), elapsed
            row.executed = [{"op": point.phase, "variant": "llama.cpp", "tile": result["build_commit"], "calls": 1}]
            row.extra = {name: result[name] for name in _KEPT if name in result}
            made.append(row)
    return made or [_row(arm, job, session, point, "error", "llama-bench: its output has no such test")]


def _row(
    arm: Arm, job: Job, session: int, point: Point, status: Status, reason: str | None, repetition: int = -1
) -> SampleRow:
    return sample_row(job, session, point, arm, status, slot=repetition, reason=reason, flags=["own_clock"])
