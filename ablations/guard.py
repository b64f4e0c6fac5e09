"""The quality guard: is an arm still right? Mathematics on logits and arrays, nothing else.

Two guards. `LogitGuard` compares teacher-forced logits of an arm with those of the reference arm on real text:
perplexity, top-1 agreement, Kullback-Leibler divergence. It fits trained weights. On synthetic weights logits mean
nothing (random layers amplify rounding), so `synthetic_check` compares layer by layer on common inputs, and end to
end against the baseline's own error. Either gives a `Check`, which blocks every claim of speed unless it passed.

Logits come in chunks of positions: 2,048 positions of the full vocabulary are 2 GB in float32, so a chunk is
reduced to a few figures a position and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy import special

_ROWS = 8
"""Positions reduced at a time: at the full vocabulary their float64 copies (16 MB each) still fit a processor's caches,
which makes the reduction several times as fast as by large chunks."""

_PUBLISHED = 192
"""Positions of the published check, reported apart so that the two stand side by side."""

_PUBLISHED_FIGURES = ("perplexity_ratio", "perplexity_ratio_upper", "top1", "kl_mean", "kl_p999")


class GuardError(ValueError):
    """Inputs of the guard that do not fit together; the message names them."""


@dataclass(frozen=True)
class Thresholds:
    """Limits of the logit guard.

    Attributes:
        perplexity_ratio: the upper 95 % bound of arm over reference may not exceed it.
        top1: least share of equal top-ranked tokens outside near-ties.
        near_tie: gap between the reference's two best logits under which their order is a coin toss. Logits
            between 16 and 32 are 1/8 apart in bfloat16; two of them rounded against each other move by 1/4.
        kl_factor: the 99.9th percentile of the divergence may be this many times that of a rerun of the reference
            (same weights and type, another chunking).
        kl_floor: nats allowed in any case, for a rerun that came out bit-equal or was not made (float32).
        batch: neighbouring positions whose mean is one unit of the interval.
        min_positions: fewer positions cannot pass.
    """

    perplexity_ratio: float = 1.005
    top1: float = 0.995
    near_tie: float = 0.25
    kl_factor: float = 10.0
    kl_floor: float = 1e-6
    batch: int = 32
    min_positions: int = 192


@dataclass(frozen=True)
class Check:
    """A guard's answer. name: which guard ran. reason: one line, also when passed. figures: what was measured."""

    name: str
    passed: bool
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The form kept in a sample row's ``check``."""
        return asdict(self)


# -- logits ---------------------------------------------------------------------------------------


