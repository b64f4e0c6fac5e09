"""A subject that computes nothing: every token costs a fixed sleep.

It lets the harness be tested with known truths: a slowdown of exactly 5 %, an out-of-memory error at a given
frontier, a clock that only moves when work is done. It needs neither MLX nor a model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sweeps.subjects.base import (
    CanonicalState,
    Decoded,
    Prefilled,
    Progress,
    SubjectError,
    SubjectOutOfMemory,
    chunk_lengths,
)

Sleep = Callable[[int], None]
"""Spends the given nanoseconds: the real `time.sleep`, or the hand of a fake clock."""


SPIN_NS = 500_000
"""The end of every charge, in ns, that is spent reading the clock: what a sleep overshoots by is then no part of it."""


def real_sleep(nanoseconds: int) -> None:
    """Let time pass on the machine's clock: asleep until shortly before the end, awake from there."""
    end = time.perf_counter_ns() + nanoseconds
    if nanoseconds > SPIN_NS:
        time.sleep((nanoseconds - SPIN_NS) / 1e9)
    while time.perf_counter_ns() < end:
        pass


@dataclass(frozen=True)
class StubOptions:
    """What the stub costs and where it fails.

    ns_per_row: prefill, for each token. ns_per_chunk: prefill, for each pass. ns_per_step: decode, for each token.
    slowdown: factor on all of these (1.05 is 5 % slower). noise: relative standard deviation of each charge.
    chunk: tokens a pass. tail: run the last prompt token as a pass of its own, as MLX-LM does.
    oom_at, fail_at: context length from which it raises out-of-memory, or any other error (0 = never).
    vocab: number of ids. seed: of the noise.
    """

    ns_per_row: int = 10_000
    ns_per_chunk: int = 0
    ns_per_step: int = 1_000_000
    slowdown: float = 1.0
    noise: float = 0.0
    chunk: int = 2048
    tail: bool = False
    oom_at: int = 0
    fail_at: int = 0
    vocab: int = 256
    seed: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StubOptions:
        """Read an arm's options.

        Raises:
            SubjectError: an option the stub does not have.
        """
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise SubjectError(f"stub has no option {', '.join(unknown)}; known: {known}")
        return cls(**values)


class Stub:
    """The stand-in subject. `sleep` is called with each charge in nanoseconds."""

    name = "stub"

    def __init__(self, options: StubOptions | None = None, sleep: Sleep | None = None):
        self.options = options or StubOptions()
        self._sleep = sleep or real_sleep
        self._random = random.Random(self.options.seed)
        self._tokens: list[int] = []
        self._calls = {"prefill": 0, "decode": 0}

    def reset(self) -> None:
        """Forget the sequence."""
        self._tokens = []

    def prefill(self, tokens: Sequence[int], *, last: bool = True, progress: Progress | None = None) -> Prefilled:
        """Charge every chunk; raises as the options say once the context would be too long."""
        if not tokens:
            raise ValueError("prefill needs at least one token")
        done, chunks = 0, self._chunks(len(tokens), last)
        for rows in chunks:
            self._check(len(self._tokens) + rows)
            self._charge(rows * self.options.ns_per_row + self.options.ns_per_chunk)
            self._tokens += tokens[done : done + rows]
            self._calls["prefill"] += 1
            done += rows
            if progress:
                progress(done, len(tokens))
        return Prefilled(chunks, self._next() if last else -1)

    def decode(self, first: int, count: int, *, clock: Callable[[], int] | None = None) -> Decoded:
        """Charge `count` steps; ids follow from the tokens so far, so equal histories decode alike."""
        made = Decoded([])
        token = first
        for _ in range(count):
            self._check(len(self._tokens) + 1)
            self._charge(self.options.ns_per_step)
            self._tokens.append(token)
            self._calls["decode"] += 1
            token = self._next()
            made.tokens.append(token)
            if clock:
                made.stamps.append(clock())
        return made

    def position(self) -> int:
        """Tokens in the cache."""
        return len(self._tokens)

    def snapshot(self) -> int:
        """The length is all the state there is."""
        return len(self._tokens)

    def restore(self, snapshot: int) -> None:
        """Back to `snapshot` tokens."""
        if snapshot > len(self._tokens):
            raise ValueError(f"snapshot at {snapshot} tokens is no prefix of the {len(self._tokens)} cached now")
        del self._tokens[snapshot:]

    def export_state(self) -> CanonicalState:
        """The tokens, and empty arrays."""
        nothing = np.zeros((0,), np.float32)
        return CanonicalState(list(self._tokens), nothing, nothing, nothing, nothing)

    def import_state(self, state: CanonicalState) -> None:
        """Take over the tokens of `state`."""
        self._tokens = list(state.tokens)

    def logits(self, tokens: Sequence[int], phase: Literal["prefill", "decode"] = "decode") -> np.ndarray:
        """Seeded float32 ``[len(tokens), vocab]`` that depend on position and token only."""
        rows = []
        for token in tokens:
            generator = np.random.default_rng((len(self._tokens), token))
            rows.append(generator.normal(size=self.options.vocab).astype(np.float32))
            self._tokens.append(token)
        return np.stack(rows)

    def executed(self) -> list[dict[str, Any]]:
        """One line for each phase that ran."""
        return [{"op": op, "variant": "sleep", "tile": None, "calls": n} for op, n in self._calls.items() if n]

    def reset_executed(self) -> None:
        """Start counting anew."""
        self._calls = dict.fromkeys(self._calls, 0)

    def describe(self) -> dict[str, Any]:
        """The options, for rows."""
        return {"subject": self.name, "logprobs": False, "chunk": self.options.chunk, **vars(self.options)}

    def close(self) -> None:
        """Nothing to drop but the tokens."""
        self.reset()

    def _chunks(self, count: int, last: bool) -> list[int]:
        return chunk_lengths(count, self.options.chunk, tail=self.options.tail and last)

    def _check(self, length: int) -> None:
        if self.options.oom_at and length >= self.options.oom_at:
            raise SubjectOutOfMemory(f"stub: out of memory at {length} tokens")
        if self.options.fail_at and length >= self.options.fail_at:
            raise RuntimeError(f"stub: failed at {length} tokens")

    def _charge(self, nanoseconds: float) -> None:
        factor = self.options.slowdown * max(0.0, 1 + self._random.gauss(0, self.options.noise))
        self._sleep(round(nanoseconds * factor))

    def _next(self) -> int:
        return (31 * len(self._tokens) + (self._tokens[-1] if self._tokens else 0)) % self.options.vocab
