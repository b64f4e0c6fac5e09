"""From rows to cells: what is known about one arm at one phase and frontier, and what is missing there and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from reports.facts import (
    bandwidth,
    chip_name,
    finite,
    launch_seconds,
    model_name,
    peak_flops,
    prompt_kind,
    read_bandwidth,
    signature,
    version,
)
from reports.load import Rows
from sweeps.rows import ContrastRow, Phase, RunRow, SampleRow, tokens_per_second

PHASES: tuple[Phase, ...] = ("prefill", "decode")
_UNCOUNTED = frozenset(("clock_jump", "launches", "series", "warmup"))
GapKind = Literal["skipped", "oom", "timeout", "error", "blocked", "missing"]


@dataclass
class Cell:
    """One arm at one phase and frontier. Rates in tokens a second, sizes in bytes, times in nanoseconds.

    low, high: 10th and 90th percentile over windows. session_medians: median rate of each session.
    least_bytes, least_flops: of a window. bytes_per_second, flops_per_second: both over time, median. bandwidth: of the
    device, bytes a second, copied; read_bandwidth: read. peak_flops: its arithmetic on one large product.
    launch_seconds: cost of one launch. gap: None, or why there is no number; `reason` then says more. partial: what
    befell some of its windows, while others count.
    """

    arm: str
    subject: str
    phase: Phase
    frontier: int
    windows: int = 0
    sessions: int = 0
    blocks: int = 0
    median: float | None = None
    low: float | None = None
    high: float | None = None
    elapsed_ns: float | None = None
    work_tokens: int = 0
    peak_bytes: float | None = None
    active_bytes: float | None = None
    footprint_bytes: float | None = None
    least_bytes: float | None = None
    least_flops: float | None = None
    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    bandwidth: float | None = None
    peak_flops: float | None = None
    read_bandwidth: float | None = None
    launch_seconds: float | None = None
    flags: dict[str, int] = field(default_factory=dict)
    gap: GapKind | None = None
    reason: str = ""
    partial: str = ""
    session_medians: list[float] = field(default_factory=list)


@dataclass
class Result:
    """One contrast at one phase and frontier, under the names of its series; a blocked one carries no numbers."""

    contrast: str
    arm: str
    reference: str
    phase: Phase
    frontier: int
    verdict: str
    reason: str
    ratio: float | None
    low: float | None
    high: float | None
    units: int
    unit: str
    margin: float | None
    detectable: float | None
    method: str
    check: dict[str, Any]
    aa: bool
    run_ids: list[str]


@dataclass
class Study:
    """Everything a report shows, drawn from the rows once."""

    rows: Rows
    arms: list[str]
    frontiers: dict[Phase, list[int]]
    cells: dict[tuple[str, Phase, int], Cell]
    results: list[Result]
    aa_arms: set[str]
    label: Labels

    def line(self, arm: str, phase: Phase) -> list[Cell]:
        """Cells of an arm over all frontiers of the phase, gaps included."""
        return [self.cells[arm, phase, f] for f in self.frontiers[phase] if (arm, phase, f) in self.cells]

    def gaps(self) -> list[Cell]:
        """Cells without a number, and cells that lost some of their windows."""
        return [c for c in self.cells.values() if c.gap or c.partial]


class Labels:
    """Names of series. An arm keeps its name unless two runs mean different things by it.

    Windows from different machines, models or versions, on other kinds of prompts, or with different settings, never
    share a series.
    """

    def __init__(self, rows: Rows):
        self._runs: dict[str, RunRow] = {}
        for run in rows.runs:
            self._runs.setdefault(run.run_id, run)
        self._many_places = len({signature(run) for run in self._runs.values()}) > 1
        self._many_prompts = len({prompt_kind(run) for run in self._runs.values()}) > 1
        hashes: dict[str, set[str]] = {}
        self._hash: dict[tuple[str, str], str] = {}
        for row in rows.samples:
            hashes.setdefault(row.arm, set()).add(row.arm_hash)
            self._hash[row.run_id, row.arm] = row.arm_hash
        self._ambiguous = {arm for arm, seen in hashes.items() if len(seen) > 1}

    def __call__(self, run_id: str, arm: str) -> str:
        """The series that `arm` of run `run_id` belongs to."""
        name = arm
        if arm in self._ambiguous:
            name += f" ({self._hash.get((run_id, arm), '?')[:8]})"
        run = self._runs.get(run_id)
        name += f" on {prompt_kind(run)}" if self._many_prompts and run else ""
        return f"{name} @ {self._place(run)}" if self._many_places and run else name

    def _place(self, run: RunRow) -> str:
        """What tells this run's series from the others': the parts of the signature that vary."""
        parts = []
        for what in (chip_name, model_name):
            if len({what(r) for r in self._runs.values()}) > 1:
                parts.append(what(run))
        for package in ("mlx", "mlx_lm"):
            if len({version(r, package) for r in self._runs.values()}) > 1:
                parts.append(f"{package} {version(run, package)}")
        return ", ".join(parts) or chip_name(run)

    def hash_of(self, run_id: str, arm: str) -> str | None:
        """Hash of the settings of `arm` in that run, where it has rows."""
        return self._hash.get((run_id, arm))


def study(rows: Rows) -> Study:
    """Group the rows. Never raises for odd rows: what cannot be used becomes a gap with its reason."""
    label = Labels(rows)
    aa_arms = _aa_arms(rows, label)
    results = [_result(row, label, aa_arms) for row in rows.contrasts]
    groups: dict[tuple[str, Phase, int], list[SampleRow]] = {}
    subjects: dict[str, str] = {}
    for row in rows.samples:
        if row.phase not in PHASES:
            continue
        name = label(row.run_id, row.arm)
        subjects.setdefault(name, row.subject)
        groups.setdefault((name, row.phase, row.frontier), []).append(row)
    planned = _planned(rows, label, subjects)
    arms = list(subjects)
    frontiers: dict[Phase, list[int]] = {
        phase: sorted({f for _, p, f in (*groups, *planned) if p == phase}) for phase in PHASES
    }
    limits = {
        run.run_id: {
            "bandwidth": bandwidth(run),
            "peak_flops": peak_flops(run),
            "read_bandwidth": read_bandwidth(run),
            "launch_seconds": launch_seconds(run),
        }
        for run in rows.runs
    }
    blocked = {(r.arm, r.phase, r.frontier): r.reason for r in results if r.verdict == "blocked"}
    cells: dict[tuple[str, Phase, int], Cell] = {}
    for arm in arms:
        for phase in PHASES:
            if not any(a == arm and p == phase for a, p, _ in (*groups, *planned)):
                continue
            # Jobs of a suite ask for other contexts each: what no plan asked of an arm is no gap of it.
            asked = {f for a, p, f in planned if a == arm and p == phase}
            for frontier in frontiers[phase]:
                key = (arm, phase, frontier)
                if asked and frontier not in asked and key not in groups:
                    continue
                cell = _cell(key, subjects[arm], groups.get(key, []), planned.get(key, ""), limits)
                if key in blocked and cell.gap is None:
                    _block(cell, blocked[key])
                cells[key] = cell
    return Study(rows, arms, frontiers, cells, _ordered(results, arms), aa_arms, label)


def _aa_arms(rows: Rows, label: Labels) -> set[str]:
    """Series that repeat another arm's settings in order to measure noise."""
    names = {label(row.run_id, row.arm) for row in rows.samples if "aa" in row.flags}
    for job in rows.jobs:
        for arm in job.get("arms", []):
            if arm.get("aa"):
                names.add(label(str(job.get("run_id", "")), str(arm.get("name", ""))))
    return names


