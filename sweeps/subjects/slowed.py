"""A subject made slower by a known share, to see whether a run finds what was planted in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sweeps.clock import Clock
from sweeps.subjects.base import Decoded, Prefilled, Progress, Subject


class Slowed:
    """`subject` in everything, but after each prefill and each decode it waits for a share of the time that took.

    Args:
        slowdown: time charged for time spent, 1.05 for 5 % more.

    Raises:
        ValueError: `slowdown` below 1.
    """

    def __init__(self, subject: Subject, slowdown: float, clock: Clock):
        if slowdown < 1:
            raise ValueError(f"slowdown={slowdown} would make the subject faster: give 1 or more")
        self.subject, self.slowdown, self._clock = subject, slowdown, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject, name)

    def prefill(self, tokens: Sequence[int], *, last: bool = True, progress: Progress | None = None) -> Prefilled:
        """The subject's, then the wait."""
        return self._then_wait(lambda: self.subject.prefill(tokens, last=last, progress=progress))

    def decode(self, first: int, count: int, *, clock: Callable[[], int] | None = None) -> Decoded:
        """The subject's, then the wait, once for all tokens."""
        return self._then_wait(lambda: self.subject.decode(first, count, clock=clock))

    def _then_wait(self, work: Callable[[], Any]) -> Any:
        start = self._clock.now_ns()
        done = work()
        self._clock.sleep((self._clock.now_ns() - start) / 1e9 * (self.slowdown - 1))
        return done
