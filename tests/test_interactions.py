"""Interactions: the ratio of ratios is what it says, its interval covers, and a wrong arm blocks it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ablations.interactions import interaction, interaction_logs
from ablations.statistics import StatisticsError, Window, paired_ratio

ARMS = ("neither", "first", "second", "both")


def windows(logs: np.ndarray) -> list[Window]:
    """Windows from log rates ``[session, block, arm]``, two of each arm."""
    return [
        Window(s, b, arm, math.exp(logs[s, b, i]))
        for s in range(logs.shape[0])
        for b in range(logs.shape[1])
        for i, arm in enumerate(ARMS)
        for _ in range(2)
    ]


def made(a: float, b: float, together: float, sessions: int = 5, blocks: int = 2, sd: float = 0.0, seed: int = 0):
    effects = np.array([0, math.log(a), math.log(b), math.log(a * b * together)])
    drift = np.linspace(0, 0.3, sessions * blocks).reshape(sessions, blocks, 1)
    noise = np.random.default_rng(seed).normal(0, sd, (sessions, blocks, 4))
    return effects + drift + noise


def test_it_is_the_ratio_of_ratios_and_drift_cancels():
    estimate, word, _ = interaction(windows(made(1.5, 1.2, 1.1)), ARMS, 0.01)
    assert estimate.ratio == pytest.approx(1.1) and word == "help"
    swapped, _, _ = interaction(windows(made(1.5, 1.2, 1.1)), ("neither", "second", "first", "both"), 0.01)
    assert swapped.ratio == pytest.approx(estimate.ratio)


@pytest.mark.parametrize("together, word", [(1.1, "help"), (0.9, "overlap"), (1.0, "multiply")])
def test_words(together, word):
    assert interaction(windows(made(1.5, 1.2, together, blocks=6, sd=0.004)), ARMS, 0.01)[1] == word


def test_an_interaction_too_small_for_its_noise_is_unclear():
    assert interaction(windows(made(1.5, 1.2, 1.03, sd=0.05)), ARMS, 0.01)[1] == "unclear"


def test_interval_covers_with_the_noise_of_sessions():
    """Coverage of the 95 % interval over 5 sessions of 2 blocks, the arms of a session sharing nothing but drift."""
    rng = np.random.default_rng(1)
    hit, runs = 0, 600
    for _ in range(runs):
        # What a process does to one arm, and what a block does: 1 % each.
        logs = made(1.5, 1.2, 1.05) + rng.normal(0, 0.01, (5, 1, 4)) + rng.normal(0, 0.01, (5, 2, 4))
        sums = logs @ np.array([1.0, -1.0, -1.0, 1.0])
        estimate = paired_ratio(sums.tolist())
        assert estimate.low is not None and estimate.high is not None
        hit += estimate.low <= 1.05 <= estimate.high
    assert 0.93 <= hit / runs <= 0.98


def test_broken_blocks_are_left_out_and_bad_input_is_named():
    rows = windows(made(1.5, 1.2, 1.0))
    assert [len(s) for s in interaction_logs(rows[1:], ARMS)] == [1, 2, 2, 2, 2]
    with pytest.raises(StatisticsError, match="four different arms"):
        interaction_logs(rows, ARMS[:3])
    with pytest.raises(StatisticsError, match="session 9 block 0"):
        interaction_logs([*rows, Window(9, 0, "both", math.nan)], ARMS)


def test_a_wrong_arm_blocks_and_a_missing_one_is_unsupported():
    rows = windows(made(1.5, 1.2, 1.3))
    assert interaction(rows, ARMS, 0.01, [{"passed": True}, {"passed": False, "reason": "r"}])[1] == "blocked"
    assert interaction([], ARMS, 0.01, unsupported="no kernel")[1:] == ("unsupported", "no kernel")
