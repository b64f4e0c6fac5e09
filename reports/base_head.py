"""Base against head in one command: measure both checkouts alternately, confirm what looks slower, judge.

The measuring is `python -m sweeps base=CHECKOUT`, in a process of its own; a report never loads MLX.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reports import text
from reports.gate import Answer, with_timed
from reports.gate import gate as judge
from reports.load import ReportError

ROOT = Path(__file__).resolve().parent.parent

SETTINGS = ("sessions=5",)
"""Settings of the sweep unless others are given: sessions are what a slowdown is tested over."""

FRESH_SEED = 1_000_003
"""Added to the seed of the confirmation, whose prompts and order are new too."""

Timed = Callable[[Path, str, int], list[dict[str, Any]]]
"""Times the ops of a run's base and head at a phase and frontier (`python -m sweeps.opwise`)."""

Measure = Callable[[Sequence[str]], int]
"""Runs the sweep with the given words and returns its exit code."""


def gate(
    base: Path,
    work: Path | None = None,
    settings: Sequence[str] = (),
    ignore: Sequence[str] = (),
    head: Path | None = None,
    measure: Measure | None = None,
    timed: Timed | None = None,
) -> Answer:
    """Measure this checkout against `base`, again on fresh sessions where something looks slower, and judge.

    Of what is slower, the ops of both are then timed one by one, which names those that take longer.

    Args:
        base: another checkout of this repository, or of any that has a ``lilybench_subject.py``.
        work: folder for the two run folders; a new one under reports/runs by default.
        head: the checkout that is held against it, instead of this one.
        settings: ``key=value`` words for the sweep.

    Raises:
        ReportError: `base` is no folder, or a sweep refused its settings.
    """
    for folder in (base, *([head] if head else [])):
        if not folder.is_dir():
            raise ReportError(f"{folder}: no such checkout; git worktree add {folder} BRANCH makes one")
    if work is None:
        runs = Path.cwd() / "reports" / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="gate-", dir=runs))
    measure = measure or _sweep
    sides = [f"base={base.resolve()}", *([f"head={head.resolve()}"] if head else [])]
    words = [*sides, *with_defaults(settings)]
    first = work.resolve() / "first"
    _measured(measure, [*words, f"run_dir={first}"], first)
    answer = judge(first, ignore=ignore)
    if not answer.suspects:
        return answer
    print(f"looks slower, measuring again: {', '.join(answer.suspects)}", file=sys.stderr)
    seed = next((int(w.removeprefix("seed=")) for w in words if w.startswith("seed=")), 0) + FRESH_SEED
    again = work.resolve() / "confirmation"
    fresh = [w for w in words if not w.startswith("seed=")]
    _measured(measure, [*fresh, f"seed={seed}", f"run_dir={again}"], again)
    answer = judge(first, [again], ignore=ignore)
    return with_timed(answer, _slower_ops(answer, first, timed or _opwise))


def _slower_ops(answer: Answer, run: Path, timed: Timed) -> dict[str, list[str]]:
    """Ops that take longer, by the name of the line that is slower; a line whose ops cannot be timed is left out."""
    made = {}
    for line in answer.lines:
        if line.word == "slower":
            rows = [row for row in timed(run, line.phase, line.frontier) if "ratio" in row]
            slower = sorted((row for row in rows if row["slower"]), key=lambda row: -row["ratio"])
            if rows:
                made[line.name] = [f"{row['op']} ({text.percent(row['ratio'] - 1)} longer)" for row in slower]
    return made


def _opwise(run: Path, phase: str, frontier: int) -> list[dict[str, Any]]:
    line = [sys.executable, "-m", "sweeps.opwise", str(run), phase, str(frontier)]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    # What is slower is known without it.
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []


def with_defaults(given: Sequence[str]) -> list[str]:
    """`SETTINGS` with what was given in their place."""
    keys = {word.split("=", 1)[0] for word in given}
    return [*(word for word in SETTINGS if word.split("=", 1)[0] not in keys), *given]


def _measured(measure: Measure, words: Sequence[str], run: Path) -> None:
    # A comma in the path of a folder that is there separates no jobs.
    run.mkdir(parents=True, exist_ok=True)
    code = measure(words)
    # A failed point is a doubt that the rows tell; without rows there is nothing to judge.
    if code == 2 or not (run / "runs.jsonl").is_file():
        raise ReportError(f"python -m sweeps {' '.join(words)} ended with code {code} and left no rows to judge")


def _sweep(words: Sequence[str]) -> int:
    # The report's path belongs to the sweep; stdout here is the gate's.
    return subprocess.run([sys.executable, "-m", "sweeps", *words], cwd=ROOT, stdout=sys.stderr.fileno()).returncode
