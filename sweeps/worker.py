"""The worker process of one session: `python -m sweeps.worker JOB.json --session S`.

It builds the arms, writes the row of this process, and measures. Progress and time left go to stderr. Exit codes:
0 all windows went well, 1 some did not (the rows say which), 2 the job cannot be built, 70 the device refuses this
process, 130 stopped by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import engine  # noqa: F401  (chooses the BLAS before MLX loads)
from engine.config import ModelConfig
from sweeps import ceilings, energy, environment, sentinel, subjects
from sweeps.clock import Clock, SystemClock
from sweeps.guard import PointGuard
from sweeps.points import APART, Arm, Job, Point, sample_row
from sweeps.prompts import Encoder, Prompts, WordEncoder, digest
from sweeps.rows import RunRow, SampleRow, Status
from sweeps.schedule import Cell
from sweeps.session import Session
from sweeps.store import Store, read_job
from sweeps.subjects.base import Subject, SubjectOutOfMemory, SubjectUnsupported
from sweeps.window import DeviceLost, LaunchCounter, MlxDevice, NoDevice, Tools, one_line

DEVICE_LOST = 70
"""Exit code of a worker whose device takes no more work; a new process may go on."""

STOPPED = 130
"""Exit code of a worker that was stopped by hand."""

WATCH_SECONDS = 0.5
"""How often a worker looks whether the process that started it still lives."""

PROGRESS_SECONDS = 5.0
"""Least time between two lines of progress where stderr is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one session; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.worker", description="One session of a sweep.")
    parser.add_argument("job", type=Path)
    parser.add_argument("--session", type=int, required=True)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds this session may take")
    parser.add_argument("--attempt", default="", help="names the invocation of the sweep")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_parent()
    try:
        return work(read_job(given.job), given.session, given.budget, given.attempt)
    except KeyboardInterrupt:
        return STOPPED
    except DeviceLost as error:
        print(f"session {given.session}: the device takes no more work: {error}", file=sys.stderr)
        return DEVICE_LOST
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def end_with_parent() -> None:
    """End this process soon after the one that started it: a sweep that is killed drops the device's lock with it.

    Rows are appended whole, so nothing but the window in flight is lost.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            SystemClock().sleep(WATCH_SECONDS)
        os._exit(STOPPED)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def work(job: Job, session: int, budget_seconds: float, attempt: str) -> int:
    """Build the arms of `job` and measure session `session`; 0, or 1 if a window failed.

    Raises:
        ValueError: the job cannot be built, in one line.
        DeviceLost: the rest needs a new process.
    """
    clock = SystemClock()
    start = clock.now_ns()
    store = Store(job.run_dir)
    shared = subjects.share(job)
    made, absent = build(job, shared)
    prompts = _prompts(job, shared)
    row = _run_row(job, session, shared, made, prompts)
    if shared is not None:
        row.machine |= ceilings.measure(str(row.machine.get("device_kind")), clock)
        if job.model.get("kind") == "synthetic" and any(arm.subject == "engine" for arm in job.arms):
            row.model |= _routed(shared, prompts)
    store.append(row)
    for torn in store.read().torn:
        print(f"{torn}: the last line was cut off; it is set aside and its window runs again", file=sys.stderr)
    failed = _absent(store, job, session, absent)
    failed |= _apart(store, job, session, prompts, _encoder(shared), clock, budget_seconds)

    progress = Progress(job, session, clock)
    tools = Tools(
        store=store,
        prompts=prompts,
        clock=clock,
        sentinel=_sentinel(job, clock, row.machine),
        device=NoDevice() if shared is None else MlxDevice(),
        conditions=environment.conditions,
        guard=None if shared is None else PointGuard(without(job, absent), shared, prompts),
        least=_least(job, shared),
        launches=_launches(shared),
        report=progress.line,
        in_flight=in_flight_file(job, session),
        energy=energy.meter(str(row.machine.get("device_kind"))),
    )
    tools.sentinel.warm_up()
    left = budget_seconds - (clock.now_ns() - start) / 1e9
    measured = Session(job, session, made, tools, left, attempt)
    progress.left = measured.left
    failed |= not measured.run()
    return int(failed)


def build(job: Job, shared: Any) -> tuple[dict[str, Subject], dict[str, tuple[Status, str]]]:
    """Subjects by arm name, and for each arm that cannot be built its status and reason."""
    made: dict[str, Subject] = {}
    absent: dict[str, tuple[Status, str]] = {}
    for arm in job.arms:
        if arm.subject in APART:
            continue
        try:
            made[arm.name] = subjects.make(arm, job, shared)
        except SubjectUnsupported as error:
            absent[arm.name] = ("skipped", one_line(error))
        except SubjectOutOfMemory as error:
            absent[arm.name] = ("oom", one_line(error))
    return made, absent


def without(job: Job, absent: Iterable[str]) -> Job:
    """The job less arms that cannot be built, by which the others are guarded: one that fails there blocks all."""
    gone = set(absent)
    arms = [arm for arm in job.arms if arm.name not in gone]
    contrasts = [one for one in job.contrasts if not gone & {one.arm, one.reference}]
    return dataclasses.replace(job, arms=arms, contrasts=contrasts)


class Progress:
    """Lines on stderr: what was done last, time spent, time left. On a terminal one line is rewritten."""

    def __init__(self, job: Job, session: int, clock: Clock) -> None:
        self.left: Callable[[], float] = lambda: 1.0
        self._head = f"session {session + 1}/{job.sessions}"
        self._clock = clock
        self._start = self._shown = clock.now_ns()
        self._terminal = sys.stderr.isatty()

    def line(self, text: str) -> None:
        """Show `text`, if enough time has passed since the last line."""
        now = self._clock.now_ns()
        if (now - self._shown) / 1e9 < (0.2 if self._terminal else PROGRESS_SECONDS):
            return
        self._shown = now
        spent = (now - self._start) / 1e9
        share = 1 - self.left()
        rest = f", about {_minutes(spent / share - spent)} left" if share > 0.02 else ""
        begin, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{begin}{self._head} · {text} · {_minutes(spent)} spent{rest}", end=end, file=sys.stderr, flush=True)


def in_flight_path(job: Job, session: int) -> Path:
    """File that names the window in flight, for whoever finds the process dead."""
    return Path(job.run_dir) / f"in_flight-{session}.json"


def in_flight_file(job: Job, session: int) -> Callable[[Cell | None], None]:
    """Keeps `in_flight_path` up to date; removed between windows."""
    path = in_flight_path(job, session)

    def tell(cell: Cell | None) -> None:
        if cell is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(json.dumps(dataclasses.asdict(cell)), encoding="utf-8")

    return tell


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _prompts(job: Job, shared: Any) -> Prompts:
    kind, seed = job.prompt.get("kind", "text"), int(job.prompt.get("seed", job.seed))
    if shared is None:
        vocabulary = min([int(arm.options.get("vocab", 256)) for arm in job.arms if arm.subject == "stub"], default=256)
        return Prompts(WordEncoder(vocabulary), seed, kind)
    return Prompts(_encoder(shared), seed, kind, shared.config.vocab_size)


def _encoder(shared: Any) -> Encoder:
    """The model's tokenizer, or what stands in for it."""
    if shared is None:
        return WordEncoder(256)
    return shared.tokenizer or WordEncoder(shared.real_vocab or shared.config.vocab_size)


