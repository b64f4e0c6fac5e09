"""Speculative decoding: a drafter proposes tokens, one pass of the model verifies them, what is wrong is taken back.

A step starts with a token that is not fed yet. The drafter names `depth` tokens after it; the model runs the token and
its drafts as one pass of ``depth + 1`` rows; drafts are kept as far as they are right, and the choice of the last right
row is the next token. So every step yields 1 to ``depth + 1`` tokens (Leviathan et al., arXiv:2211.17192; Chen et
al., arXiv:2302.01318).

- Drafters: ``mtp`` (the checkpoint's multi-token-prediction head), ``ngram`` (what followed the longest recent suffix
  before), ``model`` (a second engine).
- Keys and values of wrong rows are overwritten later; recurrent and convolution state is taken back either by
  replaying the recurrences of the right rows from the state before (``replay``: no weight is read again), or by keeping
  the state after every row (``states``).
- Greedy tokens equal plain decoding but for near-ties: a product over several rows may round in another order than
  over one. ``exact_verify`` runs the rows one at a time through the very step of plain decoding and closes even that.
- The depth follows measured acceptance and the costs it is given (`Costs`); there is no clock here.
- With ``decode.trace=step`` a verification is compiled once for each number of rows and bucket of positions, else it
  runs eagerly, as drafts do. Its tokens are read back once whatever ``decode.feedback`` says; plain steps in between
  keep to it.
- With ``replay`` greedy verifications are recorded passes (`engine.replay.RowsReplay`): plain steps follow without a
  hand-over, and rows are taken back in one way, whatever ``rollback`` says. Of several plain steps only the last hands
  out its hidden row: the draft head goes on behind a gap. Sampling and ``exact_verify`` keep to what ``step`` does;
  greedy plain steps between exact verifications are replayed where some come together (`LEAST_REPLAYED`).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np

from engine.cache import Cache, Core, ExactView, Inputs, Snapshot, TracedView, bucket_for
from engine.config import EngineConfig, ModelConfig, SpeculativeConfig
from engine.depth import DRAFT_COST, GUESSED, Costs, DepthController, draft_cost
from engine.model import Model, best_of
from engine.ops.registry import DECODE_ROWS, VariantUnsupported
from engine.replay import RowsReplay, as_array
from engine.sampling import GREEDY, Sampling, kept_scores
from engine.weights import Matrix

if TYPE_CHECKING:
    from engine.generate import Engine
    from engine.tokenizer import Tokenizer

RECORDED = "recorded"
"""Name of verifications that are recorded passes, and of their rollback, in what was executed."""

MOST_DEPTH = DECODE_ROWS - 1
"""Most tokens drafted at once: the token itself and its drafts are one pass of a decode step's kernels."""

LEAST_REPLAYED = 8
"""Fewest plain steps for which the state is handed to the recorded step and back."""


# -- accepting drafts ----------------------------------------------------------------------------


