"""Each bad input is one clear line on stderr that names the thing and the fix, exit code 2, nothing left behind."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from engine.synthetic import tiny_config, write_checkpoint
from sweeps.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def launch(tmp_path, monkeypatch):
    """An empty launch folder of its own."""
    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_config(), shard_bytes=1_000_000)


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a good checkpoint, to be broken."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def refused(capsys, *words: str) -> str:
    """The one line a refusal prints, after checking that it is one and that nothing was written."""
    before = sorted(Path.cwd().rglob("*"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in captured.err
    assert sorted(Path.cwd().rglob("*")) == before
    return lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["toggle.packed_deqant=off"], "packed_dequant"),
        (["toggle.gdn_scan=registrs"], "registers"),
        (["engine.decode.feedbak=host"], "engine.decode.feedback"),
        (["engine=plane"], "plain"),
        (["engine.linear=packd"], "it takes best, reference, mlx, expanded"),
        (["engine.experts.variant=groupd"], "did you mean 'grouped'?"),
        (["engine.linear="], "engine.linear="),
        (["run_dir="], "run_dir= is empty"),
        (["model.seed=x"], "model.seed=x is no count"),
        (["model.skew=1"], "it takes model=synthetic-35b"),
        (["subject.binary=/x"], "it takes subject=llama_bench"),
        (["sweep=publsh"], "publish"),
        (["ablation=a,b"], "-m"),
        (["frontiers=[300K]"], "8192"),
        (["frontiers=256,512"], "[256,512]"),
        (["model=tinny"], "'tiny'"),
        (["model=./missing"], "launch"),
        (["model=a b"], "a b"),
        (["model=a#b"], "a#b"),
        (["model=a%b"], "a%b"),
        (["model=a=b"], "a=b"),
        (["model='a,b'"], "a,b"),
        (["model=name@rev"], "name@rev"),
        (["tune", "frontiers=[256]"], "tune does not take frontiers="),
        (["tune", "-m", "model=a,b"], "one model at a time"),
        (["pack"], "pack RUN"),
        (["pack", "nowhere"], "no run folder"),
        (["unpack", "nowhere.tar.gz"], "does not exist"),
        (["subject=llama_bench"], "subject.binary"),
        (["budget=1s", "probe=false"], "budget"),
        (["part=5s"], "part=5s"),
        (["engine.prefill.chunk=0"], "engine.prefill.chunk=0"),
        (["engine.cache.step=-5"], "engine.cache.step=-5"),
    ],
)
def test_words(words, said, capsys):
    assert said in refused(capsys, *words)


def test_a_relative_path_from_another_folder_says_where_it_looked(capsys, tmp_path):
    (tmp_path / "models").mkdir()
    line = refused(capsys, "model=./models/mine")
    assert str(tmp_path / "launch" / "models" / "mine") in line and "full path" in line


def test_a_hub_model_that_is_not_here_names_the_command_that_fetches_it(capsys, monkeypatch):
    from engine import fetch

    monkeypatch.setattr(fetch, "cached", lambda *a, **k: None)
    line = refused(capsys, "model=org/name@abc", "probe=false")
    assert "model=org/name@abc fetch=true" in line


def test_a_hub_model_that_is_not_here_can_be_planned(capsys, monkeypatch):
    from engine import fetch

    monkeypatch.setattr(fetch, "cached", lambda *a, **k: None)
    assert main(["model=qwen3.6-35b", "sweep=ten", "dry_run=json", "budget=100h"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["missing"] and len(plan["frontiers"]) == 10
    assert not list(Path.cwd().iterdir())


def test_a_missing_shard(capsys, broken):
    victim = sorted(broken.glob("model-*.safetensors"))[1]
    victim.unlink()
    assert victim.name in refused(capsys, f"model={broken}")


def test_a_truncated_shard(capsys, broken):
    victim = sorted(broken.glob("model-*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-1000])
    assert victim.name in refused(capsys, f"model={broken}")


def test_an_index_that_names_an_absent_tensor(capsys, broken):
    path = broken / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["language_model.model.absent.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index), encoding="utf-8")
    assert "language_model.model.absent.weight" in refused(capsys, f"model={broken}")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("moe_intermediate_size", 128, "[32, 128"),
        ("model_type", "llama", "llama"),
        ("num_hidden_layers", 8, "layers.4"),
    ],
)
def test_a_config_that_does_not_fit_the_weights(field, value, said, capsys, broken):
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    config["text_config"][field] = value
    if field == "model_type":
        config[field] = value
    (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert said in refused(capsys, f"model={broken}")


def test_another_packing(capsys, broken):
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    config["quantization"]["mode"] = "mxfp4"
    (broken / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "mxfp4" in refused(capsys, f"model={broken}")


def test_a_folder_without_config(capsys, tmp_path):
    assert "config.json" in refused(capsys, f"model={tmp_path}")


def test_a_frontier_beyond_the_memory_of_the_machine(capsys, monkeypatch):
    from sweeps import forecast

    monkeypatch.setattr(forecast, "this_machine", lambda: forecast.apple("M1", 32))
    line = refused(capsys, "model=synthetic-35b", "frontiers=[128K]")
    assert "working set" in line and "frontiers=" in line


def test_a_model_too_large_for_the_machine(capsys, monkeypatch):
    from sweeps import forecast

    monkeypatch.setattr(forecast, "this_machine", lambda: forecast.apple("M1", 16))
    assert "working set" in refused(capsys, "model=synthetic-35b", "sweep=ten", "probe=false")


def test_no_free_disk(capsys, monkeypatch):
    full = type(shutil.disk_usage("."))(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "free" in refused(capsys, "probe=false")


def test_a_run_dir_that_is_a_file(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in refused(capsys, f"run_dir={tmp_path / 'file' / 'run'}", "probe=false")


def test_a_second_sweep_while_one_is_timing(capsys, monkeypatch, tmp_path):
    from sweeps import environment
    from sweeps.lock import device_lock

    monkeypatch.setattr(environment, "runtime_dir", lambda: tmp_path / "locks")
    with device_lock(tmp_path / "locks", environment.accelerator_key(), "the other run"):
        assert "the other run" in refused(capsys, "probe=false")


def test_one_bad_job_stops_all_before_the_first(capsys):
    assert "gdn_scn" in refused(capsys, "-m", "ablation=gdn_scan,gdn_scn", "dry_run=true")


def test_faults_of_the_program_are_one_line_too(capsys, monkeypatch):
    from sweeps import models

    def broken(request):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(models, "find", broken)
    assert main([]) == 1
    assert capsys.readouterr().err.strip().splitlines() == [
        "error: first second (RuntimeError; LILYBENCH_DEBUG=1 shows where)"
    ]
    monkeypatch.setenv("LILYBENCH_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main([])


@pytest.mark.parametrize("name", ["plain", "a,b", "a b", "a@b", "a=b", "a#b", "a%20b"])
def test_a_model_folder_of_any_name_is_taken(name, capsys, checkpoint, launch):
    shutil.copytree(checkpoint, launch / name)
    assert main([f"model=./{name}", "dry_run=json", "probe=false", "frontiers=[256]"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == name


# -- archives ----------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "my-run"
    (folder / "figures").mkdir(parents=True)
    (folder / "job.json").write_text("{}", encoding="utf-8")
    (folder / "figures" / "a.svg").write_text("<svg/>", encoding="utf-8")
    return folder


def test_a_run_travels_as_one_file(capsys, run_folder, tmp_path, launch):
    assert main(["pack", str(run_folder)]) == 0
    file = capsys.readouterr().out.strip()
    assert main(["unpack", file]) == 0
    assert (launch / "reports" / "runs" / "my-run" / "figures" / "a.svg").read_text(encoding="utf-8") == "<svg/>"
    assert capsys.readouterr().out.strip() == str(launch / "reports" / "runs" / "my-run")
    assert "exists already" in refused(capsys, "unpack", file)
    assert "exists already" in refused(capsys, "pack", str(run_folder))


def _archive(path: Path, *members: tuple[str, bytes | None]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("run/job.json", b"{}"), ("../evil", b"x")], "leads outside"),
        ([("run/job.json", b"{}"), ("/tmp/evil", b"x")], "leads outside"),
        ([("run/job.json", b"{}"), ("run/../../evil", b"x")], "leads outside"),
        ([("run/job.json", b"{}"), ("run/link", None)], "link"),
        ([("run/job.json", b"{}"), ("other/file", b"x")], "holds no run"),
        ([("run/file", b"x")], "holds no run"),
        ([], "holds no run"),
    ],
)
def test_archives_that_are_no_runs(members, said, capsys, tmp_path):
    assert said in refused(capsys, "unpack", str(_archive(tmp_path / "a.tar.gz", *members)))
    assert not (tmp_path / "evil").exists()


def test_a_place_that_cannot_be_written_is_not_the_archives_fault(capsys, run_folder, tmp_path):
    file = tmp_path / "a.tar.gz"
    assert "No such file" in refused(capsys, "pack", str(run_folder), str(tmp_path / "nowhere" / "a.tar.gz"))
    assert main(["pack", str(run_folder), str(file)]) == 0
    capsys.readouterr()
    assert "cannot unpack into" in refused(capsys, "unpack", str(file), str(run_folder / "job.json"))
    assert "is no file" in refused(capsys, "unpack", str(tmp_path))


def test_an_archive_with_damage_inside(capsys, run_folder, tmp_path):
    (run_folder / "noise").write_bytes(bytes(range(256)) * 400)
    assert main(["pack", str(run_folder), str(tmp_path / "a.tar.gz")]) == 0
    capsys.readouterr()
    data = bytearray((tmp_path / "a.tar.gz").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"x" * 40
    (tmp_path / "a.tar.gz").write_bytes(data)
    assert "no readable archive" in refused(capsys, "unpack", str(tmp_path / "a.tar.gz"))


def test_an_archive_cut_short(capsys, run_folder, tmp_path):
    (run_folder / "noise").write_bytes(bytes(range(256)) * 400)
    assert main(["pack", str(run_folder), str(tmp_path / "a.tar.gz")]) == 0
    capsys.readouterr()
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(whole[: len(whole) // 2])
    assert "no readable archive" in refused(capsys, "unpack", str(tmp_path / "a.tar.gz"))
