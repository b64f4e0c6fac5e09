"""The first screen: for each contrast and phase, what was found, by how much, how sure, and is the output right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports import facts, text
from reports.cells import PHASES, Cell, Result, Study
from sweeps.rows import RunRow

NOISY_MARGIN = 0.1
"""Margin from which a report warns that its machine was too noisy for fine questions."""

VERDICTS = ("faster", "slower", "same", "unclear", "blocked", "unsupported")

_WORDS = {"unsupported": "not run"}


@dataclass
class Finding:
    """One contrast at one phase in words; `ratios` and `right` in short, for a table of many.

    word: the verdict, or ``mixed`` where it changes with context.
    """

    title: str
    phase: str
    word: str
    sentence: str
    how_much: str
    how_sure: str
    still_right: str
    limit: str
    ratios: str
    right: str


def findings(study: Study) -> list[Finding]:
    """A finding per contrast and phase, contrasts of an arm with itself left out."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in study.results:
        if not result.aa:
            groups.setdefault((result.contrast, result.arm, result.reference, result.phase), []).append(result)
    return [_finding(study, group) for group in groups.values()]


def _finding(study: Study, group: list[Result]) -> Finding:
    first = group[0]
    found = {v: [r.frontier for r in group if r.verdict == v] for v in VERDICTS}
    found = {v: at for v, at in found.items() if at}
    word = next(iter(found)) if len(found) == 1 else "mixed" if found else "unclear"
    return Finding(
        title=f"{first.arm} against {first.reference}",
        phase=first.phase,
        word=word,
        sentence=_sentence(first, found, word),
        how_much=_how_much(group),
        how_sure=_how_sure(group),
        still_right=_still_right(group),
        limit=limit(study.line(first.arm, first.phase)),
        ratios=_ratios(group),
        right=_right(group),
    )


def _sentence(first: Result, found: dict[str, list[int]], word: str) -> str:
    phase, arm, reference = first.phase.capitalize(), first.arm, first.reference
    if word == "mixed":
        tested = [f for at in found.values() for f in at]
        parts = [f"{_WORDS.get(v, v)} at {text.frontier_list(at, tested)}" for v, at in found.items()]
        return f"{phase}: {arm} against {reference} depends on the context: {'; '.join(parts)}."
    at = sorted({f for frontiers in found.values() for f in frontiers})
    where = f"at all {len(at)} context lengths" if len(at) > 1 else f"at {text.frontier_list(at)} tokens"
    return (
        f"{phase}: "
        + {
            "faster": f"{arm} is faster than {reference} {where}.",
            "slower": f"{arm} is slower than {reference} {where}.",
            "same": f"{arm} is as fast as {reference}, within the margin, {where}.",
            "unclear": f"this run cannot tell whether {arm} is faster than {reference} {where}.",
            "blocked": f"no speed is given for {arm} {where}: its output failed the quality guard.",
            "unsupported": f"{arm} against {reference} was not run here{_because(first.reason)}.",
        }[word]
    )


def _because(reason: str) -> str:
    return f": {reason.rstrip('.')}" if reason else ""


def _how_much(group: Sequence[Result]) -> str:
    known = [r for r in group if r.ratio is not None]
    if not known:
        return "no ratio"
    ends = (min(known, key=lambda r: r.ratio or 0), max(known, key=lambda r: r.ratio or 0))
    parts = [f"{text.ratio(r.ratio)} {text.interval(r.low, r.high)} at {text.tokens(r.frontier)}" for r in ends]
    return parts[0] if len(known) == 1 else " to ".join(parts)


def _ratios(group: Sequence[Result]) -> str:
    known = sorted(r.ratio for r in group if r.ratio is not None)
    ends = list(dict.fromkeys(text.ratio(x) for x in known[:1] + known[-1:]))
    return " to ".join(ends) or text.ABSENT


