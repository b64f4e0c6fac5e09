"""The central abstraction: an op, declared once, and its variants.

An `Op` says what is computed (float32 reference), on which cases it is tested, how far a variant may be off,
and the least it must move and compute. A `Variant` is one way to compute it and knows where it can run. Tests,
the tuner, the doctor and the documentation all walk `OPS`; nothing is listed twice.

This module does not import MLX, so that anything may read the declarations' types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine.config import ModelConfig

Phase = Literal["decode", "prefill"]
Refuses = Callable[[str, str], str | None]
"""Of an op's name and a variant's: why it is not to be used on this machine, or None."""
DECODE_ROWS = 8
"""Most rows that count as decode: one step, or the verification of drafts."""


class VariantUnsupported(ValueError):
    """A variant that was asked for by name cannot run here; `reason` says why."""

    def __init__(self, op: str, variant: str, reason: str):
        super().__init__(f"{op}={variant} cannot run here: {reason}")
        self.op, self.variant, self.reason = op, variant, reason


@dataclass(frozen=True)
class Case:
    """One test case of an op: a short name and the numbers that shape its inputs."""

    name: str
    sizes: Mapping[str, int]

    def __getitem__(self, key: str) -> int:
        return self.sizes[key]


def always(case: Case | None, device: str) -> str | None:
    """`supports` of a variant that runs everywhere."""
    return None


def as_they_are(arguments: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """`settled` of a variant whose settings do not depend on its arguments."""
    return settings


def nothing(device: str) -> dict[str, Any]:
    """`defaults` of a variant that takes no settings, or decides on ``"best"`` itself."""
    return {}


def untimed(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """`timing` of an op whose variants are not chosen between."""
    return ()


@dataclass(frozen=True)
class Variant:
    """One way to compute an op.

    Attributes:
        run: called with the op's arguments; the same signature for every variant of an op.
        supports: reason why it cannot run for a case (None = any) on a device kind, or None if it can.
        tiles: values of its keyword ``tile``; empty if it has none.
        space: keywords of `run` that the tuner tries, where they are more than a tile: about 12 points at most.
        settings: names of the config's settings of its op that `run` takes as keywords.
        defaults: what a setting left at ``"best"`` is on a device kind.
        settled: from the arguments and the settings to what `run` is told; only shapes may matter.
        reads_pages: it takes keys and values as `engine.pages.Paged` too.
        reads_host: it reads an array back to the host, so it cannot run inside a compiled step.
        adds: it takes a keyword ``residual``, an array or None, and adds it to its result.
        unsteady: why tuning never takes it on a GPU, however fast it is: inputs on which 16 bits are too few for it.
    """

    name: str
    run: Callable[..., Any]
    summary: str
    supports: Callable[[Case | None, str], str | None] = always
    tiles: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    defaults: Callable[[str], dict[str, Any]] = nothing
    settled: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]] = as_they_are
    reads_pages: bool = False
    reads_host: bool = False
    adds: bool = False
    unsteady: str = ""
    space: tuple[Mapping[str, Any], ...] = ()

    @property
    def points(self) -> tuple[Mapping[str, Any], ...]:
        """Keywords to time it with: none at all (its own rule), then every point of its space."""
        return ({}, *(self.space or ({"tile": tile} for tile in self.tiles)))


@dataclass(frozen=True)
class Op:
    """What is computed, how it is tested, and what it must cost at least.

    Attributes:
        inputs: seeded arguments for a case and dtype (a tuple for `Variant.run`).
        order: variant names, best first, by (device kind, phase); used by ``best`` where nothing is tuned.
        tolerance: largest relative RMS error of a variant against the reference, by dtype name.
        least_bytes, least_flops: what a case must at least move and compute.
        decode_rows: most rows that take the decode order, where it is fewer than `DECODE_ROWS` on a device kind.
        timing: the cases to time for a model, at so many new rows of which the last sees so many positions.
        context: positions that a call sees, from its arguments, where its time depends on them.
        far: by (device kind, phase) a number of positions and the variant that comes first past it.
    """

    name: str
    summary: str
    variants: Mapping[str, Variant]
    cases: tuple[Case, ...]
    inputs: Callable[[Case, Any, int], tuple[Any, ...]]
    order: Mapping[tuple[str, Phase], tuple[str, ...]]
    tolerance: Mapping[str, float]
    least_bytes: Callable[[Case], int]
    least_flops: Callable[[Case], int]
    decode_rows: Mapping[str, int] = field(default_factory=dict)
    timing: Callable[[ModelConfig, int, int], tuple[Case, ...]] = untimed
    context: Callable[..., int] | None = None
    far: Mapping[tuple[str, Phase], tuple[int, str]] = field(default_factory=dict)

    @property
    def reference(self) -> Variant:
        """The float32 variant that decides what is right."""
        return self.variants["reference"]

    def choose(
        self, wanted: str, device: str, phase: Phase, paged: bool = False, refuses: Refuses | None = None
    ) -> Variant:
        """The variant for a config value.

        Args:
            wanted: a variant's name, or ``best``: first supported in the declared order of device and phase.
            paged: keys and values lie in pages; ``best`` is then the first variant declared that reads them.
            refuses: why a variant is not to be used on this machine; ``best`` passes it over.

        Raises:
            VariantUnsupported: an unknown name, or a named variant that cannot run on the device.
        """

        def reason_against(variant: Variant) -> str | None:
            reason = variant.supports(None, device)
            return refuses(self.name, variant.name) if reason is None and refuses is not None else reason

        readers = [variant.name for variant in self.variants.values() if variant.reads_pages]
        paged = paged and bool(readers)
        if wanted != "best":
            variant = self.variants.get(wanted)
            if variant is None:
                raise VariantUnsupported(self.name, wanted, f"no such variant; there are {', '.join(self.variants)}")
            reason = reason_against(variant)
            if reason is not None:
                raise VariantUnsupported(self.name, wanted, reason)
            if paged and not variant.reads_pages:
                reason = f"it reads keys and values in one piece, not in pages; take {' or '.join(readers)}"
                raise VariantUnsupported(self.name, wanted, reason)
            return variant
        for name in readers if paged else self.order[device, phase]:
            if reason_against(self.variants[name]) is None:
                return self.variants[name]
        raise VariantUnsupported(self.name, "best", f"no variant runs on {device}")


OPS: dict[str, Op] = {}
"""Every op by name, filled when `engine.ops` is imported."""


def declare(op: Op) -> Op:
    """Add an op to `OPS`; a name declared twice is a programming error."""
    if op.name in OPS:
        raise ValueError(f"op {op.name} is declared twice")
    OPS[op.name] = op
    return op


def same_order(names: tuple[str, ...], **special: tuple[str, ...]) -> dict[tuple[str, Phase], tuple[str, ...]]:
    """An `Op.order` that is `names` everywhere but for ``cpu_prefill=(…)``-style exceptions."""
    order: dict[tuple[str, Phase], tuple[str, ...]] = {}
    phases: tuple[Phase, ...] = ("decode", "prefill")
    for device in ("metal", "cuda", "cpu"):
        for phase in phases:
            order[device, phase] = special.get(f"{device}_{phase}", names)
    return order


@dataclass
class Recorder:
    """Counts which variant of which op ran: the proof that a toggle was real.

    Under `mx.compile` Python runs only while tracing, so a traced step's calls are kept once (`capture`) and
    added again for every run of that trace (`replay`).
    """

    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    _capture: dict[tuple[str, str, str], int] | None = None
    _chosen: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def record(self, op: str, variant: str, tile: str = "", chosen: str = "") -> None:
        """Count one call; `chosen` is ``"tuned"`` or ``"untuned"`` where ``best`` came to it, empty if it was named."""
        target = self.counts if self._capture is None else self._capture
        key = (op, variant, tile)
        target[key] = target.get(key, 0) + 1
        if chosen and self._chosen.get(key) != "untuned":
            self._chosen[key] = chosen

    def capture(self) -> dict[tuple[str, str, str], int]:
        """Send calls to a fresh tally, returned, until `release`."""
        self._capture = {}
        return self._capture

    def release(self) -> None:
        """Count calls directly again."""
        self._capture = None

    def replay(self, tally: Mapping[tuple[str, str, str], int]) -> None:
        """Count one run of a trace."""
        for key, calls in tally.items():
            self.counts[key] = self.counts.get(key, 0) + calls

    def executed(self) -> list[dict[str, Any]]:
        """``[{op, variant, tile, calls}]``, sorted; with ``chosen`` where ``best`` was asked for (see `record`)."""
        return [
            {"op": key[0], "variant": key[1], "tile": key[2], "calls": calls}
            | ({"chosen": self._chosen[key]} if key in self._chosen else {})
            for key, calls in sorted(self.counts.items())
        ]

    def reset(self) -> None:
        """Start counting anew."""
        self.counts = {}
