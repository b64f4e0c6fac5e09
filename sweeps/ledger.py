"""What is already known in a session: windows finished, arms given up and why. Every row is written through it."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.points import APART, Arm, Job, Point
from sweeps.rows import SampleRow, Status
from sweeps.schedule import Cell, block_cells
from sweeps.store import LAUNCHES, RETRY, Store, is_final

ERRORS_BEFORE_STOP = 2
"""Windows of one arm that may fail at a point before the rest of that point is left."""

CRASH = "crash"
"""Flag of a window during which the process or its device died; the session leaves that arm from its frontier on."""


class Ledger:
    """Rows of one session of `job`, those of earlier processes included.

    Args:
        attempt: names one invocation of the command. What died in this attempt is not tried again in it; a later
            invocation tries it.
    """

    def __init__(self, job: Job, session: int, store: Store, attempt: str = "") -> None:
        self._job, self._session, self._store, self._attempt = job, session, store, attempt
        self._finished = {key for key in store.finished() if key[2] == session}
        self._noted: set[tuple[str, str]] = set()
        self._seen: set[tuple[str, str]] = set()
        self._series: set[tuple[str, str]] = set()
        self._launches: set[tuple[str, str]] = set()
        self._errors: dict[tuple[str, str], int] = {}
        self._stopped: dict[tuple[str, str], str] = {}
        self._closed: dict[tuple[str, str], tuple[int, str]] = {}
        self._died: set[str] = set()
        self.checks: dict[tuple[str, str], dict] = {}
        self.resumed = bool(self._finished)
        self.failed = False
        for row in store.read().samples:
            self._learn(row)

    def is_finished(self, cell: Cell) -> bool:
        """Whether this window needs not run again."""
        return cell.key in self._finished

    def has_series(self, point: Point, arm: str) -> bool:
        """Whether the per-token series of this arm is kept."""
        return (point.key, arm) in self._series

    def has_launches(self, point: Point, arm: str) -> bool:
        """Whether a row says what a decode step of this arm launches at this point."""
        return (point.key, arm) in self._launches

    def append(self, row: SampleRow) -> None:
        """Keep the row on disk and learn from it. An error is marked to be tried again by the next invocation."""
        if row.status == "error" and RETRY not in row.flags:
            row.flags.append(RETRY)
        self._store.append(row)
        self._learn(row, fresh=True)

    def note(self, row: SampleRow, status: Status, reason: str, retry: bool = False) -> None:
        """Say once why an arm does not run (further) at a point, unless a row of a window says it already."""
        key = (row.point, row.arm)
        if key in self._noted or key in self._errors or self._whole(row):
            return
        row.status, row.reason = status, reason
        row.flags += [RETRY] if retry or reason in self._died else []
        self._noted.add(key)
        self.append(row)

    def shut(self, point: Point, arm: str) -> str | None:
        """Why `arm` does not run (further) at this point, or None."""
        if arm in point.skip:
            return point.skip[arm]
        closed = self._closed.get((arm, point.phase))
        if closed and point.frontier >= closed[0]:
            return closed[1]
        return self._stopped.get((point.key, arm))

    def stop(self, point: Point, arm: str, reason: str) -> None:
        """Leave the rest of this point to the other arms."""
        self._stopped[point.key, arm] = reason

    def pending(self, point: Point, arms: Sequence[str]) -> list[Cell]:
        """Unfinished windows of those of `arms` that can run, in order."""
        names = {arm for arm in arms if self.shut(point, arm) is None}
        every = [cell for block in range(point.blocks) for cell in block_cells(self._job, self._session, point, block)]
        return [cell for cell in every if cell.arm in names and not self.is_finished(cell)]

    def is_covered(self, point: Point, arm: Arm) -> bool:
        """Whether the rows say all there is to say about `arm` at this point."""
        key = (point.key, arm.name)
        if arm.subject in APART:
            return key in self._seen
        if self.shut(point, arm.name) is not None:
            return key in self._noted
        return not self.pending(point, [arm.name])

    def _learn(self, row: SampleRow, fresh: bool = False) -> None:
        key = (row.point, row.arm)
        if row.check:
            self.checks[key] = row.check
        self._close_from(row)
        if row.session != self._session:
            return
        self._seen.add(key)
        if LAUNCHES in row.flags:
            self._launches.add(key)
        if row.series:
            self._series.add(key)
        elif row.status != "ok" and is_final(row):
            self._noted.add(key)
            self._stopped[key] = row.reason or row.status
        if row.block >= 0 and is_final(row):
            self._finished.add((row.point, row.arm, row.session, row.block, row.slot))
        if fresh and row.status not in ("ok", "skipped"):
            self.failed = True
            self._errors[key] = self._errors.get(key, 0) + 1
            if row.status != "error" or self._errors[key] >= ERRORS_BEFORE_STOP:
                self._stopped[key] = f"stopped after {row.status}: {row.reason}"

    def _close_from(self, row: SampleRow) -> None:
        """From which frontier on an arm is not tried: after running out of memory or dying in both phases, after a
        timeout in its own."""
        here = row.session == self._session and row.extra.get("attempt") == self._attempt
        died = CRASH in row.flags and here
        if row.status == "oom" or died:
            phases, why = ("prefill", "decode"), "the process died" if died else "out of memory"
        elif row.status == "timeout":
            phases, why = (row.phase,), "over the cap"
        else:
            return
        reason = f"{why} at {row.frontier} tokens ({row.phase})"
        self._died |= {reason} if died else set()
        for phase in phases:
            known = self._closed.get((row.arm, phase))
            if known is None or row.frontier < known[0]:
                self._closed[row.arm, phase] = (row.frontier, reason)

    def _whole(self, row: SampleRow) -> bool:
        """Whether every window of the arm at the row's point is finished."""
        point = next(point for point in self._job.points if point.key == row.point)
        every = [cell for block in range(point.blocks) for cell in block_cells(self._job, self._session, point, block)]
        mine = [cell for cell in every if cell.arm == row.arm]
        return bool(mine) and all(self.is_finished(cell) for cell in mine)
