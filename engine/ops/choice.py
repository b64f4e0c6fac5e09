"""What was measured fastest, in the form that binding reads: see `engine.tuned` for the files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.ops.registry import Phase


@dataclass(frozen=True)
class Choice:
    """What an op runs near one measured point.

    Attributes:
        phase, rows: of the point; context: positions seen, or None where an op's time does not depend on them.
        variant, settings: what is run, and the keywords it is run with.
        measured: by variant its best settings and their time: ``{"settings": …, "us": …}``.
    """

    phase: Phase
    rows: int
    context: int | None
    variant: str
    settings: Mapping[str, Any]
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def settings_of(self, variant: str) -> Mapping[str, Any] | None:
        """The best settings of a variant; None if it was not measured."""
        return self.settings if variant == self.variant else self.measured.get(variant, {}).get("settings")


@dataclass(frozen=True)
class Tuned:
    """What the files say to one model on this chip; the empty one says nothing.

    Attributes:
        choices: by op. fusion, trace: of a step, or None. costs: of passes of several rows, or None (see
            `engine.depth.Costs`). notes: what was passed over and why, one line each. files: what was used.
        folded: settings of the kernels of a wholly fused step, by the names of `engine.folded.TILES`.
    """

    choices: Mapping[str, tuple[Choice, ...]] = field(default_factory=dict)
    fusion: str | None = None
    trace: str | None = None
    costs: Mapping[str, Any] | None = None
    folded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


def nearest(choices: Sequence[Choice], phase: Phase, rows: int, context: int | None) -> Choice | None:
    """The choice whose point lies nearest in rows, then in context, both by ratio; None if there is none."""

    def distance(choice: Choice) -> tuple[float, float]:
        far = 0.0 if context is None or choice.context is None else abs(math.log(context / choice.context))
        return abs(math.log(rows / choice.rows)), far

    return min((c for c in choices if c.phase == phase), key=distance, default=None)
