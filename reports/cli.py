"""`lilybench COMMAND …`: one installed command for the modules that do the work.

Each command is exactly ``python -m MODULE …``, run in this process. Modules are named, not imported,
so that rebuilding a report never loads MLX.
"""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import PackageNotFoundError, version

COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "sweep": ("sweeps", (), "measure: plan, run, report"),
    "tune": ("sweeps", ("tune",), "find the best variants and tiles for this chip"),
    "report": ("reports", ("build",), "rebuild a report from its rows"),
    "compare": ("reports", ("compare",), "compare two runs"),
    "gate": ("reports", ("gate",), "exit 0: no slowdown, 1: slowdown, 2: cannot tell"),
    "doctor": ("engine", ("doctor",), "what this machine can run, with self-tests"),
    "fetch": ("engine", ("fetch",), "download the real checkpoint"),
    "chat": ("engine", ("chat",), "talk to the model"),
    "serve": ("engine", ("serve",), "OpenAI-compatible API"),
}
"""Command to (module, leading arguments, one line of help)."""


def usage() -> str:
    """The help text: one line a command, with the module it stands for."""
    lines = ["usage: lilybench COMMAND [ARGUMENTS]", ""]
    for name, (module, lead, text) in COMMANDS.items():
        lines.append(f"  {name:8} {text}  (python -m {' '.join((module, *lead))})")
    return "\n".join(lines)


def _version() -> str:
    try:
        return version("lilybench")
    except PackageNotFoundError:
        return "(not installed)"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status (2 for a command that does not exist).

    Args:
        argv: the arguments after the program's name; those of the process if None.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"lilybench {_version()}")
        return 0
    if args[0] not in COMMANDS:
        print(f"lilybench: no command {args[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, lead, _ = COMMANDS[args[0]]
    sys.argv = [args[0], *lead, *args[1:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as done:
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
            return 1
        return done.code or 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
