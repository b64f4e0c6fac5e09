"""Reading run folders: their three tables of rows, and the plan where it is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.rows import ContrastRow, RowError, RunRow, SampleRow
from sweeps.store import Store


class ReportError(ValueError):
    """A run folder that cannot be reported on; the message names it and the fix."""


@dataclass
class Rows:
    """All rows of one or more run folders, in the order in which they were written, and each folder's plan.

    torn: files whose last line a killed process left unfinished.
    """

    folders: list[Path]
    runs: list[RunRow] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    contrasts: list[ContrastRow] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)


def read_rows(folders: Sequence[Path]) -> Rows:
    """The rows of `folders` together; a folder named twice counts once.

    Raises:
        ReportError: a folder that is not there, is no run folder, or holds rows that cannot be read.
    """
    unique = list(dict.fromkeys(Path(folder) for folder in folders))
    rows = Rows(unique)
    for folder in unique:
        if not folder.is_dir():
            raise ReportError(f"{folder}: no such run folder; runs are kept under reports/runs/")
        if not any((folder / name).exists() for name in ("job.json", "runs.jsonl", "samples.jsonl")):
            raise ReportError(f"{folder}: no run folder (neither job.json nor runs.jsonl nor samples.jsonl is in it)")
        try:
            tables = Store(folder).read()
        except (RowError, OSError, ValueError) as error:
            raise ReportError(f"{folder}: {error}") from None
        for row in (*tables.runs, *tables.samples, *tables.contrasts):
            _fill(row)
        rows.torn += [str(folder / name) for name in tables.torn]
        rows.runs += tables.runs
        rows.samples += tables.samples
        rows.contrasts += tables.contrasts
        rows.jobs.append(_read_job(folder / "job.json"))
    return rows


def runs_of(folder: Path) -> list[Path]:
    """The run folders below the folder of a suite, in order; any other folder alone."""
    below = sorted(path.parent for path in folder.glob("*/samples.jsonl")) if (folder / "suite.json").is_file() else []
    return below or [folder]


def _fill(row: RunRow | SampleRow | ContrastRow) -> None:
    """Empty lists and mappings where another writer left null, so that readers need not ask."""
    lists, mappings = ("argv", "chunks", "executed", "flags", "run_ids"), ("check", "extra")
    mappings += ("config", "git", "machine", "conditions", "model", "prompt")
    for names, empty in ((lists, list), (mappings, dict)):
        for name in names:
            if hasattr(row, name) and getattr(row, name) is None:
                setattr(row, name, empty())


def _read_job(path: Path) -> dict[str, Any]:
    """The plan as plain values; empty where there is none, as in a run that was moved without it."""
    if not path.exists():
        return {}
    try:
        job = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(job, dict):
        raise ReportError(f"{path}: holds no plan")
    return job
