"""The sweep: from a command line to a report. `python -m sweeps [COMMAND] [key=value …]`

    python -m sweeps                                       the embedded toy model, under three minutes
    python -m sweeps model=qwen3.6-35b sweep=ten           the run that people come for
    python -m sweeps ablation=packed_dequant               one question
    python -m sweeps -m ablation=packed_dequant,gdn_scan   several, one after another
    python -m sweeps -m hydra/launcher=ray …               over machines: ray, submitit_local, submitit_slurm
    python -m sweeps suite=quick                           a list of questions, in parts if part= is said, one report
    python -m sweeps suite=quick run_dir=DIR jobs=[1,4]    these jobs of it: other GPUs take others, into the same DIR
    python -m sweeps … dry_run=true                        the plan, minutes and memory; measures nothing
    python -m sweeps calibrate                             how large a difference this machine makes up by itself
    python -m sweeps tune [model=NAME] [budget=5m]         variants and tiles for this chip, into the user's folder
    python -m sweeps pack RUN [FILE]                       a run folder as one file
    python -m sweeps unpack FILE [FOLDER]                  and back, under reports/runs

Settings and groups are those of configs/. Progress goes to stderr, the report's path is the last line on stdout.
Exit codes: 0 done, 1 a point failed, 2 something on the command line or on this machine must be changed first.
"""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from sweeps import archive, compose, environment, forecast, models, plan, preview, subjects, suite
from sweeps.clock import SystemClock
from sweeps.compose import CommandLine, Request, UsageError

FREE_BYTES = 200_000_000
"""Space a run folder may need: rows, series, figures."""

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ENAMETOOLONG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Errors become one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return command(words)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    except Exception as error:
        if environment.debug():
            raise
        text, code = explained(error)
        print(f"error: {text}", file=sys.stderr)
        return code


def explained(error: Exception) -> tuple[str, int]:
    """An error as one line, and the exit code that goes with it."""
    # Deliberate refusals are ValueErrors with a message made for people, and a place that cannot be written is for
    # the user to change; anything else is a fault of ours.
    refused = isinstance(error, ValueError)
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in _DENIED:
        refused = True
        text = f"{error.filename or 'disk'}: {error.strerror}; give another place (run_dir= for a run)"
    hint = "" if refused else f" ({type(error).__name__}; LILYBENCH_DEBUG=1 shows where)"
    return f"{text}{hint}", 2 if refused else 1


def command(words: Sequence[str]) -> int:
    """What main does, errors not yet turned into lines."""
    if set(words) & {"-h", "--help"}:
        print(__doc__)
        return 0
    line = compose.parse(words)
    if line.command == "pack":
        return _pack(line)
    if line.command == "unpack":
        return _unpack(line)
    if line.command == "tune":
        return _tune(line)
    if line.command == "calibrate":
        line = CommandLine("run", ("sweep=calibrate", *line.overrides), line.multirun)
    name, jobs = compose.suite_of(line), compose.jobs(line)
    # A dry run speaks of this machine, whoever would run the jobs.
    if line.launcher and compose.request(jobs[0]).dry_run == "false":
        from sweeps import launch

        return launch.launch(name, jobs, line.launcher)
    return _suite(name, jobs) if name else sweep(jobs)


def sweep(jobs: Sequence[Sequence[str]]) -> int:
    """Check every job, then show or run them in order; the worst exit code wins."""
    requests = [compose.request(job) for job in jobs]
    machine = forecast.this_machine()
    planned = [(request, models.find(request)) for request in requests]
    for request, model in planned:
        if model.missing and request.dry_run == "false":
            raise UsageError(model.missing)
    plans = [plan.make(request, model, machine) for request, model in planned]
    for request, planned_job in zip(requests, plans):
        if request.dry_run == "false":
            planned_job.require_work()
            subjects.reachable(planned_job.job)
    codes = []
    for (request, model), first in zip(planned, plans):
        if request.dry_run != "false":
            preview.show(_probed(request, model, first), form=request.dry_run)
            codes.append(0)
        else:
            codes.append(run(request, model, first))
    failed = [i for i, code in enumerate(codes) if code]
    if failed and len(codes) > 1:
        for i in failed:
            print(f"job {i + 1} of {len(codes)} ended with code {codes[i]}: {' '.join(jobs[i])}", file=sys.stderr)
    return max(codes)


