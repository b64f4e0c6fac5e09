"""Jobs spread over machines by a Hydra launcher: ``python -m sweeps -m hydra/launcher=ray …``.

A launcher only carries jobs to where they run. Like the jobs of a suite they lie in one folder, a run folder each, and
make one report; all machines must see that folder. No two timings meet on one accelerator: a job waits for the lock of
its machine, and under Ray each machine offers one ``accelerator``.

A job whose process dies takes no other with it. What it has not measured is listed, and the same command given again
runs that alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from sweeps import compose, forecast, models, plan, subjects, suite
from sweeps.clock import SystemClock
from sweeps.compose import Request, UsageError
from sweeps.ledger import Ledger
from sweeps.rows import RowError
from sweeps.run import FAILURES
from sweeps.store import Store, read_job, write_whole

NAME = "launch"
"""What a launch is called where a suite would have its name."""

POLL_SECONDS = 1.0


def launch(name: str | None, jobs: Sequence[Sequence[str]], launcher: Sequence[str]) -> int:
    """Hand jobs that are not done to the launcher, wait for them, say what is missing, and report what there is.

    Args:
        name: the suite that the jobs are of, if any. launcher: words for Hydra.

    Returns:
        0, or 1 if a job was lost or has a failed window.

    Raises:
        UsageError: a job is not well formed, or the launcher is not installed.
    """
    name = name or NAME
    requests = [dataclasses.replace(compose.request(job), suite=name) for job in jobs]
    launcher = fitted(launcher)
    where = suite.folder(name, jobs, requests[0].launch, requests[0].run_dir)
    requests = suite.placed(requests, where)
    mine = suite.chosen(name, requests, len(requests))
    begun = where / "launched" / uuid.uuid4().hex[:8]
    begun.mkdir(parents=True)
    tickets = [
        json.dumps(
            {
                "words": list(words),
                "suite": name,
                "launch": str(request.launch),
                "run_dir": str(request.run_dir),
                "begun": str(begun),
            }
        )
        for words, request in zip(jobs, requests)
        if request in mine and not suite.done(request)
    ]
    suite.state(name, requests, where)
    if tickets:
        _hand_over(tickets, launcher, where)
        _settle(begun)
    missing = [request for request in suite.state(name, requests, where) if request in mine]
    for request in missing:
        assert request.run_dir is not None
        told = _told(begun / f"{request.run_dir.name}.json")
        why = told.get("reason") or (f"its process on {told['host']} died" if told else "it was not begun")
        print(f"{request.run_dir.name}: lost: {why}; not measured: {unmeasured(request.run_dir)}", file=sys.stderr)
    if missing:
        count = f"{len(missing)} of {len(mine)} jobs"
        print(f"{count} are not done: give the same command again to run what is missing", file=sys.stderr)
    with suite.alone(where):
        suite.state(name, requests, where)
        code = suite.report(requests, where)
    return max(int(bool(missing) or any(map(_failed, mine))), code)


def job(config: Any) -> None:
    """What a launcher runs: one job, on the machine where it landed. What goes wrong is told in its file."""
    ticket = json.loads(config.ticket)
    folder = Path(ticket["run_dir"])
    told = Path(ticket["begun"]) / f"{folder.name}.json"
    facts: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        with told.open("x", encoding="utf-8") as file:
            json.dump(facts, file)
    except FileExistsError:
        # Ray begins the task of a dead worker once more: what that lost is for the next command.
        return
    except FileNotFoundError:
        where = f"{told.parent} is not there on {facts['host']}"
        raise UsageError(f"{where}: give run_dir= on a disk that all machines see") from None
    from sweeps.__main__ import explained

    try:
        _run(ticket, folder)
    except Exception as error:
        facts["reason"] = explained(error)[0]
        print(f"error: {facts['reason']}", file=sys.stderr)
    write_whole(told, json.dumps(facts | {"ended": True}))


def unmeasured(folder: Path) -> str:
    """What a run folder has not measured, in words: phase, frontier and arms of each point with windows left."""
    try:
        planned = dataclasses.replace(read_job(folder / "job.json"), run_dir=str(folder))
    except RowError:
        return "all of it"
    store = Store(folder)
    ledgers = [Ledger(planned, session, store) for session in range(planned.sessions)]
    made = []
    for point in planned.points:
        arms = [arm.name for arm in planned.arms if not all(ledger.is_covered(point, arm) for ledger in ledgers)]
        if arms:
            made.append(f"{point.phase} {point.frontier} ({', '.join(arms)})")
    return ", ".join(made) or "its report"


def _run(ticket: dict[str, Any], folder: Path) -> None:
    from engine.device import device_info
    from sweeps.__main__ import run

    asked = compose.request(ticket["words"], Path(ticket["launch"]))
    request = dataclasses.replace(asked, run_dir=folder, suite=ticket["suite"], wait=True)
    model = models.find(request)
    if model.missing:
        raise UsageError(model.missing)
    device = device_info()
    refuse_elsewhere(folder, str(device.get("device_name") or ""))
    first = plan.make(request, model, forecast.this_machine(device))
    first.require_work()
    subjects.reachable(first.job)
    run(request, model, first)


def refuse_elsewhere(folder: Path, device: str) -> None:
    """Refuse to go on with a run folder whose rows come from a device of another name: one job is of one machine.

    Raises:
        UsageError: they do.
    """
    there = {str(run.machine["device"]) for run in Store(folder).read().runs if run.machine.get("device")}
    if device and there - {device}:
        raise UsageError(
            f"its rows so far come from {', '.join(sorted(there))}, this is {device}: keep the job to that machine "
            f"by a resource of its own, or remove {folder}"
        )


def fitted(launcher: Sequence[str]) -> list[str]:
    """The words for Hydra with each launcher replaced by its settings for this program, where there are any.

    They have names of their own, since a file named like the plugin's own settings is checked against those, with a
    warning each time.

    Raises:
        UsageError: no launcher is named, or its plugin is not installed.
    """
    if not any(word.startswith("hydra/launcher=") for word in launcher):
        raise UsageError(f"{launcher[0]} goes with hydra/launcher=NAME")
    made = []
    for word in launcher:
        key, name = word.split("=", 1)
        file = compose.config_dir() / "hydra" / "launcher" / f"lilybench_{name}.yaml"
        if key == "hydra/launcher" and file.is_file():
            _require(name, file)
            word = f"{key}={file.stem}"
        made.append(word)
    return made


def _require(name: str, file: Path) -> None:
    settings: Any = OmegaConf.load(file)
    try:
        found = importlib.util.find_spec(settings["_target_"].rsplit(".", 1)[0])
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(f"hydra/launcher={name} is not installed: pip install -c constraints.txt -e '.[cluster]'")


def _hand_over(tickets: Sequence[str], launcher: Sequence[str], where: Path) -> None:
    import hydra

    task = hydra.main(version_base=None, config_path=str(compose.config_dir()), config_name="config")(job)
    words = ",".join(map(compose.quote, tickets))
    compose.register()
    # Hydra would send the log of every library to stdout, among what the jobs print there for programs.
    silent = ("hydra/hydra_logging=none", "hydra/job_logging=none")
    folder = f"hydra.sweep.dir={compose.quote(str(where / 'hydra'))}"
    with _argv([sys.argv[0], "-m", *silent, folder, *launcher, f"+ticket={words}"]):
        try:
            task()
        except SystemExit:
            # Hydra has said what failed. What that leaves undone is told from the folders.
            print("the launcher gave up on a job", file=sys.stderr)


def _settle(begun: Path) -> None:
    """Wait for jobs that still run on this machine: a launcher that gave up on one leaves the others running."""
    while any(_runs(_told(path)) for path in begun.iterdir()):
        SystemClock().sleep(POLL_SECONDS)


def _runs(told: dict[str, Any]) -> bool:
    if not told or told.get("ended") or told["host"] != socket.gethostname():
        return False
    try:
        return psutil.Process(told["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _told(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _failed(request: Request) -> bool:
    assert request.run_dir is not None
    return any(row.status in FAILURES for row in Store(request.run_dir).read().samples)


@contextlib.contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    held, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = held
