"""The engine: one model, one configuration, one sequence. Prefill, decode, sample, snapshot.

`Engine` is what subjects, chat and server drive. A decode step feeds the token that the device holds, so nothing
is read back between steps unless the configuration asks for it; several steps are submitted before the oldest
token is read.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from engine import proof
from engine.cache import (
    Cache,
    ExactView,
    PagedCache,
    RecentCache,
    RecentPages,
    Snapshot,
    TracedView,
    bucket_for,
    conv_rows,
)
from engine.config import EngineConfig, ModelConfig
from engine.depth import Costs
from engine.device import activation_dtype, device_kind
from engine.folded import FoldedModel, unfit
from engine.kernels import cuda
from engine.kernels.recent import MOST_LAYERS
from engine.memory import prefill_room
from engine.model import Boundary, Model, best_of, no_wait
from engine.ops import VariantUnsupported, bind
from engine.ops.choice import Tuned
from engine.ops.registry import Refuses
from engine.replay import Pending, Replay, ReplayedCache, RowsReplay, unsupported
from engine.sampling import GREEDY, Sampling, sample
from engine.speculative import Counts, Speculator
from engine.tuned import load as load_tuned
from engine.weights import Weights

Progress = Callable[[int, int], None]


MOST_TRACES = 8
"""Compiled steps kept at once, one per bucket of positions."""


LEAN = {
    "experts": ("packed",),
    "gated_delta": ("chunked", "registers"),
    "prefill_attention": ("metal", "tiled"),
}
"""Variants whose intermediates of two layers fit `prefill_room`."""


SHORT_CHUNK = 1024
"""Rows up to which a chunk's scratch is so small that more of it may be submitted in pieces (`Engine._stretch`)."""


class NonFinite(RuntimeError):
    """A logit was NaN or infinite: the run stops rather than go on with noise."""


