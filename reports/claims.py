"""What was published beside what these rows measured, each with its device; the two are never mixed in one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ablations.catalogue import CLAIMS, TABLES, Claim
from reports import text
from reports.cells import Result, Study
from reports.facts import chip_name, version
from reports.tables import Column, Table
from sweeps.rows import RunRow

DIRECTION = {
    "in": "added to everything off",
    "claim": "on top of what was on",
    "out": "taken from everything on",
}

_UNITS = {"tokens_per_second": "tok/s", "gigabytes_per_second": "GB/s", "count": ""}

About = dict[str, Any]

TESTABLE = tuple(claim for claim in CLAIMS if claim.toggle or claim.fields)
"""Claims that an arm here can test."""


def about(study: Study) -> dict[tuple[str, str, str], About]:
    """What each contrast of the plans is about, by run, arm and reference under the names of their series."""
    made = {}
    for job in study.rows.jobs:
        run_id = str(job.get("run_id", ""))
        for contrast in job.get("contrasts", []):
            names = (study.label(run_id, str(contrast.get(side, ""))) for side in ("arm", "reference"))
            made[(run_id, *names)] = contrast.get("about") or {}
    return made


def asked_of(result: Result, known: dict[tuple[str, str, str], About]) -> About:
    """What one answer is about; empty where its plan says nothing."""
    found = (known.get((run_id, result.arm, result.reference)) for run_id in result.run_ids)
    return next((one for one in found if one), {})


def claims(study: Study) -> Table:
    """What was measured of each published claim: a row for each direction and context."""
    answers = _answers(study)
    rows = [row for claim in TESTABLE for row in _rows(study, claim, answers)]
    columns = [
        Column("claim", "claim"),
        Column("finding", "published finding"),
        Column("published", "published", text.plain, True),
        Column("published_on", "on", _short_device),
        Column("where", "measured at"),
        Column("direction", "how"),
        Column("ratio", "measured", text.ratio, True),
        Column("interval", "95 % interval", text.plain, True),
        Column("verdict", "verdict"),
        Column("agrees", "as published?"),
        Column("measured_on", "on"),
    ]
    empty = "No question of these rows tests a published claim; suite=published tests all of them."
    return Table("claims", "Published beside measured", columns, rows, empty)


def untested(study: Study) -> list[str]:
    """Names of the claims that have an arm here and no answer in these rows."""
    answers = _answers(study)
    return [claim.name for claim in TESTABLE if not _rows(study, claim, answers)]


def _answers(study: Study) -> list[tuple[Result, About]]:
    known = about(study)
    return [(r, asked_of(r, known)) for r in study.results if not r.aa]


def _rows(study: Study, claim: Claim, answers: Sequence[tuple[Result, About]]) -> list[dict[str, Any]]:
    base = {
        "claim": claim.name,
        "finding": claim.finding,
        "published": _published(claim),
        "published_value": claim.value,
        "published_on": claim.device,
        "baseline": f"{claim.baseline.program} {claim.baseline.version}" if claim.baseline else None,
        "source": claim.source,
        "phase": claim.phase,
        "worked": claim.worked,
    }
    made = []
    mine = [(r, found) for r, found in answers if claim.name in found.get("claims", []) and r.phase == claim.phase]
    there = [(r, found) for r, found in mine if not claim.contexts or r.frontier in claim.contexts]
    for result, found in there or mine:
        ways = [DIRECTION.get(way, way) for way in found.get("directions") or ["on the engine as configured"]]
        ways += [] if there else ["not at the published context"]
        made.append(
            base
            | {
                "frontier": result.frontier,
                "where": f"{result.phase} {text.tokens(result.frontier)}",
                "direction": "; ".join(ways),
                "ratio": result.ratio,
                "low": result.low,
                "high": result.high,
                "interval": text.ABSENT if result.ratio is None else text.interval(result.low, result.high),
                "verdict": result.verdict,
                "reason": result.reason,
                "agrees": agrees(claim, result.verdict) if there else "another context",
                "arm": result.arm,
                "reference": result.reference,
                "measured_on": device_of(study.rows.runs, result.run_ids),
                "run_ids": result.run_ids,
            }
        )
    return made


def agrees(claim: Claim, verdict: str) -> str:
    """Whether a verdict points where the claim does; a device is another one, so no is a finding and no refutation."""
    if claim.quantity != "ratio":
        return "no figure for the whole"
    if verdict in ("unclear", "blocked", "unsupported"):
        return "cannot tell"
    if claim.value is None:
        # "No measurable gain", or an idea that was kept without a figure.
        as_said = verdict in ("same", "slower") if not claim.worked else verdict == "faster"
    else:
        as_said = verdict == ("faster" if claim.value > 1 else "slower")
    return "yes" if as_said else "no"


def _published(claim: Claim) -> str:
    if claim.value is None:
        return "no figure"
    if claim.quantity == "ratio":
        return text.ratio(claim.value)
    if claim.quantity == "share":
        return f"{100 * claim.value:.4g}{text.NBSP}%"
    return f"{text.number(claim.value)} {_UNITS[claim.quantity]}".strip()


def _short_device(value: Any) -> str:
    """The chip alone; its cores and memory are in the table's file and in the catalogue."""
    return text.plain(value).split(",")[0]


