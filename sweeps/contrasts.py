"""From the windows of a run to the answers to its questions, with the statistics of `ablations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ablations.statistics import (
    LEAST_MARGIN,
    MOST_MARGIN,
    Estimate,
    StatisticsError,
    Window,
    aa_margin,
    block_log_ratios,
    paired_ratio,
)
from ablations.verdicts import verdict
from sweeps import calibration, toggles
from sweeps.points import Contrast, Job, Point
from sweeps.rows import ContrastRow, SampleRow, tokens_per_second
from sweeps.store import RETRY


def contrast_rows(
    job: Job, samples: Sequence[SampleRow], earlier: Sequence[calibration.Earlier] = ()
) -> list[ContrastRow]:
    """Every contrast of the job at every point, with the margin that its A/A arm sets there.

    Args:
        earlier: runs on this machine whose A/A arms count too, where their points are alike.
    """
    again = {arm.name for arm in job.arms if arm.aa}
    rows = []
    for point in job.points:
        here = [row for row in samples if row.point == point.key]
        margin = _margin(job, point, here, again, earlier)
        rows += [_answer(job, contrast, point, here, margin) for contrast in job.contrasts]
    return rows


def _margin(
    job: Job, point: Point, here: Sequence[SampleRow], again: set[str], earlier: Sequence[calibration.Earlier]
) -> float:
    """The widest margin that the A/A contrasts at this point ask for, with those of earlier runs beside them."""
    pairs = [contrast for contrast in job.contrasts if contrast.arm in again]
    estimates = [_estimate(contrast, here, 0.0)[0] for contrast in pairs]
    blocks = len({row.block for row in here if row.block >= 0 and row.status == "ok"})
    known = calibration.ratios(earlier, job, point, blocks)
    asked = float(job.settings.get("least_margin") or LEAST_MARGIN)
    return max(asked, *([aa_margin(estimate, known) for estimate in estimates] or [aa_margin(None, known)]))


def _estimate(contrast: Contrast, here: Sequence[SampleRow], margin: float) -> tuple[Estimate | None, str | None]:
    windows = [
        Window(row.session, row.block, row.arm, rate)
        for row in here
        if row.block >= 0 and (rate := tokens_per_second(row)) is not None
    ]
    try:
        sessions, dropped = block_log_ratios(windows, contrast.arm, contrast.reference)
        estimate = paired_ratio(sessions, margin=margin)
    except StatisticsError as error:
        return None, str(error)
    lost = f"{len(dropped)} blocks left out, which lost a window" if dropped else None
    return estimate, lost


def _answer(job: Job, contrast: Contrast, point: Point, here: Sequence[SampleRow], margin: float) -> ContrastRow:
    estimate, lost = _estimate(contrast, here, margin)
    check = _check(contrast, here)
    word, reason = verdict(estimate, margin, check, _unsupported(contrast, here) or idle(job, contrast, here))
    if word == "unclear" and (estimate is None or estimate.ratio is None):
        reason = _why_nothing(contrast, here) or reason
    if word == "same" and margin > MOST_MARGIN:
        word = "unclear"
        reason = f"identical arms came apart by up to {margin:.0%} here, too much to call any two the same"
    # A blocked contrast has no speed: a fast wrong answer is not a measurement.
    shown = estimate if estimate is not None and word != "blocked" else None
    number: dict[str, Any] = {
        name: getattr(shown, name, None) for name in ("ratio", "low", "high", "low90", "high90", "detectable")
    }
    method = estimate.method if estimate else "no estimate"
    return ContrastRow(
        run_ids=[job.run_id],
        contrast=contrast.name,
        arm=contrast.arm,
        reference=contrast.reference,
        phase=point.phase,
        frontier=point.frontier,
        units=estimate.units if estimate else 0,
        unit=estimate.unit if estimate else "block",
        margin=margin,
        verdict=word,
        reason=f"{reason}; {lost}" if lost else reason,
        method=method,
        check=check,
        **number,
    )


def _check(contrast: Contrast, here: Sequence[SampleRow]) -> dict[str, Any]:
    """The quality guard's result on the arm and on its reference: a failed one, else the arm's, else nothing."""
    found = {row.arm: row.check for row in here if row.check}
    checks = [found[name] for name in (contrast.arm, contrast.reference) if name in found]
    failed = [check for check in checks if check.get("passed") is not True]
    return (failed or checks or [{}])[0]


def _unsupported(contrast: Contrast, here: Sequence[SampleRow]) -> str | None:
    """Why one side does not run here at all, if that is so."""
    for name in (contrast.arm, contrast.reference):
        rows = [row for row in here if row.arm == name and row.series is None]
        if rows and all(row.status == "skipped" and RETRY not in row.flags for row in rows):
            return f"{name}: {rows[0].reason}"
    return None


VISIBLE = frozenset(
    (
        "linear",
        "route",
        "experts.variant",
        "experts.tile",
        "decode_attention.variant",
        "decode_attention.split",
        "decode_attention.heads",
        "decode_attention.lanes",
        "prefill_attention",
        "gated_delta",
        "head",
        "prefill.submission",
        "prefill.chunk",
        "prefill.stretch",
        "decode.trace",
        "decode.feedback",
        "speculative.drafter",
    )
)
"""Fields of the engine whose effect shows in what a window reports as executed."""


def idle(job: Job, contrast: Contrast, here: Sequence[SampleRow]) -> str | None:
    """Why a contrast compares nothing: a setting that was accepted but changed nothing that ran; None if it did.

    Only where every field in which the arms differ would show: a drafter's vocabulary, say, leaves no trace there.
    """
    arms = {arm.name: arm for arm in job.arms}
    sides = [arms[name] for name in (contrast.arm, contrast.reference) if name in arms]
    apart = len(sides) < 2 or any(arm.subject != "engine" or arm.options or not arm.config for arm in sides)
    if apart or sides[0].hash == sides[1].hash:
        return None
    differing = toggles.differing(sides[0].config, sides[1].config)
    ran = [
        {(e["op"], e["variant"], str(e.get("tile"))) for row in here if row.arm == arm.name for e in row.executed}
        for arm in sides
    ]
    if not differing or set(differing) - VISIBLE or not ran[0] or ran[0] != ran[1]:
        return None
    said = ", ".join(f"{name}={value}" for name, value in differing.items())
    return f"{said} changed nothing here: both arms executed the same, so their ratio would be noise"


def _why_nothing(contrast: Contrast, here: Sequence[SampleRow]) -> str | None:
    for name in (contrast.arm, contrast.reference):
        for row in here:
            if row.arm == name and row.status != "ok":
                return f"{name}: {row.status}: {row.reason}"
    return None
