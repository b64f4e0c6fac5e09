"""The plots, as SVG and PNG. The same rows give the same bytes.

The context axis is linear in log2 of the frontier, with a labelled tick at every one: a logarithmic axis of matplotlib
loses its ticks on narrow ranges and cannot hold a lone point. A point without a number is a gap in the line and a
cross on the floor of the plot, with a note that says why.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from reports import text
from reports.cells import PHASES, Cell, Result, Study, counted_windows
from reports.facts import finite
from sweeps.rows import Phase, SampleRow

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a07800", "#56b4e9", "#595959")
"""Okabe and Ito's palette, told apart with the common forms of colour blindness; its yellow darkened for white."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, GRID, SHADE = "#1c2733", "#d5dae0", "#e9edf1"
PER_FIGURE = 5
"""Contrasts in one plot; more share the next one."""

ARMS_AT_MOST, ARMS_PER_FIGURE = 10, 7
"""Arms that one plot can hold, and how many share each of several where there are more."""

LEGEND_AT_MOST = 14
"""Entries from which a legend would take the place of the plot."""

MARKS_AT_MOST = 1500
"""Windows from which the drift plot draws lines in place of marks."""

STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": False,
    "axes.formatter.use_locale": False,
    "axes.axisbelow": True,
    "figure.dpi": 72,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "lilybench",
    "text.color": INK,
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass
class Plot:
    """A finished plot. `description` is its text for those who cannot see it; `notes` say why points are missing."""

    name: str
    title: str
    description: str
    svg: str
    png: bytes
    notes: list[str] = field(default_factory=list)


def plots(study: Study) -> dict[str, list[Plot]]:
    """All plots of a report by section: rate, ratio, memory, drift and limit."""
    with matplotlib.rc_context(STYLE):
        return {
            "rate": [rate(study, phase, page) for phase in PHASES for page in pages(study, phase)],
            "ratio": [plot for phase in PHASES for plot in ratios(study, phase)],
            "memory": [memory(study, page) for page in pages(study)],
            "drift": [drift(study), warmup(study)],
            "limit": [
                *(limit(study, page) for page in pages(study, "decode")),
                *(compute(study, page) for page in pages(study, "prefill")),
            ],
        }


@dataclass(frozen=True)
class Page:
    """Arms that share a plot; many are spread over several. `suffix` goes into the plot's name."""

    arms: tuple[str, ...]
    suffix: str = ""

    @property
    def words(self) -> str:
        """Which page it is, for the title."""
        return f" ({self.suffix[1:]})" if self.suffix else ""


def pages(study: Study, phase: Phase | None = None) -> list[Page]:
    """The arms with points in a phase (or in either), in pages of `ARMS_PER_FIGURE` where one could not hold them."""
    arms = [a for a in _arms(study) if any(study.line(a, p) for p in PHASES if phase in (None, p))]
    if len(arms) <= ARMS_AT_MOST:
        return [Page(tuple(arms))]
    cut = [tuple(arms[i : i + ARMS_PER_FIGURE]) for i in range(0, len(arms), ARMS_PER_FIGURE)]
    return [Page(some, f"-{number}") for number, some in enumerate(cut, 1)]


def _page(study: Study, phase: Phase | None, page: Page | None) -> Page:
    return page or Page(tuple(a for a in _arms(study) if phase is None or study.line(a, phase)))


def rate(study: Study, phase: Phase, page: Page | None = None) -> Plot:
    """Tokens a second against context, a line per arm, its 10th to 90th percentile as a band."""
    page = _page(study, phase, page)
    lines = {arm: study.line(arm, phase) for arm in page.arms}
    title = f"{phase.capitalize()} rate by context{page.words}"
    canvas = Canvas(f"rate-{phase}{page.suffix}", title, study.frontiers[phase])
    axes = canvas.axes
    axes.set_ylabel("tokens a second")
    for i, (arm, line) in enumerate(lines.items()):
        canvas.curve(i, arm, line, lambda c: c.median, band=True)
        canvas.crosses(i, arm, line, offset=i, of=len(lines))
    canvas.from_zero()
    return canvas.finish(_range_words(lines, lambda c: c.median, "tokens a second"))


