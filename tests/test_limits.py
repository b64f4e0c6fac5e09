"""The limits page and the predictions: sums that add up, figures of others kept apart, pages that are current."""

from __future__ import annotations

import dataclasses

import pytest
from report_rows import MAC, REAL, run_row, sample, write_run

from ablations.catalogue import claim
from engine.config import ModelConfig
from reports import predict
from reports.__main__ import main
from reports.cells import study
from reports.limits import limits
from reports.load import ReportError, read_rows
from reports.tables import Table
from sweeps.least import least_work

GEOMETRY = dataclasses.asdict(ModelConfig())
LIMITS = {"read_bytes_per_second": 500e9, "bandwidth_bytes_per_second": 400e9, "launch_seconds": 2e-6}
KERNELS = {"void mlx::core::cu::gather<float>(int)": 3.0} | {f"kernel_{n}": 13.0 for n in range(22)}


def told(arm: str, frontier: int, **facts) -> object:
    return sample(arm, "decode", frontier, block=-1, slot=-1, flags=["launches"], elapsed_ns=None, extra=facts)


def window(arm: str, phase: str, frontier: int, seconds: float):
    tokens = 64 if phase == "decode" else frontier
    moved, done = least_work(ModelConfig(), phase, frontier, 64)
    work = {"work_tokens": tokens, "least_bytes": moved, "least_flops": done, "elapsed_ns": round(seconds * 1e9)}
    return sample(arm, phase, frontier, **work)


@pytest.fixture
def tables(tmp_path) -> dict[str, Table]:
    arms = {"full": {"row_costs": [1.0, 1.2, 1.5, 1.9, 2.2, 2.5, 2.8, 3.1], "row_costs_from": "apple-m9-max.json"}}
    run = run_row(machine=MAC | LIMITS, model=REAL | {"arms": arms, "dtype": "bfloat16"})
    predicted = {"launches_predicted": 290, "stages_predicted": 276, "operations": {"Gather": 3}}
    samples = [
        window("full", "decode", 256, 64 * 0.008),
        window("full", "decode", 4096, 64 * 0.009),
        window("mlx_lm", "decode", 256, 64 * 0.010),
        window("full", "prefill", 4096, 1.0),
        told("full", 256, **predicted, launches_device=289.0, kernels=KERNELS),
        told("full", 4096, **predicted),
        told("plain", 256, launches_predicted=None, launches_unpredicted="route reads back to the host"),
    ]
    points = [{"phase": phase, "frontier": 4096} for phase in ("prefill", "decode")]
    job = {"run_id": "r1", "model": {"name": "real", "config": GEOMETRY}, "points": points, "arms": []}
    folder = write_run(tmp_path / "run", [run], samples, [], job)
    return {table.name: table for table in limits(study(read_rows([folder])))}


def row_of(table: Table, **where) -> dict:
    (found,) = [row for row in table.rows if all(row.get(key) == value for key, value in where.items())]
    return found


def test_the_time_of_a_step_is_accounted_for(tables):
    row = row_of(tables["limits-decode"], arm="full", frontier=256)
    moved = least_work(ModelConfig(), "decode", 256, 1)[0]
    assert row["step"] == pytest.approx(0.008) and row["bytes"] == pytest.approx(moved, rel=1e-6)
    # Read at the better of both rates.
    assert row["floor"] == pytest.approx(moved / 500e9, rel=1e-6)
    assert row["share"] == pytest.approx(row["floor"] / 0.008)
    # Counted before predicted.
    assert (row["launches"], row["launching"]) == (289, pytest.approx(289 * 2e-6))
    assert row["floor"] + row["launching"] + row["rest"] == pytest.approx(row["step"])
    assert row["each"] == pytest.approx(0.008 / 289)
    # Where the device was not asked the prediction stands; of MLX-LM there is neither.
    assert row_of(tables["limits-decode"], arm="full", frontier=4096)["launches"] == 290
    other = row_of(tables["limits-decode"], arm="mlx_lm")
    assert other["floor"] and other["launches"] is None and other["rest"] is None


def test_prefill_is_held_against_arithmetic_and_bandwidth(tables):
    row = row_of(tables["limits-prefill"], arm="full", frontier=4096)
    assert row["rate"] == pytest.approx(row["flops"]) and row["share"] == pytest.approx(row["rate"] / 40e12)
    assert row["bandwidth_share"] == pytest.approx(row["bytes"] / 500e9)


def test_launches_stand_beside_what_others_published(tables):
    table = tables["limits-launches"]
    assert {row["what"] for row in table.rows} >= {"full", "plain", "Lily, as published", "Lily, released code"}
    counted = [row for row in table.rows if row["what"] == "full" and row["counted"]]
    assert counted[0]["difference"] == pytest.approx(289 / 290)
    assert "reads back" in row_of(table, what="plain")["note"]
    # Lily's figures are in a column of their own: nothing here predicted or counted them.
    for row in table.rows[-2:]:
        assert row.get("predicted") is None and row.get("counted") is None
    shown = table.markdown()
    assert "795 in 555 stages" in shown and "605 in 425 stages" in shown
    assert claim("decode_launches_released").value == 605 and claim("decode_stages_released").value == 425


