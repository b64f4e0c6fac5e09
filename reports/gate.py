"""The gate: has anything become slower? Answers by exit code, and never passes on missing evidence.

    python -m reports gate RUN                          the contrasts of a run, as base against head leaves them
    python -m reports gate RUN --confirm FRESH          the same, suspects tested again on fresh sessions
    python -m reports gate RUN --baseline NAME          each arm against a kept run of this machine

Two stages: a one-sided test of every contrast against its margin, adjusted for how many were tested (false discovery
rate 5 %); what is found slower there counts once sessions that the first test has not seen show it too. A contrast
that is neither slower nor surely the same passes where a slowdown of `SIZE` is ruled out by its interval. Whatever
keeps silence from meaning "nothing became slower" is a doubt with a kind of its own (`DOUBTS`), and a doubt is exit
code 2, never 0.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from scipy import special

from ablations.statistics import (
    LEAST_MARGIN,
    Estimate,
    GateStage,
    Unit,
    confirm_stage,
    detectable_ratio,
    gate_stage,
)
from ablations.verdicts import Verdict
from ablations.verdicts import gate as decide
from ablations.verdicts import verdict as judge
from reports import facts, text
from reports.cells import Cell, Result, Study, study
from reports.load import ReportError, read_rows
from reports.summary import NOISY_MARGIN
from sweeps.rows import RunRow

DOUBTS: dict[str, str] = {
    "no rows": "the run is empty: no process has a row",
    "missing": "a contrast that the plan asks for has no answer, or one of its arms no time",
    "unreadable": "the folder is not there or holds no rows that can be read",
    "other schema": "rows of another version of the row format",
    "not a number": "a ratio, interval or time is null, NaN or infinite",
    "identical": "two sides that should be measured apart hold the very same times",
    "swapped": "what should come first was measured, or written, last",
    "partly skipped": "some windows of a point were skipped or failed",
    "failed": "a point ended in an error, a timeout or out of memory",
    "unconfirmed": "what looked slower is neither confirmed nor ruled out by the fresh sessions",
    "not run": "a contrast cannot run here, or the plan left it out",
    "other machine": "measured on another machine than what it is held against",
    "other model": "measured with another model, weights or prompt",
    "other code": "the confirmation ran an arm with other code or settings than the run",
    "other version": "measured under another system or version of MLX or MLX-LM",
    "paravirtual": "a virtual device: results can be right there, timings mean nothing",
    "torn": "a file ends in an unfinished row",
    "noisy": "identical arms came apart by more than 10 %",
}
"""Kinds of doubt that the gate itself finds, and what each means; `ablations.verdicts.gate` adds its own."""


SIZE = 0.05
"""Smallest slowdown that must not pass unseen: 0.05 is 5 % more time. A margin beyond it would hide one."""


@dataclass(frozen=True)
class Doubt:
    """One reason why silence would not mean "nothing became slower": its kind (of `DOUBTS`), and where."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


@dataclass(frozen=True)
class Line:
    """One contrast at one phase and frontier, as the gate saw it.

    Attributes:
        p: false-discovery adjusted p value of the first stage. ratio, low, high: of rates, below 1 is slower; in the
            first stage. confirmed_ratio: the same on the fresh sessions.
        word: ``slower`` (confirmed), ``suspect`` (not confirmed yet), ``not confirmed`` (the fresh sessions do not
            show it), ``ok``, or ``cannot tell``. changed: ops whose code or chosen variant differs between the sides.
        timed: ops that take longer by themselves, with by how much; None where they were not timed.
    """

    name: str
    contrast: str
    phase: str
    frontier: int
    ratio: float | None
    low: float | None
    high: float | None
    margin: float
    p: float | None
    word: str
    reason: str
    confirmed_ratio: float | None = None
    changed: tuple[str, ...] = ()
    timed: tuple[str, ...] | None = None

    @property
    def size(self) -> str:
        """How much slower or faster, in words: ``5.1 % slower``. The fresh sessions decide where there are any."""
        ratio = self.confirmed_ratio or self.ratio
        if ratio is None:
            return "size unknown"
        share = 1 / ratio - 1 if ratio < 1 else ratio - 1
        return f"{text.percent(share)} {'slower' if ratio < 1 else 'faster'}"


