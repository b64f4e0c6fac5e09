"""The ladder from everything off to everything on, as a waterfall: what each step adds to those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import matplotlib

from reports import figures, text
from reports.cells import Result, Study
from reports.figures import COLOURS, INK, STYLE, Plot
from reports.tables import Column, Table

MARKS = {"faster": "▲", "slower": "▼", "same": "=", "unclear": "?", "blocked": "✕", "unsupported": "–"}
UP, DOWN, LEVEL = COLOURS[2], COLOURS[1], COLOURS[6]


@dataclass
class Step:
    """One rung: what was added, and the answer against the rung below. `total`: the highest against the lowest."""

    name: str
    result: Result | None
    total: bool = False


@dataclass
class Ladder:
    """The steps at one phase and context, and what could not be a step here, with the reason."""

    phase: str
    frontier: int
    steps: list[Step]
    left_out: dict[str, str] = field(default_factory=dict)


def ladders(study: Study) -> list[Ladder]:
    """Every ladder of the plans, at every phase and context that has an answer."""
    made = []
    for job in study.rows.jobs:
        run_id = str(job.get("run_id", ""))
        for one in (job.get("settings") or {}).get("ladders") or []:
            arms = [study.label(run_id, str(name)) for name in one.get("arms", [])]
            pairs = [(step, a, b) for step, a, b in zip(one.get("steps", [])[1:], arms[1:], arms)]
            answers = {
                (r.phase, r.frontier, r.arm, r.reference): r for r in study.results if run_id in r.run_ids and not r.aa
            }
            for phase, frontier in sorted({key[:2] for key in answers}, key=lambda key: (key[0] == "decode", key[1])):
                steps = [Step(name, answers.get((phase, frontier, a, b))) for name, a, b in pairs]
                if any(step.result for step in steps):
                    whole = answers.get((phase, frontier, arms[-1], arms[0]))
                    steps.append(Step("together", whole, total=True))
                    made.append(Ladder(phase, frontier, steps, dict(one.get("left_out") or {})))
    return made


def table(found: list[Ladder]) -> Table:
    """The steps of every ladder, those left out at the end."""
    columns = [
        Column("phase", "phase"),
        Column("frontier", "context", text.tokens, True),
        Column("step", "step"),
        Column("ratio", "ratio to the rung below", text.ratio, True),
        Column("interval", "95 % interval", text.plain, True),
        Column("verdict", "verdict"),
        Column("height", "product so far", text.ratio, True),
        Column("reason", "why"),
    ]
    rows: list[dict[str, Any]] = []
    for ladder in found:
        height: float | None = 1.0
        for step in ladder.steps:
            r = step.result
            ratio = r.ratio if r else None
            height = None if step.total or height is None or ratio is None else height * ratio
            rows.append(
                {
                    "phase": ladder.phase,
                    "frontier": ladder.frontier,
                    "step": step.name,
                    "ratio": ratio,
                    "low": r.low if r else None,
                    "high": r.high if r else None,
                    "interval": text.interval(r.low, r.high) if r and ratio is not None else text.ABSENT,
                    "verdict": r.verdict if r else "not run",
                    "height": height,
                    "reason": r.reason if r else "no contrast in these rows",
                }
            )
        for name, reason in ladder.left_out.items():
            at = {"phase": ladder.phase, "frontier": ladder.frontier}
            rows.append(at | {"step": name, "interval": text.ABSENT, "verdict": "left out", "reason": reason})
    return Table("ladder", "Each step against the rung below it", columns, rows, "These rows hold no ladder.")


def plots(found: list[Ladder]) -> list[Plot]:
    """A waterfall a phase and context."""
    with matplotlib.rc_context(STYLE):
        return [waterfall(ladder) for ladder in found]


def waterfall(ladder: Ladder) -> Plot:
    """Bars that start where the one before ends, on a logarithmic axis; the last stands on 1 and is the whole."""
    canvas = figures.Canvas(
        f"ladder-{ladder.phase}-{ladder.frontier}",
        f"Ladder, {ladder.phase} at {text.tokens(ladder.frontier)}: from everything off to everything on",
        [],
        height=0.34 * len(ladder.steps) + 1.5,
    )
    axes = canvas.axes
    axes.grid(axis="y", visible=False)
    height, said, span = 0.0, [], [0.0]
    for place, step in enumerate(ladder.steps):
        ratio = step.result.ratio if step.result else None
        if ratio is None or ratio <= 0:
            word = step.result.verdict if step.result else "not run"
            axes.annotate(f"✕ {word}", (height, place), va="center", fontsize=8)
            continue
        start = 0.0 if step.total else height
        length = math.log2(ratio)
        colour = INK if step.total else LEVEL if step.result and step.result.verdict in ("same", "unclear") else UP
        colour = DOWN if not step.total and step.result and step.result.verdict == "slower" else colour
        axes.barh([place], [length], left=[start], height=0.6, color=colour)
        mark = MARKS.get(step.result.verdict if step.result else "", "")
        end = max(start, start + length)
        axes.annotate(
            f"{mark} {text.ratio(ratio)}",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        if not step.total:
            axes.plot([start + length] * 2, [place, place + 1], color=INK, linewidth=0.6)
            height = start + length
        span += [start, start + length]
        canvas.drawn = True
        said.append(f"{step.name} {text.ratio(ratio)}")
    low, high = min(span), max(span)
    room = max(high - low, 0.1)
    axes.set_xlim(low - 0.06 * room, high + 0.4 * room)
    axes.set_ylim(len(ladder.steps) - 0.4, -0.6)
    axes.set_yticks(range(len(ladder.steps)), [text.one_line(step.name) for step in ladder.steps])
    axes.axvline(0, color=INK, linewidth=1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{2**x:.3g}×")
    axes.set_xlabel("ratio to everything off (logarithmic)")
    return canvas.finish(
        "; ".join(said) or "No step has a ratio.", "Grey bars are the same within the margin, or unclear."
    )
