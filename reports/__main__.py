"""Reports from rows, on any machine.

    python -m reports build RUN [RUN...]     report.html, report.md, figures/ and tables/; several runs are merged
    python -m reports compare A B            the same points in two runs
    python -m reports gate RUN               exit 0: no confirmed slowdown, 1: confirmed slowdown, 2: cannot tell

A run is a folder as `python -m sweeps` leaves it. The path of what was written comes last on stdout. Bad input ends
with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.load import ReportError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ReportError as error:
        print(f"reports: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        # To the caller of a gate 1 means a slowdown, so a fault of ours must not end with it.
        said = " ".join(str(error).split())
        print(
            f"reports: these rows cannot be read as a run ({type(error).__name__}: {said}): were they edited? "
            "python -X dev shows where",
            file=sys.stderr,
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports", description="Reports from the rows of a run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="build|compare|gate")
    build = commands.add_parser("build", help="write the report of one run, or of several together")
    build.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    build.add_argument("--output", type=Path, metavar="DIR", help="folder to write into (default: the run folder)")
    build.set_defaults(run=_build)
    compare = commands.add_parser("compare", help="the same points in two runs")
    compare.add_argument("a", type=Path, metavar="A", help="run folder of before, or of there")
    compare.add_argument("b", type=Path, metavar="B", help="run folder of after, or of here")
    compare.add_argument("--output", type=Path, metavar="DIR", help="folder to write into (default: inside B)")
    compare.set_defaults(run=_compare)
    gate = commands.add_parser(
        "gate",
        help="exit code 0: no confirmed slowdown, 1: confirmed slowdown, 2: cannot tell",
        description="Exit code 0: no confirmed slowdown. 1: confirmed slowdown. 2: cannot tell (missing or unreadable "
        "rows, a failed check, an unconfirmed slowdown, too many unclear).",
    )
    gate.add_argument("gated", type=Path, metavar="RUN", help="run folder")
    gate.add_argument(
        "--confirm",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="later runs of the same command: a slowdown is confirmed when their sessions show it too",
    )
    gate.set_defaults(run=_gate)
    return parser


# Imports wait until a command needs them: --help answers at once, without matplotlib.


def _build(arguments: argparse.Namespace) -> int:
    from reports.page import build

    print(build(arguments.runs, arguments.output))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from reports.compare import compare

    print(compare(arguments.a, arguments.b, arguments.output))
    return 0


def _gate(arguments: argparse.Namespace) -> int:
    from reports.gate import gate

    answer = gate(arguments.gated, arguments.confirm)
    print(answer.reason)
    return answer.code


if __name__ == "__main__":
    sys.exit(main())