@dataclass(frozen=True)
class Answer:
    """What the gate says: exit code (0 no confirmed slowdown, 1 confirmed slowdown, 2 cannot tell) and all behind it.

    notes: what a reader must know and what is no doubt. against: what the run is held against, in words.
    """

    code: Literal[0, 1, 2]
    reason: str
    lines: tuple[Line, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    notes: tuple[str, ...] = ()
    against: str = "its own reference arms"
    run: str = ""
    places: tuple[dict[str, str], ...] = field(default=())

    @property
    def suspects(self) -> tuple[str, ...]:
        """Contrasts found slower that no fresh session has confirmed or cleared yet."""
        return tuple(line.name for line in self.lines if line.word == "suspect")


def gate(
    run: Path,
    fresh: Sequence[Path] = (),
    baseline: Path | None = None,
    ignore: Sequence[str] = (),
    accept: Sequence[str] = (),
    size: float = SIZE,
) -> Answer:
    """Judge `run`; slowdowns found there count once `fresh` runs of the same contrasts show them too.

    Args:
        baseline: a kept run that every arm is held against, instead of the run's own contrasts.
        ignore: patterns of contrasts (``full vs mlx_lm prefill *``) that the gate leaves out, and says so.
        accept: kinds of difference to a baseline that are known and accepted: ``os``, ``mlx``, ``mlx_lm``.

        size: smallest slowdown that must not pass unseen, as a share.

    Returns:
        The answer; folders that cannot be read are doubts, not errors.

    Raises:
        ReportError: the confirmation is the run itself, or there is nothing in common to compare.
    """
    try:
        seen = study(read_rows([run]))
        kept = study(read_rows([baseline])) if baseline else None
        again = study(read_rows(fresh)) if fresh else None
    except ReportError as error:
        return _unreadable(run, error)
    doubts = _problems(seen, ignore)
    if again is not None:
        doubts += _confirmable(seen, again, fresh[0])
    if kept is not None:
        doubts += _comparable(seen, kept, accept)
        first, second, names = _from_baseline(seen, kept, again)
    else:
        first, names = _from_contrasts(seen)
        second = _from_contrasts(again)[0] if again is not None else None
    chosen = [name for name in first if not any(fnmatch.fnmatch(name, pattern) for pattern in ignore)]
    ignored = [name for name in first if name not in chosen]
    return _answer(
        {name: first[name] for name in chosen},
        second if not any(d.kind in _UNCONFIRMABLE for d in doubts) else {} if second is not None else None,
        {name: names[name] for name in chosen},
        doubts,
        _notes(seen, kept, ignored),
        str(run),
        _against(baseline, seen),
        seen,
        size,
    )


_UNCONFIRMABLE = ("other machine", "other model", "other code", "other version", "identical", "swapped")


@dataclass(frozen=True)
class _Asked:
    """One question in the form both stages need."""

    contrast: str
    phase: str
    frontier: int
    estimate: Estimate
    margin: float
    verdict: str
    reason: str
    changed: tuple[str, ...] = ()


def _answer(
    first: Mapping[str, _Asked],
    second: Mapping[str, _Asked] | None,
    names: Mapping[str, _Asked],
    doubts: list[Doubt],
    notes: list[str],
    run: str,
    against: str,
    seen: Study,
    size: float,
) -> Answer:
    margins = {name: asked.margin for name, asked in first.items()}
    tested = {n: a.estimate for n, a in first.items() if a.verdict not in ("blocked", "unsupported")}
    stage = gate_stage(tested, margins)
    doubts += [
        Doubt("not run", f"{name}: {asked.reason or 'an arm did not run'}")
        for name, asked in first.items()
        if asked.verdict == "unsupported"
    ]
    doubts += [Doubt("not a number", name) for name, a in first.items() if _not_a_number(a)]
    confirmation = None
    if second is not None:
        found = {n: a.estimate for n, a in second.items() if a.verdict not in ("blocked", "unsupported")}
        confirmation = confirm_stage(stage, found, margins)
        # Fresh sessions clear a suspect only where they rule the slowdown out, not where they are too noisy to see it.
        doubts += [
            Doubt("unconfirmed", f"{name} looked slower, and the fresh sessions neither confirm nor rule it out")
            for name in stage.slower
            if name in found and name not in (*confirmation.slower, *confirmation.untestable)
            if _word(second[name], size) not in ("same", "faster")
        ]
    words: dict[str, Verdict] = {n: _word(a, size) for n, a in first.items() if a.verdict != "unsupported"}
    decided = decide(stage, confirmation, words, [str(d) for d in doubts])
    lines = tuple(_line(name, asked, stage, confirmation, second or {}, size) for name, asked in names.items())
    reason = decided.reason
    if decided.code == 1:
        said = "; ".join(_sentence(line) for line in lines if line.word == "slower")
        reason = f"{reason} ({said})"
    return Answer(decided.code, reason, lines, tuple(doubts), tuple(notes), against, run, _places(seen))


def _sentence(line: Line) -> str:
    said = f"{line.phase} at {text.tokens(line.frontier)} is {line.size}"
    return said + named(line)


def named(line: Line) -> str:
    """The ops behind a slowdown: those that take longer when timed alone, and those whose code differs."""
    said = f", changed ops: {', '.join(line.changed)}" if line.changed else ""
    if line.timed is None:
        return said
    return said + f", slower ops by timing: {', '.join(line.timed) or 'none beyond the noise'}"


def with_timed(answer: Answer, timed: Mapping[str, Sequence[str]]) -> Answer:
    """The answer with the ops that timing found, by the name of the line."""
    lines = tuple(
        dataclasses.replace(line, timed=tuple(timed[line.name])) if line.name in timed else line
        for line in answer.lines
    )
    before = "; ".join(_sentence(line) for line in answer.lines if line.word == "slower")
    after = "; ".join(_sentence(line) for line in lines if line.word == "slower")
    return dataclasses.replace(answer, lines=lines, reason=answer.reason.replace(before, after))


def _line(
    name: str,
    asked: _Asked,
    stage: GateStage,
    confirmation: GateStage | None,
    second: Mapping[str, _Asked],
    size: float,
) -> Line:
    again = second[name].estimate.ratio if name in second else None
    word, reason = "ok", asked.reason
    if asked.verdict in ("blocked", "unsupported") or name not in stage.adjusted:
        word = "cannot tell"
    elif name in stage.slower:
        if confirmation is None:
            word = "suspect"
        elif name in confirmation.untestable:
            word, reason = "cannot tell", "slower, and the fresh sessions could not be tested"
        else:
            word = "slower" if name in confirmation.slower else "not confirmed"
    elif _word(asked, size) == "unclear":
        word = "cannot tell"
    e = asked.estimate
    p = stage.adjusted.get(name)
    shown = again if name in stage.slower else None
    return Line(
        name,
        asked.contrast,
        asked.phase,
        asked.frontier,
        e.ratio,
        e.low,
        e.high,
        asked.margin,
        p,
        word,
        reason,
        shown,
        asked.changed,
    )


def _word(asked: _Asked, size: float) -> Verdict:
    """The verdict, where an unclear one still rules a slowdown of `size` out (one-sided 95 %): then ``same``."""
    e = asked.estimate
    if asked.verdict == "unclear" and e.ratio and e.standard_error is not None and e.df is not None:
        low = math.log(e.ratio) - float(special.stdtrit(e.df, 0.95)) * e.standard_error
        if low > -math.log1p(size) and asked.margin < size:
            return "same"
    return cast(Verdict, asked.verdict)


def _not_a_number(asked: _Asked) -> bool:
    return asked.verdict in ("faster", "slower", "same", "unclear") and asked.reason == _NO_RATIO


_NO_RATIO = "the row has a verdict but no ratio"


# -- the run's own contrasts ----------------------------------------------------------------------


def _from_contrasts(seen: Study) -> tuple[dict[str, _Asked], dict[str, _Asked]]:
    """Every contrast of the run but those of an arm with itself, by name."""
    made = {}
    for r in seen.results:
        if not r.aa:
            name = f"{r.contrast} {r.phase} {text.tokens(r.frontier)}"
            changed = tuple(changed_ops(seen.rows.runs, r.reference, r.arm))
            margin = r.margin or LEAST_MARGIN
            made[name] = _Asked(r.contrast, r.phase, r.frontier, _estimate(r), margin, r.verdict, r.reason, changed)
    return made, made


def _estimate(r: Result) -> Estimate:
    """The estimate behind a row, its standard error read back from the 95 % interval.

    Degrees of freedom are taken as units - 1. Where a run allowed for autocorrelation it had fewer; the error read
    back is then too large, never too small.
    """
    error = df = None
    unit: Unit = "session" if r.unit == "session" else "block"
    if r.ratio and r.ratio > 0 and r.low and r.high and 0 < r.low <= r.high and r.units > 1:
        df = float(r.units - 1)
        error = (math.log(r.high) - math.log(r.low)) / 2 / float(special.stdtrit(df, 0.975))
    ratio = r.ratio if r.ratio and r.ratio > 0 else None
    return Estimate(ratio, r.low, r.high, None, None, r.units, unit, r.detectable, None, None, (), error, df, r.method)


def changed_ops(runs: Sequence[RunRow], before: str, after: str) -> list[str]:
    """Ops whose code or chosen variant differs between two arms, with what differs, as the processes recorded them."""
    for run in runs:
        arms = facts.arms(run)
        one, other = arms.get(before) or {}, arms.get(after) or {}
        old, new = one.get("identity") or {}, other.get("identity") or {}
        chosen = one.get("chosen") or {}, other.get("chosen") or {}
        made = []
        for op in dict.fromkeys((*old, *new)):
            if chosen[0].get(op) != chosen[1].get(op):
                made.append(f"{op} ({text.plain(chosen[0].get(op))} to {text.plain(chosen[1].get(op))})")
            elif old.get(op) != new.get(op):
                made.append(f"{op} ({_short(old.get(op))} to {_short(new.get(op))})")
        if old or new:
            return made
    return []


def _short(value: Any) -> str:
    return str(value)[:8] if value else "absent"


# -- a kept run -----------------------------------------------------------------------------------


def _from_baseline(
    seen: Study, kept: Study, again: Study | None
) -> tuple[dict[str, _Asked], dict[str, _Asked] | None, dict[str, _Asked]]:
    first = _against_kept(seen, kept)
    if not first:
        raise ReportError("the run and the baseline have no arm, phase and context in common; nothing to compare")
    return first, _against_kept(again, kept) if again is not None else None, first


def _against_kept(seen: Study, kept: Study) -> dict[str, _Asked]:
    """Every arm of the baseline, but repeats of another, against the same arm now. What is gone is unsupported."""
    margins: dict[tuple[str, int], float] = {}
    for r in (*seen.results, *kept.results):
        margins[r.phase, r.frontier] = max(margins.get((r.phase, r.frontier), LEAST_MARGIN), r.margin or LEAST_MARGIN)
    made = {}
    for (arm, phase, frontier), before in kept.cells.items():
        if arm in kept.aa_arms or before.median is None:
            continue
        now = seen.cells.get((arm, phase, frontier))
        name = f"{arm} then and now {phase} {text.tokens(frontier)}"
        margin = margins.get((phase, frontier), LEAST_MARGIN)
        if now is None or now.median is None:
            why = f"{now.gap or 'no rate'}: {now.reason}" if now else "this run did not measure it"
            none = _nothing(0, "no estimate")
            made[name] = _Asked(f"{arm} then and now", phase, frontier, none, margin, "unsupported", why)
            continue
        estimate = _unpaired(now, before, margin)
        word, reason = judge(estimate, margin)
        made[name] = _Asked(f"{arm} then and now", phase, frontier, estimate, margin, word, reason)
    return made


def _unpaired(now: Cell, before: Cell, margin: float) -> Estimate:
    """Ratio of rates, now over then, from session medians of unequal variance (Welch)."""
    a, b = (np.log(cell.session_medians) for cell in (now, before))
    counts, units = (len(a), len(b)), min(len(a), len(b))
    mean = float(np.mean(a) - np.mean(b))
    method = "sessions of two runs, not paired; Welch's t"
    if units < 2:
        reason = "a run of one process: how much of this is noise cannot be told"
        lone = _nothing(units, method, reason)
        return dataclasses.replace(lone, ratio=math.exp(mean), blocks=counts)
    va, vb = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    error = math.sqrt(va + vb)
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1)) if error else float(units - 1)
    half95, half90 = (float(special.stdtrit(df, q)) * error for q in (0.975, 0.95))
    low, high, low90, high90 = (math.exp(mean + h) for h in (-half95, half95, -half90, half90))
    could = detectable_ratio(error, df, margin) if error else 1 + margin
    ratio = math.exp(mean)
    return Estimate(ratio, low, high, low90, high90, units, "session", could, None, None, counts, error, df, method)


