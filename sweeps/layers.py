"""MLX-LM's forward pass a layer at a time, and an engine's layers on the very same inputs.

Whole passes over random weights amplify rounding until two correct implementations share nothing. A layer does not:
given MLX-LM's hidden rows and MLX-LM's cache before a layer, an engine's layer must give the same hidden rows, the
same new keys and values or the same state. What is compared for every layer:

* ``output``, and the update (output minus input) where the rounding of the residual stream leaves it meaningful;
* ``keys`` and ``values`` of the new rows, or ``conv`` and ``state``;
* ``experts``: the mixture's output on MLX-LM's own rows before it, and its worst row alone, since a fault in one
  expert drowns in the mean over rows that never met it;
* which experts were chosen for those rows.

Rows whose eighth and ninth expert nearly tie may take either; where an error beyond the limit coincides with such a
tie, the row is left out of ``output`` and counted (`ties`), up to half of the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from ablations.guard import LayerPair, RoutedPair, SyntheticThresholds, relative_rms
from engine.generate import Engine

TIED_SHARE = 0.5
"""Largest share of rows that near-ties may excuse in one layer."""

BF16_ROUNDING = 2.0**-9
"""Largest relative error of rounding to bfloat16."""

UPDATE_FACTOR, ROW_FACTOR = 2.0, 4.0
"""In bfloat16, an update or a single row may be off by these multiples of the limit for a whole output."""


@dataclass
class Step:
    """One layer of MLX-LM over new rows: inputs, what it made of them, and its state before and after.

    before, middle, after: hidden rows ``[1, T, hidden]`` (middle: after the mixer). state: (keys, values) up to
    `position`, or (conv, recurrent), before the layer; None if empty. made: the same after it, keys and values of the
    new rows only. router: logits ``[T, experts]``. chosen: expert ids ``[T, k]``. mixture: ``[1, T, hidden]``.
    """

    index: int
    position: int
    before: mx.array
    middle: mx.array
    after: mx.array
    state: tuple[mx.array, mx.array] | None
    made: tuple[mx.array, mx.array]
    router: mx.array
    chosen: mx.array
    mixture: mx.array


def steps(model: Any, cache: list[Any], tokens: Sequence[int]) -> Iterator[Step]:
    """Run `tokens` through an mlx_lm model with `cache`, giving every layer as it is done; the cache advances."""
    inner = model.language_model.model
    h = inner.embed_tokens(mx.array(list(tokens))[None])
    full = next((c for c, layer in zip(cache, inner.layers) if not layer.is_linear), None)
    linear = next((c for c, layer in zip(cache, inner.layers) if layer.is_linear), None)
    attention_mask = create_attention_mask(h, full) if full is not None else None
    linear_mask = create_ssm_mask(h, linear) if linear is not None else None
    for index, (layer, c) in enumerate(zip(inner.layers, cache)):
        start, state = _state(layer, c)
        x = layer.input_layernorm(h)
        mixed = layer.linear_attn(x, linear_mask, c) if layer.is_linear else layer.self_attn(x, attention_mask, c)
        middle = h + mixed
        x = layer.post_attention_layernorm(middle)
        mixture = layer.mlp(x)
        router = layer.mlp.gate(x)[0]
        scores = mx.softmax(router, axis=-1, precise=True)
        chosen = mx.argpartition(scores, kth=-layer.mlp.top_k, axis=-1)[..., -layer.mlp.top_k :]
        made = (
            (c[0], c[1]) if layer.is_linear else (c.keys[..., start : c.offset, :], c.values[..., start : c.offset, :])
        )
        after = middle + mixture
        mx.eval(after, made, router, chosen, mixture, middle, state or ())
        yield Step(index, start, h, middle, after, state, made, router, chosen, mixture)
        h = after


def _state(layer: Any, c: Any) -> tuple[int, tuple[mx.array, mx.array] | None]:
    if layer.is_linear:
        return 0, None if c[0] is None else (c[0], c[1])
    if not c.offset:
        return 0, None
    return c.offset, (c.keys[..., : c.offset, :], c.values[..., : c.offset, :])


class Recording:
    """What is the same for every arm that is held against one text: MLX-LM's passes over it, and the oracle's.

    Each part is made when it is first asked for, then kept. For 256 rows, or 8 single ones after them, of 40 layers of
    2048 with 30 recurrent states of 2 MiB, the steps hold 0.2 and 0.7 GB on the device; the logits of 256 rows are
    0.25 GB a model on the host. So drop it before anything is timed.

    Args:
        model: an mlx_lm model. tokens: with `context` 0 all of them go in passes of `chunk` (the prefill path); else
            the first `context` of them do, uncompared, and the rest a row at a time (the decode path).
        oracle: a float32 engine of reference ops, which is reset; None leaves out end-to-end errors.
    """

    def __init__(
        self, model: Any, tokens: Sequence[int], *, context: int = 0, chunk: int = 2048, oracle: Engine | None = None
    ):
        self.model, self.tokens, self.context, self.chunk, self.oracle = model, list(tokens), context, chunk, oracle

    @property
    def pieces(self) -> list[list[int]]:
        """The tokens of every compared pass."""
        if self.context:
            return [[token] for token in self.tokens[self.context :]]
        return _cut(self.tokens, self.chunk)

    @cached_property
    def steps(self) -> list[list[Step]]:
        """By pass, MLX-LM's layers in their order.

        MLX arrays are values: a state that is a view of MLX-LM's cache stays what it was when the cache advances.
        """
        cache = self._cache()
        return [list(steps(self.model, cache, piece)) for piece in self.pieces]

    @cached_property
    def baseline(self) -> np.ndarray:
        """Logits of the compared rows by MLX-LM's own pass, float32 ``[rows, its vocabulary]``."""
        cache, made = self._cache(), []
        for piece in self.pieces:
            rows = self.model(mx.array(piece)[None], cache=cache)[0].astype(mx.float32)
            mx.eval(rows, [c.state for c in cache])
            made.append(_host(rows))
        return np.concatenate(made)

    @cached_property
    def exact(self) -> np.ndarray:
        """The same by the oracle, in one pass, float32 ``[rows, vocabulary]``.

        Raises:
            ValueError: there is no oracle.
        """
        if self.oracle is None:
            raise ValueError("this recording has no oracle; give it one to compare end to end")
        self.oracle.reset()
        made = _host(self.oracle.logits(self.tokens, "prefill"))[self.context :]
        self.oracle.reset()
        return made

    def _cache(self) -> list[Any]:
        """MLX-LM's cache after the context, to go on from."""
        return copy.deepcopy(self._start)

    @cached_property
    def _start(self) -> list[Any]:
        cache = self.model.make_cache()
        for piece in _cut(self.tokens[: self.context], self.chunk):
            self.model(mx.array(piece)[None], cache=cache)
            mx.eval([c.state for c in cache])
        return cache