def limit(study: Study, page: Page | None = None) -> Plot:
    """Least bytes over time while decoding, with the memory bandwidth of the device where the rows hold it."""
    page = _page(study, "decode", page)
    lines = {arm: study.line(arm, "decode") for arm in page.arms}
    title = f"Decode: least bytes over time{page.words}"
    canvas = Canvas(f"limit-decode{page.suffix}", title, study.frontiers["decode"])
    canvas.axes.set_ylabel("GB/s")
    for i, (arm, line) in enumerate(lines.items()):
        canvas.curve(i, arm, line, _gigabytes)
    for top in sorted({c.bandwidth / 1e9 for line in lines.values() for c in line if c.bandwidth}):
        canvas.axes.axhline(top, color=INK, linestyle=(0, (4, 2)), linewidth=1)
        label = f"memory bandwidth {text.number(top)} GB/s"
        canvas.axes.annotate(
            label,
            (0.01, top),
            xytext=(0, 2),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
        )
    canvas.from_zero()
    return canvas.finish(_range_words(lines, _gigabytes, "GB/s"))


def compute(study: Study, page: Page | None = None) -> Plot:
    """Least arithmetic over time while prefilling."""
    page = _page(study, "prefill", page)
    lines = {arm: study.line(arm, "prefill") for arm in page.arms}
    title = f"Prefill: least arithmetic over time{page.words}"
    canvas = Canvas(f"limit-prefill{page.suffix}", title, study.frontiers["prefill"])
    canvas.axes.set_ylabel("TFLOP/s")
    for i, (arm, line) in enumerate(lines.items()):
        canvas.curve(i, arm, line, _teraflops)
    canvas.from_zero()
    return canvas.finish(_range_words(lines, _teraflops, "TFLOP/s"))


def _gigabytes(cell: Cell) -> float | None:
    return cell.bytes_per_second / 1e9 if cell.bytes_per_second else None


def _teraflops(cell: Cell) -> float | None:
    return cell.flops_per_second / 1e12 if cell.flops_per_second else None


def ratios(study: Study, phase: Phase) -> list[Plot]:
    """Ratio of each contrast with its 95 % interval against context, a few contrasts a plot."""
    groups: dict[str, list[Result]] = {}
    for result in study.results:
        if result.phase == phase and not result.aa:
            groups.setdefault(f"{result.arm} / {result.reference}", []).append(result)
    names = list(groups)
    pages = [names[i : i + PER_FIGURE] for i in range(0, len(names), PER_FIGURE)] or [[]]
    return [_ratio_page(study, phase, {n: groups[n] for n in page}, i, len(pages)) for i, page in enumerate(pages)]