def agreed(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """How many leading drafts equal the model's greedy choices."""
    for index, draft in enumerate(drafts):
        if draft != choices[index]:
            return index
    return len(drafts)


def accept_sampled(target: mx.array, proposal: mx.array, drafts: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """Rejection sampling of drafts: what comes out is distributed as if the model alone had been sampled.

    Draft i, drawn from ``q_i``, is kept with probability ``min(1, p_i / q_i)``; the first that is not is replaced by a
    draw from ``max(0, p_i - q_i)`` made to sum to 1, and after the last a token is drawn from ``p`` of the last row.

    Args:
        target: p, float32 ``[..., depth + 1, vocabulary]``. proposal: q, ``[..., depth, vocabulary]`` (a drafter that
            does not draw has all its mass on its draft). drafts: ``[..., depth]``. key: a random key.

    Returns:
        How many drafts are kept, int32 ``[...]``, and the token after them, uint32 ``[...]``.
    """
    depth, now, later = drafts.shape[-1], *mx.random.split(key)
    at = drafts[..., None].astype(mx.int32)
    p = mx.take_along_axis(target[..., :depth, :], at, axis=-1).squeeze(-1)
    q = mx.take_along_axis(proposal, at, axis=-1).squeeze(-1)
    # u q < p, not u < p / q: no division, and a draft that the model cannot make (p = 0) is never kept.
    right = mx.random.uniform(shape=drafts.shape, key=now) * q < p
    kept = mx.cumprod(right.astype(mx.int32), axis=-1).sum(axis=-1)
    row = kept[..., None, None]
    padded = mx.concatenate([proposal, mx.zeros_like(target[..., :1, :])], axis=-2)
    p_row, q_row = (mx.take_along_axis(x, row, axis=-2).squeeze(-2) for x in (target, padded))
    left = mx.maximum(p_row - q_row, 0)
    # p equal to q leaves nothing but rounding; such a row is only rejected by rounding too.
    left = mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p_row)
    return kept, mx.random.categorical(mx.log(left), key=later).astype(mx.uint32)


# -- drafters ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: on the device, uint32 ``[depth]``, or on the host; `proposal` are the probabilities they were
    drawn from, float32 ``[depth, vocabulary]``, or None if they were not drawn."""

    given: mx.array | tuple[int, ...]
    proposal: mx.array | None = None

    def __len__(self) -> int:
        return len(self.given)

    @property
    def ids(self) -> mx.array:
        """The tokens on the device, uint32 ``[depth]``."""
        return self.given if isinstance(self.given, mx.array) else mx.array(self.given, dtype=mx.uint32)

    def tokens(self) -> list[int]:
        """The tokens on the host; waits for them if need be."""
        return self.given.tolist() if isinstance(self.given, mx.array) else list(self.given)  # pyright: ignore[reportReturnType]


class Drafter(Protocol):
    """Proposes tokens. It is told every token that enters the cache, in order, and can be set back."""

    def observe(self, tokens: Sequence[int | mx.array], hidden: mx.array | None) -> None:
        """Rows now in the cache: their tokens, and their hidden rows ``[1, T, hidden]`` before the final norm."""
        ...

    def draft(
        self, history: Sequence[int], token: int, depth: int, sampling: Sampling, key: mx.array | None
    ) -> Draft | None:
        """Up to `depth` tokens to follow ``[*history, token]``; None if there is nothing to propose."""
        ...

    def snapshot(self) -> Any:
        """Where it stands."""
        ...

    def restore(self, snapshot: Any, position: int) -> None:
        """Back to a snapshot; None starts afresh at a cache of `position` tokens whose past is not known."""
        ...

    def arrays(self) -> list[mx.array]:
        """What it holds on the device."""
        ...


class NgramDrafter:
    """What followed the last occurrence of the longest suffix that occurred before; all on the host.

    Suffixes of `LENGTHS` tokens are looked up, longest first, in a table from token groups to where they last
    ended. A continuation that reaches the end of the context goes on into itself, so that a repetition is
    drafted to any depth.
    """

    LENGTHS = (8, 5, 3, 2)

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def observe(self, tokens: Sequence[int | mx.array], hidden: mx.array | None) -> None:
        """Nothing: the table is brought up to date from the history when it is asked."""

    def draft(
        self, history: Sequence[int], token: int, depth: int, sampling: Sampling, key: mx.array | None
    ) -> Draft | None:
        """Tokens after the longest suffix found, or None."""
        found = self.lookup(history, token, depth)
        return None if found is None else Draft(tuple(found))

    def lookup(self, history: Sequence[int], token: int, depth: int) -> list[int] | None:
        """The same, as ids."""
        self._index(history)
        text = [*history[-max(self.LENGTHS) - 1 :], token]
        for length in self.LENGTHS:
            if len(text) < length:
                continue
            # The group that ends just before the token is not in the table yet: a run of equal tokens.
            start = len(history) if text[-length - 1 : -1] == text[-length:] else self._ends.get(tuple(text[-length:]))
            if start is not None:
                made: list[int] = []
                for i in range(start, start + depth):
                    at = i - len(history)
                    made.append(history[i] if at < 0 else token if at == 0 else made[i - len(history) - 1])
                return made
        return None

    def _index(self, history: Sequence[int]) -> None:
        # A group is entered once a token follows it, so the suffix itself is never found.
        for end in range(max(self._indexed, 1), len(history)):
            for length in self.LENGTHS:
                if end >= length:
                    self._ends[tuple(history[end - length : end])] = end
        self._indexed = max(self._indexed, len(history))

    def snapshot(self) -> Any:
        """Nothing but the history, which the speculator keeps."""
        return None

    def restore(self, snapshot: Any, position: int) -> None:
        """Start the table anew; it is filled again from the history."""
        self._ends, self._indexed = {}, 0

    def arrays(self) -> list[mx.array]:
        """None."""
        return []


@dataclass(frozen=True)
class _HeadMark:
    """Where the head stands: pairs in its cache, rows waiting, the epoch its cache belongs to."""

    pairs: int
    waiting: tuple[tuple[mx.array, mx.array], ...]
    tail: mx.array | None
    epoch: int


class MtpDrafter:
    """The checkpoint's multi-token-prediction head.

    Its input for position t is the embedding of token t+1 beside the trunk's hidden state of t after the final norm;
    one decoder layer with keys and values of its own, a norm and the trunk's output matrix give token t+2. Deeper
    drafts feed its own output back. Every pair enters in order, those of the prompt too; pairs made
    of drafts are overwritten by the true ones.

    Args:
        model: the trunk, for its ops, embedding and output matrix. frequent: ids that may be drafted, if not all.
    """

    FLUSH = 256
    """Waiting rows that are fed at once when nobody asks for drafts, so that they do not pile up."""

    def __init__(self, model: Model, dtype: mx.Dtype, step: int, frequent: Sequence[int] | None):
        assert model.weights.mtp is not None
        self.model, self.head = model, model.weights.mtp
        self.config: ModelConfig = dataclasses.replace(model.config, num_hidden_layers=1, full_attention_interval=1)
        self.cache = Cache(self.config, dtype, step)
        self.ids: mx.array | None = None
        self.matrix = model.weights.lm_head
        if frequent is not None:
            self.ids = mx.array(list(frequent), dtype=mx.uint32)
            self.matrix = _rows_of(self.matrix, self.ids)
            mx.eval(self.matrix.weight, self.matrix.scales, self.matrix.biases)
        self._epoch = 0
        self._waiting: list[tuple[mx.array, mx.array]] = []
        self._tail: mx.array | None = None
        self._ahead: int | None = None

    @property
    def ready(self) -> bool:
        """Whether the hidden state of the last cached token is known."""
        return self._tail is not None

    def observe(self, tokens: Sequence[int | mx.array], hidden: mx.array | None) -> None:
        """Pair each token with the hidden row before it; the last row waits for its token."""
        assert hidden is not None
        ids = _as_ids(tokens)
        if self._tail is None:
            rows, ids = hidden[:, :-1], ids[1:]
        else:
            rows = self._tail if hidden.shape[1] == 1 else mx.concatenate([self._tail, hidden[:, :-1]], axis=1)
        if self._ahead is not None and tokens[0] == self._ahead:
            # The last draft began with this very pair: its keys and values stand behind the end.
            self.cache.seek(self.cache.position + 1)
            rows, ids = rows[:, 1:], ids[1:]
        self._ahead = None
        # A copy: a slice would keep a whole chunk of hidden rows alive.
        self._tail = hidden if hidden.shape[1] == 1 else mx.contiguous(hidden[:, -1:])
        if ids.shape[0]:
            self._waiting.append((rows, ids))
        if sum(ids.shape[0] for _, ids in self._waiting) >= self.FLUSH or hidden.shape[1] > DECODE_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            rows, ids = self._take()
            self._feed(self._normed(rows), ids)
            mx.async_eval(self.cache.arrays())

    def skipped(self) -> None:
        """Rows entered the cache without their hidden rows: what waits is fed, and pairs begin anew after them."""
        self._flush()
        self._tail = self._ahead = None

    def _take(self) -> tuple[mx.array, mx.array]:
        rows = mx.concatenate([r for r, _ in self._waiting], axis=1)
        ids = mx.concatenate([i for _, i in self._waiting])
        self._waiting = []
        return rows, ids

    def draft(
        self, history: Sequence[int], token: int, depth: int, sampling: Sampling, key: mx.array | None
    ) -> Draft | None:
        """Feed what is waiting and the pair of `token`, then go on from the head's own output."""
        if self._tail is None:
            return None
        self._waiting.append((self._tail, mx.array([token], dtype=mx.uint32)))
        rows, ids = self._take()
        h = self._feed(self._normed(rows), ids, last=True)
        settled = self.cache.position
        made, proposals = [], []
        for index in range(depth):
            if index:
                h = self._feed(h, made[-1])
            h = self._norm(h, self.head.norm)
            drawn, proposal, key = self._pick(h, sampling, key)
            made.append(drawn)
            proposals.append(proposal)
        # Pairs made of drafts are given up; that of `token` counts once `observe` tells that it was fed.
        self.cache.seek(settled - 1)
        self._ahead = token
        return Draft(mx.concatenate(made), mx.concatenate(proposals) if sampling.temperature else None)

    def _pick(self, h: mx.array, sampling: Sampling, key: mx.array | None) -> tuple[mx.array, Any, mx.array | None]:
        logits = self.model.ops.linear(h, self.matrix, rows=1).squeeze(0)
        logits = logits[:, : self.model.vocabulary if self.ids is None else self.ids.shape[0]]
        proposal = None
        if sampling.temperature:
            assert key is not None
            key, now = mx.random.split(key)
            scores = kept_scores(logits, sampling)
            chosen = mx.random.categorical(scores, key=now).astype(mx.uint32)
            proposal = mx.softmax(scores, axis=-1)
            if self.ids is not None:
                full = mx.zeros((1, self.model.vocabulary), mx.float32)
                proposal = mx.put_along_axis(full, self.ids[None], proposal, axis=-1)
        else:
            chosen = mx.argmax(logits, axis=-1).astype(mx.uint32)
        return (chosen if self.ids is None else self.ids[chosen]), proposal, key

    def _feed(self, hidden: mx.array, ids: mx.array, last: bool = False) -> mx.array:
        """One pass over pairs: hidden rows after the norm ``[1, T, hidden]`` and the tokens after them ``[T]``.

        Of the rows before the `last` the keys and values alone are needed then, so only that one goes to experts.
        """
        w, rows = self.head, ids.shape[0]
        self.cache.reserve(self.cache.position + rows)
        pair = [self._norm(self.model.embed(ids), w.norm_embedding), self._norm(hidden, w.norm_hidden)]
        x = self.model.ops.linear(mx.concatenate(pair, axis=-1), w.fc, rows=rows)
        assert w.layer.attention is not None
        view = ExactView(self.cache, rows)
        h = x + self.model.attention(w.layer.attention, 0, self._norm(x, w.layer.input_norm), view)
        self.cache.advance(rows)
        h = h[:, -1:] if last else h
        return self.model.experts(w.layer.experts, self._norm(h, w.layer.post_norm), h)

    def _normed(self, rows: mx.array) -> mx.array:
        return self._norm(rows, self.model.weights.norm)

    def _norm(self, x: mx.array, gain: mx.array) -> mx.array:
        return self.model.ops.norm(x, gain, self.config.rms_norm_eps, rows=x.shape[1])

    def snapshot(self) -> _HeadMark:
        """Its length and what waits; keys and values are append-only."""
        return _HeadMark(self.cache.position, tuple(self._waiting), self._tail, self._epoch)

    def restore(self, snapshot: Any, position: int) -> None:
        """Back to a snapshot. One of before the last fresh start has lost its keys: then only the tail is used."""
        known, self._ahead = isinstance(snapshot, _HeadMark), None
        if known and snapshot.epoch == self._epoch and snapshot.pairs <= self.cache.capacity:
            self.cache.seek(snapshot.pairs)
            self._waiting, self._tail = list(snapshot.waiting), snapshot.tail
            return
        self._epoch += 1
        self.cache.reset()
        self._waiting, self._tail = [], snapshot.tail if known else None

    def arrays(self) -> list[mx.array]:
        """Keys, values, and rows that wait."""
        tail = [] if self._tail is None else [self._tail]
        return [*self.cache.arrays(), *(a for pair in self._waiting for a in pair), *tail]


class ModelDrafter:
    """A second engine that decodes greedily ahead of the first.

    It feeds what it has not seen of the history, steps, and goes back to before its drafts; a history that does
    not continue what it has seen is read from the start.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._seen: list[int] = []

    def observe(self, tokens: Sequence[int | mx.array], hidden: mx.array | None) -> None:
        """Nothing: it reads the history when it is asked."""

    def draft(
        self, history: Sequence[int], token: int, depth: int, sampling: Sampling, key: mx.array | None
    ) -> Draft | None:
        """Its own greedy continuation of ``[*history, token]``."""
        engine, known = self.engine, len(self._seen)
        if len(history) + depth + 1 > engine.config.max_position_embeddings:
            return None
        if self._seen != list(history[:known]):
            engine.reset()
            known = 0
        if len(history) > known:
            engine.prefill(history[known:], last=False)
        self._seen = list(history)
        before = engine.snapshot()
        engine.cache.state["token"] = mx.array([token], dtype=mx.uint32)
        made = [as_array(engine.step()) for _ in range(depth)]
        engine.restore(before)
        return Draft(mx.concatenate(made))

    def snapshot(self) -> Any:
        """Nothing: a history that goes on elsewhere is noticed."""
        return None

    def restore(self, snapshot: Any, position: int) -> None:
        """Nothing."""

    def arrays(self) -> list[mx.array]:
        """The second engine's cache."""
        return self.engine.cache.arrays()


def draft_engine(path: Any, tokenizer: Tokenizer, engine: EngineConfig | None = None) -> Engine:
    """Load a checkpoint as the drafter of a model with `tokenizer`.

    Raises:
        ValueError: its tokenizer gives some token another id, so its drafts would mean other text.
    """
    from engine.checkpoint import load
    from engine.device import activation_dtype
    from engine.generate import Engine

    made = load(path, activation_dtype(), mtp=False)
    if made.tokenizer.core.get_vocab() != tokenizer.core.get_vocab():
        raise ValueError(f"{path}: its tokenizer differs from the model's; a drafter must give every token the same id")
    vocabulary = min(made.tokenizer.real_vocab, made.config.vocab_size)
    return Engine(made.config, made.weights, engine, vocabulary)


def _as_ids(tokens: Sequence[int | mx.array]) -> mx.array:
    """uint32 ``[T]`` of ids on the host or on the device."""
    if all(isinstance(t, int) for t in tokens):
        return mx.array(list(tokens), dtype=mx.uint32)  # pyright: ignore[reportArgumentType]
    return mx.concatenate([t if isinstance(t, mx.array) else mx.array([t], dtype=mx.uint32) for t in tokens])


def _rows_of(matrix: Matrix, ids: mx.array) -> Matrix:
    take = lambda a: None if a is None else a[ids]  # noqa: E731
    return Matrix(matrix.weight[ids], take(matrix.scales), take(matrix.biases), matrix.bits, matrix.group_size)


# -- verification --------------------------------------------------------------------------------


class _Keeping:
    """What a view adds for a verification: each layer's inputs, or its state after every row."""

    kept: list[Any]
    cores: dict[int, Core]
    each: bool

    def keep(self, cores: dict[int, Core], each: bool) -> Any:
        self.kept, self.cores, self.each = [], cores, each
        return self

    def recur(self, layer: int, inputs: Inputs, core: Core) -> mx.array:
        conv, state = self.recurrent(layer)  # type: ignore[attr-defined]
        self.cores[layer] = core
        if self.each:
            rows, after = [], []
            for i in range(inputs[0].shape[1]):
                out, conv, state = core(_cut(inputs, i, i + 1), conv, state)
                rows.append(out)
                after.append((list(conv), state))
            self.kept.append(after)
            out = mx.concatenate(rows, axis=1)
        else:
            self.kept.append(inputs)
            out, conv, state = core(inputs, conv, state)
        self.set_recurrent(layer, conv, state)  # type: ignore[attr-defined]
        return out


class _ExactKeeping(_Keeping, ExactView):
    pass


class _TracedKeeping(_Keeping, TracedView):
    pass


def _cut(inputs: Inputs, start: int, end: int) -> Inputs:
    qkv, z, b, a = (x[:, start:end] for x in inputs)
    return qkv, z, b, a


@dataclass
class Verified:
    """A verification in flight: `chosen` are greedy tokens ``[T]`` or logits ``[T, vocabulary]``.

    One of a recorded pass has ended; it has no `start`, and greedy tokens are a list.
    """

    position: int
    start: Snapshot | None
    rows: int
    chosen: Any
    finite: Any
    hidden: mx.array | None
    kept: list[Any]
    held: int

    def choices(self) -> list[int]:
        """Greedy tokens on the host; waits for them."""
        return self.chosen if isinstance(self.chosen, list) else self.chosen.tolist()


class Verifier:
    """Passes of several rows whose tail can be taken back."""

    MOST_TRACES = 24

    def __init__(self, engine: Engine, rollback: str, exact: bool, hidden: bool):
        self.engine, self.exact, self.wants_hidden = engine, exact, hidden
        self.each = rollback == "states"
        self.name = "rows" if exact else rollback
        self._cores: dict[int, Core] = {}
        self._traces: dict[tuple[int, int, int, bool], tuple[Callable[..., Any], dict]] = {}

    def replay(self, rows: int) -> RowsReplay | None:
        """What runs recorded passes of so many rows, where there is one."""
        replay = self.engine.replay
        if isinstance(replay, RowsReplay) and 1 < rows <= replay.rows and not self.exact:
            return replay
        return None

    def run(self, tokens: Sequence[int] | mx.array, scores: bool, recorded: bool = True) -> Verified:
        """Submit one pass over `tokens` ``[T]``; the cache holds all of them until `keep` takes some back.

        recorded: let it be a recorded pass, where there are such; that is waited for.
        """
        cache, rows = self.engine.cache, len(tokens)
        cache.reserve(cache.position + rows)
        if recorded and (replay := self.replay(rows)) is not None:
            return self._recorded(replay, tokens, scores)
        tokens = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), dtype=mx.uint32)
        self.engine.ops.recorder.record("verify", self.name, f"rows {rows}")
        if self.exact:
            return self._row_by_row(tokens, scores)
        start = cache.snapshot()
        if self._traced(rows):
            chosen, finite, hidden, kept = self._trace(rows, scores)(tokens)
        else:
            view = _ExactKeeping(cache, rows).keep(self._cores, self.each)
            chosen, finite, hidden, kept = self._pass(tokens, view, scores)
            cache.advance(rows)
        mx.async_eval(chosen, finite, cache.arrays())
        hidden = hidden if self.wants_hidden else None
        return Verified(start.position, start, rows, chosen, finite, hidden, kept, rows)

    def _recorded(self, replay: RowsReplay, tokens: Sequence[int] | mx.array, scores: bool) -> Verified:
        start, rows = self.engine.position, len(tokens)
        self.engine.ops.recorder.record("verify", RECORDED, f"rows {rows}")
        fed: Any = tokens.tolist() if isinstance(tokens, mx.array) else tokens
        chosen, logits = replay.verify(fed, scores)
        hidden = replay.hidden() if self.wants_hidden else None
        finite = np.bool_(replay.finite)
        return Verified(start, None, rows, chosen if logits is None else logits, finite, hidden, [], rows)

    def _traced(self, rows: int) -> bool:
        """Compiled like the plain step, unless an op reads back to the host for so many rows."""
        late = (b for b in self.engine.ops.all() if rows > b.decode_rows and b.pick(rows)[0].reads_host)
        return self.engine.trace in ("step", "replay") and next(late, None) is None

    def _pass(self, tokens: mx.array, view: Any, scores: bool) -> tuple[mx.array, mx.array, mx.array, list[Any]]:
        model, state = self.engine.model, self.engine.cache.state
        h = model(tokens, view)
        if scores:
            chosen = model.head(h).squeeze(0)
            finite = best_of(chosen)[1].all(keepdims=True)
        else:
            chosen, finite = model.choose(h)
            finite = finite.all(keepdims=True)
        state["finite"] = state["finite"] & finite
        return chosen, finite, h, view.kept

    def _trace(self, rows: int, scores: bool) -> Callable[..., Any]:
        engine, cache = self.engine, self.engine.cache
        bucket = min(bucket_for(cache.position + rows), cache.capacity)
        key = bucket, cache.boundary(rows), rows, scores
        if key not in self._traces:
            tally: dict = {}
            while len(self._traces) >= self.MOST_TRACES:
                self._traces.pop(next(iter(self._traces)))

            def run(tokens: mx.array) -> Any:
                view = _TracedKeeping(cache, bucket).keep(self._cores, self.each)
                out = engine._recorded(tally, lambda: self._pass(tokens, view, scores))
                cache.finish()
                cache.state["position"] = cache.state["position"] + rows
                return out

            self._traces[key] = mx.compile(run, inputs=cache.state, outputs=cache.state), tally
        compiled, tally = self._traces[key]

        def call(tokens: mx.array) -> Any:
            out = compiled(tokens)
            cache.moved(rows)
            engine.ops.recorder.replay(tally)
            return out

        return call

    def _row_by_row(self, tokens: mx.array, scores: bool) -> Verified:
        """The plain decode step over each row in turn, all in flight, with a restore point after each."""
        engine, state = self.engine, self.engine.cache.state
        start, chosen, hidden, marks = engine.cache.snapshot(), [], [], []
        for i in range(tokens.shape[0]):
            state["token"] = tokens[i : i + 1]
            chosen.append(engine._advance(scores, recorded=False))
            marks.append(engine.cache.snapshot())
            if self.wants_hidden:
                hidden.append(state["hidden"])
        rows, count = mx.concatenate(hidden, axis=1) if hidden else None, tokens.shape[0]
        chosen = mx.concatenate(chosen)
        return Verified(start.position, start, count, chosen, state["finite"], rows, marks, count)

    def keep(self, verified: Verified, rows: int) -> None:
        """Leave only the first `rows` of a verification in the cache; may be called again with fewer."""
        cache = self.engine.cache
        if rows == verified.held:
            return
        verified.held = rows
        if verified.start is None:
            assert isinstance(self.engine.replay, RowsReplay)
            self.engine.ops.recorder.record("rollback", RECORDED, f"rows {rows}")
            self.engine.replay.keep(verified.position, rows)
            return
        if self.exact:
            cache.restore(verified.kept[rows - 1])
            return
        self.engine.ops.recorder.record("rollback", self.name, f"rows {rows}")
        cache.restore(verified.start)
        conv, recurrent = cache.state["conv"], cache.state["recurrent"]
        for layer, i in cache.linear_index.items():
            kept = verified.kept[i]
            if self.each:
                conv[i], recurrent[i] = list(kept[rows - 1][0]), kept[rows - 1][1]
            else:
                _, conv[i], recurrent[i] = self._cores[layer](_cut(kept, 0, rows), conv[i], recurrent[i])
        cache.seek(verified.start.position + rows)
        mx.async_eval(cache.arrays())


