"""Which op became slower: named by timing it on both sides."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from reports.base_head import _slower_ops
from reports.gate import Answer, Line, with_timed
from sweeps import compose, models, opwise, plan
from sweeps.clock import ManualClock
from sweeps.forecast import this_machine

COSTS = {"experts": 50_000, "linear": 20_000, "head": 10_000}


class Fake:
    """An engine whose ops take a known time."""

    def __init__(self, clock: ManualClock, **slower: float) -> None:
        self.clock, self.slower = clock, slower

    def op(self, name: str, rows: int, context: int, passes: int) -> int:
        if name == "broken":
            raise ValueError("a kernel that\ndoes not compile")
        if name == "norm":
            return 0
        self.clock.advance(round(COSTS[name] * self.slower.get(name, 1.0)) * passes)
        return 1


def test_the_op_that_takes_longer_is_found_and_no_other() -> None:
    clock = ManualClock()
    sides: dict[str, opwise.Side] = {
        "base": Fake(clock),
        "head": Fake(clock, experts=1.05, linear=1.06, head=0.9),
        "head.again": Fake(clock, experts=1.05, linear=1.01),
    }
    rows = {row["op"]: row for row in opwise.compare(sides, [*COSTS, "norm", "broken"], 1, 256, clock)}
    assert {op for op, row in rows.items() if row.get("slower")} == {"experts"}
    assert rows["experts"]["ratio"] == pytest.approx(1.05, abs=1e-3)
    # Head and its repeat came apart by 5 %: that much is noise.
    assert rows["linear"]["noise"] > 0.04
    assert "norm" not in rows and rows["broken"]["reason"] == "a kernel that does not compile"


def test_the_gate_says_which_op_takes_longer() -> None:
    slow = Line("head vs base decode 256", "head vs base", "decode", 256, 0.9, 0.89, 0.91, 0.01, 0.001, "slower", "")
    slow = dataclasses.replace(slow, changed=("experts (a to b)", "head (c to d)"))
    fine = dataclasses.replace(slow, name="head vs base prefill 256", phase="prefill", word="ok")
    sentence = "decode at 256 is 11 % slower, changed ops: experts (a to b), head (c to d)".replace(" %", "\u00a0%")
    answer = Answer(1, f"slower ({sentence})", (slow, fine))
    asked: list[tuple[str, int]] = []

    def timed(run: Path, phase: str, frontier: int) -> list[dict[str, Any]]:
        asked.append((phase, frontier))
        return [
            {"op": "head", "ratio": 1.01, "slower": False},
            {"op": "experts", "ratio": 1.25, "slower": True},
            {"op": "norm", "reason": "no time"},
        ]

    named = with_timed(answer, _slower_ops(answer, Path("run"), timed))
    assert asked == [("decode", 256)], "only what is slower is worth the minutes"
    assert "slower ops by timing: experts (25\u00a0% longer))" in named.reason
    assert named.lines[1].timed is None
    # Where nothing could be timed the answer stays as it was.
    assert with_timed(answer, _slower_ops(answer, Path("run"), lambda *_: [])) == answer


SLOWER = """

import dataclasses as _dataclasses

from engine.ops.registry import OPS as _OPS


def _twice(run):
    def slow(x, *rest, **settings):
        return run(x, *rest, **settings) + 0 * run(x + 1e-20, *rest, **settings)

    return slow


for _name, _variant in list(_OPS["experts"].variants.items()):
    _OPS["experts"].variants[_name] = _dataclasses.replace(_variant, run=_twice(_variant.run))
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_op_planted_in_a_checkout_is_named(tmp_path: Path) -> None:
    for side in ("base", "head"):
        for room in ("engine", "ablations", "sweeps", "configs"):
            shutil.copytree(
                Path(opwise.__file__).parents[1] / room,
                tmp_path / side / room,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    with (tmp_path / "head" / "engine" / "ops" / "experts.py").open("a", encoding="utf-8") as file:
        file.write(SLOWER)
    words = [f"base={tmp_path / 'base'}", f"head={tmp_path / 'head'}", "frontiers=[256]", f"run_dir={tmp_path / 'run'}"]
    request = compose.request(words)
    made = plan.make(request, models.find(request), this_machine()).job
    for phase in ("prefill", "decode"):
        rows = opwise.of_run(made, phase, 256)
        slower = sorted((row for row in rows if row.get("slower")), key=lambda row: -row["ratio"])
        # A busy machine may put another beside it, never before it.
        assert [row["op"] for row in slower[:1]] == ["experts"], rows