def _right(group: Sequence[Result]) -> str:
    if any(r.verdict == "blocked" for r in group):
        return "NO"
    return "yes" if all(r.check.get("passed") is True for r in _ran(group)) else "not checked everywhere"


def _ran(group: Sequence[Result]) -> list[Result]:
    """Points that have something to be right: a ratio, or a check of their own; all of them where none has."""
    return [r for r in group if r.ratio is not None or r.check] or list(group)


def _how_sure(group: Sequence[Result]) -> str:
    units = sorted({r.units for r in group})
    span = text.count(units[0], "unit") if len(units) == 1 else f"{units[0]} to {units[-1]} units"
    kinds = {r.unit for r in group}
    if kinds == {"session"}:
        said = span.replace("unit", "session") + ", each a fresh process"
    elif kinds == {"block"}:
        said = span.replace("unit", "block") + " of one session: this process only"
    else:
        said = span + ", sessions at some contexts, blocks of one session (this process only) at others"
    margins = [r.margin for r in group if r.margin is not None]
    said += f"; margin {text.percent(max(margins))}" if margins else "; no margin recorded"
    seen = [r.detectable for r in group if r.verdict == "unclear" and r.detectable is not None]
    if seen:
        what = (
            f"a difference of {text.percent(max(seen) - 1)}" if max(seen) < 2 else f"a ratio of {text.ratio(max(seen))}"
        )
        said += f"; where unclear, {what} would have been seen"
    return said


def _still_right(group: Sequence[Result]) -> str:
    ran = _ran(group)
    verdicts = [r.check.get("passed") for r in ran]
    names = sorted({text.plain(r.check.get("name")) for r in group if r.check.get("name")})
    by = f" ({', '.join(names)})" if names else ""
    failed = [r.frontier for r in group if r.verdict == "blocked" or r.check.get("passed") is False]
    if failed:
        return f"NO: quality guard failed at {text.frontier_list(failed, [r.frontier for r in group])}{by}"
    passed = sum(v is True for v in verdicts)
    if not passed:
        return "not checked: no quality guard ran"
    if passed < len(ran):
        return f"yes where checked: at {passed} of {text.count(len(ran), 'point')}{by}"
    at = "" if passed == len(group) else f" at the {text.count(passed, 'point')} with a number"
    return f"yes: quality guard passed{at}{by}"


def limit(line: Sequence[Cell]) -> str:
    """How near decoding comes to the memory bandwidth by the least bytes it moves; for prefill, least arithmetic."""
    if line and line[0].phase == "prefill":
        return _compute_limit(line)
    known = [c for c in line if c.bytes_per_second]
    if not known:
        return "not measured: the rows hold no least bytes for it"
    best = max(known, key=lambda c: c.bytes_per_second or 0)
    reached = f"{text.number((best.bytes_per_second or 0) / 1e9)} GB/s of least bytes at {text.tokens(best.frontier)}"
    shares = [c.bytes_per_second / c.bandwidth for c in known if c.bandwidth and c.bytes_per_second]
    if not shares:
        return f"{reached}; bandwidth of the device not measured"
    low, high = text.percent(min(shares)), text.percent(max(shares))
    return f"{low if low == high else f'{low} to {high}'} of the memory bandwidth; {reached}"


def _compute_limit(line: Sequence[Cell]) -> str:
    known = [(c.flops_per_second, c.frontier) for c in line if c.flops_per_second]
    if not known:
        return "not measured: the rows hold no least arithmetic for it"
    best, at = max(known)
    reached = f"{text.number(best / 1e12)} TFLOP/s of least arithmetic at {text.tokens(at)}"
    shares = [c.flops_per_second / c.peak_flops for c in line if c.flops_per_second and c.peak_flops]
    if not shares:
        return f"{reached}; peak of the device not measured"
    low, high = text.percent(min(shares)), text.percent(max(shares))
    return f"{low if low == high else f'{low} to {high}'} of one large product's arithmetic; {reached}"


