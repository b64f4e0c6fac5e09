"""The quality guard's mathematics: honest rounding passes, planted faults are blocked with the right reason."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from ablations.guard import (
    Check,
    EndToEnd,
    GuardError,
    LayerPair,
    LogitGuard,
    RoutedPair,
    SyntheticThresholds,
    Thresholds,
    first_divergence,
    quality_check,
    relative_rms,
    routing_differences,
    synthetic_check,
)

POSITIONS, VOCABULARY = 2048, 400


def rounded(logits: np.ndarray, seed: int, size: float = 0.01) -> np.ndarray:
    """What another order of additions does to logits."""
    rng = np.random.default_rng(seed)
    return (logits + rng.normal(0, size, logits.shape)).astype(np.float32)


@pytest.fixture(scope="module")
def text() -> dict[str, np.ndarray]:
    """A model that is as sure of itself as it should be: targets are drawn from its own distribution."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (POSITIONS, VOCABULARY)).astype(np.float32)
    gumbel = rng.gumbel(size=logits.shape)
    return {"reference": logits, "targets": np.argmax(logits + gumbel, axis=1), "rerun": rounded(logits, 1)}


def judged(text: dict[str, np.ndarray], arm: np.ndarray, chunk: int = 500, rerun: bool = True, **limits) -> Check:
    def chunks():
        for start in range(0, POSITIONS, chunk):
            rows = slice(start, start + chunk)
            parts = text["reference"][rows], arm[rows], text["targets"][rows]
            yield (*parts, text["rerun"][rows]) if rerun else parts

    return quality_check(chunks(), Thresholds(**limits))


def test_honest_rounding_passes_with_figures(text):
    check = judged(text, rounded(text["reference"], 2))
    assert check.passed, check.reason
    figures = check.figures
    assert figures["positions"] == POSITIONS
    assert abs(figures["perplexity_ratio"] - 1) < 0.001 < figures["perplexity_ratio_upper"]
    assert figures["top1_outside_ties"] == 1 and 0 < figures["near_ties"] < POSITIONS
    opening = judged({key: values[:192] for key, values in text.items()}, rounded(text["reference"], 2)[:192]).figures
    assert figures["first_192"].keys() == {"perplexity_ratio", "perplexity_ratio_upper", "top1", "kl_mean", "kl_p999"}
    assert figures["first_192"] == {key: opening[key] for key in figures["first_192"]}
    json.dumps(check.to_dict())


