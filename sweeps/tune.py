"""`python -m sweeps tune`: what is fastest on this chip, for the geometry of a model.

Every variant of every op that runs here is timed with every point of its space, MLX's own op like ours, on inputs of
the model's shapes and on weights that take turns as layers do. Then whole decode steps (how much is fused, how it is
traced), and passes of 1 to 8 rows. A choice is ours only where it was faster than MLX's op beyond the noise.

What was measured is kept line by line in ``<chip>.jsonl``; the same command skips it and goes on. The choices go to
``<chip>.json``, which the engine reads (`engine.tuned`). Nothing here knows an op by name: it walks `OPS`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import inspect
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import engine as _engine  # noqa: F401  (chooses the BLAS before MLX loads)

# isort: split
import mlx.core as mx
import numpy as np

from engine import speculative
from engine import tuned as files
from engine.config import DecodeConfig, EngineConfig, ModelConfig, SpeculativeConfig
from engine.device import activation_dtype, device_kind
from engine.folded import TILES
from engine.generate import Engine
from engine.ops import OPS, Op, Variant, relative_rms
from engine.ops.bind import FOLDED as FUSED
from engine.ops.choice import Tuned
from engine.ops.registry import DECODE_ROWS, Phase
from engine.ops.route import Routing
from engine.weights import Weights
from sweeps import compose, environment, models
from sweeps.bench import Bench, Timing, Work, winner
from sweeps.clock import Clock, SystemClock
from sweeps.compose import UsageError
from sweeps.lock import device_lock
from sweeps.sentinel import Sentinel, cpu_kernel, device_kernel
from sweeps.store import write_whole
from sweeps.subjects.shared import Shared

KEYS = ("model", "model.seed", "model.skew", "model.layers", "budget", "seed", "wait", "fetch", "run_dir")
"""Settings that may be given."""

BUDGET = {"cpu": 60.0, "metal": 300.0, "cuda": 300.0}
"""Seconds without ``budget=``."""

ROWS = {"cpu": (1, 4), "metal": (1, 2, 4, 8), "cuda": (1, 2, 4, 8)}
"""Rows of decode at which ops are timed; others take the nearest."""
CHUNKS = {"cpu": (512,), "metal": (512, 2048, 8192), "cuda": (512, 2048, 8192)}
CONTEXTS = {"cpu": (256, 4096), "metal": (256, 4096, 32_768, 131_072), "cuda": (256, 4096, 32_768, 131_072)}
LONG_PREFILL = (2048, 32_768)
"""A chunk far into a prompt, and the positions that it sees."""
WINDOW_NS = {"cpu": 2_000_000, "metal": 4_000_000, "cuda": 3_000_000}
SECONDS = {"cpu": 0.6, "metal": 4.0, "cuda": 3.0}
"""Time for the rounds of one comparison."""
UNCACHED_BYTES = {"cpu": 1 << 26, "metal": 1 << 28, "cuda": 1 << 28}
"""Bytes that a pass over all copies reads, where the model has so many layers: beyond any cache."""
MOST_BYTES = {"cpu": 1 << 29, "metal": 3 << 30, "cuda": 4 << 30}
"""Bytes of inputs held at once."""
SENTINEL_SECONDS = 2.0
CHECKED_BYTES = 1 << 26
"""Attention over caches up to this size is held against the reference, over larger ones against the op in place."""
FAR_BEHIND = 5.0
"""From so many times the fastest on, a variant is not tried with more rows."""
BASE_BEHIND = 30.0
"""The same for the op that stands in place."""

PROMPT, STEPS = 256, {"cpu": 4, "metal": 16, "cuda": 16}
"""Tokens in the cache of a timed step, and steps of a window."""
TRACES = tuple(name for name in get_args(get_type_hints(DecodeConfig)["trace"]) if name != "best")
FUSIONS = (
    ("off", "step"),
    *(("off", trace) for trace in TRACES if trace != "step"),
    *((fusion, trace) for fusion in FUSED for trace in TRACES if trace not in ("eager", "layer")),
)
"""(fusion, trace) of whole steps; the first stands in place without a file."""
STEP, COSTS, DRAFTS, RULE = "step", "costs", "drafts", "its own rule"
FOLDED = tuple(f"step.{kernel}" for kernel in TILES)
WHOLE = (STEP, *FOLDED, COSTS, DRAFTS)
"""Comparisons of whole steps: fusion and trace, tiles of the kernels of a fused one, rows, and drafts."""
TAKEN_BACK = 4
"""Rows of the verification that shows what taking rows back costs."""
DEPTHS = (1, 2, 3, 5, 7)
"""Drafts a step at which drafting is timed; others lie on the line between."""
PLAIN = 4
"""Plain steps for each verification beside them: a unit of all costs needs a long window."""
TRIMMED = 32_768
"""Tokens of a trimmed draft vocabulary."""


@dataclass(frozen=True)
class Cell:
    """A comparison: an op at a point, or ``step``, ``costs`` or ``drafts`` of a whole one."""

    op: str
    phase: Phase = "decode"
    rows: int = 1
    context: int | None = None

    @property
    def text(self) -> str:
        """For people."""
        at = "" if self.context is None else f" over {self.context}"
        return f"{self.op} {self.phase} of {self.rows} rows{at}"


@dataclass
class Contender:
    """A variant with settings, or a whole step's; `why` it is no candidate, however fast."""

    label: str
    told: dict[str, Any]
    work: Work
    why: str = ""


