"""Shared runs name nobody: planted names of host, user, home and serial number are in none of the files."""

from __future__ import annotations

import dataclasses
import getpass
import gzip
import json
import re
import socket
import tarfile
from pathlib import Path

import pytest
import report_rows as rows

from reports import share
from reports.__main__ import main
from reports.load import ReportError, read_rows, runs_of

HOST, USER, SERIAL = "kestrel-07.example.net", "wilhelmina", "C02XK9ZZJHD5"
UUID, MAC, MAIL = "GPU-8f2a6b10-1111-2222-3333-444455556666", "a4:83:e7:12:34:56", "wil@example.org"
PLANTED = (HOST, HOST.split(".")[0], USER, SERIAL, UUID, MAC, MAIL, f"/Users/{USER}", "10.1.2.3")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that gives its owner away wherever a row holds free text."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    runs, contrasts = [rows.run_row()], [rows.contrast("decode", 256)]
    samples = [rows.sample(arm, "decode", 256, slot=n) for n, arm in enumerate(("full", "mlx_lm", "mlx_lm", "full"))]
    home = f"/Users/{USER}"
    machine = rows.MAC | {"hostname": HOST, "serial_number": SERIAL, "gpu": {"uuid": UUID, "mac_address": MAC}}
    told = [
        dataclasses.replace(
            run,
            argv=[f"{home}/lily/sweeps/__main__.py", f"run_dir={home}/runs/a", "url=http://10.1.2.3:80/v1"],
            config={"run_dir": f"{home}/runs/a", "subject": {"binary": f"{home}/bin/x"}, "by": MAIL, "of": USER},
            machine=machine,
            conditions=run.conditions | {"note": f"{USER}'s Mac {SERIAL} on {HOST.split('.')[0]}"},
            model=run.model | {"path": f"{home}/models/a b"},
        )
        for run in runs
    ]
    samples[3] = dataclasses.replace(
        samples[3], status="error", elapsed_ns=None, reason=f"[Errno 13] {home}/x denied to {USER}@{HOST} ({SERIAL})"
    )
    job = {"run_dir": f"{home}/runs/a", "run_id": "r1", "arms": [], "points": [], "config": {"run_dir": home}}
    folder = rows.write_run(tmp_path / f"20261130-{USER}", told, samples, contrasts, job)
    (folder / "series").mkdir()
    (folder / "series" / f"{USER}-0.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "hydra").mkdir()
    (folder / "hydra" / "config.yaml").write_text(f"run_dir: {home}", encoding="utf-8")
    (folder / "conditions.jsonl").write_text(json.dumps({"who": USER}) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of nothing but its rows, for tests that one whole report is enough for."""

    def build(folders: list[Path], output: Path) -> Path:
        output.mkdir(parents=True)
        (output / "report.html").write_text(repr(read_rows(folders)), encoding="utf-8")
        return output / "report.html"

    monkeypatch.setattr(share, "build", build)


def everything(page: Path, archive: Path) -> str:
    """All that a reader of both files could see, names of files included."""
    with tarfile.open(archive) as tar:
        names = " ".join(f"{m.name} {m.uname} {m.gname} {m.uid}" for m in tar.getmembers())
    inside = gzip.decompress(archive.read_bytes()).decode("utf-8", errors="replace")
    return "\n".join([str(page), page.read_text(encoding="utf-8"), names, inside])


def test_nothing_planted_is_left_and_the_rows_still_make_the_report(run: Path, tmp_path: Path) -> None:
    page, archive = share.share(run)
    found = everything(page, archive)
    assert [name for name in PLANTED if name.lower() in found.lower()] == []
    assert USER in run.name and page.parent.name == "20261130-removed-shared"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    (folder,) = (tmp_path / "out").iterdir()
    assert not (folder / "hydra").exists()
    shared, own = read_rows([folder]), read_rows([run])
    assert [r.elapsed_ns for r in shared.samples] == [r.elapsed_ns for r in own.samples]
    assert shared.runs[0].machine["chip"] == own.runs[0].machine["chip"]
    assert shared.runs[0].argv[1] == "run_dir=~/runs/a"
    assert "denied" in (shared.samples[3].reason or "")


def test_this_machine_and_this_user_are_taken_out_as_well(
    run: Path, no_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "theophilus")
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/theophilus"))
    with (run / "conditions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"a": "/srv/people/theophilus/x", "b": "theophilus"}) + "\n")
    assert "theophilus" not in everything(*share.share(run))


def test_a_name_that_could_not_be_taken_out_stops_everything(
    run: Path, no_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share.Cleaner, "text", lambda self, value: value)
    with pytest.raises(ReportError, match="nothing was written"):
        share.share(run, run.parent / "out")
    assert not (run.parent / "out").exists()


def test_plain_words_and_paths_stay(run: Path) -> None:
    home = "/".join(("", "home", "al"))
    cleaner = share.Cleaner([("user", "root"), ("path", f"{home}/x")])
    for kept in ("python -m sweeps", "the root of the model", "alpha", "http://127.0.0.1:8080/v1", "a/b@rev"):
        assert cleaner.text(kept) == kept
    assert cleaner.text(f"{home}/models") == "~/models" and cleaner.text("/".join(("", "root", "x"))) == "~/x"


def test_command_writes_two_files_and_a_suite_is_one(
    run: Path, no_plots: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    run.rename(suite / "01-a")
    (suite / "suite.json").write_text("{}", encoding="utf-8")
    assert runs_of(suite) == [suite / "01-a"] and runs_of(suite / "01-a") == [suite / "01-a"]
    assert main(["share", str(suite)]) == 0
    written = capsys.readouterr().out.split()
    assert [Path(path).name for path in written] == ["report.html", "rows.tar.gz"]
    assert not re.search(USER, everything(*map(Path, written)))
    assert main(["share", str(tmp_path / "nowhere")]) == 2
    assert "no run folder" in capsys.readouterr().err