def test_what_a_step_launches_is_named_by_the_device_first(tables):
    rows = tables["limits-operations"].rows
    assert {(row["arm"], row["frontier"], row["source"]) for row in rows} == {("full", 256, "device")}
    assert len(rows) == 13 and rows[-1] == rows[0] | {"name": "11 others", "launches": 10 * 13 + 3}


def test_least_work_is_told_by_op_and_adds_up(tables):
    row = row_of(tables["limits-least-bytes"], phase="decode", frontier=4096)
    assert row["total"] == pytest.approx(least_work(ModelConfig(), "decode", 4096, 1)[0], rel=1e-9)
    row = row_of(tables["limits-least-flops"], phase="prefill", frontier=4096)
    assert row["total"] == pytest.approx(least_work(ModelConfig(), "prefill", 4096)[1], rel=1e-9)


def test_the_cost_of_several_rows_is_a_table(tables):
    (row,) = tables["limits-rows"].rows
    assert [row[str(n)] for n in range(1, 9)] == [1.0, 1.2, 1.5, 1.9, 2.2, 2.5, 2.8, 3.1]
    assert row["source"] == "apple-m9-max.json"


def test_rows_that_tell_nothing_say_so_in_words(tmp_path):
    folder = write_run(tmp_path / "old", [run_row(machine={"chip": "x", "device": "cpu"})], [], [], {"run_id": "r1"})
    shown = "\n".join(table.markdown() for table in limits(study(read_rows([folder]))))
    for words in ("limits of the device were not measured", "holds no geometry", "No decode window", "sweeps tune"):
        assert words in shown


def test_a_plan_of_another_version_is_no_geometry(tmp_path):
    job = {"run_id": "r1", "model": {"config": {"vocab_size": 4, "heads_of_the_future": 3}}}
    folder = write_run(tmp_path / "run", [run_row()], [], [], job)
    assert not limits(study(read_rows([folder])))[5].rows


def test_the_page_is_part_of_every_report(tmp_path):
    job = {"run_id": "r1", "model": {"name": "real", "config": GEOMETRY}, "points": [], "arms": []}
    folder = write_run(tmp_path / "run", [run_row(machine=MAC | LIMITS)], [window("full", "decode", 256, 0.5)], [], job)
    assert main(["build", str(folder)]) == 0
    for name in ("report.html", "report.md"):
        text = (folder / name).read_text(encoding="utf-8")
        for heading in ("a launch, µs", "least bytes, MB", "795 in 555 stages", "The cost of T rows over one row"):
            assert heading in text, (name, heading)
    assert (folder / "tables" / "limits-decode.csv").exists()


# -- predictions -------------------------------------------------------------------------------------


def test_the_committed_predictions_are_current(tmp_path):
    """Fails when the model, its inputs or the launches changed: ``python -m reports predict``."""
    out = tmp_path / "predictions.md"
    assert main(["predict", "--output", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == predict.PAGE.read_text(encoding="utf-8")


def test_predictions_are_marked_and_kept_apart():
    page = predict.PAGE.read_text(encoding="utf-8")
    own, others = page.split("## The model beside what others published")
    assert page.count("redicted") >= 8 and "computed, never measured" in own
    # No rate of Lily's or MLX-LM's among ours; each under its own heading afterwards.
    ours = own.split("## Decode, *predicted*")[1]
    assert "Lily" not in ours and "MLX-LM" not in ours
    assert "MLX-LM, published" in others and "Lily, published" in others
    for chip in ("M1 Max", "M3 Max", "M4 Max", "M5 Max"):
        assert f"{chip}, fused" in own


def test_the_model_says_of_known_rates_what_they_are():
    model = predict.Predictor(predict.read_steps())
    share, stage = model.decode_fit
    assert 0.6 < share < 0.95 and 1e-6 < stage < 1e-5
    # Half the bandwidth takes twice the time of the bytes and not of the stages.
    half = dataclasses.replace(predict.M5_MAX, bandwidth=predict.M5_MAX.bandwidth / 2)
    slower = 1 / model.decode(half, 4096, 300) - 300 * stage
    assert slower == pytest.approx(2 * (1 / model.decode(predict.M5_MAX, 4096, 300) - 300 * stage))
    for row in model.published.rows:
        at = row.context
        assert model.decode(predict.M5_MAX, at, model.stages("mlx", at)) == pytest.approx(row.mlx_decode, rel=0.15)
        assert model.prefill(predict.M5_MAX, at) == pytest.approx(row.mlx_prefill, rel=0.2)


def test_without_counts_there_is_one_line(tmp_path):
    with pytest.raises(ReportError, match="python -m sweeps.launches"):
        predict.predict(tmp_path / "page.md", tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"steps": {"fused": [1]}}', encoding="utf-8")
    with pytest.raises(ReportError, match="no counts of launches"):
        predict.read_steps(tmp_path / "bad.json")


def test_the_counts_cover_every_frontier():
    steps = predict.read_steps()
    assert set(steps) == {"fused", "full", "mlx"}
    assert all(list(by_context) == list(predict.FRONTIERS) for by_context in steps.values())
    assert steps["fused"][4096][0] <= 300 < steps["full"][4096][0]
