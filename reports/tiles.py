"""Tiles of the expert product by the rows that an expert gets: where a larger tile stops paying, where it starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from reports import claims, text
from reports.cells import Result, Study
from reports.tables import Column, Table

TOGGLE = "tile_rows"
"""The switch whose questions these tables answer."""


def tiles(study: Study) -> list[Table]:
    """Every pair of tiles by context with the rows an expert gets on average, and where each pair's ratio crosses 1.

    Rows an expert are ``chunk · experts a token / experts``: of the longest chunk, under even routing.
    """
    rows = sorted(_rows(study), key=lambda row: (row["on"], row["pair"], row["rows"] or 0, row["frontier"]))
    measured = [
        Column("on", "on top of"),
        Column("pair", "tiles, rows"),
        Column("frontier", "context", text.tokens, True),
        Column("chunk", "chunk", text.tokens, True),
        Column("rows", "rows an expert", text.plain, True),
        Column("ratio", "ratio", text.ratio, True),
        Column("interval", "95 % interval", text.plain, True),
        Column("verdict", "verdict"),
        Column("device", "device"),
    ]
    turning = [
        Column("on", "on top of"),
        Column("pair", "tiles, rows"),
        Column("turns", "the first of them"),
        Column("device", "device"),
    ]
    empty = "No question about tiles of the expert product in these rows."
    return [
        Table("tiles", "Tiles of the expert product: a ratio above 1 is for the first", measured, rows, empty),
        Table("tiles-turns", "Where the sign changes, by the estimates", turning, list(_turns(rows)), empty),
    ]


def _rows(study: Study) -> Iterator[dict[str, Any]]:
    known = claims.about(study)
    jobs = {str(job.get("run_id", "")): job for job in study.rows.jobs}
    for result in study.results:
        if result.aa or result.phase != "prefill" or claims.asked_of(result, known).get("toggles") != [TOGGLE]:
            continue
        job = next((jobs[run] for run in result.run_ids if run in jobs), {})
        sides = [_side(study, job, name) for name in (result.arm, result.reference)]
        if None not in sides:
            yield _row(study, result, job, [side for side in sides if side])


def _side(study: Study, job: dict[str, Any], label: str) -> tuple[str, str] | None:
    """What an arm's tile stands on, and the tile's rows."""
    run_id = str(job.get("run_id", ""))
    names = [str(arm.get("name", "")) for arm in job.get("arms", [])]
    name = next((n for n in names if study.label(run_id, n) == label), "")
    parts = name.split(",")
    value = next((part.partition("=")[2] for part in parts if part.startswith(f"{TOGGLE}=")), "")
    return (",".join(part for part in parts if not part.startswith(f"{TOGGLE}=")), value) if value else None


def _row(study: Study, result: Result, job: dict[str, Any], sides: list[tuple[str, str]]) -> dict[str, Any]:
    mine = [
        row
        for row in study.rows.samples
        if (row.phase, row.frontier, study.label(row.run_id, row.arm)) == (result.phase, result.frontier, result.arm)
        and row.run_id in result.run_ids
        and row.chunks
    ]
    chunk = max((max(row.chunks) for row in mine), default=result.frontier)
    config = (job.get("model") or {}).get("config") or {}
    experts, chosen = config.get("num_experts"), config.get("num_experts_per_tok")
    return {
        "on": sides[0][0],
        "pair": f"{sides[0][1]} over {sides[1][1]}",
        "frontier": result.frontier,
        "chunk": chunk,
        "rows": round(chunk * chosen / experts) if experts and chosen else None,
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
        "interval": text.interval(result.low, result.high) if result.ratio is not None else text.ABSENT,
        "verdict": result.verdict,
        "reason": result.reason,
        "device": claims.device_of(study.rows.runs, result.run_ids),
        "run_ids": result.run_ids,
    }


def _turns(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One line a pair of tiles: between which numbers of rows an expert its ratio passes 1, or that it does not."""
    for on, pair, device in dict.fromkeys((row["on"], row["pair"], row["device"]) for row in rows):
        mine = [r for r in rows if (r["on"], r["pair"], r["device"]) == (on, pair, device) and r["ratio"] and r["rows"]]
        signs: dict[int, set[bool]] = {}
        for row in mine:
            signs.setdefault(row["rows"], set()).add(row["ratio"] > 1)
        # Contexts of several chunks give an expert as many rows as each other.
        found = [f"both signs at {count} rows" for count, seen in signs.items() if len(seen) > 1]
        plain = [(count, seen == {True}) for count, seen in signs.items() if len(seen) == 1]
        found += [
            f"{'pays' if ahead else 'no longer pays'} between {first} and {count} rows"
            for (first, before), (count, ahead) in pairwise(plain)
            if before != ahead
        ]
        if not found and plain:
            seen = ", ".join(str(count) for count, _ in plain)
            found = [f"{'ahead' if plain[0][1] else 'behind'} at all of {seen} rows an expert"]
        yield {"on": on, "pair": pair, "turns": "; ".join(found) or text.ABSENT, "device": device}
