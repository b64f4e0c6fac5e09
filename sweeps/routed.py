"""How evenly rows of a text go to the experts: counted in an untimed pass, told with every run of random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from engine.generate import Engine

TOKENS = 1024
"""Rows that are counted."""


def busiest(engine: Engine, tokens: Sequence[int]) -> dict[str, Any]:
    """The share of the busiest expert of each layer, in multiples of an even one; the engine's sequence is forgotten.

    Returns:
        ``busiest_expert``: its ``mean``, ``least`` and ``most`` over the layers, and the ``tokens`` counted.
    """
    with _noted(engine) as seen:
        engine.prefill(tokens, last=False)
    engine.reset()
    engine.reset_executed()
    shares = [_share(np.array(ids), engine.config.num_experts) for ids in seen]
    told = {"mean": np.mean(shares), "least": min(shares), "most": max(shares)}
    return {"busiest_expert": {name: round(float(share), 2) for name, share in told.items()} | {"tokens": len(tokens)}}


def _share(ids: np.ndarray, experts: int) -> float:
    return np.bincount(ids.ravel(), minlength=experts).max() * experts / ids.size


@contextmanager
def _noted(engine: Engine) -> Iterator[list[mx.array]]:
    """What every routing of the engine's model chose, in a list."""
    ops = engine.model.ops
    seen: list[mx.array] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def route(self, *arguments: Any, **more: Any) -> Any:
            routing = ops.route(*arguments, **more)
            seen.append(routing.ids)
            return routing

    engine.model.ops = Noting()  # type: ignore[assignment]
    try:
        yield seen
    finally:
        engine.model.ops = ops
        mx.eval(seen)
