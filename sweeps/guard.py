"""Drives the quality guard: no speed is believed of an arm that computes something else.

Which guard runs depends on the weights (the mathematics of both is in `ablations.guard`):

* **trained**: arm against reference arm, teacher-forced over real text, through the path that is timed. Decode arms
  go a row at a time, prefill arms in their timed chunks, from a short context and, where the device allows, from 8K.
* **random**: logits mean nothing there, so every layer of the arm's engine is given MLX-LM's own inputs, and end to
  end its error against a float32 pass may be 1.25 times MLX-LM's.

MLX-LM itself is held against the oracle first (`sweeps.baseline.gate`).

The guard builds subjects of its own on the shared weights: what the session is measuring keeps its cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ablations.guard import Check, EndToEnd, LogitGuard, SyntheticThresholds, Thresholds, synthetic_check
from sweeps.points import Arm, Job, Point
from sweeps.subjects.base import Subject

if TYPE_CHECKING:
    from engine.generate import Engine
    from engine.ops.bind import BoundOp
    from sweeps.layers import Recording
    from sweeps.prompts import Prompts
    from sweeps.subjects.shared import Shared

Phase = Literal["prefill", "decode"]

ROWS = 32
"""Decoded rows compared at a time: full-vocabulary logits of more would be large."""

LONG = 8192
"""The longer of the two contexts, in tokens."""

ATTENTION_ROWS = 256
"""Rows of a chunk whose attention is held against the reference, which keeps every score of them."""


@dataclass(frozen=True)
class Scope:
    """How much the guard compares.

    positions: teacher-forced positions at each context. contexts: tokens cached before them (decode), or before the
    first compared chunk (prefill). rows, steps: rows of a layerwise comparison by prefill and by decode.
    """

    positions: int = 2048
    contexts: tuple[int, ...] = (256, LONG)
    rows: int = 256
    steps: int = 8

    @classmethod
    def on(cls, device: str, limit: int) -> Scope:
        """The scope for ``"metal"``, ``"cuda"`` or ``"cpu"`` and a model with `limit` positions.

        A CPU is slow by a factor of a thousand: 256 positions at the short context, stated in the figures.
        """
        if device == "cpu":
            return cls(positions=256, contexts=(min(256, limit // 4),), rows=32, steps=4)
        made = cls()
        fitting = tuple(c for c in made.contexts if c + made.positions < limit)
        return made if fitting == made.contexts else replace(made, contexts=fitting or (limit // 4,))


# -- trained weights ------------------------------------------------------------------------------


def compare_logits(
    arm: Subject,
    reference: Subject,
    tokens: Sequence[int],
    phase: Phase,
    *,
    contexts: Sequence[int],
    positions: int,
    chunk: int,
    thresholds: Thresholds | None = None,
) -> Check:
    """Teacher-forced logits of `arm` against those of `reference` on the same weights and text.

    Both subjects are reset. The reference runs twice, the second time by its other path, as a measure of
    what rounding alone does.

    Args:
        tokens: at least ``max(contexts) + positions + 1`` ids of real text.
        contexts: tokens cached before the compared positions. chunk: the timed prefill chunk of the arm.

    Returns:
        The check; its figures hold `contexts` and what the arm executed too.

    Raises:
        ValueError: too few tokens.
    """
    need = max(contexts) + positions + 1
    if len(tokens) < need:
        raise ValueError(f"the guard needs {need} tokens of text, {len(tokens)} were given")
    limits = thresholds or Thresholds()
    guard = LogitGuard(limits)
    executed: list[list[str]] = []
    for context in contexts:
        _start(arm, tokens[:context])
        arm.reset_executed()
        _start(reference, tokens[:context])
        at = context
        for piece in _pieces(tokens[context : context + positions], phase, chunk):
            mine = _host(arm.logits(piece, phase))
            theirs, again = _twice(reference, piece, phase)
            targets = tokens[at + 1 : at + 1 + len(piece)]
            theirs, mine, again = _same_width(theirs, mine, again)
            guard.update(theirs, mine, targets, again)
            at += len(piece)
        executed += [line for line in paths(arm.executed()) if line not in executed]
    check = guard.result()
    executed.sort()
    if phase == "decode" and (engine := getattr(arm, "engine", None)) is not None:
        executed = elsewhere(engine, executed)
    extra = {"phase": phase, "contexts": list(contexts), "executed": executed}
    return replace(check, figures=check.figures | extra)


def _start(subject: Subject, tokens: Sequence[int]) -> None:
    subject.reset()
    if tokens:
        subject.prefill(tokens, last=False)


def _pieces(tokens: Sequence[int], phase: Phase, chunk: int) -> Iterator[list[int]]:
    size = chunk if phase == "prefill" else ROWS
    for start in range(0, len(tokens), size):
        yield list(tokens[start : start + size])


def _twice(subject: Subject, piece: Sequence[int], phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """The reference's logits by `phase`, and once more with other rounding: in one pass, or in two halves."""
    mark = subject.snapshot()
    if phase == "decode":
        again = _host(subject.logits(piece, "prefill"))
    else:
        half = (len(piece) + 1) // 2
        parts = [_host(subject.logits(part, "prefill")) for part in (piece[:half], piece[half:]) if part]
        again = np.concatenate(parts)
    subject.restore(mark)
    return _host(subject.logits(piece, phase)), again


