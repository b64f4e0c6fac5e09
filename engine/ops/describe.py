"""The registry as JSON on stdout, for readers that do not import MLX: `python -m engine.ops.describe`.

One object an op: name, summary, its variants with the kinds of device that they run on, which come first there,
and past how many positions another one does in prefill.
"""

from __future__ import annotations

import json
from typing import Any

from engine.ops.registry import OPS, Op, Phase, Variant

DEVICES = ("metal", "cuda", "cpu")
_PHASES: tuple[Phase, ...] = ("decode", "prefill")


def describe() -> list[dict[str, Any]]:
    """Every op of `OPS` as plain values, in the order of declaration."""
    return [
        {
            "name": op.name,
            "summary": op.summary,
            "variants": [_variant(variant) for variant in op.variants.values()],
            "first": {device: {phase: _first(op, device, phase) for phase in _PHASES} for device in DEVICES},
            "far": {device: op.far[device, "prefill"] for device in DEVICES if (device, "prefill") in op.far},
        }
        for op in OPS.values()
    ]


def _variant(variant: Variant) -> dict[str, Any]:
    return {
        "name": variant.name,
        "summary": variant.summary,
        "devices": [device for device in DEVICES if variant.supports(None, device) is None],
        "tiles": list(variant.tiles),
        "settings": list(variant.settings),
    }


def _first(op: Op, device: str, phase: Phase) -> str:
    """The variant that comes first in the declared order, among those that the device can run."""
    names = [name for name in op.order[device, phase] if op.variants[name].supports(None, device) is None]
    return names[0] if names else "none"


if __name__ == "__main__":
    import engine.ops  # noqa: F401  (fills the registry)

    print(json.dumps(describe()))
