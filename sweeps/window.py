"""What one timed window needs and what can become of it: arms of this process, faults, caps, proof that it ran."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sweeps.clock import Clock
from sweeps.energy import NO_METER, Meter
from sweeps.points import Arm, Point
from sweeps.prompts import Prompts
from sweeps.rows import SampleRow
from sweeps.schedule import Cell
from sweeps.sentinel import Sentinel
from sweeps.store import Store
from sweeps.subjects.base import Subject, SubjectOutOfMemory, SubjectUnsupported, is_out_of_memory

OPS = ("linear", "route", "experts", "decode_attention", "prefill_attention", "gated_delta", "head")
"""Ops whose variant an engine configuration names."""

# A GPU that its watchdog reset refuses this process for good; a new process may go on.
_DEVICE_LOST = ("command buffer", "device lost", "illegal memory access", "unspecified launch failure")


LaunchCounter = Callable[[Subject, Sequence[int], Callable[[int], Sequence[int]]], dict[int, dict[str, Any]]]
"""`sweeps.launches.of_subject`."""


class WindowTimeout(Exception):
    """A window ran past the job's cap."""


class DeviceLost(Exception):
    """The device refuses all further work of this process; its rows so far are kept."""


class Device(Protocol):
    """What a window needs of the device besides the subject. Sizes in bytes, None where unknown."""

    def drain(self) -> None:
        """Wait until nothing is left to do."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak."""
        ...

    def memory(self) -> tuple[int | None, int | None]:
        """(peak since reset, active now)."""
        ...


class NoDevice:
    """For subjects that use none."""

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def reset_peak(self) -> None:
        """There is none."""

    def memory(self) -> tuple[int | None, int | None]:
        """Unknown."""
        return None, None


class MlxDevice:
    """MLX's default device."""

    def __init__(self) -> None:
        import mlx.core as mx

        self._mx = mx

    def drain(self) -> None:
        """Wait for every stream."""
        self._mx.synchronize()

    def reset_peak(self) -> None:
        """Start a new peak of MLX's allocator."""
        self._mx.reset_peak_memory()

    def memory(self) -> tuple[int | None, int | None]:
        """Peak and active bytes of MLX's allocator, weights included."""
        return self._mx.get_peak_memory(), self._mx.get_active_memory()


@dataclass
class Ready:
    """A filled cache from which decode windows start: at `frontier`, by prompt `trial`, with its greedy next token.

    cache_from: the arm whose state was taken over, or None where this arm prefilled it.
    """

    frontier: int
    trial: int
    next_token: int
    snapshot: Any = None
    cache_from: str | None = None


@dataclass
class Live:
    """An arm in this process."""

    arm: Arm
    subject: Subject
    chunk: int
    ready: Ready | None = None
    warmed: bool = False

    @property
    def name(self) -> str:
        """Name of the arm."""
        return self.arm.name


@dataclass
class Tools:
    """Everything a session is given from outside, so that a test can put a stand-in in each place.

    Attributes:
        conditions: the machine's condition now. guard: the quality guard's results for a point, by arm name.
        least: (bytes, flops) that a window of a point must at least move and do.
        launches: what a decode step of a subject launches at each of some frontiers, given prompts by their length.
        report: called with a line of text after each window.
        in_flight: told the window about to run, and None after it.
        energy: the machine's counter of energy, if it has one.
    """

    store: Store
    prompts: Prompts
    clock: Clock
    sentinel: Sentinel
    device: Device
    conditions: Callable[[], dict[str, Any]] = dict
    guard: Callable[[Point], Mapping[str, dict[str, Any]]] | None = None
    least: Callable[[Point], tuple[int | None, int | None]] = lambda point: (None, None)
    launches: LaunchCounter | None = None
    report: Callable[[str], None] = lambda text: None
    in_flight: Callable[[Cell | None], None] = lambda cell: None
    energy: Meter = NO_METER


@contextmanager
def time_limit(seconds: float, spent: float = 0.0) -> Iterator[None]:
    """Raise `WindowTimeout` in the main thread once `seconds` have passed; a call into native code ends first.

    spent: seconds of them that are over already, by the stretches of a walk before this one.
    """
    if seconds == float("inf") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        earlier = f", {spent:.1f} s of them for the walk so far" if spent else ""
        raise WindowTimeout(f"still running after {seconds:g} s, the cap{earlier}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds - spent, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def classify(error: Exception) -> tuple[Literal["skipped", "oom", "timeout", "error"], str]:
    """Status and one-line reason of what a subject raised."""
    reason = one_line(error)
    if isinstance(error, SubjectUnsupported):
        return "skipped", reason
    if isinstance(error, SubjectOutOfMemory) or is_out_of_memory(error):
        return "oom", reason
    if isinstance(error, WindowTimeout):
        return "timeout", reason
    return "error", reason


def device_lost(error: Exception) -> bool:
    """Whether the error says that the device will take no more work from this process."""
    text = str(error).lower()
    return any(words in text for words in _DEVICE_LOST)


def one_line(error: BaseException) -> str:
    """The message on one line, with the kind of error unless it is one of ours."""
    text = " ".join(str(error).split())
    plain = isinstance(error, (ValueError, SubjectUnsupported, SubjectOutOfMemory, WindowTimeout))
    return (text if plain and text else f"{type(error).__name__}: {text}")[:400]


def refused(arm: Arm, row: SampleRow) -> str | None:
    """Why the row cannot stand for its arm: a named variant did not run, or nothing says what ran; None if it can.

    Calls without a tile (a variant that has none, few rows) say nothing about one, but a prefill of which no call has
    the tile that was named did not run with it.
    """
    if arm.subject != "engine":
        return None
    if not row.executed:
        return "the engine reports nothing executed, so nothing shows that this arm ran"
    for op, (variant, tile) in asked(arm.config).items():
        ran = [entry for entry in row.executed if entry["op"] == op]
        for name, wanted in (("variant", variant), ("tile", tile)):
            said = {str(e.get(name) or "") for e in ran}
            if name == "tile" and (row.phase != "prefill" or len(said) > 1):
                said -= {""}
            others = sorted(said - {wanted})
            if wanted != "best" and others:
                return f"{op} {name} {wanted} was asked for, {', '.join(others) or 'none'} ran"
    return None


def asked(config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Op to (variant, tile) as an arm's engine configuration names them; ``best`` leaves it to the engine."""
    wanted = {}
    for op in OPS:
        value = config.get(op, "best")
        fields = value if isinstance(value, Mapping) else {"variant": value}
        wanted[op] = str(fields.get("variant", "best")), str(fields.get("tile", "best"))
    return wanted