def _nothing(units: int, method: str, reason: str | None = None) -> Estimate:
    """An estimate without a number."""
    return Estimate(None, None, None, None, None, units, "session", None, None, None, (), None, None, method, reason)


def identity(run: RunRow) -> dict[str, tuple[str, str]]:
    """What two runs must share before their times may be held against each other: name to (kind of doubt, value)."""
    lookup = facts.lookup
    weights = lookup(run.model, ("weights_hash",))
    return {
        "chip": ("other machine", facts.chip_name(run)),
        "device": ("other machine", facts.device_kind(run)),
        "memory": ("other machine", str(lookup(run.machine, ("memory", "memory_bytes")) or facts.NOT_RECORDED)),
        "model": ("other model", facts.model_name(run)),
        "weights": ("other model", str(weights or facts.NOT_RECORDED)),
        "prompt kind": ("other model", facts.prompt_kind(run)),
        "prompt": ("other model", str(lookup(run.prompt, ("hash",)) or facts.NOT_RECORDED)),
        "os": ("other version", str(lookup(run.machine, ("os",)) or facts.NOT_RECORDED)),
        "mlx": ("other version", facts.version(run, "mlx")),
        "mlx_lm": ("other version", facts.version(run, "mlx_lm")),
    }


def differences(seen: Sequence[RunRow], kept: Sequence[RunRow]) -> list[tuple[str, str, str, str]]:
    """(name, kind of doubt, value there, value here) of everything in `identity` that differs."""
    if not seen or not kept:
        return []
    here, there = identity(seen[0]), identity(kept[0])
    return [(name, kind, there[name][1], value) for name, (kind, value) in here.items() if there[name][1] != value]