@dataclass
class LogitGuard:
    """Collects per-position figures from chunks of logits; `result` judges them.

    >>> guard = LogitGuard()
    >>> for reference, arm, targets in chunks: guard.update(reference, arm, targets)  # doctest: +SKIP
    >>> guard.result().to_dict()  # doctest: +SKIP
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    _parts: list[dict[str, np.ndarray]] = field(default_factory=list, repr=False)
    _vocabulary: int = field(default=0, repr=False)

    def update(
        self,
        reference: np.ndarray,
        arm: np.ndarray,
        targets: Sequence[int] | np.ndarray,
        rerun: np.ndarray | None = None,
    ) -> None:
        """Add a chunk of positions, in the order of the text.

        Args:
            reference, arm: logits ``[positions, vocabulary]``, any float type.
            targets: the true next token of each position.
            rerun: logits of the reference computed once more with other rounding; in all chunks or in none.

        Raises:
            GuardError: shapes that differ, a target outside the vocabulary, a rerun in some chunks only.
        """
        targets = np.asarray(targets, dtype=np.int64)
        self._require(reference, arm, targets, rerun)
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            self._parts.append(
                _position_figures(reference[rows], arm[rows], targets[rows], None if rerun is None else rerun[rows])
            )

    def _require(self, reference: np.ndarray, arm: np.ndarray, targets: np.ndarray, rerun: np.ndarray | None) -> None:
        if reference.ndim != 2:
            raise GuardError(f"reference logits have shape {reference.shape}; expected [positions, vocabulary]")
        for name, other in (("arm", arm), ("rerun", rerun)):
            if other is not None and other.shape != reference.shape:
                raise GuardError(f"{name} logits have shape {other.shape}, reference logits {reference.shape}")
        positions, vocabulary = reference.shape
        if targets.shape != (positions,):
            raise GuardError(f"{targets.size} targets for {positions} positions of logits")
        if positions and not (0 <= targets.min() and targets.max() < vocabulary):
            raise GuardError(f"a target lies outside the vocabulary of {vocabulary}")
        if self._vocabulary not in (0, vocabulary):
            raise GuardError(f"this chunk has a vocabulary of {vocabulary}, earlier ones of {self._vocabulary}")
        if self._parts and ("kl_rerun" in self._parts[0]) != (rerun is not None):
            raise GuardError("a rerun must come with every chunk or with none")
        self._vocabulary = vocabulary

    def result(self) -> Check:
        """Judge all positions so far by the thresholds."""
        if not self._parts:
            return Check("logits", False, "no positions were compared", {"positions": 0})
        figures = {key: np.concatenate([part[key] for part in self._parts]) for key in self._parts[0]}
        return _judge_logits(figures, self.thresholds)


def quality_check(chunks: Iterable[tuple[np.ndarray, ...]], thresholds: Thresholds | None = None) -> Check:
    """Run the logit guard over an iterator of ``(reference, arm, targets)`` or ``(…, rerun)``; see `LogitGuard`."""
    guard = LogitGuard(thresholds or Thresholds())
    for chunk in chunks:
        guard.update(*chunk)
    return guard.result()


def _position_figures(
    reference: np.ndarray, arm: np.ndarray, targets: np.ndarray, rerun: np.ndarray | None
) -> dict[str, np.ndarray]:
    rows = np.arange(len(targets))
    log_p, log_q = _log_softmax(reference), _log_softmax(arm)
    p = np.exp(log_p)
    best = np.argmax(reference, axis=-1)
    others = log_p.copy()
    others[rows, best] = -np.inf
    figures = {
        "loss_reference": -log_p[rows, targets],
        "loss_arm": -log_q[rows, targets],
        "kl": _divergence(p, log_p, log_q),
        "agree": best == np.argmax(arm, axis=-1),
        "gap": log_p[rows, best] - others.max(axis=-1),
    }
    if rerun is not None:
        figures["kl_rerun"] = _divergence(p, log_p, _log_softmax(rerun))
    return figures


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    # A row that is not finite becomes NaN here and is counted by the judge, not hidden by a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = np.subtract(logits, logits.max(axis=-1, keepdims=True), dtype=np.float64)
        shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return shifted


def _divergence(p: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p, q) in nats per row; rounding can leave -1e-17, which is 0."""
    with np.errstate(invalid="ignore"):
        terms = log_p - log_q
        terms *= p
        # A token that the reference rules out (a masked one has logit -inf) adds nothing, whatever the arm says.
        terms[p == 0] = 0.0
        return np.maximum(terms.sum(axis=-1), 0.0)


def _judge_logits(figures: dict[str, np.ndarray], limits: Thresholds) -> Check:
    measured: dict[str, Any] = {"positions": len(figures["kl"]), "thresholds": asdict(limits)}
    for side in ("reference", "arm"):
        bad = ~np.isfinite(figures[f"loss_{side}"])
        if side == "arm":
            bad |= ~np.isfinite(figures["kl"])
        if bad.any():
            reason = f"{side} logits are not finite at {int(bad.sum())} positions, first at {int(np.argmax(bad))}"
            return Check("logits", False, reason, measured)
    measured |= _perplexity(figures, limits.batch) | _agreement(figures, limits.near_tie) | _kl(figures, limits)
    if measured["positions"] >= _PUBLISHED:
        first = {key: values[:_PUBLISHED] for key, values in figures.items()}
        opening = _perplexity(first, limits.batch) | _agreement(first, limits.near_tie) | _kl(first, limits)
        measured["first_192"] = {key: opening[key] for key in _PUBLISHED_FIGURES}
    faults = list(_logit_faults(measured, limits))
    if faults:
        return Check("logits", False, "; ".join(faults), measured)
    reason = (
        f"{measured['positions']} positions: perplexity ratio at most {measured['perplexity_ratio_upper']:.4f}, "
        f"top-1 {measured['top1_outside_ties']:.2%} outside near-ties"
    )
    return Check("logits", True, reason, measured)


