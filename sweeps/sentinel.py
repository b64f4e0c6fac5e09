"""A fixed kernel timed before each block: it tells heat and company from a change in the arms.

On an accelerator the run waits until the kernel is back near the session's best; on a CPU its time is only recorded,
because a shared CPU may never come back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from sweeps.clock import Clock, WindowVoid, timed

REPEATS = 5
WARM_READINGS = 10
LEAST_MARGIN = 0.03
WAIT_SECONDS = 120.0
LONG_WAIT_SECONDS = 600.0
LONG_FRONTIER = 65_536
FIRST_PAUSE_SECONDS, PAUSE_SECONDS = 0.25, 2.0
"""Waits grow from the first to the last: a short disturbance is not paid for with a long pause."""

SPIN_UP = 5
"""Untimed runs before each reading on an accelerator: an idle GPU clocks down, and a reading after the host was busy,
or after a pause, would show that and not heat. On an H200 such readings once cost a minute of waiting in four."""


@dataclass(frozen=True)
class Reading:
    """Sentinel before a block: time in ns, seconds waited for it, whether it was still slow when the run went on."""

    ns: int
    waited: float
    hot: bool


@dataclass
class Sentinel:
    """The kernel, and what this session has seen of it.

    Attributes:
        kernel: does the fixed work and waits for it. may_wait: whether to wait for a slow machine (accelerators).
        most_wait: seconds a block may be waited for at most, whatever the frontier; a run with little time sets it.
        best_ns, margin: the session's best median, and the share above it that still counts as cool.
        series: every reading in ns, in order.
    """

    kernel: Callable[[], None]
    clock: Clock
    may_wait: bool
    most_wait: float = LONG_WAIT_SECONDS
    best_ns: int = 0
    margin: float = LEAST_MARGIN
    series: list[int] = field(default_factory=list)

    def warm_up(self) -> None:
        """Learn the kernel's best time here and its spread: margin = max(3 %, 3 x standard deviation / median)."""
        for _ in range(3):
            self.kernel()
        readings = [self._read() for _ in range(WARM_READINGS)]
        self.best_ns = min(readings)
        self.margin = max(LEAST_MARGIN, 3 * statistics.stdev(readings) / statistics.median(readings))

    def before_block(self, frontier: int) -> Reading:
        """Time the kernel; on an accelerator wait until it is within the margin (120 s at most, 600 s from 64K)."""
        limit = min(LONG_WAIT_SECONDS if frontier >= LONG_FRONTIER else WAIT_SECONDS, self.most_wait)
        waited, pause = 0.0, FIRST_PAUSE_SECONDS
        ns = self._read()
        while self.may_wait and self._slow(ns) and waited < limit:
            pause = min(pause, limit - waited)
            self.clock.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, PAUSE_SECONDS)
            ns = self._read()
        self.best_ns = min(self.best_ns or ns, ns)
        return Reading(ns, waited, self._slow(ns))

    def _slow(self, ns: int) -> bool:
        return bool(self.best_ns) and ns > self.best_ns * (1 + self.margin)

    def _read(self) -> int:
        for _ in range(SPIN_UP if self.may_wait else 0):
            self.kernel()
        times = []
        while len(times) < REPEATS:
            try:
                times.append(timed(self.clock, self.kernel).elapsed_ns)
            except WindowVoid:
                continue
        ns = round(statistics.median(times))
        self.series.append(ns)
        return ns


def cpu_kernel() -> Callable[[], None]:
    """Exponentials in NumPy on one core, about half a millisecond.

    One core, because threads of a BLAS that wait for each other on a busy machine would take longer than the windows.
    """
    import numpy as np

    a = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    out = np.empty_like(a)

    def kernel() -> None:
        for _ in range(4):
            np.exp(a, out=out)

    return kernel


def device_kernel(kind: str) -> Callable[[], None]:
    """bf16 products on MLX's default device, some milliseconds on any chip, so that its clock rate shows.

    Args:
        kind: ``"metal"`` or ``"cuda"``; the work is fixed for each, so that sessions can be compared.
    """
    import mlx.core as mx

    size, count = (2048, 2) if kind == "metal" else (4096, 8)
    a = mx.random.normal((size, size), key=mx.random.key(0)).astype(mx.bfloat16)
    mx.eval(a)

    def kernel() -> None:
        b = a
        for _ in range(count):
            b = (a @ b) * 0.01
        mx.eval(b)
        mx.synchronize()

    return kernel