def _comparable(seen: Study, kept: Study, accept: Sequence[str]) -> list[Doubt]:
    """Doubts about holding one run against another."""
    found = [
        Doubt(kind, f"{name} is {here} here, {there} in the baseline")
        for name, kind, there, here in differences(seen.rows.runs, kept.rows.runs)
        if name not in accept
    ]
    if {r.run_id for r in seen.rows.runs} & {r.run_id for r in kept.rows.runs} or _same_times(seen, kept):
        found.append(Doubt("identical", "the run and its baseline hold the same measurement"))
    elif _began(kept) > _began(seen):
        found.append(Doubt("swapped", "the baseline was measured after the run that is held against it"))
    if any(facts.lookup(r.machine, ("paravirtual",)) for r in kept.rows.runs):
        found.append(Doubt("paravirtual", "the baseline comes from a virtual device"))
    return found


def _confirmable(seen: Study, again: Study, folder: Path) -> list[Doubt]:
    """Doubts about whether fresh runs can confirm.

    Raises:
        ReportError: they hold a process of the run itself, or none.
    """
    old = {run.run_id for run in seen.rows.runs}
    if any(run.run_id in old for run in again.rows.runs) or not again.rows.runs:
        raise ReportError(f"{folder}: a confirmation needs sessions of its own; run the same command again")
    # Its seed is another one, so that its text is too: both sides of a pair read the same.
    found = [
        Doubt(kind, f"{name} is {here} in the confirmation, {there} in the run")
        for name, kind, there, here in differences(again.rows.runs, seen.rows.runs)
        if name != "prompt"
    ]
    for arm in seen.arms:
        then, now = _code(seen, arm), _code(again, arm)
        if arm in again.arms and then != now:
            found.append(
                Doubt("other code", f"{arm} is {', '.join(now)} in the confirmation, {', '.join(then)} in the run")
            )
    if _same_times(seen, again):
        found.append(Doubt("identical", "the confirmation holds the very times of the run"))
    elif _began(again) < _began(seen):
        found.append(Doubt("swapped", "the confirmation was measured before the run that it should confirm"))
    return found


