"""Drafting: what was accepted, what it cost and whether it paid, by drafter, depth, kind of prompt and context."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from ablations.catalogue import claim
from ablations.statistics import bootstrap_interval
from engine.depth import ROWS, Costs, DepthController, break_even
from reports import facts, text
from reports.cells import Result, Study
from reports.limits import scaled
from reports.tables import Column, Table
from sweeps.ledger import LAUNCHES
from sweeps.rows import RunRow, SampleRow

PUBLISHED = ("speculative", "draft_vocab")
"""Names of the published claims about drafting."""

_PLACE = (Column("device", "device"), Column("model", "model"))


def drafting(study: Study) -> list[Table]:
    """The tables, in reading order."""
    return [outcomes(study), prices(study), published(study)]


def outcomes(study: Study) -> Table:
    """A row for each drafting arm, kind of prompt and context: its ratio to no drafting, and why."""
    columns = [
        Column("drafter", "drafter"),
        Column("depth", "depth"),
        Column("prompt", "prompt"),
        Column("frontier", "context", text.tokens, True),
        Column("ratio", "ratio to no drafts", text.ratio, True),
        Column("interval", "95 % interval", text.plain, True),
        Column("verdict", "verdict"),
        Column("prompts", "prompts", text.plain, True),
        Column("accepted", "accepted", text.percent, True),
        Column("accepted_interval", "95 % interval", text.plain, True),
        Column("needed", "pays from", text.percent, True),
        Column("per_step", "tokens a verification", text.number, True),
        Column("mean_depth", "depth chosen", text.number, True),
        Column("drafted_share", "tokens with drafts", text.percent, True),
        Column("experts", "experts a layer", text.number, True),
        Column("bytes_per_token", "MB a token", scaled(1e-6), True),
        Column("bytes_plain", "without", scaled(1e-6), True),
        *_PLACE,
    ]
    known = _settings(study)
    rows = [_outcome(study, known, *window) for window in _windows(study)]
    rows.sort(
        key=lambda row: (row["model"], row["device"], row["drafter"], row["depth"], row["prompt"], row["frontier"])
    )
    caption = "Drafting: accepted and needed are shares of the drafts; a ratio above 1 means that drafting is faster"
    return Table("drafting", caption, columns, rows, "No arm of these rows drafts.")


def _windows(study: Study) -> Iterator[tuple[RunRow, str, int, list[SampleRow]]]:
    """Drafting windows of an arm at a context, by run."""
    runs = {run.run_id: run for run in reversed(study.rows.runs)}
    found: dict[tuple[str, str, int], list[SampleRow]] = defaultdict(list)
    for row in study.rows.samples:
        drafted = isinstance(row.extra.get("speculation"), dict)
        if drafted and row.status == "ok" and row.block >= 0 and "aa" not in row.flags and row.run_id in runs:
            found[row.run_id, row.arm, row.frontier].append(row)
    for (run_id, arm, frontier), rows in found.items():
        yield runs[run_id], arm, frontier, rows


def _outcome(
    study: Study,
    known: Mapping[str, Mapping[str, Any]],
    run: RunRow,
    arm: str,
    frontier: int,
    samples: Sequence[SampleRow],
) -> dict[str, Any]:
    name = study.label(run.run_id, arm)
    settings = known.get(name, {})
    counts = [row.extra["speculation"] for row in samples]
    drafted, accepted, steps, plain, rows = (
        sum(facts.finite(c.get(name)) or 0 for c in counts)
        for name in ("drafted", "accepted", "steps", "plain", "rows")
    )
    depth = int(settings.get("depth") or 1)
    result = _against_plain(study, known, name, frontier)
    costs = _costs(run, arm)
    touched = _touched(study, run.run_id, arm, frontier)
    units, low, high = _acceptance(samples)
    own = any("trial" in row.extra for row in samples)
    return {
        "drafter": str(settings.get("drafter") or arm) + _trimmed(settings),
        "depth": f"up to {depth}" if settings.get("adaptive") else str(depth),
        "forced": settings.get("force"),
        "prompt": facts.prompt_kind(run) if settings.get("force", "none") == "none" else f"forced {settings['force']}",
        "frontier": frontier,
        "ratio": result.ratio if result else None,
        "low": result.low if result else None,
        "high": result.high if result else None,
        "interval": text.interval(result.low, result.high) if result and result.ratio is not None else text.ABSENT,
        "verdict": result.verdict if result else text.ABSENT,
        "prompts": units if own else 1,
        "blocks": units,
        "accepted": accepted / drafted if drafted else None,
        "accepted_interval": text.ABSENT if low is None else f"{text.percent(low)} to {text.percent(high)}",
        "needed": _needed(costs, depth),
        "per_step": (accepted + steps) / steps if steps else None,
        "mean_depth": (rows - steps) / steps if steps else 0.0,
        "drafted_share": (accepted + steps) / (accepted + steps + plain) if accepted + steps + plain else None,
        "by_position": _by_position(counts),
        "depths": _summed(c.get("depths") for c in counts),
        "experts": facts.finite(touched.get("experts_per_verification")),
        "bytes_per_token": facts.finite(touched.get("bytes_per_token")),
        "bytes_plain": facts.finite(touched.get("bytes_per_token_plain")),
        "costs": sorted({str(c.get("costs")) for c in counts}),
        "draft_cost": sorted({str(c.get("draft_cost")) for c in counts}),
        "arm": arm,
        "run_id": run.run_id,
    } | _place(run)


def _touched(study: Study, run_id: str, arm: str, frontier: int) -> Mapping[str, Any]:
    """What was counted apart of an arm's verifications; empty where it was not."""
    for row in study.rows.samples:
        if (row.run_id, row.arm, row.frontier) == (run_id, arm, frontier):
            if LAUNCHES in row.flags and "bytes_per_token" in row.extra:
                return row.extra
    return {}


