"""What the gate says, in the forms that CI systems show: Markdown for a pull request, JUnit XML, annotations."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from reports import text
from reports.gate import Answer, Line, named

_TITLES = {0: "no confirmed slowdown", 1: "slower", 2: "cannot tell"}
_LEVELS = {"slower": "error", "suspect": "warning", "cannot tell": "warning"}


def ci() -> dict[str, str]:
    """Variables by which a CI system says that it is one, and where its summary goes; empty elsewhere."""
    return {name: os.environ[name] for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY") if name in os.environ}


def markdown(answer: Answer, strict: bool = False) -> str:
    """A summary for a pull request: the verdict first, a row for each contrast, doubts and notes below.

    strict: whether "cannot tell" counts as failure, which the summary says.
    """
    meaning = "" if answer.code != 2 else " (counts as failure here)" if strict else " (neutral: no verdict)"
    parts = [f"## Gate: {_TITLES[answer.code]}{meaning}", f"`{answer.run}` against {text.markdown(answer.against)}."]
    slower = [line for line in answer.lines if line.word == "slower"]
    parts += [f"- **{_headline(line)}**" for line in slower]
    if answer.lines:
        head = "| contrast | phase | context | rate, new over old | 95 % interval | margin | adjusted p | verdict |"
        parts.append("\n".join([head, "|---|---|--:|--:|--:|--:|--:|---|", *map(_row, answer.lines)]))
    if answer.doubts or answer.code == 2:
        said = [str(doubt) for doubt in answer.doubts] or [answer.reason]
        parts.append(
            "\n".join(["Why this run cannot rule a slowdown out:", "", *(f"- {text.markdown(s)}" for s in said)])
        )
    if answer.notes:
        parts.append("\n".join(f"- {text.markdown(note)}" for note in answer.notes))
    for place in answer.places:
        parts.append(", ".join(f"{name}: {text.markdown(value)}" for name, value in place.items()))
    return "\n\n".join(parts) + "\n"


def _headline(line: Line) -> str:
    said = f"{text.markdown(line.contrast)}: {line.phase} at {text.tokens(line.frontier)} tokens is {line.size}"
    return said + text.markdown(named(line))


def _row(line: Line) -> str:
    cells = [
        text.markdown(line.contrast),
        line.phase,
        text.tokens(line.frontier),
        text.ratio(line.ratio) + (f", again {text.ratio(line.confirmed_ratio)}" if line.confirmed_ratio else ""),
        text.markdown(text.interval(line.low, line.high)),
        text.percent(line.margin),
        text.ABSENT if line.p is None else f"{line.p:.2g}",
        line.word,
    ]
    return "| " + " | ".join(cells) + " |"


def junit(answer: Answer, strict: bool = False) -> str:
    """JUnit XML: one test case a contrast and a doubt. A confirmed slowdown fails; what cannot be told is skipped.

    strict: what cannot be told fails too.
    """
    suite = ET.Element("testsuite", name="lilybench gate")
    for line in answer.lines:
        case = ET.SubElement(
            suite, "testcase", classname=text.one_line(f"gate.{line.phase}"), name=text.one_line(line.name)
        )
        if line.word == "slower":
            ET.SubElement(case, "failure", message=_headline(line)).text = text.one_line(line.reason)
        elif line.word in ("suspect", "cannot tell"):
            _undecided(case, f"{line.word}: {line.reason}", strict)
    for doubt in answer.doubts:
        case = ET.SubElement(suite, "testcase", classname="gate.doubt", name=text.one_line(str(doubt)))
        _undecided(case, str(doubt), strict)
    if answer.code == 2 and not answer.doubts:
        _undecided(ET.SubElement(suite, "testcase", classname="gate.doubt", name="verdict"), answer.reason, strict)
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
        suite.set(name, str(len(list(suite.iter(tag)))))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _undecided(case: ET.Element, said: str, strict: bool) -> None:
    ET.SubElement(case, "failure" if strict else "skipped", message=text.one_line(said))


def annotated(answer: Answer, strict: bool = False) -> list[str]:
    """Workflow commands for GitHub Actions: an error for each confirmed slowdown, a warning for each doubt."""
    undecided = "error" if strict else "warning"
    made = []
    for line in answer.lines:
        level = _LEVELS.get(line.word)
        if level == "error":
            made.append(_command("error", "slower", _headline(line)))
        elif level:
            made.append(_command(undecided, line.word, f"{line.name}: {line.reason or 'not confirmed yet'}"))
    made += [_command(undecided, "cannot tell", str(doubt)) for doubt in answer.doubts]
    return made or [_command("notice" if answer.code == 0 else undecided, "gate", answer.reason)]


def _command(level: str, title: str, message: str) -> str:
    # A line break would end the command, and whatever followed could be one of its own.
    message = text.one_line(message).replace("%", "%25")
    return f"::{level} title={title}::{message}"


def lines(answer: Answer, strict: bool = False, environment: Mapping[str, str] | None = None) -> list[str]:
    """Lines for stdout: annotations under GitHub Actions, then the verdict."""
    environment = ci() if environment is None else environment
    made = annotated(answer, strict) if environment.get("GITHUB_ACTIONS") == "true" else []
    return [*made, text.one_line(answer.reason)]


def write(
    answer: Answer,
    strict: bool = False,
    junit_file: Path | None = None,
    summary_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Write what was asked for; the Markdown summary is also appended to the file that ``GITHUB_STEP_SUMMARY`` names.

    Raises:
        OSError: a file that cannot be written.
    """
    environment = ci() if environment is None else environment
    summary = markdown(answer, strict)
    if junit_file is not None:
        junit_file.write_text(junit(answer, strict), encoding="utf-8")
    if summary_file is not None:
        summary_file.write_text(summary, encoding="utf-8")
    if step := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(step).open("a", encoding="utf-8") as file:
            file.write(summary)