def _suite(name: str, jobs: Sequence[Sequence[str]]) -> int:
    """Check every job of a suite, then show them or run those that are not done."""
    requests = [compose.request(job) for job in jobs]
    first, count = requests[0], len(requests)
    requests = suite.placed(requests, suite.folder(name, jobs, first.launch, first.run_dir))
    mine = [suite.number(request) for request in suite.chosen(name, requests, count)]
    machine, model = forecast.this_machine(), models.find(first)
    if model.missing and first.dry_run == "false":
        raise UsageError(model.missing)
    where = requests[0].run_dir
    assert where is not None
    planned, refused = suite.plannable(requests, lambda r: plan.make(r, model, machine))
    for job, reason in refused.items():
        print(f"left out, {job}: {reason}", file=sys.stderr)
    shown = [(request, made) for request, made in planned if suite.number(request) in mine]
    if not shown:
        raise UsageError(f"suite={name}: no job of it can be planned here: {next(iter(refused.values()))}")
    if first.dry_run != "false":
        plans = {suite.number(request): _probed(request, model, made) for request, made in shown}
        preview.show_suite(name, plans, count, first.part_seconds, form=first.dry_run)
        return 0
    fit = [request for request, _ in planned]

    def one(request: Request) -> int:
        return run(request, model, plan.make(request, model, machine))

    return suite.run(name, fit, where.parent, one, SystemClock(), count)


def run(request: Request, model: models.Model, first: plan.Plan) -> int:
    """Measure one job and build its report; returns the exit code."""
    from sweeps import run as runner

    _check_disk(Path(first.job.run_dir))
    interrupted = plan.interrupted(first.job)
    job = interrupted or _probed(request, model, first).job
    if interrupted:
        # A part is what is left now, not what it was when the run began.
        job.settings["part_seconds"] = request.part_seconds
        done = "the finished run" if plan.finished(job) else "the interrupted run"
        print(f"going on with {done} {job.run_dir}", file=sys.stderr)
    code = runner.run(job)
    _keep_hydra(job.run_dir, request)
    if model.toy and code != 2:
        print(f"this was a toy model; the real one:  {models.REAL_COMMAND}", file=sys.stderr)
    return code


def _probed(request: Request, model: models.Model, first: plan.Plan) -> plan.Plan:
    """The plan again, with times measured on this machine, where that is wanted and possible."""
    wanted = request.probe == "true" or (request.probe == "auto" and (model.toy or request.dry_run == "false"))
    if model.missing or not wanted:
        return first
    from sweeps import probe

    with tempfile.TemporaryDirectory(prefix="lilybench-") as folder:
        measured = probe.take(first.job, Path(folder))
    return plan.make(request, model, first.machine, measured) if measured else first


def _keep_hydra(run_dir: str, request: Request) -> None:
    """What was composed, and from which words, in the form that Hydra's own jobs leave; no folder, no record."""
    folder = Path(run_dir) / "hydra"
    if folder.parent.is_dir():
        folder.mkdir(exist_ok=True)
        OmegaConf.save(OmegaConf.create(request.config), folder / "config.yaml")
        OmegaConf.save(OmegaConf.create(list(request.overrides)), folder / "overrides.yaml")


def _check_disk(run_dir: Path) -> None:
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not existing.is_dir():
        raise UsageError(f"run_dir={run_dir}: {existing} is a file, not a folder: give another path")
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES:
        raise UsageError(
            f"only {free / 1e6:.0f} MB are free in {existing}, a run may need {FREE_BYTES / 1e6:.0f} MB: "
            "free some or give run_dir= on another disk"
        )


def _tune(line: CommandLine) -> int:
    from sweeps import tune

    if line.multirun:
        raise UsageError("tune measures one model at a time: leave -m out")
    return tune.tune(line.overrides)


def _pack(line: CommandLine) -> int:
    if not 1 <= len(line.arguments) <= 2:
        raise UsageError("pack takes a run folder and, if you like, a file: python -m sweeps pack RUN [FILE]")
    run_dir, *file = (compose.resolve(word, Path.cwd()) for word in line.arguments)
    print(archive.pack(run_dir, file[0] if file else None))
    return 0


def _unpack(line: CommandLine) -> int:
    if not 1 <= len(line.arguments) <= 2:
        raise UsageError("unpack takes a file and, if you like, a folder: python -m sweeps unpack FILE [FOLDER]")
    file, *into = (compose.resolve(word, Path.cwd()) for word in line.arguments)
    print(archive.unpack(file, into[0] if into else Path.cwd() / "reports" / "runs"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
