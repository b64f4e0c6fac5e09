"""The gate's verdicts: one for every kind of broken or foreign input, and rates on recorded noise."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_rows as rows
from sessions import job, points

from reports import announce, kept
from reports.__main__ import main
from reports.gate import DOUBTS, Answer, gate
from reports.load import ReportError
from sweeps.contrasts import contrast_rows
from sweeps.points import Arm, Contrast
from sweeps.rows import ContrastRow, RunRow, SampleRow

Tables = tuple[list[RunRow], list[SampleRow], list[ContrastRow]]


def tables(run_id: str = "r1", ratio: float = 1.0, sessions: int = 3, began: int = 0, **contrast: Any) -> Tables:
    """Base against head at one point, `sessions` processes."""
    salt = random.Random(run_id).randrange(1000)
    samples = [
        rows.sample(arm, "decode", 256, s, b, slot, run_id=run_id, arm_hash=f"h-{arm}")
        for s in range(sessions)
        for b in range(2)
        for slot, arm in enumerate(("head", "base"))
    ]
    for row in samples:
        row.elapsed_ns = int((row.elapsed_ns or 0) / (ratio if row.arm == "head" else 1)) + salt
    word = "slower" if ratio < 0.97 else "same"
    low, high = ratio * 0.997, ratio * 1.003
    contrast.setdefault("ratio", contrast.pop("number", ratio))
    values = {"low": low, "high": high, "verdict": word, "units": sessions, "run_ids": [run_id]}
    answer = rows.contrast("decode", 256, "head", "base", contrast="head vs base", **(values | contrast))
    arms = {
        "base": {"identity": {"experts": "a" * 16, "head": "c" * 16}, "commit": "1" * 40, "code": "x"},
        "head": {"identity": {"experts": "b" * 16, "head": "c" * 16}, "commit": "2" * 40, "code": "y"},
    }
    processes = [
        rows.run_row(s, run_id, started=f"2026-11-30T0{began + s}:00:00Z", model={**rows.REAL, "arms": arms})
        for s in range(sessions)
    ]
    return processes, samples, [answer]


def write(folder: Path, made: Tables, plan: dict[str, Any] | None = None) -> Path:
    return rows.write_run(folder, *made, job=plan)


def changed(made: Tables, **machine: Any) -> Tables:
    """The same on another machine."""
    runs, samples, contrasts = made
    return [dataclasses.replace(r, machine={**r.machine, **machine}) for r in runs], samples, contrasts


def kinds(answer: Answer) -> list[str]:
    return [doubt.kind for doubt in answer.doubts]


# -- inputs that decide nothing, each with a verdict of its own --------------------------------------


def test_unchanged_code_passes_and_a_confirmed_slowdown_fails(tmp_path: Path) -> None:
    same, slow = write(tmp_path / "same", tables()), write(tmp_path / "slow", tables("slow", 0.95))
    assert gate(same).code == 0
    first = gate(slow)
    assert first.code == 2 and first.suspects == ("head vs base decode 256",)
    again = write(tmp_path / "again", tables("again", 0.95, began=5))
    answer = gate(slow, [again])
    assert answer.code == 1
    assert "experts (aaaaaaaa to bbbbbbbb)" in answer.reason and "head (" not in answer.reason
    assert "decode at 256 is 5.3\N{NO-BREAK SPACE}% slower" in answer.reason
    cleared = gate(slow, [write(tmp_path / "cleared", tables("cleared", 1.0, began=5))])
    assert cleared.code == 0 and cleared.lines[0].word == "not confirmed"


def plan(**point: Any) -> dict[str, Any]:
    """The plan of `tables`, at two contexts."""
    arms = [{"name": "base", "subject": "engine"}, {"name": "head", "subject": "engine"}]
    arms.append({"name": "head.again", "subject": "engine", "aa": True})
    asked = [("head vs base", "head", "base"), ("A/A", "head.again", "head")]
    made = {
        "run_id": "r1",
        "arms": arms,
        "contrasts": [dict(zip(("name", "arm", "reference"), names)) for names in asked],
        "points": [{"phase": "decode", "frontier": f, "skip": {}, **point} for f in (256, 512)],
    }
    return made


def nan_times(made: Tables) -> Tables:
    runs, samples, contrasts = made
    return (
        runs,
        [dataclasses.replace(row, elapsed_ns=math.nan) if row.arm == "head" else row for row in samples],
        contrasts,
    )


def copied(made: Tables) -> Tables:
    runs, samples, contrasts = made
    base = {(r.session, r.block): r.elapsed_ns for r in samples if r.arm == "base"}
    return runs, [dataclasses.replace(row, elapsed_ns=base[row.session, row.block]) for row in samples], contrasts


def half_skipped(made: Tables) -> Tables:
    runs, samples, contrasts = made
    lost = rows.sample("head", "decode", 256, 2, 1, status="skipped", elapsed_ns=None, reason="the budget is used up")
    return runs, [*samples[:-2], lost], contrasts


def exchanged(made: Tables) -> Tables:
    runs, samples, contrasts = made
    for run in runs:
        run.model = {**run.model, "arms": {"base": {"commit_time": 200}, "head": {"commit_time": 100}}}
    return runs, samples, contrasts


BROKEN: dict[str, tuple[str, Callable[[], Tables], dict[str, Any] | None]] = {
    "empty": ("no rows", lambda: ([], [], []), None),
    "point without an answer": ("missing", tables, plan()),
    "NaN ratio": ("not a number", lambda: tables(low=math.nan, high=math.nan, number=math.nan), None),
    "NaN times": ("not a number", lambda: nan_times(tables()), None),
    "identical sides": ("identical", lambda: copied(tables()), None),
    "exchanged checkouts": ("swapped", lambda: exchanged(tables()), None),
    "partly skipped": ("partly skipped", lambda: half_skipped(tables()), None),
    "not run here": (
        "not run",
        lambda: tables(verdict="unsupported", number=None, low=None, high=None, reason="needs Metal"),
        None,
    ),
    "virtual device": ("paravirtual", lambda: changed(tables(), paravirtual=True), None),
    "noisy": ("noisy", lambda: tables(margin=0.2), None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_has_its_own_verdict(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, make, planned = BROKEN[name]
    made = make()
    folder = write(tmp_path / "run", made, planned)
    answer = gate(folder)
    assert answer.code == 2 and kind in kinds(answer), answer.reason
    assert main(["gate", str(folder)]) == 2
    assert f"{kind}: " in capsys.readouterr().out


def test_every_kind_of_doubt_is_listed(tmp_path: Path) -> None:
    assert {kind for kind, _, _ in BROKEN.values()} <= set(DOUBTS)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    assert kinds(gate(tmp_path / "nowhere")) == ["unreadable"]
    folder = write(tmp_path / "run", tables())
    text = (folder / "samples.jsonl").read_text(encoding="utf-8")
    (folder / "samples.jsonl").write_text(text.replace('"schema": 1', '"schema": 7'), encoding="utf-8")
    answer = gate(folder)
    assert answer.code == 2 and kinds(answer) == ["other schema"] and "7" in answer.reason
    torn = write(tmp_path / "torn", tables())
    with (torn / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"run_id": "r1", "sess')
    assert "torn" in kinds(gate(torn))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"chip": "Apple M8"}, "other machine"),
        ({"memory": 64 * rows.GIB}, "other machine"),
        ({"os": "macOS 28.0"}, "other version"),
        ({"versions": {"mlx": "0.40.0", "mlx_lm": "0.32.2"}}, "other version"),
    ],
)
def test_another_machine_or_version_confirms_nothing_and_is_no_baseline(
    change: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    slow = write(tmp_path / "slow", tables("slow", 0.95))
    elsewhere = write(tmp_path / "elsewhere", changed(tables("again", 0.95, began=5), **change))
    answer = gate(slow, [elsewhere])
    assert answer.code == 2 and kind in kinds(answer)
    old = write(tmp_path / "old", changed(tables("old", began=0), **change))
    assert kind in kinds(gate(write(tmp_path / "new", tables("new", began=5)), baseline=old))


def test_a_confirmation_reads_text_of_its_own_of_the_same_kind(tmp_path: Path) -> None:
    """Its seed is another one, so its prompts are; a baseline of another text is none."""
    slow = write(tmp_path / "slow", tables("slow", 0.95))

    def reading(name: str, began: int, **prompt: str) -> Path:
        runs, samples, contrasts = tables(name, 0.95, began=began)
        runs = [dataclasses.replace(r, prompt={**r.prompt, **prompt}) for r in runs]
        return write(tmp_path / name, (runs, samples, contrasts))

    fresh = reading("fresh", 5, hash="dcba")
    assert gate(slow, [fresh]).code == 1
    assert "other model" in kinds(gate(fresh, baseline=slow))
    other = gate(slow, [reading("random", 5, kind="random")])
    assert other.code == 2 and "prompt kind is random in the confirmation, text in the run" in other.reason


@pytest.mark.parametrize("where", ["code", "commit", "arm_hash"])
def test_other_code_confirms_and_clears_nothing(where: str, tmp_path: Path) -> None:
    slow = write(tmp_path / "slow", tables("slow", 0.95))
    for ratio in (0.95, 1.0):
        runs, samples, contrasts = tables("again", ratio, began=5)
        for run in runs:
            arms = run.model["arms"]
            if where == "code":
                run.model = {**run.model, "arms": {**arms, "head": {**arms["head"], "code": "z"}}}
        if where == "commit":
            # An engine in the harness's own process is the harness's commit.
            for run in runs:
                run.model = {**run.model, "arms": {}}
                run.git = {"commit": "f" * 40}
        if where == "arm_hash":
            samples = [dataclasses.replace(row, arm_hash="other") if row.arm == "head" else row for row in samples]
        answer = gate(slow, [write(tmp_path / f"{where}{ratio}", (runs, samples, contrasts))])
        assert answer.code == 2 and "other code" in kinds(answer), answer.reason


def test_a_confirmation_is_later_and_is_no_copy(tmp_path: Path) -> None:
    slow = write(tmp_path / "slow", tables("slow", 0.95, began=5))
    early = write(tmp_path / "early", tables("early", 0.95, began=0))
    assert "swapped" in kinds(gate(slow, [early])) and gate(slow, [early]).code == 2
    runs, samples, contrasts = tables("slow", 0.95, began=6)
    for row in (*runs, *samples):
        row.run_id = "copy"
    contrasts[0].run_ids = ["copy"]
    answer = gate(slow, [write(tmp_path / "copy", (runs, samples, contrasts))])
    assert answer.code == 2 and "identical" in kinds(answer)
    with pytest.raises(ReportError, match="sessions of its own"):
        gate(slow, [slow])


def test_fresh_sessions_that_see_nothing_do_not_clear_a_suspect(tmp_path: Path) -> None:
    slow = write(tmp_path / "slow", tables("slow", 0.95))
    vague = tables("vague", 0.96, began=5, low=0.88, high=1.05, verdict="unclear")
    answer = gate(slow, [write(tmp_path / "vague", vague)])
    assert answer.code == 2 and kinds(answer) == ["unconfirmed"]


@pytest.mark.parametrize(("low", "margin", "code"), [(0.97, 0.02, 0), (0.93, 0.02, 2), (0.97, 0.06, 2)])
def test_unclear_passes_only_where_five_percent_are_ruled_out(
    low: float, margin: float, code: int, tmp_path: Path
) -> None:
    made = tables(sessions=5, verdict="unclear", number=1.0, low=low, high=1 / low, margin=margin)
    assert gate(write(tmp_path / "run", made)).code == code


def test_what_is_ignored_is_said(tmp_path: Path) -> None:
    made = tables(verdict="unsupported", reason="needs Metal")
    good = rows.contrast("decode", 512, "head", "base", contrast="head vs base", ratio=1, low=0.999, high=1.001)
    folder = write(tmp_path / "run", (made[0], made[1], [*made[2], dataclasses.replace(good, verdict="same")]))
    assert gate(folder).code == 2
    answer = gate(folder, ignore=["head vs base decode 256"])
    assert answer.code == 0 and "head vs base decode 256" in answer.notes[0]


# -- baselines ---------------------------------------------------------------------------------------


def test_baseline_is_kept_found_and_renewed_on_purpose_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = (write(tmp_path / n, tables(n, margin=0.05, began=b)) for n, b in (("old", 0), ("new", 4)))
    assert main(["baseline", str(old), "main"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == Path("reports/published/apple-m9-max/main")
    assert main(["gate", str(new), "--baseline", "main"]) == 0
    assert main(["baseline", str(new), "main"]) == 2
    assert "--renew" in capsys.readouterr().err
    before = (folder / "samples.jsonl").read_bytes()
    assert main(["baseline", str(new), "main", "--renew"]) == 0
    assert (folder / "samples.jsonl").read_bytes() != before
    assert main(["gate", str(new), "--baseline", "mian"]) == 2
    assert "kept for this chip: main" in capsys.readouterr().err


def test_slower_than_the_baseline(tmp_path: Path) -> None:
    old = write(tmp_path / "old", tables("old", 1.0, 5, margin=0.03))
    slow = write(tmp_path / "slow", tables("slow", 0.9, 5, began=4, margin=0.03))
    again = write(tmp_path / "again", tables("again", 0.9, 5, began=5, margin=0.03))
    answer = gate(slow, [again], baseline=old)
    assert answer.code == 1 and "head then and now decode 256" in answer.reason
    assert [line.word for line in answer.lines if line.contrast.startswith("base")] == ["ok"]


def test_baseline_against_itself_and_against_the_past(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", tables("old")), write(tmp_path / "new", tables("new", began=4))
    assert "identical" in kinds(gate(old, baseline=old))
    assert "swapped" in kinds(gate(old, baseline=new))


def test_changed_kernels_are_compared_and_said(tmp_path: Path) -> None:
    old, new = tables("old"), tables("new", began=4)
    for row in new[1]:
        row.arm_hash = "other" if row.arm == "head" else row.arm_hash
    for run in new[0]:
        run.model["arms"]["head"]["identity"]["experts"] = "f" * 16
    answer = gate(write(tmp_path / "new", new), baseline=write(tmp_path / "old", old))
    said = " ".join(answer.notes)
    assert "head: settings or kernels differ" in said and "ops changed since the baseline: experts" in said


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: changed(tables(), paravirtual=True), "virtual device"),
        (lambda: tables(sessions=1), "one session"),
        (lambda: ([dataclasses.replace(r, git={"dirty": True}) for r in tables()[0]], *tables()[1:]), "uncommitted"),
        (lambda: ([], [], []), "no process"),
    ],
)
def test_unfit_runs_are_no_baseline(made: Callable[[], Tables], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=reason):
        kept.keep(write(tmp_path / "run", made()), "main", published=tmp_path / "published")
    assert not (tmp_path / "published").exists()


# -- what it says ------------------------------------------------------------------------------------


def test_forms_agree_on_the_verdict(tmp_path: Path) -> None:
    slow = gate(
        write(tmp_path / "slow", tables("slow", 0.95)), [write(tmp_path / "again", tables("again", 0.95, began=5))]
    )
    page, xml = announce.markdown(slow), ET.fromstring(announce.junit(slow))
    assert page.startswith("## Gate: slower") and "5.3\N{NO-BREAK SPACE}% slower" in page and "experts" in page
    assert xml.get("failures") == "1" and xml.get("skipped") == "0"
    (line,) = announce.annotated(slow)
    assert line.startswith("::error title=slower::") and "256" in line

    doubtful = gate(write(tmp_path / "noisy", tables(margin=0.2)))
    assert "neutral" in announce.markdown(doubtful) and "counts as failure" in announce.markdown(doubtful, strict=True)
    assert ET.fromstring(announce.junit(doubtful)).get("failures") == "0"
    assert int(ET.fromstring(announce.junit(doubtful, strict=True)).get("failures") or 0) > 0
    assert all(line.startswith("::warning") for line in announce.annotated(doubtful))
    assert all(line.startswith("::error") for line in announce.annotated(doubtful, strict=True))


def test_summary_junit_and_annotations_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "step.md"
    step.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    doubtful = write(tmp_path / "noisy", tables(margin=0.2))
    junit, summary = tmp_path / "j.xml", tmp_path / "s.md"
    options = ["--junit", str(junit), "--summary", str(summary)]
    assert main(["gate", str(doubtful), *options]) == 2
    out = capsys.readouterr().out
    assert "::warning" in out and out.splitlines()[-1].startswith("cannot tell")
    assert step.read_text(encoding="utf-8").startswith("before\n## Gate")
    assert summary.read_text(encoding="utf-8").startswith("## Gate") and ET.parse(junit)
    assert main(["gate", str(doubtful), "--neutral"]) == 0
    assert main(["gate", str(doubtful), "--strict"]) == 2


def test_a_file_that_cannot_be_written_hides_no_slowdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, again = write(tmp_path / "slow", tables("slow", 0.95)), write(tmp_path / "again", tables("again", 0.95, 5))
    same, nowhere = write(tmp_path / "same", tables("same")), str(tmp_path / "nowhere" / "file")
    for option in ("--junit", "--summary"):
        assert main(["gate", str(slow), "--confirm", str(again), option, nowhere]) == 1
        said = capsys.readouterr()
        assert said.out.startswith("confirmed slower") and f"{nowhere}: No such file" in said.err
        assert main(["gate", str(same), option, nowhere, "--neutral"]) == 2
        assert capsys.readouterr().out.startswith("no confirmed slowdown in 1 contrast\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base", ""], "names no folder"),
        (["--base", ".", "--head", " "], "names no folder"),
        (["--base", ".", "--baseline", "main"], "--baseline judges a RUN"),
        (["--base", ".", "--confirm", "a", "--accept", "os"], "--confirm, --accept judges a RUN"),
        (["run", "--set", "sessions=3"], "--set goes with --base"),
        (["run", "--head", "x", "--work", "y"], "--head, --work goes with --base"),
    ],
)
def test_words_that_would_change_nothing_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["gate", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2 and said in capsys.readouterr().err


def test_stopped_by_hand_is_no_slowdown_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reports.base_head.gate", stop)
    assert main(["gate", "--base", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_junit_is_xml_whatever_rows_hold(tmp_path: Path) -> None:
    nasty = "a<&\"' \x1b[0m \x00 \ud800 \ufffe"
    slow = gate(
        write(tmp_path / "slow", tables("slow", 0.95)), [write(tmp_path / "again", tables("again", 0.95, began=5))]
    )
    (line,) = slow.lines
    for word in ("slower", "cannot tell", "ok"):
        answer = dataclasses.replace(
            slow, lines=(dataclasses.replace(line, name=nasty, contrast=nasty, reason=nasty, word=word),)
        )
        (case,) = (c for c in ET.fromstring(announce.junit(answer).encode()) if c.get("classname") == "gate.decode")
        assert (case.get("name") or "").startswith("a<&\"' ")


def test_a_reason_cannot_start_a_workflow_command(tmp_path: Path) -> None:
    answer = gate(
        write(tmp_path / "r", tables(verdict="unsupported", reason="x\n::error::forged\n%0A::stop-commands::"))
    )
    for line in announce.annotated(answer):
        assert "\n" not in line and "%0A" not in line


# -- rates on a simulated clock with recorded noise --------------------------------------------------

NOISE = json.loads((Path(__file__).parent / "data" / "noise.json").read_text(encoding="utf-8"))

DESIGNS = {
    ("cpu", "decode"): (5, 60),
    ("cpu", "prefill"): (5, 60),
    ("h200", "prefill"): (5, 8),
    ("h200", "decode"): (20, 40),
}
"""Sessions and blocks a session with which a slowdown of 5 % is found on that machine's noise.