def _code(one: Study, arm: str) -> list[str]:
    """What an arm ran, shortened: its settings, and its checkout's code or else the commit of the harness."""
    told = {(facts.arms(run).get(arm) or {}).get("code") or (run.git or {}).get("commit") for run in one.rows.runs}
    return [_settings(one, arm), *sorted(_short(code) for code in told)]


def _began(one: Study) -> str:
    return min((str(run.started) for run in one.rows.runs), default="")


def _same_times(one: Study, other: Study) -> bool:
    """Whether two runs hold the same windows to the nanosecond, which no clock gives twice."""
    a, b = ([row.elapsed_ns for row in s.rows.samples if row.status == "ok"] for s in (one, other))
    return bool(a) and a == b


def _against(baseline: Path | None, seen: Study) -> str:
    if baseline is not None:
        return f"baseline {baseline.name}"
    references = dict.fromkeys(r.reference for r in seen.results if not r.aa)
    return ", ".join(references) or "nothing"


# -- doubts and notes -----------------------------------------------------------------------------


def _unreadable(run: Path, error: ReportError) -> Answer:
    said = text.one_line(str(error))
    doubt = Doubt("other schema" if "schema version" in said else "unreadable", said)
    return Answer(2, f"cannot tell: {doubt}", doubts=(doubt,), run=str(run))


