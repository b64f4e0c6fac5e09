"""Minutes and memory of a plan before it runs: from the geometry alone, or from a short probe once weights are there.

Nothing here touches a device or a file. Times are forecasts, never results: they decide what fits a budget and
what the dry run prints. Memory counts the weights once, the caches of every live arm, and the transient arrays of
one prefill chunk; a frontier that does not fit is skipped by the plan with the reason given here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine import memory as memory_of
from engine.config import ModelConfig
from engine.memory import weight_bytes
from sweeps.least import prefill_flops, token_bytes

GB = 1_000_000_000
GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """What a forecast needs to know of a machine.

    Attributes:
        name: chip, as people call it. kind: ``"metal"``, ``"cuda"`` or ``"cpu"``.
        memory_bytes: unified, GPU or system memory. working_set_bytes: what MLX may hold without paging.
        bandwidth: bytes a second that decode reaches on weights. flops: operations a second that prefill reaches.
        launch_seconds: fixed cost of one decode step of the whole engine.
        slow_scan: whether MLX-LM's Gated DeltaNet runs a token at a time.
        steps: fixed cost in seconds of a decode step that the host holds back, by kind (see `Forecast.kind`); a kind
            that is missing costs `launch_seconds`.
        pass_seconds: fixed cost of one pass of a prefill.
    """

    name: str
    kind: str
    memory_bytes: int
    working_set_bytes: int
    bandwidth: float
    flops: float
    launch_seconds: float
    slow_scan: bool = False
    steps: Mapping[str, float] = field(default_factory=dict)
    pass_seconds: float = 0.01

    @property
    def itemsize(self) -> int:
        """Bytes of an activation or cache element: float32 on a CPU, else bfloat16."""
        return 4 if self.kind == "cpu" else 2


# Peak memory bandwidth in GB/s and prefill TFLOP/s reached on this model, by Apple chip: only the size of things.
_APPLE = {
    "M1": (68, 1.3),
    "M1 Pro": (200, 2.6),
    "M1 Max": (400, 5.2),
    "M1 Ultra": (800, 10),
    "M2": (100, 1.8),
    "M2 Pro": (200, 3.4),
    "M2 Max": (400, 6.8),
    "M2 Ultra": (800, 13),
    "M3": (100, 1.8),
    "M3 Pro": (150, 3.3),
    "M3 Max": (400, 7),
    "M3 Ultra": (819, 14),
    "M4": (120, 2.3),
    "M4 Pro": (273, 4.8),
    "M4 Max": (546, 9.5),
    "M5": (153, 6),
    "M5 Pro": (307, 12),
    "M5 Max": (614, 23),
}
# Decode reaches about this share of the peak bandwidth; the rest is the fixed cost of a step.
_APPLE_SHARE = 0.7


def apple(chip: str, memory_gb: float, working_set_bytes: int | None = None) -> Machine:
    """A Mac of `memory_gb` (GiB of unified memory) with the chip named, as in ``"M4 Pro"``.

    Without a measured working set the system's default is taken: two thirds of the memory up to 36 GB, else
    three quarters.
    """
    key = chip.removeprefix("Apple ").strip()
    peak, tflops = _APPLE.get(key) or _APPLE.get(key.split(" ")[0]) or _APPLE["M1"]
    memory = int(memory_gb * GIB)
    default = int(memory * (2 / 3 if memory_gb <= 36 else 3 / 4))
    return Machine(
        name=f"Apple {key}",
        kind="metal",
        memory_bytes=memory,
        working_set_bytes=working_set_bytes or default,
        bandwidth=peak * GB * _APPLE_SHARE,
        flops=tflops * 1e12,
        launch_seconds=2.5e-3,
    )


def cuda(name: str, memory_bytes: int) -> Machine:
    """A CUDA accelerator; rates are those of an H200, where a step that is no recording is bound by its host."""
    steps = {"separate": 15e-3, "eager": 25e-3, "plain": 80e-3}
    return Machine(name, "cuda", memory_bytes, int(0.95 * memory_bytes), 4e12, 1.8e14, 1.3e-3, True, steps, 0.02)


def cpu(name: str, memory_bytes: int, cores: int = 2) -> Machine:
    """A machine without accelerator: float32, a fifth of memory left to the system."""
    return Machine(name, "cpu", memory_bytes, int(0.8 * memory_bytes), 4e9, 7e9 * max(1, cores), 4e-3, True)


def this_machine(info: Mapping[str, Any] | None = None) -> Machine:
    """The machine that runs this process.

    Args:
        info: what `engine.device.device_info` tells (``kind``, ``device_name``, ``memory_size``,
            ``max_recommended_working_set_size``, sizes in bytes); None asks the engine, which loads MLX.
    """
    import psutil

    if info is None:
        from engine.device import device_info

        info = device_info()
    kind, name = str(info.get("kind", "cpu")), str(info.get("device_name", "this machine"))
    system = psutil.virtual_memory().total
    memory = int(info.get("memory_size") or info.get("total_memory") or system)
    if kind == "metal":
        working_set = info.get("max_recommended_working_set_size")
        return apple(name, memory / GIB, int(working_set) if working_set else None)
    if kind == "cuda":
        return cuda(name, memory)
    return cpu(name, min(memory, system), psutil.cpu_count(logical=False) or 1)


# -- memory ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory(memory_of.Need):
    """Bytes at one frontier, and the `limit` to fit in."""

    limit: int

    @property
    def fits(self) -> bool:
        """Whether the total stays inside the working set."""
        return self.total <= self.limit


def memory(
    config: ModelConfig, machine: Machine, frontier: int, arms: int, chunk: int = 2048, weights: int | None = None
) -> Memory:
    """Forecast of device memory with `arms` caches alive at `frontier` tokens.

    Args:
        chunk: longest prefill chunk of any arm, in tokens.
        weights: bytes of the checkpoint where known; None computes them from the geometry.
    """
    need = memory_of.run_need(
        config,
        frontier,
        arms=arms,
        chunk=chunk,
        itemsize=machine.itemsize,
        weights=weights or None,
        fused_attention=memory_of.attention_is_fused(machine.kind),
    )
    return Memory(need.weights, need.caches, need.scratch, machine.working_set_bytes)


def largest_frontier(
    config: ModelConfig, machine: Machine, arms: int, chunk: int = 2048, weights: int | None = None
) -> int:
    """The largest context, a power of two from 256 up, that fits with `arms` live arms; 0 if none does."""
    return memory_of.largest_frontier(
        config,
        machine.working_set_bytes,
        arms=arms,
        chunk=chunk,
        itemsize=machine.itemsize,
        weights=weights,
        fused_attention=memory_of.attention_is_fused(machine.kind),
    )


# -- time --------------------------------------------------------------------------------------------


@dataclass
class Probe:
    """A few seconds of each arm on the real weights, and what a session costs besides.

    Attributes:
        prefill: arm name to ``[(tokens, seconds), …]``, lengths rising.
        decode: arm name to ``[(position, seconds a token), …]``, positions rising.
        start_seconds: from spawning a worker to its weights being ready.
    """

    prefill: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    decode: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    start_seconds: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Probe:
        """From the JSON form."""

        def pairs(table: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
            return {arm: [(int(n), float(s)) for n, s in rows] for arm, rows in table.items()}

        return cls(pairs(values.get("prefill", {})), pairs(values.get("decode", {})), values.get("start_seconds"))


@dataclass(frozen=True)
class Forecast:
    """Seconds of single pieces of work of one model on one machine; measured where `probe` covers the arm.

    arms: engine settings by arm name, as nested values, empty for other subjects; an arm that is missing is taken for
    the whole engine.
    """

    config: ModelConfig
    machine: Machine
    weights: int | None = None
    probe: Probe | None = None
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return self.weights or weight_bytes(self.config, itemsize=self.machine.itemsize)

    def kind(self, arm: str) -> str:
        """How an arm is driven: ``whole``, ``separate`` (no folded step that is recorded), ``eager`` or ``plain``."""
        settings = self.arms.get(arm)
        if settings is None:
            return "whole"
        if not settings:
            return "eager"
        decode, experts = settings["decode"], settings["experts"]["variant"]
        if settings["route"] in _PLAIN or settings["linear"] in _PLAIN or experts in _PLAIN:
            return "plain"
        if decode["trace"] == "eager":
            return "eager"
        kernels = (experts, settings["decode_attention"]["variant"], decode["trace"], decode["fusion"])
        whole = settings["cache"]["layout"] == "contiguous" and set(kernels) <= _WHOLE
        return "whole" if whole else "separate"

    def prefill(self, arm: str, tokens: int, subject: str = "engine", chunk: int = 2048) -> float:
        """Seconds of one prefill of `tokens` into an empty cache."""
        measured = self.probe.prefill.get(arm) if self.probe else None
        if measured:
            return _scaled(measured, tokens, self.config)
        chunks = math.ceil(tokens / chunk)
        weights = self.weights_bytes * chunks / self.machine.bandwidth
        seconds = prefill_flops(self.config, tokens) / self.machine.flops + weights + self.machine.pass_seconds * chunks
        if self.machine.slow_scan and (subject == "mlx_lm" or self._loops(arm)):
            # Without a fused Gated DeltaNet the scan is a loop over tokens in Python, a dozen launches for each.
            each = 1.3e-4 if self.machine.kind == "cuda" else 6e-5
            seconds += tokens * len(self.config.linear_layers) * each
        return seconds + chunks * self.machine.steps.get(self.kind(arm), 0.0)

    def _loops(self, arm: str) -> bool:
        """Whether an engine arm scans token by token on an accelerator that would do better."""
        return self.machine.kind == "cuda" and self.arms.get(arm, {}).get("gated_delta") in ("recurrence", "reference")

    def decode(self, arm: str, position: int, tokens: int) -> float:
        """Seconds of `tokens` decode steps at `position`."""
        measured = self.probe.decode.get(arm) if self.probe else None
        if measured:
            return tokens * _interpolated(measured, position)
        size = self.machine.itemsize
        # The recurrent state is read and written; keys and values are read.
        moved = token_bytes(self.config, self.weights, size) + 2 * self.config.state_bytes(size)
        moved += self.config.cache_bytes_per_token(size) * position
        fixed = self.machine.steps.get(self.kind(arm), self.machine.launch_seconds)
        return tokens * (moved / self.machine.bandwidth + fixed)

    def start(self) -> float:
        """Seconds from spawning a worker process to its weights being ready and warm caches made."""
        if self.probe and self.probe.start_seconds is not None:
            return self.probe.start_seconds
        return 4.0 + self.weights_bytes / ((5 if self.machine.kind == "cuda" else 2) * GB)

    def guard_synthetic(self, arms: Iterable[str], rows: int, baseline: str) -> float:
        """Seconds in which distinct engine arms are held, layer by layer, against one recording of MLX-LM's passes.

        Args:
            rows: tokens of the text. baseline: name of MLX-LM's arm, for its probe.
        """
        # Comparing on the host goes with the model's size, whoever computes it.
        once = 4 * self.prefill(baseline, rows, "mlx_lm") + 2.0 * self.weights_bytes / GB
        return once + sum(4 * self.prefill(arm, rows) + 0.5 * self.weights_bytes / GB for arm in arms)


_PLAIN = frozenset({"host", "reference", "expanded", "grouped", "expanded_grouped"})
"""Variants that wait for the host, or expand weights, in every layer."""

_WHOLE = frozenset({"best", "metal", "replay", "full"})
"""Values under which a step is one recording of our own kernels."""


def _scaled(measured: list[tuple[int, float]], tokens: int, config: ModelConfig) -> float:
    """Seconds at `tokens`: linear between probed lengths, beyond them in proportion to the operations."""
    shortest, longest = measured[0], measured[-1]
    if tokens >= longest[0]:
        return longest[1] * prefill_flops(config, tokens) / prefill_flops(config, longest[0])
    if tokens <= shortest[0]:
        return shortest[1] * tokens / shortest[0]
    return _interpolated(measured, tokens)


def _interpolated(measured: list[tuple[int, float]], at: int) -> float:
    """Straight lines through the points; outside, the slope of the outer two, never falling below the nearest."""
    if len(measured) == 1 or at <= measured[0][0]:
        return measured[0][1]
    pairs = list(zip(measured, measured[1:]))
    (x0, y0), (x1, y1) = next((p for p in pairs if at <= p[1][0]), pairs[-1])
    value = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return max(value, y1) if at > x1 else value
