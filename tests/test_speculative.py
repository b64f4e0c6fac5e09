"""Speculative decoding without a model: costs, depth, acceptance, lookup; and the refusals."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from engine.config import ConfigError, DecodeConfig, EngineConfig, SpeculativeConfig
from engine.depth import GUESSED, Costs, DepthController, break_even, expected_tokens
from engine.ops import VariantUnsupported, bind
from engine.sampling import Sampling, sample
from engine.speculative import NgramDrafter, accept_sampled, agreed

CHEAP = Costs((1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35), draft=0.02)
DEAR = Costs((1, 2, 3, 4, 5, 6, 7, 8), draft=0.1)
NARROW = Costs((1, 2, 3, 3.9, 4.5, 5, 6, 7), draft=0.05)
"""Pays from a depth of 4 on, and only if nearly all drafts are right."""
DRAWS = 20_000


# -- costs and depth -----------------------------------------------------------------------------


def test_expected_tokens_count_the_choice_after_the_last_right_draft():
    assert expected_tokens([1.0] * 4, 4) == 5
    assert expected_tokens([0.0] * 4, 4) == 1
    assert expected_tokens([0.5, 0.5], 2) == pytest.approx(1 + 0.5 + 0.25)


def test_break_even_is_where_a_step_costs_what_it_yields():
    costs = Costs((1, 1.4, 1.8, 2.2, 2.6, 3.0, 3.4, 3.8), draft=0.1, replay=0.2, states=0)
    rate = break_even(costs, 3)
    assert rate is not None and 0 < rate < 1
    assert expected_tokens([rate] * 3, 3) == pytest.approx(costs.step(3, rate**3), rel=1e-6)
    assert break_even(DEAR, 3) is None


def drafted_right(costs: Costs) -> DepthController:
    """A controller after sixty turns in which every draft was right."""
    control = DepthController(costs, 7)
    for _ in range(60):
        if depth := control.next_depth():
            control.saw(depth, depth)
        else:
            control.rest(1)
    return control


@pytest.mark.parametrize("costs", [CHEAP, *GUESSED.values(), NARROW, DEAR], ids=["cheap", *GUESSED, "narrow", "dear"])
def test_right_drafts_choose_a_depth_wherever_the_table_pays(costs):
    control = drafted_right(costs)
    best = max(range(8), key=lambda d: (d + 1) / costs.step(d))
    pays = (best + 1) / costs.step(best) >= DepthController.MARGIN
    assert (control.next_depth() > 0) == pays
    if pays:
        assert control.next_depth() == best


@pytest.mark.parametrize(
    "costs", [CHEAP, Costs((1,) * 8, states=0.0), GUESSED["metal"]], ids=["cheap", "free", "metal"]
)
def test_wrong_drafts_are_given_up_within_sixteen_tokens(costs):
    control, tokens = DepthController(costs, 7), 0
    while depth := control.next_depth():
        control.saw(depth, 0)
        tokens += 1
        assert tokens <= 16
    assert tokens > 0


def test_stepping_aside_probes_less_and_less_and_comes_back():
    control, probes = DepthController(CHEAP, 4), []
    for token in range(1500):
        if depth := control.next_depth():
            control.saw(depth, 0)
            probes.append(token)
        else:
            control.rest(1)
    late = np.diff(probes[-4:])
    assert (late > 200).all() and (late < 300).all(), "a probe every 256 tokens in the end"
    while not control.next_depth():
        control.rest(1)
    for _ in range(3):
        control.saw(control.next_depth(), control.next_depth())
    assert control.next_depth() == 4


def test_depth_follows_the_acceptance_by_position():
    """First drafts right, later ones wrong: the depth settles at what is right."""
    control = DepthController(CHEAP, 6)
    for _ in range(30):
        depth = control.next_depth()
        control.saw(depth, min(depth, 2))
    assert control.next_depth() in (2, 3)


BY_DEPTH = (1, 1.4, 1.8, 2.2, 2.6, 3.0, 3.4, 3.8)


@pytest.mark.parametrize(
    "step", [(1.5, 2.6, 3.7), (1.9, 1.95, 3.9), (2.0, 2.9, 2.5), (2.0, 3.0, 4.1), (1.93, 2.87, 3.9)]
)
def test_the_depth_is_the_one_that_whole_steps_by_depth_say(step):
    """Steps of 1, 2 and 3 drafts as measured, all else of no use; where none gains the margin, none is drafted."""
    costs = Costs(BY_DEPTH, tuple(whole - rows for whole, rows in zip((*step, 9, 9, 9, 9), BY_DEPTH[1:])), 0.0, 0.0)
    assert [costs.step(depth) for depth in (1, 2, 3)] == pytest.approx(step)
    gains = [1.0, *((depth + 1) / costs.step(depth) for depth in range(1, 8))]
    best = max(range(8), key=gains.__getitem__)
    control = drafted_right(costs)
    assert control.next_depth() == (best if gains[best] >= DepthController.MARGIN else 0)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 0.9, 0.97, "in turns"])
@pytest.mark.parametrize("costs", [CHEAP, NARROW, *GUESSED.values()], ids=["cheap", "narrow", *GUESSED])
def test_drafting_and_its_probes_cost_their_share_at_most(costs, right):
    """Of all steps so far, whenever drafting begins again after a rest."""
    control, coins = DepthController(costs, 7), np.random.default_rng(5)
    spent = tokens = 0.0
    rested = False
    while tokens < 4000:
        took = made = 1.0
        depth = control.next_depth()
        if depth:
            assert not rested or spent <= tokens * (1 + DepthController.SHARE) + 1e-6
            share = (0.98 if tokens % 600 < 300 else 0.0) if right == "in turns" else right
            wrong = np.flatnonzero(coins.random(depth) >= share)
            accepted = int(wrong[0]) if wrong.size else depth
            control.saw(depth, accepted)
            took, made = costs.step(depth, float(accepted == depth)), accepted + 1
        else:
            control.rest(1)
        rested, spent, tokens = depth == 0, spent + took, tokens + made
    assert spent <= 1.02 * tokens


def test_costs_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="one for each of 1 to 7 drafts"):
        Costs((1,) * 8, draft=(0.1, 0.2))
    with pytest.raises(ValueError, match="negative"):
        Costs((1,) * 8, draft=(-1.0,) * 7)
    for rows in ((1, 1.2), (2,) * 8, (1, 0, 1, 1, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match="costs.rows must"):
            Costs(rows)
    with pytest.raises(ValueError, match="negative"):
        Costs((1,) * 8, draft=-0.1)


# -- acceptance ----------------------------------------------------------------------------------


def test_agreement_stops_at_the_first_wrong_draft():
    assert [agreed([1, 2, 3], c) for c in ([1, 2, 3, 9], [1, 2, 4, 9], [0, 2, 3, 9])] == [3, 2, 0]
    assert agreed([], [5]) == 0


def _probabilities(seed: int, rows: int, sharp: float) -> np.ndarray:
    x = np.exp(sharp * np.random.default_rng(seed).normal(size=(rows, 6)))
    return (x / x.sum(axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("kind", ["alike", "apart", "certain", "impossible"])
def test_rejection_sampling_keeps_the_distribution(kind):
    """20,000 drafts of depth 2: both positions are distributed as draws without drafting are."""
    p = _probabilities(1, 3, 1.0)
    q = _probabilities(2, 2, 2.0 if kind == "apart" else 0.3)
    if kind in ("certain", "impossible"):
        q = np.eye(6, dtype=np.float32)[[int(p[0].argmax()), 3]]
    if kind == "impossible":
        # A cut token: the model gives no mass to what the drafter is sure of.
        p[0, int(q[0].argmax())] = 0
        p[0] /= p[0].sum()
    keys = mx.random.split(mx.random.key(5), 3)
    wide = mx.broadcast_to(mx.log(mx.array(q)), (DRAWS, 2, 6))
    drafts = mx.random.categorical(wide, key=keys[0]).astype(mx.uint32)
    target, proposal = mx.broadcast_to(mx.array(p), (DRAWS, 3, 6)), mx.broadcast_to(mx.array(q), (DRAWS, 2, 6))
    kept, following = (np.array(x) for x in accept_sampled(target, proposal, drafts, keys[1]))
    drafted = np.array(drafts)
    plain = np.array(sample(mx.broadcast_to(mx.log(mx.array(p[:1])), (DRAWS, 6)), Sampling(1.0), keys[2]))

    first = np.where(kept >= 1, drafted[:, 0], following)
    _same(first, p[0])
    table = np.array([np.bincount(first, minlength=6), np.bincount(plain, minlength=6)])
    assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > 1e-4
    reached = kept >= 1
    if kind != "impossible":
        assert reached.sum() > 1000
        _same(np.where(kept >= 2, drafted[:, 1], following)[reached], p[1])
        _same(following[kept == 2], p[2])
    else:
        assert not reached.any()
    wanted = np.minimum(p[0], q[0]).sum()
    assert abs(reached.mean() - wanted) < 5 * (wanted * (1 - wanted) / DRAWS) ** 0.5 + 1e-6


def _same(draws: np.ndarray, p: np.ndarray) -> None:
    counts = np.bincount(draws, minlength=len(p))
    assert counts[p == 0].sum() == 0
    share = p[p > 0].astype(np.float64)
    assert stats.chisquare(counts[p > 0], draws.size * share / share.sum()).pvalue > 1e-4


# -- lookup --------------------------------------------------------------------------------------


def _slow_lookup(text: list[int], depth: int) -> list[int] | None:
    for length in NgramDrafter.LENGTHS:
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                made = list(text)
                for i in range(depth):
                    made.append(made[end + i])
                return made[len(text) :]
    return None


def test_lookup_finds_the_latest_occurrence_of_the_longest_suffix():
    rng, drafter, history, found = np.random.default_rng(0), NgramDrafter(), [], 0
    for _ in range(400):
        token = int(rng.integers(0, 4))
        got = drafter.lookup(history, token, 5)
        assert got == _slow_lookup([*history, token], 5)
        found += got is not None
        history.append(token)
    assert found > 300
    drafter.restore(None, 0)
    assert drafter.lookup(history[:50], history[50], 3) == _slow_lookup(history[:51], 3)


def test_a_repetition_is_drafted_to_any_depth():
    assert NgramDrafter().lookup([7, 8, 9, 7, 8], 9, 7) == [7, 8, 9, 7, 8, 9, 7]
    assert NgramDrafter().lookup([1, 2, 3], 4, 3) is None
    assert NgramDrafter().lookup([], 4, 3) is None


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": "mtp", "depth": 8}, "depth 8.*take 1 to 7"),
        ({"drafter": "ngram", "draft_vocab": 64}, "draft_vocab 64.*take mtp"),
        ({"drafter": "ngram", "force": "1.5"}, "force 1.5.*from 0 to 1"),
        ({"drafter": "ngram", "force": "often"}, "force often"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(VariantUnsupported, match=message):
        bind(EngineConfig(speculative=SpeculativeConfig(**fields)), "cpu")


def test_logarithms_with_a_drafter_are_refused():
    config = EngineConfig(decode=DecodeConfig(logprobs=True), speculative=SpeculativeConfig("ngram"))
    with pytest.raises(VariantUnsupported, match="decode.logprobs"):
        bind(config, "cpu")


def test_configuration_reads_a_number_as_forced_acceptance():
    made = EngineConfig.from_dict({"speculative": {"drafter": "ngram", "force": 0.25}})
    assert made.speculative.force == "0.25"
    with pytest.raises(ConfigError, match="rollback"):
        EngineConfig.from_dict({"speculative": {"rollback": "magic"}})