def tune(overrides: Sequence[str], clock: Clock | None = None) -> int:
    """Measure what is not measured yet, write the tuned file, print its path; 0, or 1 if the budget did not suffice.

    Raises:
        UsageError: a setting that tuning does not take, or a model that is not here.
        DeviceBusy: another run is timing on this accelerator.
    """
    given = {word.split("=", 1)[0] for word in overrides}
    if odd := sorted(given - {*KEYS}):
        raise UsageError(f"tune does not take {odd[0]}=; it takes {', '.join(KEYS)}")
    kind = device_kind()
    # The real weights where they are, else random ones of their shapes.
    names = [] if "model" in given else ["tiny"] if kind == "cpu" else ["qwen3.6-35b", "synthetic-35b"]
    for words in [[f"model={name}", *overrides] for name in names] or [overrides]:
        request = compose.request(words)
        model = models.find(request)
        if not model.missing:
            break
    if model.missing:
        raise UsageError(model.missing)
    budget = request.budget_seconds if "budget" in given else BUDGET[kind]
    folder = request.run_dir or files.USER
    device = environment.accelerator_key()
    with environment.awake(), device_lock(environment.runtime_dir(), device, "tune", wait=request.wait):
        clock = clock or SystemClock()
        start = clock.now_ns()
        shared = Shared(model.to_dict() | {"mtp": True}, baseline=False)
        tuner = Tuner(shared.config, shared.weights, model.name, folder, clock, request.seed)
        left = tuner.run(start + round(budget * 1e9))
    if left:
        text = f"{len(left)} of {len(tuner.cells)} comparisons did not fit into {budget:.0f} s"
        print(f"{text}: the same command goes on with them", file=sys.stderr)
    print(tuner.path)
    return 1 if left else 0


