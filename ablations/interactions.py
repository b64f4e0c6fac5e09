"""Interactions: is an optimisation worth more, or less, where another one is on?

Four arms in the same blocks: neither of two optimisations, either alone, both. The interaction is the ratio of two
ratios, both over second and first over neither: above 1 the two help each other, at 1 they multiply, below 1 the one
takes part of what the other gains. It is the same whichever of the two is asked about. A block's value needs all four
arms, so drift that a block shares cancels here as it does in a plain ratio; its scatter is larger, being that of four
medians instead of two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ablations.statistics import Estimate, StatisticsError, Window, paired_ratio
from ablations.verdicts import verdict

Interplay = Literal["help", "overlap", "multiply", "unclear", "blocked", "unsupported"]

WORDS: dict[str, Interplay] = {"faster": "help", "slower": "overlap", "same": "multiply"}
"""Verdict on a ratio of ratios to the word for how two optimisations stand to each other."""

SIGNS = (1.0, -1.0, -1.0, 1.0)
"""Share of each arm's log rate: neither, first alone, second alone, both."""


def interaction_logs(windows: Iterable[Window], arms: Sequence[str]) -> list[list[float]]:
    """Log of the ratio of ratios of every block that holds all four arms alike, by session in order.

    Args:
        arms: neither, first alone, second alone, both. Rates of the windows in any positive unit.

    Raises:
        StatisticsError: not four different arms, or a rate that is zero, negative or not finite.
    """
    if len(arms) != 4 or len(set(arms)) != 4:
        raise StatisticsError(f"an interaction needs four different arms, got {', '.join(arms)}")
    rates: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for window in windows:
        if window.arm in arms:
            if not (math.isfinite(window.rate) and window.rate > 0):
                raise StatisticsError(f"session {window.session} block {window.block}: rate {window.rate!r}")
            rates[window.session, window.block][window.arm].append(window.rate)
    sessions: dict[int, list[float]] = defaultdict(list)
    for (session, _), found in sorted(rates.items()):
        if len({len(found[arm]) for arm in arms}) == 1 and found[arms[0]]:
            medians = [math.log(float(np.median(found[arm]))) for arm in arms]
            sessions[session].append(sum(sign * value for sign, value in zip(SIGNS, medians)))
    return list(sessions.values())


def interaction(
    windows: Iterable[Window],
    arms: Sequence[str],
    margin: float,
    checks: Sequence[Mapping[str, Any]] = (),
    unsupported: str | None = None,
) -> tuple[Estimate, Interplay, str]:
    """Estimate, word and reason for two optimisations.

    Args:
        arms: neither, first alone, second alone, both. margin: as for a ratio of the same run, as a share; the ratio of
            ratios is held against it with twice the logarithm, since it holds the noise of two such ratios.
        checks: the quality guard's results on the arms; one that did not pass blocks.
        unsupported: why one of the arms cannot run here.

    Returns:
        The estimate (over sessions, or over the blocks of one), and ``help``, ``overlap``, ``multiply`` (within the
        margin), ``unclear``, ``blocked`` or ``unsupported``.

    Raises:
        StatisticsError: as `interaction_logs`.
    """
    wide = (1 + margin) ** 2 - 1
    estimate = paired_ratio(interaction_logs(windows, arms), margin=wide)
    failed = next((check for check in checks if check and check.get("passed") is not True), None)
    word, reason = verdict(estimate, wide, failed, unsupported)
    return estimate, WORDS.get(word, word), reason.removesuffix("; no quality guard ran")  # type: ignore[return-value]
