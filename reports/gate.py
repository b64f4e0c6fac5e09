"""The gate: has anything become slower? Answers by exit code, and never passes on missing evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from scipy import special

from ablations.statistics import LEAST_MARGIN, Estimate, GateStage, confirm_stage, gate_stage
from ablations.verdicts import Gate
from ablations.verdicts import gate as decide
from reports import facts, text
from reports.cells import Result, Study, study
from reports.load import ReportError, read_rows
from reports.summary import NOISY_MARGIN


def gate(run: Path, fresh: Sequence[Path] = ()) -> Gate:
    """Judge the contrasts of `run`; slowdowns found there count once `fresh` runs of the same contrasts show them too.

    Contrasts of an arm with itself and contrasts that cannot run here are left out.

    Raises:
        ReportError: a folder that cannot be read, or a confirmation that is the run itself.
    """
    seen = study(read_rows([run]))
    results = _judged(seen)
    margins = {name: r.margin or LEAST_MARGIN for name, r in results.items()}
    first = gate_stage({name: _estimate(r) for name, r in results.items() if r.verdict != "blocked"}, margins)
    confirmation, more = _confirm(seen, first, margins, fresh) if fresh else (None, [])
    verdicts = {name: r.verdict for name, r in results.items()}
    return decide(first, confirmation, verdicts, _problems(seen) + more)  # type: ignore[arg-type]


def _judged(seen: Study) -> dict[str, Result]:
    return {
        f"{r.contrast} {r.phase} {text.tokens(r.frontier)}": r
        for r in seen.results
        if not r.aa and r.verdict != "unsupported"
    }


def _confirm(
    seen: Study, first: GateStage, margins: dict[str, float], fresh: Sequence[Path]
) -> tuple[GateStage, list[str]]:
    again = study(read_rows(fresh))
    old = {run.run_id for run in seen.rows.runs}
    if any(run.run_id in old for run in again.rows.runs) or not again.rows.runs:
        raise ReportError(f"{fresh[0]}: a confirmation needs sessions of its own; run the same command again")
    places = {facts.signature(run) for run in seen.rows.runs}
    other = [run.run_id for run in again.rows.runs if facts.signature(run) not in places]
    problems = [
        f"{name}: another machine, model or version than the run it should confirm" for name in dict.fromkeys(other)
    ]
    found = {name: _estimate(r) for name, r in _judged(again).items() if r.verdict != "blocked"}
    return confirm_stage(first, {} if problems else found, margins), problems


def _estimate(r: Result) -> Estimate:
    """The estimate behind a row, its standard error read back from the 95 % interval.

    Degrees of freedom are taken as units - 1. Where a run allowed for autocorrelation it had fewer; the error read
    back is then too large, never too small.
    """
    error = df = None
    unit = "session" if r.unit == "session" else "block"
    if r.ratio and r.ratio > 0 and r.low and r.high and 0 < r.low <= r.high and r.units > 1:
        df = float(r.units - 1)
        error = (math.log(r.high) - math.log(r.low)) / 2 / float(special.stdtrit(df, 0.975))
    ratio = r.ratio if r.ratio and r.ratio > 0 else None
    return Estimate(ratio, r.low, r.high, None, None, r.units, unit, r.detectable, None, None, (), error, df, r.method)


def _problems(seen: Study) -> list[str]:
    """What keeps silence from meaning "nothing became slower"."""
    arms = {arm for r in seen.results for arm in (r.arm, r.reference) if not r.aa}
    found = [
        f"{c.arm} {c.phase} {text.tokens(c.frontier)}: {c.gap}"
        for c in seen.gaps()
        if c.arm in arms and c.gap in ("oom", "timeout", "error", "missing")
    ]
    wide = [r for r in seen.results if not r.aa and r.margin is not None and r.margin > NOISY_MARGIN]
    if wide:
        widest = text.percent(max(r.margin or 0 for r in wide))
        found.append(f"too noisy: at {text.count(len(wide), 'point')} the margin is up to {widest}")
    found += [f"{name} ends in an unfinished row" for name in seen.rows.torn]
    return found + ([] if seen.rows.runs else ["no process has a row"])