def _place(run: RunRow) -> dict[str, str]:
    return {"device": facts.chip_name(run), "model": facts.model_name(run)}


def _trimmed(settings: Mapping[str, Any]) -> str:
    return f" of {settings['draft_vocab']} tokens" if settings.get("draft_vocab") else ""


def _settings(study: Study) -> dict[str, Mapping[str, Any]]:
    """Fields of drafting of the engine's arms, by the name of their series, from the plans."""
    return {
        study.label(str(job.get("run_id")), str(arm.get("name"))): (arm.get("config") or {}).get("speculative") or {}
        for job in study.rows.jobs
        for arm in job.get("arms", [])
        if arm.get("subject") == "engine"
    }


def _against_plain(study: Study, known: Mapping[str, Mapping[str, Any]], name: str, frontier: int) -> Result | None:
    """The contrast of a series with one that does not draft."""
    for result in study.results:
        if (result.arm, result.frontier, result.phase) == (name, frontier, "decode"):
            if known.get(result.reference, {}).get("drafter") == "off":
                return result
    return None


def _acceptance(samples: Sequence[SampleRow]) -> tuple[int, float | None, float | None]:
    """Blocks, and a 95 % interval of the share accepted over them; with prompts of their own, over prompts."""
    by_block: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in samples:
        told = row.extra["speculation"]
        for place, name in enumerate(("accepted", "drafted")):
            by_block[row.session, row.block][place] += facts.finite(told.get(name)) or 0.0
    shares = [accepted / drafted for accepted, drafted in by_block.values() if drafted]
    low, high, _ = bootstrap_interval(shares, statistic=_mean)
    return len(by_block), low, high


def _mean(sample: Any, axis: int = -1) -> Any:
    return sample.mean(axis=axis)