def device_of(runs: Iterable[RunRow], run_ids: list[str]) -> str:
    """The chips that some runs were made on."""
    return ", ".join(dict.fromkeys(chip_name(run) for run in runs if run.run_id in run_ids)) or text.ABSENT


def facts() -> Table:
    """Published figures of one machine that no switch here stands for."""
    columns = [
        Column("name", "figure"),
        Column("finding", "what"),
        Column("published", "published", text.plain, True),
        Column("device", "on", _short_device),
    ]
    rows = [
        {"name": c.name, "finding": c.finding, "published": _published(c), "value": c.value, "device": c.device}
        for c in CLAIMS
        if not c.toggle and not c.fields
    ]
    return Table("published-facts", "Published figures of one machine that no switch stands for", columns, rows)


def against_mlx(study: Study) -> Table:
    """The two published ten-point tables beside the measured ratio to MLX-LM, with the versions of each."""
    subjects = {cell.arm: cell.subject for cell in study.cells.values()}
    found = [r for r in study.results if subjects.get(r.reference) == "mlx_lm" and subjects.get(r.arm) == "engine"]
    rows = []
    for r in found:
        row: dict[str, Any] = {"arm": r.arm, "phase": r.phase, "frontier": r.frontier}
        for one in TABLES:
            same = next((point for point in one.rows if point.context == r.frontier), None)
            row[f"published_{one.baseline.mlx}"] = same.ratio(r.phase) if same else None
        run = next((run for run in study.rows.runs if run.run_id in r.run_ids), None)
        versions = f"mlx {version(run, 'mlx')}, mlx-lm {version(run, 'mlx_lm')}" if run else text.ABSENT
        interval = text.ABSENT if r.ratio is None else text.interval(r.low, r.high)
        row |= {"ratio": r.ratio, "low": r.low, "high": r.high, "interval": interval, "verdict": r.verdict}
        rows.append(row | {"versions": versions, "measured_on": device_of(study.rows.runs, r.run_ids)})
    columns = [Column("arm", "arm"), Column("phase", "phase"), Column("frontier", "context", text.tokens, True)]
    columns += [
        Column(f"published_{one.baseline.mlx}", f"Lily, against MLX {one.baseline.mlx} (M5 Max)", text.ratio, True)
        for one in TABLES
    ]
    columns += [
        Column("ratio", "measured here", text.ratio, True),
        Column("interval", "95 % interval", text.plain, True),
        Column("verdict", "verdict"),
        Column("versions", "against"),
        Column("measured_on", "on"),
    ]
    caption = "Ratio to MLX-LM: published for Lily on its machine, and measured here for this engine"
    return Table("against-mlx", caption, columns, rows, "No arm was held against MLX-LM in these rows.")
