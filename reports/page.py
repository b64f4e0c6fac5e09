"""A whole report: rows in, HTML, Markdown, figures and tables out. The same rows give the same bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reports import claims, drafting, facts, figures, interplay, ladder, limits, quality, summary, tables, text, tiles
from reports.cells import Study, study
from reports.load import ReportError, Rows, read_rows
from sweeps.rows import SCHEMA

TEMPLATES = Path(__file__).parent / "templates"

MARKS = {
    "faster": "▲",
    "slower": "▼",
    "same": "=",
    "unclear": "?",
    "blocked": "✕",
    "unsupported": "–",
    "mixed": "◆",
}
"""A shape for each verdict, so that colour is never the only sign."""

SECTIONS = (
    ("claims", "Published"),
    ("rates", "Rates"),
    ("ratios", "Ratios"),
    ("ladder", "Ladder"),
    ("interactions", "Interactions"),
    ("drafting", "Drafting"),
    ("quality", "Quality"),
    ("limits", "Limits"),
    ("memory", "Memory"),
    ("drift", "Drift"),
    ("gaps", "Skipped and failed"),
    ("executed", "Executed"),
    ("points", "Every point"),
    ("environment", "Environment"),
    ("command", "Command"),
    ("glossary", "Glossary"),
)


def build(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of one or more run folders and return the path of its ``report.html``.

    output: folder to write into; by default the run folder itself, or for several runs a folder beside the first.

    Raises:
        ReportError: a folder that cannot be read, or an output folder that cannot be written.
    """
    rows = read_rows(folders)
    out = output or default_output(rows)
    seen = study(rows)
    rungs = ladder.ladders(seen)
    drawn = figures.plots(seen) | {"ladder": ladder.plots(rungs)}
    pairs = interplay.details(seen)
    grids = interplay.grid(seen, pairs)
    more = [claims.claims(seen), claims.facts(), claims.against_mlx(seen), ladder.table(rungs), pairs, *grids]
    more += (sizes := tiles.tiles(seen))
    more += [quality.quality(seen), *limits.limits(seen), *(drafts := drafting.drafting(seen))]
    made = tables.tables(seen) | {table.name: table for table in more}
    context = _context(seen, drawn, made) | {
        "grids": grids,
        "drafts": drafts,
        "sizes": [table for table in sizes if table.rows],
        "interplay": interplay.MEANING,
        "untested": claims.untested(seen),
    }
    files: dict[str, str | bytes] = {
        "report.md": render("report.md.j2", context),
        "report.html": render("report.html.j2", context),
    }
    for plot in (plot for group in drawn.values() for plot in group):
        files[f"figures/{plot.name}.svg"] = plot.svg
        files[f"figures/{plot.name}.png"] = plot.png
    for table in made.values():
        files[f"tables/{table.name}.csv"] = table.csv()
        files[f"tables/{table.name}.jsonl"] = table.jsonl()
    write(out, files)
    return out / "report.html"


def default_output(rows: Rows) -> Path:
    """The run folder, or for several a folder beside the first, named after all of them."""
    if len(rows.folders) == 1:
        return rows.folders[0]
    names = "\n".join(folder.resolve().name for folder in rows.folders)
    return rows.folders[0].resolve().parent / f"merged-{hashlib.sha256(names.encode()).hexdigest()[:8]}"


def write(out: Path, files: dict[str, str | bytes]) -> None:
    """Write `files` (relative name to content) below `out`, replacing only files of these names."""
    for name, content in files.items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
            path.write_bytes(data)
        except OSError as error:
            raise ReportError(
                f"{path}: cannot be written ({error.strerror}); give another folder with --output"
            ) from None


def render(template: str, context: dict[str, Any]) -> str:
    """One template filled in; values are escaped for HTML in HTML templates and by the `md` filter in Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=lambda name: bool(name) and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = text.markdown
    environment.filters["indented"] = lambda value: "\n".join("    " + line for line in str(value).splitlines())
    environment.globals["svg"] = lambda plot: Markup(figures.inline_svg(plot))
    environment.globals["css"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(context)


def _context(seen: Study, drawn: dict[str, list[figures.Plot]], made: dict[str, tables.Table]) -> dict[str, Any]:
    runs = seen.rows.runs
    found = summary.findings(seen)
    flags = Counter(flag for row in seen.rows.samples for flag in row.flags)
    return {
        "title": _title(seen, found),
        "places": summary.places(runs),
        "warnings": summary.warnings(runs, seen),
        "findings": found,
        "marks": MARKS,
        "sections": SECTIONS,
        "figures": drawn,
        "tables": made,
        "limits": [table for name, table in made.items() if name.startswith("limits-")],
        "methods": sorted({text.one_line(r.method).rstrip(".") for r in seen.results if r.method}),
        "noise": summary.noise(seen),
        "walk_checks": summary.walk_checks(seen),
        "flags": [(name, text.FLAGS.get(name, ""), n) for name, n in sorted(flags.items())],
        "torn": [Path(name).name for name in seen.rows.torn],
        "commands": tables.commands(runs),
        "configs": tables.configs(runs),
        "toy": any(facts.is_toy(run) for run in runs),
        "real_command": facts.REAL_MODEL_COMMAND,
        "glossary": text.GLOSSARY,
        "schema": SCHEMA,
        "run_ids": list(dict.fromkeys(run.run_id for run in runs)),
    }


def _title(seen: Study, found: list[summary.Finding]) -> str:
    models = list(dict.fromkeys(text.one_line(facts.model_name(run)) for run in seen.rows.runs))
    what = list(dict.fromkeys(f.title for f in found))
    subject = what[0] if len(what) == 1 else text.count(len(what), "contrast") if what else "Benchmark"
    return f"{subject} on {', '.join(models)}" if models else "Benchmark without any rows" if not seen.arms else subject
