"""What the rows say about machine, model and versions, under whichever of its usual names a fact was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sweeps.rows import RunRow

REAL_MODEL_COMMAND = "python -m sweeps model=qwen3.6-35b sweep=ten"
"""The run that people come for; every report on a toy model ends with it."""

NOT_RECORDED = "not recorded"


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is no finite number (null, NaN, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted names; lists of plain values stay as they are."""
    if not isinstance(values, dict):
        return {prefix: values} if prefix else {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def lookup(values: dict[str, Any], names: Iterable[str]) -> Any:
    """The first of `names` that is recorded, at the top or as the last part of a dotted name; else None."""
    flat = flatten(values)
    for name in names:
        for key, value in flat.items():
            if value not in (None, "") and (key == name or key.endswith("." + name)):
                return value
    return None


def chip_name(run: RunRow) -> str:
    """The device that did the work, as the reader knows it."""
    gpu_first = ("gpu", "device_name", "chip") if device_kind(run) == "cuda" else ("chip", "device_name", "gpu")
    return str(lookup(run.machine, (*gpu_first, "cpu", "device")) or NOT_RECORDED)


def device_kind(run: RunRow) -> str:
    """``metal``, ``cuda``, ``cpu`` or empty where the rows do not say."""
    for name in ("device_kind", "kind", "device", "backend", "device_name", "chip"):
        text = str(lookup(run.machine, (name,)) or "").lower()
        if "cuda" in text or "nvidia" in text:
            return "cuda"
        if "metal" in text or "apple" in text:
            return "metal"
        if text == "cpu" or text.startswith(("cpu", "device(cpu")):
            return "cpu"
    return ""


def bandwidth(run: RunRow) -> float | None:
    """Memory bandwidth of the device in bytes a second, or None where it was neither measured nor looked up."""
    scales = {"bandwidth_bytes_per_second": 1.0, "memory_bandwidth": 1.0, "bandwidth": 1.0, "bandwidth_gbs": 1e9}
    for name, scale in scales.items():
        value = finite(lookup(run.machine, (name,)))
        if value and value > 0:
            return value * scale
    return None


def peak_flops(run: RunRow) -> float | None:
    """Arithmetic that the device reached on one large product, in operations a second, or None if not measured."""
    value = finite(lookup(run.machine, ("flops_per_second",)))
    return value if value and value > 0 else None


def read_bandwidth(run: RunRow) -> float | None:
    """Bytes a second that the device reads, or copies if that is more; None where neither was measured."""
    read = finite(lookup(run.machine, ("read_bytes_per_second",)))
    return max(filter(None, (read, bandwidth(run))), default=None)


def launch_seconds(run: RunRow) -> float | None:
    """Seconds of a launch among dependent ones that do next to nothing, or None where it was not measured."""
    value = finite(lookup(run.machine, ("launch_seconds",)))
    return value if value and value > 0 else None


def model_name(run: RunRow) -> str:
    """The model as it was asked for."""
    return str(lookup(run.model, ("name", "alias", "id", "repo", "path")) or NOT_RECORDED)


def _says(run: RunRow, words: tuple[str, ...]) -> bool:
    """Whether one of `words` is a fact of the model that is true, or the kind that it is."""
    return any(run.model.get(word) for word in words) or str(run.model.get("kind", "")).lower() in words


def is_synthetic(run: RunRow) -> bool:
    """Whether the weights are random: logits mean nothing, and the quality guard ran layer by layer."""
    return _says(run, ("synthetic", "random"))


def busiest(run: RunRow) -> str:
    """What the busiest expert of a layer got, in multiples of an even share; empty where it was not counted."""
    told = run.model.get("busiest_expert")
    if not isinstance(told, dict):
        return ""
    shares = [s for name in ("mean", "least", "most") if (s := finite(told.get(name))) is not None]
    return "{:.1f} times its share ({:.1f} to {:.1f} by layer)".format(*shares) if len(shares) == 3 else ""


def is_toy(run: RunRow) -> bool:
    """Whether the model is the small embedded one, whose speed says nothing about the real model."""
    return _says(run, ("toy", "tiny", "embedded")) or model_name(run).lower() in ("tiny", "toy", "embedded")


def version(run: RunRow, package: str) -> str:
    """Version of `package` (``mlx``, ``mlx_lm``, ``python``…) in the process that measured."""
    names = (package, package.replace("_", "-"), f"{package}_version", f"{package.replace('_', '-')}_version")
    return str(lookup(run.machine, names) or NOT_RECORDED)


def prompt_kind(run: RunRow) -> str:
    """The kind of prompts of a process, as ``prompt=`` names it."""
    return str(run.prompt.get("kind") or NOT_RECORDED)


def arms(run: RunRow) -> dict[str, dict[str, Any]]:
    """What the arms of a process said of themselves, by name."""
    told = run.model.get("arms")
    return {str(k): v for k, v in told.items() if isinstance(v, dict)} if isinstance(told, dict) else {}


def signature(run: RunRow) -> tuple[str, ...]:
    """What two runs must share before their windows may stand in one series."""
    return (chip_name(run), device_kind(run), model_name(run), version(run, "mlx"), version(run, "mlx_lm"))
