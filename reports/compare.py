"""Two runs beside each other: the same arm at the same point, then and now, here and there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from reports import tables, text
from reports.cells import Cell, Study, study
from reports.load import ReportError, read_rows
from reports.page import render, write
from reports.summary import places


@dataclass
class Compared:
    """The ratio B over A of one cell; low and high where both runs have at least two sessions."""

    ratio: float | None
    low: float | None
    high: float | None
    note: str


def compare(a: Path, b: Path, output: Path | None = None) -> Path:
    """Write ``compare.html`` and ``compare.md`` for runs `a` and `b` and return the path of the HTML file.

    output: folder to write into; by default ``compare-with-<name of a>`` inside `b`.

    Raises:
        ReportError: a folder that cannot be read, the same run twice, or two runs without a point in common.
    """
    if a.resolve() == b.resolve():
        raise ReportError(f"{a} and {b} are the same run; compare needs two")
    left, right = study(read_rows([a])), study(read_rows([b]))
    table = _table(left, right)
    if not table.rows:
        raise ReportError(f"{a} and {b} have no arm, phase and context in common; nothing to compare")
    context: dict[str, Any] = {
        "title": f"{b.resolve().name} against {a.resolve().name}",
        "places": {"A": (a.resolve().name, places(left.rows.runs)), "B": (b.resolve().name, places(right.rows.runs))},
        "differences": tables.differences(left.rows.runs, right.rows.runs),
        "points": table,
        "only": [("A", _only(left, right)), ("B", _only(right, left))],
    }
    out = output or b / f"compare-with-{text.slug(a.resolve().name)}"
    files: dict[str, str | bytes] = {
        "compare.html": render("compare.html.j2", context),
        "compare.md": render("compare.md.j2", context),
        "compare.csv": table.csv(),
        "compare.jsonl": table.jsonl(),
    }
    write(out, files)
    return out / "compare.html"


def _table(left: Study, right: Study) -> tables.Table:
    columns = [
        tables.Column("arm", "arm"),
        tables.Column("phase", "phase"),
        tables.Column("frontier", "context", text.tokens, True),
        tables.Column("ratio", "B / A", text.ratio, True),
        tables.Column("interval", "95 % interval", numeric=True),
        tables.Column("a", "A, tok/s", text.number, True),
        tables.Column("b", "B, tok/s", text.number, True),
        tables.Column("note", "note"),
    ]
    rows = []
    for key, before in left.cells.items():
        after = right.cells.get(key)
        if after is None:
            continue
        found = _compared(before, after)
        shown = text.ABSENT if found.ratio is None else text.interval(found.low, found.high)
        rows.append(
            {
                "arm": key[0],
                "phase": key[1],
                "frontier": key[2],
                "a": before.median,
                "b": after.median,
                "ratio": found.ratio,
                "interval": shown,
                "low": found.low,
                "high": found.high,
                "note": found.note,
            }
        )
    return tables.Table("compare", "Rate of B over rate of A; above 1 means B is faster", columns, rows)


def _compared(a: Cell, b: Cell) -> Compared:
    for name, cell in (("A", a), ("B", b)):
        if cell.median is None:
            return Compared(
                None, None, None, f"{name}: {cell.gap or 'no rate'}" + (f", {cell.reason}" if cell.reason else "")
            )
    ratio = (b.median or 0) / (a.median or math.inf)
    if min(len(a.session_medians), len(b.session_medians)) < 2:
        return Compared(ratio, None, None, "a run of one process: how much of this is noise cannot be told")
    before, after = ([math.log(m) for m in cell.session_medians] for cell in (a, b))
    if len(set(before)) == 1 and len(set(after)) == 1:
        return Compared(ratio, None, None, "all sessions agree exactly: no scatter to make an interval of")
    interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    return Compared(ratio, math.exp(interval.low), math.exp(interval.high), "sessions, not paired")


def _only(one: Study, other: Study) -> list[str]:
    """Arms that only one of the runs has."""
    return [arm for arm in one.arms if arm not in other.arms]