def _run_row(job: Job, session: int, shared: Any, made: Mapping[str, Subject], prompts: Prompts) -> RunRow:
    machine = environment.machine()
    if shared is not None and machine.get("device_kind") == "metal":
        from sweeps.subjects.mlx_lm import set_wired_limit

        machine["mlx_wired_limit"] = set_wired_limit()
    arms = {name: subject.describe() for name, subject in made.items()}
    model = {key: value for key, value in job.model.items() if not isinstance(value, (dict, list))}
    return RunRow(
        run_id=job.run_id,
        session=session,
        started=datetime.datetime.now(datetime.UTC).isoformat(),
        argv=job.argv,
        config=job.config,
        config_hash=job.config_hash,
        git=environment.git_state(),
        machine=machine,
        conditions=environment.conditions(),
        model=model | (shared.facts() if shared is not None else {}) | {"arms": arms},
        prompt=job.prompt | {"hash": digest(prompts.take(256, 0))},
        project_version=_version(),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("lilybench")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sentinel(job: Job, clock: Clock, machine: Mapping[str, Any]) -> sentinel.Sentinel:
    kind = str(machine.get("device_kind"))
    accelerator = kind in ("metal", "cuda") and any(arm.subject != "stub" for arm in job.arms)
    kernel = sentinel.device_kernel(kind) if accelerator else sentinel.cpu_kernel()
    # A twentieth of a session's budget is the most that one block may spend on waiting.
    most = job.budget_seconds / max(job.sessions, 1) / 20 if job.budget_seconds > 0 else sentinel.LONG_WAIT_SECONDS
    return sentinel.Sentinel(kernel, clock, may_wait=accelerator, most_wait=most)


def _routed(shared: Any, prompts: Prompts) -> dict[str, Any]:
    """How evenly random weights route, on an engine of its own."""
    from engine.generate import Engine
    from sweeps import routed

    own = Engine(shared.config, shared.weights, vocabulary=shared.real_vocab, dtype=shared.dtype)
    return routed.busiest(own, prompts.take(routed.TOKENS, 0))


def _least(job: Job, shared: Any) -> Callable[[Point], tuple[int | None, int | None]]:
    """Bytes and operations that a window must at least move and do, from the geometry."""
    if shared is None:
        return lambda point: (None, None)
    from sweeps.least import least_work

    config: ModelConfig = shared.config
    itemsize = shared.dtype.size
    weights = job.model.get("weights_bytes")

    def least(point: Point) -> tuple[int | None, int | None]:
        return least_work(config, point.phase, point.frontier, point.decode_tokens, itemsize, weights)

    return least


def _launches(shared: Any) -> LaunchCounter | None:
    """Counts launches where MLX runs, and what drafting touches."""
    if shared is None:
        return None
    from sweeps import drafted, launches

    def counted(subject: Subject, frontiers: Sequence[int], prompt: Callable[[int], Sequence[int]]) -> dict[int, Any]:
        touched = drafted.of_subject(subject, frontiers, prompt)
        facts = launches.of_subject(subject, frontiers, prompt)
        return {at: facts[at] | touched.get(at, {}) for at in frontiers}

    return counted


def _absent(store: Store, job: Job, session: int, absent: Mapping[str, tuple[Status, str]]) -> bool:
    """A row a point for each arm that could not be built; True if that is a failure."""
    known = {(row.point, row.arm) for row in store.read().samples if row.session == session}
    for arm in job.arms:
        status, reason = absent.get(arm.name, ("ok", ""))
        for point in job.points:
            if arm.name in absent and (point.key, arm.name) not in known:
                store.append(sample_row(job, session, point, arm, status, reason=point.skip.get(arm.name, reason)))
    return any(status == "oom" for status, _ in absent.values())


def _apart(
    store: Store, job: Job, session: int, prompts: Prompts, encoder: Encoder, clock: Clock, budget_seconds: float
) -> bool:
    """Rows of arms that are measured apart, at points that have none yet; True if one failed."""
    failed = False
    for arm in job.arms:
        if arm.subject not in APART:
            continue
        done = {row.point for row in store.read().samples if (row.arm, row.session) == (arm.name, session)}
        for point in job.points:
            if arm.name in point.skip and point.key not in done:
                store.append(sample_row(job, session, point, arm, "skipped", reason=point.skip.get(arm.name, "")))
        todo = [point for point in job.points if point.key not in done and arm.name not in point.skip]
        for row in _measured(arm, job, session, todo, prompts, encoder, clock, budget_seconds) if todo else ():
            store.append(row)
            failed |= row.status not in ("ok", "skipped")
    return failed


def _measured(
    arm: Arm,
    job: Job,
    session: int,
    points: list[Point],
    prompts: Prompts,
    encoder: Encoder,
    clock: Clock,
    budget_seconds: float,
) -> Iterable[SampleRow]:
    if arm.subject == "llama_bench":
        from sweeps.subjects import llama_bench

        return llama_bench.measure(arm, job, session, points)
    from sweeps.subjects import openai

    return openai.measure(arm, job, session, points, prompts, encoder, clock, budget_seconds * openai.BUDGET_SHARE)


if __name__ == "__main__":
    sys.exit(main())
