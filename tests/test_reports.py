"""Reports from made-up rows: what the first screen says, what happens to odd rows, and the same bytes twice."""

from __future__ import annotations

import csv
import dataclasses
import html
import html.parser
import json
import locale
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import report_rows as rows

from reports import tables, text
from reports.__main__ import main
from reports.cells import study
from reports.load import ReportError, read_rows
from reports.page import build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a realistic run."""
    return build([rows.write_run(tmp_path_factory.mktemp("runs") / "r1", *rows.realistic())])


def page(folder: Path) -> str:
    """HTML of the report of `folder`, built anew."""
    return build([folder]).read_text(encoding="utf-8")


def one_point(**changes: Any) -> tuple[list, list, list]:
    """A run of a single contrast at one decode point of 256 tokens."""
    samples = [rows.sample(arm, "decode", 256, 0, b, s) for b in range(2) for s, arm in enumerate(("full", "mlx_lm"))]
    return [rows.run_row()], samples, [rows.contrast("decode", 256, **changes)]


class Outline(html.parser.HTMLParser):
    """Checks that tags nest, and collects what a screen reader goes by."""

    VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.headings: list[int] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        self.attributes.append((tag, found))
        if found.get("id"):
            self.ids[str(found["id"])] += 1
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def outline(source: str) -> Outline:
    parsed = Outline()
    parsed.feed(source)
    assert not parsed.open
    return parsed


# -- the report of a realistic run ----------------------------------------------------------------


def test_first_screen_answers(built: Path) -> None:
    """Verdict, size, certainty, correctness and limit stand before the first plot."""
    first = html.unescape(built.read_text(encoding="utf-8").split('id="rates"')[0])
    assert "Decode: full is faster than mlx_lm at all 10 context lengths." in first
    assert "faster at 256 to 16K; slower at 32K and 64K" in first
    assert "1.284× [1.265, 1.303]" in first
    assert "2 sessions, each a fresh process" in first
    assert "quality guard passed" in first
    assert "of the memory bandwidth" in first
    assert "of one large product's arithmetic" in first
    for fact in ("Apple M9 Max", "Qwen3.6-35B-A3B-4bit", "mlx 0.32.4", "mlx-lm 0.32.2", "2026-11-30"):
        assert fact in first


def test_html_stands_alone_and_is_well_formed(built: Path) -> None:
    """Nothing is loaded from elsewhere; ids are unique; every plot has a name, every table a caption."""
    source = built.read_text(encoding="utf-8")
    parsed = outline(source)
    assert max(parsed.ids.values()) == 1
    assert parsed.tags["script"] == parsed.tags["img"] == 0
    for tag, attributes in parsed.attributes:
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, value)
            assert value is None or not value.startswith("#") or value[1:] in parsed.ids, value
    assert not re.search(r"url\((?!#)", source)
    plots = [attributes for tag, attributes in parsed.attributes if tag == "svg"]
    assert len(plots) == 9
    assert all(
        a.get("role") == "img" and all(i in parsed.ids for i in str(a["aria-labelledby"]).split()) for a in plots
    )
    assert parsed.tags["table"] == parsed.tags["caption"]
    assert all(after - before <= 1 for before, after in zip([0, *parsed.headings], parsed.headings))
    assert "prefers-color-scheme: dark" in source and "@media print" in source


def test_gaps_are_visible_with_their_reason(built: Path) -> None:
    source = html.unescape(built.read_text(encoding="utf-8"))
    assert "mlx_lm at 64K: out of memory – device out of memory at chunk 29 of 32" in source
    assert "mlx_lm at 128K: skipped – out of memory at 64K already" in source
    with (built.parent / "tables/gaps.csv").open(newline="", encoding="utf-8") as file:
        assert [(r["arm"], r["frontier"], r["kind"]) for r in csv.DictReader(file)] == [
            ("mlx_lm", "65536", "oom"),
            ("mlx_lm", "131072", "skipped"),
        ]


def test_tables_hold_the_numbers_of_the_rows(built: Path) -> None:
    """Medians in the files are those computed by hand from the windows; warm-up is not among them."""
    samples = [s for s in rows.realistic()[1] if (s.arm, s.phase, s.frontier) == ("full", "decode", 256)]
    rates = sorted(63 / (s.elapsed_ns / 1e9) for s in samples if s.block >= 0)
    middle = (rates[len(rates) // 2 - 1] + rates[len(rates) // 2]) / 2
    lines = (built.parent / "tables/points.jsonl").read_text(encoding="utf-8").splitlines()
    found = [r for r in map(json.loads, lines) if (r["arm"], r["phase"], r["frontier"]) == ("full", "decode", 256)]
    assert len(found) == 1 and found[0]["windows"] == len(rates) == 8
    assert found[0]["median"] == pytest.approx(middle, rel=1e-12)
    assert (found[0]["sessions"], found[0]["blocks"]) == (2, 4)


def test_files_beside_the_page(built: Path) -> None:
    names = {p.relative_to(built.parent).as_posix() for p in built.parent.rglob("*") if p.is_file()}
    for plot in ("rate-prefill", "rate-decode", "ratio-prefill", "ratio-decode", "memory", "drift", "warmup"):
        assert {f"figures/{plot}.svg", f"figures/{plot}.png"} <= names
    assert {"report.html", "report.md", "tables/contrasts.csv", "tables/points.jsonl"} <= names


def test_markdown_tables_are_whole(built: Path) -> None:
    """Lines of a table follow each other and have as many cells as its head."""
    lines = (built.parent / "report.md").read_text(encoding="utf-8").splitlines()
    heads = [i for i, line in enumerate(lines) if re.fullmatch(r"\|( -+:? \|)+", line)]
    assert len(heads) >= 7
    for i in heads:
        cells = lines[i].count("|")
        assert len(re.findall(r"(?<!\\)\|", lines[i - 1])) == len(re.findall(r"(?<!\\)\|", lines[i + 1])) == cells


def test_same_rows_same_bytes(tmp_path: Path) -> None:
    """Built twice, in two processes with different hash seeds, every file is the same to the byte."""
    made = []
    for seed in ("1", "2"):
        folder = rows.write_run(tmp_path / seed / "r1", *rows.realistic(1, 1))
        command = [sys.executable, "-m", "reports", "build", str(folder)]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert done.stdout.splitlines()[-1] == str(folder / "report.html"), done.stderr
        made.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()})
    assert made[0].keys() == made[1].keys()
    assert [name for name in made[0] if made[0][name] != made[1][name]] == []


def test_reports_never_import_mlx(tmp_path: Path) -> None:
    folder = rows.write_run(tmp_path / "r1", *one_point())
    code = (
        "import sys; from reports.__main__ import main; main(['build', sys.argv[1]]); main(['gate', sys.argv[1]]); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


# -- what readers must be told --------------------------------------------------------------------


def test_cuda_report_names_its_peer(tmp_path: Path) -> None:
    run, samples, contrasts = one_point()
    run = [rows.run_row(machine=rows.H200)]
    first = page(rows.write_run(tmp_path / "r", run, samples, contrasts)).split('id="rates"')[0]
    assert "MLX-LM has no fast Gated DeltaNet here" in first and "llama.cpp" in first
    assert "Nothing in this report speaks of a Mac" in first


def test_mac_report_does_not_speak_of_cuda(built: Path) -> None:
    assert "CUDA" not in built.read_text(encoding="utf-8")


@pytest.mark.parametrize("model", [rows.TOY, {"name": "tiny", "kind": "embedded", "seed": 0}])
def test_toy_model_is_named_with_the_real_command(tmp_path: Path, model: dict[str, Any]) -> None:
    _, samples, contrasts = one_point()
    source = page(rows.write_run(tmp_path / "r", [rows.run_row(model=model, machine=rows.CPU)], samples, contrasts))
    assert "Toy model" in source.split('id="rates"')[0]
    assert "python -m sweeps model=qwen3.6-35b sweep=ten" in source


def test_synthetic_weights_are_loud(tmp_path: Path) -> None:
    _, samples, contrasts = one_point()
    counted = {"busiest_expert": {"mean": 7.63, "least": 5.0, "most": 10.2, "tokens": 1024}}
    run = rows.run_row(model={"name": "synthetic-35b", "kind": "synthetic", "seed": 0} | counted)
    source = page(rows.write_run(tmp_path / "r", [run], samples, contrasts))
    assert "Synthetic weights" in source.split('id="rates"')[0]
    assert "busiest expert 7.6 times its share (5.0 to 10.2 by layer)" in source


def test_one_process_is_said(tmp_path: Path) -> None:
    source = page(rows.write_run(tmp_path / "r", *one_point(unit="block", units=60)))
    assert "60 blocks of one session: this process only" in source.split('id="rates"')[0]


def test_unclear_says_what_it_could_have_seen(tmp_path: Path) -> None:
    source = page(rows.write_run(tmp_path / "r", *one_point(verdict="unclear", detectable=1.031)))
    assert "cannot tell whether full is faster" in source
    assert "a difference of 3.1\N{NO-BREAK SPACE}% would have been seen" in source


def test_wide_margin_is_a_warning(tmp_path: Path) -> None:
    """Where an arm differs from itself by a third, same is no finding."""
    source = page(rows.write_run(tmp_path / "r", *one_point(verdict="same", ratio=0.9, margin=0.33)))
    assert "Here, same means little" in source.split('id="rates"')[0]


def test_many_contrasts_begin_with_a_table(tmp_path: Path) -> None:
    arms = [f"arm{i}" for i in range(8)]
    samples = [rows.sample(arm, "decode", 256) for arm in [*arms, "mlx_lm"]]
    answers = [rows.contrast("decode", 256, arm) for arm in arms]
    source = page(rows.write_run(tmp_path / "r", [rows.run_row()], samples, answers))
    first = source.split('id="rates"')[0]
    assert first.count('<th scope="row"') == 8 and first.count("▲ faster") == 16


def test_blocked_arm_has_no_speed_anywhere(tmp_path: Path) -> None:
    """A wrong answer has no ratio and no rate, in the page, in Markdown and in the files."""
    check = {"name": "teacher-forced", "passed": False, "reason": "perplexity 1.9 times the reference"}
    run, samples, contrasts = one_point(ratio=7.7, low=7.6, high=7.8, verdict="faster", check=check)
    fast = [dataclasses.replace(s, elapsed_ns=63 * 10**9 // 987) if s.arm == "full" else s for s in samples]
    folder = rows.write_run(tmp_path / "r", run, fast, contrasts)
    source = page(folder)
    assert "no speed is given for full" in source and "perplexity 1.9 times" in source
    made = [folder / "report.html", folder / "report.md", *folder.glob("tables/*"), *folder.glob("figures/*.svg")]
    for file in made:
        assert not re.search(r"\b7\.7|\b98[67]\b", file.read_text(encoding="utf-8")), file


def test_executed_other_than_requested_is_marked(tmp_path: Path) -> None:
    arms = [
        {"name": "full", "subject": "engine", "config": {"experts": {"variant": "expand"}, "gated_delta": "registers"}}
    ]
    job = {"run_id": "r1", "arms": arms, "points": []}
    folder = rows.write_run(tmp_path / "r", *one_point(), job=job)
    build([folder])
    with (folder / "tables/executed.csv").open(newline="", encoding="utf-8") as file:
        found = {(r["arm"], r["op"]): r["agrees"] for r in csv.DictReader(file)}
    assert found["full", "experts"] == "NO" and found["full", "gated_delta"] == "yes"


def test_planned_point_without_rows_is_a_gap(tmp_path: Path) -> None:
    arms = [{"name": "full", "subject": "engine"}, {"name": "mlx_lm", "subject": "mlx_lm"}]
    points = [
        {"phase": "decode", "frontier": 256},
        {"phase": "decode", "frontier": 512, "skip": {"mlx_lm": "budget spent"}},
    ]
    job = {"run_id": "r1", "arms": arms, "points": points}
    seen = study(read_rows([rows.write_run(tmp_path / "r", *one_point(), job=job)]))
    assert [(c.arm, c.frontier, c.gap, c.reason) for c in seen.gaps()] == [
        ("full", 512, "missing", "no rows: this point was not run"),
        ("mlx_lm", 512, "skipped", "budget spent"),
    ]


def test_point_cut_short_says_so(tmp_path: Path) -> None:
    """A budget that ends amid a point leaves its number standing, and is told."""
    run, samples, contrasts = one_point()
    note = rows.sample(
        "full", "decode", 256, block=-1, slot=-1, status="skipped", elapsed_ns=None, reason="budget spent"
    )
    seen = study(read_rows([rows.write_run(tmp_path / "r", run, [*samples, note], contrasts)]))
    assert [(c.arm, c.partial, c.reason, c.windows) for c in seen.gaps()] == [("full", "cut short", "budget spent", 2)]


# -- odd rows -------------------------------------------------------------------------------------


def odd(name: str) -> tuple[list, list, list]:
    """Runs that break careless reports."""
    run, samples, contrasts = one_point()
    lost = {"status": "error", "elapsed_ns": None, "reason": "device lost"}
    return {
        "empty": ([], [], []),
        "only a process": (run, [], []),
        "one point": (run, samples[:1], []),
        "two equal points": (run, [samples[0], dataclasses.replace(samples[0], block=1)], []),
        "all failed": (run, [dataclasses.replace(s, **lost) for s in samples], []),
        "nulls": (
            run,
            [dataclasses.replace(s, elapsed_ns=None, peak_bytes=None, least_bytes=None) for s in samples],
            [rows.contrast("decode", 256, ratio=None, low=None, high=None, detectable=None, verdict="unclear")],
        ),
        "not numbers": (
            run,
            [dataclasses.replace(s, elapsed_ns=math.nan, peak_bytes=math.inf) for s in samples],
            [rows.contrast("decode", 256, ratio=math.nan, low=math.nan, high=math.nan, verdict="faster")],
        ),
        "no interval": (run, samples, [rows.contrast("decode", 256, low=None, high=None, low90=None, high90=None)]),
        "interval beside its ratio": (run, samples, [rows.contrast("decode", 256, low=1.5, high=1.6)]),
        "zero time": (run, [dataclasses.replace(s, elapsed_ns=0) for s in samples], []),
        "nothing recorded": (
            [rows.run_row(machine={}, model={}, prompt={}, argv=[], git={}, conditions={}, config={})],
            samples,
            contrasts,
        ),
        "null where lists belong": (
            run,
            [dataclasses.replace(s, flags=None, executed=None, check=None, extra=None) for s in samples],
            contrasts,
        ),
    }[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "nothing was measured"),
        ("only a process", "nothing was measured"),
        ("one point", "No contrast has an answer in these rows"),
        ("two equal points", "full: 1"),
        ("all failed", "device lost"),
        ("nulls", "no ratio"),
        ("not numbers", "the row has a verdict but no ratio"),
        ("no interval", "no interval"),
        ("interval beside its ratio", "[1.500, 1.600]"),
        ("zero time", "no usable time"),
        ("nothing recorded", "not recorded"),
        ("null where lists belong", "do not say what was executed"),
    ],
)
def test_odd_rows_give_a_readable_report(tmp_path: Path, name: str, words: str) -> None:
    folder = rows.write_run(tmp_path / "r", *odd(name))
    source = html.unescape(page(folder))
    outline(source)
    assert words in source
    visible = re.sub(r"<[^>]*>", " ", source)
    assert not re.search(r"\b(nan|inf|None)\b", visible), name
    for file in folder.glob("tables/*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} in {name}"))


def test_no_data_is_written_on_the_plot(tmp_path: Path) -> None:
    folder = rows.write_run(tmp_path / "r", *odd("all failed"))
    build([folder])
    plot = (folder / "figures/rate-decode.svg").read_text(encoding="utf-8")
    assert "no data" in plot and ">256<" in plot


HOSTILE = 'a,"b"\n<script>alert(1)</script> $x_2$ | `c` \x07 & _d_'


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """A model or arm named like HTML, CSV, Markdown or TeX shows as it is and breaks nothing."""
    run, samples, _ = one_point()
    run = [rows.run_row(model={"name": HOSTILE})]
    samples = [dataclasses.replace(s, arm=HOSTILE) if s.arm == "full" else s for s in samples]
    contrasts = [dataclasses.replace(rows.contrast("decode", 256), arm=HOSTILE)]
    folder = rows.write_run(tmp_path / "r", run, samples, contrasts)
    source = page(folder)
    assert outline(source).tags["script"] == 0
    assert "&lt;script&gt;" in source and "$x_2$" in source
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in markdown.replace("\\<script\\>", "")
    with (folder / "tables/points.csv").open(newline="", encoding="utf-8") as file:
        assert HOSTILE in {r["arm"] for r in csv.DictReader(file)}


def test_underscore_arm_keeps_its_legend(tmp_path: Path) -> None:
    run, samples, _ = one_point()
    samples = [dataclasses.replace(s, arm="_plain") if s.arm == "full" else s for s in samples]
    folder = rows.write_run(tmp_path / "r", run, samples, [])
    build([folder])
    assert "_plain" in (folder / "figures/rate-decode.svg").read_text(encoding="utf-8").split("legend_1")[1]


def test_numbers_ignore_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a locale whose decimal sign is a comma the report does not change."""
    folder = rows.write_run(tmp_path / "r", *one_point())
    before = page(folder)
    # Asked for, not "C": what a process starts with decides how it reads files from here on.
    own = locale.setlocale(locale.LC_ALL)
    german = next((name for name in ("de_DE.UTF-8", "de_DE.utf8", "de_DE") if _can_set(name)), None)
    if german is None:
        # No German locale on this machine: stand in for what one would answer.
        conv = locale.localeconv() | {"decimal_point": ",", "thousands_sep": "."}
        monkeypatch.setattr(locale, "localeconv", lambda: conv)
        monkeypatch.setattr(locale, "format_string", lambda *_, **__: pytest.fail("asked the locale to format"))
    try:
        assert page(folder) == before
    finally:
        locale.setlocale(locale.LC_ALL, own)
    assert text.number(1234.5) == "1,234" or text.number(1234.5) == "1,235"


