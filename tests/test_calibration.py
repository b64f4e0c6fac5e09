"""Earlier A/A runs on this machine: which count, how they are cut to a design, and that they set the margin."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from sessions import arm, job, points

from sweeps import calibration
from sweeps.contrasts import contrast_rows
from sweeps.points import Contrast, Job
from sweeps.rows import RunRow, SampleRow
from sweeps.store import Store, write_job

ARMS = [arm("a"), arm("again", aa=True)]
CHIP = {"chip": "X", "device": "X", "memory": 1, "versions": {"mlx": "1"}}


def run(folder, blocks: list[list[float]], machine=CHIP, **more) -> Job:
    """A run folder with one decode point whose A/A log ratios are `blocks`, session by session."""
    made = job(folder, ARMS, points([256], blocks=len(blocks[0]))[1:], sessions=len(blocks), **more)
    made.contrasts = [Contrast("A/A", "again", "a")]
    store = Store(made.run_dir)
    write_job(made)
    row = RunRow("run", 0, "now", [], {}, "", {}, machine, {}, {}, {}, "")
    store.append(row)
    for session, logs in enumerate(blocks):
        for block, log in enumerate(logs):
            for slot, (name, rate) in enumerate((("a", 100.0), ("again", 100.0 * math.exp(log)))):
                store.append(SampleRow(
                    "run", session, made.points[0].key, name, "h", "stub", "decode", 256, block, slot, "ok",
                    work_tokens=4, elapsed_ns=round(4e9 / rate)))  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("count", "blocks", "expected"),
    [(1, 2, [1.5, 3.5, 11.5, 13.5]), (2, 2, [6.5, 8.5]), (1, 3, [2, 12]), (2, 5, []), (3, 1, []), (1, 0, [])],
)
def test_pieces_use_no_block_twice(count, blocks, expected):
    sessions = [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert list(calibration.pieces(sessions, count, blocks)) == pytest.approx(expected)


def test_runs_of_another_machine_version_or_model_do_not_count(tmp_path):
    own = run(tmp_path / "own", [[0.01] * 2])
    run(tmp_path / "same", [[0.01] * 2])
    run(tmp_path / "chip", [[0.01] * 2], CHIP | {"chip": "Y"})
    run(tmp_path / "version", [[0.01] * 2], CHIP | {"versions": {"mlx": "2"}})
    other = run(tmp_path / "model", [[0.01] * 2])
    write_job(dataclasses.replace(other, model=other.model | {"weights_hash": "w"}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "job.json").write_text("{", encoding="utf-8")
    assert [found.job.run_dir for found in calibration.beside(own)] == [str(tmp_path / "same")]


def test_calibration_sets_the_margin_of_a_later_run(tmp_path):
    noise = [[0.03, -0.03] * 5, [-0.03, 0.03] * 5, [0.03] * 5 + [-0.03] * 5]
    run(tmp_path / "calibrate", noise)
    lucky = run(tmp_path / "lucky", [[0.0001, -0.0001]])
    samples = Store(lucky.run_dir).read().samples
    (alone,) = contrast_rows(lucky, samples)
    (calibrated,) = contrast_rows(lucky, samples, calibration.beside(lucky))
    pieces = list(calibration.pieces(noise, 1, 2))
    assert alone.margin == 0.01
    assert calibrated.margin > max(0.015, statistics.pstdev(pieces))


def test_other_frontiers_do_not_count(tmp_path):
    run(tmp_path / "calibrate", [[0.03, -0.02] * 10])
    own = run(tmp_path / "own", [[0.001, -0.001]])
    earlier = calibration.beside(own)
    assert calibration.ratios(earlier, own, own.points[0], 2)
    assert not calibration.ratios(earlier, own, dataclasses.replace(own.points[0], frontier=512), 2)
