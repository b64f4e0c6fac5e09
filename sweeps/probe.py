"""A few seconds of each arm in a process of its own, so that a plan knows this machine: `python -m sweeps.probe JOB`.

It prints one JSON object, the form of `sweeps.forecast.Probe`. Its times only plan a run; they are no results: one
repetition after one warm-up, and none of them is kept as a row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sweeps import environment, lock
from sweeps.clock import SystemClock, Window, timed
from sweeps.forecast import Probe
from sweeps.points import Job
from sweeps.store import read_job, write_job
from sweeps.subjects.base import Prefilled, Subject, SubjectUnsupported

ROOT = Path(__file__).resolve().parent.parent
"""Folder that the child starts in, so that it finds this project whatever folder the command was given in."""

TIMEOUT_SECONDS = 300

CPU_LENGTHS, LENGTHS = (128, 512), (256, 2048)
"""Prompt lengths timed, where the job reaches them."""

DECODE_TOKENS = 8


def take(job: Job, folder: Path) -> Probe | None:
    """Probe the arms of `job` in a child process; None if that failed, and the plan goes by the geometry.

    Args:
        folder: where the job file for the child is put.

    Raises:
        DeviceBusy: another run is timing on this accelerator.
    """
    path = write_job(job, folder / "probe.json")
    clock = SystemClock()
    device = environment.accelerator_key()
    with lock.device_lock(environment.runtime_dir(), device, "probe", wait=bool(job.settings.get("wait"))):
        print("timing each arm for a moment, to plan by", file=sys.stderr)
        start = clock.now_ns()
        try:
            child = [sys.executable, "-m", "sweeps.probe", str(path)]
            done = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        spent = (clock.now_ns() - start) / 1e9
    if done.returncode:
        return None
    values = json.loads(done.stdout.splitlines()[-1])
    values["start_seconds"] = spent - values.pop("timed_seconds")
    return Probe.from_dict(values)


def measure(job: Job) -> dict[str, Any]:
    """Time every distinct arm of `job`; arms of one configuration share their times."""
    from sweeps import subjects

    clock = SystemClock()
    made: dict[str, Any] = {"prefill": {}, "decode": {}}
    by_hash: dict[str, str] = {}
    spent = 0
    shared = subjects.share(job)
    for arm in job.arms:
        if arm.subject not in ("engine", "mlx_lm", "stub"):
            continue
        if arm.hash in by_hash:
            for table in made.values():
                table[arm.name] = table[by_hash[arm.hash]]
            continue
        try:
            subject = subjects.make(arm, job, shared)
        except SubjectUnsupported:
            continue
        started = clock.now_ns()
        made["prefill"][arm.name], made["decode"][arm.name] = _times(subject, job)
        spent += clock.now_ns() - started
        by_hash[arm.hash] = arm.name
        subject.close()
    made["timed_seconds"] = spent / 1e9
    return made


def _times(subject: Subject, job: Job) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    clock = SystemClock()
    vocabulary = min(256, int(job.model["config"]["vocab_size"]))
    longest = max(point.frontier for point in job.points)
    prefill, decode = [], []
    lengths = CPU_LENGTHS if environment.accelerator_key() == "cpu" else LENGTHS
    for length in sorted({min(length, longest) for length in lengths}):
        tokens = [(i * 2_654_435_761 % 2**32) % vocabulary for i in range(length)]
        # The first of each warms up; both leave the device drained.
        _prefill(subject, tokens)
        window = _prefill(subject, tokens)
        subject.decode(window.value.next_token, DECODE_TOKENS)
        step = timed(clock, partial(subject.decode, window.value.next_token, DECODE_TOKENS))
        prefill.append((length, window.elapsed_ns / 1e9))
        decode.append((length, step.elapsed_ns / 1e9 / DECODE_TOKENS))
    return prefill, decode


def _prefill(subject: Subject, tokens: list[int]) -> Window[Prefilled]:
    subject.reset()
    return timed(SystemClock(), partial(subject.prefill, tokens))


def main(argv: list[str]) -> int:
    """Entry of the child process."""
    print(json.dumps(measure(read_job(argv[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
