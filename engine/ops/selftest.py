"""Does a variant compute what its op's reference computes, on this machine?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.ops.registry import Case, Op, Variant
from engine.ops.route import Routing


@dataclass(frozen=True)
class SelfTest:
    """Outcome for one variant: worst relative RMS error over its cases, and what failed (None = nothing)."""

    op: str
    variant: str
    cases: int
    worst: float
    error: str | None


def relative_rms(got: mx.array, want: mx.array) -> float:
    """``‖got - want‖ / ‖want‖`` in float32; NaN or a wrong shape gives infinity."""
    if got.shape != want.shape:
        return float("inf")
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    error = mx.sqrt(((got - want) ** 2).sum()) / mx.maximum(mx.sqrt((want**2).sum()), 1e-30)
    value = float(error.item())  # pyright: ignore[reportArgumentType]
    return value if value == value else float("inf")


def comparable(result: Any) -> list[mx.array]:
    """The arrays of an op's result in a form that does not depend on the order experts are listed in."""
    if isinstance(result, Routing):
        order = mx.argsort(result.ids, axis=-1)
        ids = mx.take_along_axis(result.ids, order, axis=-1)
        return [ids, mx.take_along_axis(result.weights, order, axis=-1)]
    if not isinstance(result, (tuple, list)):
        return [result]
    return [array for part in result for array in comparable(part)]


def case_error(op: Op, variant: Variant, case: Case, dtype: mx.Dtype, seed: int = 0, **settings: Any) -> float:
    """Worst relative RMS error of a variant over the outputs of one case.

    The reference sees the same inputs in the same type, and works in float32 from there.
    """
    arguments = op.inputs(case, dtype, seed)
    want = comparable(op.reference.run(*arguments))
    got = comparable(variant.run(*arguments, **settings))
    return max(relative_rms(g, w) for g, w in zip(got, want, strict=True))


def selftest(op: Op, variant: Variant, device: str, dtype: mx.Dtype, cases: Iterable[Case] | None = None) -> SelfTest:
    """Run a variant on its op's cases and compare with the reference; errors are reported, not raised."""
    name = str(dtype).rpartition(".")[2]
    worst, ran = 0.0, 0
    for case in op.cases if cases is None else cases:
        if variant.supports(case, device) is not None:
            continue
        try:
            error = case_error(op, variant, case, dtype)
        except Exception as raised:
            return SelfTest(op.name, variant.name, ran, worst, f"{case.name}: {raised}")
        ran, worst = ran + 1, max(worst, error)
        if error > op.tolerance[name]:
            text = f"{case.name}: relative RMS error {error:.2g} exceeds {op.tolerance[name]:.2g} in {name}"
            return SelfTest(op.name, variant.name, ran, worst, text)
    return SelfTest(op.name, variant.name, ran, worst, None)
