"""The tables of tiles: rows an expert come from chunk and geometry, and a sign that changes is shown where it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_rows import contrast, run_row, sample, write_run

from reports.cells import study
from reports.load import read_rows
from reports.page import build
from reports.tiles import tiles

SMALL, LARGE = "full,tile_rows=32", "full,tile_rows=64"
JOB: dict[str, Any] = {
    "run_id": "r1",
    "model": {"config": {"num_experts": 256, "num_experts_per_tok": 8}},
    "arms": [{"name": SMALL}, {"name": LARGE}, {"name": "full,prefill_chunk=4096"}],
    "contrasts": [
        {"name": "c", "arm": LARGE, "reference": SMALL, "about": {"toggles": ["tile_rows"]}},
        {"name": "d", "arm": "full,prefill_chunk=4096", "reference": SMALL, "about": {"toggles": ["prefill_chunk"]}},
    ],
}


def run(folder: Path, ratios: dict[int, float], job: dict[str, Any] = JOB) -> Path:
    arms = (SMALL, LARGE, "full,prefill_chunk=4096")
    samples = [
        sample(arm, "prefill", frontier, arm_hash=arm, chunks=[4096, 4096] if "chunk" in arm else [min(frontier, 2048)])
        for frontier in ratios
        for arm in arms
    ]
    answers = [
        contrast("prefill", frontier, LARGE, SMALL, contrast="c", ratio=ratio, low=ratio - 0.02, high=ratio + 0.02)
        for frontier, ratio in ratios.items()
    ]
    answers += [contrast("prefill", frontier, arms[2], SMALL, contrast="d") for frontier in ratios]
    return write_run(folder, [run_row()], samples, answers, job)


@pytest.mark.parametrize(
    ("ratios", "turns"),
    [
        ({512: 0.8, 2048: 1.1, 8192: 1.2}, "pays between 16 and 64 rows"),
        ({512: 1.1, 2048: 0.9}, "no longer pays between 16 and 64 rows"),
        ({512: 1.1, 1024: 1.2}, "ahead at all of 16, 32 rows an expert"),
        ({512: 0.9}, "behind at all of 16 rows an expert"),
        ({512: 0.9, 2048: 0.95, 8192: 1.1}, "both signs at 64 rows"),
        ({512: 0.9, 1024: 1.1, 2048: 0.95, 8192: 1.1}, "both signs at 64 rows; pays between 16 and 32 rows"),
    ],
)
def test_rows_an_expert_and_where_the_sign_changes(ratios, turns, tmp_path):
    each, turning = tiles(study(read_rows([run(tmp_path / "r", ratios)])))
    assert [(row["chunk"], row["rows"]) for row in each.rows] == [
        (min(frontier, 2048), min(frontier, 2048) // 32) for frontier in ratios
    ]
    assert [row["ratio"] for row in each.rows] == pytest.approx(list(ratios.values()))
    assert [(row["on"], row["pair"], row["turns"]) for row in turning.rows] == [("full", "64 over 32", turns)]


def test_the_page_shows_them_only_where_they_were_asked_about(tmp_path):
    build([run(tmp_path / "asked", {512: 0.8, 2048: 1.1})])
    asked = (tmp_path / "asked" / "report.md").read_text(encoding="utf-8")
    assert "| full | 64 over 32 | 512 | 512 | 16 | 0.800× |" in asked and "pays between 16 and 64 rows" in asked
    build([run(tmp_path / "not", {512: 0.8}, JOB | {"contrasts": []})])
    assert "Tiles of the expert product" not in (tmp_path / "not" / "report.md").read_text(encoding="utf-8")


def test_a_geometry_that_is_not_known_is_no_number(tmp_path):
    each, turning = tiles(study(read_rows([run(tmp_path / "r", {512: 0.8, 2048: 1.1}, JOB | {"model": {}})])))
    assert [row["rows"] for row in each.rows] == [None, None] and [row["turns"] for row in turning.rows] == ["–"]
