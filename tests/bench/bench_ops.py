"""Timings of every op and variant: `pytest tests/bench/bench_ops.py --benchmark-enable`. Not part of the default run.

One case an op, variant and phase, on the sizes of the embedded model on a CPU and of the real one elsewhere. They show
where an op got slower between two commits (`--benchmark-compare`); what an arm gains is for sweeps to say, in pairs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.config import ModelConfig
from engine.device import device_kind
from engine.ops.registry import OPS, Case, Op, Variant

TINY = Path(__file__).parents[2] / "engine" / "tiny" / "checkpoint" / "config.json"
SHAPES = {"decode": (1, 512), "prefill": (256, 256)}
"""New rows, and positions that the last of them sees, by phase."""


@dataclass(frozen=True)
class Bench:
    """One thing to time."""

    op: Op
    variant: Variant
    phase: str
    case: Case

    @property
    def name(self) -> str:
        """Such as ``linear-mlx-decode-qkv``."""
        return f"{self.op.name}-{self.variant.name}-{self.phase}-{self.case.name}"


def geometry() -> ModelConfig:
    """The model whose sizes are timed here."""
    return (
        ModelConfig.from_dict(json.loads(TINY.read_text(encoding="utf-8"))) if device_kind() == "cpu" else ModelConfig()
    )


def benches() -> list[Bench]:
    """Every op and variant of the registry, in both phases where the op is timed for a model at all."""
    config, made = geometry(), []
    for op in OPS.values():
        cases = {phase: op.timing(config, *shape)[:1] for phase, shape in SHAPES.items()}
        cases = {phase: some for phase, some in cases.items() if some} or {"case": op.cases[:1]}
        for variant in op.variants.values():
            made += [Bench(op, variant, phase, case) for phase, some in cases.items() for case in some]
    return made


def leaves(result: Any) -> list[mx.array]:
    """The arrays in what an op returned."""
    if isinstance(result, mx.array):
        return [result]
    parts = (
        vars(result).values() if hasattr(result, "__dict__") else result if isinstance(result, (tuple, list)) else ()
    )
    return [array for part in parts for array in leaves(part)]


@pytest.mark.parametrize("bench", benches(), ids=lambda bench: bench.name)
def test_op(bench: Bench, benchmark: Any) -> None:
    """Time one call, from its inputs in memory to its outputs in memory."""
    reason = bench.variant.supports(bench.case, device_kind())
    if reason is not None:
        pytest.skip(reason)
    dtype = mx.float32 if device_kind() == "cpu" else mx.bfloat16
    arguments = bench.op.inputs(bench.case, dtype, 0)
    mx.eval(leaves(arguments))
    benchmark.group = f"{bench.op.name} {bench.phase}"
    benchmark.extra_info.update(device=device_kind(), mlx=mx.__version__, case=dict(bench.case.sizes))
    benchmark(lambda: mx.eval(leaves(bench.variant.run(*arguments))))
