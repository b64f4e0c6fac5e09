"""What drafting touches: distinct experts of a verification, bytes of weights a token; counted apart from windows.

Rows that go to different experts read different weights, so a verification of T rows reads more than a step of one row.
How much more depends on the text; it is counted on a second engine that runs op by op with the same drafter, prompt and
weights, and remembers which experts its rows were routed to. Bytes are those of the weights that a pass must read, each
once, and of its cache; what a device reads again is not in them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from engine.generate import Engine
from engine.ops import VariantUnsupported
from engine.weights import Weights
from sweeps.launches import MOST_PROMPT
from sweeps.subjects.base import Subject

TOKENS = 64
"""Decoded tokens that are looked at."""


@dataclass
class Touched:
    """Passes of a stretch of decoding.

    verified: distinct experts of each layer in turn, in passes of several rows. drafted: the same of the draft head.
    rows: rows of all verifications. single: steps of one row. tokens: made in all.
    """

    verified: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    verifications: int = 0
    rows: int = 0
    drafts: int = 0
    single: int = 0
    tokens: int = 0


def of_subject(
    subject: Subject, frontiers: Sequence[int], prompt: Callable[[int], Sequence[int]]
) -> dict[int, dict[str, Any]]:
    """What a drafting arm touches at each frontier, for its rows; nothing for other subjects and longer prompts.

    Args:
        frontiers: in tokens. prompt: that many tokens of a fresh prompt.

    Returns:
        By frontier: ``experts_per_verification``, distinct experts of a layer in a verification on average;
        ``experts_per_row``, what one row takes; ``bytes_per_token`` with drafts and ``bytes_per_token_plain`` without.
    """
    engine = getattr(subject, "engine", None)
    if not isinstance(engine, Engine) or engine.speculator is None:
        return {}
    made = {}
    for at in frontiers:
        if at <= MOST_PROMPT:
            try:
                watched = _watched(engine)
            except VariantUnsupported:
                return made
            made[at] = facts(watched, touched(watched, prompt(at)), at)
    return made


def _watched(engine: Engine) -> Engine:
    """The same engine op by op: what is fused or compiled does not show where its rows go."""
    assert engine.speculator is not None
    decode = dataclasses.replace(engine.engine.decode, trace="eager", fusion="off")
    config = dataclasses.replace(engine.engine, decode=decode)
    costs = engine.speculator.costs
    weights = engine.model.weights
    return Engine(engine.config, weights, config, engine.vocabulary, engine.dtype, costs=costs, tuned=engine.tuned)


def touched(engine: Engine, prompt: Sequence[int], tokens: int = TOKENS) -> Touched:
    """Decode `tokens` after `prompt` on an engine that runs op by op, and count where its rows went."""
    made = Touched()
    first = engine.prefill(prompt)
    engine.reset_executed()
    with _spied(engine, made):
        assert first is not None
        ids = engine.decode(first, min(tokens, engine.config.max_position_embeddings - engine.position))
    told = engine.speculation() or {}
    made.tokens, made.single = len(ids), told["plain"]
    made.drafts, made.rows, made.verifications = told["drafted"], told["rows"], told["steps"]
    engine.reset()
    return made


@contextmanager
def _spied(engine: Engine, made: Touched) -> Iterator[None]:
    """Every routing of the engine's model is noted, those of verifications apart from those of drafts."""
    assert engine.speculator is not None
    verifier, drafter = engine.speculator.verifier, engine.speculator.drafter
    ops, route = engine.model.ops, engine.model.ops.route
    seen: list[mx.array] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def route(self, *arguments: Any, **more: Any) -> Any:
            routing = route(*arguments, **more)
            seen.append(routing.ids)
            return routing

    def noting(call: Callable[..., Any], into: list[int]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            # What came before were plain steps, which are known without looking.
            seen.clear()
            out = call(*arguments)
            into.extend(len(np.unique(np.array(ids))) for ids in seen)
            return out

        return noted

    engine.model.ops = Spy()  # type: ignore[assignment]
    with (
        mock.patch.object(verifier, "run", noting(verifier.run, made.verified)),
        mock.patch.object(drafter, "draft", noting(drafter.draft, made.drafted)),
    ):
        try:
            yield
        finally:
            engine.model.ops = ops


# -- bytes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Bytes of a pass: what every pass reads and one expert of a layer; both of the draft head too, with its matrix."""

    common: int
    expert: float
    head: int
    head_expert: float

    @classmethod
    def of(cls, weights: Weights, experts: int, layers: int, output: int | None = None) -> Bytes:
        """From weights of `layers` layers of `experts` experts; output: bytes of the matrix that scores drafts, or None
        for the trunk's."""
        trunk = {name: a.nbytes for name, a in weights.tensors.items() if not name.startswith("mtp.")}
        head = {name: a.nbytes for name, a in weights.tensors.items() if name.startswith("mtp.")}
        routed, own = (sum(n for name, n in part.items() if ".switch_mlp." in name) for part in (trunk, head))
        table = sum(n for name, n in trunk.items() if "embed_tokens" in name)
        scored = sum(n for name, n in trunk.items() if name.startswith("lm_head.")) if output is None else output
        head_common = sum(head.values()) - own + scored if head else 0
        return cls(sum(trunk.values()) - routed - table, routed / experts / layers, head_common, own / experts)


def facts(engine: Engine, made: Touched, position: int) -> dict[str, Any]:
    """`Touched` in numbers for a row."""
    config, used = engine.config, engine.config.num_experts_per_tok
    assert engine.speculator is not None
    matrix = getattr(engine.speculator.drafter, "matrix", None)
    parts = () if matrix is None else (matrix.weight, matrix.scales, matrix.biases)
    output = sum(a.nbytes for a in parts if a is not None) if parts else 0
    sizes = Bytes.of(engine.model.weights, config.num_experts, config.num_hidden_layers, output)
    itemsize = engine.dtype.size
    cache = config.cache_bytes_per_token(itemsize) * position + 2 * config.state_bytes(itemsize)
    step = sizes.common + cache + config.num_hidden_layers * used * sizes.expert
    moved = made.verifications * (sizes.common + cache) + sum(made.verified) * sizes.expert + made.single * step
    if made.drafted:
        moved += made.drafts * sizes.head + sum(made.drafted) * sizes.head_expert
    return {
        "experts_per_verification": round(float(np.mean(made.verified)), 3) if made.verified else None,
        "experts_per_row": used,
        "rows_per_verification": round(made.rows / made.verifications, 3) if made.verifications else None,
        "bytes_per_token": round(moved / made.tokens) if made.tokens else None,
        "bytes_per_token_plain": round(step),
    }
