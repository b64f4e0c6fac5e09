"""The limits page: what the device can do, what the work must cost at the least, and where the rest of a step goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from ablations.catalogue import claim
from engine.config import ModelConfig
from reports import facts, text
from reports.cells import PHASES, Cell, Study
from reports.tables import Column, Table
from sweeps.least import least_by_op
from sweeps.ledger import LAUNCHES
from sweeps.rows import RunRow

ROWS = 8
"""Most rows of a pass whose cost is told."""

MOST_NAMES = 12
"""Kernels of an arm that are named one by one."""

_OPS = ("linear", "route", "experts", "gated_delta", "attention", "norm", "head")
_FRONTIER = Column("frontier", "context", text.tokens, True)


def limits(study: Study) -> list[Table]:
    """The tables of the page, in reading order."""
    return [
        device(study),
        launches(study),
        operations(study),
        steps(study),
        prefills(study),
        *least(study),
        row_costs(study),
    ]


def scaled(factor: float) -> Callable[[Any], str]:
    """How a column shows values in a unit of ``1 / factor``."""

    def show(value: Any) -> str:
        x = facts.finite(value)
        return text.ABSENT if x is None else text.number(x * factor)

    return show


_MEGA, _GIGA, _TERA, _MICRO = scaled(1e-6), scaled(1e-9), scaled(1e-12), scaled(1e6)


def device(study: Study) -> Table:
    """What was measured of each device at the start of its processes: the median over them."""
    columns = [
        Column("device", "device"),
        Column("copy", "copied, GB/s", _GIGA, True),
        Column("read", "read, GB/s", _GIGA, True),
        Column("flops", "matrix product, TFLOP/s", _TERA, True),
        Column("launch", "a launch, µs", _MICRO, True),
        Column("processes", "processes", text.plain, True),
    ]
    looks: dict[str, Callable[[RunRow], float | None]] = {
        "copy": facts.bandwidth,
        "read": lambda run: facts.finite(facts.lookup(run.machine, ("read_bytes_per_second",))),
        "flops": facts.peak_flops,
        "launch": facts.launch_seconds,
    }
    rows = []
    for name, group in _by_device(study).items():
        known = {what: [x for x in map(look, group) if x] for what, look in looks.items()}
        if any(known.values()):
            measured = {what: statistics.median(found) if found else None for what, found in known.items()}
            rows.append({"device": name, "processes": len(group)} | measured)
    caption = "The device at its best: one large copy, one large read, one large product, a chain of tiny launches"
    return Table("limits-device", caption, columns, rows, "The limits of the device were not measured in these rows.")


def _by_device(study: Study) -> dict[str, list[RunRow]]:
    groups: dict[str, list[RunRow]] = {}
    for run in study.rows.runs:
        groups.setdefault(facts.chip_name(run), []).append(run)
    return groups


def launches(study: Study) -> Table:
    """Launches and sequential stages of a decode step, predicted and counted, beside what was published of Lily."""
    columns = [
        Column("what", "step of"),
        Column("context", "context"),
        Column("predicted", "launches predicted", text.plain, True),
        Column("counted", "launches counted on the device", text.number, True),
        Column("difference", "counted over predicted", _difference, True),
        Column("stages", "stages predicted", text.plain, True),
        Column("published", "published"),
        Column("note", "note"),
    ]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for arm, frontier, told in _told(study):
        row = {
            "what": arm,
            "predicted": told.get("launches_predicted"),
            "counted": told.get("launches_device"),
            "stages": told.get("stages_predicted"),
            "note": "; ".join(str(told[why]) for why in ("launches_unpredicted", "launches_uncounted") if why in told),
        }
        both = row["predicted"] and row["counted"]
        row["difference"] = row["counted"] / row["predicted"] if both else None
        key = (row["what"], row["predicted"], row["counted"], row["note"])
        groups.setdefault(key, row | {"frontiers": []})["frontiers"].append(frontier)
    rows = [row | {"context": text.frontier_list(row["frontiers"])} for row in groups.values()]
    caption = "Launches of a decode step, and stages: the longest chain of launches that wait for one another"
    return Table("limits-launches", caption, columns, rows + _published())


def _difference(value: Any) -> str:
    x = facts.finite(value)
    return text.ABSENT if x is None else text.ratio(x)


def _published() -> list[dict[str, Any]]:
    """Lily's own figures, which nothing here measured."""
    rows = []
    for what, suffix in (("Lily, as published", ""), ("Lily, released code", "_released")):
        count, stages = claim(f"decode_launches{suffix}"), claim(f"decode_stages{suffix}")
        said = f"{count.value:.0f} in {stages.value:.0f} stages"
        rows.append({"what": what, "published": said, "note": f"{count.finding}; {count.source}"})
    return rows


