"""A suite: one folder, jobs that are done stay done, a part that is used up ends, one report of all."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import suite_rows

from reports.load import read_rows
from sweeps import compose, suite
from sweeps.__main__ import main
from sweeps.clock import ManualClock
from sweeps.compose import Request, UsageError
from sweeps.points import Job
from sweeps.store import write_job


@pytest.fixture(scope="module")
def composed() -> list[Request]:
    return [compose.request(job) for job in compose.jobs(compose.parse(["suite=quick", "part=5m"]))[:3]]


@pytest.fixture
def requests(composed: list[Request], tmp_path: Path) -> list[Request]:
    return suite.placed(composed, tmp_path / "s")


class Runner:
    """Stands in for a job: takes time on the clock, leaves rows, and a report unless it is cut short."""

    def __init__(self, clock: ManualClock, seconds: float, code: int = 0) -> None:
        self.clock, self.seconds, self.code = clock, seconds, code
        self.parts: list[float | None] = []

    def __call__(self, request: Request) -> int:
        assert request.run_dir is not None
        self.parts.append(request.part_seconds)
        self.clock.advance(int(self.seconds * 1e9))
        suite_rows.write(request.run_dir)
        made: Job = replace(suite_rows.job(), run_dir=str(request.run_dir))
        write_job(replace(made, sessions=5, settings=made.settings | {"part_seconds": request.part_seconds}))
        (request.run_dir / "report.md").write_text("done", encoding="utf-8")
        return self.code


def folders(requests: list[Request]) -> list[str]:
    return [r.run_dir.name for r in requests if r.run_dir]


def test_jobs_lie_beside_each_other_in_order(requests, tmp_path):
    assert folders(requests) == ["01-packed_dequant+gpu_routing+1", "02-packed_dequant", "03-gpu_routing"]
    assert {r.run_dir.parent for r in requests if r.run_dir} == {tmp_path / "s"}


def test_a_part_ends_before_the_next_job_and_the_next_command_goes_on(requests, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "report", lambda requests, where: 0)
    clock = ManualClock()
    first = Runner(clock, 130)
    assert suite.run("quick", requests, tmp_path / "s", first, clock, 3) == 0
    assert first.parts == [300, 170], "the third job would have had 40 s"
    assert "1 of 3 jobs are not done: give the same command again" in capsys.readouterr().err
    assert json.loads((tmp_path / "s" / "suite.json").read_text(encoding="utf-8"))["finished"] is False
    short = [replace(request, part_seconds=59) for request in requests]
    suite.run("quick", short, tmp_path / "s", again := Runner(clock, 10), clock, 3)
    assert again.parts == [59], "every invocation gets somewhere"
    (requests[2].run_dir / "report.md").unlink()
    again = Runner(clock, 10)
    assert suite.run("quick", requests, tmp_path / "s", again, clock, 3) == 0
    assert again.parts == [300]
    assert json.loads((tmp_path / "s" / "suite.json").read_text(encoding="utf-8"))["finished"] is True


def test_a_job_that_fails_does_not_keep_the_others_from_running(requests, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "report", lambda requests, where: 0)
    clock = ManualClock()
    runner = Runner(clock, 1, code=1)
    assert suite.run("quick", requests, tmp_path / "s", runner, clock, 3) == 1
    assert len(runner.parts) == 3


def test_an_unfinished_suite_goes_on_in_its_folder_whatever_part_and_budget_and_a_finished_one_does_not(tmp_path):
    def where(*words: str) -> Path:
        return suite.folder("quick", compose.jobs(compose.parse(["suite=quick", *words])), tmp_path, None)

    made = where("part=5m")
    made.mkdir(parents=True)
    (made / "suite.json").write_text('{"finished": false}', encoding="utf-8")
    assert where("part=9m", "budget=1h", "dry_run=true") == made
    assert where("seed=3") != made
    (made / "suite.json").write_text('{"finished": true}', encoding="utf-8")
    assert where("part=5m") != made


def test_processes_share_a_suite_by_numbers_and_the_last_one_finishes_it(requests, tmp_path, monkeypatch, capsys):
    """The second process has other jobs of the same folder; a number and a folder stay those of the whole suite."""
    where, merged = tmp_path / "s", []
    monkeypatch.setattr(suite, "report", lambda given, _: merged.append(sum(r.run_dir.is_dir() for r in given)) or 0)

    def share(*jobs: int) -> str:
        mine = [replace(request, jobs=jobs) for request in requests]
        assert suite.run("quick", mine, where, Runner(ManualClock(), 1), ManualClock(), 3) == 0
        return capsys.readouterr().err

    def state() -> bool:
        return json.loads((where / "suite.json").read_text(encoding="utf-8"))["finished"]

    told = share(2)
    assert "job 2 of 3, packed_dequant" in told and "left to other commands: jobs=[1,3]" in told
    assert [r.run_dir.is_dir() for r in requests] == [False, True, False] and not state()
    assert "left to" not in share(1, 3)
    assert state() and merged == [1, 3]
    share(2)
    assert state(), "a command whose jobs are all done changes nothing"
    with pytest.raises(UsageError, match=r"jobs=9: suite=quick has jobs 1 to 3"):
        share(1, 9)


def test_the_folder_and_the_runs_of_a_suite_do_not_depend_on_which_jobs_are_asked_for(tmp_path):
    from sweeps import models, plan
    from sweeps.forecast import cpu

    def asked(*words: str) -> tuple[Path, list[str]]:
        jobs = compose.jobs(compose.parse(["suite=quick", *words]))
        made = suite.placed([compose.request(job) for job in jobs[:2]], tmp_path / "s")
        hashes = [plan.make(r, models.find(r), cpu("cpu", 8 << 30)).job.config_hash for r in made]
        return suite.folder("quick", jobs, tmp_path, None), hashes

    (made, hashes) = asked()
    made.mkdir(parents=True)
    (made / "suite.json").write_text('{"finished": false}', encoding="utf-8")
    assert asked("jobs=[2,4]") == (made, hashes)


def test_all_jobs_make_one_report(requests, tmp_path, capsys):
    runner = Runner(ManualClock(), 1)
    for request in requests[:1]:
        runner(request)
    assert suite.report(requests, tmp_path / "s") == 0
    printed = Path(capsys.readouterr().out.strip())
    assert printed == tmp_path / "s" / "report.html" and "Interactions" in printed.read_text(encoding="utf-8")
    assert read_rows([requests[0].run_dir]).samples
    assert suite.report(requests[1:], tmp_path / "s") == 1


def test_the_dry_run_of_a_suite_names_every_job_and_its_time(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["suite=quick", "dry_run=json", "probe=false"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [job["number"] for job in told["jobs"]] == [1, 2, 3, 4, 5] and told["seconds"] < 540
    assert sum(job["budget_seconds"] for job in told["jobs"]) <= 490, "what remains of ten minutes is for starting"
    assert not list(tmp_path.iterdir())
    assert main(["suite=quick", "dry_run=true", "probe=false", "jobs=[5,2]"]) == 0
    printed = capsys.readouterr().out
    assert "Job 2 of 5" in printed and "Job 5 of 5" in printed and "Job 1" not in printed
    assert main(["suite=quick", "dry_run=true", "probe=false", "jobs=6"]) == 2
    assert "jobs=6: suite=quick has jobs 1 to 5" in capsys.readouterr().err


def test_jobs_of_two_suites_are_two_runs(requests):
    from sweeps import models, plan
    from sweeps.forecast import cpu

    job = plan.make(requests[0], models.find(requests[0]), cpu("cpu", 8 << 30)).job
    assert job.run_id == "s-01-packed_dequant+gpu_routing+1" and Path(job.run_dir) == requests[0].run_dir


def test_a_job_that_cannot_be_planned_is_left_out_with_its_reason_and_caches_fall_back_to_their_own(requests):
    from sweeps.plan import PlanError

    sharing = replace(requests[1], shared_cache=True)

    def make(request: Request):
        if request is requests[0]:
            raise PlanError("too large")
        if request.shared_cache:
            raise PlanError("needs the caches of all arms at once")
        return "plan"

    planned, refused = suite.plannable([requests[0], sharing, requests[2]], make)  # type: ignore[arg-type]
    assert [(r.run_dir, r.shared_cache) for r, _ in planned] == [(r.run_dir, False) for r in requests[1:]]
    assert refused == {requests[0].ablation["name"]: "too large"}


def test_a_folder_that_knows_no_locks_is_used_without_and_says_so(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(suite.fcntl, "flock", refuse)
    with suite.alone(tmp_path / "shared"):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err
