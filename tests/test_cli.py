"""The two small commands in front of everything: `python -m engine` and `lilybench`."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import engine.__main__ as engine_cli
from reports import cli

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_model_that_is_not_there_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_cli.main([command, "--model", "/no/such/model"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{command}: --model /no/such/model") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("chat", "--top-k", "x"), "--top-k: invalid int value: 'x'"),
        (("serve", "--draft", "model"), "choose from 'off', 'mtp', 'ngram'"),
        (("doctor", "--bogus"), "unrecognized arguments: --bogus"),
        (("fetch", "bogus"), "choose from 'model', 'mtp'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_line_that_cannot_be_read_is_one_line(
    command: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        engine_cli.main(list(command))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and f"python -m engine {command[0]} --help" in line


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "engine.serve.server", raising=False)
    assert engine_cli.main(["serve"]) == 2
    err = capsys.readouterr().err
    assert "uvicorn" in err and ".[serve]" in err and err.count("\n") == 1


def test_unknown_engine_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_cli.main(["docter"]) == 2
    err = capsys.readouterr().err
    assert "'docter'" in err and "doctor" in err and err.count("\n") == 1


def test_engine_input_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from engine import doctor

    def refuse(argv: list[str]) -> int:
        raise ValueError("tensor x is missing")

    monkeypatch.setattr(doctor, "main", refuse)
    assert engine_cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "doctor: tensor x is missing\n"


def test_lilybench_has_every_command_of_the_readme() -> None:
    line = re.search(r"`lilybench ([a-z|]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert line and set(line[1].split("|")) == set(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_is_the_module_of_the_same_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    def record(module: str, run_name: str, alter_sys: bool) -> None:
        seen.append((module, sys.argv[1:]))
        raise SystemExit(7)

    monkeypatch.setattr(runpy, "run_module", record)
    monkeypatch.setattr(sys, "argv", ["lilybench"])
    module, lead, _ = cli.COMMANDS[name]
    assert cli.main([name, "a=b", "--c"]) == 7
    assert seen == [(module, [*lead, "a=b", "--c"])]


def test_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["swep"]) == 2
    assert "'swep'" in (err := capsys.readouterr().err) and "sweep" in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert "lilybench" in capsys.readouterr().out


def test_lilybench_reaches_the_engine_without_loading_mlx_itself() -> None:
    call = "sys.exit(cli.main(['chat', '--model', '/no']))"
    code = f"import sys; from reports import cli; assert 'mlx' not in sys.modules; {call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("chat: --model /no"), done.stderr