# -- the loop ------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What drafting did since the last reset.

    drafted, accepted: tokens. steps: verifications. rows: rows verified. plain: tokens made without drafts.
    rollbacks: verifications of which some rows were taken back. depths: verifications by depth. tried, right: drafts
    judged and right by position in the draft.
    """

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    rows: int = 0
    plain: int = 0
    rollbacks: int = 0
    depths: dict[int, int] = field(default_factory=dict)
    tried: list[int] = field(default_factory=lambda: [0] * MOST_DEPTH)
    right: list[int] = field(default_factory=lambda: [0] * MOST_DEPTH)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification."""
        self.drafted += drafted
        self.accepted += accepted
        self.steps += 1
        self.rows += drafted + 1
        self.rollbacks += accepted < drafted
        self.depths[drafted] = self.depths.get(drafted, 0) + 1
        for i in range(min(drafted, accepted + 1)):
            self.tried[i] += 1
            self.right[i] += i < accepted

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``per_step`` is tokens a verification yields."""
        values = dataclasses.asdict(self)
        values["depths"] = {str(depth): count for depth, count in sorted(self.depths.items())}
        values["per_step"] = (self.accepted + self.steps) / self.steps if self.steps else None
        return values


class Speculator:
    """Drafting and verifying for one engine; made by the engine where its configuration names a drafter.

    Args:
        draft: the second engine of drafter ``model``. costs: None takes what was tuned for this chip, else a
            guess (`costs_from` and, for the drafts, `draft_from` say which).
        frequent: ids by falling frequency, of which ``draft_vocab`` takes the first; None takes the tokenizer's own
            order, in which byte-pair merges, learned most frequent first, stand.

    Raises:
        VariantUnsupported: the drafter cannot run with this model or these settings.
    """

    def __init__(
        self,
        engine: Engine,
        draft: Engine | None = None,
        costs: Costs | None = None,
        frequent: Sequence[int] | None = None,
    ):
        self.engine = engine
        self.config: SpeculativeConfig = engine.engine.speculative
        name = self.config.drafter
        self.costs_from = self.draft_from = "given"
        if costs is None:
            costs = self._measured(name)
        self.drafter = self._drafter(name, draft, frequent)
        recorded = engine.trace == "replay" and not self.config.exact_verify and engine.trusts("recorded_rows")
        rollback = self._rollback(costs)
        self.costs = costs.taking_back_by("replay" if recorded else rollback)
        self.depth = self.config.depth
        """Drafts of a step where no controller chooses."""
        self.controller = DepthController(self.costs, self.config.depth) if self.config.adaptive else None
        # Where no depth can pay even the head's own pass over the prompt is saved.
        self.idle = self.controller is not None and not self.controller.can_pay()
        self.records = recorded and not self.idle
        """Whether greedy verifications are to be recorded passes (`engine.replay.RowsReplay`)."""
        self.wants_hidden = name == "mtp" and not self.idle
        self.verifier = Verifier(engine, rollback, self.config.exact_verify, self.wants_hidden)
        self.judge: Callable[[Sequence[int], Sequence[int]], int] = agreed
        self.counts = Counts()
        self._history: list[int | mx.array] = []
        self._device_from = 0
        self._misses = self._scored = 0
        self._forced = None if self.config.force == "none" else float(self.config.force)
        self._coins = np.random.default_rng(0)

    def _measured(self, name: str) -> Costs:
        """Costs of the tuned file; a guess where it says nothing, and `costs_from` and `draft_from` say so."""
        guess, measured = GUESSED[self.engine.device], self.engine.tuned.costs or {}
        found = draft_cost(
            measured.get("draft") or {}, name, self.config.draft_vocab, self.engine.model.weights.lm_head.shape[0]
        )
        self.costs_from = "tuned" if measured else "untuned"
        self.draft_from = "untuned" if found is None else "tuned"
        costs = dataclasses.replace(guess, draft=guess.drafting(1) * DRAFT_COST[name] if found is None else found)
        if not measured:
            return costs
        costs = dataclasses.replace(costs, **{key: measured[key] for key in ("replay", "states")})
        return dataclasses.replace(costs, rows=tuple(measured["rows"]))

    def _drafter(self, name: str, draft: Engine | None, frequent: Sequence[int] | None) -> Drafter:
        engine = self.engine
        if name == "ngram":
            return NgramDrafter()
        if name == "model":
            return ModelDrafter(_fitting(draft, engine))
        if engine.model.weights.mtp is None:
            raise VariantUnsupported(
                "speculative", "mtp", "these weights have no draft head; get it with: python -m engine fetch mtp"
            )
        most = self.config.draft_vocab
        if most >= engine.vocabulary:
            # The whole vocabulary under another name: a comparison with it would be one with itself.
            raise VariantUnsupported(
                "speculative",
                f"draft_vocab {most}",
                f"the model has {engine.vocabulary} tokens; take fewer, or 0 for all of them",
            )
        if most:
            frequent = (range(engine.vocabulary) if frequent is None else frequent)[:most]
        return MtpDrafter(engine.model, engine.dtype, engine.engine.cache.step, frequent if most else None)

    def _rollback(self, costs: Costs) -> str:
        """The named way of taking rows back, or the cheaper: `states` costs on every row, `replay` on a rejection."""
        if self.config.rollback != "best":
            return self.config.rollback
        return "states" if costs.states * (self.config.depth + 1) < costs.replay else "replay"

    # -- the sequence ----------------------------------------------------------------------

    def observe(self, tokens: Sequence[int | mx.array], hidden: mx.array | None) -> None:
        """Rows that entered the cache: their tokens (on the host or ``[1]`` on the device) and hidden rows."""
        if self.idle:
            return
        self._history += tokens
        self.drafter.observe(tokens, hidden)

    def missed(self, tokens: Sequence[int]) -> None:
        """Rows that entered the cache by recorded steps, of whose hidden rows at most the last is there."""
        if not self.idle:
            self._history += tokens
            if isinstance(self.drafter, MtpDrafter):
                self.drafter.skipped()

    def history(self) -> list[int]:
        """Ids of the cached tokens, as far back as they are known."""
        for i in range(self._device_from, len(self._history)):
            token = self._history[i]
            if isinstance(token, mx.array):
                self._history[i] = int(token.item())  # pyright: ignore[reportArgumentType]
        self._device_from = len(self._history)
        return self._history  # pyright: ignore[reportReturnType]

    def snapshot(self) -> Any:
        """Where drafting stands."""
        return tuple(self._history), self.drafter.snapshot()

    def restore(self, snapshot: Any, position: int) -> None:
        """Back to a snapshot; None for a cache of `position` tokens whose past is not known."""
        tokens, mark = snapshot or ([], None)
        self._history, self._device_from, self._misses = [*tokens], 0, 0
        self.drafter.restore(mark, position)

    def arrays(self) -> list[mx.array]:
        """What the drafter holds on the device."""
        return self.drafter.arrays()

    def score(self, tokens: Sequence[int]) -> list[mx.array]:
        """Logits float32 of the first tokens in one verification, all kept; none if too few are given.

        Every number of rows takes its turn, ``depth + 1`` first: a step near its end verifies fewer.
        """
        count = self.config.depth + 1 - self._scored % self.config.depth
        if self.idle or len(tokens) < count:
            return []
        self._scored += 1
        fed = list(tokens[:count])
        verified = self.verifier.run(fed, True)
        self.observe(fed, verified.hidden)
        return [verified.chosen.astype(mx.float32)]

    def warm(self) -> None:
        """A verification of each number of rows that may come, so that short answers wait for no trace; then forget.

        A cache that has grown since, or a context twice as long, is traced anew where it comes up.
        """
        if not self.idle:
            for rows in range(2, self.config.depth + 2):
                self.verifier.run([0] * rows, False).choices()
        self.engine.reset()

    # -- decoding --------------------------------------------------------------------------

    def stream(
        self,
        token: int,
        limit: int,
        sampling: Sampling = GREEDY,
        key: mx.array | None = None,
        stops: frozenset[int] = frozenset(),
    ) -> Generator[int, None, None]:
        """Feed `token`, then yield `limit` ids, a stop id among them; ends after a stop id.

        When it ends or is closed, the cache holds every token handed out but the last, which stands in
        ``state["token"]``, to be fed next; closed among plain steps one or two more may be in flight.
        """
        left = limit
        while left > 0:
            keys = [None, None] if key is None else list(mx.random.split(key, 3))
            key = keys.pop() if key is not None else None
            with closing(self._step(token, left, sampling, keys, stops)) as made:
                for token in made:
                    left -= 1
                    yield token
                    if token in stops:
                        return

    def _step(
        self, token: int, left: int, sampling: Sampling, keys: Sequence[mx.array | None], stops: frozenset[int]
    ) -> Generator[int, None, None]:
        """One verification, or a burst of plain steps. keys: for the drafts, and for what is drawn after."""
        depth = self._depth(left)
        if depth:
            draft = self._propose(token, depth, sampling, keys[0])
            if draft is not None:
                self._misses = 0
                return self._verified(token, draft, sampling, keys[1], stops)
            self._misses += 1
        count = self._burst(depth, left)
        return self._plain(token, count, self._recorded(count, left, sampling), sampling, keys[1])

    def _depth(self, left: int) -> int:
        engine = self.engine
        room = engine.config.max_position_embeddings - engine.position
        wanted = self.depth if self.controller is None else self.controller.next_depth()
        return max(0, min(wanted, left - 1, room - 1))

    def _burst(self, depth: int, left: int) -> int:
        """Plain steps until drafting is tried again: until the rest is over, or a few more after each miss."""
        if depth == 0:
            resting = 0 if self.controller is None else self.controller.resting
            return min(left, resting or left)
        # Each return to the host costs the overlap of steps: with nothing found again and again, look less often.
        return min(left, 1 if self.controller is None else 1 << min(self._misses - 1, 4))

    def _propose(self, token: int, depth: int, sampling: Sampling, key: mx.array | None) -> Draft | None:
        draft = self.drafter.draft(self.history(), token, depth, sampling, key)
        if draft is None and self._forced is not None:
            # A measurement of forced acceptance must draft at every step.
            draft = Draft((token,) * depth)
        if draft is not None:
            self.engine.ops.recorder.record("draft", self.config.drafter, f"depth {len(draft)}")
        return draft

    def _recorded(self, count: int, left: int, sampling: Sampling) -> int:
        """How many of `count` plain steps are replayed: the head needs the hidden row before its next draft."""
        replay = self.engine.replay
        if replay is None or sampling.temperature:
            return 0
        if self._in_place:
            return count
        made = count - (self.wants_hidden and count < left)
        return made if made >= (1 if replay.running else LEAST_REPLAYED) else 0

    @property
    def _in_place(self) -> bool:
        """Whether plain steps and verifications are recorded alike, so that nothing is handed over between them."""
        return self.verifier.replay(2) is not None

    def _replayed(self, token: int, count: int) -> Generator[int, None, None]:
        """`count` steps of the recorded kind."""
        engine, pending, fed = self.engine, deque(), [token]
        keep = engine.engine.decode.in_flight if engine.engine.decode.feedback == "device" else 1
        before = engine.position
        engine.feed(token)
        try:
            for index in range(count):
                pending.append(engine._advance(False))
                while len(pending) >= (keep if index + 1 < count else 1):
                    current = pending.popleft()
                    fed.append(current.item())
                    self._count(current.finite)
                    yield fed[-1]
        finally:
            # Not after a fault, which leaves an empty cache; steps still in flight have fed tokens too.
            if engine.position > before:
                rows, replay = [*fed, *(each.item() for each in pending)][:-1], engine.replay
                if self.wants_hidden and isinstance(replay, RowsReplay) and replay.running:
                    if rows[:-1]:
                        self.missed(rows[:-1])
                    self.observe(rows[-1:], replay.hidden())
                else:
                    self.missed(rows)

    def _plain(
        self, token: int, count: int, recorded: int, sampling: Sampling, key: mx.array | None
    ) -> Generator[int, None, None]:
        """`count` steps without drafts, in flight as the configuration says; the first `recorded` are replayed."""
        engine = self.engine
        if recorded:
            with closing(self._replayed(token, recorded)) as made:
                for token in made:
                    yield token
            count -= recorded
            if not count:
                return
        engine.feed(token)
        keep = engine.engine.decode.in_flight if engine.engine.decode.feedback == "device" else 1
        draws, pending = engine._draws(sampling, key), deque()
        for index in range(count):
            pending.append(next(draws))
            if len(pending) >= keep or index + 1 == count:
                yield from self._read(pending, keep if index + 1 < count else 1)

    def _read(self, pending: deque, keep: int) -> Iterator[int]:
        while len(pending) >= keep:
            current, finite = pending.popleft()
            token = int(current.item())
            self._count(finite)
            yield token

    def _count(self, finite: Any) -> None:
        """A token made without drafts has arrived; `finite` tells of its logits."""
        if not finite.item():
            self.engine._give_up("a logit")
        self.counts.plain += 1
        if self.controller is not None:
            self.controller.rest(1)

    def _verified(
        self, token: int, draft: Draft, sampling: Sampling, key: mx.array | None, stops: frozenset[int]
    ) -> Generator[int, None, None]:
        """One verification: its tokens, in order."""
        sampled = sampling.temperature > 0
        recorded = not sampled and self.verifier.replay(len(draft) + 1) is not None
        if recorded:
            # The host feeds recorded passes; what it has read is not read again.
            ids = draft.tokens()
            draft, fed = Draft(tuple(ids)), [token, *ids]
        else:
            fed = mx.concatenate([mx.array([token], dtype=mx.uint32), draft.ids])
        verified = self.verifier.run(fed, sampled, recorded)
        drafts, accepted, following = self._judged(verified, draft, sampling, key, stops)
        self.counts.add(len(drafts), accepted)
        if self.controller is not None:
            self.controller.saw(len(drafts), accepted)
        made = [*drafts[:accepted], following]
        self.verifier.keep(verified, len(made))
        handed = 0
        try:
            for each in made:
                handed += 1
                yield each
        finally:
            # Closed within the draft: what was not handed out is taken back too.
            self.verifier.keep(verified, handed)
            self.engine.feed(made[handed - 1])
            hidden = None if verified.hidden is None else verified.hidden[:, :handed]
            self.observe([token, *made[: handed - 1]], hidden)

    def _judged(
        self, verified: Verified, draft: Draft, sampling: Sampling, key: mx.array | None, stops: frozenset[int]
    ) -> tuple[list[int], int, int]:
        """Drafts, how many are kept, and the token after them; read back in one wait."""
        if sampling.temperature:
            return self._sampled(verified, draft, sampling, key, stops)
        if verified.start is not None:
            mx.eval(verified.chosen, verified.finite, draft.ids)
        self._check(verified)
        drafts, choices = draft.tokens(), verified.choices()
        accepted = self.judge(drafts, choices) if self._forced is None else self._toss(len(drafts))
        return _stopped(drafts, accepted, choices[accepted], stops)

    def _sampled(
        self, verified: Verified, draft: Draft, sampling: Sampling, key: mx.array | None, stops: frozenset[int]
    ) -> tuple[list[int], int, int]:
        assert key is not None
        target = mx.softmax(kept_scores(verified.chosen, sampling), axis=-1)
        proposal = draft.proposal
        if proposal is None:
            every = mx.arange(target.shape[-1], dtype=mx.uint32)
            proposal = (every[None] == draft.ids[:, None]).astype(mx.float32)
        kept, following = accept_sampled(target, proposal, draft.ids, key)
        drafts = draft.tokens()
        self._check(verified)
        accepted = int(kept.item())  # pyright: ignore[reportArgumentType]
        after = int(following.item())  # pyright: ignore[reportArgumentType]
        if self._forced is not None:
            accepted = self._toss(len(drafts))
            after = int(mx.argmax(verified.chosen[accepted]).item())  # pyright: ignore[reportArgumentType]
        return _stopped(drafts, accepted, after, stops)

    def _check(self, verified: Verified) -> None:
        if not verified.finite.item():
            self.engine._give_up(f"a logit of the {verified.rows} rows from position {verified.position}")

    def _toss(self, drafted: int) -> int:
        """Forced acceptance: leading drafts kept, each with the forced probability, whatever the model says."""
        assert self._forced is not None
        wrong = np.flatnonzero(self._coins.random(drafted) >= self._forced)
        return int(wrong[0]) if wrong.size else drafted


def _stopped(drafts: list[int], accepted: int, following: int, stops: frozenset[int]) -> tuple[list[int], int, int]:
    """A stop id among the kept drafts becomes the token after them: nothing past it counts or stays."""
    for index in range(accepted):
        if drafts[index] in stops:
            return drafts, index, drafts[index]
    return drafts, accepted, following


def _fitting(draft: Engine | None, engine: Engine) -> Engine:
    def refuse(reason: str) -> VariantUnsupported:
        return VariantUnsupported("speculative", "model", reason)

    if draft is None:
        raise refuse("it takes a second, smaller engine: Engine(..., draft=draft_engine(folder, tokenizer))")
    if draft is engine or draft.speculator is not None:
        raise refuse("the drafter must be another engine that does not draft itself")
    if (draft.vocabulary, draft.config.eos_token_ids) != (engine.vocabulary, engine.config.eos_token_ids):
        raise refuse(
            f"the drafter has {draft.vocabulary} tokens and ends with {list(draft.config.eos_token_ids)}, the model "
            f"{engine.vocabulary} and {list(engine.config.eos_token_ids)}: both need the same tokenizer"
        )
    return draft
