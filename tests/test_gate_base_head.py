"""Base against head: two checkouts, each in its own processes, measured alternately on the real clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import report_rows as rows
from sessions import job, points

from reports import base_head
from reports.gate import Answer
from reports.load import ReportError
from sweeps import compose, models, plan
from sweeps.clock import SystemClock
from sweeps.compose import UsageError
from sweeps.contrasts import contrast_rows
from sweeps.forecast import this_machine
from sweeps.points import Arm, Contrast, Job
from sweeps.prompts import Prompts, WordEncoder
from sweeps.sentinel import Sentinel
from sweeps.session import Session
from sweeps.store import Store, write_job
from sweeps.subjects.base import SubjectError, SubjectOutOfMemory, SubjectUnsupported
from sweeps.subjects.remote import ROOT, Child, Remote, RemoteError, code_hash
from sweeps.window import NoDevice, Tools

ADAPTER = """
    import sys
    sys.path.insert(0, {root!r})
    from sweeps.subjects.stub import Stub, StubOptions

    class Mine(Stub):
        def describe(self):
            print("a library that prints to stdout")
            return {{**super().describe(), "identity": {{"experts": {code!r}, "linear": "same"}}}}

    def make(arm, model):
        return Mine(StubOptions(**{options!r}))
"""

# A window of 64 rows is one charge of 64 ms, the last half millisecond of which is spent awake.
FAST = {"ns_per_row": 1_000_000, "ns_per_step": 2_000_000, "vocab": 256}


def checkout(folder: Path, code: str = "a", **options: float) -> Path:
    """A repository with an engine of its own: every token is a sleep."""
    folder.mkdir()
    text = textwrap.dedent(ADAPTER).format(root=str(ROOT), code=code, options={**FAST, **options})
    (folder / "lilybench_subject.py").write_text(text, encoding="utf-8")
    return folder


def two(folder: Path, base: Path, head: Path, sessions: int, blocks: int, run_id: str) -> Job:
    sides = {"base": (base, ""), "head": (head, ""), "head.again": (head, "again")}
    arms = [
        Arm(n, "engine", options={"checkout": str(p), "process": again}, hash=n.split(".")[0], aa=bool(again))
        for n, (p, again) in sides.items()
    ]
    made = [p for p in points((64,), blocks, tokens=8) if p.phase == "prefill"]
    what = job(folder, arms, made, sessions=sessions)
    what.run_id = run_id
    what.contrasts = [Contrast("head vs base", "head", "base"), Contrast("A/A", "head.again", "head")]
    return what


def measure(what: Job) -> None:
    """What workers do, without their start-up: every session has children of its own."""
    store, clock = Store(what.run_dir), SystemClock()
    for session in range(what.sessions):
        subjects = {arm.name: Remote(arm, what) for arm in what.arms}
        arms = {name: subject.describe() for name, subject in subjects.items()}
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        store.append(rows.run_row(session, what.run_id, started=began, model={"name": "stub", "arms": arms}))
        beat = Sentinel(lambda: None, clock, may_wait=False)
        tools = Tools(store, Prompts(WordEncoder(256)), clock, beat, NoDevice())
        assert Session(what, session, subjects, tools).run()
        for subject in subjects.values():
            subject.close()
    for row in contrast_rows(what, store.read().samples):
        store.append(row)
    write_job(what)


def gated(folder: Path, slow: float, sessions: int, blocks: int) -> Answer:
    """The gate's own two stages over a head that takes `slow` times as long."""
    folder.mkdir(exist_ok=True)
    base, head = checkout(folder / "b"), checkout(folder / "h", "b" if slow != 1 else "a", slowdown=slow)

    def sweep(words: Sequence[str]) -> int:
        given = dict(word.split("=", 1) for word in words)
        run = Path(given["run_dir"])
        measure(two(run, Path(given["base"]), Path(given["head"]), int(given["sessions"]), blocks, run.name))
        return 0

    words = [f"sessions={sessions}"]
    # An adapter's ops are its own; `Remote.op` refuses them.
    return base_head.gate(base, folder / "work", words, head=head, measure=sweep, timed=lambda *_: [])


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    for child in list(Child._running.values()):
        child.end()