def _cut(tokens: list[int], chunk: int) -> list[list[int]]:
    return [tokens[at : at + chunk] for at in range(0, len(tokens), chunk)]


@dataclass
class Comparison:
    """Everything that was compared; `pairs` and `routed` are what `ablations.guard.synthetic_check` judges.

    rows: compared. ties: rows left out for a near-tie. worst: largest error of an update and of a mixture's row.
    distinct: how many different experts the text met in each layer.
    faults: what no pair can express, one line each.
    """

    pairs: list[LayerPair] = field(default_factory=list)
    routed: list[RoutedPair] = field(default_factory=list)
    rows: int = 0
    ties: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    distinct: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def compare(engine: Engine, recording: Recording, *, limits: SyntheticThresholds, judged: str = "engine") -> Comparison:
    """Give every layer of `engine` the inputs that MLX-LM's layer had.

    Args:
        engine: its own sequence stays untouched. recording: of an mlx_lm model of the same architecture.
        judged: ``"engine"``, or ``"baseline"`` where the engine is the oracle and MLX-LM is on trial.
    """
    made = Comparison()
    layers = [_Layer(engine, index, limits, judged) for index in range(engine.config.num_hidden_layers)]
    ends = _Ends(engine, judged)
    for piece, passed in zip(recording.pieces, recording.steps, strict=True):
        for step in passed:
            layers[step.index].add(step)
        ends.add(recording.model, piece, passed[-1].after)
        made.rows += len(piece)
    for layer in layers:
        layer.into(made)
    made.pairs += ends.pairs(len(layers))
    return made


