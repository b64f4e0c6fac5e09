"""The one clock: every window of every subject is timed here, in the same way.

A window is: drain the device, read the clock, do the work (which evaluates), drain, read the clock. Garbage collection
is off inside. The monotonic clock gives the time; the wall clock is read beside it only to notice that the machine
slept or was paused, which voids the window.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

JUMP_NS = 250_000_000
"""Disagreement of wall and monotonic time, in ns, from which a window counts as interrupted (NTP corrects less)."""

JUMP_SHARE = 0.01
"""The same as a share of the window, for long windows in which a clock is slewed."""


class WindowVoid(Exception):
    """A window whose time means nothing (the clock jumped or did not advance); run it again."""


class Clock(Protocol):
    """What a run needs of time. Readings are integers in nanoseconds."""

    def now_ns(self) -> int:
        """Monotonic time."""
        ...

    def wall_ns(self) -> int:
        """Wall time, which goes on while the machine sleeps."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_ns(self) -> int:
        """`time.perf_counter_ns`."""
        return time.perf_counter_ns()

    def wall_ns(self) -> int:
        """`time.time_ns`."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """`time.sleep`."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told: exact arithmetic without waiting."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now = start_ns
        self._wall = start_ns

    def now_ns(self) -> int:
        """Time advanced so far."""
        return self._now

    def wall_ns(self) -> int:
        """Time advanced so far plus any jumps."""
        return self._wall

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds`."""
        self.advance(round(seconds * 1e9))

    def advance(self, ns: int) -> None:
        """Advance both clocks by `ns`."""
        self._now += ns
        self._wall += ns

    def jump(self, ns: int) -> None:
        """Move the wall clock alone, as a suspended machine does."""
        self._wall += ns


@dataclass(frozen=True)
class Window(Generic[T]):
    """What the work returned and the drained time it took, in ns (always positive)."""

    value: T
    elapsed_ns: int


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage collection off inside, and back to what it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def timed(clock: Clock, work: Callable[[], T], drain: Callable[[], None] = lambda: None) -> Window[T]:
    """Time one window of `work`; `drain` waits until the device has nothing left to do.

    Raises:
        WindowVoid: the clock went backwards or stood still, or the machine was suspended meanwhile.
    """
    with no_collection():
        drain()
        wall = clock.wall_ns()
        start = clock.now_ns()
        value = work()
        drain()
        end = clock.now_ns()
        wall = clock.wall_ns() - wall
    elapsed = end - start
    if elapsed <= 0:
        raise WindowVoid(f"the clock moved by {elapsed} ns over the window")
    drift = abs(wall - elapsed)
    if drift > max(JUMP_NS, JUMP_SHARE * elapsed):
        raise WindowVoid(f"wall and monotonic clock differ by {drift / 1e9:.2f} s over the window: machine suspended?")
    return Window(value, elapsed)


def rate(stamps_ns: Sequence[int]) -> tuple[float | None, str | None]:
    """Tokens a second from the times at which N tokens were handed over: N - 1 gaps over the time between ends.

    Returns:
        (rate, None), or (None, why there is none).
    """
    if len(stamps_ns) < 2:
        return None, f"{len(stamps_ns)} token has no gap to time" if stamps_ns else "no token was produced"
    span = stamps_ns[-1] - stamps_ns[0]
    if span <= 0 or any(later < earlier for earlier, later in zip(stamps_ns, stamps_ns[1:], strict=False)):
        return None, "the clock did not advance over the tokens"
    return (len(stamps_ns) - 1) / (span / 1e9), None