def _problems(seen: Study, ignore: Sequence[str]) -> list[Doubt]:
    """What keeps silence from meaning "nothing became slower"."""
    if not seen.rows.runs and not seen.rows.samples:
        return [Doubt("no rows", DOUBTS["no rows"])]
    found = [] if seen.rows.runs else [Doubt("no rows", "no process has a row")]
    found += [doubt for name, doubt in _cell_doubts(seen) if not any(fnmatch.fnmatch(name, p) for p in ignore)]
    found += [
        Doubt("missing", name)
        for name in _unanswered(seen)
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ignore)
    ]
    found += [Doubt("identical", said) for said in _twins(seen)]
    wide = [r for r in seen.results if not r.aa and r.margin is not None and r.margin > NOISY_MARGIN]
    if wide:
        widest = text.percent(max(r.margin or 0 for r in wide))
        found.append(Doubt("noisy", f"too noisy: at {text.count(len(wide), 'point')} the margin is up to {widest}"))
    found += [Doubt("torn", f"{name} ends in an unfinished row") for name in seen.rows.torn]
    if any(facts.lookup(run.machine, ("paravirtual",)) is True for run in seen.rows.runs):
        found.append(Doubt("paravirtual", DOUBTS["paravirtual"]))
    return found + _swapped_checkouts(seen)


def _cell_doubts(seen: Study) -> list[tuple[str, Doubt]]:
    """Doubts about points of arms that some contrast is about, each with the name it can be ignored by."""
    arms = {arm for r in seen.results for arm in (r.arm, r.reference) if not r.aa}
    made = []
    for c in seen.gaps():
        name = f"{c.arm} {c.phase} {text.tokens(c.frontier)}"
        if c.arm not in arms:
            continue
        if c.gap == "error" and "no usable time" in c.reason:
            made.append((name, Doubt("not a number", f"{name}: {c.reason}")))
        elif c.gap in ("oom", "timeout", "error"):
            made.append((name, Doubt("failed", f"{name}: {text.gap(c.gap)}, {c.reason}")))
        elif c.gap == "missing":
            made.append((name, Doubt("missing", f"{name}: {c.reason}")))
        elif c.partial:
            made.append((name, Doubt("partly skipped", f"{name}: {c.partial}, {c.reason}")))
    return made


