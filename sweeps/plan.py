"""From a checked request to the job that is run: arms, contrasts, points and their replicates, and what is left out.

The plan is made in the parent process and touches no weights. Whatever is known beforehand to be impossible is in
it with its reason; whatever does not fit the budget is dropped here, from the long end first, and said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from engine import tuned
from engine.config import EngineConfig
from sweeps import toggles
from sweeps.compose import Request, UsageError
from sweeps.forecast import Forecast, Machine, Memory, Probe, memory
from sweeps.guard import Scope
from sweeps.models import REAL_COMMAND, Model
from sweeps.points import APART, Arm, Contrast, Job, Point, drafts
from sweeps.questions import Builder, refusal
from sweeps.rows import RowError
from sweeps.session import warm_seconds
from sweeps.store import RETRY, Store, read_job
from sweeps.subjects import remote
from sweeps.subjects.base import NO_DRAFTS
from sweeps.subjects.openai import Address

STRAIGHT_CHUNKS = 4
"""Up to this many chunks a frontier is a fresh prompt for every trial; above, one walk covers them all."""

CPU_DECODE_TOKENS = 8
DECODE_TOKENS = 64
CPU_DECODE_BLOCKS = 60
"""Decode windows of one session on a CPU: many short ones, because single windows there scatter by several percent."""

CPU_LONG_PROMPT = 256
"""Tokens from which a prompt on a CPU is repeated as often as on other devices."""

PREFILL_REPLICATES = ((8192, 5), (32_768, 2))
"""(largest frontier, prefill blocks a session); above the last, one."""

_RUNGS = {True: (60, 40, 28, 20, 14, 10, 6, 4, 2), False: (10, 8, 5, 3, 2, 1)}
"""Block counts a point steps down on when the budget is short: many short windows, or few long ones."""

SLOW_FACTOR = 3.0
"""An arm whose prefill takes this many times the next slowest gives up its long prefills before a frontier is lost."""

WARM_ROUNDS = 2.5
"""Rounds until two agree, on average; see `sweeps.session`."""

BLOCK_SECONDS = 0.15
"""Sentinel, collection of garbage and rows on disk, once a block."""

POINT_SECONDS = 0.5
"""Record of the machine's condition before and after a point."""


class PlanError(UsageError):
    """The request is well formed, but no plan can answer it; the message is one line with the fix."""


@dataclass
class Row:
    """One frontier in the dry run: seconds by phase over all sessions, memory, and what is skipped there."""

    frontier: int
    walk: bool
    seconds: dict[str, float]
    memory: Memory
    blocks: dict[str, int]
    skip: dict[str, str] = field(default_factory=dict)


@dataclass
class Plan:
    """A job with what was decided on the way.

    Attributes:
        rows: one per frontier, rising. seconds: forecast of the whole run. dropped: replicates given up for the budget.
        notes: decisions worth reading (serial arms, a walk, a forecast without probe).
        expanded: arm name to the engine fields its toggles set. start_seconds: from spawning a process to its weights
            being ready.
    """

    job: Job
    rows: list[Row]
    seconds: float
    machine: Machine
    model: Model
    probed: bool
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    expanded: dict[str, dict[str, Any]] = field(default_factory=dict)
    start_seconds: float = 0.0

    @property
    def parts(self) -> int:
        """How often the command is to be given; each time loads the weights again."""
        part = self.job.settings.get("part_seconds")
        if not part:
            return 1
        useful = max(part - self.start_seconds, 0.1 * part)
        return max(1, math.ceil((self.seconds - self.job.sessions * self.start_seconds) / useful))

    def require_work(self) -> None:
        """Raise `PlanError` with the first reason if no arm can run at any point."""
        points = self.job.points
        if all(arm.name in point.skip for point in points for arm in self.job.arms):
            reason = next(iter(points[0].skip.values()))
            raise PlanError(f"nothing can be measured here: {reason}; dry_run=true shows all reasons")


