"""Words for numbers: one verdict per contrast, and one exit code per gate.

A verdict is decided only on evidence. Where the interval is too wide for faster, slower or same, the answer is
``unclear``, with the smallest effect that the run could have seen; a wrong answer is ``blocked``, however fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ablations.statistics import Estimate, GateStage, StatisticsError

Verdict = Literal["faster", "slower", "same", "unclear", "blocked", "unsupported"]


def verdict(
    estimate: Estimate | None,
    margin: float,
    check: Mapping[str, Any] | None = None,
    unsupported: str | None = None,
) -> tuple[Verdict, str]:
    """The verdict on an arm against its reference, and one line that says why.

    Args:
        estimate: the paired ratio, or None where nothing was measured.
        margin: equivalence margin as a share (0.01 is the band from 1/1.01 to 1.01).
        check: the quality guard's result, ``{"passed": bool, "reason": str, …}``; anything but ``passed`` being
            True blocks. Empty or None: no guard ran, which the line says.
        unsupported: why the arm cannot run here.

    Returns:
        faster or slower: the 95 % interval lies wholly beyond the margin. same: the 90 % interval lies wholly
        inside (two one-sided tests at 5 %). unclear: neither. blocked: the quality guard failed. unsupported:
        `unsupported` was given.

    Raises:
        StatisticsError: a margin that is not above 0.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise StatisticsError(f"margin is {margin!r}; it must be finite and above 0")
    if unsupported:
        return "unsupported", unsupported
    if check and check.get("passed") is not True:
        return "blocked", f"wrong answers: {check.get('reason') or 'the quality guard gave no result'}"
    word, reason = _speed(estimate, margin)
    return word, reason if check else f"{reason}; no quality guard ran"


def _speed(estimate: Estimate | None, margin: float) -> tuple[Verdict, str]:
    if estimate is None or estimate.ratio is None:
        return "unclear", (estimate.reason if estimate else None) or "nothing was measured"
    if estimate.low is None or estimate.high is None or estimate.low90 is None or estimate.high90 is None:
        return "unclear", f"ratio {estimate.ratio:.3f} without an interval: {estimate.reason}"
    scope = ", this process only" if estimate.unit == "block" else ""
    band = f"{1 / (1 + margin):.3f} to {1 + margin:.3f}"
    interval95 = f"95 % interval {estimate.low:.3f} to {estimate.high:.3f}{scope}"
    if estimate.low > 1 + margin:
        return "faster", f"{interval95}, lies wholly above {1 + margin:.3f}"
    if estimate.high < 1 / (1 + margin):
        return "slower", f"{interval95}, lies wholly below {1 / (1 + margin):.3f}"
    interval90 = f"90 % interval {estimate.low90:.3f} to {estimate.high90:.3f}{scope}"
    if estimate.low90 >= 1 / (1 + margin) and estimate.high90 <= 1 + margin:
        return "same", f"{interval90}, lies inside {band}"
    could = f"a ratio of {estimate.detectable:.3f}" if estimate.detectable else "no effect of a size worth naming"
    return "unclear", f"{interval95}, neither clears nor fits {band}; this run could have seen {could}"


@dataclass(frozen=True)
class Gate:
    """What a gate answers: 0 no confirmed slowdown, 1 confirmed slowdown, 2 cannot tell; and one line."""

    code: Literal[0, 1, 2]
    reason: str


def gate(
    first: GateStage,
    confirmation: GateStage | None,
    verdicts: Mapping[str, Verdict],
    problems: Sequence[str] = (),
    max_unclear: float = 0.25,
) -> Gate:
    """Exit code of the gate.

    Args:
        first: tests of the run at hand. confirmation: tests of its suspects on fresh sessions, None if not run.
        verdicts: verdict of every contrast the gate is about.
        problems: one line each for what is missing, unreadable or of another version.
        max_unclear: share of unclear contrasts from which silence means nothing.

    A confirmed slowdown is code 1 even when other points are missing: it is known. Otherwise every doubt (no
    contrast, a problem, a blocked contrast, an unconfirmed or untestable one, too many unclear) is code 2: an
    empty or broken run never passes.
    """
    confirmed = confirmation.slower if confirmation else ()
    doubts = _doubts(first, confirmation, verdicts, problems, max_unclear)
    if confirmed:
        also = f"; also {'; '.join(doubts)}" if doubts else ""
        return Gate(1, f"confirmed slower: {', '.join(confirmed)}{also}")
    if doubts:
        return Gate(2, f"cannot tell: {'; '.join(doubts)}")
    count = f"{len(verdicts)} contrast{'' if len(verdicts) == 1 else 's'}"
    return Gate(0, f"no confirmed slowdown in {count}")


def _doubts(
    first: GateStage,
    confirmation: GateStage | None,
    verdicts: Mapping[str, Verdict],
    problems: Sequence[str],
    max_unclear: float,
) -> list[str]:
    doubts = list(problems)
    if not verdicts:
        doubts.append("no contrast was measured")
    blocked = [name for name, word in verdicts.items() if word == "blocked"]
    if blocked:
        doubts.append(f"blocked by the quality guard: {', '.join(blocked)}")
    if first.slower and confirmation is None:
        doubts.append(f"slower, not yet confirmed on fresh sessions: {', '.join(first.slower)}")
    untestable = dict.fromkeys((*first.untestable, *(confirmation.untestable if confirmation else ())))
    if untestable:
        doubts.append(f"no interval for {', '.join(untestable)}")
    absent = [
        name
        for name, word in verdicts.items()
        if word not in ("blocked", "unsupported") and name not in first.adjusted and name not in untestable
    ]
    if absent:
        doubts.append(f"not tested: {', '.join(absent)}")
    unclear = sum(word == "unclear" for word in verdicts.values())
    if verdicts and unclear / len(verdicts) > max_unclear:
        doubts.append(f"{unclear} of {len(verdicts)} contrasts are unclear")
    return doubts
