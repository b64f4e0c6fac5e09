"""Verdicts and gate codes: every word from the interval that deserves it, and no pass without evidence."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ablations.statistics import Estimate, GateStage, StatisticsError, paired_ratio
from ablations.verdicts import gate, verdict

PASSED = {"name": "logits", "passed": True, "reason": "fine", "figures": {}}


def estimate(low: float, high: float, unit: str = "session") -> Estimate:
    """An estimate with that 95 % interval, and a 90 % interval a tenth narrower in logs."""
    middle, half = math.log(low * high) / 2, math.log(high / low) / 2
    made = paired_ratio([[middle], [middle]])
    return dataclasses.replace(
        made,
        low=low,
        high=high,
        low90=math.exp(middle - 0.9 * half),
        high90=math.exp(middle + 0.9 * half),
        unit=unit,
        detectable=1.07,
    )


@pytest.mark.parametrize(
    "low, high, word",
    [
        (1.011, 1.2, "faster"),
        (1.0099, 1.2, "unclear"),
        (0.8, 0.99, "slower"),
        (0.8, 0.9902, "unclear"),
        (0.995, 1.005, "same"),
        (0.99, 1.0105, "same"),
        (0.95, 1.05, "unclear"),
    ],
)
def test_verdict_follows_from_the_interval_and_the_margin(low, high, word):
    found, reason = verdict(estimate(low, high), 0.01, PASSED)
    assert found == word
    assert "95 % interval" in reason or "90 % interval" in reason
    assert "\n" not in reason


def test_swapped_arms_get_the_mirrored_verdict():
    assert verdict(estimate(1.02, 1.03), 0.015, PASSED)[0] == "faster"
    assert verdict(estimate(1 / 1.03, 1 / 1.02), 0.015, PASSED)[0] == "slower"


def test_unclear_names_the_effect_that_could_have_been_seen():
    assert "1.070" in verdict(estimate(0.95, 1.05), 0.01, PASSED)[1]


def test_one_process_is_said():
    assert "this process only" in verdict(estimate(1.1, 1.2, "block"), 0.01, PASSED)[1]
    assert "this process" not in verdict(estimate(1.1, 1.2), 0.01, PASSED)[1]


@pytest.mark.parametrize("passed", [False, None, 0, "yes", 1])
def test_nothing_but_a_passed_guard_lets_speed_through(passed):
    word, reason = verdict(estimate(1.5, 1.6), 0.01, {"passed": passed, "reason": "perplexity off"})
    assert (word, reason) == ("blocked", "wrong answers: perplexity off")


def test_a_guard_without_result_blocks_and_no_guard_is_said():
    assert verdict(estimate(1.5, 1.6), 0.01, {"name": "logits"})[0] == "blocked"
    word, reason = verdict(estimate(1.5, 1.6), 0.01)
    assert word == "faster" and reason.endswith("no quality guard ran")


def test_unsupported_keeps_its_reason():
    assert verdict(None, 0.01, None, "gated_delta=registers needs Metal") == (
        "unsupported",
        "gated_delta=registers needs Metal",
    )


def test_no_measurement_and_one_unit_are_unclear_with_the_reason():
    assert verdict(None, 0.01, PASSED) == ("unclear", "nothing was measured")
    word, reason = verdict(paired_ratio([[0.5]]), 0.01, PASSED)
    assert word == "unclear" and "one block gives no interval" in reason
    assert verdict(paired_ratio([]), 0.01, PASSED) == ("unclear", "no block to estimate from")


@pytest.mark.parametrize("margin", [0.0, -0.1, math.nan])
def test_a_margin_of_nothing_is_refused(margin):
    with pytest.raises(StatisticsError, match="margin is"):
        verdict(estimate(1, 1), margin)


# -- gate -----------------------------------------------------------------------------------------

CLEAN = GateStage({"a": 0.9, "b": 0.8}, (), ())
WORDS = {"a": "same", "b": "faster"}


def test_gate_passes_only_on_evidence():
    passed = gate(CLEAN, None, WORDS)
    assert (passed.code, passed.reason) == (0, "no confirmed slowdown in 2 contrasts")


def test_gate_fails_on_a_confirmed_slowdown_even_if_more_is_missing():
    first = GateStage({"a": 0.01, "b": 0.8}, ("a",), ())
    found = gate(first, GateStage({"a": 0.001}, ("a",), ()), {"a": "slower", "b": "same"}, ["c is missing"])
    assert found.code == 1
    assert "confirmed slower: a" in found.reason and "c is missing" in found.reason


def test_gate_lets_an_unconfirmed_suspicion_go():
    first = GateStage({"a": 0.01, "b": 0.8}, ("a",), ())
    assert gate(first, GateStage({"a": 0.7}, (), ()), {"a": "slower", "b": "same"}).code == 0


@pytest.mark.parametrize(
    "first, second, words, problems, reason",
    [
        (GateStage({}, (), ()), None, {}, (), "no contrast was measured"),
        (CLEAN, None, WORDS, ("runs.jsonl cannot be read",), "runs.jsonl cannot be read"),
        (CLEAN, None, WORDS | {"b": "blocked"}, (), "blocked by the quality guard: b"),
        (GateStage({"a": 0.01, "b": 1}, ("a",), ()), None, WORDS, (), "not yet confirmed on fresh sessions: a"),
        (GateStage({"a": 0.9}, (), ("b",)), None, WORDS, (), "no interval for b"),
        (GateStage({"a": 0.01, "b": 1}, ("a",), ()), GateStage({}, (), ("a",)), WORDS, (), "no interval for a"),
        (GateStage({"a": 0.9}, (), ()), None, WORDS, (), "not tested: b"),
        (CLEAN, None, {"a": "unclear", "b": "same"}, (), "1 of 2 contrasts are unclear"),
    ],
)
def test_gate_cannot_tell(first, second, words, problems, reason):
    found = gate(first, second, words, problems)
    assert found.code == 2
    assert found.reason.startswith("cannot tell: ") and reason in found.reason


def test_unsupported_contrasts_do_not_hold_the_gate_up():
    assert gate(CLEAN, None, WORDS | {"c": "unsupported"}).code == 0