def _unanswered(seen: Study) -> list[str]:
    """Contrasts that the plan asks for and no row answers."""
    answered = {(r.contrast, r.phase, r.frontier) for r in seen.results}
    made = []
    for job in seen.rows.jobs:
        again = {arm.get("name") for arm in job.get("arms", []) if arm.get("aa")}
        for contrast in job.get("contrasts", []):
            if contrast.get("arm") in again:
                continue
            for point in job.get("points", []):
                key = (contrast.get("name"), point.get("phase"), point.get("frontier"))
                if key not in answered:
                    made.append(f"{key[0]} {key[1]} {text.tokens(int(key[2] or 0))}")
    return made


def _twins(seen: Study) -> list[str]:
    """Arms whose windows took the same time to the nanosecond: one side was copied, not measured."""
    times: dict[tuple[str, str, int], list[int | None]] = {}
    for row in seen.rows.samples:
        if row.status == "ok" and row.block >= 0:
            times.setdefault((seen.label(row.run_id, row.arm), row.phase, row.frontier), []).append(row.elapsed_ns)
    made = []
    for r in seen.results:
        one, other = (times.get((arm, r.phase, r.frontier), []) for arm in (r.arm, r.reference))
        if not r.aa and len(one) > 1 and one == other:
            made.append(f"{r.arm} and {r.reference} {r.phase} {text.tokens(r.frontier)} hold the very same times")
    return made


def _swapped_checkouts(seen: Study) -> list[Doubt]:
    """Base against head: the base must not be the newer commit."""
    for run in seen.rows.runs:
        arms = facts.arms(run)
        dates = {name: facts.finite((arms.get(name) or {}).get("commit_time")) for name in ("base", "head")}
        if dates["base"] and dates["head"] and dates["base"] > dates["head"]:
            return [Doubt("swapped", "the base's commit is newer than the head's: were the checkouts exchanged?")]
    return []


def _notes(seen: Study, kept: Study | None, ignored: Sequence[str]) -> list[str]:
    made = [f"left out by --ignore: {', '.join(ignored)}"] if ignored else []
    if kept is not None and kept.rows.runs and seen.rows.runs:
        for arm in seen.arms:
            then, now = (_settings(s, arm) for s in (kept, seen))
            if then and now and then != now:
                made.append(f"{arm}: settings or kernels differ from the baseline's ({then} then, {now} now)")
        ops = _ops_since(kept, seen)
        if ops:
            made.append(f"ops changed since the baseline: {', '.join(ops)}")
    for run in seen.rows.runs[:1]:
        arms = facts.arms(run)
        for name in ("base", "head"):
            if name in arms:
                made.append(f"{name}: commit {_short(arms[name].get('commit'))}, code {_short(arms[name].get('code'))}")
    if any((run.git or {}).get("dirty") for run in seen.rows.runs):
        made.append("the working tree had uncommitted changes")
    return made


def _settings(one: Study, arm: str) -> str:
    found = {row.arm_hash for row in one.rows.samples if row.arm == arm}
    return ", ".join(sorted(h[:8] for h in found))


def _ops_since(kept: Study, seen: Study) -> list[str]:
    then, now = (facts.arms(s.rows.runs[0]) if s.rows.runs else {} for s in (kept, seen))
    made: dict[str, None] = {}
    for arm in set(then) & set(now):
        old, new = (side[arm].get("identity") or {} for side in (then, now))
        made |= dict.fromkeys(op for op in {*old, *new} if old.get(op) != new.get(op))
    return sorted(made)


def _places(seen: Study) -> tuple[dict[str, str], ...]:
    from reports.summary import places

    return tuple(places(seen.rows.runs)) if seen.rows.runs else ()
