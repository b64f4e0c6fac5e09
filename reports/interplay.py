"""Interactions from rows: four arms of the same blocks, as a grid and in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ablations.interactions import interaction
from ablations.statistics import LEAST_MARGIN, StatisticsError, Window
from reports import text
from reports.cells import Study
from reports.tables import Column, Table
from sweeps.rows import SampleRow, tokens_per_second

MARKS = {"help": "▲ help", "overlap": "▼ overlap", "multiply": "= multiply", "unclear": "? unclear"}

MEANING = (
    "The effect of one optimisation with the other on, over its effect with the other off. help: worth more together "
    "than apart. overlap: worth less. multiply: within the margin, so the two effects simply multiply."
)


def details(study: Study) -> Table:
    """Every interaction that the plans asked about, at every phase and context."""
    columns = [
        Column("pair", "optimisations"),
        Column("phase", "phase"),
        Column("frontier", "context", text.tokens, True),
        Column("ratio", "ratio of ratios", text.ratio, True),
        Column("interval", "95 % interval", text.plain, True),
        Column("word", "answer"),
        Column("sure", "from"),
        Column("reason", "why"),
    ]
    rows = list(_rows(study))
    return Table("interactions", "Interactions", columns, rows, "No interaction was asked about in these rows.")


def grid(study: Study, found: Table) -> list[Table]:
    """The same as one grid a phase and context: each optimisation against each."""
    grids = []
    for phase, frontier in dict.fromkeys((row["phase"], row["frontier"]) for row in found.rows):
        here = [row for row in found.rows if (row["phase"], row["frontier"]) == (phase, frontier)]
        names = list(dict.fromkeys(name for row in here for name in row["toggles"]))
        cells = {frozenset(row["toggles"]): _cell(row) for row in here}
        rows = [{"toggle": a} | {b: "·" if a == b else cells.get(frozenset((a, b)), "") for b in names} for a in names]
        columns = [Column("toggle", "", _blank), *(Column(name, name, _blank) for name in names)]
        caption = f"{phase.capitalize()} at {text.tokens(frontier)}: ratio of ratios of each pair"
        grids.append(Table(f"interaction-grid-{phase}-{frontier}", caption, columns, rows))
    return grids


def _blank(value: Any) -> str:
    return str(value or "")


def _cell(row: dict[str, Any]) -> str:
    word = str(MARKS.get(row["word"], row["word"]))
    return f"{text.ratio(row['ratio'])} {row['interval']} {word}" if row["ratio"] is not None else word


def _rows(study: Study) -> Iterator[dict[str, Any]]:
    for job in study.rows.jobs:
        run_id = str(job.get("run_id", ""))
        for asked in (job.get("settings") or {}).get("interactions") or []:
            arms = [str(name) for name in asked.get("arms", [])]
            for point in job.get("points", []):
                samples = [r for r in study.rows.samples if r.run_id == run_id and r.point == point.get("key")]
                yield _row(study, run_id, arms, list(asked.get("toggles", [])), point, samples)


def _row(
    study: Study, run_id: str, arms: list[str], toggles: list[str], point: dict[str, Any], samples: list[SampleRow]
) -> dict[str, Any]:
    here = [r for r in study.results if run_id in r.run_ids and r.phase == point["phase"]]
    margins = [r.margin for r in here if r.frontier == point["frontier"] and r.margin is not None]
    base = {
        "pair": " × ".join(toggles),
        "toggles": toggles,
        "arms": arms,
        "phase": point["phase"],
        "frontier": point["frontier"],
        "run_ids": [run_id],
    }
    windows = [
        Window(row.session, row.block, row.arm, rate)
        for row in samples
        if row.block >= 0 and (rate := tokens_per_second(row)) is not None
    ]
    absent = next((f"{a}: {why}" for a in arms if (why := _absent(a, point, samples))), None)
    checks = [next((r.check for r in samples if r.arm == arm and r.check), {}) for arm in arms]
    try:
        margin = max([LEAST_MARGIN, *margins])
        estimate, word, reason = interaction(windows, arms, margin, checks, absent)
    except StatisticsError as error:
        return base | {
            "ratio": None,
            "interval": text.ABSENT,
            "word": "unclear",
            "sure": text.ABSENT,
            "reason": str(error),
        }
    shown = word not in ("blocked", "unsupported") and estimate.ratio is not None
    return base | {
        "ratio": estimate.ratio if shown else None,
        "low": estimate.low if shown else None,
        "high": estimate.high if shown else None,
        "interval": text.interval(estimate.low, estimate.high) if shown else text.ABSENT,
        "word": word,
        "sure": text.count(estimate.units, estimate.unit) + (", this process only" if estimate.unit == "block" else ""),
        "margin": (1 + margin) ** 2 - 1,
        "reason": reason,
        "method": estimate.method,
    }


def _absent(arm: str, point: dict[str, Any], samples: list[SampleRow]) -> str | None:
    """Why an arm does not run here, if that is so."""
    if arm in (point.get("skip") or {}):
        return str(point["skip"][arm])
    mine = [row for row in samples if row.arm == arm]
    if mine and all(row.status == "skipped" for row in mine):
        return str(mine[0].reason or "skipped")
    return None
