"""The dry run: what a plan would do, for people (a table) and for programs (JSON)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from sweeps.plan import Plan, gigabytes, spell_time


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: times in seconds, sizes in bytes."""
    job = plan.job
    return {
        "run_dir": job.run_dir,
        "model": {"name": plan.model.name, "synthetic": plan.model.synthetic, "missing": plan.model.missing},
        "machine": {"name": plan.machine.name, "working_set_bytes": plan.machine.working_set_bytes},
        "sessions": job.sessions,
        "seconds": round(plan.seconds, 1),
        "budget_seconds": job.budget_seconds,
        "part_seconds": job.settings["part_seconds"],
        "parts": plan.parts,
        "probed": plan.probed,
        "arms": [{"name": a.name, "subject": a.subject, "toggles": a.toggles, "aa": a.aa} for a in job.arms],
        "expanded": plan.expanded,
        "contrasts": [c.name for c in job.contrasts],
        "frontiers": [
            {
                "frontier": row.frontier,
                "walk": row.walk,
                "seconds": {phase: round(value, 1) for phase, value in row.seconds.items()},
                "blocks": row.blocks,
                "bytes": row.memory.total,
                "weights_bytes": row.memory.weights,
                "caches_bytes": row.memory.caches,
                "scratch_bytes": row.memory.scratch,
                "fits": row.memory.fits,
                "skip": row.skip,
            }
            for row in plan.rows
        ],
        "dropped": plan.dropped,
        "notes": plan.notes,
    }


def show(plan: Plan, console: Console | None = None, form: str = "true") -> None:
    """Print the plan to stdout; `form` ``"json"`` prints one JSON object."""
    console = console or Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    if form == "json":
        print(json.dumps(as_dict(plan), indent=1), file=console.file)
        return
    job, model = plan.job, plan.model
    kind = "synthetic weights" if model.synthetic else "trained weights"
    console.print(f"Plan: {model.name} ({kind}), sweep={job.settings['sweep']}, {job.sessions} session(s)")
    console.print(f"Machine: {plan.machine.name}, working set {gigabytes(plan.machine.working_set_bytes)}")
    _arms(plan, console)
    console.print(_table(plan))
    _list(console, "Skipped", _skips(plan))
    _list(console, "Given up for the budget", plan.dropped)
    _list(console, "Notes", [*([model.missing] if model.missing else []), *plan.notes])
    basis = "measured by a probe" if plan.probed else "from the geometry"
    budget = spell_time(job.budget_seconds)
    if all(len(row.skip) == len(job.arms) for row in plan.rows):
        console.print("Total: nothing can be measured here, for the reasons above")
    else:
        console.print(f"Total: {spell_time(plan.seconds)} ({basis}) of a budget of {budget}")
    if plan.machine.kind == "cuda" or plan.parts > 1:
        console.print(_device_time(plan))
    console.print(f"Output: {job.run_dir}", markup=False)


def show_suite(
    name: str,
    numbered: Mapping[int, Plan],
    count: int,
    part: float | None,
    console: Console | None = None,
    form: str = "true",
) -> None:
    """Print plans of a suite by number of `count`, and what they take together; ``"json"`` prints one JSON object."""
    plans = list(numbered.values())
    console = console or Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    total = sum(plan.seconds for plan in plans)
    if form == "json":
        jobs = [{"number": number, **as_dict(plan)} for number, plan in numbered.items()]
        made = {"suite": name, "seconds": round(total, 1), "jobs": jobs}
        print(json.dumps(made, indent=1), file=console.file)
        return
    for number, plan in numbered.items():
        console.print(f"\nJob {number} of {count}", markup=False)
        show(plan, console)
    starts = sum(plan.start_seconds * plan.job.sessions for plan in plans)
    said = (
        f"Suite {name}: {len(plans)} jobs, {spell_time(total)} in all, {spell_time(starts)} of it for loading weights"
    )
    if part:
        said += f"; in parts of {spell_time(part)}: give the same command {math.ceil(total / part)} times or more"
    console.print(said, markup=False)


def _device_time(plan: Plan) -> str:
    """Minutes on the accelerator, and how often the command is to be given where a run is cut into parts."""
    said = f"Device time: {plan.seconds / 60:.0f} min"
    part = plan.job.settings.get("part_seconds")
    if not part:
        return f"{said} at a stretch (part=8m would cut it into parts)"
    if plan.parts == 1:
        return f"{said}, in one part of at most {spell_time(part)}"
    return f"{said}, in {plan.parts} parts of at most {spell_time(part)}: give the same command {plan.parts} times"


def _arms(plan: Plan, console: Console) -> None:
    for arm in plan.job.arms:
        note = " (A/A: the same arm again)" if arm.aa else ""
        console.print(f"Arm {arm.name}: {arm.subject}{note}", markup=False)
        for toggle, fields in plan.expanded.get(arm.name, {}).items():
            shown = ", ".join(f"{name}={value}" for name, value in fields.items())
            console.print(f"  {toggle} sets {shown}", markup=False)
    for contrast in plan.job.contrasts:
        console.print(f"Contrast: {contrast.arm} against {contrast.reference}", markup=False)


def _table(plan: Plan) -> Table:
    table = Table(title=None)
    for name in ("frontier", "prompt", "prefill", "decode", "blocks", "memory", "runs"):
        table.add_column(name, justify="left" if name in ("prompt", "runs") else "right")
    arms = len(plan.job.arms)
    for row in plan.rows:
        skipped = len(row.skip)
        runs = "all arms" if not skipped else f"{arms - skipped} of {arms} arms"
        table.add_row(
            str(row.frontier),
            "walk" if row.walk else "fresh",
            _cell(row.seconds.get("prefill")),
            _cell(row.seconds.get("decode")),
            " + ".join(str(count) for count in row.blocks.values()),
            gigabytes(row.memory.total),
            runs,
        )
    return table


def _cell(seconds: float | None) -> str:
    return "-" if not seconds else spell_time(seconds)


def _skips(plan: Plan) -> list[str]:
    lines = []
    for row in plan.rows:
        for reason in dict.fromkeys(row.skip.values()):
            names = [name for name, own in row.skip.items() if own == reason]
            who = "all arms" if len(names) == len(plan.job.arms) else ", ".join(names)
            lines.append(f"{row.frontier}: {who}: {reason}")
    return lines


def _list(console: Console, title: str, lines: list[str]) -> None:
    for line in lines:
        console.print(f"{title}: {line}", markup=False)