def _logit_faults(measured: dict[str, Any], limits: Thresholds) -> Iterable[str]:
    if measured["positions"] < limits.min_positions:
        yield f"{measured['positions']} positions compared; at least {limits.min_positions} needed"
    upper = measured["perplexity_ratio_upper"]
    if upper is None:
        yield f"too few positions for a bound on the perplexity ratio (two batches of {limits.batch} needed)"
    elif upper > limits.perplexity_ratio:
        yield f"perplexity ratio may be {upper:.4f} (95 % bound); limit {limits.perplexity_ratio}"
    agreement = measured["top1_outside_ties"]
    if agreement is None:
        yield "every position is a near-tie, so top-1 agreement says nothing"
    elif agreement < limits.top1:
        yield f"top-1 agreement outside near-ties is {agreement:.2%}; at least {limits.top1:.2%} needed"
    if measured["kl_p999"] > measured["kl_limit"]:
        yield f"99.9th percentile of KL is {measured['kl_p999']:.2e} nats; limit {measured['kl_limit']:.2e}"


def _perplexity(figures: dict[str, np.ndarray], batch: int) -> dict[str, Any]:
    """Perplexity ratio with its one-sided 95 % upper bound.

    Paired by position: the text's own difficulty, by far the largest scatter, drops out. Neighbouring positions share
    context and cache, so their errors are correlated; means over batches of neighbours are close to independent and
    close to normal, which is what a t bound asks for. A bootstrap over positions would take them as independent.
    A shorter rest at the end joins the last whole batch.
    """
    difference = figures["loss_arm"] - figures["loss_reference"]
    batches = len(difference) // batch
    upper = None
    if batches >= 2:
        whole = difference[: (batches - 1) * batch].reshape(batches - 1, batch).mean(axis=1)
        means = np.append(whole, difference[(batches - 1) * batch :].mean())
        error = means.std(ddof=1) / math.sqrt(batches)
        upper = _exp(float(means.mean() + special.stdtrit(batches - 1, 0.95) * error))
    return {
        "perplexity_reference": _exp(float(figures["loss_reference"].mean())),
        "perplexity_arm": _exp(float(figures["loss_arm"].mean())),
        "perplexity_ratio": _exp(float(difference.mean())),
        "perplexity_ratio_upper": upper,
    }


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _agreement(figures: dict[str, np.ndarray], near_tie: float) -> dict[str, Any]:
    clear = figures["gap"] > near_tie
    agree = figures["agree"]
    return {
        "top1": float(agree.mean()),
        "top1_outside_ties": float(agree[clear].mean()) if clear.any() else None,
        "near_ties": int((~clear).sum()),
    }


def _kl(figures: dict[str, np.ndarray], limits: Thresholds) -> dict[str, Any]:
    rerun = figures.get("kl_rerun")
    tail = None if rerun is None else float(np.percentile(rerun, 99.9))
    # A rerun with NaN proves nothing; the floor then applies.
    if tail is not None and not math.isfinite(tail):
        tail = None
    return {
        "kl_mean": float(figures["kl"].mean()),
        "kl_p999": float(np.percentile(figures["kl"], 99.9)),
        "kl_p999_rerun": tail,
        "kl_limit": max(limits.kl_factor * (tail or 0.0), limits.kl_floor),
    }


# -- synthetic weights ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SyntheticThresholds:
    """Limits of the guard on synthetic weights.

    Attributes:
        relative_rms: of each layer's output, cache and state on common inputs.
        router_tie: gap in router logits to rank 8 or 9 under which an expert may be in or out.
        baseline_factor: the arm's end-to-end error may be this many times the baseline's own, both against the same
            float32 pass.
        error_floor: end-to-end relative RMS error that always passes; two exact float32 arms differ by luck alone.
    """

    relative_rms: float = 2e-2
    router_tie: float = 0.05
    baseline_factor: float = 1.25
    error_floor: float = 1e-4

    @classmethod
    def for_dtype(cls, dtype: str) -> SyntheticThresholds:
        """The limits for activations of ``"bfloat16"``, ``"float16"`` or ``"float32"``.

        Raises:
            GuardError: another type.
        """
        if dtype in ("bfloat16", "float16"):
            return cls()
        if dtype == "float32":
            return cls(relative_rms=1e-3, router_tie=1e-3)
        raise GuardError(f"no thresholds for activations of type {dtype!r}; known: bfloat16, float16, float32")


