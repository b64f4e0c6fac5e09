"""The dry run's forecast of the embedded model against the run itself, on the real clock of this machine."""

from __future__ import annotations

import json
import time

import psutil

from sweeps import compose, forecast, models, plan
from sweeps import run as runner
from sweeps.__main__ import main
from sweeps.clock import SystemClock
from sweeps.points import Job
from sweeps.store import Store, write_job

WORDS = ["frontiers=[128]", "sessions=1", "blocks=2", "decode.blocks=60", "budget=10m", "wait=true"]


def attempt(capsys, job: Job) -> tuple[float, float]:
    """(forecast, actual) seconds of the same settings, one right after the other."""
    assert main([*WORDS, "dry_run=json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["probed"]
    start = time.monotonic()
    runner.sessions(job, write_job(job), SystemClock())
    return said["seconds"], time.monotonic() - start


def test_the_dry_run_of_the_toy_model_is_within_a_factor_of_1_5_of_the_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = []
    for number in range(3):  # the load of a shared machine may change between forecast and run
        request = compose.request([*WORDS, f"run_dir={tmp_path / str(number)}"])
        job = plan.make(request, models.find(request), forecast.this_machine()).job
        tried.append(attempt(capsys, job))
        assert {row.status for row in Store(job.run_dir).read().samples} == {"ok"}
        if 1 / 1.5 < tried[-1][1] / tried[-1][0] < 1.5:
            break
    print(tried, psutil.getloadavg())
    assert 1 / 1.5 < tried[-1][1] / tried[-1][0] < 1.5, f"(forecast, actual) seconds: {tried}"
