"""The run folder: append-only JSON Lines for the three tables, safetensors for series.

One row per window, on disk before the next window begins, so that a killed run loses at most the window in flight.
Readable on any machine: no MLX here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from sweeps.points import Arm, Contrast, Job, Point
from sweeps.rows import ContrastRow, RowError, RunRow, SampleRow, from_json, to_json

FILES: dict[type, str] = {RunRow: "runs.jsonl", SampleRow: "samples.jsonl", ContrastRow: "contrasts.jsonl"}
"""Row class to the file it is kept in."""

RETRY = "retry"
"""Flag of a row that a rerun of the same command should try again (budget ran out, machine stopped)."""

LAUNCHES = "launches"
"""Flag of a row that holds no time but what one decode step of its arm launches."""

CellKey = tuple[str, str, int, int, int]


@dataclass
class Tables:
    """What a run folder holds. `torn`: files whose last line a killed process left unfinished (it is not read)."""

    runs: list[RunRow] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    contrasts: list[ContrastRow] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)


class Store:
    """One run folder. Reading changes nothing; the first append sets a torn last line aside."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._checked: set[str] = set()
        self.torn: list[str] = []

    def append(self, row: RunRow | SampleRow | ContrastRow) -> None:
        """Write one row and wait until it is on disk."""
        path = self.path / FILES[type(row)]
        if path.name not in self._checked:
            self.path.mkdir(parents=True, exist_ok=True)
            self._set_aside(path)
            self._checked.add(path.name)
        line = json.dumps(to_json(row), separators=(",", ":"), allow_nan=False, default=_plain)
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def put_conditions(self, record: Mapping[str, Any]) -> None:
        """Keep the machine's condition before or after a point, as a line of ``conditions.jsonl``."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "conditions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":"), default=_plain) + "\n")

    def read(self) -> Tables:
        """All rows. A window that was tried again counts once, by its last row; so does a contrast.

        Raises:
            RowError: a row of another schema version or a broken line, by file and line number.
        """
        tables = Tables()
        tables.runs = _latest(self._rows(RunRow, tables.torn), lambda r: (r.run_id, r.session, r.started))
        tables.samples = _resolve(self._rows(SampleRow, tables.torn))
        tables.contrasts = _latest(
            self._rows(ContrastRow, tables.torn), lambda r: (r.contrast, r.arm, r.reference, r.phase, r.frontier)
        )
        return tables

    def finished(self) -> set[CellKey]:
        """Windows that need not run again, as (point, arm, session, block, slot)."""
        return {_cell(row) for row in self.read().samples if row.block >= 0 and is_final(row)}

    def put_series(self, name: str, arrays: Mapping[str, np.ndarray]) -> str:
        """Keep raw series under `name` (one safetensors file, written whole or not at all); returns the name."""
        folder = self.path / "series"
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{name}.part"
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, part)
        part.replace(folder / f"{name}.safetensors")
        return name

    def series(self, name: str) -> dict[str, np.ndarray]:
        """The arrays kept under `name`.

        Raises:
            RowError: there is no such series.
        """
        path = self.path / "series" / f"{name}.safetensors"
        if not path.is_file():
            raise RowError(f"{path}: no such series; the row that names it was copied without its folder")
        return load_file(path)

    def _rows(self, kind: type, torn: list[str]) -> list[Any]:
        path = self.path / FILES[kind]
        if not path.is_file():
            return []
        good, tail = _split(path.read_bytes())
        if tail:
            torn.append(path.name)
        rows = []
        for number, line in enumerate(good, start=1):
            try:
                rows.append(from_json(kind, json.loads(line)))
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise RowError(f"{path}:{number}: not a row; remove the line to go on without it") from None
            except RowError as error:
                raise RowError(f"{path}:{number}: {error}") from None
        return rows

    def _set_aside(self, path: Path) -> None:
        """Move an unfinished last line to a file beside, so that the next row starts on a line of its own."""
        if not path.is_file():
            return
        _, tail = _split(path.read_bytes())
        if not tail:
            return
        with path.with_suffix(".torn").open("ab") as file:
            file.write(tail.rstrip(b"\n") + b"\n")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - len(tail))
            os.fsync(file.fileno())
        self.torn.append(path.name)


def is_final(row: SampleRow) -> bool:
    """Whether a rerun leaves this window alone: it was measured, or it is known that it cannot be."""
    return row.status != "error" and RETRY not in row.flags


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old one or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that write the same file at once each have a part of their own.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_job(job: Job, path: Path | None = None) -> Path:
    """Write a job, whole, as ``job.json`` into its run folder or as `path`; returns the path."""
    path = path or Path(job.run_dir) / "job.json"
    write_whole(path, json.dumps(dataclasses.asdict(job), indent=1, default=_plain))
    return path


def read_job(path: str | Path) -> Job:
    """The job that `write_job` wrote.

    Raises:
        RowError: no such file, or not a job of this version of the program.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        parts = {"arms": Arm, "contrasts": Contrast, "points": Point}
        lists = {name: [kind(**part) for part in values[name]] for name, kind in parts.items()}
        return Job(**(values | lists))
    except OSError as error:
        raise RowError(f"{path}: {error.strerror}; give the job.json of a run folder") from None
    except (ValueError, TypeError, KeyError) as error:
        raise RowError(f"{path}: not a job of this version: {error}; start the sweep again") from None


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Complete lines, and the bytes of a torn last line (no newline, or not JSON after a power loss)."""
    cut = data.rfind(b"\n") + 1
    lines, tail = data[:cut].splitlines(), data[cut:]
    if not tail and lines:
        try:
            json.loads(lines[-1])
        except ValueError:
            tail = lines.pop() + b"\n"
    return [line for line in lines if line.strip()], tail


def _cell(row: SampleRow) -> CellKey:
    return row.point, row.arm, row.session, row.block, row.slot


def _resolve(rows: list[SampleRow]) -> list[SampleRow]:
    """One row a window; a note to try a whole point again (block -1) goes once a later row shows that it was tried."""
    last_ok = {(row.point, row.arm, row.session): n for n, row in enumerate(rows) if row.block >= 0}
    kept = [
        row
        for n, row in enumerate(rows)
        if row.block >= 0 or is_final(row) or last_ok.get((row.point, row.arm, row.session), -1) < n
    ]
    # What a step launches is told apart from whether it was timed: neither row takes the other's place.
    return _latest(kept, lambda row: (*_cell(row), row.series is not None, LAUNCHES in (row.flags or ())))


def _latest(rows: Iterable[Any], key: Any) -> list[Any]:
    kept: dict[Any, Any] = {}
    for row in rows:
        kept[key(row)] = row
    return list(kept.values())


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (set, tuple)):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be kept in a row")