def _told(study: Study) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Arm, frontier and facts of each row that tells what a step launches."""
    for row in study.rows.samples:
        if LAUNCHES in row.flags:
            yield study.label(row.run_id, row.arm), row.frontier, row.extra


def operations(study: Study) -> Table:
    """What a step of each arm launches, by kernel where the device was asked, else by operation as predicted."""
    columns = [
        Column("arm", "arm"),
        _FRONTIER,
        Column("name", "kernel or operation"),
        Column("launches", "launches a step", text.number, True),
        Column("source", "from"),
    ]
    seen: dict[str, tuple[int, dict[str, Any], str]] = {}
    for arm, frontier, told in _told(study):
        for key, source in (("kernels", "device"), ("operations", "graph")):
            # One context an arm: the one where the device was asked, else the first.
            if told.get(key) and (arm not in seen or (source == "device" and seen[arm][2] == "graph")):
                seen[arm] = frontier, told[key], source
    rows = []
    for arm, (frontier, counts, source) in seen.items():
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        shown = [*ordered[:MOST_NAMES]]
        if others := ordered[MOST_NAMES:]:
            shown.append((f"{len(others)} others", sum(count for _, count in others)))
        where = {"arm": arm, "frontier": frontier, "source": source}
        rows += [where | {"name": _short(name), "launches": count} for name, count in shown]
    return Table("limits-operations", "What a decode step launches", columns, rows, "These rows do not say.")


def _short(name: str) -> str:
    """A kernel's name without its arguments, which run to hundreds of letters."""
    name = name.removeprefix("void ").split("(")[0].split("<")[0].removeprefix("mlx::core::cu::")
    return name if len(name) <= 60 else f"{name[:57]}…"


def steps(study: Study) -> Table:
    """Where the time of a decode step goes: bytes at the rate of the device, launches at their price, the rest."""
    columns = [
        Column("arm", "arm"),
        _FRONTIER,
        Column("step", "time a token, µs", _MICRO, True),
        Column("bytes", "least bytes, MB", _MEGA, True),
        Column("reached", "GB/s reached", _GIGA, True),
        Column("share", "of the device's", text.percent, True),
        Column("floor", "bytes alone, µs", _MICRO, True),
        Column("launches", "launches", text.number, True),
        Column("each", "time a launch, µs", _MICRO, True),
        Column("launching", "launches alone, µs", _MICRO, True),
        Column("rest", "rest, µs", _MICRO, True),
    ]
    counts = {(arm, frontier): told for arm, frontier, told in _told(study)}
    measured = {arm: told["launches_device"] for arm, _, told in _told(study) if told.get("launches_device")}
    rows = []
    for c in _timed(study, "decode"):
        told = counts.get((c.arm, c.frontier), {})
        # The count of the device is taken at one context; where a step is predicted to be another there, that counts.
        number = told.get("launches_device") or told.get("launches_predicted") or measured.get(c.arm)
        rows.append(_step(c, facts.finite(number)))
    caption = (
        "Decode: where a token's time goes. The rest is what bytes and then launches, at the price of MLX's, do not "
        "account for; below zero, they overlap or are launched at less"
    )
    return Table("limits-decode", caption, columns, rows, "No decode window was timed.")


def _timed(study: Study, phase: str) -> list[Cell]:
    own = [c for c in study.cells.values() if c.phase == phase and c.arm not in study.aa_arms]
    return [c for c in own if c.gap is None and c.elapsed_ns and c.work_tokens]


def _step(c: Cell, number: float | None) -> dict[str, Any]:
    step = (c.elapsed_ns or 0) / 1e9 / c.work_tokens
    moved = c.least_bytes / c.work_tokens if c.least_bytes else None
    floor = moved / c.read_bandwidth if moved and c.read_bandwidth else None
    launching = number * c.launch_seconds if number and c.launch_seconds else None
    return {
        "arm": c.arm,
        "frontier": c.frontier,
        "step": step,
        "bytes": moved,
        "reached": moved / step if moved else None,
        "share": floor / step if floor else None,
        "floor": floor,
        "launches": number,
        "each": step / number if number else None,
        "launching": launching,
        "rest": step - floor - launching if floor and launching else None,
    }