def noise(study: Study) -> str:
    """What comparing an arm with itself gave, or that nothing did."""
    aa = [r for r in study.results if r.aa and r.ratio is not None]
    if not aa:
        return "No arm was compared with itself in these rows, so the noise of this run is not shown."
    low, high = min(r.ratio or 1 for r in aa), max(r.ratio or 1 for r in aa)
    held = sum(r.low is not None and r.high is not None and r.low <= 1 <= r.high for r in aa)
    return (
        f"An arm compared with itself gave {text.ratio(low)} to {text.ratio(high)} over {text.count(len(aa), 'point')} "
        f"(the truth is 1); its interval held 1 at {held} of them."
    )


def walk_checks(study: Study) -> list[str]:
    """What comparing a walk of growing contexts with one straight prompt gave."""
    said = []
    for row in study.rows.samples:
        check = row.extra.get("walk_check")
        if isinstance(check, dict):
            passed = "agrees" if check.get("passed") else "DIFFERS by more than the tolerance"
            arm = study.label(row.run_id, row.arm)
            ratio = text.ratio(check.get("ratio"))
            said.append(f"{arm} at {text.tokens(row.frontier)}: walk over straight prompt {ratio}, {passed}")
    return said


def warnings(runs: Sequence[RunRow], study: Study) -> list[str]:
    """What a reader must know before the first number."""
    said = []
    if any(facts.device_kind(run) == "cuda" for run in runs):
        said.append(
            "This is a CUDA device. MLX-LM has no fast Gated DeltaNet here, so a ratio to MLX-LM says little; the peer "
            "to beat on this device is llama.cpp. Nothing in this report speaks of a Mac."
        )
    if any(facts.is_toy(run) for run in runs):
        said.append(
            "Toy model: these speeds show that the path works and say nothing about the real model. "
            f"For the real model: {facts.REAL_MODEL_COMMAND}"
        )
    if any(facts.is_synthetic(run) for run in runs):
        said.append(
            "Synthetic weights: they are random, so the text means nothing and experts are not chosen as in real text. "
            "Output is checked layer by layer."
        )
    for name in dict.fromkeys(study.label(r.run_id, r.arm) for r in study.rows.samples if "client_clock" in r.flags):
        said.append(
            f"{name} is an endpoint seen by a client: its prefill rate counts from the question to the first token, "
            "with the way there, the queue and that token; its decode rate comes from the gaps of a stream. "
            "It was measured apart from the other arms, its output is not checked, and it stands in no contrast. "
            "Prompts that it had cached and answers that ended early are refused."
        )
    if len({facts.signature(run) for run in runs}) > 1:
        said.append("These rows come from different machines, models or versions; their series are kept apart by name.")
    versions = sorted({str(run.project_version) for run in runs})
    if len(versions) > 1:
        said.append(f"These rows come from different versions of this project: {', '.join(versions)}.")
    if any((run.git or {}).get("dirty") for run in runs):
        said.append("The working tree had uncommitted changes when this was measured.")
    if any(r.unit == "block" and r.units for r in study.results if not r.aa):
        said.append("This process only: intervals come from blocks of one session. A new process may differ by more.")
    margins = [r.margin for r in study.results if r.margin is not None]
    if margins and max(margins) > NOISY_MARGIN:
        said.append(
            f"Noisy: an arm differed from itself so much that differences up to {text.percent(max(margins))} count "
            "as none. Here, same means little."
        )
    broken = [c for c in study.gaps() if c.gap in ("oom", "timeout", "error")]
    if broken:
        said.append(f"{text.count(len(broken), 'point')} failed; see Skipped and failed.")
    return said


def places(runs: Sequence[RunRow]) -> list[dict[str, str]]:
    """One entry per machine, model and set of versions: what was measured, on what, with what, when."""
    seen: dict[tuple[str, ...], list[RunRow]] = {}
    for run in runs:
        seen.setdefault(facts.signature(run), []).append(run)
    return [_place(group) for group in seen.values()]


