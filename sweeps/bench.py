"""Several pieces of work that do the same, timed against each other: interleaved, repeated, in drained windows.

First every contender is timed once; those far behind are left at that. The others run in rounds, each round in a fresh
order drawn from the seed. The few fastest, and the one that stands in place now, then run in rounds of their own, and
only those figures decide: the fastest of many noisy figures would flatter itself.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sweeps.clock import Clock, WindowVoid, timed

Work = Callable[[int], object]
"""Does the work so many times over and waits for it."""

ROUNDS, FINAL_ROUNDS = 3, 7
LEAST_ROUNDS = 3
"""Final rounds that are run however little time is left; of the others one."""
FINALISTS = 3
FAR_BEHIND = 3.0
"""From so many times the fastest on, one timing is enough."""
MARGIN = 0.02
"""What a gain must exceed, noise or none."""
VOIDS = 3
"""Windows that the clock may void before a contender counts as failed."""


@dataclass(frozen=True)
class Timing:
    """Times of one contender, in ns for doing the work once.

    first: the single timing. rounds, finals: of the rounds and of the final ones, empty if it took no part.
    """

    first: float
    rounds: tuple[float, ...] = ()
    finals: tuple[float, ...] = ()

    @property
    def deciding(self) -> tuple[float, ...]:
        """The latest figures there are."""
        return self.finals or self.rounds or (self.first,)

    @property
    def median(self) -> float:
        """Of the latest figures."""
        return statistics.median(self.deciding)

    @property
    def spread(self) -> float:
        """Distance of the quartiles of the latest figures over their median; 0 for a single one."""
        if len(self.deciding) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.deciding, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass
class Bench:
    """How contenders are timed.

    Attributes:
        drain: waits until the device has nothing left to do. window_ns: least length of a window, in ns.
        seconds: time for all rounds of one comparison. most_passes: times the work is done in a window at most.
    """

    clock: Clock
    drain: Callable[[], None]
    window_ns: int
    seconds: float
    seed: int = 0
    most_passes: int = 256
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def compare(
        self,
        works: Mapping[str, Work],
        base: str | None,
        *,
        passes: int | None = None,
        everyone: bool = False,
        failed: Callable[[str, Exception], None],
    ) -> dict[str, Timing]:
        """Time contenders by name; one that raises is handed to `failed`, and the rest go on.

        Args:
            base: the one that stands in place now: always among the finalists, unless it is far behind.
            passes: times the work is done in a window; None fills `window_ns` with the fastest.
            everyone: all of them are finalists.
        """
        first: dict[str, float] = {}
        for name, work in works.items():
            try:
                work(1)
                first[name] = self._once(work, 1)
            except Exception as error:
                failed(name, error)
        if not first:
            return {}
        fastest = min(first.values())
        near = [name for name in first if everyone or first[name] <= FAR_BEHIND * fastest]
        count = passes or max(1, min(self.most_passes, round(self.window_ns / fastest)))
        start = self.clock.now_ns()
        rounds: dict[str, list[float]] = {}
        ahead = near
        if not everyone and len(near) > FINALISTS:
            rounds = self._rounds(works, near, count, ROUNDS, 1, start + round(4e8 * self.seconds), failed)
            ahead = sorted(rounds, key=lambda name: statistics.median(rounds[name]))[:FINALISTS]
            ahead += [base] if base in rounds and base not in ahead else []
        finals = self._rounds(
            works, ahead, count, FINAL_ROUNDS, LEAST_ROUNDS, start + round(1e9 * self.seconds), failed
        )
        lost = {*near} - {*(rounds or near)} | {*ahead} - {*finals}
        return {
            name: Timing(first[name], tuple(rounds.get(name, ())), tuple(finals.get(name, ())))
            for name in first
            if name not in lost
        }

    def _rounds(
        self,
        works: Mapping[str, Work],
        names: Sequence[str],
        passes: int,
        count: int,
        least: int,
        end_ns: int,
        failed: Callable[[str, Exception], None],
    ) -> dict[str, list[float]]:
        """Times by name, without those that failed; after `end_ns` no round is begun once there are `least`."""
        made: dict[str, list[float]] = {name: [] for name in names}
        for done in range(count):
            if done >= least and self.clock.now_ns() > end_ns:
                break
            for name in self._random.sample(list(made), len(made)):
                try:
                    made[name].append(self._once(works[name], passes))
                except Exception as error:
                    del made[name]
                    failed(name, error)
        return made

    def _once(self, work: Work, passes: int) -> float:
        for left in reversed(range(VOIDS)):
            try:
                return timed(self.clock, lambda: work(passes), self.drain).elapsed_ns / passes
            except WindowVoid:
                if not left:
                    raise
        raise AssertionError


def winner(timings: Mapping[str, Timing], base: str | None, order: Sequence[str]) -> str:
    """The contender to take: `base`, unless another is faster beyond the noise; of several such, the first in `order`
    among those that the fastest does not beat beyond the noise.

    Args:
        timings: not empty. base: may be missing from them. order: every name, the preferred first.
    """

    def beats(one: str, other: str) -> bool:
        noise = max(MARGIN, timings[one].spread, timings[other].spread)
        return timings[other].median / timings[one].median - 1 > noise

    better = [name for name in timings if base not in timings or (name != base and beats(name, str(base)))]
    if not better:
        return str(base)
    fastest = min(better, key=lambda name: timings[name].median)
    return min((name for name in better if not beats(fastest, name)), key=list(order).index)