@dataclass
class Tuner:
    """Comparisons of one model on this device, and what was decided.

    Attributes:
        weights: for whole steps, and for how they are packed; None leaves the steps out. folder: of the two files.
    """

    config: ModelConfig
    weights: Weights
    name: str
    folder: Path
    clock: Clock
    seed: int = 0
    kind: str = field(default_factory=device_kind)
    dtype: mx.Dtype = field(default_factory=activation_dtype)
    drain: Callable[[], None] = mx.synchronize
    steps: bool = True

    @property
    def path(self) -> Path:
        """The tuned file."""
        return self.folder / f"{files.chip()}.json"

    @property
    def record(self) -> Path:
        """What was measured, a line for each comparison."""
        return self.folder / f"{files.chip()}.jsonl"

    @cached_property
    def geometry(self) -> str:
        """Under which the engine will look for the choices."""
        return files.geometry(self.config, self.weights, self.dtype)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Installed, for the file."""
        return environment.versions()

    @cached_property
    def bench(self) -> Bench:
        """How contenders are timed here."""
        return Bench(self.clock, self.drain, WINDOW_NS[self.kind], SECONDS[self.kind], self.seed)

    @cached_property
    def sentinel(self) -> Sentinel:
        """Notices a machine that is hot or busy."""
        kernel = cpu_kernel() if self.kind == "cpu" else device_kernel(self.kind)
        made = Sentinel(kernel, self.clock, may_wait=self.kind != "cpu", most_wait=SENTINEL_SECONDS)
        made.warm_up()
        return made

    # -- what is compared ------------------------------------------------------------------

    @cached_property
    def cells(self) -> list[Cell]:
        """Every comparison, the most telling first, so that a short budget spends itself well."""
        most = self.config.max_position_embeddings
        contexts = [n for n in CONTEXTS[self.kind] if n <= most]
        chunks = [n for n in CHUNKS[self.kind] if n <= most]
        whole = (
            [Cell(op, context=PROMPT) for op in WHOLE if self.kind != "cpu" or op not in FOLDED] if self.steps else []
        )
        made = [*self._decode(1, contexts), *whole]
        for rows in chunks:
            made += [self._cell(op, rows, rows) for op in OPS.values()]
        if LONG_PREFILL[1] <= most and LONG_PREFILL[1] in contexts:
            made += [self._cell(op, *LONG_PREFILL) for op in OPS.values() if op.context is not None]
        for rows in ROWS[self.kind][1:]:
            made += self._decode(rows, contexts)
        return [cell for cell in made if cell.op in WHOLE or self._cases(cell)]

    def _decode(self, rows: int, contexts: Sequence[int]) -> list[Cell]:
        return [
            self._cell(op, rows, context)
            for op in OPS.values()
            for context in (contexts if op.context is not None else contexts[:1])
        ]

    def _cell(self, op: Op, rows: int, context: int) -> Cell:
        few = rows <= op.decode_rows.get(self.kind, DECODE_ROWS)
        return Cell(op.name, "decode" if few else "prefill", rows, context if op.context is not None else None)

    def _cases(self, cell: Cell) -> tuple[Any, ...]:
        return OPS[cell.op].timing(self.config, cell.rows, cell.context or cell.rows)

    # -- the run ---------------------------------------------------------------------------

    def run(self, end_ns: int) -> list[Cell]:
        """Measure until the clock reads `end_ns`, write the tuned file, and return what was left."""
        known = self.known()
        self.write(known)
        for cell in self.cells:
            if self.key(cell) in known:
                continue
            if self.clock.now_ns() >= end_ns:
                break
            row = self.measure(cell, known)
            self._keep(row)
            known[row["key"]] = row
            print(_line(cell, row), file=sys.stderr, flush=True)
        self.write(known)
        return [cell for cell in self.cells if self.key(cell) not in known]

    def key(self, cell: Cell) -> str:
        """What a comparison depends on: the chip, the geometry, MLX, and the code of the op."""
        of = files.STEP if cell.op in WHOLE else cell.op
        layers = self.config.num_hidden_layers if of == files.STEP else None
        parts = [files.FORMAT, files.chip(), self.geometry, files.mlx_version(), files.identity(of), layers]
        parts += [_drafting_code()] if cell.op in (COSTS, DRAFTS) else []
        text = json.dumps([*parts, dataclasses.astuple(cell)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def known(self) -> dict[str, dict[str, Any]]:
        """Comparisons kept so far, by key; a line that was cut off is passed over."""
        made = {}
        if self.record.is_file():
            for line in self.record.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    made[row["key"]] = row
                except (ValueError, KeyError, TypeError):
                    continue
        return made

    def _keep(self, row: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A line that a kill cut off must not swallow this one.
        cut = self.record.is_file() and not self.record.read_bytes().endswith(b"\n")
        with self.record.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut and self.record.stat().st_size else "") + json.dumps(row) + "\n")
            file.flush()

    def measure(self, cell: Cell, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """One comparison as a row: times in ns of each contender, refusals with their message."""
        reading = self.sentinel.before_block(0)
        row = {"key": self.key(cell), **dataclasses.asdict(cell), "sentinel_ns": reading.ns, "hot": reading.hot}
        refused: list[dict[str, Any]] = []
        if cell.op == STEP:
            made = self._steps(refused, known)
        elif cell.op in FOLDED:
            made = self._tiles(cell, refused, known)
        elif cell.op == COSTS:
            made = self._costs(refused, known)
        elif cell.op == DRAFTS:
            made = self._drafts(refused, known)
        else:
            made = self._op(cell, refused, known)
        # What was compiled holds its inputs until it is collected.
        gc.collect()
        mx.clear_cache()
        return row | made | {"refused": refused}

    # -- an op -----------------------------------------------------------------------------

    def _op(self, cell: Cell, refused: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
        op, calls = OPS[cell.op], self._calls(cell)
        base = self.base(op, cell)
        contenders = {}
        wanted: Any = None
        behind = self._behind(cell, known)
        for variant in sorted(op.variants.values(), key=lambda v: v.name != base):
            reason = next((r for c in self._cases(cell) if (r := variant.supports(c, self.kind))), None)
            if reason is None and variant.name in behind:
                reason = behind[variant.name]
            if reason is not None:
                refused.append({"variant": variant.name, "settings": {}, "message": reason})
                continue
            for settings in self._points(cell, variant, known):
                label = _label(variant.name, settings)
                try:
                    if wanted is None:
                        wanted = self._wanted(op, cell, calls, variant)
                    self._check(op, cell, variant, settings, calls, wanted)
                    work = self._work(cell, variant, settings, calls)
                except Exception as error:
                    refused.append(_refusal(variant.name, settings, error))
                    continue
                told = {"variant": variant.name, "settings": dict(settings)}
                contenders[label] = Contender(label, told, work, self._why_not(op, cell, variant))
        timings = self._timed(contenders, base, refused)
        return {"base": base, "calls": len(calls), "contenders": _rows(contenders, timings)}

    def base(self, op: Op, cell: Cell) -> str:
        """The variant to beat: MLX's own op where it may run, else what the declared order takes."""
        names = ("mlx", *op.order[self.kind, cell.phase], *op.variants)  # pyright: ignore[reportArgumentType]
        there = [op.variants[name] for name in names if name in op.variants]
        runs = [v.name for v in there if v.supports(None, self.kind) is None and not self._why_not(op, cell, v)]
        return runs[0]

    def _points(self, cell: Cell, variant: Variant, known: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """All points at one row and in prefill; at 2 to 8 rows its own rule and what was best at one row."""
        points = list(variant.points)
        if cell.rows == 1 or cell.rows > DECODE_ROWS:
            return points
        row = known.get(self.key(dataclasses.replace(cell, phase="decode", rows=1)), {"contenders": []})
        rivals = [c for c in row["contenders"] if c["variant"] == variant.name and c["settings"]]
        best = sorted(rivals, key=lambda c: _timing(c).median)[:2]
        return [{}, *(files.settings(c["settings"]) for c in best)]

    def _behind(self, cell: Cell, known: Mapping[str, Any]) -> dict[str, str]:
        """Variants that were far behind with fewer rows of the same phase: with more they would take minutes."""
        fewer = [c for c in self.cells if c.op == cell.op and c.phase == cell.phase and c.rows < cell.rows]
        found: dict[str, str] = {}
        for row in (known[key] for c in fewer if (key := self.key(c)) in known):
            times: dict[str, float] = {}
            for c in row["contenders"]:
                times[c["variant"]] = min(times.get(c["variant"], math.inf), _timing(c).median)
            for name, ns in times.items():
                # The op to beat stands beside every choice, unless it would take minutes itself.
                if ns > (BASE_BEHIND if name == row["base"] else FAR_BEHIND) * min(times.values()):
                    found[name] = f"{ns / min(times.values()):.0f} times the fastest at {row['rows']} rows"
        return found

    def _why_not(self, op: Op, cell: Cell, variant: Variant) -> str:
        """Why a variant is timed but never chosen."""
        declared = op.order[self.kind, cell.phase]  # pyright: ignore[reportArgumentType]
        if variant.reads_host and (cell.phase == "decode" or variant.name not in declared):
            return "it reads back to the host"
        if variant.unsteady and self.kind != "cpu":
            return variant.unsteady
        few = op.order[self.kind, "decode"]  # pyright: ignore[reportArgumentType]
        if cell.phase == "prefill" and cell.rows <= DECODE_ROWS and variant.name in few:
            return f"its place ends at {op.decode_rows[self.kind]} rows here"
        return ""

    def _calls(self, cell: Cell) -> list[tuple[Any, ...]]:
        """Arguments of every call of a pass, on weights of their own as layers have them."""
        op, cases = OPS[cell.op], self._cases(cell)
        once = sum(op.least_bytes(case) for case in cases)
        periods = max(1, self.config.num_hidden_layers // self.config.full_attention_interval)
        copies = max(1, min(periods, -(-UNCACHED_BYTES[self.kind] // once)))
        if cell.rows > DECODE_ROWS:
            copies = min(copies, 2)
        calls: list[tuple[Any, ...]] = []
        for copy in range(copies):
            for index, case in enumerate(cases):
                calls.append(op.inputs(case, self.dtype, 1000 * copy + 20 * index + self.seed))
                mx.eval([array for value in calls[-1] for array in _arrays(value)])
            held = sum(array.nbytes for call in calls for value in call for array in _arrays(value))
            if held * (copy + 2) / (copy + 1) > MOST_BYTES[self.kind]:
                break
        return calls

    def _work(self, cell: Cell, variant: Variant, settings: Mapping[str, Any], calls: list[tuple[Any, ...]]) -> Work:
        """Calls one after another. On a GPU each waits for the one before, as in a model, and a decode is traced."""
        serial = self.kind != "cpu"

        def chain(link: mx.array) -> tuple[mx.array, list[mx.array]]:
            kept = []
            for first, *others in calls:
                if serial:
                    first = first + link.astype(first.dtype)
                outs = _arrays(variant.run(first, *others, **settings))
                if serial:
                    link = outs[0].reshape(-1)[:1].astype(mx.float32) * 0
                kept += outs
            return link, kept

        traced = serial and cell.phase == "decode" and not variant.reads_host
        run = mx.compile(chain) if traced else chain

        def work(passes: int) -> None:
            link = mx.zeros((1,), mx.float32)
            for _ in range(passes):
                link, kept = run(link)
                mx.async_eval(link, kept)
            mx.eval(link, kept)

        return work

    def _wanted(self, op: Op, cell: Cell, calls: list[tuple[Any, ...]], base: Variant) -> list[list[mx.array]]:
        """Right outputs of one copy's calls: the reference's for few rows, else those of the op in place."""
        cases = self._cases(cell)
        light = op.context is None or sum(map(op.least_bytes, cases)) <= CHECKED_BYTES
        small = light and cell.rows <= DECODE_ROWS
        judge = op.reference if small else base
        made = [_comparable(judge.run(*call)) for call in calls[: len(cases)]]
        mx.eval(made)
        return made

    def _check(
        self, op: Op, cell: Cell, variant: Variant, settings: Mapping[str, Any], calls: list[Any], wanted: list[Any]
    ) -> None:
        """Raise for outputs that are off by more than the op's tolerance, twice that between two variants."""
        limit = 2 * op.tolerance[str(self.dtype).rpartition(".")[2]]
        for call, want in zip(calls, wanted):
            got = _comparable(variant.run(*call, **settings))
            error = max(relative_rms(one, other) for one, other in zip(got, want, strict=True))
            if error > limit:
                raise ValueError(f"its output is off by {error:.2g} here, more than {limit:.2g}")

    def _timed(
        self, contenders: Mapping[str, Contender], base: str, refused: list[dict[str, Any]], **how: Any
    ) -> dict[str, Timing]:
        def failed(label: str, error: Exception) -> None:
            refused.append(contenders[label].told | {"message": _message(error)})

        works = {label: contender.work for label, contender in contenders.items()}
        return self.bench.compare(works, base, failed=failed, **how)

    # -- whole steps -----------------------------------------------------------------------

    def _engine(
        self,
        known: Mapping[str, Any],
        drafting: SpeculativeConfig | None = None,
        told: Tuned | None = None,
        **decode: Any,
    ) -> Engine:
        """An engine with the ops chosen so far, or with what is `told`, and some text in its cache."""
        config = EngineConfig(decode=DecodeConfig(**decode), speculative=drafting or SpeculativeConfig())
        made = Engine(self.config, self.weights, config, dtype=self.dtype, tuned=told or self.tuned(known))
        made.prefill([(7 + 13 * i) % min(400, self.config.vocab_size) for i in range(PROMPT)])
        return made

    def _steps(self, refused: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
        contenders = {}
        for fusion, trace in FUSIONS:
            told, label = {"fusion": fusion, "trace": trace}, f"{fusion}/{trace}"
            try:
                engine = self._engine(known, fusion=fusion, trace=trace)
            except Exception as error:
                refused.append(told | {"message": _message(error)})
                continue
            contenders[label] = Contender(label, told, _decoding(engine))
        base = "/".join(FUSIONS[0])
        timings = self._timed(contenders, base, refused, passes=STEPS[self.kind], everyone=True)
        return {"base": base, "calls": 1, "contenders": _rows(contenders, timings)}

    def _tiles(self, cell: Cell, refused: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
        """A wholly fused step with every tile of one of its kernels, the others as chosen so far."""
        chosen, kernel = self.tuned(known), cell.op.removeprefix("step.")
        contenders = {}
        if chosen.fusion != "full":
            refused.append({"settings": {}, "message": "no step of this machine is wholly fused"})
            return {"base": RULE, "calls": 1, "contenders": []}
        for settings in ({}, *TILES[kernel]):
            told = dataclasses.replace(chosen, folded={**chosen.folded, kernel: settings})
            label = _label(kernel, settings) if settings else RULE
            try:
                engine = self._engine(known, told=told, fusion="full", trace=chosen.trace or "step")
            except Exception as error:
                refused.append({"settings": dict(settings), "message": _message(error)})
                continue
            contenders[label] = Contender(label, {"settings": dict(settings)}, _decoding(engine))
        timings = self._timed(contenders, RULE, refused, passes=STEPS[self.kind])
        return {"base": RULE, "calls": 1, "contenders": _rows(contenders, timings)}

    def _costs(self, refused: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
        drafting = SpeculativeConfig(drafter="ngram", depth=DECODE_ROWS - 1)
        contenders: dict[str, Contender] = {}

        def add(label: str, work: Work) -> None:
            contenders[label] = Contender(label, {"what": label}, work)

        try:
            engine, how = self._plain(known)
            replay, states = (
                self._engine(known, dataclasses.replace(drafting, rollback=way), **how) for way in ("replay", "states")
            )
        except Exception as error:
            refused.append({"what": COSTS, "message": _message(error)})
            return {"base": "plain", "calls": 1, "contenders": []}
        add("plain", _decoding(engine, PLAIN))
        for rows in range(2, DECODE_ROWS + 1):
            add(f"rows {rows}", _verifying(replay, rows, rows))
        add("replay", _verifying(replay, TAKEN_BACK, 1))
        add("states", _verifying(states, TAKEN_BACK, TAKEN_BACK))
        timings = self._timed(contenders, "plain", refused, passes=STEPS[self.kind] // 2, everyone=True)
        return {"base": "plain", "calls": 1, "contenders": _rows(contenders, timings)}

    def _plain(self, known: Mapping[str, Any]) -> tuple[Engine, dict[str, Any]]:
        """An engine that decodes as chosen so far, and the fusion and trace of one that verifies drafts."""
        chosen = self.tuned(known)
        how: dict[str, Any] = {"fusion": chosen.fusion or FUSIONS[0][0], "trace": chosen.trace or FUSIONS[0][1]}
        engine = self._engine(known, **how)
        return engine, how

    def _drafts(self, refused: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
        """Steps with 1, 2, … drafts, all kept, beside plain ones: priming, the way to the host and all."""
        most = DECODE_ROWS - 1
        wanted = {"ngram": SpeculativeConfig("ngram", most, force="1", rollback="replay")}
        if self.weights.mtp is not None:
            wanted["mtp"] = dataclasses.replace(wanted["ngram"], drafter="mtp")
            if self.config.vocab_size > TRIMMED:
                wanted[f"mtp/{TRIMMED}"] = dataclasses.replace(wanted["mtp"], draft_vocab=TRIMMED)
        contenders: dict[str, Contender] = {}
        try:
            engine, how = self._plain(known)
            contenders["plain"] = Contender("plain", {"what": "plain"}, _decoding(engine, PLAIN))
            for name, drafting in wanted.items():
                engine = self._engine(known, drafting, **how)
                for depth in DEPTHS:
                    label = _drafts_label(name, depth)
                    contenders[label] = Contender(label, {"what": label}, _drafting(engine, depth))
        except Exception as error:
            refused.append({"what": DRAFTS, "message": _message(error)})
        timings = self._timed(contenders, "plain", refused, passes=STEPS[self.kind], everyone=True)
        return {"base": "plain", "calls": 1, "contenders": _rows(contenders, timings)}

    # -- what was decided ------------------------------------------------------------------

    def tuned(self, known: Mapping[str, Mapping[str, Any]]) -> Tuned:
        """The choices so far, as the engine would read them."""
        choices, step, notes = files.unpack(self.entry(known))
        return Tuned(choices, **step, notes=tuple(notes))

    def entry(self, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What the tuned file says of this geometry: choices, step and costs, refusals, and what was not measured."""
        rows = [(cell, known[key]) for cell in self.cells if (key := self.key(cell)) in known]
        choices, step, folded, rounds = [], {}, {}, {}
        for cell, row in rows:
            if cell.op == COSTS:
                step |= {"costs": made} if (made := _costs_of(row)) else {}
            elif cell.op == DRAFTS:
                rounds = _rounds_of(row)
            elif row["contenders"]:
                made = self._choice(cell, row)
                if cell.op == STEP:
                    step |= made
                elif cell.op in FOLDED:
                    folded[cell.op.removeprefix("step.")] = made
                elif made:
                    choices.append(made)
        if "costs" in step:
            step["costs"] |= {"draft": _drafts_of(rounds, step["costs"]["rows"])}
        if tiles := {kernel: made["settings"] for kernel, made in folded.items() if made["settings"]}:
            step |= {"folded": tiles}
        if folded:
            step |= {"folded_us": {kernel: made["us_of"] for kernel, made in folded.items()}}
        left = [cell.text for cell in self.cells if self.key(cell) not in known]
        refused = _once(
            {"op": cell.op, "rows": cell.rows, "context": cell.context} | r
            for cell, row in rows
            for r in row["refused"]
        )
        return {
            "name": self.name,
            "layers": self.config.num_hidden_layers,
            "mlx": files.mlx_version(),
            "dtype": str(self.dtype).rpartition(".")[2],
            "versions": self.versions,
            "identities": files.identities(),
            "step": step,
            "choices": choices,
            "refused": refused,
            "not_measured": left,
        }

    def _choice(self, cell: Cell, row: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a comparison, with the times that speak for it; empty if there is no candidate."""
        told = {c["label"]: c for c in row["contenders"]}
        timings = {label: _timing(c) for label, c in told.items() if not c["why_not"]}
        if not timings:
            return {}
        label = winner(timings, row["base"], self._preferred(cell, list(told.values())))
        scale = 1e-3 / row["calls"]
        base = timings.get(row["base"])
        made = {
            "us": round(timings[label].median * scale, 2),
            "spread": round(timings[label].spread, 4),
            "base": row["base"],
            "base_us": None if base is None else round(base.median * scale, 2),
        }
        if cell.op == STEP:
            return {name: told[label][name] for name in ("fusion", "trace")} | made | {"us_of": _all(timings, scale)}
        if cell.op in FOLDED:
            return {"settings": told[label]["settings"], "us_of": _all(timings, scale)}
        measured: dict[str, dict[str, Any]] = {}
        for name, timing in sorted(timings.items(), key=lambda item: item[1].median):
            values = {"settings": told[name]["settings"], "us": round(timing.median * scale, 2)}
            measured.setdefault(told[name]["variant"], values)
        where = {"op": cell.op, "phase": cell.phase, "rows": cell.rows, "context": cell.context}
        chosen = {name: told[label][name] for name in ("variant", "settings")}
        return where | chosen | made | {"measured": measured}

    def _preferred(self, cell: Cell, told: Iterable[Mapping[str, Any]]) -> list[str]:
        """Labels, preferred first: as declared for the device, the reference last, a variant's own rule first."""
        if cell.op in WHOLE:
            return [c["label"] for c in told]
        op = OPS[cell.op]
        order = [*op.order[self.kind, cell.phase], *op.variants]  # pyright: ignore[reportArgumentType]

        def rank(c: Mapping[str, Any]) -> tuple[bool, int, bool]:
            return c["variant"] == "reference", order.index(c["variant"]), bool(c["settings"])

        return [c["label"] for c in sorted(told, key=rank)]

    def write(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the tuned file; entries of other geometries stay."""
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            kept = told["models"] if told["format"] == files.FORMAT else {}
        except (OSError, ValueError, KeyError, TypeError):
            kept = {}
        entry = self.entry(known)
        if not entry["choices"] and not entry["step"]:
            return
        whole = {"format": files.FORMAT, "chip": files.chip(), "kind": self.kind, "models": {**kept}}
        whole["models"][self.geometry] = entry
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, _pretty(whole))


# -- small things ------------------------------------------------------------------------------------


def _decoding(engine: Engine, each: int = 1) -> Work:
    """So many times `each` plain steps from the same place."""
    mark = engine.snapshot()

    def work(passes: int) -> None:
        engine.restore(mark)
        engine.decode(5, passes * each)

    return work


def _verifying(engine: Engine, rows: int, kept: int) -> Work:
    """So many verifications of `rows` rows, of which `kept` stay; each is read back, as drafting needs it."""
    assert engine.speculator is not None
    mark, verifier = engine.snapshot(), engine.speculator.verifier
    tokens = [5 + i for i in range(rows)]

    def work(passes: int) -> None:
        engine.restore(mark)
        for _ in range(passes):
            verified = verifier.run(tokens, False)
            verified.choices()
            verifier.keep(verified, kept)
        mx.eval(engine.cache.arrays())

    return work


def _drafting(engine: Engine, depth: int) -> Work:
    """So many steps with `depth` drafts that are all kept."""
    mark, speculator = engine.snapshot(), engine.speculator
    assert speculator is not None

    def work(passes: int) -> None:
        engine.restore(mark)
        speculator.depth = depth
        engine.decode(5, passes * (depth + 1))

    return work


def _drafting_code() -> str:
    """What the costs of drafts depend on beside the step: the text of the drafting loop."""
    return hashlib.sha256(inspect.getsource(speculative).encode()).hexdigest()[:16]


def _drafts_label(drafter: str, depth: int) -> str:
    return f"{drafter} {depth}"


def _in_steps(row: Mapping[str, Any]) -> dict[str, float]:
    """Contenders' times over a plain step's: the median over rounds, in each of which all were timed."""
    times = {c["label"]: _timing(c).deciding for c in row["contenders"]}
    plain = [ns / PLAIN for ns in times.get("plain", ())]
    return {
        label: statistics.median(one / step for one, step in zip(deciding, plain))
        for label, deciding in times.items()
        if plain
    }


def _rounds_of(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """Steps with 1, 2, … 7 drafts, all kept, by drafter (``mtp/N``: of a vocabulary of N), in passes of one row."""
    costs = _in_steps(row)
    made = {}
    for name in {label.rpartition(" ")[0] for label in costs} - {""}:
        known = {depth: costs[label] for depth in DEPTHS if (label := _drafts_label(name, depth)) in costs}
        if len(known) == len(DEPTHS):
            made[name] = np.interp(range(1, DECODE_ROWS), list(known), list(known.values())).tolist()
    return made


def _drafts_of(rounds: Mapping[str, Sequence[float]], rows: Sequence[float]) -> dict[str, list[float]]:
    """What 1, 2, … 7 drafts add to the pass of their rows: with it the whole costs what was measured."""
    return {
        name: [round(whole - alone, 4) for whole, alone in zip(wholes, rows[1:], strict=True)]
        for name, wholes in sorted(rounds.items())
    }


def _costs_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """`engine.depth.Costs` of a comparison, in passes of one row, with the plain step's µs; None if it failed."""
    costs = _in_steps(row)
    wanted = {"plain", "replay", "states", *(f"rows {n}" for n in range(2, DECODE_ROWS + 1))}
    if not costs.keys() >= wanted:
        return None
    (plain,) = (_timing(c).median / PLAIN for c in row["contenders"] if c["label"] == "plain")
    whole = costs[f"rows {TAKEN_BACK}"]
    return {
        "rows": [1.0, *(round(costs[f"rows {n}"], 3) for n in range(2, DECODE_ROWS + 1))],
        "replay": round(max(0.0, costs["replay"] - whole), 3),
        "states": round(max(0.0, costs["states"] - whole) / TAKEN_BACK, 3),
        "us": round(plain / 1e3, 1),
    }


def _arrays(value: Any) -> list[mx.array]:
    """Every array in arguments or results, however nested."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (tuple, list)):
        return [array for part in value for array in _arrays(part)]
    if dataclasses.is_dataclass(value):
        return [array for f in dataclasses.fields(value) for array in _arrays(getattr(value, f.name))]
    return []


def _comparable(result: Any) -> list[mx.array]:
    """Arrays to compare; of a routing the weights by size, since experts that tie may be exchanged."""
    if isinstance(result, Routing):
        return [mx.sort(result.weights.astype(mx.float32), axis=-1)]
    return _arrays(result)


def _label(variant: str, settings: Mapping[str, Any]) -> str:
    return " ".join([variant, *(f"{name}={value}" for name, value in settings.items())]).replace(", ", "x")


def _refusal(variant: str, settings: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    return {"variant": variant, "settings": dict(settings), "message": _message(error)}


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _once(refusals: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each refusal where it came up first."""
    made: dict[str, dict[str, Any]] = {}
    for told in refusals:
        made.setdefault(json.dumps({k: v for k, v in told.items() if k not in ("rows", "context")}), told)
    return list(made.values())


def _rows(contenders: Mapping[str, Contender], timings: Mapping[str, Timing]) -> list[dict[str, Any]]:
    return [
        {"label": label, **contenders[label].told, "why_not": contenders[label].why, **dataclasses.asdict(timing)}
        for label, timing in timings.items()
    ]


def _timing(row: Mapping[str, Any]) -> Timing:
    return Timing(row["first"], tuple(row["rounds"]), tuple(row["finals"]))


def _all(timings: Mapping[str, Timing], scale: float) -> dict[str, float]:
    return {label: round(timing.median * scale, 2) for label, timing in timings.items()}


def _line(cell: Cell, row: Mapping[str, Any]) -> str:
    """A comparison in one line, for the terminal."""
    ranked = sorted(row["contenders"], key=lambda c: _timing(c).median)[:3]
    told = (f"{c['label']} {_timing(c).median / 1e3 / row['calls']:.1f} µs" for c in ranked)
    return f"{cell.text}: {', '.join(told) or 'nothing ran'}" + (" (hot)" if row["hot"] else "")


def _pretty(whole: Mapping[str, Any]) -> str:
    """JSON with a line for each choice and each refusal."""
    lists: list[str] = []

    def held(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: held(part) for key, part in value.items()}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lists.append(",\n".join(f"        {json.dumps(part)}" for part in value))
            return f"\0{len(lists) - 1}"
        if isinstance(value, list):
            lists.append(json.dumps(value)[1:-1])
            return f"\0{len(lists) - 1}"
        return value

    text = json.dumps(held(dict(whole)), indent=2)
    for index, lines in enumerate(lists):
        body = f"[\n{lines}\n      ]" if "\n" in lines or lines.startswith("        ") else f"[{lines}]"
        text = text.replace(json.dumps(f"\0{index}"), body)
    return text + "\n"