def _can_set(name: str) -> bool:
    try:
        locale.setlocale(locale.LC_ALL, name)
    except locale.Error:
        return False
    return True


# -- errors ---------------------------------------------------------------------------------------


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a failing command leaves on stderr; its exit code must be 2."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_unknown_schema_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, samples, contrasts = one_point()
    folder = rows.write_run(tmp_path / "r", run, [dataclasses.replace(s, schema=99) for s in samples], contrasts)
    line = failing(capsys, "build", str(folder))
    assert "samples.jsonl:1" in line and "schema version 99" in line and "version 1" in line
    assert not (folder / "report.html").exists()


def test_rows_of_another_project_version_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An older version's rows stand apart from newer ones; a newer version's field is one clear error."""
    run, samples, contrasts = one_point()
    new = rows.write_run(tmp_path / "new", run, samples, contrasts)
    older = [dataclasses.replace(s, run_id="r0") for s in samples]
    old = rows.write_run(tmp_path / "old", [rows.run_row(run_id="r0", project_version="0.0.9")], older, [])
    source = build([new, old]).read_text(encoding="utf-8")
    assert "different versions of this project: 0.0.9, 0.1.0" in html.unescape(source).split('id="rates"')[0]
    path = new / "samples.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"run_id"', '"watts": 3, "run_id"', 1), encoding="utf-8")
    line = failing(capsys, "build", str(new))
    assert "samples.jsonl:1" in line and "unknown fields: watts" in line


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"ladders": None, "interactions": None},
        {"ladders": [{"arms": ["full"], "steps": []}], "interactions": [{"arms": ["full", "mlx_lm"], "toggles": []}]},
    ],
)
def test_plans_that_are_older_or_cut_give_a_report(tmp_path: Path, settings: Any) -> None:
    contrasts = [{"name": "c", "arm": "full", "reference": "mlx_lm"}]
    points = [{"key": "decode-256", "phase": "decode", "frontier": 256}]
    job = {"run_id": "r1", "arms": [], "points": points, "contrasts": contrasts, "settings": settings}
    source = page(rows.write_run(tmp_path / "r", *one_point(), job=job))
    assert "These rows hold no ladder" in source


def test_missing_and_foreign_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such run folder" in failing(capsys, "build", str(tmp_path / "nowhere"))
    assert "no run folder" in failing(capsys, "build", str(tmp_path))


def test_broken_row_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rows.write_run(tmp_path / "r", *one_point())
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join([lines[0], "{broken\n", *lines[1:]]), encoding="utf-8")
    assert "samples.jsonl:2" in failing(capsys, "build", str(folder))


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [("runs.jsonl", "[1, 2]", "not list"), ("job.json", '{"points": [null]}', "cannot be read as a run")],
)
def test_edited_rows_never_end_a_gate_as_a_slowdown(
    file: str, line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rows.write_run(tmp_path / "r", *one_point())
    (folder / file).write_text(f"{line}\n", encoding="utf-8")
    assert main(["gate", str(folder)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_points_that_the_plan_left_out_are_neither_impossible_nor_unchecked(tmp_path: Path) -> None:
    runs, samples, (ran,) = one_point()
    left_out = dataclasses.replace(
        rows.contrast("decode", 2048), ratio=None, low=None, high=None, verdict="unsupported", check={}
    )
    said = page(rows.write_run(tmp_path / "r", runs, samples, [ran, left_out]))
    assert "not run at 2K" in said and "yes: quality guard passed at the 1 point with a number" in said


def test_torn_last_line_is_said(tmp_path: Path) -> None:
    folder = rows.write_run(tmp_path / "r", *one_point())
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"run_id": "r1", "sess')
    assert "samples.jsonl: its last line was left unfinished" in page(folder)


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rows.write_run(tmp_path / "r", *one_point())
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "--output" in failing(capsys, "build", str(folder), "--output", str(tmp_path / "file"))


# -- several runs ---------------------------------------------------------------------------------


def test_parts_of_one_run_merge(tmp_path: Path) -> None:
    """Runs from one machine share a series; named twice, a folder counts once."""
    run, samples, contrasts = one_point()
    a = rows.write_run(tmp_path / "a", run, samples, contrasts)
    later = [dataclasses.replace(s, run_id="r2", frontier=512) for s in samples]
    b = rows.write_run(tmp_path / "b", [rows.run_row(run_id="r2")], later, [])
    seen = study(read_rows([a, b, a]))
    assert seen.arms == ["full", "mlx_lm"] and seen.frontiers["decode"] == [256, 512]
    assert seen.cells["full", "decode", 256].windows == 2
    assert build([a, b]).parent.name.startswith("merged-")


def test_two_machines_never_share_a_series(tmp_path: Path) -> None:
    run, samples, contrasts = one_point()
    a = rows.write_run(tmp_path / "a", run, samples, contrasts)
    other = [dataclasses.replace(s, run_id="r2") for s in samples]
    answer = [dataclasses.replace(contrasts[0], run_ids=["r2"])]
    b = rows.write_run(tmp_path / "b", [rows.run_row(run_id="r2", machine=rows.H200)], other, answer)
    seen = study(read_rows([a, b]))
    assert seen.arms == [f"{arm} @ {chip}" for chip in ("Apple M9 Max", "NVIDIA H200") for arm in ("full", "mlx_lm")]
    assert [(r.arm, r.reference) for r in seen.results] == [tuple(seen.arms[:2]), tuple(seen.arms[2:])]


def test_same_name_other_settings_never_share_a_series(tmp_path: Path) -> None:
    run, samples, _ = one_point()
    a = rows.write_run(tmp_path / "a", run, samples, [])
    changed = [dataclasses.replace(s, run_id="r2", arm_hash="other-" + s.arm) for s in samples]
    b = rows.write_run(tmp_path / "b", [rows.run_row(run_id="r2")], changed, [])
    assert len(study(read_rows([a, b])).arms) == 4


# -- compare and gate -----------------------------------------------------------------------------


def slowed(run_id: str, factor: float, sessions: int = 3) -> tuple[list, list, list]:
    """Three sessions in which the engine takes `factor` times as long."""
    samples = [
        rows.sample(arm, "decode", 256, s, b, slot, run_id=run_id)
        for s in range(sessions)
        for b in range(2)
        for slot, arm in enumerate(("full", "mlx_lm"))
    ]
    for row in samples:
        # No clock gives the same nanoseconds in two runs.
        row.elapsed_ns = int(row.elapsed_ns * factor if row.arm == "full" else row.elapsed_ns) + len(run_id)
    ratio = rows.speed("full", "decode", 256) / rows.speed("mlx_lm", "decode", 256) / factor
    verdict = "faster" if ratio > 1.03 else "slower" if ratio < 0.97 else "same"
    answer = rows.contrast(
        "decode", 256, run_ids=[run_id], ratio=ratio, low=ratio * 0.99, high=ratio * 1.01, verdict=verdict
    )
    return [rows.run_row(s, run_id) for s in range(sessions)], samples, [answer]


def test_compare_finds_the_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = rows.write_run(tmp_path / "a", *slowed("a", 1.0))
    runs, samples, contrasts = slowed("b", 1.25)
    newer = rows.MAC | {"versions": {"mlx": "0.33.0", "mlx_lm": "0.32.2"}}
    b = rows.write_run(tmp_path / "b", [dataclasses.replace(r, machine=newer) for r in runs], samples, contrasts)
    assert main(["compare", str(a), str(b)]) == 0
    made = Path(capsys.readouterr().out.splitlines()[-1])
    outline(made.read_text(encoding="utf-8"))
    found = {
        r["arm"]: r for r in map(json.loads, (made.parent / "compare.jsonl").read_text(encoding="utf-8").splitlines())
    }
    assert found["full"]["ratio"] == pytest.approx(0.8, rel=0.005)
    assert found["full"]["low"] < 0.8 < found["full"]["high"]
    assert found["mlx_lm"]["ratio"] == pytest.approx(1.0, rel=0.005)
    for file in (made, made.with_suffix(".md")):
        source = file.read_text(encoding="utf-8")
        assert "not paired" in source and "also differ in mlx" in source and "0.33.0" in source


def test_compare_names_another_system_memory_and_code() -> None:
    told = {"full": {"code": "aa", "identity": {"experts": "1"}, "chosen": {"linear": "mlx"}}, "odd": None}
    old = rows.run_row(machine=rows.MAC | {"os": "macOS 15.6", "memory": 1}, model=rows.REAL | {"arms": told})
    assert not tables.differences([old], [old])
    arm = {"code": "bb", "identity": {"experts": "2"}, "chosen": {"linear": "packed"}}
    machine = rows.MAC | {"os": "macOS 26.1", "memory": 2}
    new = rows.run_row(
        machine=machine, model=rows.REAL | {"arms": {"full": arm}}, git={"commit": "0123abc", "dirty": True}
    )
    found = [row["fact"] for row in tables.differences([old], [new])]
    kept = ["code of full", "op code of full", "variants of full"]
    assert found == ["memory", "system", "uncommitted changes", *kept]


def test_compare_refuses_what_has_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = rows.write_run(tmp_path / "a", *slowed("a", 1.0))
    runs, samples, _ = slowed("b", 1.0)
    b = rows.write_run(tmp_path / "b", runs, [dataclasses.replace(s, arm="other-" + s.arm) for s in samples], [])
    assert "same run" in failing(capsys, "compare", str(a), str(a))
    assert "in common" in failing(capsys, "compare", str(a), str(b))


def gate(folder: Path, *more: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["gate", str(folder), *map(str, more)])
    return code, capsys.readouterr().out


def test_gate_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 no slowdown, 1 a slowdown seen again in fresh sessions, 2 whatever cannot be told."""
    fast = rows.write_run(tmp_path / "fast", *slowed("fast", 1.0))
    slow = rows.write_run(tmp_path / "slow", *slowed("slow", 1.5))
    again = rows.write_run(tmp_path / "again", *slowed("again", 1.5))
    assert gate(fast, capsys=capsys)[0] == 0
    code, said = gate(slow, capsys=capsys)
    assert code == 2 and "not yet confirmed" in said
    code, said = gate(slow, "--confirm", again, capsys=capsys)
    assert code == 1 and "confirmed slower: full_vs_mlx_lm decode 256" in said
    assert gate(slow, "--confirm", fast, capsys=capsys)[0] == 0
    assert main(["gate", str(slow), "--confirm", str(slow)]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": math.nan, "low": math.nan, "high": math.nan, "verdict": "same"},
        {"low": None, "high": None},
        {"verdict": "unclear", "ratio": 1.0, "low": 0.9, "high": 1.1},
        {"check": {"name": "teacher-forced", "passed": False}},
        {"margin": 0.5},
    ],
)
def test_gate_never_passes_on_missing_evidence(
    tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    runs, samples, contrasts = slowed("r1", 1.0)
    broken = [dataclasses.replace(contrasts[0], **change)]
    assert gate(rows.write_run(tmp_path / "r", runs, samples, broken), capsys=capsys)[0] == 2


def test_gate_on_empty_and_failed_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(rows.write_run(tmp_path / "empty", [], [], []), capsys=capsys)[0] == 2
    runs, samples, contrasts = slowed("r1", 1.0)
    lost = rows.sample("full", "decode", 512, status="error", elapsed_ns=None, reason="device lost")
    code, said = gate(rows.write_run(tmp_path / "lost", runs, [*samples, lost], contrasts), capsys=capsys)
    assert code == 2 and "full decode 512" in said
    with pytest.raises(ReportError):
        read_rows([tmp_path / "nowhere"])


def test_command_line_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["catalog"])
    assert stop.value.code == 2
    assert "invalid choice: 'catalog'" in capsys.readouterr().err