def _by_position(counts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Share right by position in the draft, among those whose forerunners were right."""
    right, tried = (_summed_places(c.get(name) for c in counts) for name in ("right", "tried"))
    return [round(r / t, 4) for r, t in zip(right, tried) if t]


def _summed_places(lists: Iterable[Any]) -> list[float]:
    """Sums by place; a window that does not tell one adds nothing to it."""
    told = [one for one in lists if isinstance(one, list)]
    return [sum(facts.finite(value) or 0 for value in place) for place in zip_longest(*told)]


def _summed(tables: Iterable[Any]) -> dict[str, int]:
    made: dict[str, int] = defaultdict(int)
    for table in tables:
        for depth, count in table.items() if isinstance(table, dict) else ():
            made[depth] += int(facts.finite(count) or 0)
    return dict(sorted(made.items()))


# -- what it costs -----------------------------------------------------------------------------------


def _costs(run: RunRow, arm: str) -> tuple[Costs, Mapping[str, Any]] | None:
    """Costs that an arm reckoned with, and what its process told of them."""
    told = ((run.model.get("arms") or {}).get(arm) or {}).get("draft_costs")
    if not isinstance(told, dict):
        return None
    try:
        known = {f.name: told[f.name] for f in fields(Costs)}
        draft = known["draft"]
        known |= {"rows": tuple(known["rows"]), "draft": tuple(draft) if isinstance(draft, list) else draft}
        return Costs(**known), told
    except (KeyError, TypeError, ValueError):
        return None


def _needed(costs: tuple[Costs, Mapping[str, Any]] | None, depth: int) -> float | None:
    return break_even(costs[0], depth) if costs else None


def prices(study: Study) -> Table:
    """By drafter and depth: what a verification and its drafts cost, and the acceptance from which they pay."""
    columns = [
        Column("drafter", "drafter"),
        Column("depth", "depth", text.plain, True),
        Column("rows_cost", "verification, in steps", text.ratio, True),
        Column("draft_cost", "a draft", text.ratio, True),
        Column("step_cost", "all of it", text.ratio, True),
        Column("rollback", "taken back by"),
        Column("needed", "pays from acceptance", _or_never, True),
        Column("best", "gain if all are right", text.ratio, True),
        Column("rows_from", "rows"),
        Column("draft_from", "drafts"),
        *_PLACE,
    ]
    rows: list[dict[str, Any]] = []
    known = _settings(study)
    for run in study.rows.runs:
        for arm in run.model.get("arms") or {}:
            found = _costs(run, arm)
            settings = known.get(study.label(run.run_id, arm))
            if not found or not settings:
                continue
            costs, told = found
            for depth in range(1, ROWS):
                row = {
                    "drafter": str(settings.get("drafter") or arm) + _trimmed(settings),
                    "depth": depth,
                    "rows_cost": costs.rows[depth],
                    "draft_cost": costs.drafting(depth) / depth,
                    "step_cost": costs.step(depth),
                    "rollback": "states" if costs.states else "replay",
                    "needed": break_even(costs, depth),
                    "best": (depth + 1) / costs.step(depth),
                    "rows_from": told.get("rows_from"),
                    "draft_from": told.get("draft_from"),
                } | _place(run)
                if row not in rows:
                    rows.append(row)
    caption = (
        "What drafts cost, in passes of one row, and the share of them that must be right for no loss; "
        f"an adaptive depth drafts from a gain of {text.ratio(DepthController.MARGIN)} on"
    )
    return Table("drafting-costs", caption, columns, rows, "No arm of these rows drafts.")


def _or_never(value: Any) -> str:
    return "never" if facts.finite(value) is None else text.percent(value)


# -- beside what was published -----------------------------------------------------------------------


def published(study: Study) -> Table:
    """What others found on their device, and the best and worst that was measured here on ours; not one from both."""
    columns = [
        Column("finding", "published"),
        Column("value", "ratio", text.ratio, True),
        Column("where", "on"),
        Column("source", "by"),
        Column("ours", "measured here"),
        *_PLACE,
    ]
    runs = {run.run_id: run for run in reversed(study.rows.runs)}
    known = _settings(study)
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in study.results:
        name = _question(known.get(result.arm, {}), known.get(result.reference, {}))
        run = runs.get(result.run_ids[0]) if result.run_ids else None
        if name and run and result.ratio is not None and not result.aa:
            found[name, facts.chip_name(run), facts.model_name(run)].append(result.ratio)
    rows = []
    for (name, device, model), ratios in sorted(found.items(), key=lambda item: PUBLISHED.index(item[0][0])):
        one = claim(name)
        told = {"finding": one.finding, "value": one.value, "where": one.device, "source": one.source}
        rows.append(told | {"ours": _span(ratios), "device": device, "model": model, "name": name})
    caption = "Published beside measured: each on its own device"
    return Table("drafting-published", caption, columns, rows, "Nothing here stands beside what was published.")


def _question(arm: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Which published claim two arms are like; forced acceptance is like none."""
    if arm.get("drafter") != "mtp" or arm.get("force", "none") != "none":
        return None
    if reference.get("drafter") == "off" and not arm.get("draft_vocab"):
        return "speculative"
    return "draft_vocab" if arm.get("draft_vocab") and arm == {**reference, "draft_vocab": arm["draft_vocab"]} else None


def _span(ratios: Sequence[float]) -> str:
    ends, middle = (min(ratios), max(ratios)), statistics.median(ratios)
    if len(ratios) == 1:
        return text.ratio(middle)
    return f"{text.ratio(ends[0])} to {text.ratio(ends[1])}, median {text.ratio(middle)} of {len(ratios)} points"