def make(request: Request, model: Model, machine: Machine, probe: Probe | None = None) -> Plan:
    """Plan one job.

    Args:
        machine: the machine that will run it. probe: timings of the same arms there, if any.

    Raises:
        PlanError: contradicting toggles, a contrast about more than one thing, a frontier asked for by hand that the
            model or the machine cannot reach, or a budget that not even one block fits in.
    """
    asked = Builder(request.engine, request.engine_name, request.toggles, request.engine_fields, machine.kind)
    arms, contrasts = _arms(request, asked)
    chunk = max((arm.config["prefill"]["chunk"] for arm in arms if arm.config), default=2048)
    known = {arm.name: arm.config for arm in arms if arm.subject in ("engine", "mlx_lm")}
    forecast = Forecast(model.config, machine, model.weights_bytes, probe, known)
    plan = _Planner(request, model, arms, chunk, forecast, contrasts)
    points = plan.points()
    dropped = plan.fit(points)
    identity: dict[str, Any] = {
        "request": _identity(request),
        "model": model.fingerprint(),
        "arms": [arm.hash for arm in arms],
    }
    if measured := tuned.digest():
        # What `best` is has changed with it: rows of before and after belong to two runs.
        identity["tuned"] = measured
    config_hash = _digest(identity)
    run_dir, run_id = _run_folder(request, model, config_hash)
    job = Job(
        run_dir=str(run_dir),
        run_id=run_id,
        model=model.to_dict(),
        prompt={"kind": request.prompt, "seed": request.seed},
        arms=arms,
        contrasts=contrasts,
        points=points,
        sessions=request.sessions,
        seed=request.seed,
        budget_seconds=request.budget_seconds,
        cap_seconds=request.cap_seconds,
        settings=_settings(request, model, plan, points, dropped)
        | {"probed": probe is not None, "ladders": asked.made.ladders, "interactions": asked.made.interactions},
        argv=["python", "-m", "sweeps", *request.overrides],
        config=request.config,
        config_hash=config_hash,
    )
    notes = [*plan.notes, *([] if probe else ["times come from the geometry; they sharpen once the model is here"])]
    expanded = {arm.name: _expanded(arm, request.engine, machine.kind) for arm in arms if arm.toggles and not arm.aa}
    rows = plan.rows(points)
    return Plan(
        job, rows, plan.total(points), machine, model, probe is not None, dropped, notes, expanded, forecast.start()
    )


def _expanded(arm: Arm, base: dict[str, Any], device: str) -> dict[str, dict[str, Any]]:
    """What each toggle of an arm sets, and what the arm had to change besides so that it and its partners can run."""
    made = {f"toggle.{name}": fields for name, fields in toggles.fields_of(arm.toggles, device).items()}
    named = {field for fields in made.values() for field in fields}
    besides = {name: value for name, value in toggles.differing(arm.config, base).items() if name not in named}
    return made | ({"running it in every arm": besides} if besides else {})


# -- arms and contrasts ------------------------------------------------------------------------------


def _arms(request: Request, asked: Builder) -> tuple[list[Arm], list[Contrast]]:
    """Arms in order: reference, others, baseline, A/A. Every engine arm is a checked EngineConfig."""
    if request.base is not None:
        return _base_head(request, request.base, asked.device)
    if request.head is not None:
        raise PlanError(f"head={request.head} goes with base=CHECKOUT, what it is held against")
    if request.sweep == "calibrate":
        return _calibration(request, asked.device)
    for ablation in request.ablations:
        if ablation["varies"] in request.toggles:
            name, varies = ablation["name"], ablation["varies"]
            raise PlanError(f"toggle.{varies}= is what ablation={name} varies: leave one of them out")
        asked.build(ablation, request.directions)
    made = asked.made
    engine_arms = [_arm(request, name, config, made.chosen[name]) for name, config in made.configs.items()]
    engine_arms = engine_arms or [_engine_arm(request, asked.device)]
    contrasts = [Contrast(f"{a.arm} vs {a.reference}", a.arm, a.reference, a.about) for a in made.pairs]
    arms = list(engine_arms)
    baseline = _baseline(request)
    if baseline:
        arms.append(baseline)
    if baseline and baseline.subject == "mlx_lm":
        contrasts += [Contrast(f"{arm.name} vs {baseline.name}", arm.name, baseline.name) for arm in engine_arms]
        if drafting := _drafting_baseline(baseline, engine_arms):
            arms.append(drafting)
            contrasts.append(Contrast(f"{drafting.name} vs {baseline.name}", drafting.name, baseline.name))
    # The noise of a run is that of an arm that runs.
    repeated = next((arm for arm in engine_arms if asked.refusal(arm.config) is None), engine_arms[0])
    arms.append(_again(repeated))
    contrasts.append(Contrast("A/A", arms[-1].name, repeated.name))
    return _with_planted(request, arms, contrasts)


