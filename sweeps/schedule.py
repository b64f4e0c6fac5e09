"""In which order windows run, and how one walk over a long prompt stands for a straight prompt at each frontier.

Order: the arms of a block are shuffled by a seeded coin and then mirrored (ABBA or BAAB; A B C C B A), so that a
linear drift of the machine cancels. On a walk each arm prefills once a block, and odd blocks mirror even ones.

Walk: whole chunks up to the start of the last chunk, a snapshot there, then the last chunk with the head. The time of
frontier N is the sum over whole chunks plus that tail, so its chunk list is that of one straight prompt of N tokens.
The walk then returns to the snapshot and goes on with a whole chunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.clock import Window
from sweeps.points import APART, Job, Point
from sweeps.subjects.base import Prefilled, Subject, chunk_lengths


@dataclass(frozen=True)
class Cell:
    """One window to run: `block` counts paired blocks, `slot` the position inside, `turn` the arm's turn in it."""

    point: str
    arm: str
    session: int
    block: int
    slot: int
    turn: int

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """What a finished row of this window is known by."""
        return self.point, self.arm, self.session, self.block, self.slot


@dataclass
class Group:
    """Points that share their prefill: one straight frontier, or all frontiers of the walk (ascending)."""

    straight: bool
    frontiers: list[int]
    prefill: dict[int, Point] = field(default_factory=dict)
    decode: dict[int, Point] = field(default_factory=dict)


def block_order(names: Sequence[str], seed: str, block: int, *, walk: bool = False) -> list[str]:
    """Arms of a block in slot order: shuffled by `seed` and mirrored; on a walk once each, odd blocks mirrored."""
    shuffled = list(names)
    if walk:
        random.Random(f"{seed}/{block // 2}").shuffle(shuffled)
        return shuffled[::-1] if block % 2 else shuffled
    random.Random(f"{seed}/{block}").shuffle(shuffled)
    return shuffled + shuffled[::-1]


def block_cells(job: Job, session: int, point: Point, block: int) -> list[Cell]:
    """Windows of one block in the order in which they run, arms skipped beforehand (and subjects measured
    apart, which order their own) left out."""
    names = [arm.name for arm in job.arms if arm.name not in point.skip and arm.subject not in APART]
    walk = point.phase == "prefill" and not point.straight
    turns: dict[str, int] = {}
    cells = []
    for slot, name in enumerate(block_order(names, f"{job.seed}/{session}/{point.key}", block, walk=walk)):
        turn = turns.get(name, 0)
        turns[name] = turn + 1
        cells.append(Cell(point.key, name, session, block, slot, turn))
    return cells


def groups(job: Job) -> list[Group]:
    """The session's course: straight frontiers from short to long, then the walk."""
    straight: dict[int, Group] = {}
    walk = Group(straight=False, frontiers=[])
    for point in sorted(job.points, key=lambda p: p.frontier):
        if point.straight:
            group = straight.setdefault(point.frontier, Group(True, [point.frontier]))
        else:
            group = walk
            if point.frontier not in walk.frontiers:
                walk.frontiers.append(point.frontier)
        getattr(group, point.phase)[point.frontier] = point
    return list(straight.values()) + ([walk] if walk.frontiers else [])


def tail_start(tokens: int, chunk: int) -> int:
    """Where the last chunk of a straight prompt of `tokens` begins."""
    return (tokens - 1) // chunk * chunk


class ChunksDiffer(RuntimeError):
    """A prefill ran other chunks than a straight prompt of that length; its time must not be reported."""


Timer = Callable[[Callable[[], Prefilled], int], Window[Prefilled]]
"""``timer(work, spent_ns)``: time `work`, of whose window `spent_ns` are already used (for the cap)."""


@dataclass(frozen=True)
class Reached:
    """A frontier of the walk: its time as one straight prompt, its chunks, and what the tail returned."""

    elapsed_ns: int
    chunks: list[int]
    tail: Prefilled
    cached_tokens: int


class Walk:
    """One subject on one long prompt, taken from frontier to frontier in ascending order.

    After `to(n)` the subject stands at position n, with its head computed; decode windows may follow. The next
    `to` returns to the snapshot before the tail by itself.
    """

    def __init__(self, subject: Subject, tokens: Sequence[int], chunk: int) -> None:
        self._subject = subject
        self._tokens = tokens
        self._chunk = chunk
        self._whole: list[int] = []
        self._whole_ns = 0
        self._cached = 0
        self._snapshot: Any = None

    @property
    def position(self) -> int:
        """Tokens covered by whole chunks so far."""
        return sum(self._whole)

    @property
    def spent_ns(self) -> int:
        """Time of the whole chunks so far."""
        return self._whole_ns

    def to(self, frontier: int, timer: Timer) -> Reached:
        """Prefill up to `frontier` tokens.

        Raises:
            ChunksDiffer: what ran is not the chunk list of a straight prompt.
        """
        start = tail_start(frontier, self._chunk)
        self._go_whole(start, timer)
        if start:
            self._snapshot = self._subject.snapshot()
        tail = timer(lambda: self._subject.prefill(self._tokens[start:frontier], last=True), self._whole_ns)
        chunks = self._whole + tail.value.chunks
        alone = len(tail.value.chunks) > 1 and tail.value.chunks[-1] == 1
        expected = chunk_lengths(frontier, self._chunk, tail=alone)
        if chunks != expected:
            raise ChunksDiffer(f"walk to {frontier} ran chunks ending in {chunks[-3:]}, a prompt has {expected[-3:]}")
        cached = self._cached + tail.value.cached_tokens
        return Reached(self._whole_ns + tail.elapsed_ns, chunks, tail.value, cached)

    def _go_whole(self, stop: int, timer: Timer) -> None:
        begin = self.position
        if begin == 0:
            self._subject.reset()
        elif self._snapshot is not None:
            self._subject.restore(self._snapshot)
        if stop == begin:
            return
        stretch = timer(lambda: self._subject.prefill(self._tokens[begin:stop], last=False), self._whole_ns)
        self._whole += stretch.value.chunks
        self._whole_ns += stretch.elapsed_ns
        self._cached += stretch.value.cached_tokens
        if self.position != stop:
            raise ChunksDiffer(f"whole chunks from {begin} to {stop} ran {stretch.value.chunks}")