@dataclass(frozen=True)
class LayerPair:
    """One tensor of one layer, computed by both arms from common inputs. part: output, keys, values, state, conv."""

    layer: int
    part: str
    reference: np.ndarray
    arm: np.ndarray


@dataclass(frozen=True)
class RoutedPair:
    """Routing of one layer. logits: reference router logits ``[tokens, experts]`` (or log-probabilities);
    experts: ids the arm chose ``[tokens, k]``, in any order."""

    layer: int
    logits: np.ndarray
    experts: np.ndarray


@dataclass(frozen=True)
class EndToEnd:
    """Final logits of three passes over the same tokens: float32, the arm, the baseline. Same shape."""

    float32: np.ndarray
    arm: np.ndarray
    baseline: np.ndarray


def relative_rms(value: np.ndarray, reference: np.ndarray) -> float:
    """Root mean square of the difference over that of `reference`; NaN counts as infinite.

    Raises:
        GuardError: shapes that differ, or nothing to compare.
    """
    if value.shape != reference.shape:
        raise GuardError(f"shapes {value.shape} and {reference.shape} differ")
    if value.size == 0:
        raise GuardError("nothing to compare: the arrays are empty")
    exact = reference.astype(np.float64)
    difference = float(np.sqrt(np.mean((value.astype(np.float64) - exact) ** 2)))
    scale = float(np.sqrt(np.mean(exact**2)))
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def routing_differences(pair: RoutedPair, tie: float) -> tuple[int, int]:
    """Tokens whose routed set differs from the reference's: those a near-tie explains, and those it does not.

    An expert swapped in or out is explained if the reference's logit for it is within `tie` of the boundary
    between the last chosen and the first left out.

    Raises:
        GuardError: shapes that do not fit, an expert named twice for a token or outside the range.
    """
    logits, chosen = np.asarray(pair.logits, dtype=np.float64), np.asarray(pair.experts, dtype=np.int64)
    if logits.ndim != 2 or chosen.ndim != 2 or len(logits) != len(chosen) or chosen.shape[1] > logits.shape[1]:
        raise GuardError(f"layer {pair.layer}: router logits {logits.shape} do not fit chosen experts {chosen.shape}")
    (tokens, experts), k = logits.shape, chosen.shape[1]
    if chosen.size and not (0 <= chosen.min() and chosen.max() < experts):
        raise GuardError(f"layer {pair.layer}: an expert id lies outside 0 to {experts - 1}")
    ranked = np.sort(logits, axis=1)[:, ::-1]
    last_in, first_out = ranked[:, k - 1], ranked[:, min(k, experts - 1)]
    mine = np.zeros((tokens, experts), dtype=bool)
    np.put_along_axis(mine, chosen, True, axis=1)
    if (mine.sum(axis=1) != k).any():
        raise GuardError(f"layer {pair.layer}: a token names an expert twice")
    # What is above the first left out must be in, what is below the last chosen must be out, up to the tie.
    wrongly_out = ~mine & (logits > (first_out + tie)[:, None])
    wrongly_in = mine & (logits < (last_in - tie)[:, None])
    unexplained = (wrongly_out | wrongly_in).any(axis=1)
    exact = np.where(mine, logits, np.inf).min(axis=1) >= np.where(mine, -np.inf, logits).max(axis=1)
    return int((~exact & ~unexplained).sum()), int(unexplained.sum())


