"""Reports from rows, on any machine.

    python -m reports build RUN [RUN...]     report.html, report.md, figures/ and tables/; several runs are merged
    python -m reports compare A B            the same points in two runs
    python -m reports gate RUN               exit 0: no confirmed slowdown, 1: confirmed slowdown, 2: cannot tell
    python -m reports gate --base CHECKOUT   the same for this checkout against another: measures, confirms, judges
    python -m reports baseline RUN NAME      keep a run as what later runs of this machine are held against
    python -m reports exact FILE             counts that must not rise, against the committed ones
    python -m reports catalogue              the README's tables of ops and toggles; --check exits 1 if they are stale
    python -m reports share RUN              one HTML and one archive of rows, without what names a machine or a person
    python -m reports predict                what Macs should reach, before one was measured

A run is a folder as `python -m sweeps` leaves it. The path of what was written comes last on stdout. Bad input ends
with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.arguments import Arguments
from reports.load import ReportError, runs_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ReportError as error:
        print(f"reports: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"reports: {_denied(error)}; give another place", file=sys.stderr)
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


def _denied(error: OSError) -> str:
    """A file or disk that refused, and why, on one line."""
    return " ".join(f"{error.filename or 'disk'}: {error.strerror or error}".split())


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(prog="python -m reports", description="Reports from the rows of a run.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="build|compare|gate|baseline|exact|predict|catalogue|share"
    )
    build = commands.add_parser("build", help="write the report of one run, or of several together")
    build.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or that of a suite")
    build.add_argument("--output", type=Path, metavar="DIR", help="folder to write into (default: the run folder)")
    build.set_defaults(run=_build)
    compare = commands.add_parser("compare", help="the same points in two runs")
    compare.add_argument("a", type=Path, metavar="A", help="run folder of before, or of there")
    compare.add_argument("b", type=Path, metavar="B", help="run folder of after, or of here")
    compare.add_argument("--output", type=Path, metavar="DIR", help="folder to write into (default: inside B)")
    compare.set_defaults(run=_compare)
    _add_gate(commands)
    baseline = commands.add_parser("baseline", help="keep a run under reports/published/<chip>/NAME")
    baseline.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    baseline.add_argument("name", metavar="NAME", help="name of the baseline, such as main")
    baseline.add_argument("--renew", action="store_true", help="replace the baseline of that name")
    baseline.set_defaults(run=_baseline)
    exact = commands.add_parser(
        "exact",
        help="counts that must not rise",
        description="Exit code 0: no count rose. 1: a count rose, each named. 2: the files cannot be compared.",
    )
    exact.add_argument("counted", type=Path, metavar="FILE", help="what python -m sweeps.exact wrote")
    exact.add_argument("--against", type=Path, metavar="FILE", help="committed counts (default: those of the device)")
    exact.add_argument("--renew", action="store_true", help="write the counts as the committed ones")
    exact.set_defaults(run=_exact)
    catalogue = commands.add_parser(
        "catalogue",
        help="the README's tables of ops and toggles",
        description="Writes the tables from the registry. With --check: exit code 0 if they are right, 1 if stale.",
    )
    catalogue.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is stale")
    catalogue.set_defaults(run=_catalogue)
    share = commands.add_parser("share", help="a run to pass on, without what names a machine or a person")
    share.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    share.add_argument(
        "--output", type=Path, metavar="DIR", help="folder to write into (default: RUN-shared beside it)"
    )
    share.set_defaults(run=_share)
    predict = commands.add_parser("predict", help="rates that Macs should reach, from bytes, launches and operations")
    predict.add_argument("--output", type=Path, metavar="FILE", help="default: reports/published/predictions.md")
    predict.set_defaults(run=_predict)
    return parser


def _add_gate(commands: argparse._SubParsersAction) -> None:
    gate = commands.add_parser(
        "gate",
        help="exit code 0: no confirmed slowdown, 1: confirmed slowdown, 2: cannot tell",
        description="Exit code 0: no confirmed slowdown. 1: confirmed slowdown. 2: cannot tell (missing or unreadable "
        "rows, a failed check, an unconfirmed slowdown, too many unclear).",
    )
    gate.add_argument("gated", type=Path, nargs="?", metavar="RUN", help="run folder")
    gate.add_argument(
        "--confirm",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="later runs of the same command: a slowdown is confirmed when their sessions show it too",
    )
    gate.add_argument("--baseline", metavar="NAME", help="a kept run of this chip, or a run folder")
    gate.add_argument(
        "--accept", nargs="+", default=[], choices=["os", "mlx", "mlx_lm"], help="known differences to the baseline"
    )
    gate.add_argument("--ignore", nargs="+", default=[], metavar="PATTERN", help="contrasts to leave out, and say so")
    gate.add_argument("--base", type=_checkout, metavar="CHECKOUT", help="measure this checkout against that one first")
    gate.add_argument(
        "--head", type=_checkout, metavar="CHECKOUT", help="with --base: hold this one against it instead"
    )
    gate.add_argument("--work", type=Path, metavar="DIR", help="with --base: folder for its runs")
    gate.add_argument("--set", nargs="+", default=[], metavar="key=value", help="with --base: settings of the sweep")
    gate.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    gate.add_argument("--summary", type=Path, metavar="FILE", help="write the Markdown summary")
    how = gate.add_mutually_exclusive_group()
    how.add_argument("--strict", action="store_true", help="show what cannot be told as failure")
    how.add_argument("--neutral", action="store_true", help="end with 0 where it cannot be told, and say so")
    gate.set_defaults(run=_gate)


def _checkout(word: str) -> Path:
    """A folder; an unset variable would stand for the current one, which is never slower than itself."""
    if not word.strip():
        raise argparse.ArgumentTypeError("names no folder")
    return Path(word)


# Imports wait until a command needs them: --help answers at once, without matplotlib.


def _build(arguments: argparse.Namespace) -> int:
    from reports.page import build

    runs = [run for folder in arguments.runs for run in runs_of(folder)]
    # The report of a suite lies in its own folder.
    suite = arguments.runs[0] if len(arguments.runs) == 1 and runs != arguments.runs else None
    print(build(runs, arguments.output or suite))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from reports.compare import compare

    print(compare(arguments.a, arguments.b, arguments.output))
    return 0


def _gate(arguments: argparse.Namespace) -> int:
    from reports import announce, base_head, kept
    from reports.gate import gate

    if (arguments.gated is None) == (arguments.base is None):
        raise ReportError("gate takes a RUN, or --base CHECKOUT to measure one first")
    _require_used(arguments)
    if arguments.base is not None:
        answer = base_head.gate(arguments.base, arguments.work, arguments.set, arguments.ignore, arguments.head)
    else:
        baseline = kept.find(arguments.baseline, arguments.gated) if arguments.baseline else None
        answer = gate(arguments.gated, arguments.confirm, baseline, arguments.ignore, arguments.accept)
    for doubt in answer.doubts:
        if doubt.kind in ("unreadable", "other schema"):
            print(f"reports: {doubt.where}", file=sys.stderr)
    # The verdict comes first, so that a file that cannot be written does not hide it.
    print("\n".join(announce.lines(answer, arguments.strict)), flush=True)
    try:
        announce.write(answer, arguments.strict, arguments.junit, arguments.summary)
    except OSError as error:
        print(f"reports: {_denied(error)}; the verdict stands, that file was not written", file=sys.stderr)
        return answer.code or 2
    if answer.code == 2 and arguments.neutral:
        print("neutral: this run decides nothing", file=sys.stderr)
        return 0
    return answer.code


def _require_used(arguments: argparse.Namespace) -> None:
    """Refuse options that would change nothing: who gives them expects that they do."""
    measuring = arguments.base is not None
    names = ("confirm", "baseline", "accept") if measuring else ("head", "work", "set")
    given = [f"--{name}" for name in names if getattr(arguments, name)]
    if given:
        what = "judges a RUN; without --base give its folder" if measuring else "goes with --base"
        raise ReportError(f"{', '.join(given)} {what}")


def _baseline(arguments: argparse.Namespace) -> int:
    from reports.kept import keep

    print(keep(arguments.run_folder, arguments.name, arguments.renew))
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    from reports.predict import PAGE, predict

    print(predict(arguments.output or PAGE))
    return 0


def _exact(arguments: argparse.Namespace) -> int:
    from reports import exact

    if arguments.renew:
        print(exact.renew(arguments.counted, arguments.against))
        return 0
    answer = exact.compare(arguments.counted, arguments.against)
    print("\n".join(exact.announce(answer)))
    return answer.code


def _catalogue(arguments: argparse.Namespace) -> int:
    from reports import catalogue

    stale = catalogue.update(check=arguments.check)
    if stale and arguments.check:
        said = " and ".join(stale)
        print(f"reports: README.md: the table of {said} is stale; run python -m reports catalogue", file=sys.stderr)
        return 1
    print(catalogue.README)
    return 0


def _share(arguments: argparse.Namespace) -> int:
    from reports.share import share

    for path in share(arguments.run_folder, arguments.output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