def prefills(study: Study) -> Table:
    """How near a prefill comes to the arithmetic and to the bandwidth of the device."""
    columns = [
        Column("arm", "arm"),
        _FRONTIER,
        Column("seconds", "time, s", text.number, True),
        Column("flops", "least TFLOP", _TERA, True),
        Column("rate", "TFLOP/s reached", _TERA, True),
        Column("share", "of the device's", text.percent, True),
        Column("bytes", "least bytes, MB", _MEGA, True),
        Column("bandwidth_share", "of its bandwidth", text.percent, True),
    ]
    rows = []
    for c in _timed(study, "prefill"):
        seconds = (c.elapsed_ns or 0) / 1e9
        rate = c.least_flops / seconds if c.least_flops else None
        moved = c.least_bytes / seconds if c.least_bytes else None
        rows.append(
            {
                "arm": c.arm,
                "frontier": c.frontier,
                "seconds": seconds,
                "flops": c.least_flops,
                "rate": rate,
                "share": rate / c.peak_flops if rate and c.peak_flops else None,
                "bytes": c.least_bytes,
                "bandwidth_share": moved / c.read_bandwidth if moved and c.read_bandwidth else None,
            }
        )
    caption = "Prefill: least arithmetic and least bytes of a prompt over its time"
    return Table("limits-prefill", caption, columns, rows, "No prefill window was timed.")


def least(study: Study) -> list[Table]:
    """Least bytes and least operations of each op, and of all, by phase and frontier."""
    bytes_rows, flops_rows = [], []
    models = _geometries(study)
    for name, config, itemsize, weights in models:
        for phase in PHASES:
            for frontier in study.frontiers[phase]:
                by_op = least_by_op(config, phase, frontier, itemsize, weights)
                where = {"model": name, "phase": phase, "frontier": frontier}
                for rows, which in ((bytes_rows, 0), (flops_rows, 1)):
                    values = {op: by_op[op][which] for op in _OPS}
                    rows.append(where | values | {"total": sum(values.values())})
    return [
        _least("bytes", "Least MB of a decode step, or of a whole prompt, by op", _MEGA, bytes_rows, len(models)),
        _least("flops", "Least GFLOP of a decode step, or of a whole prompt, by op", _GIGA, flops_rows, len(models)),
    ]


def _least(what: str, caption: str, show: Callable[[Any], str], rows: list[dict[str, Any]], models: int) -> Table:
    columns = [Column("model", "model")] if models > 1 else []
    columns += [Column("phase", "phase"), _FRONTIER]
    columns += [Column(op, op, show, True) for op in (*_OPS, "total")]
    return Table(f"limits-least-{what}", caption, columns, rows, "The plan of this run holds no geometry.")


def _geometries(study: Study) -> list[tuple[str, ModelConfig, int, int | None]]:
    """Name, geometry, bytes of a float and bytes of the weights of each model that a plan holds."""
    floats = {run.run_id: 4 if run.model.get("dtype") == "float32" else 2 for run in study.rows.runs}
    found: dict[str, tuple[str, ModelConfig, int, int | None]] = {}
    for job in study.rows.jobs:
        model = job.get("model") or {}
        sizes: dict[str, Any] = model.get("config") or {}
        # A plan of another version may hold other sizes.
        if not sizes or not sizes.keys() <= ModelConfig.__dataclass_fields__.keys():
            continue
        config = ModelConfig(**sizes)
        weights = facts.finite(model.get("weights_bytes"))
        itemsize = floats.get(str(job.get("run_id")), 2)
        entry = (text.plain(model.get("name")), config, itemsize, int(weights) if weights else None)
        found.setdefault(repr(entry), entry)
    return list(found.values())


def row_costs(study: Study) -> Table:
    """What a pass of several rows, as in the verification of drafts, costs over a pass of one."""
    columns = [Column("device", "device"), Column("model", "model")]
    columns += [Column(str(n), f"{n} rows" if n > 1 else "1 row", text.ratio, True) for n in range(1, ROWS + 1)]
    columns.append(Column("source", "from"))
    rows: list[dict[str, Any]] = []
    for run in study.rows.runs:
        for told in (run.model.get("arms") or {}).values():
            costs = told.get("row_costs") if isinstance(told, dict) else None
            where = {"device": facts.chip_name(run), "model": facts.model_name(run)}
            row = where | {str(n): cost for n, cost in enumerate(costs or (), 1)} if costs else None
            # Tuned for the chip, so all arms on it tell the same.
            if row and (row := row | {"source": told.get("row_costs_from")}) not in rows:
                rows.append(row)
    caption = "The cost of T rows over one row: a decode step of T tokens at once, as when drafts are verified"
    return Table("limits-rows", caption, columns, rows, "Not measured: python -m sweeps tune does.")