def _result(row: ContrastRow, label: Labels, aa_arms: set[str]) -> Result:
    run_id = row.run_ids[0] if row.run_ids else ""
    arm, reference = label(run_id, row.arm), label(run_id, row.reference)
    same = label.hash_of(run_id, row.arm)
    aa = arm in aa_arms or reference in aa_arms or bool(same and same == label.hash_of(run_id, row.reference))
    verdict, reason = row.verdict, row.reason or ""
    numbers = [finite(x) for x in (row.ratio, row.low, row.high, row.detectable)]
    if verdict in ("faster", "slower", "same", "unclear") and row.check and row.check.get("passed") is not True:
        verdict, reason = "blocked", str(row.check.get("reason") or "the quality guard gave no pass")
    if verdict in ("faster", "slower", "same") and numbers[0] is None:
        verdict, reason = "unclear", "the row has a verdict but no ratio"
    if verdict == "blocked":
        numbers = [None] * 4
    value, low, high, detectable = numbers
    return Result(
        row.contrast,
        arm,
        reference,
        row.phase,
        row.frontier,
        verdict,
        reason,
        value,
        low,
        high,
        row.units,
        row.unit,
        finite(row.margin),
        detectable,
        row.method,
        row.check,
        aa,
        row.run_ids,
    )


def _failed(check: dict[str, Any]) -> bool:
    return check.get("passed") is False


def _ordered(results: list[Result], arms: list[str]) -> list[Result]:
    """Contrasts in the order they were asked, decode after prefill, short contexts first."""
    asked = {name: i for i, name in enumerate(dict.fromkeys(r.contrast for r in results))}
    phase = {name: i for i, name in enumerate(PHASES)}
    return sorted(results, key=lambda r: (r.aa, asked[r.contrast], r.arm, phase.get(r.phase, 9), r.frontier))