def _ratio_page(study: Study, phase: Phase, groups: dict[str, list[Result]], page: int, of: int) -> Plot:
    suffix = f" ({page + 1} of {of})" if of > 1 else ""
    frontiers = sorted({*study.frontiers[phase], *(r.frontier for group in groups.values() for r in group)})
    name = f"ratio-{phase}" + (f"-{page + 1}" if of > 1 else "")
    canvas = Canvas(name, f"{phase.capitalize()}: ratio of rates with 95 % interval{suffix}", frontiers)
    axes = canvas.axes
    axes.set_ylabel("ratio (above 1: faster)")
    margin = max((r.margin or 0 for group in groups.values() for r in group), default=0)
    if frontiers:
        axes.axhspan(1 / (1 + margin), 1 + margin, color=SHADE, zorder=0)
        axes.axhline(1, color=INK, linewidth=1)
    said = []
    for i, (label, group) in enumerate(groups.items()):
        shift = (i - (len(groups) - 1) / 2) * 0.12
        known = [r for r in group if r.ratio is not None]
        x = [_x(r.frontier) + shift for r in known]
        y = [r.ratio or math.nan for r in known]
        arms = [[_arm_length(r, r.low, -1) for r in known], [_arm_length(r, r.high, 1) for r in known]]
        style = _style(i)
        if known:
            axes.errorbar(x, y, yerr=arms, linestyle="none", capsize=2.5, elinewidth=1.2, **style)
            canvas.drawn = True
            low, high = min(r.ratio or 0 for r in known), max(r.ratio or 0 for r in known)
            said.append(f"{label}: {text.ratio(low)} to {text.ratio(high)}")
        canvas.entry(label, style)
        for r in group:
            if r.ratio is None:
                canvas.cross(i, r.frontier, shift, label, r.verdict, r.reason)
        for frontier in frontiers:
            if all(r.frontier != frontier for r in group):
                why = _why_no_ratio(study, group[0], phase, frontier)
                # In a suite another job went there, which did not ask this; in one run it is missing.
                if why or len(study.rows.jobs) < 2:
                    canvas.cross(i, frontier, shift, label, "no contrast", why)
    return canvas.finish("; ".join(said) or "No ratio was found.", "The grey band is the margin.")


def _why_no_ratio(study: Study, like: Result, phase: Phase, frontier: int) -> str:
    """The gap of either arm that explains why a contrast has no row."""
    cells = [study.cells.get((arm, phase, frontier)) for arm in (like.arm, like.reference)]
    return "; ".join(f"{c.arm} {text.gap(c.gap)}, {c.reason}" for c in cells if c and c.gap)


def _arm_length(result: Result, end: float | None, sign: int) -> float:
    """Length of one whisker; zero where there is no interval or it does not hold its own ratio."""
    return max(0.0, sign * (end - (result.ratio or 0))) if end is not None else 0.0


def memory(study: Study, page: Page | None = None) -> Plot:
    """Peak, active and resident memory against context: three panels on one axis, the larger of both phases."""
    page = _page(study, None, page)
    frontiers = sorted({f for phase in PHASES for f in study.frontiers[phase]})
    title = f"Memory by context (larger of both phases){page.words}"
    canvas = Canvas(f"memory{page.suffix}", title, frontiers, panels=3)
    panels = (("peak_bytes", "peak, GiB"), ("active_bytes", "active, GiB"), ("footprint_bytes", "process, GiB"))
    said = []
    for axes, (attribute, label) in zip(canvas.panels, panels):
        axes.set_ylabel(label)
        for i, arm in enumerate(page.arms):
            sizes = [_size(study, arm, f, attribute) for f in frontiers]
            if any(s is not None for s in sizes):
                canvas.line(axes, i, arm, frontiers, [s / 2**30 if s else None for s in sizes])
                top = max(s for s in sizes if s is not None)
                said.append(f"{arm}: {label.split(',')[0]} up to {text.size(top)}")
    canvas.from_zero()
    return canvas.finish("; ".join(said) or "No memory was recorded.")


def _size(study: Study, arm: str, frontier: int, attribute: str) -> float | None:
    cells = [study.cells.get((arm, phase, frontier)) for phase in PHASES]
    return max((s for c in cells if c and (s := getattr(c, attribute)) is not None), default=None)