Two processes of the recorded H200 came apart by 2.6 % (a host-bound step), so decoding there takes 20 sessions.
"""


def simulated(folder: Path, machine: str, phase: str, slow: float, seed: int, began: int = 0) -> Path:
    """A run whose clock is simulated: every window takes its true time, times what a recorded machine added.

    The arms of a block come apart like blocks of the recording (stretches of it, in order of time), and processes like
    its sessions. `slow` is the time that head, and head.again, take over base's, through the op `experts`.
    """
    sessions, blocks = DESIGNS[machine, phase]
    generator = random.Random(f"{machine} {phase} {slow} {seed} {began}")
    run_id = folder.name
    factor = {"base": 1.0, "head": slow, "head.again": slow}
    made: list[SampleRow] = []
    for session in range(sessions):
        noise = {arm: _stretch(generator, NOISE[machine][phase], blocks) for arm in factor}
        for block in range(blocks):
            order = generator.choice((["base", "head", "head.again"], ["head.again", "head", "base"]))
            for slot, arm in enumerate((*order, *reversed(order))):
                elapsed = 5e8 * factor[arm] * math.exp(noise[arm][block])
                where = {"run_id": run_id, "point": phase, "arm_hash": arm, "flags": ["aa"] if "again" in arm else []}
                made.append(rows.sample(arm, phase, 256, session, block, slot, elapsed_ns=int(elapsed), **where))
    arms = [Arm(name, "engine", hash=name, aa=name == "head.again") for name in factor]
    contrasts = [Contrast("head vs base", "head", "base"), Contrast("A/A", "head.again", "head")]
    point = dataclasses.replace(points((256,), blocks)[0], key=phase, phase=phase)  # type: ignore[arg-type]
    what = dataclasses.replace(job(folder, arms, [point], sessions=sessions), contrasts=contrasts, run_id=run_id)
    code = {"base": "a", "head": "b" if slow != 1 else "a"}
    facts = {"arms": {name: {"identity": {"experts": c, "linear": "same"}} for name, c in code.items()}}
    started = f"2026-11-{10 + began}T00:00:00Z"
    processes = [rows.run_row(s, run_id, started=started, model={"name": "m", **facts}) for s in range(sessions)]
    plan = json.loads(json.dumps(dataclasses.asdict(what)))
    return rows.write_run(folder, processes, made, contrast_rows(what, made), plan)


def _stretch(generator: random.Random, recorded: dict[str, Any], blocks: int) -> list[float]:
    """Logs of one arm's times in one process: two arms differ by as much as the recording says."""
    offset = generator.gauss(0, recorded["sd_session"] / math.sqrt(2))
    made: list[float] = []
    while len(made) < blocks:
        series = generator.choice(recorded["blocks"])
        start, mean = generator.randrange(len(series)), statistics.fmean(series)
        # Short series have lost the part of their spread that their own mean took with it.
        scale = math.sqrt(len(series) / (len(series) - 1) / 2)
        made += [offset + scale * (x - mean) for x in (*series[start:], *series[:start])]
    return made[:blocks]


