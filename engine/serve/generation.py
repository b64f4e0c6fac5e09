"""One request on the engine: prefill with reuse, then a token at a time, until it ends or nobody wants it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from engine.generate import Engine, NonFinite, Sampling, sample
from engine.replay import Pending
from engine.serve.reuse import Prefixes
from engine.speculative import MOST_DEPTH

LEAST_LOGPROB = -9999.0
"""What stands for a probability of zero, which JSON cannot say."""

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Ask:
    """What to generate.

    Attributes:
        prompt: ids, at least one, fewer than the context. max_tokens: at most so many ids, at least 1.
        seed: of the draws, 0 to 2**64 - 1. top: None for no log-probabilities, else how many alternatives to each.
        key: prompts saved under other keys are not reused.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    top: int | None = None
    key: str | None = None


@dataclass(frozen=True)
class Scored:
    """A generated id, and if asked for its log-probability and the likeliest ids with theirs, best first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Generation:
    """One answer as it is made; iterate over `tokens`, then read how it ended.

    Attributes:
        cached: prompt tokens that were not computed again. reuse: how they were found, in words.
        finish: None while it runs. completed: ids generated, the end-of-turn id not counted.
        accepted, rejected: drafted ids that are part of the answer, and those that are not; 0 without a drafter.
    """

    def __init__(self, engine: Engine, prefixes: Prefixes, stop_ids: frozenset[int], ask: Ask):
        self.engine, self.prefixes, self.stop_ids, self.ask = engine, prefixes, stop_ids, ask
        self.cached, self.reuse, self.completed = 0, "", 0
        self.accepted = self.rejected = 0
        self.finish: Finish | None = None

    def tokens(
        self, wanted: Callable[[], bool] = lambda: True, progress: Callable[[int, int], None] | None = None
    ) -> Generator[Scored, None, None]:
        """Prefill, then yield up to `max_tokens` ids; an end-of-turn id ends the stream and is not yielded.

        Args:
            wanted: asked before each block and each token; False ends the generation as ``"cancelled"``.
            progress: called as ``progress(done, total)`` after each block of the prompt.
        """
        try:
            if self._prefill(wanted, progress):
                # Scores are of plain steps.
                drafts = self.engine.speculator is not None and self.ask.top is None
                yield from self._drafted(wanted) if drafts else self._decode(wanted)
            self.prefixes.end()
        except GeneratorExit:
            self.prefixes.end()
            raise
        except BaseException:
            self.prefixes.clear()
            raise
        self.finish = self.finish or "cancelled"

    def _prefill(self, wanted: Callable[[], bool], progress: Callable[[int, int], None] | None) -> bool:
        prompt, engine = self.ask.prompt, self.engine
        at, self.reuse = self.prefixes.begin(prompt, self.ask.key)
        self.cached = at
        engine.cache.reserve(_roomy(len(prompt) + min(self.ask.max_tokens, 1024)))
        for edge in self.prefixes.edges(at, prompt):
            if not wanted():
                return False
            engine.prefill(prompt[at:edge], last=False)
            self.prefixes.mark()
            at = edge
            if progress is not None:
                progress(at, len(prompt))
        engine.cache.state["token"] = mx.array([prompt[-1]], dtype=mx.uint32)
        return True

    def _decode(self, wanted: Callable[[], bool]) -> Iterator[Scored]:
        limit = self.ask.max_tokens
        draws = self._draws()
        ahead = next(draws)
        while wanted():
            # The next step is submitted before this token is read, so the device does not wait for the host.
            current, ahead = ahead, (next(draws) if self.completed + 1 < limit else None)
            scored = self._read(*current)
            if scored.id in self.stop_ids:
                self.finish = "stop"
                return
            self.completed += 1
            if self.completed == limit:
                self.finish = "length"
            yield scored
            if ahead is None:
                return

    def _drafted(self, wanted: Callable[[], bool]) -> Iterator[Scored]:
        """Ids by the engine's drafter; those of one verification come together."""
        ask, speculator = self.ask, self.engine.speculator
        assert speculator is not None
        before = speculator.counts.drafted, speculator.counts.accepted
        key = mx.random.key(ask.seed) if ask.sampling.temperature else None
        made = speculator.stream(ask.prompt[-1], ask.max_tokens, ask.sampling, key, self.stop_ids)
        try:
            with closing(made):
                while wanted():
                    self._make_room(1 + MOST_DEPTH)
                    token = next(made)
                    if token in self.stop_ids:
                        self.finish = "stop"
                        return
                    self.completed += 1
                    if self.completed == ask.max_tokens:
                        self.finish = "length"
                    yield Scored(token)
                    if self.finish:
                        return
        finally:
            drafted, accepted = speculator.counts.drafted - before[0], speculator.counts.accepted - before[1]
            # An answer that ends within a draft has no use for the rest of it.
            self.accepted = min(accepted, self.completed)
            self.rejected = drafted - self.accepted

    def _make_room(self, rows: int) -> None:
        """Grow keys and values in coarse steps, before the next `rows` rows do it in small ones."""
        engine = self.engine
        if engine.position + rows > engine.cache.capacity:
            engine.cache.reserve(_roomy(engine.position + rows))

    def _draws(self) -> Iterator[tuple[mx.array | Pending, Any, tuple[mx.array, ...] | None]]:
        """Steps in flight: the next id ``[1]``, whether its logits were finite, and its scores where asked for."""
        ask, engine, key = self.ask, self.engine, mx.random.key(self.ask.seed)
        while True:
            self._make_room(1)
            if ask.top is None and ask.sampling.temperature == 0:
                token = engine.step()
                yield token, token.finite if isinstance(token, Pending) else engine.cache.state["finite"], None
                continue
            logits, now = engine.score(), None
            finite = engine.cache.state["finite"] if engine.replay is None else mx.isfinite(logits).all()
            if ask.sampling.temperature:
                key, now = mx.random.split(key)
            token = sample(logits, ask.sampling, now)
            engine.feed(token)
            scores = None if ask.top is None else _scores(logits, token, ask.top)
            mx.async_eval(token, *(scores or ()))
            yield token, finite, scores

    def _read(self, token: mx.array | Pending, finite: Any, scores: tuple[mx.array, ...] | None) -> Scored:
        chosen = int(token.item())  # pyright: ignore[reportArgumentType]
        if not finite.item():
            self.engine._give_up(f"a logit of token {self.completed + 1}")
        if scores is None:
            return Scored(chosen)
        logprob = float(scores[0].item())  # pyright: ignore[reportArgumentType]
        if math.isnan(logprob):
            raise NonFinite(f"a logit at position {self.engine.position - 1} is not finite")
        ids, values = scores[1].tolist(), scores[2].tolist()
        top = tuple((int(i), max(float(v), LEAST_LOGPROB)) for i, v in zip(ids, values))  # type: ignore[arg-type]
        return Scored(chosen, max(logprob, LEAST_LOGPROB), top)


def _scores(logits: mx.array, token: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probability of `token` ``[1]``, and the `top` likeliest ids with theirs, before temperature and cuts."""
    row = logits.astype(mx.float32)[0]
    row = row - mx.logsumexp(row)
    order = mx.argsort(-row)[:top]
    return row[token], order, row[order]


def _roomy(positions: int) -> int:
    """Capacity for `positions`, coarse: each new capacity costs a copy of keys and values and a trace of the step."""
    step = max(256, 1 << max(0, positions.bit_length() - 2))
    return -(-positions // step) * step
