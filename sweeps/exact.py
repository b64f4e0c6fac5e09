"""What can be counted exactly, on any machine with the same device: `python -m sweeps.exact FILE [preset…]`

Times on a shared or virtual machine mean nothing; what the engine asks of the device does. For each preset, on the
embedded model, the counts below are written as JSON, and `python -m reports exact FILE` holds them against the
committed ones and names whatever rose.

- launches of a decode step: operations in its graph that do work, views left out; stages: the longest chain of them
  (as the engine writes it; `sweeps.launches` knows what MLX makes of it)
- host waits of a prefill chunk, and submissions that did not wait
- calls, and bytes of arguments and results, of each op, in a prefill and in a step
- chosen variants, and peak memory of a prefill and 16 steps
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import engine as _engine  # noqa: F401  (chooses the BLAS before MLX loads)

# isort: split
import mlx.core as mx

from ablations.arms import PRESETS, preset
from engine.checkpoint import load
from engine.device import activation_dtype, device_info, device_kind
from engine.generate import Engine
from engine.ops import VariantUnsupported
from engine.ops.bind import BoundOp
from engine.ops.choice import Tuned
from engine.tiny import CHECKPOINT
from sweeps import environment
from sweeps.launches import VIEWS, counted, written

FORMAT = 1
"""Version of the file."""

PROMPT, CHUNK, STEPS = 96, 32, 16
"""Tokens of the prompt, of a chunk of it, and steps decoded after it."""

PEAK_ROUNDS = 8
"""Rounds of which the lowest peak counts: on a CPU, how far submission runs ahead is chance."""


def counts(presets: Sequence[str] = ("full", "plain")) -> dict[str, Any]:
    """Everything this module counts, for each preset that can run here; the others with their reason."""
    loaded = load(CHECKPOINT, activation_dtype())
    made: dict[str, Any] = {}
    for name in presets:
        try:
            # Untuned: the counts are to be the same wherever they are taken.
            engine = Engine(loaded.config, loaded.weights, _chunked(name), dtype=activation_dtype(), tuned=Tuned())
            made[name] = _of(engine)
        except VariantUnsupported as error:
            made[name] = {"unsupported": str(error)}
    machine = environment.machine()
    about = {
        "device_kind": device_kind(),
        "device": machine["device"],
        "os": machine["os"],
        "mlx": machine["versions"].get("mlx"),
        "device_info": {k: v for k, v in device_info().items() if isinstance(v, (str, int, float))},
    }
    return {"format": FORMAT, **about, "presets": made}


def _chunked(name: str) -> Any:
    config = preset(name)
    config.prefill.chunk = CHUNK
    return config


def _of(engine: Engine) -> dict[str, Any]:
    tokens = [5 + i * 7 % 251 for i in range(PROMPT)]
    peak = min(_peak(engine, tokens) for _ in range(PEAK_ROUNDS))
    with _waits() as waits, _calls() as prefilled:
        engine.prefill(tokens)
    chunks = -(-PROMPT // CHUNK)
    with _calls() as stepped:
        graph = step_graph(engine)
    if any(op.reads_host for op in engine.ops.all()):
        # What an op reads back has run by then and is gone from the graph.
        graph = {"not counted": "an op reads back to the host inside the step"}
    return {
        "chosen": engine.chosen(),
        "prefill_chunk": {name: round(count / chunks, 3) for name, count in waits.items()},
        "prefill_ops": prefilled,
        "decode_step": graph,
        "decode_ops": stepped,
        "peak_bytes": peak,
    }


def _peak(engine: Engine, tokens: list[int]) -> int:
    """Bytes above what was held before, over a prefill and some steps."""
    engine.reset()
    mx.clear_cache()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    token = engine.prefill(tokens)
    engine.decode(int(token or 0), STEPS)
    peak = mx.get_peak_memory() - active
    engine.reset()
    return peak


def step_graph(engine: Engine) -> dict[str, Any]:
    """Launches and stages of one greedy step, from its graph before anything of it has run.

    Returns:
        ``launches``, ``stages``, and ``by_operation`` (name to count).
    """
    cache = engine.cache
    mx.eval(cache.arrays())
    cache.reserve(engine.position + 1)
    # The step as the engine writes it, without the compilation that would hide its operations.
    out = engine._choose(engine._token_pass(), False)
    step = counted(written(out, *cache.arrays()), lambda node: (0, 0) if node.name in VIEWS else (1, 1))
    return dataclasses.asdict(step)


@contextmanager
def _waits() -> Iterator[dict[str, int]]:
    """Counts evaluations that wait and those that only submit, while the block runs."""
    tally = {"host_waits": 0, "submissions": 0}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            tally[name] += 1
            return call(*arguments)

        return run

    with (
        mock.patch.object(mx, "eval", counted("host_waits", mx.eval)),
        mock.patch.object(mx, "async_eval", counted("submissions", mx.async_eval)),
    ):
        yield tally


@contextmanager
def _calls() -> Iterator[dict[str, dict[str, int]]]:
    """Counts calls of each op and the bytes of what goes in and comes out, while the block runs."""
    tally: dict[str, dict[str, int]] = {}
    plain = BoundOp.__call__

    def run(self: BoundOp, *arguments: Any, rows: int, residual: Any = None) -> Any:
        result = plain(self, *arguments, rows=rows, residual=residual)
        entry = tally.setdefault(self.op.name, {"calls": 0, "bytes": 0})
        entry["calls"] += 1
        entry["bytes"] += _bytes(arguments) + _bytes(result)
        return result

    with mock.patch.object(BoundOp, "__call__", run):
        yield tally


def _bytes(value: Any) -> int:
    if isinstance(value, mx.array):
        return value.nbytes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(_bytes(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Count and write the file."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.exact", description="Counts that need no clock.")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("presets", nargs="*", metavar="preset", help=", ".join(sorted(PRESETS)))
    given = parser.parse_args(argv)
    given.file.write_text(
        json.dumps(counts(given.presets or ("full", "plain")), indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    print(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
