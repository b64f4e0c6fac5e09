"""The tables on drafting, from made-up rows: what was accepted, what it costs, and what was published beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report_rows import contrast, run_row, sample, write_run

from engine.config import EngineConfig
from engine.depth import Costs, break_even
from reports import drafting
from reports.cells import study
from reports.load import read_rows
from sweeps.ledger import LAUNCHES
from sweeps.rows import ContrastRow, SampleRow

COSTS: dict[str, Any] = {"rows": [1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4], "draft": 0.1, "replay": 0.05, "states": 0.0}


def arm(name: str, **fields: Any) -> dict[str, Any]:
    config = EngineConfig().to_dict()
    config["speculative"] |= fields
    return {"name": name, "subject": "engine", "config": config}


def counts(block: int, drafted: int = 30, accepted: int = 20) -> dict[str, Any]:
    right = [12, 8, 0, 0, 0, 0, 0]
    told = {"drafted": drafted, "accepted": accepted + block % 3, "steps": 10, "rows": 40, "plain": 4}
    return told | {"depths": {"3": 10}, "tried": [15, 12, 8, 0, 0, 0, 0], "right": right, "costs": "tuned"}


def against(name: str, ratio: float, run_id: str, reference: str = "off") -> ContrastRow:
    ends = {"ratio": ratio, "low": ratio - 0.02, "high": ratio + 0.02, "units": 24, "unit": "block"}
    word = "faster" if ratio > 1 else "slower"
    return contrast("decode", 4096, name, reference, run_ids=[run_id], verdict=word, **ends)


@pytest.fixture
def seen(tmp_path):
    """Two kinds of prompt, an arm of three drafts and one of a trimmed vocabulary."""
    folders = []
    for run_id, kind, ratio in (("r-code", "code", 1.2), ("r-random", "random", 0.9)):
        told = {"mtp": {"draft_costs": COSTS | {"rows_from": "tuned", "draft_from": "untuned", "most_depth": 3}}}
        run = run_row(run_id=run_id, prompt={"kind": kind}, model={"name": "big", "arms": told})

        def row(name: str, block: int, run_id: str = run_id, **more: Any) -> SampleRow:
            return sample(name, "decode", 4096, block=block, run_id=run_id, arm_hash=name, **more)

        windows = [row("mtp", b, extra={"speculation": counts(b), "trial": b}) for b in range(24)]
        windows += [row(name, b) for b in range(24) for name in ("off", "small")]
        facts = {"experts_per_verification": 21.5, "bytes_per_token": 2.1e9, "bytes_per_token_plain": 3e9}
        apart = row("mtp", -1, flags=[LAUNCHES], extra=facts, elapsed_ns=None)
        answers = [against("mtp", ratio, run_id), against("small", ratio + 0.01, run_id, "mtp")]
        folder = write_run(tmp_path / run_id, [run], [*windows, apart], answers)
        arms = [arm("off"), arm("mtp", drafter="mtp", depth=3)]
        arms.append(arm("small", drafter="mtp", depth=3, draft_vocab=32_768))
        (folder / "job.json").write_text(json.dumps({"run_id": run_id, "arms": arms}), encoding="utf-8")
        folders.append(folder)
    return study(read_rows(folders))


def test_a_row_for_each_kind_of_prompt(seen):
    made = {row["prompt"]: row for row in drafting.outcomes(seen).rows}
    assert made.keys() == {"code", "random"}
    code = made["code"]
    assert (code["drafter"], code["depth"], code["frontier"], code["prompts"]) == ("mtp", "3", 4096, 24)
    assert code["ratio"] == 1.2 and made["random"]["ratio"] == 0.9 and made["random"]["verdict"] == "slower"
    assert code["accepted"] == pytest.approx(21 / 30) and code["per_step"] == pytest.approx(3.1)
    assert code["accepted_interval"].count("%") == 2
    assert code["mean_depth"] == 3 and code["by_position"] == [0.8, 0.6667, 0.0] and code["depths"] == {"3": 240}
    assert code["needed"] == pytest.approx(break_even(Costs(**COSTS | {"rows": tuple(COSTS["rows"])}), 3))
    assert (code["experts"], code["bytes_per_token"], code["bytes_plain"]) == (21.5, 2.1e9, 3e9)


def test_prices_by_depth_and_from_which_acceptance_they_pay(seen):
    rows = drafting.prices(seen).rows
    assert [row["depth"] for row in rows] == list(range(1, 8)), "told once, though two runs tell it"
    assert rows[2]["step_cost"] == pytest.approx(1.6 + 0.3) and (rows[2]["rows_from"], rows[2]["draft_from"]) == (
        "tuned",
        "untuned",
    )
    assert all(row["needed"] < 1 and row["best"] > 1 for row in rows)
    assert "never" not in drafting.prices(seen).markdown()


def test_published_stands_beside_measured_and_is_not_mixed_with_it(seen):
    lily, trimmed = drafting.published(seen).rows
    assert (lily["value"], lily["ours"]) == (0.82, "0.900× to 1.200×, median 1.050× of 2 points")
    assert "M5" in lily["where"] and lily["device"] != lily["where"]
    assert trimmed["value"] is None and trimmed["ours"].startswith("0.91")


@pytest.mark.parametrize("nothing", [None, {}, {"depths": None, "right": None, "tried": None}, "holes"])
def test_windows_that_do_not_tell_everything_leave_the_rest(tmp_path, nothing):
    """Rows of a cut-off process or an older version: a number that is missing counts for nothing."""
    holes = {"depths": {"3": None}, "right": [None, 3], "tried": [None, 4], "drafted": None}
    told = [counts(0), counts(1) | holes if nothing == "holes" else nothing]
    windows = [
        sample("mtp", "decode", 4096, block=b, run_id="r", arm_hash="mtp", extra={"speculation": each})
        for b, each in enumerate(told)
    ]
    folder = write_run(tmp_path / "r", [run_row(run_id="r")], windows, [])
    job = {"run_id": "r", "arms": [arm("mtp", drafter=None, depth=3)]}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    (row,) = drafting.outcomes(study(read_rows([folder]))).rows
    assert row["drafter"] == "mtp" and row["depths"] == {"3": 10}
    assert row["by_position"] == ([0.8, 0.6875, 0.0] if nothing == "holes" else [0.8, 0.6667, 0.0])
    assert drafting.prices(study(read_rows([folder]))).rows == []


def test_rows_without_drafts_say_so(tmp_path):
    folder = write_run(tmp_path / "r", [run_row()], [sample("full", "decode", 256)], [])
    for table in drafting.drafting(study(read_rows([folder]))):
        assert not table.rows and ": No" in table.markdown()