def drift(study: Study) -> Plot:
    """Each window's time over the median of its cell, in the order run, and the sentinel over its best."""
    canvas = Canvas("drift", "Drift: windows in the order run", [], panels=2)
    above, below = canvas.panels
    above.set_ylabel("time / median of its cell")
    below.set_ylabel("sentinel / best")
    below.set_xlabel("window, in the order run")
    order = {id(row): n for n, row in enumerate(study.rows.samples)}
    timed = [row for row in counted_windows(study.rows.samples) if finite(row.elapsed_ns)]
    medians = _cell_medians(timed, study)
    spread: list[float] = []
    for i, arm in enumerate(_arms(study)):
        mine = [
            (order[id(r)], (finite(r.elapsed_ns) or 0) / medians[arm, r.phase, r.frontier])
            for r in timed
            if study.label(r.run_id, r.arm) == arm and (arm, r.phase, r.frontier) in medians
        ]
        style = _style(i)
        if mine:
            # Thousands of marks would make the page heavy; a thin line holds as many points in a tenth of the bytes.
            look: dict[str, Any] = (
                {"linestyle": "none", "markersize": 3}
                if len(timed) <= MARKS_AT_MOST
                else {"linewidth": 0.6, "marker": ""}
            )
            above.plot(*zip(*mine), **(style | look))
            canvas.entry(arm, style)
            canvas.drawn = True
        spread += [y for _, y in mine]
    sentinel = [(n, s) for n, r in enumerate(study.rows.samples) if (s := finite(r.extra.get("sentinel_ns"))) and s > 0]
    if sentinel:
        best = min(s for _, s in sentinel)
        below.plot([n for n, _ in sentinel], [s / best for _, s in sentinel], color=INK, linewidth=0.9)
    elif canvas.drawn:
        below.set_yticks([])
        below.annotate("no sentinel in the rows", (0.5, 0.5), xycoords="axes fraction", ha="center")
    _shade_hot([above, below], study.rows.samples)
    for axes in (above, below):
        _session_lines(axes, study.rows.samples)
    words = (
        f"Windows took {text.number(min(spread))} to {text.number(max(spread))} of their cell's median"
        if spread
        else ""
    )
    return canvas.finish(words or "No window has a time", "Grey: windows flagged hot. Dotted: a new session.")


def _shade_hot(panels: list[Axes], samples: Sequence[SampleRow]) -> None:
    """Shade stretches of windows flagged hot, each stretch once."""
    hot = [n for n, row in enumerate(samples) if "hot" in row.flags]
    starts = [n for n in hot if n - 1 not in set(hot)]
    for start in starts:
        end = start
        while end < len(samples) and "hot" in samples[end].flags:
            end += 1
        for axes in panels:
            axes.axvspan(start - 0.5, end - 0.5, color=SHADE, zorder=0)


def warmup(study: Study) -> Plot:
    """Times of the warm-up rounds of every arm and point over their last, where the rows hold them."""
    canvas = Canvas("warmup", "Warm-up: rounds before the first window", [])
    axes = canvas.axes
    axes.set_ylabel("time / last round")
    axes.set_xlabel("round")
    longest, slowest = 0, 1.0
    arms = _arms(study)
    for row in study.rows.samples:
        record, arm = row.extra.get("warmup"), study.label(row.run_id, row.arm)
        times = [t for t in map(finite, record.get("elapsed_ns") or []) if t] if isinstance(record, dict) else []
        if not times or arm not in arms:
            continue
        i = arms.index(arm)
        style = _style(i)
        axes.plot(range(1, len(times) + 1), [t / times[-1] for t in times], linewidth=0.8, markersize=3, **style)
        canvas.entry(arm, style)
        canvas.drawn = True
        longest, slowest = max(longest, len(times)), max(slowest, max(times) / times[-1])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if not canvas.drawn:
        return canvas.finish("The rows hold no warm-up times")
    return canvas.finish(
        f"Up to {text.count(longest, 'round')}; the slowest took {text.number(slowest)} times the last"
    )


def _cell_medians(rows: Sequence[SampleRow], study: Study) -> dict[tuple[str, str, int], float]:
    times: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        times.setdefault((study.label(row.run_id, row.arm), row.phase, row.frontier), []).append(
            finite(row.elapsed_ns) or 0
        )
    return {key: m for key, values in times.items() if (m := float(np.median(values))) > 0}


def _session_lines(axes: Axes, samples: Sequence[SampleRow]) -> None:
    for n, (before, after) in enumerate(zip(samples, samples[1:])):
        if (before.run_id, before.session) != (after.run_id, after.session):
            axes.axvline(n + 0.5, color=INK, linestyle=":", linewidth=0.8)