def _calibration(request: Request, device: str) -> tuple[list[Arm], list[Contrast]]:
    arm = _engine_arm(request, device)
    arms = [arm, _again(arm), _again(arm, 2)]
    contrasts = [Contrast(f"A/A {i}", other.name, arm.name) for i, other in enumerate(arms[1:], 1)]
    return _with_planted(request, arms, contrasts)


def _base_head(request: Request, base: Path, device: str) -> tuple[list[Arm], list[Contrast]]:
    """The engine of another checkout and this one's under the same settings, each in a process of its own.

    The A/A arm has a process of its own too, since two processes of one program differ by more than two engines in one.
    """
    if request.ablation["name"] != "none":
        raise PlanError(f"base= and ablation={request.ablation['name']} are two questions: leave one out")
    if request.shared_cache:
        raise PlanError("base= keeps each engine's state in its process: use decode.cache=own")
    head = request.head or remote.ROOT
    for word, folder in (("base", base), ("head", head)):
        remote.check_checkout(folder, word)
    plain = _engine_arm(request, device)
    folders = {"base": (base, ""), "head": (head, ""), "head.again": (head, "again")}
    arms = []
    for name, (folder, process) in folders.items():
        options = {"checkout": str(folder), "process": process}
        # The role is part of it: two checkouts of equal code are still two sides, not an arm and its repeat.
        role = "base" if name == "base" else "head"
        same = _digest({"config": plain.hash, "code": remote.code_hash(folder), "role": role})
        arms.append(dataclasses.replace(plain, name=name, options=options, hash=same, aa=bool(process)))
    contrasts = [Contrast("head vs base", "head", "base"), Contrast("A/A", "head.again", "head")]
    return _with_planted(request, arms, contrasts)


def _with_planted(request: Request, arms: list[Arm], contrasts: list[Contrast]) -> tuple[list[Arm], list[Contrast]]:
    """One more arm, the first one slowed, where that was asked for."""
    if request.planted is None:
        return arms, contrasts
    first, share = arms[0], f"{request.planted:.3g}"
    options = {**first.options, "slowdown": 1 + request.planted}
    slowed = dataclasses.replace(
        first, name=f"{first.name}.slowed", options=options, hash=_digest({"arm": first.hash, **options})
    )
    return [*arms, slowed], [*contrasts, Contrast(f"planted slowdown of {share}", slowed.name, first.name)]


def _again(arm: Arm, number: int = 1) -> Arm:
    """The same arm once more: what separates the two is noise."""
    suffix = "again" if number == 1 else f"again{number}"
    return dataclasses.replace(arm, name=f"{arm.name}.{suffix}", aa=True)


def _engine_arm(request: Request, device: str) -> Arm:
    name = request.engine_name
    if request.toggles:
        name += "," + ",".join(f"{key}={value}" for key, value in sorted(request.toggles.items()))
    config = toggles.apply(request.engine, request.toggles, request.engine_fields, device)
    return _arm(request, name, config, request.toggles)


def _arm(request: Request, name: str, config: EngineConfig, chosen: dict[str, Any]) -> Arm:
    if request.logprobs:
        config.decode.logprobs = True
    return Arm(name, "engine", config.to_dict(), dict(chosen), hash=config.hash())


def _baseline(request: Request) -> Arm | None:
    subject = dict(request.subject)
    name = subject.pop("name")
    if name == "none":
        return None
    options = {key: value for key, value in subject.items() if value is not None}
    if name == "llama_bench":
        for key in ("binary", "gguf"):
            if key not in options:
                raise PlanError(f"subject=llama_bench needs subject.{key}=PATH")
            found = request.launch / Path(options[key]).expanduser()
            if not found.is_file():
                raise PlanError(f"subject.{key}={found} does not exist: give the path of the {key} file")
            options[key] = str(found)
    if name == "openai":
        options["url"] = str(Address.read(options))
    return Arm(name, name, options=options, hash=_digest({"subject": name, **options}))