class _Layer:
    """Collects one layer over all passes."""

    def __init__(self, engine: Engine, index: int, limits: SyntheticThresholds, judged: str):
        self.engine, self.index, self.limits, self.judged = engine, index, limits, judged
        self.bf16 = limits.relative_rms > 1e-2
        self.parts: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        self.gaps: list[np.ndarray] = []
        self.same: list[np.ndarray] = []
        self.routes: list[tuple[np.ndarray, np.ndarray]] = []
        self.used: set[int] = set()
        self.rounded = False

    def add(self, step: Step) -> None:
        engine, weights = self.engine, self.engine.model.weights.layers[self.index]
        full = engine.config.is_full_attention(self.index)
        out, state = engine.layer(self.index, step.before, step.state, step.position)
        x = engine.ops.norm(
            step.middle.astype(engine.dtype), weights.post_norm, engine.config.rms_norm_eps, rows=_rows(step)
        )
        router = engine.ops.linear(x, weights.experts.gate, rows=_rows(step))[0]
        k = engine.config.num_experts_per_tok
        chosen = engine.ops.route(router, k, engine.config.norm_topk_prob, rows=_rows(step)).ids
        mixture = engine.model.experts(weights.experts, x)
        mx.eval(out, state, router, chosen, mixture)
        self._put("output", step.after[0], out[0])
        self._put("before", step.before[0], step.before[0])
        self._put("experts", step.mixture[0], mixture[0])
        if full:
            end = step.position + _rows(step)
            for name, theirs, mine in zip(("keys", "values"), step.made, state):
                self._put(name, _by_row(theirs), _by_row(mine[..., step.position : end, :]))
        else:
            self._put("conv", step.made[0].reshape(1, -1), state[0].reshape(1, -1))
            self._put("state", step.made[1].reshape(1, -1), state[1].reshape(1, -1))
            self.rounded |= _is_rounded(state[1] if self.judged == "engine" else step.made[1])
        theirs, mine = _host(step.router), _host(router)
        self.gaps.append(_gap(theirs if self.judged == "engine" else mine, k))
        self.used.update(np.array(step.chosen).ravel().tolist())
        sets = np.sort(np.array(step.chosen), axis=1), np.sort(np.array(chosen), axis=1)
        self.same.append((sets[0] == sets[1]).all(axis=1))
        self.routes.append((theirs, sets[1]) if self.judged == "engine" else (mine, sets[0]))

    def _put(self, name: str, theirs: mx.array, mine: mx.array) -> None:
        both = self.parts.setdefault(name, ([], []))
        both[0].append(_host(theirs))
        both[1].append(_host(mine))

    def _pair(self, part: str, theirs: np.ndarray, mine: np.ndarray) -> LayerPair:
        reference, arm = (theirs, mine) if self.judged == "engine" else (mine, theirs)
        return LayerPair(self.index, part, reference, arm)

    def _judge(self, made: Comparison, what: str, error: float, factor: float) -> None:
        limit = self.limits.relative_rms * (factor if self.bf16 else 1.0)
        kind = what.split()[0]
        made.worst[kind] = max(made.worst.get(kind, 0.0), error)
        if error > limit:
            made.faults.append(f"layer {self.index}: {what} is off by {error:.1e} (limit {limit:.0e})")

    def into(self, made: Comparison) -> None:
        parts = {name: (np.concatenate(a), np.concatenate(b)) for name, (a, b) in self.parts.items()}
        before = parts.pop("before")[0]
        theirs, mine = parts.pop("output")
        gaps, same = np.concatenate(self.gaps), np.concatenate(self.same)
        tied = (_row_errors(theirs, mine) > self.limits.relative_rms) & (gaps <= self.limits.router_tie)
        made.ties += int(tied.sum())
        if tied.mean() > TIED_SHARE:
            made.faults.append(f"layer {self.index}: {tied.mean():.0%} of rows differ at near-ties of the router")
        kept = ~tied
        if kept.any():
            made.pairs.append(self._pair("output", theirs[kept], mine[kept]))
            change = theirs[kept] - before[kept]
            noise = BF16_ROUNDING * _rms(theirs[kept]) if self.bf16 else 0.0
            # The stream is rounded to bfloat16 on both sides; an update far below it carries that rounding.
            if noise <= 0.25 * self.limits.relative_rms * _rms(change):
                self._judge(made, "update", relative_rms(mine[kept] - before[kept], change), UPDATE_FACTOR)
        theirs, mine = parts.pop("experts")
        if same.any():
            theirs, mine = theirs[same], mine[same]
            errors = _row_errors(theirs, mine)
            made.pairs.append(self._pair("experts", theirs, mine))
            self._judge(made, f"mixture of row {int(np.argmax(errors))}", float(errors.max()), ROW_FACTOR)
        made.pairs += [self._pair(name, theirs, mine) for name, (theirs, mine) in parts.items()]
        if self.rounded:
            made.faults.append(f"layer {self.index}: the recurrent state was rounded to bfloat16; it must stay float32")
        made.distinct.append(len(self.used))
        logits, experts = (np.concatenate(column) for column in zip(*self.routes))
        made.routed.append(RoutedPair(self.index, logits, experts))