def two_stages(folder: Path, machine: str, phase: str, slow: float, seed: int) -> Answer:
    """The gate as CI runs it: fresh sessions where something looks slower."""
    run = simulated(folder / f"run{seed}", machine, phase, slow, seed)
    answer = gate(run)
    if not answer.suspects:
        return answer
    return gate(run, [simulated(folder / f"fresh{seed}", machine, phase, slow, seed, began=1)])


def rates(folder: Path, machine: str, phase: str, slow: float, runs: int) -> list[Answer]:
    return [two_stages(folder, machine, phase, slow, seed) for seed in range(runs)]


def names_it(answer: Answer, phase: str) -> bool:
    """Whether a slowdown is confirmed and named: op, phase, frontier, and a size near the truth."""
    line = next(line for line in answer.lines if line.contrast == "head vs base")
    size = 1 / (line.confirmed_ratio or 1) - 1
    named = line.changed == ("experts (a to b)",) and (line.phase, line.frontier) == (phase, 256)
    said = f"head vs base {phase} 256" in answer.reason and "changed ops: experts" in answer.reason
    return answer.code == 1 and named and said and 0.03 < size < 0.07


def test_simulated_slowdown_is_found_and_none_is_invented(tmp_path: Path) -> None:
    assert all(names_it(a, "prefill") for a in rates(tmp_path / "slow", "h200", "prefill", 1.05, 3))
    assert all(a.code == 0 for a in rates(tmp_path / "same", "h200", "prefill", 1.0, 3))


@pytest.mark.full
@pytest.mark.parametrize(("machine", "phase"), DESIGNS)
def test_simulated_rates(machine: str, phase: str, tmp_path: Path) -> None:
    slow = rates(tmp_path / "slow", machine, phase, 1.05, 20)
    found = sum(names_it(a, phase) for a in slow)
    same = [a.code for a in rates(tmp_path / "same", machine, phase, 1.0, 20)]
    print(
        f"{machine} {phase}: found and named {found} of 20; unchanged: {[same.count(c) for c in (0, 1, 2)]} of 0, 1, 2"
    )
    assert found >= 19
    assert same.count(1) == 0 and same.count(0) >= 16