def named(answer: Answer) -> bool:
    return answer.code == 1 and "prefill at 64 is" in answer.reason and "changed ops: experts (a to b)" in answer.reason


@pytest.fixture
def ahead_of_others() -> Iterator[None]:
    """Whoever else uses the machine makes neither this process wait nor those it starts, where the system allows that.

    A stub that sleeps is woken late while others keep the processors busy: milliseconds, as long as what is looked for.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):  # macOS, or no right to it
        yield
        return
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.full
def test_planted_slowdown_is_confirmed_and_named_on_the_real_clock(tmp_path: Path) -> None:
    # Half as much again, so that a busy machine cannot hide it in this short run; 5 % has its own, longer test.
    answer = gated(tmp_path / "run", 1.5, sessions=4, blocks=3)
    assert named(answer), answer.reason
    assert (tmp_path / "run" / "work" / "confirmation" / "runs.jsonl").is_file()


SLOW_RUNS, SAME_RUNS, BLOCKS = 10, 20, 6


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_real_runs_of_the_stub(tmp_path: Path, ahead_of_others: None) -> None:
    # A quarter of an hour, nearly all of it asleep.
    slow = [gated(tmp_path / f"slow{i}", 1.05, sessions=5, blocks=BLOCKS) for i in range(SLOW_RUNS)]
    same = [gated(tmp_path / f"same{i}", 1.0, sessions=5, blocks=BLOCKS) for i in range(SAME_RUNS)]
    codes = [answer.code for answer in same]
    print(
        f"planted 5 %: {sum(map(named, slow))} of {SLOW_RUNS}; "
        f"unchanged: {[codes.count(c) for c in (0, 1, 2)]} of 0, 1, 2"
    )
    print(*(answer.reason for answer in (*slow, *same) if answer.code == 2), sep="\n")
    assert sum(map(named, slow)) >= 0.9 * SLOW_RUNS
    assert codes.count(1) == 0 and codes.count(0) >= 0.8 * SAME_RUNS


def remote(tmp_path: Path, **options: float) -> Remote:
    side = checkout(tmp_path / "side", **options)
    arm = Arm("head", "engine", options={"checkout": str(side), "process": ""})
    return Remote(arm, two(tmp_path / "run", side, side, 1, 1, "r"))


def test_remote_subject_does_what_its_engine_does(tmp_path: Path) -> None:
    subject = remote(tmp_path)
    done = subject.prefill([1, 2, 3])
    mark = subject.snapshot()
    first = subject.decode(done.next_token, 4)
    assert len(first.tokens) == 4 and subject.position() == 7
    subject.restore(mark)
    assert subject.decode(done.next_token, 4).tokens == first.tokens
    stamps = subject.decode(1, 2, clock=time.perf_counter_ns).stamps
    assert len(stamps) == 2 and stamps[0] < stamps[1] <= time.perf_counter_ns()
    assert subject.logits([3, 4], "decode").shape == (2, 256)
    assert {line["op"] for line in subject.executed()} == {"prefill", "decode"}
    subject.reset_executed()
    assert subject.executed() == []
    assert len(subject.describe()["code"]) == 16
    with pytest.raises(SubjectUnsupported, match="stays there"):
        subject.export_state()
    subject.close()


def test_faults_cross_the_pipe_with_their_kind(tmp_path: Path) -> None:
    subject = remote(tmp_path, oom_at=8, fail_at=0)
    with pytest.raises(SubjectOutOfMemory, match="9 tokens"):
        subject.prefill([0] * 9)
    with pytest.raises(ValueError, match="at least one token"):
        subject.prefill([])
    subject.reset()
    assert subject.prefill([1]).chunks == [1]


def test_a_child_that_dies_is_named_and_started_again(tmp_path: Path) -> None:
    subject = remote(tmp_path)
    subject.prefill([1, 2])
    assert subject._child is not None
    os.kill(subject._child._process.pid, signal.SIGKILL)
    with pytest.raises(RemoteError, match="SIGKILL"):
        subject.decode(1, 1)
    with pytest.raises(RemoteError, match="with it the sequence"):
        subject.decode(1, 1)
    subject.reset()
    assert subject.prefill([1, 2]).chunks == [2]


def test_a_cap_in_mid_call_leaves_no_answer_for_the_next_question(tmp_path: Path) -> None:
    subject = remote(tmp_path, ns_per_step=2_000_000_000)
    subject.prefill([1])

    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(TimeoutError):
            subject.decode(1, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    subject.reset()
    assert subject.position() == 0


# -- the command line --------------------------------------------------------------------------------


def planned(tmp_path: Path, *words: str) -> plan.Plan:
    request = compose.request(words, tmp_path)
    return plan.make(request, models.find(request), this_machine())


def test_base_makes_two_sides_and_a_repeat_in_processes_of_their_own(tmp_path: Path) -> None:
    other = checkout(tmp_path / "other")
    made = planned(tmp_path, f"base={other}", "frontiers=[64]").job
    assert [(arm.name, arm.aa) for arm in made.arms] == [("base", False), ("head", False), ("head.again", True)]
    assert [arm.options["checkout"] for arm in made.arms] == [str(other), str(ROOT), str(ROOT)]
    assert len({arm.options["checkout"] + arm.options["process"] for arm in made.arms}) == 3
    assert [(c.arm, c.reference) for c in made.contrasts] == [("head", "base"), ("head.again", "head")]
    same = planned(tmp_path, f"base={ROOT}", "frontiers=[64]").job
    # Equal code on both sides is a question all the same, not an arm and its repeat.
    assert same.arms[0].hash != same.arms[1].hash == same.arms[2].hash
    json.dumps(made.settings)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["base=nowhere"], "is no checkout"),
        (["head=."], "goes with base="),
        (["base=.", "ablation=gdn_scan"], "two questions"),
        (["base=.", "decode.cache=shared", "phases=[decode]"], "own"),
    ],
)
def test_base_that_makes_no_sense_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, SubjectError), match=said):
        planned(ROOT, *words)


def test_gate_refuses_a_checkout_that_is_not_there_and_a_sweep_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="git worktree add"):
        base_head.gate(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="left no rows"):
        base_head.gate(checkout(tmp_path / "b"), tmp_path / "w", measure=lambda words: 2)


def test_an_engine_that_does_not_load_is_named_in_one_line(tmp_path: Path) -> None:
    for name, text, said in (
        ("syntax", "def make(:", "SyntaxError: invalid syntax"),
        ("gone", "import sys; sys.exit(3)", "ended with code 3"),
        ("value", "def make(arm, model): raise ValueError('no such kernel')", "no such kernel"),
    ):
        side = checkout(tmp_path / name)
        (side / "lilybench_subject.py").write_text(text, encoding="utf-8")
        arm = Arm("head", "engine", options={"checkout": str(side), "process": ""})
        with pytest.raises(SubjectError, match=f"head: {side} cannot be loaded: .*{said}"):
            Remote(arm, two(tmp_path / "run", side, side, 1, 1, "r"))


@pytest.mark.parametrize("git", [True, False])
def test_code_behind_an_adapter_is_all_of_its_repository(git: bool, tmp_path: Path) -> None:
    side = checkout(tmp_path / "side")
    if git:
        (side / ".gitignore").write_text("made/\n", encoding="utf-8")
        subprocess.run(["git", "init", "-q"], cwd=side, check=True)
    (side / "core").mkdir()
    (side / "core" / "step.py").write_text("fast = True\n", encoding="utf-8")
    before = code_hash(side)
    (side / "made").mkdir()
    (side / "made" / "log.txt").write_text("no code", encoding="utf-8")
    assert code_hash(side) == before
    (side / "core" / "step.py").write_text("fast = False\n", encoding="utf-8")
    assert code_hash(side) != before


def test_a_comma_in_the_work_folder_separates_no_jobs(tmp_path: Path) -> None:
    words: list[str] = []

    def measure(given: Sequence[str]) -> int:
        words.extend(given)
        return 2

    with pytest.raises(ReportError, match="left no rows"):
        base_head.gate(checkout(tmp_path / "it's, x=1"), tmp_path / "a, 'b' \"c\"", measure=measure)
    (job,) = compose.jobs(compose.parse(words))
    assert compose.request(job).run_dir == tmp_path / "a, 'b' \"c\"" / "first"
