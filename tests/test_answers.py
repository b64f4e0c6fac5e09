"""Pages of a suite: published beside measured, the ladder, interactions, quality, and what a wrong arm does to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import suite_rows

from reports import claims, interplay, ladder, quality
from reports.cells import Study, study
from reports.load import read_rows
from reports.page import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return suite_rows.write(tmp_path_factory.mktemp("suite") / "r1")


@pytest.fixture(scope="module")
def seen(folder: Path) -> Study:
    return study(read_rows([folder]))


def by(rows: list[dict], **wanted) -> list[dict]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def test_published_stands_beside_measured_each_with_its_device(seen: Study) -> None:
    rows = claims.claims(seen).rows
    (packed,) = by(rows, claim="packed_dequant")
    assert packed["published_value"] == 1.774 and packed["published_on"].startswith("Apple M5 Max")
    assert packed["ratio"] == pytest.approx(1.5, rel=0.01) and packed["measured_on"] == "Apple M9 Max"
    assert (packed["verdict"], packed["agrees"]) == ("faster", "yes")
    assert "everything off" in packed["direction"] and "on top" in packed["direction"]
    assert len(by(rows, claim="gpu_routing")) == 2
    (tiles,) = by(rows, claim="tile_rows")
    assert tiles["verdict"] == "unsupported" and tiles["agrees"] == "another context", "it was published at 2K"
    assert "speculative" in claims.untested(seen) and "packed_dequant" not in claims.untested(seen)


def test_rows_without_claims_say_so(tmp_path: Path) -> None:
    import report_rows as rows

    made = rows.write_run(tmp_path / "r", [rows.run_row()], [rows.sample("full", "decode", 256)], [])
    table = claims.claims(study(read_rows([made])))
    assert table.rows == [] and "suite=published" in table.markdown()


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        ("packed_dequant", "slower", "no"),
        ("packed_dequant", "unclear", "cannot tell"),
        ("speculative", "slower", "yes"),
        ("phase_overlap", "same", "yes"),
        ("phase_overlap", "faster", "no"),
        ("device_token", "faster", "yes"),
        ("coalesced_key_after", "faster", "no figure for the whole"),
    ],
)
def test_a_verdict_points_where_the_claim_does_or_not(name: str, verdict: str, said: str) -> None:
    assert claims.agrees(claims.CLAIMS[[c.name for c in claims.CLAIMS].index(name)], verdict) == said


def test_ladder_multiplies_up_to_the_whole_and_says_what_was_left_out(seen: Study) -> None:
    (found,) = ladder.ladders(seen)
    rows = ladder.table([found]).rows
    assert [row["step"] for row in rows] == ["packed_dequant", "gpu_routing", "all the rest", "together", "tile_rows"]
    assert rows[2]["height"] == pytest.approx(3.0, rel=0.01) == pytest.approx(rows[3]["ratio"], rel=0.01)
    assert rows[4]["verdict"] == "left out" and "tiles" in rows[4]["reason"]
    (plot,) = ladder.plots([found])
    assert "packed_dequant 1." in plot.description and "no data" not in plot.svg


def test_interaction_is_found_and_shown_in_a_grid(seen: Study) -> None:
    table = interplay.details(seen)
    (row,) = table.rows
    assert row["ratio"] == pytest.approx(1.3, rel=0.01) and row["low"] < 1.3 < row["high"]
    assert (row["word"], row["sure"]) == ("help", "5 sessions")
    (grid,) = interplay.grid(seen, table)
    assert grid.rows[0]["gpu_routing"] == grid.rows[1]["packed_dequant"] != ""
    assert grid.rows[0]["packed_dequant"] == "·"


def test_quality_stands_beside_the_published_figures(seen: Study) -> None:
    rows = quality.quality(seen).rows
    assert (rows[0]["perplexity"], rows[0]["top1"]) == (1.0004, 0.9635)
    mine = by(rows, arm="both")
    assert [row["reference"] for row in mine] == ["neither", "neither", "mlx_lm"]
    assert [row["positions"] for row in mine] == [2048, 192, 2048]
    assert not any(row["arm"] == "neither.again" for row in rows)
    assert "-0.000" not in quality.quality(seen).markdown() and "+0.020" in quality.quality(seen).markdown()


def test_a_fast_wrong_arm_has_no_place_in_any_of_them(tmp_path: Path) -> None:
    wrong = study(read_rows([suite_rows.write(tmp_path / "r", wrong="both")]))
    assert interplay.details(wrong).rows[0]["word"] == "blocked" and interplay.details(wrong).rows[0]["ratio"] is None
    assert by(claims.claims(wrong).rows, claim="gpu_routing", verdict="blocked")[0]["ratio"] is None
    (found,) = ladder.ladders(wrong)
    heights = [row.get("height") for row in ladder.table([found]).rows]
    assert heights[0] is not None and heights[1:] == [None] * 4
    assert "blocked" in ladder.waterfall(found).svg


def test_the_page_holds_all_of_it(folder: Path, tmp_path: Path) -> None:
    page = build([folder], tmp_path / "out").read_text(encoding="utf-8")
    for word in ("Published beside measured", "From everything off", "Interactions", "help", "0.9635"[:3], "96.35"):
        assert word in page
    first = page[: page.index('id="claims"')]
    assert "Verdict of each contrast" in first and "from the limit" in first
    written = {p.name for p in (tmp_path / "out" / "tables").iterdir()}
    assert {"claims.csv", "ladder.jsonl", "interactions.csv", "quality.csv"} <= written
    assert (tmp_path / "out" / "figures" / "ladder-prefill-512.svg").is_file()


def test_what_another_job_of_a_suite_measured_is_no_gap(folder: Path, tmp_path: Path) -> None:
    import report_rows as rows

    plan = {
        "run_id": "r2",
        "arms": [{"name": "full", "subject": "engine"}],
        "points": [{"key": "prefill-4096", "phase": "prefill", "frontier": 4096}],
    }
    sample = rows.sample("full", "prefill", 4096, run_id="r2", arm_hash="h-full")
    other = rows.write_run(tmp_path / "r2", [rows.run_row(run_id="r2")], [sample], [], plan)
    both = study(read_rows([folder, other]))
    assert [c.frontier for c in both.line("full", "prefill")] == [512, 4096]
    assert {c.arm for c in both.gaps()} == {"tiled"} and all(c.frontier == 512 for c in both.gaps())