def _place(group: list[RunRow]) -> dict[str, str]:
    run = group[0]
    days = sorted({str(r.started)[:10] for r in group})
    kind = facts.device_kind(run)
    weights = (
        "synthetic (random)" if facts.is_synthetic(run) else "small, trained" if facts.is_toy(run) else "as published"
    )
    if busy := facts.busiest(run):
        weights += f", busiest expert {busy}"
    wheel = facts.lookup(run.machine, ("mlx-metal wheel", "mlx-cuda-13 wheel", "mlx-cuda-12 wheel", "mlx-cpu wheel"))
    memory = facts.finite(facts.lookup(run.machine, ("memory", "memory_bytes", "memory_size", "ram")))
    return {
        "Device": facts.chip_name(run) + (f" ({kind})" if kind else "") + (f", {text.size(memory)}" if memory else ""),
        "Model": f"{text.one_line(facts.model_name(run))}, weights {weights}",
        "Engine": f"lilybench {_numbered(run.project_version)}on mlx {facts.version(run, 'mlx')}"
        + (f" ({wheel})" if wheel else ""),
        "Baseline": f"mlx-lm {facts.version(run, 'mlx_lm')} on mlx {facts.version(run, 'mlx')}",
        "Date": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        "Sessions": text.count(len({(r.run_id, r.session) for r in group}), "session"),
    }


def _numbered(version: str) -> str:
    """A version with a space after it; nothing where the project ran without being installed."""
    return f"{version} " if str(version)[:1].isdigit() else ""


def requested_against_executed(study: Study) -> list[dict[str, Any]]:
    """A row per arm, phase and op: the variant asked for, the ones that ran, and whether they agree."""
    asked = _requested(study)
    ran: dict[tuple[str, str, str], dict[tuple[str, str], int]] = {}
    chosen: dict[tuple[str, str, str], set[str]] = {}
    for row in study.rows.samples:
        if row.phase not in PHASES:
            continue
        arm = study.label(row.run_id, row.arm)
        for item in row.executed:
            key = (arm, row.phase, text.plain(item.get("op")))
            variants = ran.setdefault(key, {})
            what = (text.plain(item.get("variant")), text.plain(item.get("tile")))
            variants[what] = variants.get(what, 0) + int(facts.finite(item.get("calls")) or 0)
            chosen.setdefault(key, set()).add(str(item.get("chosen") or ""))
    table = []
    for (arm, phase, op), variants in ran.items():
        want = asked.get((arm, op), text.ABSENT)
        names = {variant for variant, _ in variants}
        free = want in ("best", text.ABSENT)
        # Where one call in a phase was chosen without a measurement, the phase is not tuned.
        how = next((word for word in ("untuned", "tuned") if word in chosen[arm, phase, op]), "")
        table.append(
            {
                "arm": arm,
                "phase": phase,
                "op": op,
                "requested": want if how == "" else f"{want} ({how})",
                "executed": ", ".join(v if t == text.ABSENT else f"{v} ({t})" for v, t in variants),
                "calls": sum(variants.values()),
                "agrees": "free choice" if free else "yes" if names == {want} else "NO",
            }
        )
    order = {arm: i for i, arm in enumerate(study.arms)}
    return sorted(table, key=lambda row: (order.get(row["arm"], len(order)), PHASES.index(row["phase"])))


def _requested(study: Study) -> dict[tuple[str, str], str]:
    """Variant asked for by (series, op), from the plan's configuration of each arm."""
    asked = {}
    for job in study.rows.jobs:
        for arm in job.get("arms", []):
            name = study.label(str(job.get("run_id", "")), str(arm.get("name", "")))
            for op, value in (arm.get("config") or {}).items():
                variant = value.get("variant") if isinstance(value, dict) else value
                if isinstance(variant, str):
                    asked[name, op] = variant
    return asked