class Engine:
    """One model under one `EngineConfig`, holding one sequence.

    Args:
        config: architecture. weights: loaded, synthetic, or borrowed from another model.
        engine: every optimisation. vocabulary: ids below it are real (default: all of ``vocab_size``).
        dtype: activation type; default by device (`activation_dtype`).
        draft: the second engine of ``speculative.drafter="model"``. costs: of rows and drafts, measured on this chip.
        frequent: ids by falling frequency, for ``speculative.draft_vocab``.
        tuned: what ``best`` is; None reads the tuned files of this chip (`engine.tuned`).
        refuses: of our kernels, those that fail their self-test on this machine (`engine.proof`); None trusts all.

    Raises:
        ConfigError: a setting of `engine` that is none. VariantUnsupported: a named variant or a combination of
            settings that cannot run here.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        engine: EngineConfig | None = None,
        vocabulary: int | None = None,
        dtype: mx.Dtype | None = None,
        draft: Engine | None = None,
        costs: Costs | None = None,
        frequent: Sequence[int] | None = None,
        tuned: Tuned | None = None,
        refuses: Refuses | None = proof.refusal,
    ):
        self.config, self.engine = config, engine or EngineConfig()
        self.engine.validate()
        self.dtype = dtype or activation_dtype()
        self.device = device_kind()
        self.tuned = load_tuned(config, weights, self.dtype) if tuned is None else tuned
        folds = unfit(config, weights, self.dtype) is None
        self.ops = bind(self.engine, self.device, self.tuned, refuses, folds)
        self._refuses = refuses
        kind = FoldedModel if self.ops.fusion != "off" else Model
        self.model = kind(config, weights, self.ops, vocabulary or config.vocab_size)
        self.trace = self._trace()
        self.cache: Cache = self._layout()(config, self.dtype, self.engine.cache.step)
        self.replay: Replay | None = None
        self._steps: dict[tuple[int, int, bool], tuple[Callable[[], mx.array], dict]] = {}
        self._layers: dict[tuple[int, int, int], tuple[Callable[..., Any], dict]] = {}
        self.speculator: Speculator | None = None
        if self.engine.speculative.drafter != "off":
            self.speculator = Speculator(self, draft, costs, frequent)
            if self.speculator.wants_hidden:
                self.cache.state["hidden"] = mx.zeros((1, 1, config.hidden_size), self.dtype)
        if isinstance(self.cache, ReplayedCache) and isinstance(self.model, FoldedModel):
            given = config, self.model, self.cache, self.ops.recorder, cuda.device()
            verifies = self.speculator is not None and self.speculator.records
            self.replay = RowsReplay(*given, rows=self.engine.speculative.depth + 1) if verifies else Replay(*given)

    def _layout(self) -> type[Cache]:
        if self.trace == "replay":
            return ReplayedCache
        paged = self.engine.cache.layout == "paged"
        folded = self.ops.fusion != "off" and self.trace == "step"
        few = 0 < len(self.config.attention_layers) <= MOST_LAYERS
        if folded and few and self.ops.decode_attention.always("metal"):
            return RecentPages if paged else RecentCache
        return PagedCache if paged else Cache

    def _trace(self) -> str:
        wanted, host = self.engine.decode.trace, [b.op.name for b in self.ops.all() if b.reads_host]
        if wanted == "best":
            # MLX compiles for a CPU with g++ at run time; without one a traced step cannot run there.
            if host or (self.device == "cpu" and shutil.which("g++") is None):
                return "eager"
            measured = self.tuned.trace
            # Timed together with the fusion: one says nothing without the other.
            if measured is not None and self.ops.fusion == (self.tuned.fusion or "off"):
                if measured != "replay" or self._no_replay() is None:
                    return measured
            return "replay" if self._no_replay() is None else "step"
        if wanted == "replay" and (reason := self._no_replay()) is not None:
            raise VariantUnsupported("decode.trace", wanted, reason)
        if host and wanted == "step":
            raise VariantUnsupported(
                "decode.trace", wanted, f"{', '.join(host)} reads back to the host inside the step; use eager"
            )
        if host and wanted == "layer":
            raise VariantUnsupported(
                "decode.trace", wanted, f"{', '.join(host)} reads back to the host inside a layer; use eager"
            )
        return wanted

    def _no_replay(self) -> str | None:
        """Why steps cannot be recorded and replayed, or None."""
        if self.device != "cuda":
            return "steps are replayed as CUDA graphs; take step"
        if self.engine.decode.logprobs:
            return "log-probabilities are made outside a recorded step; take step"
        if self._refuses is not None and (reason := self._refuses("unit", "replayed_step")) is not None:
            return reason
        return unsupported(self.config, self.model, self.engine.cache.layout)

    def trusts(self, unit: str) -> bool:
        """Whether a unit of `engine.proof` has not failed its self-test on this machine."""
        return self._refuses is None or self._refuses("unit", unit) is None

    @property
    def _trace_chosen(self) -> str:
        if self.engine.decode.trace != "best":
            return ""
        return "tuned" if self.tuned.trace == self.trace else "untuned"

    # -- sequence --------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self.cache.position

    @property
    def vocabulary(self) -> int:
        """Ids below it can be generated."""
        return self.model.vocabulary

    def reset(self) -> None:
        """Forget the sequence."""
        self.cache.reset()
        self._forget_drafts()

    def _forget_drafts(self) -> None:
        """The drafter starts afresh behind a cache whose tokens it has not seen."""
        if self.speculator is not None:
            self.speculator.restore(None, self.position)

    def prefill(self, tokens: Sequence[int], last: bool = True, progress: Progress | None = None) -> int | None:
        """Append `tokens` in chunks of `prefill.chunk`; drained on return.

        Args:
            last: also score the last row; False for a stretch that more tokens will follow.
            progress: called as ``progress(done, total)`` after each chunk has completed on the device.

        Returns:
            The greedy next token, or None with ``last=False``.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or a sequence past the model's context.
        """
        self._check(tokens)
        chunk, total = self.engine.prefill.chunk, len(tokens)
        stretch = self.engine.prefill.stretch
        told = f"chunk={chunk} stretch={stretch}" if stretch else f"chunk={chunk}"
        # Filled before the pass, so that growth is never part of a chunk's own work.
        self.cache.reserve(self.position + total)
        h = before = None
        with self._bounded(min(chunk, total)):
            for start in range(0, total, chunk):
                before, h = h, self._pass(tokens[start : start + chunk])
                self.ops.recorder.record("prefill_pass", self.engine.prefill.submission, told)
                if progress is not None or start + chunk >= total:
                    mx.eval(h, self.cache.arrays())
                    if progress is not None:
                        progress(min(start + chunk, total), total)
                else:
                    mx.async_eval(h, self.cache.arrays())
                    if before is not None:
                        # At most two chunks in flight: the host would run ahead and hold the scratch of all of them.
                        mx.eval(before)
        if self.speculator is not None:
            mx.eval(self.speculator.arrays())
        if not last:
            return None
        assert h is not None
        logits = self.model.head(h[:, -1:])[0]
        token = mx.argmax(logits, axis=-1).astype(mx.uint32)
        self.cache.state["token"] = token
        mx.eval(token, logits)
        self._finite(logits)
        return int(token.item())  # pyright: ignore[reportArgumentType]

    @contextmanager
    def _bounded(self, rows: int) -> Iterator[None]:
        """On CUDA MLX submits no more of a chunk at once than fits `prefill_room` beside what is held already."""
        ops = (self.ops.experts, self.ops.gated_delta, self.ops.prefill_attention)
        if self.device != "cuda" or any(op.pick(rows)[0].name not in LEAN[op.op.name] for op in ops):
            yield
            return
        room = prefill_room(self.config, rows, self.dtype.size)
        before = mx.set_memory_limit(mx.get_active_memory() + room)
        try:
            yield
        finally:
            mx.set_memory_limit(before)

    def _pass(self, tokens: Sequence[int]) -> mx.array:
        """One eager pass over new tokens: hidden rows; the cache advances."""
        view = ExactView(self.cache, len(tokens))
        h = self.model(mx.array(list(tokens), dtype=mx.uint32), view, self._boundary(len(tokens)))
        self.cache.advance(len(tokens))
        if self.speculator is not None:
            self.speculator.observe(tokens, h if self.speculator.wants_hidden else None)
        return h

    def _boundary(self, rows: int) -> Boundary:
        if self.engine.prefill.submission == "layer":
            return lambda h: mx.eval(h)
        count, layers = self.config.num_hidden_layers, self.engine.prefill.stretch or self._stretch(rows)
        if layers >= count:
            return no_wait
        done = 0

        def submit(h: mx.array) -> None:
            nonlocal done
            done += 1
            if done % layers == 0 and done < count:
                mx.async_eval(h)

        return submit

    def _stretch(self, rows: int) -> int:
        """Layers of a chunk that are submitted together.

        On CUDA MLX lets the host run only a few hundred launches ahead, so that a device that was handed a chunk at
        once stands still while the next is built. On an H200, 40 layers, stretches of 8 prefilled 2,048 and 8,192
        tokens a fifth faster and took no more memory; 512 tokens wanted stretches of 4 (40 % faster, 8: 14 %).
        """
        if self.device != "cuda":
            return self.config.num_hidden_layers
        return 4 if rows <= SHORT_CHUNK else 8

    def _check(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise ValueError("prefill needs at least one token")
        kinds = set(map(type, tokens))
        if kinds != {int}:
            found = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"token ids must be of type int, got {found}; .tolist() makes ints of an array")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")
        end = self.position + len(tokens)
        if end > self.config.max_position_embeddings:
            raise ValueError(f"{end} tokens exceed the model's context of {self.config.max_position_embeddings}")

    def _finite(self, logits: mx.array) -> None:
        if not mx.isfinite(logits).all().item():
            self._give_up(f"a logit at position {self.position - 1}")

    def _all_finite(self) -> None:
        if not self.cache.state["finite"].item():
            self._give_up(f"a logit before position {self.position}")

    def _give_up(self, what: str) -> NoReturn:
        self.cache.wipe()
        self._forget_drafts()
        raise NonFinite(f"{what} is not finite; the weights or a kernel are wrong")

    # -- decode ----------------------------------------------------------------------------

    def decode(self, first: int, count: int, clock: Callable[[], int] | None = None) -> list[int] | tuple:
        """Greedy-decode `count` tokens after feeding `first`; end-of-sequence is ignored; drained on return.

        With a drafter the tokens of one verification are handed over together.

        Args:
            clock: if given, read at the hand-over of each token.

        Returns:
            The ids, or ``(ids, stamps)`` with a clock.

        Raises:
            ValueError: `first` is outside the vocabulary, or the tokens go past the model's context.
        """
        self._check([first])
        self._room(count)
        if self.speculator is not None:
            return self._decode_drafted(self.speculator, first, count, clock)
        self.cache.state["token"] = mx.array([first], dtype=mx.uint32)
        ids: list[int] = []
        stamps: list[int] = []
        pending: deque[mx.array | Pending] = deque()
        keep = self.engine.decode.in_flight if self.engine.decode.feedback == "device" else 1
        for _ in range(count):
            pending.append(self.step())
            if len(pending) >= keep:
                self._hand_over(pending, ids, stamps, clock)
        while pending:
            self._hand_over(pending, ids, stamps, clock)
        self._drained()
        return (ids, stamps) if clock is not None else ids

    def _drained(self) -> None:
        """All tokens were handed over: wait for the rest, and see that every logit was finite."""
        if self.replay is not None and self.replay.running:
            # The last token was handed over, so nothing runs; the state may stay where it is.
            if not self.replay.finite:
                self._give_up(f"a logit before position {self.position}")
        else:
            mx.eval(self.cache.arrays())
            self._all_finite()

    def _decode_drafted(self, speculator: Speculator, first: int, count: int, clock: Any) -> list[int] | tuple:
        ids: list[int] = []
        stamps: list[int] = []
        for token in speculator.stream(first, count):
            ids.append(token)
            if clock is not None:
                stamps.append(clock())
            self.ops.recorder.record("token_feedback", self.engine.decode.feedback)
        mx.eval(speculator.arrays())
        self._drained()
        return (ids, stamps) if clock is not None else ids

    def _hand_over(self, pending: deque[mx.array | Pending], ids: list[int], stamps: list[int], clock: Any) -> None:
        ids.append(int(pending.popleft().item()))  # pyright: ignore[reportArgumentType]
        if clock is not None:
            stamps.append(clock())
        self.ops.recorder.record("token_feedback", self.engine.decode.feedback)
        if self.engine.decode.feedback == "host":
            self.feed(ids[-1])

    def feed(self, token: int | mx.array) -> None:
        """Make `token`, an id or uint32 ``[1]`` on the device, the next to be fed."""
        if self.replay is not None and self.replay.running:
            self.replay.feed(token if isinstance(token, int) else int(token.item()))  # pyright: ignore[reportArgumentType]
        else:
            self.cache.state["token"] = mx.array([token], dtype=mx.uint32) if isinstance(token, int) else token

    def step(self) -> mx.array | Pending:
        """Submit one greedy step: feed the token the device holds, leave the next one there.

        Returns:
            The next token, uint32 ``[1]``, still in flight; its ``item()`` waits.
        """
        return self._observed(scores=False)

    def score(self) -> mx.array:
        """Submit one step and return its logits ``[1, vocabulary]`` in flight; the caller sets the next token."""
        return self._observed(scores=True)

    def _observed(self, scores: bool) -> Any:
        """A step that the drafter, if there is one, is told of."""
        if self.speculator is None:
            return self._advance(scores)
        fed = self.cache.state["token"]
        # Not the recorded step: of several in flight only the last one's hidden row can be had.
        out = self._advance(scores, recorded=False)
        self.speculator.observe([fed], self.cache.state.get("hidden"))
        return out

    def _advance(self, scores: bool, recorded: bool = True) -> Any:
        """Submit one step; `recorded` allows the replayed one, where there is one."""
        self.cache.reserve(self.position + 1)
        trace = "step" if self.replay is not None and not recorded else self.trace
        self.ops.recorder.record("decode_step", trace, chosen=self._trace_chosen)
        if self.replay is not None and recorded:
            return self.replay.step(scores)
        if trace == "step":
            out = self._traced_step(scores)
        else:
            out = self._eager_step(scores)
        mx.async_eval(out, self.cache.arrays())
        return out

    def _eager_step(self, scores: bool) -> mx.array:
        h = self._layered_pass() if self.trace == "layer" else self._token_pass()
        return self._choose(h, scores)

    def _token_pass(self) -> mx.array:
        view = ExactView(self.cache, 1)
        h = self.model(self.cache.state["token"], view)
        self.cache.advance(1)
        return h

    def _choose(self, h: mx.array, scores: bool) -> mx.array:
        """The step's end: logits, and unless they are the result, the next token (and the logarithms if asked)."""
        state = self.cache.state
        logits = None
        if scores or self.engine.decode.logprobs:
            logits = self.model.head(h).squeeze(0)
            token, finite = best_of(logits)
        else:
            token, finite = self.model.choose(h)
        # Read back when the tokens are.
        state["finite"] = state["finite"] & finite
        if "hidden" in state:
            state["hidden"] = h
        if scores:
            assert logits is not None
            return logits
        if logits is not None:
            state["logprobs"] = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        state["token"] = token
        return token

    def _traced_step(self, scores: bool) -> mx.array:
        bucket = min(bucket_for(self.position + 1), self.cache.capacity)
        key = (bucket, self.cache.boundary(1), scores)
        state = self.cache.state
        if self.engine.decode.logprobs and "logprobs" not in state:
            state["logprobs"] = mx.zeros((1, self.vocabulary), self.dtype)
        if key not in self._steps:
            tally: dict = {}
            while len(self._steps) >= MOST_TRACES:
                # The oldest goes: a long decode passes through many buckets and comes back to few.
                self._steps.pop(next(iter(self._steps)))

            def run() -> mx.array:
                out = self._recorded(tally, lambda: self._choose(self._traced_pass(bucket), scores))
                self.cache.finish()
                state["position"] = state["position"] + 1
                return out

            self._steps[key] = mx.compile(run, inputs=state, outputs=state), tally
        step, tally = self._steps[key]
        out = step()
        self.cache.moved(1)
        self.ops.recorder.replay(tally)
        return out

    def _traced_pass(self, bucket: int) -> mx.array:
        return self.model(self.cache.state["token"], TracedView(self.cache, bucket))

    def _layered_pass(self) -> mx.array:
        """One step with each layer compiled on its own; the position is a device array there too."""
        state = self.cache.state
        h = self.model.embed(state["token"])
        bucket = min(bucket_for(self.position + 1), self.cache.capacity)
        for index in range(self.config.num_hidden_layers):
            h = self._layer_step(index, bucket)(h)
        self.cache.advance(1)
        return h

    def _layer_step(self, index: int, bucket: int) -> Callable[[mx.array], mx.array]:
        """Layer `index` compiled: takes hidden rows, replaces the layer's two state arrays."""
        cache, state = self.cache, self.cache.state
        full = index in cache.attention_index
        own = cache.grown if full else ("conv", "recurrent")
        at = cache.attention_index[index] if full else cache.linear_index[index]
        key = (bucket, cache.boundary(1), index)

        def swap(shared: list[mx.array], arrays: list[Any]) -> tuple[list[mx.array], list[Any]]:
            """Put arrays in the state and return those that they replace."""
            held = [state[name] for name in cache.shared], [state[name][at] for name in own]
            state.update(zip(cache.shared, shared))
            for name, array in zip(own, arrays):
                state[name][at] = array
            return held

        if key not in self._layers:
            tally: dict = {}

            def run(h: mx.array, shared: list[mx.array], arrays: list[Any]):
                # The view reads the cache, so the traced arrays stand in it while Python runs.
                held = swap(shared, arrays)
                out = self._recorded(tally, lambda: self.model.layer(index, h, TracedView(cache, bucket)))
                return out, swap(*held)[1]

            while len(self._layers) >= MOST_TRACES * self.config.num_hidden_layers:
                self._layers.pop(next(iter(self._layers)))
            self._layers[key] = mx.compile(run), tally
        compiled, tally = self._layers[key]

        def call(h: mx.array) -> mx.array:
            shared = [state[name] for name in cache.shared]
            out, arrays = compiled(h, shared, [state[name][at] for name in own])
            swap(shared, arrays)
            self.ops.recorder.replay(tally)
            return out

        return call

    def _recorded(self, tally: dict, work: Callable[[], Any]) -> Any:
        """Run `work` while tracing and keep what it executed in `tally`, to be counted once per run of the trace."""
        captured = self.ops.recorder.capture()
        try:
            out = work()
        finally:
            self.ops.recorder.release()
        tally.clear()
        tally.update(captured)
        return out

    def _room(self, count: int) -> None:
        end = self.position + count
        if end > self.config.max_position_embeddings:
            raise ValueError(
                f"decoding {count} tokens from {self.position} exceeds the model's context of "
                f"{self.config.max_position_embeddings}"
            )
        self.cache.reserve(end)

    # -- text ------------------------------------------------------------------------------

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        seed: int | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Generator[int, None, None]:
        """Continue the cached sequence with `tokens`, then yield up to `max_tokens` ids.

        A stop id ends the stream and is not yielded. The token stays on the device from draw to feed; the next
        step is submitted before the last token is read. With a drafter, sampled tokens have the same distribution as
        without, but a seed gives other ones.

        Raises:
            ValueError: as `prefill`, or a seed that is none. NonFinite: a step's logits are NaN or infinite.
        """
        if seed is not None and not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
        stops, key = frozenset(stop_ids), mx.random.key(seed or 0)
        room = self.config.max_position_embeddings - self.position - len(tokens)
        limit = min(max_tokens, room)
        if len(tokens) > 1:
            self.prefill(tokens[:-1], last=False)
        self._check(tokens[-1:])
        if self.speculator is not None:
            # Greedy drafting needs no key.
            keyed = key if sampling.temperature else None
            with closing(self.speculator.stream(tokens[-1], limit, sampling, keyed, stops)) as made:
                for token in made:
                    if token in stops:
                        return
                    yield token
            return
        self.cache.state["token"] = mx.array([tokens[-1]], dtype=mx.uint32)
        draw = self._draws(sampling, key)
        ahead = next(draw) if limit > 0 else None
        for index in range(limit):
            assert ahead is not None
            (current, finite), ahead = ahead, (next(draw) if index + 1 < limit else None)
            token = int(current.item())  # pyright: ignore[reportArgumentType]
            if not finite.item():
                self._give_up(f"a logit of token {index + 1}")
            if token in stops:
                return
            yield token

    def _draws(self, sampling: Sampling, key: mx.array | None) -> Iterator[tuple[Any, Any]]:
        """Tokens in flight, each with the flag that its logits were finite."""
        state = self.cache.state
        while True:
            if sampling.temperature == 0:
                token = self.step()
                yield token, token.finite if isinstance(token, Pending) else state["finite"]
                continue
            logits = self.score()
            assert key is not None
            key, now = mx.random.split(key)
            drawn = sample(logits, sampling, now)
            self.feed(drawn)
            mx.async_eval(drawn)
            yield drawn, state["finite"] if self.replay is None else mx.isfinite(logits).all()

    def logits(self, tokens: Sequence[int], phase: str = "prefill") -> mx.array:
        """Teacher-forced logits float32 ``[len(tokens), vocabulary]``; the cache advances.

        phase: ``"prefill"`` runs the prefill's own chunks; ``"decode"`` runs the decode step, a row at a time; with a
            drafter verifications of the full depth too, in turn with it.
        """
        self._check(tokens)
        self.cache.reserve(self.position + len(tokens))
        rows = []
        if phase == "prefill":
            chunk = self.engine.prefill.chunk
            for start in range(0, len(tokens), chunk):
                rows.append(self.model.head(self._pass(tokens[start : start + chunk]))[0].astype(mx.float32))
                mx.eval(rows[-1], self.cache.arrays())
        else:
            at = 0
            while at < len(tokens):
                self.feed(tokens[at])
                if self.speculator is not None and self.replay is not None and at % 2:
                    # A drafter's plain steps are of both kinds.
                    rows.append(self._advance(True).astype(mx.float32))
                    self.speculator.missed([tokens[at]])
                else:
                    rows.append(self.score().astype(mx.float32))
                at += 1
                if self.speculator is not None:
                    rows += self.speculator.score(tokens[at:])
                    at = sum(row.shape[0] for row in rows)
                mx.eval(rows[-1])
        return mx.concatenate(rows)

    # -- state -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A restore point; nothing on the device is copied."""
        made = self.cache.snapshot()
        return made if self.speculator is None else replace(made, drafts=self.speculator.snapshot())

    def restore(self, snapshot: Snapshot) -> None:
        """Back to a snapshot of this sequence."""
        self.cache.restore(snapshot)
        if self.speculator is not None:
            self.speculator.restore(snapshot.drafts, snapshot.position)

    def export_state(self) -> dict[str, mx.array]:
        """Copies in canonical form (`Cache.export`)."""
        return self.cache.export()

    def import_state(self, arrays: dict[str, mx.array]) -> None:
        """Replace the sequence by canonical arrays."""
        self.cache.load(arrays)
        self._forget_drafts()

    def save(self, path: Path, tokens: Sequence[int] = ()) -> None:
        """Write the sequence's state as safetensors."""
        self.cache.save(path, tokens)

    def load(self, path: Path) -> list[int]:
        """Read what `save` wrote; returns its tokens."""
        tokens = self.cache.read(path)
        self._forget_drafts()
        return tokens

    def layer(
        self, index: int, h: mx.array, state: tuple[mx.array, mx.array] | None = None, position: int = 0
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """One layer on given inputs, for comparisons on common inputs; the engine's own sequence is untouched.

        Args:
            h: ``[1, T, hidden]``. state: (keys, values) ``[1, kv heads, position, head_dim]`` of a full-attention
                layer, or (conv ``[1, 3, conv_dim]``, recurrent) of a Gated DeltaNet layer; None for an empty one.

        Returns:
            ``(h, state)`` after the layer, in the same forms.
        """
        scratch = Cache(self.config, self.dtype, self.engine.cache.step)
        s, rows = scratch.state, h.shape[1]
        full = self.config.is_full_attention(index)
        names = ("keys", "values") if full else ("conv", "recurrent")
        at = (scratch.attention_index if full else scratch.linear_index)[index]
        if full:
            shape = (1, self.config.num_key_value_heads, position + rows, self.config.head_dim)
            for name, given in zip(names, state or (None, None), strict=True):
                s[name][at] = mx.zeros(shape, self.dtype)
                if given is not None and position:
                    s[name][at][..., :position, :] = given[..., :position, :].astype(self.dtype)
        elif state is not None:
            s["conv"][at], s["recurrent"][at] = conv_rows(state[0].astype(self.dtype)), state[1].astype(mx.float32)
        scratch.position = position
        out = self.model.layer(index, h.astype(self.dtype), ExactView(scratch, rows))
        first, second = s[names[0]][at], s[names[1]][at]
        return out, (first if full else mx.concatenate(first, axis=1), second)

    # -- proof -----------------------------------------------------------------------------

    def executed(self) -> list[dict[str, Any]]:
        """``[{op, variant, tile, calls}]`` since the last reset.

        Beside the ops: ``prefill_pass`` (its submission and chunk), ``decode_step`` (how it was traced),
        ``token_feedback`` (where the token came from), and with a drafter ``draft`` (its depth), ``verify`` (its rows;
        ``recorded`` if it was a recorded pass) and ``rollback``.
        """
        return self.ops.recorder.executed()

    def reset_executed(self) -> None:
        """Start counting anew."""
        self.ops.recorder.reset()
        if self.speculator is not None:
            self.speculator.counts = Counts()

    def speculation(self) -> dict[str, Any] | None:
        """What drafting did since the last reset (`Counts`), or None without a drafter.

        ``costs`` and ``draft_cost`` say where the costs of rows and of drafts come from: ``"given"``, ``"tuned"``, or
        ``"untuned"`` for a guess.
        """
        if self.speculator is None:
            return None
        told = {"costs": self.speculator.costs_from, "draft_cost": self.speculator.draft_from}
        return self.speculator.counts.to_dict() | told

    def chosen(self) -> dict[str, str]:
        """Variant by op, and how a step is traced."""
        return {**self.ops.chosen(), "decode.trace": self.trace}

    def tuning(self) -> dict[str, str]:
        """``"tuned"``, ``"untuned"`` or ``"named"`` by op (by phase where that differs), fusion and trace."""
        return {**self.ops.tuning(), "decode.trace": self._trace_chosen or "named"}
