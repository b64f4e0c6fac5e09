"""Energy from the machine's own counters, where it has them: measured or absent, never modelled.

NVIDIA: the board's counter of energy since the driver was loaded (NVML). Apple silicon: the counters of the chip's CPU,
GPU, memory and neural engine (zeus-apple-silicon). Both come with ``pip install '.[energy]'``; without the library, the
counter, or the right to read it there is no figure. A counter is read before and after a timed window, never inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sweeps import environment


@dataclass(frozen=True)
class Meter:
    """A counter of energy.

    read: joules since some moment, or None where the counter does not answer. source: whose energy it is.
    """

    read: Callable[[], float | None]
    source: str


NO_METER = Meter(lambda: None, "")
"""For machines that count no energy."""


def meter(device: str) -> Meter:
    """The counter for ``"cuda"`` or ``"metal"``, else `NO_METER`; a CPU's own counter is for the superuser alone."""
    try:
        if device == "cuda":
            return _nvidia()
        if device == "metal":
            return _apple()
    except Exception:  # no library, no driver, no such counter: the figure is absent, the run is none the worse
        pass
    return NO_METER


def _nvidia() -> Meter:
    import pynvml

    pynvml.nvmlInit()
    handle = _visible(pynvml)
    # Boards before Volta have no counter; they say so here.
    pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)

    def joules() -> float | None:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        except pynvml.NVMLError:
            return None

    return Meter(joules, "NVIDIA board (NVML)")


def _visible(pynvml: Any) -> Any:
    """The board that this process computes on: the first of those it may see."""
    first = environment.visible_gpu()
    if first.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    return pynvml.nvmlDeviceGetHandleByUUID(first)


_APPLE_PARTS = ("cpu_total_mj", "gpu_mj", "dram_mj", "ane_mj")


def _apple() -> Meter:
    from zeus_apple_silicon import AppleEnergyMonitor  # pyright: ignore[reportMissingImports]

    monitor = AppleEnergyMonitor()

    def joules() -> float | None:
        counted = monitor.get_cumulative_energy()
        parts = [getattr(counted, name, None) for name in _APPLE_PARTS]
        return sum(part for part in parts if part is not None) / 1e3 if parts[1] is not None else None

    if joules() is None:
        return NO_METER
    return Meter(joules, "Apple chip: CPU, GPU, memory, neural engine (Apple calls these counters estimates)")


def spent(before: float | None, after: float | None) -> float | None:
    """Joules between two readings; None where either is missing or the counter did not go forward."""
    return after - before if before is not None and after is not None and after > before else None