def synthetic_check(
    layers: Iterable[LayerPair],
    routed: Iterable[RoutedPair] = (),
    end_to_end: EndToEnd | None = None,
    thresholds: SyntheticThresholds | None = None,
) -> Check:
    """Layer-by-layer guard for weights that were never trained.

    Raises:
        GuardError: arrays that do not fit together.
    """
    limits = thresholds or SyntheticThresholds()
    figures: dict[str, Any] = {"thresholds": asdict(limits)}
    faults = [
        *_layer_faults(layers, limits, figures),
        *_routing_faults(routed, limits, figures),
        *_end_faults(end_to_end, limits, figures),
    ]
    if not figures["tensors"]:
        faults.append("no layer was compared")
    if faults:
        return Check("layers", False, "; ".join(faults), figures)
    reason = (
        f"{figures['tensors']} tensors within {figures['worst_relative_rms']:.1e} relative RMS, "
        f"{figures['router_near_ties']} routed sets differ by a near-tie"
    )
    return Check("layers", True, reason, figures)


def _layer_faults(layers: Iterable[LayerPair], limits: SyntheticThresholds, figures: dict[str, Any]) -> list[str]:
    errors: dict[str, float] = {}
    for pair in layers:
        name = f"layer {pair.layer} {pair.part}"
        try:
            errors[name] = relative_rms(np.asarray(pair.arm), np.asarray(pair.reference))
        except GuardError as error:
            raise GuardError(f"{name}: {error}") from None
    worst = max(errors, key=lambda name: errors[name]) if errors else None
    figures |= {"tensors": len(errors), "worst": worst, "worst_relative_rms": errors[worst] if worst else None}
    over = [name for name, value in errors.items() if value > limits.relative_rms]
    if not over:
        return []
    # The first in order is the cause to look at; the worst is often one of its consequences.
    return [
        f"{over[0]} is off by {errors[over[0]]:.1e} relative RMS (limit {limits.relative_rms:.0e}); "
        f"{len(over)} of {len(errors)} tensors are over"
    ]


def _routing_faults(routed: Iterable[RoutedPair], limits: SyntheticThresholds, figures: dict[str, Any]) -> list[str]:
    ties, tokens, faults = 0, 0, []
    for pair in routed:
        explained, wrong = routing_differences(pair, limits.router_tie)
        ties += explained
        tokens += len(pair.experts)
        if wrong:
            faults.append(f"layer {pair.layer} routes {wrong} tokens to other experts without a near-tie")
    figures |= {"routed_sets": tokens, "router_near_ties": ties}
    return faults


def _end_faults(passes: EndToEnd | None, limits: SyntheticThresholds, figures: dict[str, Any]) -> list[str]:
    if passes is None:
        return []
    arm = relative_rms(passes.arm, passes.float32)
    baseline = relative_rms(passes.baseline, passes.float32)
    figures |= {"end_to_end_error": arm, "baseline_error": baseline}
    if not math.isfinite(baseline):
        return ["the baseline's end-to-end error is not finite, so there is nothing to compare with"]
    if arm <= max(limits.baseline_factor * baseline, limits.error_floor):
        return []
    return [f"end-to-end error {arm:.2e} is over {limits.baseline_factor} times the baseline's own {baseline:.2e}"]


# -- greedy tokens --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """Where two greedy sequences part. gap: the reference's logit for its own token minus that for the arm's, in
    logits (None if the logits are not known); near_tie: whether the gap explains it."""

    index: int
    reference_token: int
    arm_token: int
    gap: float | None
    near_tie: bool | None


def first_divergence(
    reference: Sequence[int],
    arm: Sequence[int],
    logits: np.ndarray | None = None,
    near_tie: float = Thresholds.near_tie,
) -> Divergence | None:
    """First index at which greedy tokens differ, or None if they agree over the shorter length.

    Args:
        logits: the reference's logits ``[tokens, vocabulary]``, row i for the choice of token i.

    Raises:
        GuardError: fewer rows of logits than the divergence needs.
    """
    for index, (expected, got) in enumerate(zip(reference, arm)):
        if expected == got:
            continue
        if logits is None:
            return Divergence(index, expected, got, None, None)
        if index >= len(logits):
            raise GuardError(f"the tokens part at {index}, but there are only {len(logits)} rows of logits")
        gap = float(logits[index, expected]) - float(logits[index, got])
        return Divergence(index, expected, got, gap, gap <= near_tie)
    return None