class _Ends:
    """Embedding and head on common inputs."""

    def __init__(self, engine: Engine, judged: str):
        self.engine, self.judged = engine, judged
        self.rows: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {"embedding": ([], []), "logits": ([], [])}

    def add(self, model: Any, tokens: Sequence[int], last: mx.array) -> None:
        engine, outer = self.engine, model.language_model
        ids = mx.array(list(tokens))
        self._put("embedding", outer.model.embed_tokens(ids), engine.model.embed(ids)[0])
        # The last row only: a chunk of full-vocabulary logits would be gigabytes.
        row = last[:, -1:]
        theirs = outer.lm_head(outer.model.norm(row))[0, :, : engine.vocabulary]
        self._put("logits", theirs, engine.model.head(row.astype(engine.dtype))[0, :, : engine.vocabulary])

    def _put(self, name: str, theirs: mx.array, mine: mx.array) -> None:
        self.rows[name][0].append(_host(theirs))
        self.rows[name][1].append(_host(mine))

    def pairs(self, layers: int) -> list[LayerPair]:
        made = []
        for name, (theirs, mine) in self.rows.items():
            both = np.concatenate(theirs), np.concatenate(mine)
            reference, arm = both if self.judged == "engine" else both[::-1]
            made.append(LayerPair(layers if name == "logits" else 0, name, reference, arm))
        return made


def _rows(step: Step) -> int:
    return step.before.shape[1]


def _by_row(x: mx.array) -> mx.array:
    """``[1, heads, n, dim]`` as ``[n, heads * dim]``."""
    return x[0].swapaxes(0, 1).reshape(x.shape[2], -1)


def _host(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def _gap(logits: np.ndarray, k: int) -> np.ndarray:
    """Distance between the last chosen and the first left out, ``[rows]``; infinite if none is left out."""
    if k >= logits.shape[1]:
        return np.full(len(logits), np.inf)
    ranked = np.sort(logits, axis=1)
    return ranked[:, -k] - ranked[:, -k - 1]


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def _row_errors(theirs: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Relative RMS error of each row; not finite counts as infinite."""
    return np.array([relative_rms(b, a) for a, b in zip(theirs, mine)])


def _is_rounded(state: mx.array) -> bool:
    """Whether (nearly) every element is a bfloat16 value: the low half of its float32 word is empty."""
    if state.dtype != mx.float32:
        return True
    words = state.view(mx.uint32)
    filled = int(mx.sum(words != 0))
    exact = int(mx.sum((words != 0) & ((words & 0xFFFF) == 0)))
    return filled > 0 and exact > 0.9 * filled
