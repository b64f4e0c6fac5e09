"""A suite: several jobs under one folder, in parts if need be, and one report of all of them.

The same command given again goes on: jobs that are done are not run again, one that was cut short continues, and when
all are done the next command starts a new folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sweeps import plan
from sweeps.clock import Clock
from sweeps.compose import LEAST_PART_SECONDS, Request
from sweeps.rows import RowError
from sweeps.store import read_job, write_whole

ROOT = Path(__file__).resolve().parent.parent

_NOT_IDENTITY = ("part", "dry_run", "wait", "probe", "fetch", "allow", "budget")


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


def run(name: str, requests: Sequence[Request], where: Path, one: Callable[[Request], int], clock: Clock) -> int:
    """Run every job that is not done, as far as the part goes, and build the report of all that there is.

    Args:
        requests: placed jobs. one: runs a job to its report and returns its exit code.

    Returns:
        The worst exit code; a job that cannot run here does not keep the others from running.
    """
    start, codes, part = clock.now_ns(), [], requests[0].part_seconds
    write_whole(where / "suite.json", json.dumps({"suite": name, "finished": False}))
    for number, request in enumerate(requests, 1):
        if done(request):
            continue
        left = None if part is None else part - (clock.now_ns() - start) / 1e9
        # Every invocation gets somewhere, however short its part.
        if left is not None and codes and left < LEAST_PART_SECONDS:
            break
        print(f"suite {name}: job {number} of {len(requests)}, {request.ablation['name']}", file=sys.stderr)
        codes.append(one(dataclasses.replace(request, part_seconds=left)))
    missing = [request for request in requests if not done(request)]
    write_whole(where / "suite.json", json.dumps({"suite": name, "finished": not missing}))
    if missing:
        count = f"{len(missing)} of {len(requests)} jobs"
        print(f"{count} are not done: give the same command again to go on", file=sys.stderr)
    return max([*codes, report(requests, where)])


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
