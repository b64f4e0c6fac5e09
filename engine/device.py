"""What the engine runs on: kind of device, its memory, and the activation type that suits it."""

from __future__ import annotations

import threading
from typing import Any, Literal

import mlx.core as mx

DeviceKind = Literal["metal", "cuda", "cpu"]


def device_kind() -> DeviceKind:
    """``"metal"``, ``"cuda"`` or ``"cpu"``: MLX's default device and the backend behind it."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def activation_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on a CPU, where MLX's packed product is ten times slower in bfloat16."""
    return mx.float32 if device_kind() == "cpu" else mx.bfloat16


_OWN = threading.local()


def second_stream() -> mx.Stream:
    """A stream of the default device beside its default one; one a thread, since a stream belongs to its thread."""
    device = mx.default_device()
    streams = vars(_OWN).setdefault("streams", {})
    if str(device) not in streams:
        streams[str(device)] = mx.new_stream(device)
    return streams[str(device)]


def device_info() -> dict[str, Any]:
    """Name, kind and memory figures (bytes) of the default device, as MLX tells them."""
    info = dict(mx.device_info(mx.default_device())) if hasattr(mx, "device_info") else {}
    # Rows are published: what tells one card from another of its kind stays out of them.
    for identity in ("uuid", "pci_bus_id"):
        info.pop(identity, None)
    info["kind"] = device_kind()
    info.setdefault("device_name", "cpu" if info["kind"] == "cpu" else "unknown")
    return info
