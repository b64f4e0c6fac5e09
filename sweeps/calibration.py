"""How far two identical arms came apart in earlier runs on this machine, in a design like that of a run now.

Every run carries an A/A arm, and `python -m sweeps calibrate` measures nothing else. Their windows are read again from
the run folders beside a new one and cut into pieces of its design (so many sessions of so many blocks), so that ten
minutes of calibration serve designs of any size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablations.statistics import StatisticsError, Window, block_log_ratios
from sweeps.points import Job, Point
from sweeps.rows import RowError, RunRow, tokens_per_second
from sweeps.store import Store, Tables, read_job


@dataclass(frozen=True)
class Earlier:
    """A run that lies beside the one at hand and was made on the same machine with the same model."""

    job: Job
    tables: Tables


def beside(job: Job) -> list[Earlier]:
    """Earlier runs in the folder of `job`'s run that can tell about its noise; unreadable ones are passed over."""
    own = Store(job.run_dir).read().runs
    if not own:
        return []
    made = []
    for path in sorted(Path(job.run_dir).parent.glob("*/job.json")):
        if path.parent == Path(job.run_dir):
            continue
        try:
            found = Earlier(read_job(path), Store(path.parent).read())
        except (RowError, OSError):
            continue
        if found.tables.runs and _place(found.tables.runs[0], found.job) == _place(own[0], job):
            made.append(found)
    return made


def ratios(runs: Sequence[Earlier], job: Job, point: Point, blocks: int) -> list[float]:
    """A/A ratios of `runs` at the phase and frontier of `point`, one for each piece of the size of `job`'s design.

    Args:
        blocks: paired blocks a session that `job` has at the point.
    """
    made = []
    for run in runs:
        again = {arm.name for arm in run.job.arms if arm.aa}
        for there in run.job.points:
            if (there.phase, there.frontier, there.decode_tokens) != (point.phase, point.frontier, point.decode_tokens):
                continue
            for contrast in run.job.contrasts:
                if contrast.arm in again:
                    sessions = _logs(run.tables, there, contrast.arm, contrast.reference)
                    made += [math.exp(piece) for piece in pieces(sessions, job.sessions, blocks)]
    return made


def pieces(sessions: Sequence[Sequence[float]], count: int, blocks: int) -> Iterator[float]:
    """Means over `count` sessions of means over `blocks` blocks in a row, no block used twice; leftovers are left out.

    Args:
        sessions: log ratios of the blocks of each session.
    """
    if blocks < 1:
        return
    cut = [[session[i : i + blocks] for i in range(0, len(session) - blocks + 1, blocks)] for session in sessions]
    for first in range(0, len(cut) - count + 1, count):
        for together in zip(*cut[first : first + count]):
            yield statistics.fmean(statistics.fmean(part) for part in together)


def _logs(tables: Tables, point: Point, arm: str, reference: str) -> list[list[float]]:
    windows = [
        Window(row.session, row.block, row.arm, rate)
        for row in tables.samples
        if row.point == point.key and row.block >= 0 and (rate := tokens_per_second(row)) is not None
    ]
    try:
        sessions, _ = block_log_ratios(windows, arm, reference)
    except StatisticsError:
        return []
    return [list(session) for session in sessions]


def _place(run: RunRow, job: Job) -> tuple[Any, ...]:
    """What two runs must share: the machine, the versions of MLX, and the weights."""
    machine: Mapping[str, Any] = run.machine
    versions = machine.get("versions") or {}
    model = [job.model.get(name) for name in ("name", "weights_hash", "seed", "skew")]
    return (*(machine.get(name) for name in ("chip", "device", "memory")), versions.get("mlx"), *model)
