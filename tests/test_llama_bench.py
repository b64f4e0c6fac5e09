"""llama-bench's own output becomes rows of the same table; whatever fails gives one clear reason."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from sweeps.points import Arm, Job, Point
from sweeps.rows import tokens_per_second
from sweeps.subjects import llama_bench
from sweeps.subjects.llama_bench import LlamaBenchError

RECORDED = json.loads((Path(__file__).parent / "data" / "llama_bench.json").read_text(encoding="utf-8"))
POINTS = [
    Point("p256", "prefill", 256, 1),
    Point("p512", "prefill", 512, 1),
    Point("d256", "decode", 256, 1, decode_tokens=64),
    Point("d4k", "decode", 4096, 1, decode_tokens=64),
]


def job(points=POINTS) -> Job:
    return Job("/run", "r1", {}, {}, [], [], points, 1, 0, 60.0, 20.0)


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(16))
    return path


def program(folder: Path, body: str) -> Path:
    path = folder / "llama-bench"
    path.write_text("#!/bin/sh\n" + body, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def arm(binary, gguf) -> Arm:
    return Arm("llama.cpp", "llama_bench", options={"binary": str(binary), "gguf": str(gguf)}, hash="h")


def replaying(tmp_path: Path) -> Path:
    for phase in ("prefill", "decode"):
        (tmp_path / f"{phase}.json").write_text(json.dumps(RECORDED[phase]), encoding="utf-8")
    body = f'case "$*" in *" -d "*) cat {tmp_path}/decode.json;; *) cat {tmp_path}/prefill.json;; esac\n'
    return program(tmp_path, body)


def test_one_row_for_each_repetition_and_their_rates_are_llama_benchs_own(tmp_path, gguf):
    rows = list(llama_bench.measure(arm(replaying(tmp_path), gguf), job(), session=2))
    assert [r.point for r in rows] == ["p256"] * 5 + ["p512"] * 5 + ["d256"] * 3 + ["d4k"] * 3
    assert [r.slot for r in rows[:5]] == [0, 1, 2, 3, 4] and all(r.session == 2 and r.block == -1 for r in rows)
    theirs = [t for part in ("prefill", "decode") for result in RECORDED[part] for t in result["samples_ts"]]
    assert [tokens_per_second(r) for r in rows] == pytest.approx(theirs, rel=1e-5)
    assert rows[0].extra["build_commit"] == "0c1e570" and rows[0].extra["gpu_info"] == "NVIDIA H200"
    assert rows[0].flags == ["own_clock"]


def test_commands_ask_for_flash_attention_batch_and_all_points_at_once():
    prefill, decode = (line for line, _ in llama_bench.commands(Path("b"), Path("m.gguf"), POINTS))
    assert prefill == "b -m m.gguf -o json -r 5 -fa 1 -b 2048 -p 256,512 -n 0".split()
    assert decode == "b -m m.gguf -o json -r 5 -fa 1 -b 2048 -p 0 -n 64 -d 256,4096".split()


def test_missing_test_in_the_output_is_an_error_row(tmp_path, gguf):
    extra = [*POINTS, Point("p1k", "prefill", 1024, 1)]
    rows = list(llama_bench.measure(arm(replaying(tmp_path), gguf), job(extra), 0))
    (row,) = [r for r in rows if r.point == "p1k"]
    assert row.status == "error" and "no such test" in row.reason


def test_missing_binary_or_model_skips_every_point_with_one_reason(tmp_path, gguf):
    rows = list(llama_bench.measure(arm(tmp_path / "absent", gguf), job(), 0))
    assert len(rows) == len(POINTS)
    assert {r.status for r in rows} == {"skipped"}
    assert "subject.binary" in rows[0].reason
    with pytest.raises(LlamaBenchError, match=r"subject\.gguf"):
        llama_bench.check(arm(replaying(tmp_path), tmp_path / "no.gguf"))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"safetensors")
    with pytest.raises(LlamaBenchError, match="no GGUF"):
        llama_bench.check(arm(replaying(tmp_path), other))
    plain = tmp_path / "plain"
    plain.write_text("", encoding="utf-8")
    with pytest.raises(LlamaBenchError, match="not executable"):
        llama_bench.check(arm(plain, gguf))
    with pytest.raises(LlamaBenchError, match="no binary given"):
        llama_bench.check(Arm("x", "llama_bench"))


@pytest.mark.parametrize(
    "body, status, reason",
    [
        ("echo 'error: unable to load model' >&2; exit 1\n", "error", "exit code 1: error: unable to load model"),
        ("echo 'ggml_cuda: out of memory' >&2; exit 134\n", "oom", "out of memory"),
        ("echo hello\n", "error", "no JSON"),
        ("echo '{}'\n", "error", "no list of results"),
        ("echo '[{\"n_prompt\": 1}]'\n", "error", "lacks build_commit"),
        ("exit 3\n", "error", "exit code 3: nothing on stderr"),
    ],
)
def test_what_fails_gives_one_line(tmp_path, gguf, body, status, reason):
    rows = list(llama_bench.measure(arm(program(tmp_path, body), gguf), job(), 0))
    assert len(rows) == len(POINTS)
    assert {r.status for r in rows} == {status}
    assert reason in rows[0].reason and "\n" not in rows[0].reason


def test_samples_of_zero_are_refused():
    broken = [{**RECORDED["prefill"][0], "samples_ns": [0]}]
    with pytest.raises(LlamaBenchError, match="above zero"):
        llama_bench.parse(json.dumps(broken))


def test_time_limit(tmp_path, gguf):
    late = job(POINTS[:1])
    late.cap_seconds = 0.2
    (row,) = llama_bench.measure(arm(program(tmp_path, "exec sleep 5\n"), gguf), late, 0)
    assert row.status == "timeout" and "not done" in row.reason
