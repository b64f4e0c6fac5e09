"""Jobs spread by a Hydra launcher: settings that fit, one folder a job, and what is left when a job is lost.

The tests on a Ray cluster of two nodes and on Submitit's queue need the extra `cluster` and run with ``--full`` only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import suite_rows
from omegaconf import OmegaConf

import sweeps.__main__ as command
from sweeps import compose, launch, suite
from sweeps.compose import Request, UsageError
from sweeps.store import Store, write_job

LAUNCHERS = sorted((compose.config_dir() / "hydra" / "launcher").glob("lilybench_*.yaml"))


@pytest.mark.parametrize("file", LAUNCHERS, ids=lambda file: file.stem)
def test_settings_of_launchers_compose(file: Path) -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    compose.register()
    with initialize_config_dir(str(compose.config_dir()), version_base=None):
        made = hydra_compose("config", [f"hydra/launcher={file.stem}"], return_hydra_config=True)
    settings: Any = OmegaConf.to_container(made.hydra.launcher)
    assert settings["_target_"].startswith("hydra_plugins.")
    if "ray" in file.stem:
        remote = settings["ray"]["remote"]
        assert remote["resources"] == {"accelerator": 1}, "one job at a time on each machine"
        assert remote["max_retries"] == 1, "0 would end the command with the first worker that dies"
    else:
        assert settings["tasks_per_node"] == settings["nodes"] == 1


def test_a_launcher_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"hydra/launcher=ray is not installed.*\[cluster\]"):
        launch.fitted(["hydra/launcher=ray"])
    with pytest.raises(UsageError, match="goes with hydra/launcher="):
        launch.fitted(["hydra.launcher.ray.init.address=auto"])
    assert launch.fitted(["hydra/launcher=basic"]) == ["hydra/launcher=basic"]


WORDS = ["-m", "hydra/launcher=basic", "seed=1,2", "model=tiny", "subject=none", "frontiers=[64]", "run_dir=out"]


def ran(request: Request) -> int:
    """Stands in for a job that comes to its report."""
    assert request.run_dir is not None and request.wait, "two jobs on one accelerator wait for each other"
    suite_rows.write(request.run_dir)
    write_job(replace(suite_rows.job(), run_dir=str(request.run_dir)))
    (request.run_dir / "report.md").write_text("done", encoding="utf-8")
    return 0


def test_a_lost_job_is_listed_and_the_same_command_runs_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "report", lambda requests, where: 0)
    began: list[str] = []
    handlers = logging.getLogger().handlers.copy()

    def one(request: Request, model: Any, first: Any) -> int:
        assert request.run_dir is not None
        began.append(request.run_dir.name)
        if began == ["01-none", "02-none"]:
            raise ValueError("no such weights on this machine")
        return ran(request)

    monkeypatch.setattr(command, "run", one)
    assert command.main(WORDS) == 1
    said = capsys.readouterr().err
    assert "02-none: lost: no such weights on this machine; not measured: all of it" in said
    assert "1 of 2 jobs are not done: give the same command again" in said
    assert command.main(WORDS) == 0
    assert began == ["01-none", "02-none", "02-none"]
    assert logging.getLogger().handlers == handlers, "what runs after this would log into a stream that is gone"


def test_what_a_dead_process_began_is_not_begun_again_by_the_launcher(tmp_path: Path) -> None:
    ticket = {"run_dir": str(tmp_path / "01-none"), "begun": str(tmp_path), "words": ["no words"], "suite": "launch"}
    (tmp_path / "01-none.json").write_text('{"host": "there", "pid": 1}', encoding="utf-8")
    launch.job(OmegaConf.create({"ticket": json.dumps(ticket)}))
    assert "ended" not in (tmp_path / "01-none.json").read_text(encoding="utf-8")
    elsewhere = {**ticket, "begun": str(tmp_path / "not-mounted")}
    with pytest.raises(UsageError, match="on a disk that all machines see"):
        launch.job(OmegaConf.create({"ticket": json.dumps(elsewhere)}))


def test_windows_that_are_left_are_told_by_point_and_arm(tmp_path: Path) -> None:
    assert launch.unmeasured(tmp_path) == "all of it"
    planned = replace(suite_rows.job(), run_dir=str(tmp_path))
    write_job(planned)
    point, arm = planned.points[0], planned.arms[0]
    assert f"{point.phase} {point.frontier} ({arm.name}" in launch.unmeasured(tmp_path)


def test_a_job_does_not_go_on_on_another_chip(tmp_path: Path) -> None:
    launch.refuse_elsewhere(tmp_path, "Apple M4")
    suite_rows.write(tmp_path)
    there = str(Store(tmp_path).read().runs[0].machine["device"])
    launch.refuse_elsewhere(tmp_path, there)
    with pytest.raises(UsageError, match=f"come from {there}, this is Apple M4"):
        launch.refuse_elsewhere(tmp_path, "Apple M4")


# -- the real launchers ------------------------------------------------------------------------------

full = pytest.mark.full
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install '.[cluster]'")
needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs '.[cluster]'")
JOBS = ("subject=none", "frontiers=[64]", "phases=[prefill]", "blocks=40", "sessions=1", "probe=false", "run_dir=out")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A lock of its own, so that no other run on this machine is waited for."""
    (tmp_path / "locks").mkdir()
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path / "locks"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def cluster(tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of two Ray nodes on loopback, each with one accelerator and a resource of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--object-store-memory=100000000", "--block"]
    head = ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false"]
    with contextlib.ExitStack() as stack:
        for name, words in (("one", head), ("two", [f"--address={address}"])):
            resources = json.dumps({"accelerator": 1, name: 1})
            log = stack.enter_context((tmp_path / f"{name}.log").open("w", encoding="utf-8"))
            node = subprocess.Popen(
                [str(Path(sys.executable).with_name("ray")), "start", *words, *own, f"--resources={resources}"],
                env=environment,
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_end, node)
            started = tmp_path / f"{name}.log"
            until(lambda: "Ray runtime started" in started.read_text(encoding="utf-8"), 120)  # noqa: B023
        yield address


def _end(node: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGTERM)
    try:
        # A node drains for half a minute.
        node.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def until(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.2)


def spread(folder: Path, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "sweeps", "-m", *words, *JOBS]
    return subprocess.Popen(
        line, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def windows(run: Path) -> dict[tuple[Any, ...], int | None]:
    """Times of the windows of a run folder, by the window."""
    return {
        (row.point, row.arm, row.block, row.slot): row.elapsed_ns
        for row in Store(run).read().samples
        if row.status == "ok" and row.block >= 0
    }


@full
@needs_ray
@pytest.mark.timeout(900)
def test_a_ray_worker_killed_in_mid_job_takes_no_other_job_with_it(
    tmp_path: Path, environment: dict[str, str], cluster: str
) -> None:
    words = ("hydra/launcher=ray", f"hydra.launcher.ray.init.address={cluster}", "seed=1,2,3")
    out = tmp_path / "out"
    first = spread(tmp_path, environment, *words)
    runs = [out / f"0{i}-none" for i in (1, 2, 3)]
    until(lambda: len(list(out.glob("launched/*/*.json"))) == 2, 240)
    until(lambda: any(len(windows(run)) >= 8 for run in runs if run.is_dir()), 240)
    # Two nodes with one accelerator each: two jobs have begun, the third waits.
    begun = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in out.glob("launched/*/*.json")}
    assert len(begun) == 2
    victim = next(run for run in runs if run.is_dir() and windows(run))
    os.kill(begun[victim.name]["pid"], signal.SIGKILL)
    _, said = first.communicate(timeout=400)
    assert first.returncode == 1, said[-2000:]
    assert f"{victim.name}: lost: its process on {socket.gethostname()} died; not measured: prefill 64 (" in said
    assert "1 of 3 jobs are not done" in said
    others = {run: windows(run) for run in runs if run != victim}
    kept = windows(victim)
    assert all((run / "report.md").is_file() and len(times) == 2 * 2 * 40 for run, times in others.items())
    assert 8 <= len(kept) < 2 * 2 * 40 and not (victim / "report.md").exists()

    again = spread(tmp_path, environment, *words)
    printed, said = again.communicate(timeout=400)
    assert again.returncode == 0, said[-2000:]
    assert Path(printed.splitlines()[-1]) == out / "report.html" and (out / "report.html").is_file()
    assert {run: windows(run) for run in others} == others, "what was done is not measured again"
    done = windows(victim)
    assert len(done) == 2 * 2 * 40 and kept.items() <= done.items(), "what was measured is kept"


@full
@needs_submitit
@pytest.mark.timeout(600)
def test_submitit_runs_jobs_one_at_a_time(tmp_path: Path, environment: dict[str, str]) -> None:
    started = spread(tmp_path, environment, "hydra/launcher=submitit_local", "seed=1,2")
    printed, said = started.communicate(timeout=500)
    assert started.returncode == 0, said[-2000:]
    assert Path(printed.splitlines()[-1]) == tmp_path / "out" / "report.html"
    spans = []
    for name in ("01-none", "02-none"):
        tables = Store(tmp_path / "out" / name).read()
        last = (tmp_path / "out" / name / "samples.jsonl").stat().st_mtime
        spans.append((tables.runs[0].started, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(last))))
    spans.sort()
    assert spans[0][1] <= spans[1][0], "the second began when the first was done"
