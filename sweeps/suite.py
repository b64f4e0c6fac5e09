"""A suite: several jobs under one folder, in parts if need be, and one report of all of them.

The same command given again goes on: jobs that are done are not run again, one that was cut short continues, and when
all are done the next command starts a new folder. Several processes may share a folder, each with jobs of its own
(``jobs=``): a job keeps its number and folder whichever of them runs it, and the last to end reports on all.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sweeps import plan
from sweeps.clock import Clock
from sweeps.compose import LEAST_PART_SECONDS, Request, UsageError
from sweeps.rows import RowError
from sweeps.store import read_job, write_whole

ROOT = Path(__file__).resolve().parent.parent

_NOT_IDENTITY = ("part", "jobs", "dry_run", "wait", "probe", "fetch", "allow", "budget")


def folder(name: str, words: Sequence[Sequence[str]], launch: Path, given: Path | None) -> Path:
    """The folder of the suite: the one given, that of an unfinished run of the same words, or a new one."""
    same = [[w for w in job if w.split("=", 1)[0] not in _NOT_IDENTITY] for job in words]
    digest = hashlib.sha256(json.dumps([name, same]).encode()).hexdigest()[:6]
    if given is not None:
        return given
    runs = launch / "reports" / "runs"
    for path in sorted(runs.glob(f"*-suite-{name}-{digest}*/suite.json"), reverse=True):
        if not json.loads(path.read_text(encoding="utf-8")).get("finished"):
            return path.parent
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    made, number = runs / f"{stamp}-suite-{name}-{digest}", 1
    while made.exists():
        number += 1
        made = runs / f"{stamp}-suite-{name}-{digest}-{number}"
    return made


def placed(requests: Sequence[Request], where: Path) -> list[Request]:
    """The jobs, each with its own folder below the suite's."""
    return [
        dataclasses.replace(request, run_dir=where / f"{number:02d}-{_slug(request)}")
        for number, request in enumerate(requests, 1)
    ]


def number(request: Request) -> int:
    """The number of a placed job in the list of its suite, from 1."""
    assert request.run_dir is not None
    return int(request.run_dir.name.split("-", 1)[0])


def chosen(name: str, requests: Sequence[Request], count: int) -> list[Request]:
    """Those placed jobs that ``jobs=`` asks for; all of them where it is not said.

    Args:
        requests: those that can run here. count: jobs of the whole suite.

    Raises:
        UsageError: the suite has no job of that number.
    """
    asked = requests[0].jobs
    if wrong := [wanted for wanted in asked if wanted > count]:
        raise UsageError(f"jobs={wrong[0]}: suite={name} has jobs 1 to {count}; dry_run=true shows them")
    return [request for request in requests if not asked or number(request) in asked]


def plannable(
    requests: Sequence[Request], make: Callable[[Request], plan.Plan]
) -> tuple[list[tuple[Request, plan.Plan]], dict[str, str]]:
    """The jobs that can be planned here with their plans, and a reason for each of the others.

    Where caches do not fit beside each other, a job that shares one falls back to caches of the arms' own.
    """
    planned, refused = [], {}
    for request in requests:
        try:
            planned.append((request, make(request)))
            continue
        except plan.PlanError as error:
            reason = str(error)
        if request.shared_cache:
            request = dataclasses.replace(request, shared_cache=False)
            try:
                planned.append((request, make(request)))
                continue
            except plan.PlanError as error:
                reason = str(error)
        refused[request.ablation["name"]] = reason
    return planned, refused


def _slug(request: Request) -> str:
    names = [one["name"] for one in request.ablations]
    shown = "+".join(names[:2]) + (f"+{len(names) - 2}" if len(names) > 2 else "")
    return re.sub(r"[^A-Za-z0-9+_-]", "-", shown)


def run(
    name: str, requests: Sequence[Request], where: Path, one: Callable[[Request], int], clock: Clock, count: int
) -> int:
    """Run every job asked for that is not done, as far as the part goes, and report on all that there is.

    Args:
        requests: placed jobs, also those that others run. one: runs a job to its report and returns its exit code.
        count: jobs of the whole suite, those that cannot run here among them.

    Returns:
        The worst exit code; a job that cannot run here does not keep the others from running.
    """
    start, codes, part = clock.now_ns(), [], requests[0].part_seconds
    with alone(where):
        state(name, requests, where)
    mine = chosen(name, requests, count)
    for request in mine:
        if done(request):
            continue
        left = None if part is None else part - (clock.now_ns() - start) / 1e9
        # Every invocation gets somewhere, however short its part.
        if left is not None and codes and left < LEAST_PART_SECONDS:
            break
        print(f"suite {name}: job {number(request)} of {count}, {request.ablation['name']}", file=sys.stderr)
        codes.append(one(dataclasses.replace(request, part_seconds=left)))
    # One at a time: who comes last has seen all that the others left.
    with alone(where):
        missing = state(name, requests, where)
        code = report(requests, where)
    own = [request for request in missing if request in mine]
    if own:
        print(f"{len(own)} of {len(mine)} jobs are not done: give the same command again to go on", file=sys.stderr)
    elif missing:
        others = ",".join(str(number(request)) for request in missing)
        print(f"left to other commands: jobs=[{others}]", file=sys.stderr)
    return max([*codes, code])


def state(name: str, requests: Sequence[Request], where: Path) -> list[Request]:
    """Write down whether the suite is finished, all its jobs done; returns those that are not."""
    missing = [request for request in requests if not done(request)]
    write_whole(where / "suite.json", json.dumps({"suite": name, "finished": not missing}))
    return missing


@contextmanager
def alone(where: Path) -> Iterator[None]:
    """Hold the suite's folder: other processes that run jobs of it wait until they may write there.

    A shared file system may know no locks: then nothing is held, and that is said.
    """
    where.mkdir(parents=True, exist_ok=True)
    with (where / ".lock").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            print(f"{where} cannot be locked ({error.strerror}): let one command end before another", file=sys.stderr)
        yield


def done(request: Request) -> bool:
    """Whether a job came to its report and, where it runs in parts, to its end."""
    assert request.run_dir is not None
    if not (request.run_dir / "report.md").is_file():
        return False
    try:
        job = read_job(request.run_dir / "job.json")
    except RowError:
        return False
    return not job.settings.get("part_seconds") or not plan.stopped_early(
        dataclasses.replace(job, run_dir=str(request.run_dir))
    )


def report(requests: Sequence[Request], where: Path) -> int:
    """Merge what there is into one report in the suite's folder and print its path; 1 if that failed."""
    runs = [str(r.run_dir) for r in requests if r.run_dir and (r.run_dir / "samples.jsonl").is_file()]
    if not runs:
        print("nothing was measured, so there is no report", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "reports", "build", *runs, "--output", str(where)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode != 0:
        said = (built.stderr.strip() or "no message").splitlines()[-1]
        print(f"the report failed: {said}; try again with:  python -m reports build {' '.join(runs)}", file=sys.stderr)
        return 1
    print(where / "report.html")
    return 0
