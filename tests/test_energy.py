"""Energy: read from a counter outside the timed window, kept with the rate, absent where there is no counter."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import report_rows as rows
from sessions import Bench, arm, job, points

from reports import tables
from reports.cells import study
from reports.load import read_rows
from sweeps import energy


class Board:
    """Stands in for the NVML library: a counter in millijoules that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: bool = True) -> None:
        self.millijoules, self.asked, self.answers = 5_000, [], answers
        library = types.ModuleType("pynvml")
        library.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
        library.nvmlInit = lambda: None  # type: ignore[attr-defined]
        library.nvmlDeviceGetHandleByIndex = lambda i: self.asked.append(i)  # type: ignore[attr-defined]
        library.nvmlDeviceGetHandleByUUID = lambda i: self.asked.append(i)  # type: ignore[attr-defined]
        library.nvmlDeviceGetTotalEnergyConsumption = self._read  # type: ignore[attr-defined]
        self._error = library.NVMLError  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pynvml", library)

    def _read(self, handle: object) -> int:
        if not self.answers:
            raise self._error("not supported")
        return self.millijoules


@pytest.mark.parametrize("visible, asked", [(None, 0), ("3,1", 3), ("GPU-7f", "GPU-7f"), ("", 0)])
def test_nvidia_counts_the_board_that_is_computed_on(visible, asked, monkeypatch):
    board = Board(monkeypatch)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    counter = energy.meter("cuda")
    assert counter.read() == 5.0 and "NVML" in counter.source and board.asked == [asked]
    board.answers = False
    assert counter.read() is None


def test_without_counter_library_or_right_there_is_no_figure(monkeypatch):
    Board(monkeypatch, answers=False)
    assert energy.meter("cuda") is energy.NO_METER
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.meter("cuda") is energy.NO_METER
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    assert energy.meter("metal") is energy.NO_METER and energy.meter("cpu") is energy.NO_METER


@pytest.mark.parametrize("gpu, read", [(1_500, 2.0), (None, None)])
def test_apple_adds_the_parts_of_the_chip(gpu, read, monkeypatch):
    library = types.ModuleType("zeus_apple_silicon")
    counted = types.SimpleNamespace(cpu_total_mj=500, gpu_mj=gpu, dram_mj=None, ane_mj=0)
    library.AppleEnergyMonitor = lambda: types.SimpleNamespace(  # type: ignore[attr-defined]
        get_cumulative_energy=lambda: counted
    )
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", library)
    assert energy.meter("metal").read() == read


def test_a_counter_that_stands_still_or_falls_back_gives_nothing():
    assert [energy.spent(1.0, 3.5), energy.spent(3.0, 3.0), energy.spent(3.0, 1.0)] == [2.5, None, None]
    assert energy.spent(None, 1.0) is None and energy.spent(1.0, None) is None


def test_a_session_keeps_what_each_window_took(tmp_path: Path):
    bench = Bench(job(tmp_path, [arm("a"), arm("b")], points([64, 512], walk_from=256)))
    # A device of 100 W on the session's own clock, at which reading takes no time.
    counter = energy.Meter(lambda: bench.clock.now_ns() / 1e9 * 100, "a made-up device")
    assert bench.run(energy=counter)
    measured = bench.rows(frontier=64)
    assert measured and all(
        row.extra["energy_j"] == pytest.approx((row.elapsed_ns or 0) / 1e9 * 100, rel=1e-3) for row in measured
    )
    assert not any("energy_j" in row.extra for row in bench.rows("prefill", frontier=512)), (
        "a walk is made of stretches"
    )
    assert "energy_j" not in str(Bench(job(tmp_path / "none", [arm("a")], points([64]))).run())


def test_joules_a_token_stand_beside_tokens_a_second(tmp_path: Path):
    def sample(arm_name: str, joules: float | None, seconds: float):
        extra = {} if joules is None else {"energy_j": joules, "energy_of": "NVIDIA board (NVML)"}
        return rows.sample(arm_name, "decode", 256, work_tokens=64, elapsed_ns=int(seconds * 1e9), extra=extra)

    folder = rows.write_run(
        tmp_path / "r",
        [rows.run_row()],
        [sample("full", 320.0, 1.6), sample("short", 10.0, 0.1), sample("none", None, 2.0)],
        [],
    )
    table = tables.energy(study(read_rows([folder])))
    (row,) = table.rows
    assert (row["arm"], row["joules_per_token"], row["watts"]) == ("full", 5.0, pytest.approx(200))
    empty = rows.write_run(tmp_path / "e", [rows.run_row()], [sample("none", None, 2.0)], [])
    assert "Not measured" in tables.energy(study(read_rows([empty]))).markdown()