def _arms(study: Study) -> list[str]:
    return [arm for arm in study.arms if arm not in study.aa_arms]


def _style(i: int) -> dict[str, Any]:
    """Colour and shape of series number `i`; from the eighth on, colours come again with another shape."""
    again = i // len(COLOURS)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + again) % len(MARKERS)]}


def _x(frontier: int) -> float:
    return math.log2(max(frontier, 1))


def _range_words(lines: dict[str, list[Cell]], value: Callable[[Cell], float | None], unit: str) -> str:
    said = []
    for arm, line in lines.items():
        known = [(v, c.frontier) for c in line if (v := value(c)) is not None]
        if known:
            (low, at_low), (high, at_high) = min(known), max(known)
            words = f"{arm}: {text.number(low)} {unit} at {text.tokens(at_low)}"
            said.append(words if at_low == at_high else f"{words}, {text.number(high)} at {text.tokens(at_high)}")
    return "; ".join(said) or "No point has a number."


class Canvas:
    """A plot in the making: axes with labelled frontiers, a legend of colour and shape, numbered notes for gaps."""

    def __init__(self, name: str, title: str, frontiers: Sequence[int], panels: int = 1, height: float | None = None):
        self.name, self.title, self.frontiers = name, title, list(frontiers)
        usual = 2.2 * panels + 1.3 if panels > 1 else 3.6
        self.figure = Figure(figsize=(5.6, height or usual), layout="constrained")
        made: Any = self.figure.subplots(panels, 1, sharex=True, squeeze=False)
        self.panels: list[Axes] = list(made[:, 0])
        self.axes = self.panels[0]
        self.drawn = False
        self._gaps: dict[tuple[str, str, str], list[int]] = {}
        self._legend: dict[str, dict[str, Any]] = {}
        for axes in self.panels:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}" if abs(y) >= 100 else f"{y:.6g}")
        if self.frontiers:
            bottom = self.panels[-1]
            bottom.set_xlabel("context, tokens")
            bottom.set_xticks([_x(f) for f in self.frontiers], [text.tokens(f) for f in self.frontiers])
            bottom.set_xlim(_x(self.frontiers[0]) - 0.6, _x(self.frontiers[-1]) + 0.6)

    def entry(self, label: str, style: dict[str, Any]) -> None:
        """Add a series to the legend."""
        self._legend.setdefault(label, style)

    def line(self, axes: Axes, i: int, label: str, frontiers: Sequence[int], values: Sequence[float | None]) -> None:
        """A line with markers over the frontiers, broken where there is no value."""
        style = _style(i)
        y = [math.nan if v is None else v for v in values]
        axes.plot([_x(f) for f in frontiers], y, **style)
        self.drawn = self.drawn or any(v is not None for v in values)
        self.entry(label, style)

    def from_zero(self) -> None:
        """Let every panel start at 0, so that heights compare, with air above the highest mark."""
        for axes in self.panels:
            tops = [t for line in axes.lines for t in np.asarray(line.get_ydata(), dtype=float) if np.isfinite(t)]
            axes.set_ylim(0, 1.1 * max(tops, default=0) or 1)

    def curve(self, i: int, label: str, line: list[Cell], value: Callable[[Cell], Any], band: bool = False) -> None:
        """The cells of one arm as a line, with their spread if asked for."""
        self.line(self.axes, i, label, [c.frontier for c in line], [value(c) for c in line])
        if band:
            low = [math.nan if c.low is None else c.low for c in line]
            high = [math.nan if c.high is None else c.high for c in line]
            x = [_x(c.frontier) for c in line]
            self.axes.fill_between(x, low, high, color=COLOURS[i % len(COLOURS)], alpha=0.22, linewidth=0)

    def crosses(self, i: int, arm: str, line: list[Cell], offset: int, of: int) -> None:
        """Mark every gap of an arm on the floor of the plot; arms stand side by side."""
        shift = (offset - (of - 1) / 2) * min(0.22, 0.7 / max(of, 1))
        for cell in line:
            if cell.gap:
                self.cross(i, cell.frontier, shift, arm, text.gap(cell.gap), cell.reason)

    def cross(self, i: int, frontier: int, shift: float, label: str, kind: str, reason: str) -> None:
        """One missing point: a cross on a hatched strip, with the number of its note; like gaps share a note."""
        key = (label, kind, text.one_line(reason))
        self._gaps.setdefault(key, []).append(frontier)
        x, colour = _x(frontier), COLOURS[i % len(COLOURS)]
        self.axes.axvspan(x - 0.4, x + 0.4, facecolor="none", edgecolor=GRID, hatch="////", linewidth=0, zorder=0)
        floor = self.axes.get_xaxis_transform()
        self.axes.plot([x + shift], [0.05], marker="x", color=colour, markeredgewidth=2, transform=floor, zorder=5)
        number = list(self._gaps).index(key) + 1
        self.axes.text(x + shift, 0.09, str(number), transform=floor, ha="center", fontsize=7.5)

    def _notes(self) -> list[str]:
        return [
            f"{label} at {text.frontier_list(at, self.frontiers)}: {kind}" + (f" – {reason}" if reason else "")
            for (label, kind, reason), at in self._gaps.items()
        ]

    def finish(self, words: str, extra: str = "") -> Plot:
        """Legend, an explicit word where nothing could be drawn, and both file forms."""
        if not self.drawn:
            for axes in self.panels:
                axes.set_yticks([])
            self.axes.annotate("no data", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=14)
        if len(self._legend) > LEGEND_AT_MOST:
            extra = f"{len(self._legend)} arms, too many to name here; their figures are in the tables. {extra}"
        elif self._legend:
            handles = [Line2D([], [], linestyle="none", **style) for style in self._legend.values()]
            # A label that starts with an underscore is left out of a legend; a thin space in front keeps it in.
            labels = [f"\u200a{_short(label)}" for label in self._legend]
            self.figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=8.5, handletextpad=0.1)
        # Laid out once; left in place, the engine would lay out and draw again for each file.
        engine = self.figure.get_layout_engine()
        if engine:
            engine.execute(self.figure)
        self.figure.set_layout_engine(None)
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", metadata={"Software": None})
        vector = io.StringIO()
        self.figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None})
        gaps = sum(map(len, self._gaps.values()))
        missing = f" {text.count(gaps, 'point')} without a number, listed below." if gaps else ""
        description = f"{self.title}. {words}.{missing} {extra}".replace("..", ".").strip()
        return Plot(self.name, self.title, description, vector.getvalue(), buffer.getvalue(), self._notes())


