"""A session of stubs on a clock that moves only when work is done, for tests of schedule and worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sweeps.clock import Clock, ManualClock, SystemClock
from sweeps.points import Arm, Contrast, Job, Point
from sweeps.prompts import Prompts, WordEncoder
from sweeps.rows import SampleRow
from sweeps.sentinel import Sentinel
from sweeps.session import Session
from sweeps.store import Store
from sweeps.subjects.base import Subject
from sweeps.subjects.stub import Stub, StubOptions
from sweeps.window import NoDevice, Tools


def arm(name: str, aa: bool = False, **options: Any) -> Arm:
    """A stub arm with `StubOptions`."""
    return Arm(name, "stub", options=options, hash=f"hash-{name}", aa=aa)


def points(frontiers: Sequence[int], blocks: int = 2, tokens: int = 4, walk_from: int = 1 << 60) -> list[Point]:
    """A prefill and a decode point a frontier; those from `walk_from` on a walk."""
    return [
        Point(f"{phase}-{frontier}", phase, frontier, blocks, tokens, straight=frontier < walk_from)
        for frontier in frontiers
        for phase in ("prefill", "decode")
    ]


def job(folder: Path, arms: list[Arm], made: list[Point], **more: Any) -> Job:
    """A job over `made` points; every arm is held against the first."""
    contrasts = [Contrast(f"{a.name} vs {arms[0].name}", a.name, arms[0].name) for a in arms[1:]]
    model = {"name": "stub", "geometry": {"vocab_size": 256}}
    values = {"sessions": 1, "seed": 3, "budget_seconds": 0.0, "cap_seconds": 1e6, "settings": {}}
    return Job(str(folder), "run", model, {"kind": "text", "seed": 0}, arms, contrasts, made, **(values | more))


class Bench:
    """Runs sessions of a job in this process."""

    def __init__(
        self, what: Job, clock: Clock | None = None, wrap: Callable[[Arm, Stub], Subject] = lambda arm, stub: stub
    ) -> None:
        self.job = what
        self.clock = clock or ManualClock()
        self.store = Store(what.run_dir)
        self.subjects = {a.name: wrap(a, Stub(StubOptions.from_dict(a.options), self._sleep)) for a in what.arms}

    def run(self, session: int = 0, budget: float = float("inf"), **tools: Any) -> bool:
        """Measure one session; True if all went well."""
        return self.session(session, budget, **tools).run()

    def session(self, session: int = 0, budget: float = float("inf"), **tools: Any) -> Session:
        """A session ready to run."""
        beat = Sentinel(lambda: self._sleep(1000), self.clock, may_wait=False)
        prompts = Prompts(WordEncoder(256))
        given = Tools(self.store, prompts, self.clock, beat, NoDevice(), **tools)
        return Session(self.job, session, self.subjects, given, budget)

    def rows(self, phase: str | None = None, status: str | None = "ok", **fields: Any) -> list[SampleRow]:
        """Rows of windows (block 0 and up) or of whole points, that match."""
        rows = [row for row in self.store.read().samples if row.series is None]
        rows = [row for row in rows if phase in (None, row.phase) and status in (None, row.status)]
        return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]

    def _sleep(self, ns: int) -> None:
        if isinstance(self.clock, ManualClock):
            self.clock.advance(ns)
        elif isinstance(self.clock, SystemClock):
            self.clock.sleep(ns / 1e9)
