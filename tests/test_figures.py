"""Plots: ticks, gaps, intervals and names on axes that usual plotting code gets wrong."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest
import report_rows as rows

from reports import figures
from reports.cells import Study, study
from reports.load import read_rows
from sweeps.points import FRONTIERS


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A realistic run, grouped."""
    return study(read_rows([rows.write_run(tmp_path_factory.mktemp("runs") / "r1", *rows.realistic(1, 1))]))


def labels(plot: figures.Plot) -> list[str]:
    """All texts of a plot, in order."""
    root = ElementTree.fromstring(plot.svg)
    return ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]


def drawn(make, *arguments):
    with matplotlib.rc_context(figures.STYLE):
        return make(*arguments)


def small(tmp_path: Path, frontiers: list[int], **changes) -> Study:
    samples = [dataclasses.replace(rows.sample("full", "decode", f), **changes) for f in frontiers]
    return study(read_rows([rows.write_run(tmp_path / "r", [rows.run_row()], samples, [])]))


def test_every_frontier_is_labelled(seen: Study) -> None:
    ten = ["256", "512", "1K", "2K", "4K", "8K", "16K", "32K", "64K", "128K"]
    assert len(FRONTIERS) == len(ten)
    for plot in (
        drawn(figures.rate, seen, "prefill"),
        drawn(figures.memory, seen),
        *drawn(figures.ratios, seen, "prefill"),
    ):
        assert labels(plot)[: len(ten)] == ten or [t for t in labels(plot) if t in ten] == ten


@pytest.mark.parametrize("frontiers", [[256], [256, 512], [4096, 5000], [131_072]])
def test_narrow_axes_keep_their_ticks(tmp_path: Path, frontiers: list[int]) -> None:
    plot = drawn(figures.rate, small(tmp_path, frontiers), "decode")
    for frontier in frontiers:
        assert figures.text.tokens(frontier) in labels(plot)
    assert "no data" not in labels(plot)


def test_equal_rates_make_a_readable_axis(tmp_path: Path) -> None:
    plot = drawn(figures.rate, small(tmp_path, [256, 512], elapsed_ns=10**9, work_tokens=64), "decode")
    assert "0" in labels(plot) and len(set(labels(plot))) > 5


def test_a_failed_point_breaks_the_line(tmp_path: Path) -> None:
    """The line has two parts, and the gap a number that leads to its reason."""
    samples = [rows.sample("full", "decode", f) for f in (256, 512, 1024, 2048, 4096)]
    samples[2] = dataclasses.replace(samples[2], status="oom", elapsed_ns=None, reason="out of memory")
    found = study(read_rows([rows.write_run(tmp_path / "r", [rows.run_row()], samples, [])]))
    plot = drawn(figures.rate, found, "decode")
    colour = figures.COLOURS[0]
    lines = [m for m in re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: ' + colour, plot.svg) if "L" in m]
    assert [path.count("M") for path in lines] == [2]
    assert plot.notes == ["full at 1K: out of memory – out of memory"] and "1" in labels(plot)


def test_contrast_without_interval_still_has_its_point(tmp_path: Path) -> None:
    answer = [rows.contrast("decode", 256, low=None, high=None)]
    samples = [rows.sample(arm, "decode", 256) for arm in ("full", "mlx_lm")]
    found = study(read_rows([rows.write_run(tmp_path / "r", [rows.run_row()], samples, answer)]))
    (plot,) = drawn(figures.ratios, found, "decode")
    assert "no data" not in labels(plot) and plot.notes == []


def test_many_contrasts_share_several_plots(tmp_path: Path) -> None:
    arms = [f"arm{i}" for i in range(12)]
    answers = [rows.contrast("decode", f, arm=arm) for arm in arms for f in (256, 512)]
    samples = [rows.sample(arm, "decode", f) for arm in [*arms, "mlx_lm"] for f in (256, 512)]
    found = study(read_rows([rows.write_run(tmp_path / "r", [rows.run_row()], samples, answers)]))
    plots = drawn(figures.ratios, found, "decode")
    assert [p.name for p in plots] == ["ratio-decode-1", "ratio-decode-2", "ratio-decode-3"]


def test_inline_form_follows_the_page(seen: Study) -> None:
    """Inline, colours come from the page and ids carry the plot's name; the file keeps plain colours."""
    plot = drawn(figures.rate, seen, "decode")
    inline = figures.inline_svg(plot)
    assert f"var(--s0, {figures.COLOURS[0]})" in inline and "var(" not in plot.svg
    assert all(found.startswith(plot.name) for found in re.findall(r'\bid="([^"]*)"', inline))
    assert "width=" not in inline.split(">")[0]
    ElementTree.fromstring(inline)


def test_series_differ_by_shape_as_well(seen: Study) -> None:
    assert len(set(figures.MARKERS)) == len(figures.MARKERS) >= 7
    assert len(figures.COLOURS) == len(figures.MARKERS)
    plot = drawn(figures.rate, seen, "decode")
    assert plot.png.startswith(b"\x89PNG") and "tokens a second" in plot.description


def test_fourteen_series_look_different() -> None:
    looks = {tuple(figures._style(i).items()) for i in range(14)}
    assert len(looks) == 14


def test_like_gaps_share_a_note(tmp_path: Path) -> None:
    samples = [rows.sample("full", "decode", f) for f in (256, 512, 1024, 2048)]
    lost = {"status": "skipped", "elapsed_ns": None, "reason": "budget spent"}
    samples[1:] = [dataclasses.replace(s, **lost) for s in samples[1:]]
    found = study(read_rows([rows.write_run(tmp_path / "r", [rows.run_row()], samples, [])]))
    plot = drawn(figures.rate, found, "decode")
    assert plot.notes == ["full at 512 to 2K: skipped – budget spent"]
    assert labels(plot).count("1") == 3 and "3 points without a number" in plot.description


def test_many_arms_share_several_plots_and_none_is_lost(tmp_path: Path) -> None:
    arms = [f"arm{i}" for i in range(17)]
    samples = [rows.sample(arm, "decode", f) for arm in arms for f in (256, 512)]
    samples[0].extra["warmup"] = {"rounds": 2, "elapsed_ns": [2, 1]}
    found = study(read_rows([rows.write_run(tmp_path / "r", [rows.run_row()], samples, [])]))
    made = figures.pages(found, "decode")
    assert [page.suffix for page in made] == ["-1", "-2", "-3"]
    assert [arm for page in made for arm in page.arms] == arms
    plot = drawn(figures.rate, found, "decode", made[1])
    assert plot.name == "rate-decode-2" and "arm7" in "".join(labels(plot)) and "arm0" not in plot.description
    assert figures.pages(found, "prefill") == [figures.Page(())]
    assert "17 arms, too many to name here" in drawn(figures.drift, found).description
