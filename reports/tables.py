"""Tables, declared once: shown in HTML and Markdown, written as CSV and JSON Lines with raw values."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports import text
from reports.cells import Study
from reports.facts import arms, chip_name, device_kind, finite, flatten, model_name, version
from reports.summary import requested_against_executed
from sweeps.rows import RunRow


@dataclass(frozen=True)
class Column:
    """One column: the key in the raw rows, its heading, how a value is shown, and whether it is a number."""

    key: str
    heading: str
    show: Callable[[Any], str] = text.plain
    numeric: bool = False


@dataclass
class Table:
    """Raw rows and how to show them. `shown` columns appear in the report; files hold every key of the rows."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]] = field(default_factory=list)
    empty: str = "Nothing to show."

    def cells(self) -> list[list[str]]:
        """The rows as shown."""
        return [[column.show(row.get(column.key)) for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """The table as Markdown, or the word that stands for an empty one."""
        if not self.rows:
            return f"{text.markdown(self.caption)}: {text.markdown(self.empty)}"
        lines = [
            [text.markdown(c.heading) for c in self.columns],
            ["---:" if c.numeric else "---" for c in self.columns],
        ]
        lines += [[text.markdown(cell) for cell in row] for row in self.cells()]
        return f"*{text.markdown(self.caption)}*\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def csv(self) -> str:
        """Comma-separated values with a header line; numbers as Python writes them, whatever the locale."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        keys = self._keys()
        writer.writerow(keys)
        writer.writerows([_flat(row.get(key)) for key in keys] for row in self.rows)
        return out.getvalue()

    def jsonl(self) -> str:
        """One JSON object a line; what is not a finite number is null."""
        return "".join(json.dumps(_clean(row), allow_nan=False, default=str) + "\n" for row in self.rows)

    def _keys(self) -> list[str]:
        return list(dict.fromkeys([c.key for c in self.columns] + [key for row in self.rows for key in row]))


def _flat(value: Any) -> Any:
    value = _clean(value)
    return json.dumps(value, default=str) if isinstance(value, (dict, list)) else value


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(inner) for inner in value]
    return finite(value) if isinstance(value, float) else value


def tables(study: Study) -> dict[str, Table]:
    """Every table of a report by name."""
    made = [
        contrasts(study),
        contrasts(study, aa=True),
        rates(study, "prefill"),
        rates(study, "decode"),
        energy(study),
        points(study),
        gaps(study),
        guard(study),
        executed(study),
        environment(study.rows.runs),
        sessions(study.rows.runs),
    ]
    return {table.name: table for table in made}


_FRONTIER = Column("frontier", "context", text.tokens, True)
_RATIO = Column("ratio", "ratio", text.ratio, True)


def contrasts(study: Study, aa: bool = False) -> Table:
    """Every question and its answer; or, for `aa`, the comparisons of an arm with itself."""
    columns = [
        Column("contrast", "question"),
        Column("phase", "phase"),
        _FRONTIER,
        _RATIO,
        Column("interval", "95 % interval", text.plain, True),
        Column("verdict", "verdict"),
        Column("sure", "from"),
        Column("margin", "margin", text.percent, True),
        Column("detectable", "could see", _above_one, True),
        Column("reason", "why"),
    ]
    rows = [
        {
            "contrast": f"{r.arm} / {r.reference}",
            "phase": r.phase,
            "frontier": r.frontier,
            "ratio": r.ratio,
            "interval": _interval(r.low, r.high, r.ratio),
            "verdict": r.verdict,
            "sure": text.count(r.units, r.unit),
            "margin": r.margin,
            "detectable": r.detectable,
            "reason": r.reason,
            "name": r.contrast,
            "arm": r.arm,
            "reference": r.reference,
            "low": r.low,
            "high": r.high,
            "units": r.units,
            "unit": r.unit,
            "aa": r.aa,
            "method": r.method,
            "check": r.check,
            "run_ids": r.run_ids,
        }
        for r in study.results
        if r.aa == aa
    ]
    if aa:
        return Table(
            "aa", "An arm against itself (A/A): the truth is 1", columns, rows, "No arm was compared with itself."
        )
    caption = "Contrasts: ratio of rates, above 1 means the first arm is faster"
    return Table("contrasts", caption, columns, rows, "These rows hold no contrasts.")


def _interval(low: float | None, high: float | None, ratio: float | None) -> str:
    return text.ABSENT if ratio is None else text.interval(low, high)


def _above_one(value: Any) -> str:
    x = finite(value)
    return text.ABSENT if x is None else text.percent(x - 1)


def rates(study: Study, phase: str) -> Table:
    """Median rate of each arm by frontier, side by side; a gap shows its kind."""
    arms = [arm for arm in study.arms if any((arm, p, f) in study.cells for a, p, f in study.cells if p == phase)]
    rows = []
    for frontier in study.frontiers[phase]:  # type: ignore[index]
        row: dict[str, Any] = {"frontier": frontier}
        for arm in arms:
            cell = study.cells.get((arm, phase, frontier))  # type: ignore[arg-type]
            row[arm] = None if cell is None else cell.median if cell.gap is None else cell.gap
        rows.append(row)
    columns = [_FRONTIER, *(Column(arm, arm, _rate, True) for arm in arms)]
    return Table(f"rate-{phase}", f"{phase.capitalize()}: median tokens a second", columns, rows, f"No {phase} rows.")


def _rate(value: Any) -> str:
    return text.gap(value) if isinstance(value, str) else text.number(value)


LEAST_ENERGY_SECONDS = 1.0
"""Time over which an energy counter must have run for a figure to be made of it: it steps some ten times a second."""


def energy(study: Study) -> Table:
    """Joules a token beside tokens a second, where the machine counted them."""
    sums: dict[tuple[str, str, int, str], list[float]] = {}
    for row in study.rows.samples:
        joules, elapsed = finite(row.extra.get("energy_j")), finite(row.elapsed_ns)
        if row.status == "ok" and row.block >= 0 and joules and elapsed and row.work_tokens > 0:
            key = (study.label(row.run_id, row.arm), row.phase, row.frontier, text.plain(row.extra.get("energy_of")))
            total = sums.setdefault(key, [0.0, 0.0, 0.0])
            for place, value in enumerate((joules, elapsed / 1e9, row.work_tokens)):
                total[place] += value
    rows = []
    for (arm, phase, frontier, source), (joules, seconds, tokens) in sums.items():
        cell = study.cells.get((arm, phase, frontier))  # type: ignore[arg-type]
        if cell is None or cell.median is None or seconds < LEAST_ENERGY_SECONDS:
            continue
        row = {"arm": arm, "phase": phase, "frontier": frontier, "median": cell.median, "source": source}
        rows.append(row | {"joules_per_token": joules / tokens, "watts": joules / seconds, "seconds": seconds})
    columns = [
        Column("arm", "arm"),
        Column("phase", "phase"),
        _FRONTIER,
        Column("median", "tok/s, median", text.number, True),
        Column("joules_per_token", "J a token", text.number, True),
        Column("watts", "W", text.number, True),
        Column("source", "whose energy"),
    ]
    empty = (
        "Not measured: this machine has no counter that could be read (pip install '.[energy]' brings the libraries)."
    )
    return Table("energy", "Energy from the machine's own counter", columns, rows, empty)


def points(study: Study) -> Table:
    """One row per arm, phase and frontier with everything known about it."""
    columns = [
        Column("arm", "arm"),
        Column("phase", "phase"),
        _FRONTIER,
        Column("median", "tok/s, median", text.number, True),
        Column("low", "10th pct", text.number, True),
        Column("high", "90th pct", text.number, True),
        Column("windows", "windows", text.plain, True),
        Column("blocks", "blocks", text.plain, True),
        Column("sessions", "sessions", text.plain, True),
        Column("elapsed_ns", "time, median", text.duration, True),
        Column("peak_bytes", "peak", text.size, True),
        Column("gigabytes", "GB/s", text.number, True),
        Column("flags", "flags"),
        Column("state", "state", text.gap),
    ]
    rows = []
    for c in study.cells.values():
        values = {k: v for k, v in vars(c).items() if k not in ("gap", "flags")}
        gigabytes = c.bytes_per_second / 1e9 if c.bytes_per_second else None
        rows.append(values | {"gigabytes": gigabytes, "flags": _flags(c.flags), "state": c.gap or c.partial or "ok"})
    return Table("points", "Every point: rates over all its windows", columns, rows, "No point was measured.")


def _flags(flags: dict[str, int]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in flags.items())


def gaps(study: Study) -> Table:
    """What is missing, and why."""
    columns = [
        Column("arm", "arm"),
        Column("phase", "phase"),
        _FRONTIER,
        Column("kind", "what", text.gap),
        Column("reason", "why"),
    ]
    rows = [
        {"arm": c.arm, "phase": c.phase, "frontier": c.frontier, "kind": c.gap or c.partial, "reason": c.reason}
        for c in study.gaps()
    ]
    return Table(
        "gaps", "Points without a number, or with windows lost", columns, rows, "Nothing was skipped or failed."
    )


def guard(study: Study) -> Table:
    """The quality guard of every contrast: what it compared and what it found."""
    columns = [
        Column("contrast", "arm / reference"),
        Column("phase", "phase"),
        Column("context", "context"),
        Column("name", "guard"),
        Column("passed", "output right"),
        Column("found", "found", _found),
    ]
    groups: dict[str, dict[str, Any]] = {}
    checked = [(f"{r.arm} / {r.reference}", r) for r in study.results if r.check and not r.aa]
    if not checked:
        # Arms that are held against no other arm have a guard all the same.
        alone = {(s.arm, s.phase, s.frontier): s for s in study.rows.samples if s.check and "aa" not in s.flags}
        checked = [(arm, sample) for (arm, *_), sample in sorted(alone.items())]
    for label, r in checked:
        found = {k: v for k, v in flatten(r.check).items() if k not in ("name", "passed")}
        row = {
            "contrast": label,
            "phase": r.phase,
            "name": r.check.get("name"),
            "passed": _passed(r.check.get("passed")),
            "found": found,
        }
        key = json.dumps(row, default=str)
        groups.setdefault(key, row | {"frontiers": []})["frontiers"].append(r.frontier)
    rows = [
        row | {"context": text.frontier_list(row["frontiers"], study.frontiers.get(row["phase"], []))}
        for row in groups.values()
    ]
    return Table(
        "guard", "Quality guard: is the output still right?", columns, rows, "No quality guard ran in these rows."
    )


def _found(value: Any) -> str:
    """What the guard said; its figures where it said nothing, they stand in the table's file in any case."""
    reason = value.get("reason") if isinstance(value, dict) else None
    return text.plain(reason or value)


def _passed(value: Any) -> str:
    return {True: "yes", False: "NO"}.get(value, "not checked")


def executed(study: Study) -> Table:
    """Requested against executed variants."""
    columns = [
        Column("arm", "arm"),
        Column("phase", "phase"),
        Column("op", "op"),
        Column("requested", "requested"),
        Column("executed", "executed (tile)"),
        Column("calls", "calls", text.number, True),
        Column("agrees", "agrees"),
    ]
    rows = requested_against_executed(study)
    return Table("executed", "Requested against executed", columns, rows, "These rows do not say what was executed.")


def environment(runs: Sequence[RunRow]) -> Table:
    """What held still: a fact is listed once where all processes agree, else once per process."""
    facts: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        flat = {
            "run": run.run_id,
            "project version": run.project_version,
            "config hash": run.config_hash,
            **{f"git {k}": v for k, v in flatten(run.git).items()},
            **flatten(run.machine),
            **{f"model {k}": v for k, v in flatten(run.model).items()},
            **{f"prompt {k}": v for k, v in flatten(run.prompt).items()},
        }
        for name, value in flat.items():
            where = facts.setdefault(name, {}).setdefault(_fact(name, value), [])
            where.append(f"{run.run_id} session {run.session}")
    rows = [
        {
            "fact": name,
            "value": value,
            "where": "all" if len(values) == 1 and len(where) == len(runs) else ", ".join(where),
        }
        for name, values in facts.items()
        for value, where in values.items()
    ]
    columns = [Column("fact", "fact"), Column("value", "value"), Column("where", "processes")]
    return Table("environment", "Environment", columns, rows, "These rows hold no process.")


def _fact(name: str, value: Any) -> str:
    """A recorded fact as text; sizes in words."""
    is_size = any(word in name.lower() for word in ("memory", "_bytes", "working_set")) and "second" not in name
    return text.size(value) if is_size and (finite(value) or 0) > 2**20 else text.plain(value)


def sessions(runs: Sequence[RunRow]) -> Table:
    """What changed from process to process: power, heat, load, swap."""
    names = list(dict.fromkeys(name for run in runs for name in flatten(run.conditions)))
    columns = [
        Column("run_id", "run"),
        Column("session", "session", text.plain, True),
        Column("started", "started, UTC"),
    ]
    columns += [Column(name, name.replace("_", " ")) for name in names]
    rows = [{"run_id": r.run_id, "session": r.session, "started": r.started} | flatten(r.conditions) for r in runs]
    return Table("sessions", "Conditions by process", columns, rows, "These rows hold no process.")


def commands(runs: Sequence[RunRow]) -> list[str]:
    """The commands that made the rows, ready to paste; each one once."""
    return list(dict.fromkeys(_command([str(a) for a in run.argv]) for run in runs if run.argv))


def _command(argv: list[str]) -> str:
    first = argv[0].replace("\\", "/")
    if first.endswith("sweeps/__main__.py"):
        argv = ["python", "-m", "sweeps", *argv[1:]]
    return shlex.join(argv)


def configs(runs: Sequence[RunRow]) -> list[tuple[str, str]]:
    """Resolved configurations as JSON, each with the runs that used it."""
    users: dict[str, list[str]] = {}
    for run in runs:
        config = json.dumps(_clean(run.config), indent=2, default=str, ensure_ascii=False)
        users.setdefault(config, []).append(run.run_id)
    return [(", ".join(dict.fromkeys(ids)), config) for config, ids in users.items()]


def differences(a: Sequence[RunRow], b: Sequence[RunRow]) -> list[dict[str, str]]:
    """What differs between two runs beside their rows: machine, model, versions, prompt, settings, code of arms."""
    looks: dict[str, Callable[[RunRow], Any]] = {
        "device": chip_name,
        "kind of device": device_kind,
        "memory": lambda r: r.machine.get("memory"),
        "system": lambda r: r.machine.get("os"),
        "model": model_name,
        "mlx": lambda r: version(r, "mlx"),
        "mlx-lm": lambda r: version(r, "mlx_lm"),
        "python": lambda r: version(r, "python"),
        "project version": lambda r: r.project_version,
        "commit": lambda r: r.git.get("commit"),
        "uncommitted changes": lambda r: r.git.get("dirty"),
        "configuration": lambda r: r.config_hash,
    }
    for table in ("model", "prompt"):
        keys = {key for run in (*a, *b) for key in getattr(run, table)} - {"name", "arms", "config"}
        looks |= {f"{table} {key}": lambda r, t=table, k=key: getattr(r, t).get(k) for key in sorted(keys)}
    for arm in sorted({arm for run in a for arm in arms(run)} & {arm for run in b for arm in arms(run)}):
        for fact, key in (("code", "code"), ("op code", "identity"), ("variants", "chosen")):
            looks[f"{fact} of {arm}"] = lambda r, n=arm, k=key: arms(r).get(n, {}).get(k)
    rows = []
    for name, look in looks.items():
        left, right = (list(dict.fromkeys(text.plain(look(r)) for r in runs)) for runs in (a, b))
        if left != right:
            rows.append({"fact": name, "a": "; ".join(left) or text.ABSENT, "b": "; ".join(right) or text.ABSENT})
    return rows
