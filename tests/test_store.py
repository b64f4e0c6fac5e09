"""The run folder: nothing doubled, nothing lost but a torn line, other versions refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sweeps.points import Arm, Contrast, Job, Point
from sweeps.rows import ContrastRow, RowError, SampleRow
from sweeps.store import LAUNCHES, RETRY, Store, read_job, write_job


def sample(block: int = 0, slot: int = 0, status: str = "ok", **more) -> SampleRow:
    values = {"run_id": "r", "session": 0, "point": "p", "arm": "a", "arm_hash": "h", "subject": "stub"}
    values |= {"phase": "decode", "frontier": 256, "block": block, "slot": slot, "status": status}
    return SampleRow(**(values | more))


def test_rows_come_back_as_they_were_written(tmp_path):
    store = Store(tmp_path / "run")
    row = sample(work_tokens=8, elapsed_ns=5, flags=["hot"], extra={"trial": np.int64(3)}, chunks=[2, 1])
    store.append(row)
    (back,) = Store(tmp_path / "run").read().samples
    assert back == sample(work_tokens=8, elapsed_ns=5, flags=["hot"], extra={"trial": 3}, chunks=[2, 1])


def test_a_torn_last_line_is_not_read_and_set_aside_before_the_next_row(tmp_path):
    """kill -9 in the middle of a write must not glue two rows together or stop the next run."""
    store = Store(tmp_path)
    store.append(sample(0))
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"run_id": "r", "sess')
    tables = Store(tmp_path).read()
    assert ([row.block for row in tables.samples], tables.torn) == ([0], ["samples.jsonl"])
    assert path.read_bytes() != whole, "reading must change nothing"

    again = Store(tmp_path)
    again.append(sample(1))
    assert again.torn == ["samples.jsonl"]
    assert [json.loads(line)["block"] for line in path.read_text(encoding="utf-8").splitlines()] == [0, 1]
    assert (tmp_path / "samples.torn").read_text(encoding="utf-8") == '{"run_id": "r", "sess\n'


def test_a_last_line_of_zeros_is_torn_too(tmp_path):
    """A power loss can leave the length of a line without its bytes."""
    Store(tmp_path).append(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b"\0" * 40 + b"\n")
    store = Store(tmp_path)
    assert (len(store.read().samples), store.read().torn) == (1, ["samples.jsonl"])
    store.append(sample(1))
    assert [row.block for row in Store(tmp_path).read().samples] == [0, 1]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    Store(tmp_path).append(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(RowError, match=r"samples\.jsonl:1: not a row"):
        Store(tmp_path).read()


def test_another_schema_version_is_refused_by_name(tmp_path):
    Store(tmp_path).append(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"schema":1', '"schema":7'), encoding="utf-8")
    with pytest.raises(
        RowError, match=r"samples\.jsonl:1: SampleRow has schema version 7; this program reads version 1"
    ):
        Store(tmp_path).read()


def test_nan_never_reaches_the_disk(tmp_path):
    with pytest.raises(ValueError):
        Store(tmp_path).append(sample(extra={"x": float("nan")}))


def test_finished_windows_are_those_measured_or_known_impossible(tmp_path):
    store = Store(tmp_path)
    store.append(sample(0, 0))
    store.append(sample(0, 1, "error", reason="x"))
    store.append(sample(0, 2, "oom", reason="x"))
    store.append(sample(0, 3, "timeout", reason="x"))
    store.append(sample(1, 0, "skipped", reason="budget", flags=[RETRY]))
    store.append(sample(-1, -1, "skipped", reason="whole point"))
    assert store.finished() == {("p", "a", 0, 0, slot) for slot in (0, 2, 3)}


def test_a_window_tried_again_counts_once_by_its_last_row(tmp_path):
    store = Store(tmp_path)
    store.append(sample(0, 0, "error", reason="killed"))
    store.append(sample(0, 0, elapsed_ns=9))
    assert [(row.status, row.elapsed_ns) for row in store.read().samples] == [("ok", 9)]


def test_a_note_to_try_again_goes_once_it_was_tried_and_stays_where_it_was_not(tmp_path):
    store = Store(tmp_path)
    store.append(sample(0, 0))
    store.append(sample(-1, -1, "skipped", reason="budget", flags=[RETRY]))
    assert [row.status for row in store.read().samples] == ["ok", "skipped"]
    store.append(sample(1, 0))
    assert [row.status for row in store.read().samples] == ["ok", "ok"]


def test_a_count_of_launches_does_not_hide_that_nothing_was_timed(tmp_path):
    store = Store(tmp_path)
    store.append(sample(-1, -1, "skipped", reason="budget", flags=[RETRY]))
    store.append(sample(-1, -1, elapsed_ns=None, flags=[LAUNCHES]))
    assert [row.status for row in store.read().samples] == ["skipped", "ok"]


def test_contrasts_count_once_by_their_last_row(tmp_path):
    store = Store(tmp_path)
    for ratio in (1.0, 2.0):
        store.append(
            ContrastRow(
                ["r"], "c", "a", "b", "decode", 256, ratio, 1, 1, 1, 1, 3, "block", 0.01, "same", None, 1.1, "m"
            )
        )
    assert [row.ratio for row in store.read().contrasts] == [2.0]


def test_series_are_kept_beside_the_rows(tmp_path):
    store = Store(tmp_path)
    stamps = np.arange(5, dtype=np.int64) * 10**12
    name = store.put_series("p-a-0", {"stamps_ns": stamps})
    assert np.array_equal(store.series(name)["stamps_ns"], stamps)
    with pytest.raises(RowError, match="no such series"):
        store.series("other")


def test_a_job_survives_its_file(tmp_path):
    job = Job(
        str(tmp_path / "run"),
        "r",
        {"name": "m"},
        {"kind": "text"},
        [Arm("a", "stub")],
        [Contrast("c", "a", "a")],
        [Point("p", "decode", 256, 2, skip={"a": "why"})],
        1,
        0,
        60.0,
        10.0,
    )
    path = write_job(job)
    assert read_job(path) == job
    path.write_text(path.read_text(encoding="utf-8")[:-5], encoding="utf-8")
    with pytest.raises(RowError, match="not a job of this version"):
        read_job(path)


def test_the_store_needs_no_mlx():
    code = "import sys, sweeps.store; sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
