"""The ops of the model; importing this package fills `OPS`."""

from __future__ import annotations

from engine.ops import attention, experts, gated_delta, head, linear, route
from engine.ops.bind import BoundOps, bind
from engine.ops.registry import OPS, Case, Op, Recorder, Variant, VariantUnsupported
from engine.ops.selftest import SelfTest, relative_rms, selftest

__all__ = [
    "OPS",
    "BoundOps",
    "Case",
    "Op",
    "Recorder",
    "SelfTest",
    "Variant",
    "VariantUnsupported",
    "attention",
    "bind",
    "experts",
    "gated_delta",
    "head",
    "linear",
    "relative_rms",
    "route",
    "selftest",
]
