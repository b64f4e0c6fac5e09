"""The engine as a subject: one `Engine` under one arm's configuration."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx

from engine.config import EngineConfig
from engine.generate import Engine
from engine.ops import VariantUnsupported
from sweeps.points import Arm
from sweeps.subjects.base import (
    CanonicalState,
    Decoded,
    Prefilled,
    Progress,
    SubjectUnsupported,
    chunk_lengths,
    memory_errors,
)
from sweeps.subjects.shared import Shared


class EngineSubject:
    """An engine behind the protocol. It keeps the ids of its sequence, which the engine does not."""

    name = "engine"

    def __init__(self, engine: Engine):
        self.engine = engine
        self._tokens: list[int] = []

    @classmethod
    def from_arm(cls, arm: Arm, shared: Shared) -> EngineSubject:
        """An engine with the arm's configuration on the shared weights.

        Raises:
            SubjectUnsupported: a named variant or combination that cannot run here, with its reason.
            ConfigError: an unknown field.
        """
        config = EngineConfig.from_dict(arm.config)
        try:
            engine = Engine(shared.config, shared.weights, config, shared.real_vocab, shared.dtype)
        except VariantUnsupported as error:
            raise SubjectUnsupported(str(error)) from error
        return cls(engine)

    def reset(self) -> None:
        """Forget the sequence."""
        self.engine.reset()
        self._tokens = []

    def prefill(self, tokens: Sequence[int], *, last: bool = True, progress: Progress | None = None) -> Prefilled:
        """Append `tokens` in the configured chunks.

        Raises:
            SubjectOutOfMemory: the device ran out of memory.
        """
        with memory_errors(f"engine prefill of {len(tokens)} tokens after {len(self._tokens)}"):
            token = self.engine.prefill(tokens, last=last, progress=progress)
        self._tokens += tokens
        chunks = chunk_lengths(len(tokens), self.engine.engine.prefill.chunk)
        return Prefilled(chunks, -1 if token is None else token)

    def decode(self, first: int, count: int, *, clock: Callable[[], int] | None = None) -> Decoded:
        """Feed `first` and decode `count` greedy tokens in `count` steps.

        Raises:
            SubjectOutOfMemory: the device ran out of memory.
        """
        with memory_errors(f"engine decode after {len(self._tokens)} tokens"):
            made = self.engine.decode(first, count, clock)
        ids, stamps = made if isinstance(made, tuple) else (made, [])
        self._tokens += [first, *ids[:-1]]
        return Decoded(ids, stamps, _drafted(self.engine))

    def position(self) -> int:
        """Tokens in the cache."""
        return self.engine.position

    def snapshot(self) -> Any:
        """The engine's restore point."""
        return self.engine.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Back to it."""
        self.engine.restore(snapshot)
        del self._tokens[snapshot.position :]

    def export_state(self) -> CanonicalState:
        """Copies of everything in canonical form."""
        arrays = self.engine.export_state()
        return CanonicalState(list(self._tokens), arrays["keys"], arrays["values"], arrays["state"], arrays["conv"])

    def import_state(self, state: CanonicalState) -> None:
        """Replace the sequence by a canonical state."""
        arrays = {"keys": state.keys, "values": state.values, "state": state.state, "conv": state.conv}
        self.engine.import_state(arrays)
        self._tokens = list(state.tokens)

    def logits(self, tokens: Sequence[int], phase: Literal["prefill", "decode"] = "decode") -> mx.array:
        """Teacher-forced logits float32 ``[len(tokens), real vocabulary]``; advances."""
        with memory_errors(f"engine logits after {len(self._tokens)} tokens"):
            rows = self.engine.logits(tokens, phase)
            mx.eval(rows)
        self._tokens += tokens
        return rows

    def executed(self) -> list[dict[str, Any]]:
        """Op, variant, tile and calls since `reset_executed`."""
        return self.engine.executed()

    def reset_executed(self) -> None:
        """Start counting anew."""
        self.engine.reset_executed()

    def describe(self) -> dict[str, Any]:
        """Versions, dtype, chunk, chosen variants, and whether log-probabilities are computed."""
        config = self.engine.engine
        return {
            "subject": self.name,
            "mlx": importlib.metadata.version("mlx"),
            "dtype": str(self.engine.dtype).removeprefix("mlx.core."),
            "chunk": config.prefill.chunk,
            "logprobs": config.decode.logprobs,
            "vocabulary_rows": self.engine.vocabulary,
            "chosen": self.engine.chosen(),
            "tuning": self.engine.tuning(),
            "tuned_notes": list(self.engine.tuned.notes),
            **_row_costs(self.engine),
        }

    def close(self) -> None:
        """Drop the engine and its cache."""
        del self.engine
        self._tokens = []
        mx.clear_cache()


def _drafted(engine: Engine) -> dict[str, Any]:
    """What drafting did since `reset_executed`, and the depth it would choose next; empty without a drafter."""
    told = engine.speculation()
    if told is None or engine.speculator is None:
        return {}
    control = engine.speculator.controller
    return {"speculation": told | ({"next_depth": control.best()} if control is not None else {})}


def _row_costs(engine: Engine) -> dict[str, Any]:
    """What passes of 1, 2, … rows cost over one row on this chip, and the tuned file that says so; empty untuned.

    With a drafter also the costs that it reckons with (`engine.depth.Costs`) and where they come from.
    """
    costs, files = engine.tuned.costs, engine.tuned.files
    made: dict[str, Any] = {}
    if costs:
        made = {"row_costs": list(costs["rows"]), "row_costs_from": files[0].name if files else ""}
    if engine.speculator is not None:
        used = engine.speculator
        made["draft_costs"] = dataclasses.asdict(used.costs) | {"rows_from": used.costs_from}
        made["draft_costs"] |= {"draft_from": used.draft_from, "most_depth": engine.engine.speculative.depth}
    return made
