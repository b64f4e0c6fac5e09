"""Answers from windows: a setting that did nothing is no measurement, however its two arms came apart."""

from __future__ import annotations

from typing import Any

import pytest
import report_rows as rows

from ablations.arms import arm_config
from sweeps.contrasts import contrast_rows
from sweeps.points import Arm, Contrast, Job, Point


def answer(executed: dict[str, list[tuple[str, str, str]]], toggles: dict[str, Any], **options: Any):
    """The one contrast of `toggles` against full, whose arms report what they executed; the arm is 30 % faster."""
    arms = [
        Arm("full", "engine", arm_config("full").to_dict(), hash="a"),
        Arm("changed", "engine", arm_config("full", toggles).to_dict(), toggles, options, hash="b"),
    ]
    point = Point("p", "decode", 256, 4)
    job = Job("", "r1", {}, {}, arms, [Contrast("c", "changed", "full")], [point], 1, 0, 60, 60)
    samples = [
        rows.sample(
            arm.name,
            "decode",
            256,
            0,
            block,
            slot,
            point="p",
            elapsed_ns=10**9 + block * 10**6 if arm.name == "full" else 13 * 10**8,
            executed=[dict(zip(("op", "variant", "tile"), one), calls=1) for one in executed[arm.name]],
        )
        for block in range(4)
        for slot, arm in enumerate((*arms, *reversed(arms)))
    ]
    (row,) = contrast_rows(job, samples)
    return row


STEP = ("decode_step", "eager", "")
SAME = {"full": [("linear", "mlx", ""), STEP], "changed": [("linear", "mlx", ""), STEP]}
OTHER = SAME | {"changed": [("linear", "mlx", ""), ("decode_step", "step", "")]}


def test_a_toggle_that_is_accepted_but_does_nothing_is_caught_by_what_was_executed():
    row = answer(SAME, {"step_trace": "step"})
    assert row.verdict == "unsupported" and "decode.trace=step changed nothing here" in (row.reason or "")
    assert answer(OTHER, {"step_trace": "step"}).verdict == "slower"


@pytest.mark.parametrize(
    ("toggles", "options"),
    [
        ({"phase_overlap": "on"}, {}),
        ({"step_trace": "step"}, {"slowdown": 1.05}),
        ({"step_trace": "step"}, {"checkout": "x"}),
    ],
)
def test_what_leaves_no_trace_there_is_not_called_idle(toggles, options):
    assert answer(SAME, toggles, **options).verdict == "slower"