def _host(logits: Any) -> np.ndarray:
    return np.array(logits, dtype=np.float32)


def _same_width(*logits: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cut to the narrowest: MLX-LM also scores the padded tail of the vocabulary."""
    width = min(x.shape[1] for x in logits)
    return tuple(x[:, :width] for x in logits)


# -- random weights -------------------------------------------------------------------------------


def layerwise(engine: Engine, recording: Recording, limits: SyntheticThresholds | None = None) -> Check:
    """Every layer of `engine` on the hidden rows and caches of MLX-LM.

    Args:
        recording: of MLX-LM's passes; one serves any number of engines. If it has an oracle, end-to-end errors are
            compared too (`engine` is reset).
        limits: default by the engine's activation type.
    """
    from sweeps.layers import compare

    name = str(engine.dtype).removeprefix("mlx.core.")
    limits = limits or SyntheticThresholds.for_dtype(name)
    engine.reset_executed()
    made = compare(engine, recording, limits=limits)
    executed = paths(engine.executed())
    if recording.context:
        executed = elsewhere(engine, executed)
    ends = _end_to_end(engine, recording) if recording.oracle is not None else None
    check = synthetic_check(made.pairs, made.routed, ends, limits)
    return _with(judged(check, made), executed=executed)


def judged(check: Check, made: Any) -> Check:
    """`check` with the faults and figures of a layer comparison that its pairs could not carry."""
    figures = check.figures | {
        "rows": made.rows,
        "tied_rows": made.ties,
        "distinct_experts": made.distinct,
        **{f"worst_{k}": v for k, v in made.worst.items()},
    }
    if not made.faults:
        return replace(check, figures=figures)
    reasons = ([] if check.passed else [check.reason]) + made.faults[:2]
    return Check(check.name, False, "; ".join(reasons), figures)


def _with(check: Check, **figures: Any) -> Check:
    return replace(check, figures=check.figures | figures)


def _end_to_end(engine: Engine, recording: Recording) -> EndToEnd:
    """Logits of the compared rows by the float32 oracle, by the engine's own path and by MLX-LM."""
    tokens, context = recording.tokens, recording.context
    engine.reset()
    if context:
        engine.prefill(tokens[:context], last=False)
    mine = _host(engine.logits(tokens[context:], "decode" if context else "prefill"))
    engine.reset()
    return EndToEnd(*_same_width(recording.exact, mine, recording.baseline))


# -- paths ----------------------------------------------------------------------------------------


def paths(executed: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """``[[op, variant, tile], …]`` of executed lines, sorted, counts left out."""
    return [list(line) for line in sorted({(str(e["op"]), str(e["variant"]), str(e.get("tile"))) for e in executed})]


def elsewhere(engine: Engine, executed: list[list[str]]) -> list[list[str]]:
    """`executed`, and the variants that tuning chose for a decode step at other contexts.

    Those are held against the reference of their op, over at most `LONG` positions; one that is off is left out, so
    that a window which runs it is refused.
    """
    from engine.ops.selftest import case_error

    made, dtype = [tuple(line) for line in executed], str(engine.dtype).rpartition(".")[2]
    for bound in engine.ops.all():
        for choice, tile in bound.by_context(1):
            line = (bound.op.name, choice.variant, tile)
            if line in made or bound.op.name not in {op for op, _, _ in made}:
                continue
            cases = bound.op.timing(engine.config, 1, min(choice.context or LONG, LONG))
            variant = bound.op.variants[choice.variant]
            try:
                errors = [case_error(bound.op, variant, case, engine.dtype, **choice.settings) for case in cases]
            except Exception:  # not vouched for; what the arm's other contexts run may well be right
                continue
            if cases and max(errors) <= bound.op.tolerance[dtype]:
                made.append(line)
    return [list(line) for line in sorted(made)]


def longer(engine: Engine, executed: list[list[str]], lengths: Iterable[int]) -> list[list[str]]:
    """`executed` of a prefill, and what prefills of other `lengths` run: other tiles, other attention far out.

    As in `elsewhere` each is held against the reference of its op, at the rows of the chunk that runs it, over at most
    `LONG` positions before it; one that is off, or that fails, is left out. `lengths` in tokens.
    """
    made, chunk = [(str(op), str(variant), str(tile)) for op, variant, tile in executed], engine.engine.prefill.chunk
    compared = {op for op, _, _ in made} - {"head"}
    for rows, end in sorted({shape for length in lengths for shape in _chunks(length, chunk)}):
        for bound in engine.ops.all():
            if bound.op.name in compared and not known(bound, rows, made):
                for case in bound.op.timing(engine.config, rows, min(end, LONG + rows)):
                    line = held(bound, case, engine.dtype, made)
                    made += [] if line is None else [line]
    return [list(line) for line in sorted(made)]


def _chunks(length: int, chunk: int) -> set[tuple[int, int]]:
    """(rows, positions that the last of them sees) of the first chunk of a prefill, its last and its last full one."""
    last = length % chunk or min(length, chunk)
    made = {(min(length, chunk), min(length, chunk)), (last, length)}
    return made | ({(chunk, length - last)} if length - last >= chunk else set())


def known(bound: BoundOp, rows: int, made: Sequence[tuple[str, str, str]]) -> bool:
    """Whether a call with `rows` rows is seen from the binding alone to run what is in `made`."""
    few = rows <= bound.decode_rows
    variant = bound.decode if few else bound.prefill
    if bound.tuned or bound.far or "tile" in variant.settings:
        return False
    return (bound.op.name, variant.name) in {line[:2] for line in made}


def held(bound: BoundOp, case: Any, dtype: Any, made: Sequence[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    """The line of what an op runs on a case, if it is new and agrees with the reference."""
    from engine.ops.bind import tile_of
    from engine.ops.selftest import comparable, relative_rms

    rows, name = case.sizes["rows"], bound.op.name
    try:
        arguments = bound.op.inputs(case, dtype, 0)
        variant, settings, _ = bound.pick(rows, arguments)
        line = (name, variant.name, tile_of(settings))
        if line in made:
            return None
        got = comparable(variant.run(*arguments, **settings))
        if name == "prefill_attention" and rows > ATTENTION_ROWS:
            # The reference keeps every score: of a long chunk the last rows, which see the most, are compared.
            arguments = (arguments[0][:, :, -ATTENTION_ROWS:], *arguments[1:])
            got = [each[:, :, -ATTENTION_ROWS:] for each in got]
        want = comparable(bound.op.reference.run(*arguments))
        worst = max(relative_rms(mine, theirs) for mine, theirs in zip(got, want, strict=True))
    except Exception:
        # What cannot be tried here is not vouched for, and a window that runs it is refused by name.
        return None
    return line if worst <= bound.op.tolerance[str(dtype).rpartition(".")[2]] else None


def same_path(
    check: Mapping[str, Any], executed: Iterable[Mapping[str, Any]], frontier: int | None = None
) -> str | None:
    """Why a guard's check does not speak for a timed window: an op that ran there by another variant, or by one that is
    wrong at its context; None if it does.

    Args:
        check: a row's ``check``. executed: the window's ``executed``. frontier: tokens cached before it, if it decodes.
    """
    guarded = check.get("figures", {}).get("executed")
    if not guarded:
        return None
    prefill = check["figures"].get("phase") == "prefill"
    seen, ran = _by_op(guarded), _by_op(paths(executed))
    for op, variant, tile, at, why in check["figures"].get("off", ()):
        if at == frontier and (variant, tile) in ran.get(op, ()):
            return f"{op} ran as {_words([(variant, tile)])} behind {at} tokens in the timed window: {why}"
    for op in sorted(set(seen) & set(ran)):
        # A timed prefill scores its last row only, the guard every row: the head may rightly be another variant. An
        # engine of other code, in another process, can be asked for its text alone, not for what other lengths run.
        if prefill and (op == "head" or ("lengths" not in check["figures"] and seen[op] & ran[op])):
            continue
        if other := ran[op] - seen[op]:
            return f"{op} ran as {_words(other)} in the timed window, the guard saw {_words(seen[op])}"
    return None


def _by_op(lines: Iterable[Sequence[str]]) -> dict[str, set[tuple[str, str]]]:
    made: dict[str, set[tuple[str, str]]] = {}
    for op, variant, tile in lines:
        made.setdefault(op, set()).add((variant, tile))
    return made


def _words(variants: Iterable[tuple[str, str]]) -> str:
    return ", ".join(sorted(name if tile in ("", "None") else f"{name} {tile}" for name, tile in variants))


# -- a point's guard ------------------------------------------------------------------------------


class PointGuard:
    """The guard of a session: called with a point, it gives a check for every arm by name.

    A check holds for an arm and a phase at all frontiers, so it is made once and then repeated: whole passes are
    compared at short contexts and 8K, and what a timed frontier runs beside that is held against its op's reference.
    Arms that time themselves elsewhere, and stubs, have none.

    Args:
        job: its contrasts say which arm is held against which. shared: the model, or None for a job without one.
        prompts: real text. scope: default by device.
    """

    def __init__(self, job: Job, shared: Shared | None, prompts: Prompts, scope: Scope | None = None):
        self.job, self.shared, self.prompts = job, shared, prompts
        self._scope = scope
        self._arms = {arm.name: arm for arm in job.arms}
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._oracle: Any = None
        self._recordings: dict[tuple[int, int, int], Recording] = {}
        self._reached: dict[tuple, tuple[list[list[str]], list[list[Any]]]] = {}

    @property
    def scope(self) -> Scope:
        """How much is compared."""
        if self._scope is None:
            from engine.device import device_kind

            assert self.shared is not None
            self._scope = Scope.on(device_kind(), self.shared.config.max_position_embeddings)
        return self._scope

    def __call__(self, point: Point) -> dict[str, dict[str, Any]]:
        """Checks by arm name for the arms that the point does not skip; drops its own caches before returning."""
        if self.shared is None:
            return {}
        made = {}
        try:
            for arm in self.job.arms:
                if arm.name in point.skip or arm.subject not in ("engine", "mlx_lm"):
                    continue
                check = self._of(arm, point.phase)
                if check:
                    made[arm.name] = check
        finally:
            self._drop()
        return made

    def _drop(self) -> None:
        """Give back what the arms of one call shared: no window is timed beside it."""
        import mlx.core as mx

        self._oracle = None
        if self._recordings:
            self._recordings = {}
            mx.clear_cache()

    def _of(self, arm: Arm, phase: Phase) -> dict[str, Any]:
        if arm.subject == "mlx_lm":
            return self._once(arm, "", phase="prefill", make=lambda: self._gate(arm))
        if arm.aa or "slowdown" in arm.options:
            original = self._original(arm)
            return self._of(original, phase) if original else {}
        if self.shared is not None and self.shared.synthetic:
            # Layers can be looked into in this process only.
            here = self._here(arm)
            return self._once(here, "", phase=phase, make=lambda: self._layers(here, phase)) if here else {}
        checks = []
        for contrast in self.job.contrasts:
            reference = self._arms.get(contrast.reference)
            if contrast.arm != arm.name or reference is None or reference.subject not in ("engine", "mlx_lm"):
                continue
            if reference.hash == arm.hash and reference.subject == arm.subject:
                continue  # an A/A arm is its reference
            checks.append(self._once(arm, reference.hash, phase, lambda r=reference: self._logits(arm, r, phase)))
        if not checks and arm.subject == "engine":
            # Held against nothing else here: against the reference ops then, or its speed would stand alone.
            checks.append(self._once(arm, "reference ops", phase, lambda: self._anchored(arm, phase)))
        failed = [check for check in checks if not check["passed"]]
        first = (failed or checks or [{}])[0]
        # The one that decides, and with it what else the arm was held against: a report shows all of them.
        others = [check for check in checks if check is not first]
        held = {check["figures"].get("reference") for check in checks}
        if first and arm.subject == "engine" and "mlx_lm" not in held and self._shows_mlx_lm():
            others.append(self._once(arm, "mlx_lm", phase, lambda: self._beside_mlx_lm(arm, phase)))
        return first | {"also": others} if others else first

    def _shows_mlx_lm(self) -> bool:
        """Whether arms are set beside MLX-LM where it is no arm of the job: on a CPU that takes too long."""
        from engine.device import device_kind

        return device_kind() != "cpu"

    def _beside_mlx_lm(self, arm: Arm, phase: Phase) -> Check:
        """The arm beside MLX-LM over a few positions: for the reader, it decides nothing and breaks nothing."""
        baseline = Arm("mlx_lm", "mlx_lm", hash="mlx_lm")
        scope = replace(self.scope, positions=Thresholds().min_positions, contexts=self.scope.contexts[:1])
        try:
            return self._logits(arm, baseline, phase, scope)
        except Exception as error:
            return Check("logits", False, f"not compared: {error}", {"reference": baseline.name})

    def _here(self, arm: Arm) -> Arm | None:
        """An arm that runs in this process and computes what `arm` does: one of another checkout has none, unless that
        holds this very code."""
        if "checkout" not in arm.options:
            return arm
        from sweeps.subjects import remote

        same = remote.code_hash(Path(arm.options["checkout"])) == remote.code_hash(remote.ROOT)
        return replace(arm, options={}) if same else None

    def _original(self, arm: Arm) -> Arm | None:
        """The arm that an A/A arm repeats or a slowed arm slows: a copy computes what its original does."""

        def code(one: Arm) -> tuple[Any, Any]:
            return one.config, one.options.get("checkout")

        firsts = [a for a in self.job.arms if not a.aa and "slowdown" not in a.options]
        return next((a for a in firsts if (a.hash == arm.hash if arm.aa else code(a) == code(arm))), None)

    def _anchored(self, arm: Arm, phase: Phase) -> Check:
        """The arm against the reference ops on the same weights and type, over a few positions (they are slow)."""
        from sweeps.baseline import reference_subject
        from sweeps.subjects import make

        assert self.shared is not None
        context, positions = self.scope.rows, max(self.scope.rows, Thresholds().min_positions)
        subjects: list[Subject] = []
        try:
            subjects = [make(arm, self.job, self.shared), reference_subject(self.shared)]
            check = compare_logits(
                subjects[0],
                subjects[1],
                self._text(context + positions + 1),
                phase,
                contexts=(context,),
                positions=positions,
                chunk=int(subjects[0].describe().get("chunk") or 2048),
            )
            check = self._at_all_lengths(check, arm, subjects[0], phase)
        finally:
            for subject in subjects:
                subject.close()
        return _with(check, reference="reference ops")

    def _once(self, arm: Arm, reference: str, phase: str, make: Any) -> dict[str, Any]:
        key = (arm.hash or arm.name, reference, phase)
        if key not in self._known:
            self._known[key] = make().to_dict()
        return self._known[key]

    def _gate(self, arm: Arm) -> Check:
        from sweeps.baseline import gate

        assert self.shared is not None
        rows = self.scope.rows
        return gate(self.shared, self._recording(rows, 0, rows))

    def _layers(self, arm: Arm, phase: Phase) -> Check:
        from sweeps.subjects import make

        assert self.shared is not None
        subject: Any = make(arm, self.job, self.shared)
        try:
            engine, chunk = subject.engine, subject.engine.engine.prefill.chunk
            rows, steps = self.scope.rows, self.scope.steps
            count, context = (rows, 0) if phase == "prefill" else (rows + steps, rows)
            check = layerwise(engine, self._recording(count, context, min(chunk, rows)))
            check = self._at_all_lengths(check, arm, subject, phase)
        finally:
            subject.close()
        return _with(check, phase=phase)

    def _at_all_lengths(self, check: Check, arm: Arm, subject: Subject, phase: Phase) -> Check:
        """`check` with what the timed lengths run beside what was compared, and what is wrong there.

        A subject of another process is not looked into: an engine of the same code stands for it, if there is one.
        """
        engine: Engine | None = getattr(subject, "engine", None)
        if not check.passed or (engine is None and "checkout" not in arm.options):
            return check
        if engine is None:
            from sweeps.subjects import make

            here = self._here(arm)
            if here is None:
                return check
            own = make(here, self.job, self.shared)
            try:
                return self._at_all_lengths(check, here, own, phase)
            finally:
                own.close()
        points = [point for point in self.job.points if point.phase == phase and arm.name not in point.skip]
        lengths, seen = sorted({point.frontier for point in points}), check.figures["executed"]
        key = (arm.hash or arm.name, phase, tuple(map(tuple, seen)))
        if key not in self._reached:
            self._reached[key] = self._reach(engine, phase, seen, points)
        seen, off = self._reached[key]
        return _with(check, executed=seen, lengths=lengths, **({"off": off} if off else {}))

    def _reach(
        self, engine: Engine, phase: Phase, seen: list[list[str]], points: Sequence[Point]
    ) -> tuple[list[list[str]], list[list[Any]]]:
        """What an engine runs at `points` that is right, with what it was `seen` to run, and what is wrong there."""
        if phase == "prefill":
            return longer(engine, seen, [point.frontier for point in points]), []
        from sweeps.reach import reached

        return reached(engine, seen, [(point.frontier, point.decode_tokens) for point in points])

    def _logits(self, arm: Arm, reference: Arm, phase: Phase, scope: Scope | None = None) -> Check:
        from sweeps.subjects import make

        assert self.shared is not None
        scope, subjects = scope or self.scope, []
        try:
            subjects = [make(one, self.job, self.shared) for one in (arm, reference)]
            chunk = int(subjects[0].describe().get("chunk") or 2048)
            contexts = scope.contexts if phase == "decode" else tuple(0 if c < LONG else c for c in scope.contexts)
            check = compare_logits(
                subjects[0],
                subjects[1],
                self._text(max(contexts) + scope.positions + 1),
                phase,
                contexts=contexts,
                positions=scope.positions,
                chunk=min(chunk, scope.positions),
            )
            check = self._at_all_lengths(check, arm, subjects[0], phase)
        finally:
            for subject in subjects:
                subject.close()
        return _with(check, reference=reference.name)

    def _text(self, count: int) -> list[int]:
        """Text with an opening that no timed trial has."""
        return self.prompts.take(count, trial=999_999_937)

    def _recording(self, count: int, context: int, chunk: int) -> Recording:
        """The passes over `count` tokens that all arms of this call share."""
        from sweeps.baseline import make_oracle
        from sweeps.layers import Recording

        assert self.shared is not None
        if self._oracle is None:
            self._oracle = make_oracle(self.shared)
        key = (count, context, chunk)
        if key not in self._recordings:
            self._recordings[key] = Recording(
                self.shared.lm_model, self._text(count), context=context, chunk=chunk, oracle=self._oracle
            )
        return self._recordings[key]
