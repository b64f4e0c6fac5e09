"""Named baselines: runs of one machine that later runs are held against, kept under reports/published/<chip>/.

A baseline is made and renewed on purpose only; nothing renews one by itself, since a baseline that follows every run
hides a slow decline.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from reports import facts, text
from reports.load import ReportError, read_rows
from sweeps.rows import RunRow

PUBLISHED = Path("reports") / "published"
"""Where baselines are kept, from the folder the command is started in."""

_TABLES = ("job.json", "runs.jsonl", "samples.jsonl", "contrasts.jsonl")


def keep(run: Path, name: str, renew: bool = False, published: Path = PUBLISHED) -> Path:
    """Copy the rows of `run` as baseline `name` of its chip and return the folder.

    Args:
        renew: replace a baseline of that name; without it an existing one is never touched.

    Raises:
        ReportError: a run that cannot be a baseline (virtual device, several machines, one session, a dirty working
            tree, no times), a name that is none, or one that exists.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ReportError(f"{name!r} is no name for a baseline: use letters, digits, dots and hyphens")
    rows = read_rows([run])
    if reason := unfit(rows.runs):
        raise ReportError(f"{run}: no baseline: {reason}")
    if not any(row.status == "ok" and row.elapsed_ns for row in rows.samples):
        raise ReportError(f"{run}: no baseline: none of its windows has a time")
    folder = published / chip_folder(rows.runs[0]) / name
    if folder.exists() and not renew:
        raise ReportError(f"{folder} exists; --renew replaces it on purpose")
    part = folder.with_name(f".{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for table in _TABLES:
        if (run / table).is_file():
            shutil.copyfile(run / table, part / table)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)
    return folder


def unfit(runs: list[RunRow]) -> str | None:
    """Why these processes cannot stand as a baseline, or None."""
    if not runs:
        return "no process has a row"
    if any(facts.lookup(run.machine, ("paravirtual",)) is True for run in runs):
        return "it was measured on a virtual device, where times mean nothing"
    if len({facts.signature(run) for run in runs}) > 1:
        return "it holds several machines, models or versions"
    if len({(run.run_id, run.session) for run in runs}) < 2:
        return "it has one session, and sessions are what later runs are compared by; give sessions=5"
    if any((run.git or {}).get("dirty") for run in runs):
        return "the working tree had uncommitted changes, so nobody could measure it again"
    return None


def chip_folder(run: RunRow) -> str:
    """Name of the folder of a chip: ``Apple M5 Max`` is ``apple-m5-max``."""
    return text.slug(facts.chip_name(run).lower())


def find(name: str, run: Path, published: Path = PUBLISHED) -> Path:
    """The folder of a baseline: a path, or a name that is kept for the chip of `run`.

    Raises:
        ReportError: there is none; what there is for the chip is named.
    """
    if Path(name).is_dir():
        return Path(name)
    runs = read_rows([run]).runs
    folder = published / (chip_folder(runs[0]) if runs else "?") / name
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.glob("*") if (p / "runs.jsonl").is_file())
        there = f"kept for this chip: {', '.join(known)}" if known else "none is kept for this chip"
        raise ReportError(f"baseline {name}: {folder} does not exist; {there}; python -m reports baseline RUN {name}")
    return folder