def _short(label: str, limit: int = 34) -> str:
    label = text.one_line(label)
    return label if len(label) <= limit else label[: limit - 1] + "…"


_THEMED = {INK: "ink", GRID: "grid", SHADE: "shade"} | {colour: f"s{i}" for i, colour in enumerate(COLOURS)}


def inline_svg(plot: Plot) -> str:
    """The plot for an HTML page: ids made unique to it, colours taken from the page so that it follows dark mode."""
    svg = plot.svg[plot.svg.index("<svg") :]
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{plot.name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{plot.name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{plot.name}-\1)", body)
    body = body.replace("fill: #ffffff", "fill: none")
    # Only whole style values are colours; a label may spell one too.
    body = re.sub(
        r"((?:fill|stroke|color): ?)(#[0-9a-f]{6})\b",
        lambda m: m[1] + (f"var(--{_THEMED[m[2]]}, {m[2]})" if m[2] in _THEMED else m[2]),
        body,
    )
    names = f'role="img" aria-labelledby="{plot.name}-title {plot.name}-desc"'
    title = f'<title id="{plot.name}-title">{_escape(plot.title)}</title>'
    desc = f'<desc id="{plot.name}-desc">{_escape(plot.description)}</desc>'
    return f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0] if box else ""} {names}>{title}{desc}{body}'


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