def _drafting_baseline(baseline: Arm, engine_arms: list[Arm]) -> Arm | None:
    """Where the engine drafts, MLX-LM is asked to draft too: that it cannot is a row with its reason, not a gap."""
    names = {arm.config["speculative"]["drafter"] for arm in engine_arms} - {"off"}
    if not names:
        return None
    options = {**baseline.options, "speculative": "mtp" if "mtp" in names else min(names)}
    named = f"{baseline.name},speculative={options['speculative']}"
    return Arm(named, baseline.subject, options=options, hash=_digest({"subject": baseline.subject, **options}))


# -- points ------------------------------------------------------------------------------------------


class _Planner:
    """Points of one job, their forecasts, and the stepping down to a budget."""

    def __init__(
        self,
        request: Request,
        model: Model,
        arms: list[Arm],
        chunk: int,
        forecast: Forecast,
        contrasts: list[Contrast],
    ) -> None:
        self.contrasts = contrasts
        self.request, self.model, self.arms, self.chunk, self.forecast = request, model, arms, chunk, forecast
        self.machine = forecast.machine
        self.short = self.machine.kind == "cpu"
        self.serial = request.arms == "serial"
        self.notes: list[str] = []
        self._full: dict[str, int] = {}
        self.donor = self._donor() if request.shared_cache else None

    def _donor(self) -> str:
        """The arm that fills the caches of all: the engine arm with the shortest prefill, the later of equals."""
        if "prefill" in self.request.phases:
            raise PlanError("decode.cache=shared goes with phases=[decode]: a timed prefill fills its own arm's cache")
        longest = self.request.frontiers[-1]
        engines = [a for a in reversed(self.arms) if a.subject == "engine" and not a.aa and "slowdown" not in a.options]
        idle = {name for frontier in self.request.frontiers for name in self._idle("decode", frontier)}
        engines = [a for a in engines if a.name not in idle and not self._impossible(a)] or engines
        return min(engines, key=lambda a: self.forecast.prefill(a.name, longest, a.subject, self._chunk_of(a))).name

    def points(self) -> list[Point]:
        """All points in the order of frontiers, with every replicate the sweep allows."""
        made = []
        impossible = {arm.name: self._impossible(arm) for arm in self.arms}
        for frontier in self.request.frontiers:
            unreachable = self._unreachable(frontier)
            reasons = {name: unreachable or reason for name, reason in impossible.items()}
            skip = {name: reason for name, reason in reasons.items() if reason}
            for phase in self.request.phases:
                made.append(self._point(phase, frontier, self._idle(phase, frontier) | skip))
        if self.donor and self.serial:
            raise PlanError(
                "decode.cache=shared needs the caches of all arms at once: use fewer arms, or decode.cache=own"
            )
        self._full = {point.key: point.blocks for point in made}
        return made

    def _impossible(self, arm: Arm) -> str | None:
        """Why an arm can run nowhere, or not on this kind of device; the code of another checkout is not known here."""
        if "speculative" in arm.options:
            return NO_DRAFTS
        if not arm.config or "checkout" in arm.options:
            return None
        drafting, whole = arm.config["speculative"], self.model.config.vocab_size
        if drafting["drafter"] == "mtp" and drafting["draft_vocab"] >= whole:
            return f"speculative.draft_vocab={drafting['draft_vocab']} trims nothing: the model has {whole} tokens"
        return refusal(arm.config, self.machine.kind)

    def _idle(self, phase: str, frontier: int) -> dict[str, str]:
        """Arms that only pairs of equal work ask for at a point, with the reason.

        Questions that are joined share phases and frontiers, some of which one of them may have nothing to say about.
        One that is asked alone is measured as it was asked.
        """
        if len(self.request.ablations) < 2:
            return {}
        arms = {arm.name: arm for arm in self.arms}
        idle, needed = {}, set()
        for contrast in self.contrasts:
            pair = arms[contrast.arm], arms[contrast.reference]
            reason = _same_work(contrast, *pair, phase, frontier)
            if reason:
                idle |= {arm.name: reason for arm in pair}
            elif not pair[0].aa:
                needed |= {arm.name for arm in pair}
        return {
            arm.name: idle[first.name]
            for arm in self.arms
            # A repeated arm goes with the one that it repeats.
            for first in (next(other for other in self.arms if other.hash == arm.hash),)
            if first.name in idle and first.name not in needed
        }

    def _point(self, phase: Any, frontier: int, skip: dict[str, str]) -> Point:
        tokens = self.request.decode_tokens or (CPU_DECODE_TOKENS if self.short else DECODE_TOKENS)
        straight = frontier <= STRAIGHT_CHUNKS * self.chunk
        if phase == "prefill":
            most = next((n for most, n in PREFILL_REPLICATES if frontier <= most), 1)
            # Short prompts on a CPU scatter as decode windows do, and cost as little.
            most = CPU_DECODE_BLOCKS if self.short and frontier < CPU_LONG_PROMPT else most
            blocks = min(self.request.blocks, most)
            for arm in self.arms:
                reason = self._too_slow(arm, frontier)
                if reason:
                    skip.setdefault(arm.name, reason)
        elif self.request.decode_blocks is not None:
            blocks = self.request.decode_blocks
        elif self.short and self.request.sessions == 1:
            blocks = CPU_DECODE_BLOCKS
        else:
            blocks = self.request.blocks
        settings = {
            "model": self.model.fingerprint(),
            "prompt": [self.request.prompt, self.request.seed],
            "arms": {arm.name: arm.hash for arm in self.arms},
            "phase": phase,
            "frontier": frontier,
            "tokens": tokens if phase == "decode" else 0,
            "straight": straight,
            **({"cache_from": self.donor} if self.donor else {}),
            **({"prompts": "own"} if self.request.own_prompts else {}),
        }
        need = self.memory(frontier).total
        return Point(_digest(settings), phase, frontier, blocks, tokens, straight, skip, forecast_bytes=need)

    def _unreachable(self, frontier: int) -> str | None:
        """Why no arm can be measured at `frontier`; an error where it was asked for by hand."""
        reason = None
        limit = self.model.config.max_position_embeddings
        alone = self.memory(frontier, arms=1)
        if frontier > limit:
            reason = f"frontier {frontier} is beyond the model's context of {limit} tokens"
        elif not alone.fits:
            reason = (
                f"frontier {frontier} needs {gigabytes(alone.total)} with one arm, beyond this machine's working set "
                f"of {gigabytes(alone.limit)}"
            )
        elif not self.serial and not self.memory(frontier).fits:
            self.serial = True
            self.notes.append(
                f"at {frontier} the caches of {len(self.arms)} arms do not fit together: one arm is refilled at a time"
            )
        if reason and self.request.asked_frontiers:
            raise PlanError(f"{reason}: choose frontiers=[…] below it")
        return reason

    def _too_slow(self, arm: Arm, frontier: int) -> str | None:
        seconds = self.forecast.prefill(arm.name, frontier, arm.subject, self._chunk_of(arm))
        cap = self.request.cap_seconds
        # A forecast is good to a factor of 1.5; what may still pass is tried and stopped by the cap.
        if seconds <= 2 * cap:
            return None
        return f"a prefill of {frontier} tokens is forecast at {spell_time(seconds)}, beyond cap={spell_time(cap)}"

    def _chunk_of(self, arm: Arm) -> int:
        return arm.config["prefill"]["chunk"] if arm.config else 2048

    def _lives(self, arm: Arm) -> bool:
        """Whether an arm holds a cache beside the others."""
        return arm.subject not in APART and "speculative" not in arm.options

    def memory(self, frontier: int, arms: int | None = None) -> Memory:
        """Bytes at a frontier with the arms that are alive at once there."""
        live = arms or (1 if self.serial else sum(self._lives(arm) for arm in self.arms))
        weights = self.model.weights_bytes
        processes = len({str(arm.options.get("checkout")) + str(arm.options.get("process")) for arm in self.arms})
        # Engines in processes of their own each hold the weights.
        held = weights * processes if weights and self.request.base is not None else weights
        return memory(self.model.config, self.machine, frontier, live, self.chunk, held)

    # -- time ----------------------------------------------------------------------------------------

    def seconds(self, point: Point) -> float:
        """Seconds of one session at a point: its windows, and what must run around them."""
        arms = [arm for arm in self.arms if arm.name not in point.skip]
        if not arms:
            return 0.0
        each = 0.0
        for arm in arms:
            fill = self.forecast.prefill(arm.name, point.frontier, arm.subject, self._chunk_of(arm))
            fill = min(fill, self.request.cap_seconds)
            if point.phase == "prefill":
                # On the walk an arm prefills once a block and is warmed on its first chunks only.
                warm = min(WARM_ROUNDS, 1 + self._warm_seconds // fill) if point.straight else 0
                each += fill * (warm + (2 if point.straight else 1) * point.blocks)
                continue
            step = self.forecast.decode(arm.name, point.frontier, 1)
            warm = WARM_ROUNDS * min(16, point.decode_tokens) + point.decode_tokens
            each += step * (warm + 2 * point.blocks * point.decode_tokens)
            # The prefill of the same frontier serves as the cache, unless arms take turns or none is measured.
            alone = self.serial or "prefill" not in self.request.phases
            fills = self.donor in (None, arm.name) or drafts(arm)
            own = point.blocks if self.request.own_prompts else 0
            each += fill * (own + alone) if fills else 0.0
        return each + POINT_SECONDS + BLOCK_SECONDS * point.blocks

    @property
    def _warm_seconds(self) -> float:
        return warm_seconds(self.request.budget_seconds / self.request.sessions)

    def walk_discount(self, points: list[Point]) -> float:
        """What `seconds` counts too often: on the walk a longer prompt contains the shorter ones."""
        walk = [p for p in points if not p.straight and p.phase == self.request.phases[0] and p.blocks]
        saved = 0.0
        for shorter, longer in zip(walk, walk[1:]):
            shared = min(shorter.blocks, longer.blocks) if longer.phase == "prefill" else 1
            for arm in self.arms:
                walks = self.donor in (None, arm.name)
                if walks and arm.name not in shorter.skip and arm.name not in longer.skip:
                    whole = self.forecast.prefill(arm.name, shorter.frontier, arm.subject, self._chunk_of(arm))
                    saved += min(whole, self.request.cap_seconds) * shared
        return saved

    def total(self, points: list[Point]) -> float:
        """Seconds of the whole run."""
        work = sum(self.seconds(point) for point in points if point.blocks) - self.walk_discount(points)
        return self.request.sessions * (self.forecast.start() + work) + self.guard_seconds

    @cached_property
    def guard_seconds(self) -> float:
        """Seconds of the quality guard: every distinct engine arm against the reference, by each phase."""
        scope = Scope.on(self.machine.kind, self.model.config.max_position_embeddings)
        distinct = {arm.hash: arm for arm in self.arms if arm.subject == "engine"}
        if self.model.synthetic:
            baseline = next((arm.name for arm in self.arms if arm.subject == "mlx_lm"), "mlx_lm")
            names = [arm.name for arm in distinct.values()]
            return self.forecast.guard_synthetic(names, scope.rows + scope.steps, baseline)
        return sum(self._guard(arm, scope) for arm in distinct.values())

    def _guard(self, arm: Arm, scope: Scope) -> float:
        forecast, total = self.forecast, 0.0
        for context in scope.contexts:
            # The cache is filled for both sides, and the reference runs twice over the compared positions.
            total += 2 * forecast.prefill(arm.name, context) * len(self.request.phases)
            total += 3 * forecast.prefill(arm.name, scope.positions)
            if "decode" in self.request.phases:
                total += 2 * forecast.decode(arm.name, context, scope.positions)
        return total

    def fit(self, points: list[Point]) -> list[str]:
        """Step replicates down, long frontiers first, until the forecast is inside the budget.

        Returns:
            What was given up, one line a point.

        Raises:
            PlanError: not even one block at the smallest frontier fits.
        """
        budget = self.request.budget_seconds
        while self.total(points) > budget:
            point = self._longest_to_reduce(points)
            if point is None:
                break
            point.blocks = self._lower(point)
        self._spare_slow_prefills(points, budget)
        self._drop_frontiers(points, budget)
        self._use_up(points, budget)
        for point in points:
            point.forecast_seconds = round(self.seconds(point), 3) if point.blocks else 0.0
        return [
            f"{p.phase} at {p.frontier}: {p.blocks} of {self._full[p.key]} blocks"
            for p in reversed(points)
            if p.blocks < self._full[p.key]
        ]

    def _rungs(self, point: Point) -> tuple[int, ...]:
        return _RUNGS[self.short and point.phase == "decode"]

    def _lower(self, point: Point) -> int:
        return next((rung for rung in self._rungs(point) if rung < point.blocks), point.blocks)

    def _longest_to_reduce(self, points: list[Point]) -> Point | None:
        """The longest point among those that stand highest on their ladder, prefill (the dearer) before decode."""
        open_points = [p for p in points if p.blocks and self._lower(p) < p.blocks]
        rank = {id(p): sum(rung < p.blocks for rung in self._rungs(p)) / len(self._rungs(p)) for p in open_points}
        # Rungs in bands of a quarter: the long end gives up a band before the short end is touched.
        return max(
            open_points, key=lambda p: (math.ceil(4 * rank[id(p)]), p.frontier, p.phase == "prefill"), default=None
        )

    def _spare_slow_prefills(self, points: list[Point], budget: float) -> None:
        """Leave out, from the long end, prefills of an arm far slower than all others; it decodes from their caches."""
        for point in reversed(points):
            if self.total(points) <= budget:
                return
            arms = [arm for arm in self.arms if arm.name not in point.skip]
            if point.phase != "prefill" or len(arms) < 2 or point.frontier == self.request.frontiers[0]:
                continue
            cost = {a.name: self.forecast.prefill(a.name, point.frontier, a.subject, self._chunk_of(a)) for a in arms}
            *_, second, slowest = sorted(cost, key=lambda name: cost[name])
            if cost[slowest] > SLOW_FACTOR * cost[second]:
                took = spell_time(cost[slowest])
                point.skip[slowest] = f"a prefill is forecast at {took}, the budget is {spell_time(budget)} (budget=)"

    def _use_up(self, points: list[Point], budget: float) -> None:
        """Give back replicates, short frontiers and decode first, where leaving something out made room for them."""
        order = sorted((p for p in points if p.blocks), key=lambda p: (p.phase == "prefill", p.frontier))
        raised = True
        while raised:
            raised = False
            for point in order:
                held, full = point.blocks, self._full[point.key]
                higher = [rung for rung in (*self._rungs(point), full) if held < rung <= full]
                point.blocks = min(higher, default=held)
                if self.total(points) > budget:
                    point.blocks = held
                raised = raised or point.blocks > held

    def _drop_frontiers(self, points: list[Point], budget: float) -> None:
        for frontier in reversed(self.request.frontiers):
            if self.total(points) <= budget:
                return
            here = [p for p in points if p.frontier == frontier]
            if frontier == self.request.frontiers[0]:
                # A forecast may be wrong by half; the run itself ends at the budget whatever was planned.
                if self.total(points) <= 2 * budget:
                    self.notes.append(f"even the smallest plan may take {spell_time(self.total(points))}")
                    return
                raise PlanError(
                    f"budget={spell_time(budget)} is too short: one block at {frontier} tokens is forecast at "
                    f"{spell_time(self.total(points))}; raise budget= or choose smaller frontiers"
                )
            for point in here:
                point.blocks = 0
                reason = f"the budget of {spell_time(budget)} ends before {frontier} tokens (budget=)"
                for arm in self.arms:
                    point.skip.setdefault(arm.name, reason)

    def rows(self, points: list[Point]) -> list[Row]:
        """The dry run's lines."""
        made = []
        for frontier in self.request.frontiers:
            here = [p for p in points if p.frontier == frontier]
            seconds = {p.phase: self.request.sessions * self.seconds(p) if p.blocks else 0.0 for p in here}
            skip = {name: reason for p in here for name, reason in p.skip.items()}
            walk = not here[0].straight
            made.append(Row(frontier, walk, seconds, self.memory(frontier), {p.phase: p.blocks for p in here}, skip))
        return made


# -- the rest ----------------------------------------------------------------------------------------


def _same_work(contrast: Contrast, arm: Arm, reference: Arm, phase: str, frontier: int) -> str | None:
    """Why the two sides of a question about toggles do the same work at a point, or None."""
    names = [name for name in contrast.about.get("toggles", ()) if "." not in name]
    if "ladder" in contrast.about or len(names) != 1:
        return None
    (name,) = names
    acts, least = toggles.phases(name), toggles.least_context(name)
    if name == "prefill_chunk":
        least = min(one.config["prefill"]["chunk"] for one in (arm, reference)) + 1
    if phase not in acts:
        return f"{name} acts in {' and '.join(acts)} only: in {phase} its sides do the same work"
    if frontier < least:
        return f"{name} acts from {least} tokens on: at {frontier} its sides do the same work"
    return None


def _settings(
    request: Request, model: Model, plan: _Planner, points: list[Point], dropped: list[str]
) -> dict[str, Any]:
    walk = [f for f in request.frontiers if f > STRAIGHT_CHUNKS * plan.chunk]
    return {
        "sweep": request.sweep,
        "ablation": request.ablation["name"],
        "arms": "serial" if plan.serial else "parallel",
        "wait": request.wait,
        "check": request.check,
        "allow": request.allow,
        "part_seconds": request.part_seconds,
        "dropped": dropped,
        "forecast_seconds": round(plan.total(points), 1),
        "cache_from": plan.donor,
        "own_prompts": request.own_prompts,
        "walk_check": 16_384 if 16_384 in walk else (walk[0] if walk else None),
        "suite": request.suite,
        "least_margin": request.margin,
        "real_command": REAL_COMMAND if model.toy else None,
    }


def _identity(request: Request) -> dict[str, Any]:
    """What makes two requests the same run: everything but where it lands and how it is shown."""
    values = dict(request.config)
    for key in ("run_dir", "dry_run", "fetch", "budget", "allow", "suite", "jobs", "wait", "probe", "part"):
        values.pop(key, None)
    # What is not asked for is what a run of before the setting had.
    values["decode"] = {name: value for name, value in values["decode"].items() if name != "blocks" or value}
    return values


def _run_folder(request: Request, model: Model, config_hash: str) -> tuple[Path, str]:
    """The folder of the run: the one given, an unfinished run of the same settings, or a new one."""
    if request.run_dir:
        # Jobs of a suite have the same names in every suite; merged, they must not pass for one run.
        suite = f"{request.run_dir.parent.name}-" if request.suite != "none" else ""
        return request.run_dir, f"{suite}{request.run_dir.name}"
    runs = request.launch / "reports" / "runs"
    for path in sorted(runs.glob(f"*-{config_hash[:6]}*/job.json"), reverse=True):
        if _same(path, config_hash) and not finished(dataclasses.replace(_read(path), run_dir=str(path.parent))):
            return path.parent, path.parent.name
    question = request.ablation["name"] if request.ablation["name"] != "none" else request.engine_name
    question = question if len(question) <= 60 else f"{len(request.ablations)}-questions"
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{model.name}-{request.sweep}-{question}-{config_hash[:6]}"
    number, run_id = 1, name
    while (runs / run_id).exists():
        number += 1
        run_id = f"{name}-{number}"
    return runs / run_id, run_id


def interrupted(job: Job) -> Job | None:
    """The job that already lies in the run folder of `job` and is to be gone on with, or None for a new folder.

    Going on takes the job as it was planned then, so that its blocks stay the ones that were announced.

    Raises:
        PlanError: the folder holds a run of other settings, or something else.
    """
    folder = Path(job.run_dir)
    path = folder / "job.json"
    if path.is_file():
        if not _same(path, job.config_hash):
            raise PlanError(f"run_dir={folder} holds a run of other settings: give another folder")
        # It may have been unpacked here from another machine.
        return dataclasses.replace(_read(path), run_dir=job.run_dir, model=job.model)
    if folder.is_dir() and any(folder.iterdir()):
        raise PlanError(f"run_dir={folder} is not empty and holds no run: give another folder")
    return None


def finished(job: Job) -> bool:
    """Whether the run of `job` came to its report and left nothing to be tried again."""
    return (Path(job.run_dir) / "report.md").is_file() and not stopped_early(job)


def stopped_early(job: Job) -> bool:
    """Whether the rows of `job` leave something to be tried again, or a session that a run in parts has not begun."""
    tables = Store(job.run_dir).read()
    begun = {row.session for row in tables.runs}
    missing = bool(job.settings.get("part_seconds")) and len(begun) < job.sessions
    return missing or any(RETRY in row.flags for row in tables.samples)


def _read(path: Path) -> Job:
    try:
        return read_job(path)
    except RowError as error:
        raise PlanError(f"{error}, or give another run_dir=") from error


def _same(path: Path, config_hash: str) -> bool:
    return _read(path).config_hash == config_hash


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def gigabytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.1f} GB"


def spell_time(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
