"""One session: every window of one process, in the order of the schedule, each on disk before the next begins.

Read `Session.run` first. A straight frontier is prefilled with a fresh prompt for every window, and the last prefill
is the cache of the decode windows there. Long frontiers share walks. Whatever goes wrong becomes a row with a status
and a reason, and the rest of the session goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from sweeps.clock import Window, WindowVoid, timed
from sweeps.energy import spent
from sweeps.environment import condition_flags
from sweeps.guard import same_path
from sweeps.ledger import CRASH, LAUNCHES, Ledger
from sweeps.points import Arm, Job, Point, drafts, sample_row
from sweeps.prompts import digest
from sweeps.rows import SampleRow, Status
from sweeps.schedule import Cell, Group, Walk, block_cells, groups
from sweeps.subjects.base import CanonicalState, Decoded, Prefilled, Subject
from sweeps.window import (
    DeviceLost,
    Live,
    Ready,
    Tools,
    WindowTimeout,
    classify,
    device_lost,
    one_line,
    refused,
    time_limit,
)

WARM_ROUNDS = 6
"""Most warm-up rounds of one arm at one point."""

WARM_SECONDS = 20.0
"""Seconds of warm-up of one arm at one point after which no further round begins; less on a short budget."""

STATIONARY = 0.05
"""Two rounds in a row that differ by less than this share end the warm-up."""

WARM_DECODE_TOKENS = 16
WALK_TOLERANCE = 0.02
"""How far the time of a walk may be from that of a straight prompt of the same length."""

VOID_RETRIES = 2
"""How often a window voided by a clock jump is run again."""


@dataclass
class Context:
    """What the rows of a point share while it is measured.

    Attributes:
        flags: conditions and sentinel. checks: the quality guard's results by arm. extra: facts of this block.
        first: facts for an arm's first row here. warm_capped: arms whose warm-up ended by its cap.
        before: conditions before the point. last_ns: each arm's last warm-up round.
    """

    point: Point
    flags: list[str] = field(default_factory=list)
    checks: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    first: dict[str, dict[str, Any]] = field(default_factory=dict)
    warm_capped: set[str] = field(default_factory=set)
    before: dict[str, Any] = field(default_factory=dict)
    last_ns: dict[str, int] = field(default_factory=dict)


@dataclass
class WalkRound:
    """One walk of several arms side by side along the same tokens."""

    number: int
    trial: int
    tokens: list[int]
    walks: dict[str, Walk]
    straight: dict[str, Any] | None = None


class Session:
    """Measures session number `session` of `job` with the subjects given by arm name.

    Args:
        budget_seconds: hard cap on this session, from now. attempt: names this invocation of the command.
    """

    def __init__(
        self,
        job: Job,
        session: int,
        subjects: Mapping[str, Subject],
        tools: Tools,
        budget_seconds: float = float("inf"),
        attempt: str = "",
    ) -> None:
        self.job, self.session, self.tools = job, session, tools
        self.ledger = Ledger(job, session, tools.store, attempt)
        self.live = [Live(a, subjects[a.name], _chunk(a, subjects[a.name])) for a in job.arms if a.name in subjects]
        self._attempt = attempt
        self._start = tools.clock.now_ns()
        self._budget = budget_seconds
        self._warm_seconds = warm_seconds(budget_seconds)
        self._cap = job.cap_seconds if job.cap_seconds > 0 else float("inf")
        self._serial = job.settings.get("arms") == "serial"
        self._donor: str | None = job.settings.get("cache_from")
        self._own_prompts = bool(job.settings.get("own_prompts"))
        self._states: dict[int, tuple[str, int, int, CanonicalState]] = {}
        self._place = {point.key: place for place, point in enumerate(job.points)}
        self._guarded: dict[str, Mapping[str, dict[str, Any]]] = {}
        self._joules: float | None = None

    def run(self) -> bool:
        """Measure everything that is not finished.

        Returns:
            Whether all that ran went well (skipped windows included).

        Raises:
            DeviceLost: the rest needs a new process.
        """
        # What is alive now stays alive: leaving it out makes the collection before each block short.
        gc.collect()
        gc.freeze()
        try:
            for group in groups(self.job):
                self._guard(group)
                self._group(group)
                self._forget(self.live)
            self._launches()
        finally:
            gc.unfreeze()
        return not self.ledger.failed

    def _group(self, group: Group) -> None:
        if group.straight:
            self._straight(group)
        elif self._serial:
            for live in self.live:
                self._walk_all(group, [live])
                self._forget([live])
        else:
            self._walk_all(group, self.live)

    def left(self) -> float:
        """Share of the forecast work that is still to be done, from 1 to 0."""
        weights = {point.key: point.forecast_seconds or 1.0 for point in self.job.points}
        names = [live.name for live in self.live]
        left = 0.0
        for point in self.job.points:
            every = len(names) * point.blocks * (2 if point.straight or point.phase == "decode" else 1)
            left += weights[point.key] * len(self.ledger.pending(point, names)) / max(every, 1)
        return left / (sum(weights.values()) or 1.0)

    # -- straight frontiers ------------------------------------------------------------------------

    def _straight(self, group: Group) -> None:
        frontier = group.frontiers[0]
        prefill, decode = group.prefill.get(frontier), group.decode.get(frontier)
        if prefill:
            self._prefill_point(prefill)
        if decode and self._serial:
            for live in self.live:
                self._decode_point(decode, [live], prefill)
                self._forget([live])
        elif decode:
            self._decode_point(decode, self.live, prefill)

    def _prefill_point(self, point: Point) -> None:
        if not self._pending(point, self.live):
            return
        context = self._enter(point)
        for live in self._open(point, self.live):
            warm = self.tools.prompts.take(point.frontier, self._trial(self._place[point.key], -1, 0))
            self._warm_up(context, live, lambda live=live, warm=warm: self._fresh_prefill(live, warm))
            if self._serial:
                self._forget([live])

        def window(cell: Cell, live: Live) -> None:
            self._attempt_window(context, cell, live, lambda: self._straight_prefill(context, cell, live))
            if self._serial:
                self._forget([live])

        self._blocks(context, self.live, window)
        self._leave(context)

    def _fresh_prefill(self, live: Live, tokens: Sequence[int]) -> Window[Prefilled]:
        live.ready = None
        live.subject.reset()
        return self._timed(lambda: live.subject.prefill(tokens))

    def _straight_prefill(self, context: Context, cell: Cell, live: Live) -> SampleRow:
        point = context.point
        trial = self._trial(self._place[point.key], cell.block, cell.turn)
        tokens = self.tools.prompts.take(point.frontier, trial)
        window = self._fresh_prefill(live, tokens)
        done = window.value
        live.ready = Ready(point.frontier, trial, done.next_token)
        row = self._row(context, cell, live, "ok")
        row.elapsed_ns = window.elapsed_ns
        row.extra |= self._energy()
        return self._prefilled(row, done, done.chunks, done.cached_tokens, tokens, trial)

    def _prefilled(
        self, row: SampleRow, done: Prefilled, chunks: list[int], cached: int, tokens: Sequence[int], trial: int
    ) -> SampleRow:
        """Fill in what a prefill did; a reason where its time must not stand for this prompt."""
        row.work_tokens, row.chunks = len(tokens), chunks
        row.tokens_hash = digest([done.next_token]) if done.next_token >= 0 else None
        row.extra |= {"trial": trial, "prompt_hash": digest(tokens), "cached_tokens": cached} | done.extra
        if cached:
            row.reason = f"{cached} prompt tokens came from a cache; a prefill must compute all of them"
        elif sum(chunks) != len(tokens):
            row.reason = f"the chunks hold {sum(chunks)} tokens, the prompt {len(tokens)}"
        return row

    # -- walks -------------------------------------------------------------------------------------

    def _walk_all(self, group: Group, arms: Sequence[Live]) -> None:
        rounds = max((point.blocks for point in group.prefill.values()), default=1)
        for number in range(rounds):
            visits = [frontier for frontier in group.frontiers if self._visits(group, frontier, number, arms)]
            if visits:
                self._walk(group, number, visits, arms)

    def _visits(self, group: Group, frontier: int, number: int, arms: Sequence[Live]) -> bool:
        """Whether walk `number` has to stop at `frontier`: for a prefill window, or to decode (the first walk)."""
        prefill, decode = group.prefill.get(frontier), group.decode.get(frontier)
        wanted = prefill is not None and any(cell.block == number for cell in self._pending(prefill, arms))
        return wanted or (number == 0 and decode is not None and bool(self._pending(decode, arms)))

    def _walk(self, group: Group, number: int, visits: list[int], arms: Sequence[Live]) -> None:
        """Take every arm along one long prompt, side by side, and decode at each frontier on the way."""
        trial = self._trial(len(self.job.points), number, 0)
        tokens = self.tools.prompts.take(visits[-1], trial)
        walking = [live for live in arms if self._donor in (None, live.name)]
        walks = {live.name: Walk(live.subject, tokens, live.chunk) for live in walking}
        state = WalkRound(number, trial, tokens, walks)
        self._warm_walks(state, group.prefill.get(visits[0]) or group.decode[visits[0]], walking)
        if number == 0 and self.session == 0:
            state.straight = self._straight_once(visits, tokens, walking)
        for frontier in visits:
            prefill, decode = group.prefill.get(frontier), group.decode.get(frontier)
            point = prefill or decode
            assert point is not None
            self._walk_to(point, point is prefill, state, arms)
            if number == 0 and decode is not None:
                self._keep_state(prefill, frontier, arms)
                self._decode_point(decode, arms, prefill)

    def _walk_to(self, point: Point, is_prefill: bool, state: WalkRound, arms: Sequence[Live]) -> None:
        """Bring every walk to the point's frontier; a row for each arm whose prefill is asked for here."""
        by_name = {live.name: live for live in arms}
        cells = {cell.arm: cell for cell in reversed(block_cells(self.job, self.session, point, state.number))}
        if not self._has_time(self._walk_seconds(point.frontier, state)):
            for live in self._open(point, arms):
                self._note(point, live, self._over_budget(), retry=True)
            state.walks.clear()
            return
        context = self._enter(point)
        self._sentinel(context)
        gc.collect()
        for cell in sorted(cells.values(), key=lambda cell: cell.slot):
            live = by_name.get(cell.arm)
            if live is None or live.name not in state.walks or self.ledger.shut(point, live.name):
                state.walks.pop(cell.arm, None)
                continue
            walk = state.walks[live.name]
            write = is_prefill and state.number < point.blocks and not self.ledger.is_finished(cell)

            def work(live: Live = live, walk: Walk = walk, cell: Cell = cell) -> SampleRow:
                return self._walked(context, cell, live, walk, state)

            if not self._attempt_window(context, cell, live, work, write=write, spent_ns=walk.spent_ns, again=False):
                state.walks.pop(live.name)
        self._leave(context)

    def _walked(self, context: Context, cell: Cell, live: Live, walk: Walk, state: WalkRound) -> SampleRow:
        frontier = context.point.frontier
        live.ready = None
        reached = walk.to(frontier, self._timed)
        live.ready = Ready(frontier, state.trial, reached.tail.next_token)
        row = self._row(context, cell, live, "ok")
        row.elapsed_ns = reached.elapsed_ns
        row.extra["walk"] = True
        straight = state.straight
        if straight and (straight["frontier"], straight["arm"]) == (frontier, live.name):
            ratio = reached.elapsed_ns / straight["elapsed_ns"]
            passed = abs(ratio - 1) <= WALK_TOLERANCE
            row.extra["walk_check"] = straight | {"ratio": ratio, "passed": passed}
            row.flags += [] if passed else ["walk_differs"]
        tokens = state.tokens[:frontier]
        return self._prefilled(row, reached.tail, reached.chunks, reached.cached_tokens, tokens, state.trial)

    def _straight_once(self, visits: Sequence[int], tokens: list[int], arms: Sequence[Live]) -> dict[str, Any] | None:
        """Time of one straight prompt, to hold the walk against, at the frontier where the plan asks for it."""
        frontier = self.job.settings.get("walk_check")
        arms = [live for live in arms if live.name not in self._skipped_prefill(frontier)]
        if frontier not in visits or not arms:
            return None
        try:
            with time_limit(self._cap):
                elapsed = self._fresh_prefill(arms[0], tokens[:frontier]).elapsed_ns
        except Exception:  # the walk itself meets the same fault and writes it down
            return None
        return {"frontier": frontier, "elapsed_ns": elapsed, "arm": arms[0].name}

    def _skipped_prefill(self, frontier: int | None) -> set[str]:
        points = [p for p in self.job.points if p.phase == "prefill" and p.frontier == frontier]
        return {live.name for p in points for live in self.live if self.ledger.shut(p, live.name)}

    def _warm_walks(self, state: WalkRound, point: Point, arms: Sequence[Live]) -> None:
        """Two chunks for each arm that no straight frontier has warmed in this process."""
        context = Context(point)
        for live in arms:
            if not live.warmed and self.ledger.shut(point, live.name) is None:
                tokens = state.tokens[: 2 * live.chunk]
                self._warm_up(context, live, lambda live=live, tokens=tokens: self._fresh_prefill(live, tokens))

    def _walk_seconds(self, frontier: int, state: WalkRound) -> float:
        """Seconds to bring all walks to `frontier`, from what they took so far (0 where nothing is known)."""
        walks = [walk for walk in state.walks.values() if walk.position]
        return sum(walk.spent_ns / 1e9 / walk.position * (frontier - walk.position) for walk in walks)

    # -- decode ------------------------------------------------------------------------------------

    def _decode_point(self, point: Point, arms: Sequence[Live], prefill: Point | None) -> None:
        if not self._pending(point, arms):
            return
        context = self._enter(point)
        arms = self._filled(context, self._open(point, arms), prefill)
        if not arms:
            return
        # All arms are fed the same first token, so that they do the same work from the same text.
        first = next(live.ready.next_token for live in arms if live.ready)
        for live in arms:
            count = min(point.decode_tokens, WARM_DECODE_TOKENS)
            self._warm_up(context, live, lambda live=live, count=count: self._decode(live, first, count))
            if self.ledger.shut(point, live.name) is None and not self.ledger.has_series(point, live.name):
                self._series(context, live, first)

        def begin(block: int) -> None:
            nonlocal first
            if self._own_prompts:
                trial = self._trial(self._place[point.key], block, 0)
                filled = self._filled(context, self._open(point, arms), prefill, trial)
                first = next((live.ready.next_token for live in filled if live.ready), first)

        def window(cell: Cell, live: Live) -> None:
            self._attempt_window(context, cell, live, lambda: self._decoded(context, cell, live, first))

        self._blocks(context, arms, window, begin)
        self._leave(context)

    def _decode(self, live: Live, first: int, count: int) -> Window[Decoded]:
        assert live.ready is not None
        live.subject.restore(live.ready.snapshot)
        return self._timed(lambda: live.subject.decode(first, count))

    def _decoded(self, context: Context, cell: Cell, live: Live, first: int) -> SampleRow:
        window = self._decode(live, first, context.point.decode_tokens)
        row = self._row(context, cell, live, "ok")
        row.elapsed_ns, row.work_tokens = window.elapsed_ns, len(window.value.tokens)
        row.tokens_hash = digest(window.value.tokens)
        row.extra |= window.value.extra | self._source(live) | self._energy()
        if self._own_prompts and live.ready:
            row.extra["trial"] = live.ready.trial
        if row.work_tokens != context.point.decode_tokens:
            row.reason = f"decoded {row.work_tokens} tokens, {context.point.decode_tokens} were asked for"
        return row

    def _series(self, context: Context, live: Live, first: int) -> None:
        """Times of single tokens, from a run of their own that no rate is taken from."""
        point, clock, ready = context.point, self.tools.clock, live.ready
        assert ready is not None
        cell = Cell(point.key, live.name, self.session, -1, -1, 0)
        try:
            live.subject.restore(ready.snapshot)
            start = clock.now_ns()
            with time_limit(self._cap):
                decoded = live.subject.decode(first, point.decode_tokens, clock=clock.now_ns)
        except Exception as error:
            self._fault(context, cell, live, error)
            return
        if decoded.stamps:
            row = self._row(context, cell, live, "ok")
            row.series = f"{point.key}-{live.arm.hash or live.name}-{live.name.replace('/', '_')}-{self.session}"
            row.tokens_hash = digest(decoded.tokens)
            row.flags.append("series")
            stamps = np.array([start, *decoded.stamps], dtype=np.int64)
            arrays = {"stamps_ns": stamps, "tokens": np.array(decoded.tokens, dtype=np.int64)}
            self.tools.store.put_series(row.series, arrays)
            self.ledger.append(row)

    def _filled(
        self, context: Context, arms: Sequence[Live], prefill: Point | None, trial: int | None = None
    ) -> list[Live]:
        """Those of `arms` that have a cache at the point's frontier, filled here if need be: by the arm's own prefill,
        or, where it cannot get there, from another arm's state. trial: of the prompt; None takes one that is there."""
        frontier = context.point.frontier
        if trial is None:
            trials = [live.ready.trial for live in arms if live.ready and live.ready.frontier == frontier]
            trial = max(trials, default=self._trial(self._place[context.point.key], 0, 0))
        barred = {live.name: self._barred(prefill, live) for live in arms}
        filled = set()
        for live in sorted(arms, key=lambda live: barred[live.name] is not None):
            try:
                with time_limit(self._cap):
                    self._fill(live, arms, frontier, trial, barred[live.name])
            except Exception as error:
                self._fault(context, self._next_cell(context.point, live), live, error)
                continue
            if live.ready is None:
                self._note(context.point, live, f"no cache to decode from: {barred[live.name]}")
            else:
                filled.add(live.name)
        return [live for live in arms if live.name in filled]

    def _fill(self, live: Live, arms: Sequence[Live], frontier: int, trial: int, barred: str | None) -> None:
        if live.ready is None or (live.ready.frontier, live.ready.trial) != (frontier, trial):
            if barred is None:
                live.ready = None
                live.subject.reset()
                done = live.subject.prefill(self.tools.prompts.take(frontier, trial))
                live.ready = Ready(frontier, trial, done.next_token)
            else:
                live.ready = self._taken_over(live, arms, frontier, trial)
        if live.ready is not None and live.ready.snapshot is None:
            live.ready.snapshot = live.subject.snapshot()

    def _barred(self, prefill: Point | None, live: Live) -> str | None:
        """Why this arm does not prefill here itself, or None; a drafter has to read the prompt."""
        if self._donor not in (None, live.name) and not drafts(live.arm):
            return f"{self._donor} was to fill it for every arm"
        return self.ledger.shut(prefill, live.name) if prefill else None

    def _taken_over(self, live: Live, arms: Sequence[Live], frontier: int, trial: int) -> Ready | None:
        """Fill `live` with the state of another arm at the same frontier of the same tokens."""
        for donor in arms:
            ready = donor.ready
            if donor is not live and ready and (ready.frontier, ready.trial) == (frontier, trial):
                if ready.snapshot is not None:
                    donor.subject.restore(ready.snapshot)
                live.subject.import_state(donor.subject.export_state())
                return Ready(frontier, trial, ready.next_token, cache_from=ready.cache_from or donor.name)
        if frontier in self._states:
            name, kept_trial, next_token, state = self._states[frontier]
            live.subject.import_state(state)
            return Ready(frontier, kept_trial, next_token, cache_from=name)
        return None

    def _launches(self) -> None:
        """Rows on what a decode step launches, once a job, after the last window: a profiler may slow what follows."""
        counter = self.tools.launches
        if counter is None or self.session:
            return
        for live in self.live:
            points = [
                point
                for point in self.job.points
                if point.phase == "decode"
                and self.ledger.shut(point, live.name) is None
                and not self.ledger.has_launches(point, live.name)
            ]
            if live.arm.aa or not points:
                continue
            frontiers = sorted({point.frontier for point in points})
            try:
                facts = counter(live.subject, frontiers, lambda count: self.tools.prompts.take(count, 0))
            except Exception as error:  # what was measured stands without it
                facts = dict.fromkeys(frontiers, {"launches_unpredicted": one_line(error)})
            for point in points:
                cell = Cell(point.key, live.name, self.session, -1, -1, 0)
                row = self._row(Context(point), cell, live, "ok")
                row.flags.append(LAUNCHES)
                row.extra |= facts[point.frontier]
                self.ledger.append(row)

    def _keep_state(self, prefill: Point | None, frontier: int, arms: Sequence[Live]) -> None:
        """With one arm at a time, keep a state where a later arm is known not to get there by itself."""
        if not self._serial or prefill is None or frontier in self._states:
            return
        if any(self._barred(prefill, live) for live in self.live):
            for live in arms:
                if live.ready and live.ready.frontier == frontier:
                    state = live.subject.export_state()
                    self._states[frontier] = (live.name, live.ready.trial, live.ready.next_token, state)

    def _source(self, live: Live) -> dict[str, str]:
        return {"cache_from": live.ready.cache_from} if live.ready and live.ready.cache_from else {}

    # -- blocks and windows ------------------------------------------------------------------------

    def _blocks(
        self,
        context: Context,
        arms: Sequence[Live],
        window: Callable[[Cell, Live], None],
        begin: Callable[[int], None] = lambda block: None,
    ) -> None:
        """Run the point's unfinished blocks; stops when the next one would overrun the budget.

        begin: called with a block's number before its windows.
        """
        point, by_name = context.point, {live.name: live for live in arms}
        took = 2 * sum(context.last_ns.values()) / 1e9
        for block in range(point.blocks):
            cells = block_cells(self.job, self.session, point, block)
            todo = [cell for cell in cells if cell.arm in by_name and not self.ledger.is_finished(cell)]
            if all(self.ledger.shut(point, cell.arm) for cell in todo):
                continue
            if not self._has_time(took):
                for live in self._open(point, arms):
                    reason = f"{self._over_budget()} ({block} of {point.blocks} blocks done)"
                    self._note(point, live, reason, retry=True)
                return
            start = self.tools.clock.now_ns()
            begin(block)
            self._sentinel(context)
            gc.collect()
            for cell in todo:
                if self.ledger.shut(point, cell.arm) is None:
                    window(cell, by_name[cell.arm])
            took = (self.tools.clock.now_ns() - start) / 1e9

    def _attempt_window(
        self,
        context: Context,
        cell: Cell,
        live: Live,
        work: Callable[[], SampleRow],
        write: bool = True,
        spent_ns: int = 0,
        again: bool = True,
    ) -> bool:
        """Run one window and write its row, whatever comes of it; False if it gave no time.

        write: False for a window that is in the rows already and runs only to get further.
        spent_ns: part of the cap that earlier stretches of the same prompt have used.
        again: whether a window voided by the clock can be run again from where it began.
        """
        for tried in range(1 + (VOID_RETRIES if again else 0)):
            try:
                row = self._run_window(cell, live, work, spent_ns)
                break
            except WindowVoid as error:
                if not again or tried == VOID_RETRIES:
                    self._fault(context, cell, live, error)
                    return False
            except Exception as error:
                self._fault(context, cell, live, error)
                return False
        reason = row.reason or refused(live.arm, row)
        if reason:
            row.status, row.reason = "error", reason
        if write or row.status != "ok":
            self._append(row)
        return row.status == "ok"

    def _run_window(self, cell: Cell, live: Live, work: Callable[[], SampleRow], spent_ns: int) -> SampleRow:
        self.tools.in_flight(cell)
        self.tools.device.reset_peak()
        live.subject.reset_executed()
        with time_limit(self._cap, spent_ns / 1e9):
            row = work()
        # An engine in a process of its own has an allocator of its own.
        memory = getattr(live.subject, "memory", self.tools.device.memory)
        row.peak_bytes, row.active_bytes = memory()
        row.footprint_bytes = psutil.Process().memory_info().rss
        row.executed = live.subject.executed()
        other = same_path(row.check, row.executed, row.frontier) if row.check else None
        if other:
            row.check = row.check | {"passed": False, "reason": other}
        self.tools.in_flight(None)
        return row

    def _fault(self, context: Context, cell: Cell, live: Live, error: Exception) -> None:
        """Turn what a subject raised into a row.

        Raises:
            DeviceLost: nothing more can run in this process.
        """
        live.ready = None
        status, reason = classify(error)
        self.tools.in_flight(None)
        if status == "skipped":
            self._note(context.point, live, reason)
            self.ledger.stop(context.point, live.name, reason)
            return
        if context.point.phase == "decode":
            self.ledger.stop(context.point, live.name, f"its cache was lost: {reason}")
        row = self._row(context, cell, live, status)
        row.reason = reason
        row.flags += ["clock_jump"] if isinstance(error, WindowVoid) else []
        if status == "error" and device_lost(error):
            row.flags.append(CRASH)
            row.extra["attempt"] = self._attempt
        self._append(row)
        if CRASH in row.flags:
            raise DeviceLost(reason) from error
        try:
            live.subject.reset()
        except Exception as second:
            raise DeviceLost(f"{reason}; then the reset failed: {one_line(second)}") from second

    def _append(self, row: SampleRow) -> None:
        self.ledger.append(row)
        self.tools.report(f"{row.phase} {row.frontier}: {row.arm} block {row.block + 1} {row.status}")

    # -- around windows ----------------------------------------------------------------------------

    def _enter(self, point: Point) -> Context:
        """The machine's condition before the first window of a point, for the flags of its rows."""
        before = self.tools.conditions()
        flags = condition_flags(before)
        self._keep_conditions(point, "before", before, flags)
        context = Context(point, flags, checks=self._guarded.get(point.key, {}), before=before)
        context.first = {live.name: {"conditions": before} for live in self.live}
        return context

    def _leave(self, context: Context) -> None:
        after = self.tools.conditions()
        self._keep_conditions(context.point, "after", after, condition_flags(after, context.before))

    def _keep_conditions(self, point: Point, when: str, record: dict[str, Any], flags: list[str]) -> None:
        where = {"session": self.session, "point": point.key, "phase": point.phase, "frontier": point.frontier}
        self.tools.store.put_conditions({**where, "when": when, "flags": flags, **record})

    def _guard(self, group: Group) -> None:
        """Quality guard for the points of a group, before any cache in it is worth keeping."""
        for point in (*group.prefill.values(), *group.decode.values()):
            if self._pending(point, self.live):
                self._guarded[point.key] = self._check(point)

    def _check(self, point: Point) -> Mapping[str, dict[str, Any]]:
        """Results by arm: those of an earlier session or process, else made now."""
        arms = [live.name for live in self.live]
        known = {arm: self.ledger.checks[point.key, arm] for arm in arms if (point.key, arm) in self.ledger.checks}
        if len(known) == len(arms) or self.tools.guard is None:
            return known
        try:
            return dict(self.tools.guard(point))
        except Exception as error:
            failed = {"name": "guard", "passed": False, "reason": f"the guard itself failed: {one_line(error)}"}
            return dict.fromkeys(arms, failed)
        finally:
            self._forget(self.live)

    def _sentinel(self, context: Context) -> None:
        reading = self.tools.sentinel.before_block(context.point.frontier)
        context.extra = {"sentinel_ns": reading.ns, "sentinel_wait_s": round(reading.waited, 3)}
        context.flags = [flag for flag in context.flags if flag != "sentinel_slow"]
        if reading.hot:
            context.flags.append("hot" if self.tools.sentinel.may_wait else "sentinel_slow")

    def _warm_up(self, context: Context, live: Live, once: Callable[[], Window[Any]]) -> None:
        """Run until two rounds agree; the times of the rounds go into the arm's first row of the point."""
        times: list[int] = []
        capped = True
        try:
            while capped and len(times) < WARM_ROUNDS and sum(times) / 1e9 <= self._warm_seconds:
                with time_limit(self._cap):
                    times.append(once().elapsed_ns)
                capped = len(times) < 2 or abs(times[-1] / times[-2] - 1) >= STATIONARY
        except WindowVoid:
            pass
        except Exception as error:
            self._fault(context, self._next_cell(context.point, live), live, error)
            return
        live.warmed = True
        context.last_ns[live.name] = times[-1] if times else 0
        context.warm_capped |= {live.name} if capped else set()
        facts = {"warmup": {"rounds": len(times), "elapsed_ns": times, "capped": capped}}
        context.first.setdefault(live.name, {}).update(facts)

    def _timed(self, work: Callable[[], Any], spent_ns: int = 0) -> Window[Any]:
        before = self.tools.energy.read()
        window = timed(self.tools.clock, work, self.tools.device.drain)
        self._joules = spent(before, self.tools.energy.read())
        seconds = (spent_ns + window.elapsed_ns) / 1e9
        if seconds > self._cap:
            raise WindowTimeout(f"took {seconds:.1f} s, the cap is {self._cap:g} s")
        return window

    def _energy(self) -> dict[str, Any]:
        """What the last window took, where the machine counts it; a walk is made of stretches: none there."""
        if self._joules is None:
            return {}
        return {"energy_j": self._joules, "energy_of": self.tools.energy.source}

    def _row(self, context: Context, cell: Cell, live: Live, status: Status) -> SampleRow:
        point, arm = context.point, live.arm
        marks = {
            "aa": arm.aa,
            "serial": self._serial,
            "warm_capped": live.name in context.warm_capped,
            "resumed": self.ledger.resumed and cell.block >= 0,
        }
        least_bytes, least_flops = self.tools.least(point)
        return sample_row(
            self.job,
            self.session,
            point,
            arm,
            status,
            block=cell.block,
            slot=cell.slot,
            flags=[*context.flags, *(name for name, on in marks.items() if on)],
            check=dict(context.checks.get(arm.name, {})),
            least_bytes=least_bytes,
            least_flops=least_flops,
            extra=context.extra | (context.first.pop(live.name, {}) if cell.block >= 0 else {}),
        )

    def _pending(self, point: Point, arms: Sequence[Live]) -> list[Cell]:
        """Unfinished windows of arms that can run; a row for each arm that cannot, with its reason."""
        return self.ledger.pending(point, [live.name for live in self._open(point, arms)])

    def _next_cell(self, point: Point, live: Live) -> Cell:
        """The window that a fault before it stands in for."""
        pending = self.ledger.pending(point, [live.name])
        return pending[0] if pending else Cell(point.key, live.name, self.session, -1, -1, 0)

    def _open(self, point: Point, arms: Iterable[Live]) -> list[Live]:
        open_arms = []
        for live in arms:
            reason = self.ledger.shut(point, live.name)
            if reason is None:
                open_arms.append(live)
            else:
                self._note(point, live, reason)
        return open_arms

    def _note(self, point: Point, live: Live, reason: str, retry: bool = False) -> None:
        """A skipped row for the whole point of an arm, once."""
        row = self._row(Context(point), Cell(point.key, live.name, self.session, -1, -1, 0), live, "skipped")
        self.ledger.note(row, "skipped", reason, retry)

    def _forget(self, arms: Sequence[Live]) -> None:
        for live in arms:
            live.ready = None
            live.subject.reset()

    def _has_time(self, seconds: float) -> bool:
        return (self.tools.clock.now_ns() - self._start) / 1e9 + seconds < self._budget

    def _over_budget(self) -> str:
        if self.job.settings.get("part_seconds"):
            return "the time of this part is used up; the same command goes on"
        share = "this session's share of " if self.job.sessions > 1 else ""
        return f"{share}the budget of {self.job.budget_seconds:g} s is used up"

    def _trial(self, place: int, block: int, turn: int) -> int:
        """A number of its own for every prompt of the job; arms in the same turn of a block share it."""
        return ((self.session * 1000 + place) * 1000 + block + 1) * 100 + turn


def warm_seconds(budget_seconds: float) -> float:
    """Seconds of warm-up of one arm at one point after which no further round begins, in a session of that budget."""
    return min(WARM_SECONDS, budget_seconds / 40)


def _chunk(arm: Arm, subject: Subject) -> int:
    told = subject.describe().get("chunk")
    return int(told or arm.config.get("prefill", {}).get("chunk", 2048))
