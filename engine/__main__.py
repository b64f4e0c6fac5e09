"""`python -m engine doctor|fetch|chat|serve`: what can be asked of the engine without a sweep."""

from __future__ import annotations

import importlib
import sys

USAGE = """usage: python -m engine COMMAND [ARGUMENTS]

  doctor [--all] [--json]  what this machine can run; self-test of every variant
  fetch [mtp]              the real checkpoint, at its pinned revision
  chat [--help]            talk to a model in the terminal
  serve [--help]           an OpenAI-compatible API on one model"""

_MODULES = {
    "doctor": "engine.doctor",
    "fetch": "engine.fetch",
    "chat": "engine.serve.chat",
    "serve": "engine.serve.server",
}
_EXTRAS = {"serve": ("h11", "pydantic", "starlette", "uvicorn")}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; 2 with one line on stderr for input that cannot be used."""
    args = sys.argv[1:] if argv is None else list(argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    command, rest = args[0], args[1:]
    if command not in _MODULES:
        print(f"engine: no command {command!r}; there are: {', '.join(_MODULES)}", file=sys.stderr)
        return 2
    try:
        # By name: the doctor has something to say also where MLX, and so the other modules, cannot be imported.
        return importlib.import_module(_MODULES[command]).main(rest)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRAS.get(command, ()):
            raise
        print(
            f"{command}: {error.name} is not installed: pip install -c constraints.txt -e '.[serve]'", file=sys.stderr
        )
        return 2
    except ValueError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