def test_figures_are_what_their_names_say():
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], dtype=np.float64))
    arm = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]], dtype=np.float64)) + 5
    guard = LogitGuard(Thresholds(batch=1))
    guard.update(reference, arm, [0, 2])
    figures = guard.result().figures
    assert figures["perplexity_reference"] == pytest.approx((0.5 * 0.7) ** -0.5)
    assert figures["perplexity_arm"] == pytest.approx((0.25 * 0.7) ** -0.5)
    assert figures["perplexity_ratio"] == pytest.approx(math.sqrt(2))
    assert figures["kl_mean"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert figures["top1"] == 0.5


def test_chunks_make_no_difference(text):
    arm = rounded(text["reference"], 3)
    whole, parts = judged(text, arm, chunk=POSITIONS), judged(text, arm, chunk=77)
    assert whole.figures.keys() == parts.figures.keys()
    for key in ("perplexity_ratio_upper", "kl_p999", "top1", "kl_limit"):
        assert whole.figures[key] == pytest.approx(parts.figures[key], rel=1e-9)


def one_expert_off(reference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    hit = rng.random((POSITIONS, 1)) < 0.05
    return reference + hit * rng.normal(0, 1, reference.shape)


def keys_dropped_late(reference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    late = np.arange(POSITIONS)[:, None] > 1900
    return np.where(late, np.roll(reference, 1, axis=1), reference)


def state_losing_bits(reference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return reference + np.linspace(0, 0.3, POSITIONS)[:, None] * rng.normal(0, 1, reference.shape)


def six_positions_wrong(reference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    wrong = reference.copy()
    wrong[::400] = np.roll(wrong[::400], 3, axis=1)
    return wrong


def best_token_swapped(reference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    wrong, rows = reference.copy(), np.arange(0, POSITIONS, 40)
    best = reference[rows].argmax(axis=1)
    wrong[rows, best], wrong[rows, 0] = reference[rows, 0], reference[rows, best]
    return wrong


FAULTS = {
    one_expert_off: "KL",
    keys_dropped_late: "perplexity",
    state_losing_bits: "KL",
    six_positions_wrong: "KL",
    best_token_swapped: "top-1",
    lambda reference, rng: 0.8 * reference: "perplexity",
    lambda reference, rng: np.roll(reference, 1, axis=0): "perplexity",
}
NAMES = [*(f.__name__ for f in list(FAULTS)[:5]), "shared_gate_skipped", "position_off_by_one"]


@pytest.mark.parametrize("fault, word", FAULTS.items(), ids=NAMES)
def test_planted_faults_are_blocked(text, fault, word):
    """Faults as they show in logits, on top of honest rounding; each for the right reason."""
    arm = rounded(fault(text["reference"], np.random.default_rng(4)), 5)
    check = judged(text, arm)
    assert not check.passed
    assert word in check.reason and "\n" not in check.reason


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_blocked_and_placed(text, bad):
    arm = text["reference"].copy()
    arm[1234, 7] = bad
    assert judged(text, arm).reason == "arm logits are not finite at 1 positions, first at 1234"
    broken = {**text, "reference": arm}
    assert "reference logits are not finite" in judged(broken, text["reference"]).reason


def test_a_masked_tail_of_the_vocabulary_is_no_fault(text):
    tail = np.full((POSITIONS, 8), -np.inf, dtype=np.float32)
    padded = {**text, **{key: np.hstack([text[key], tail]) for key in ("reference", "rerun")}}
    arm = np.hstack([rounded(text["reference"], 2), tail])
    assert judged(padded, arm).passed
    # Ruling out what the reference allows is one.
    arm[5, 3] = -np.inf
    assert not judged(padded, arm).passed


def test_without_a_rerun_only_the_floor_is_allowed(text):
    exact = judged(text, rounded(text["reference"], 2, 1e-5), rerun=False)
    assert exact.passed and exact.figures["kl_p999_rerun"] is None
    coarse = judged(text, rounded(text["reference"], 2, 0.05), rerun=False)
    assert not coarse.passed and "KL" in coarse.reason


def test_a_rerun_that_is_not_finite_proves_nothing(text):
    broken = {**text, "rerun": np.full_like(text["rerun"], np.nan)}
    check = judged(broken, rounded(text["reference"], 2))
    assert not check.passed and check.figures["kl_limit"] == Thresholds.kl_floor


def test_thresholds_decide(text):
    arm = rounded(text["reference"], 2)
    assert "perplexity" in judged(text, arm, perplexity_ratio=1.0).reason
    assert "at least 5000 needed" in judged(text, arm, min_positions=5000).reason
    assert "near-tie" in judged(text, arm, near_tie=100.0).reason
    assert "KL" in judged(text, arm, kl_factor=0.1).reason


def test_too_few_positions_pass_nothing():
    assert LogitGuard().result() == Check("logits", False, "no positions were compared", {"positions": 0})
    guard = LogitGuard()
    guard.update(np.eye(5), np.eye(5), np.arange(5))
    check = guard.result()
    assert not check.passed
    assert "5 positions compared" in check.reason and "two batches of 32" in check.reason


def test_correlated_errors_widen_the_bound():
    """Errors shared by neighbours carry less evidence than as many independent ones; the bound must know."""
    rng = np.random.default_rng(12)

    def upper(errors: np.ndarray) -> float:
        reference = np.tile([2.0, 0.0], (POSITIONS, 1))
        arm = reference - np.stack([errors, np.zeros(POSITIONS)], axis=1)
        guard = LogitGuard()
        guard.update(reference, arm, np.zeros(POSITIONS, dtype=int))
        return guard.result().figures["perplexity_ratio_upper"] / guard.result().figures["perplexity_ratio"]

    alone = upper(rng.normal(0, 0.1, POSITIONS))
    shared = upper(np.repeat(rng.normal(0, 0.1, POSITIONS // 32), 32))
    assert math.log(shared) > 3 * math.log(alone)


def test_perplexity_bound_is_exceeded_once_in_twenty():
    rng = np.random.default_rng(13)
    hits = 0
    for _ in range(300):
        noise = np.repeat(rng.normal(0, 0.05, 64), 8) + rng.normal(0, 0.05, 512)
        reference = np.zeros((512, 2))
        reference[:, 0] = 1
        arm = reference.copy()
        arm[:, 0] += noise
        guard = LogitGuard()
        guard.update(reference, arm, np.zeros(512, dtype=int))
        # The truth: the mean loss of the arm over all errors that could have been drawn.
        hits += math.log(guard.result().figures["perplexity_ratio_upper"]) < TRUE_LOSS
    assert 0.02 <= hits / 300 <= 0.09


def _true_loss() -> float:
    errors = np.random.default_rng(14).normal(0, 0.05 * math.sqrt(2), 1_000_000)
    return float(np.mean(np.log1p(np.exp(-1 - errors))) - np.log1p(np.exp(-1)))


TRUE_LOSS = _true_loss()


def test_inputs_that_do_not_fit_are_named():
    a = np.zeros((4, 10))
    for call, message in [
        (lambda g: g.update(a[0], a, [0] * 4), r"expected \[positions, vocabulary\]"),
        (lambda g: g.update(a, a[:3], [0] * 4), "arm logits have shape"),
        (lambda g: g.update(a, a, [0] * 4, a[:, :9]), "rerun logits have shape"),
        (lambda g: g.update(a, a, [0] * 3), "3 targets for 4 positions"),
        (lambda g: g.update(a, a, [0, 0, 0, 10]), "outside the vocabulary of 10"),
        (lambda g: (g.update(a, a, [0] * 4), g.update(a, a, [0] * 4, a)), "with every chunk or with none"),
        (lambda g: (g.update(a, a, [0] * 4), g.update(a[:, :9], a[:, :9], [0] * 4)), "vocabulary of 9"),
    ]:
        with pytest.raises(GuardError, match=message):
            call(LogitGuard())


# -- synthetic weights ----------------------------------------------------------------------------


def layers(error: float = 5e-3, count: int = 6, **planted_at: float) -> list[LayerPair]:
    """Tensors of `count` layers, off by `error`; ``layer3_state=0.1`` plants more in one."""
    rng = np.random.default_rng(20)
    pairs = []
    for layer in range(count):
        for part in ("output", "state"):
            reference = rng.normal(size=(40, 16)).astype(np.float32)
            off = planted_at.get(f"layer{layer}_{part}", error)
            pairs.append(LayerPair(layer, part, reference, reference + off * rng.normal(size=reference.shape)))
    return pairs


def routing(tokens: int = 50, experts: int = 32, k: int = 8) -> tuple[np.ndarray, np.ndarray]:
    logits = np.random.default_rng(21).normal(size=(tokens, experts))
    return logits, np.argsort(-logits, axis=1)[:, :k].copy()


def test_layers_within_rounding_pass():
    logits, experts = routing()
    check = synthetic_check(layers(), [RoutedPair(0, logits, experts[:, ::-1])])
    assert check.passed and check.name == "layers"
    assert check.figures["tensors"] == 12 and check.figures["worst_relative_rms"] < 1e-2
    assert check.figures["routed_sets"] == 50 and check.figures["router_near_ties"] == 0
    json.dumps(check.to_dict())


def test_the_first_layer_that_is_off_is_named():
    check = synthetic_check(layers(layer2_state=0.05, layer4_output=0.5))
    assert not check.passed
    assert check.reason.startswith("layer 2 state is off by 5.0e-02")
    assert "2 of 12 tensors" in check.reason
    assert check.figures["worst"] == "layer 4 output"


def test_nan_in_a_layer_and_no_layer_at_all_are_blocked():
    pairs = layers()
    pairs[3].arm[0, 0] = np.nan
    assert "layer 1 state is off by inf" in synthetic_check(pairs).reason
    assert synthetic_check([]).reason == "no layer was compared"


def test_a_near_tie_at_the_last_rank_is_counted_not_blocked():
    logits, experts = routing()
    order = np.argsort(-logits[7])
    logits[7, order[8]] = logits[7, order[7]] - 0.01
    experts[7, 7] = order[8]
    assert routing_differences(RoutedPair(0, logits, experts), 0.05) == (1, 0)
    check = synthetic_check(layers(), [RoutedPair(3, logits, experts)])
    assert check.passed and check.figures["router_near_ties"] == 1
    assert not synthetic_check(layers(), [RoutedPair(3, logits, experts)], thresholds=exact()).passed


def exact() -> SyntheticThresholds:
    return SyntheticThresholds.for_dtype("float32")


def test_a_wrong_expert_is_blocked_even_beside_a_near_tie():
    logits, experts = routing()
    order = np.argsort(-logits[7])
    logits[7, order[8]] = logits[7, order[7]] - 0.01
    experts[7, 0], experts[7, 7] = order[20], order[8]
    assert routing_differences(RoutedPair(0, logits, experts), 0.05) == (0, 1)
    check = synthetic_check(layers(), [RoutedPair(3, logits, experts)])
    assert "layer 3 routes 1 tokens to other experts" in check.reason


def test_equal_scores_may_be_chosen_either_way():
    logits = np.zeros((1, 10))
    assert routing_differences(RoutedPair(0, logits, np.array([[9, 8]])), 0.0) == (0, 0)


def test_all_experts_chosen_leave_nothing_to_differ():
    logits, experts = routing(experts=8, k=8)
    assert routing_differences(RoutedPair(0, logits, experts), 0.0) == (0, 0)


@pytest.mark.parametrize(
    "experts, message",
    [
        (np.zeros((3, 2)), "do not fit"),
        (np.array([[0, 32]] * 50), "outside 0 to 31"),
        (np.array([[1, 1]] * 50), "names an expert twice"),
    ],
)
def test_routing_that_does_not_fit_is_named(experts, message):
    with pytest.raises(GuardError, match=f"layer 5: .*{message}"):
        routing_differences(RoutedPair(5, routing()[0], experts), 0.05)


def test_end_to_end_error_is_held_against_the_baselines_own():
    rng = np.random.default_rng(22)
    exact_pass = rng.normal(size=(20, 50))
    noise = rng.normal(size=exact_pass.shape)

    def check(arm: float, baseline: float) -> Check:
        passes = EndToEnd(exact_pass, exact_pass + arm * noise, exact_pass + baseline * noise)
        return synthetic_check(layers(), end_to_end=passes)

    assert check(0.124, 0.1).passed
    failed = check(0.126, 0.1)
    assert not failed.passed and "over 1.25 times the baseline's own" in failed.reason
    assert check(5e-5, 1e-6).passed, "two exact float32 passes differ by luck alone"
    assert "baseline's end-to-end error is not finite" in check(0.1, math.nan).reason


def test_relative_rms():
    a = np.array([3.0, 4.0])
    assert relative_rms(a, a) == 0
    assert relative_rms(1.1 * a, a) == pytest.approx(0.1)
    assert relative_rms(np.zeros(2), np.zeros(2)) == 0
    assert relative_rms(a, np.zeros(2)) == math.inf
    with pytest.raises(GuardError, match="shapes"):
        relative_rms(a, a[:1])
    with pytest.raises(GuardError, match="empty"):
        relative_rms(a[:0], a[:0])
    with pytest.raises(GuardError, match="layer 0 keys: shapes"):
        synthetic_check([LayerPair(0, "keys", a, a[:1])])


def test_thresholds_by_type():
    assert SyntheticThresholds.for_dtype("bfloat16") == SyntheticThresholds()
    assert dataclasses.asdict(exact())["relative_rms"] < 2e-2
    with pytest.raises(GuardError, match="'int8'"):
        SyntheticThresholds.for_dtype("int8")


# -- greedy tokens --------------------------------------------------------------------------------


def test_first_divergence_and_its_gap():
    logits = np.zeros((4, 5))
    logits[2, 3], logits[2, 1] = 1.0, 0.9
    found = first_divergence([0, 0, 3, 4], [0, 0, 1, 2], logits)
    assert (found.index, found.reference_token, found.arm_token) == (2, 3, 1)
    assert found.gap == pytest.approx(0.1) and found.near_tie
    logits[2, 1] = 0.5
    assert not first_divergence([0, 0, 3], [0, 0, 1], logits).near_tie
    assert first_divergence([1, 2], [1, 3]).gap is None
    assert first_divergence([1, 2], [1, 2, 3]) is None
    with pytest.raises(GuardError, match="part at 2, but there are only 2 rows"):
        first_divergence([0, 0, 3], [0, 0, 1], logits[:2])