def _planned(rows: Rows, label: Labels, subjects: dict[str, str]) -> dict[tuple[str, Phase, int], str]:
    """Every cell the plans asked for, with the reason where it was to be skipped; adds arms that never ran."""
    cells: dict[tuple[str, Phase, int], str] = {}
    for job in rows.jobs:
        run_id = str(job.get("run_id", ""))
        for point in job.get("points", []):
            phase, frontier, skip = point.get("phase"), point.get("frontier"), point.get("skip") or {}
            if phase not in PHASES or not isinstance(frontier, int):
                continue
            for arm in job.get("arms", []):
                name = label(run_id, str(arm.get("name", "")))
                subjects.setdefault(name, str(arm.get("subject", "")))
                cells[name, phase, frontier] = str(skip.get(arm.get("name"), ""))
    return cells


def _cell(
    key: tuple[str, Phase, int],
    subject: str,
    rows: list[SampleRow],
    planned_skip: str,
    limits: dict[str, dict[str, float | None]],
) -> Cell:
    arm, phase, frontier = key
    cell = Cell(arm, subject, phase, frontier)
    cell.flags = dict(sorted(Counter(flag for row in rows for flag in row.flags).items()))
    timed = [(rate, row) for row in counted_windows(rows) if (rate := finite(tokens_per_second(row))) is not None]
    bad = [row for row in rows if row.status != "ok"]
    if not timed:
        cell.gap, cell.reason = _why(rows, bad, planned_skip)
        return cell
    used = [row for _, row in timed]
    rates = np.array([rate for rate, _ in timed])
    cell.windows = len(used)
    cell.blocks = len({(row.run_id, row.session, row.block) for row in used})
    cell.median = float(np.median(rates))
    cell.low, cell.high = (float(x) for x in np.percentile(rates, [10, 90]))
    by_session: dict[tuple[str, int], list[float]] = {}
    for rate, row in timed:
        by_session.setdefault((row.run_id, row.session), []).append(rate)
    cell.sessions = len(by_session)
    cell.session_medians = [float(np.median(rates)) for rates in by_session.values()]
    cell.elapsed_ns = _median(row.elapsed_ns for row in used)
    cell.work_tokens = int(_median(row.work_tokens for row in used) or 0)
    cell.peak_bytes = _largest(row.peak_bytes for row in used)
    cell.active_bytes = _largest(row.active_bytes for row in used)
    cell.footprint_bytes = _largest(row.footprint_bytes for row in used)
    cell.bytes_per_second = _median(_per_second(row.least_bytes, row) for row in used)
    cell.flops_per_second = _median(_per_second(row.least_flops, row) for row in used)
    cell.least_bytes = _median(row.least_bytes for row in used)
    cell.least_flops = _median(row.least_flops for row in used)
    for name, value in limits.get(used[0].run_id, {}).items():
        setattr(cell, name, value)
    if any(_failed(row.check) for row in used):
        _block(cell, next(str(row.reason or "the quality guard failed") for row in used if _failed(row.check)))
    elif bad:
        cut = all(row.status == "skipped" for row in bad)
        cell.partial = "cut short" if cut else "partly failed"
        lost = "" if cut else f"{len(bad)} of {len(bad) + len(used)} windows: "
        cell.reason = lost + _reasons(bad)
    return cell


def counted_windows(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """The windows that count: those inside blocks; without any, those outside (a subject that has no blocks)."""
    counted = [row for row in rows if row.status == "ok" and not _UNCOUNTED.intersection(row.flags)]
    return [row for row in counted if row.block >= 0] or counted


def _why(rows: list[SampleRow], bad: list[SampleRow], planned_skip: str) -> tuple[GapKind, str]:
    if bad:
        return bad[0].status, _reasons(bad)  # type: ignore[return-value]
    if planned_skip:
        return "skipped", planned_skip
    if rows:
        return "error", "its windows hold no usable time (null, not a number, or no work)"
    return "missing", "no rows: this point was not run"


def _reasons(rows: list[SampleRow]) -> str:
    return "; ".join(dict.fromkeys(row.reason or f"{row.status}, no reason recorded" for row in rows))


def _block(cell: Cell, reason: str) -> None:
    """Take the numbers of speed away: an arm whose answers are wrong has none."""
    cell.gap, cell.reason = "blocked", reason or "the quality guard failed"
    cell.median = cell.low = cell.high = cell.elapsed_ns = cell.bytes_per_second = cell.flops_per_second = None
    cell.session_medians = []


def _per_second(amount: int | None, row: SampleRow) -> float | None:
    total, elapsed = finite(amount), finite(row.elapsed_ns)
    return total / (elapsed / 1e9) if total and elapsed and elapsed > 0 else None


def _median(values: Iterable[Any]) -> float | None:
    known = [x for x in map(finite, values) if x is not None]
    return float(np.median(known)) if known else None


def _largest(values: Iterable[Any]) -> float | None:
    return max((x for x in map(finite, values) if x is not None), default=None)
