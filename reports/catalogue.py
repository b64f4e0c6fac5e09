"""The README's tables of ops and toggles, written from the registry and the toggles themselves.

Toggles are plain data. Ops are declared beside their MLX code, which nothing in this package imports, so a process of
its own reads them and prints them as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ablations.arms import TOGGLES
from reports.load import ReportError

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DEVICES = {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}


def toggles() -> str:
    """Every toggle with its two sides and its other values."""
    rows = ["| toggle | what is asked | off | on | also |", "|---|---|---|---|---|"]
    for toggle in TOGGLES.values():
        also = " ".join(f"`{name}`" for name in toggle.settings if name not in (toggle.off, toggle.on))
        rows.append(f"| `{toggle.name}` | {toggle.summary} | `{toggle.off}` | `{toggle.on}` | {also} |")
    return "\n".join(rows)


def registry() -> list[dict[str, Any]]:
    """The ops as `engine.ops.describe` prints them.

    Raises:
        ReportError: MLX is not installed here, or the registry cannot be read.
    """
    command = [sys.executable, "-m", "engine.ops.describe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ReportError(f"the ops cannot be read ({said}): the catalogue needs MLX installed, other reports do not")
    return json.loads(done.stdout)


def ops() -> str:
    """Every op with its variants, where each runs, and which comes first on each kind of device."""
    rows = ["| op | what it computes | variants | first choice |", "|---|---|---|---|"]
    for op in registry():
        variants = " ".join(_variant(one) for one in op["variants"])
        rows.append(f"| `{op['name']}` | {_cell(op['summary'])} | {variants} | {_first(op['first'], op['far'])} |")
    return "\n".join(rows)


def _variant(one: dict[str, Any]) -> str:
    """A variant's name, with the devices where it does not run everywhere."""
    missing = [device for device in DEVICES if device not in one["devices"]]
    where = f" ({', '.join(DEVICES[d] for d in one['devices']) or 'nowhere yet'})" if missing else ""
    return f"`{one['name']}`{where}"


def _first(first: dict[str, dict[str, str]], far: dict[str, list[Any]]) -> str:
    """First choices by device, decode and prefill apart where they differ; devices that agree share an entry."""
    said: dict[str, list[str]] = {}
    for device, name in DEVICES.items():
        decode, prefill = first[device]["decode"], first[device]["prefill"]
        words = f"`{decode}`" if decode == prefill else f"`{decode}`, prefill `{prefill}`"
        if device in far:
            words += ", past {:,} positions `{}`".format(*far[device])
        said.setdefault(words, []).append(name)
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in said.items())


def _cell(words: str) -> str:
    return words.replace("|", r"\|")


def update(readme: Path = README, check: bool = False) -> list[str]:
    """Write both tables between their markers in `readme`, or with `check` only look.

    Returns:
        Names of the tables that were stale.

    Raises:
        ReportError: the file cannot be read or has lost its markers.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{readme}: {error.strerror}; the catalogue is written from a checkout") from None
    stale = []
    for name, table in (("ops", ops()), ("toggles", toggles())):
        marked = re.compile(rf"^<!-- {name} -->\n(.*?)\n?<!-- /{name} -->$", re.M | re.S)
        found = marked.search(text)
        if not found:
            raise ReportError(f"{readme}: the markers <!-- {name} --> and <!-- /{name} --> are gone; put them back")
        if found[1] != table:
            stale.append(name)
            text = text[: found.start()] + f"<!-- {name} -->\n{table}\n<!-- /{name} -->" + text[found.end() :]
    if stale and not check:
        readme.write_text(text, encoding="utf-8")
    return stale
