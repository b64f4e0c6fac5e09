"""Words and numbers for readers. Formatting never looks at the locale: the same rows read the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from reports.facts import finite

ABSENT = "–"
NBSP = "\N{NO-BREAK SPACE}"

GLOSSARY = (
    ("prefill", "Reading the prompt: all its tokens go through the model before the first answer token exists."),
    ("decode", "Writing the answer, one token after another; the rate is gaps between tokens over time."),
    ("frontier", "The context length at which a window is timed, in tokens; 1K is 1,024."),
    ("depth", "Another word for the tokens already in the cache when decoding starts; here it equals the frontier."),
    ("window", "One stretch of work under one reading of the clock, with the device drained before and after."),
    ("block", "Windows of both arms taken close together in the order ABBA or BAAB, so that slow drift cancels."),
    ("session", "One fresh process. Differences between sessions are the honest measure of how well a result repeats."),
    ("arm", "One configuration of one program: the engine with its toggles set in one way, or MLX-LM."),
    ("contrast", "One question: is this arm faster than that reference arm, at one phase and one frontier?"),
    ("margin", "The smallest difference that counts; taken from comparing an arm with itself (A/A)."),
    (
        "verdict",
        "faster or slower: the 95 % interval lies wholly beyond the margin. same: the 90 % interval lies "
        "inside it. unclear: neither. blocked: the quality guard failed, so no speed is given. unsupported: an arm "
        "cannot run here, or the plan left the point out.",
    ),
    (
        "quality guard",
        "The check, on the very path that is timed, that the arm still computes what the reference does.",
    ),
)
"""Terms and their meaning, in reading order."""

FLAGS = {
    "swapping": "used swap grew while the point was measured",
    "battery": "the machine ran on battery",
    "low_power": "low-power mode was on",
    "sentinel_slow": "the sentinel kernel was slower than the session's best; on a CPU nobody waits for it",
    "serial": "arms were measured one after another, because two did not fit into memory",
    "launches": "what a decode step launches, no time",
    "series": "a run for per-token times, never part of a rate",
    "own_clock": "timed by the subject's own program, not by the common clock",
    "client_clock": "timed by a client of the endpoint, with all that lies between them",
    "walk_differs": "the walk and a straight prompt disagreed by more than the tolerance",
    "resumed": "measured after the run was started again",
    "retry": "to be tried again by the same command",
    "crash": "the process died in this window",
    "warmup": "warm-up, never part of a rate",
    "hot": "the sentinel kernel stayed slow after the longest wait: the device was warm",
    "loaded": "other work was running",
    "clock_jump": "the clock jumped inside the window; it was voided",
    "aa": "an arm compared with itself",
    "warm_capped": "warm-up ended by its cap, before times were stationary",
}
"""Flags of windows and their meaning."""


def tokens(frontier: int) -> str:
    """A context length as readers write it: 512, 1K, 128K; other lengths in full."""
    if frontier >= 1024 and frontier % 1024 == 0:
        return f"{frontier // 1024}K"
    return f"{frontier:,}"


def frontier_list(frontiers: Sequence[int], tested: Sequence[int] = ()) -> str:
    """Context lengths in order: ``256``, ``256 and 1K``; three or more neighbours in `tested`: ``256 to 1K``."""
    order = sorted(set(tested) | set(frontiers))
    runs: list[list[int]] = []
    for f in sorted(set(frontiers)):
        if tested and runs and order.index(f) == order.index(runs[-1][-1]) + 1:
            runs[-1].append(f)
        else:
            runs.append([f])
    names = []
    for run in runs:
        names += [f"{tokens(run[0])} to {tokens(run[-1])}"] if len(run) > 2 else [tokens(f) for f in run]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1] if names else ABSENT


def number(value: Any, digits: int = 3) -> str:
    """A number: whole ones in full, others with `digits` significant digits at least; a dash where there is none."""
    x = finite(value)
    if x is None:
        return ABSENT
    if isinstance(value, int) or x == 0:
        return f"{x:,.0f}"
    whole = len(str(int(abs(x)))) if abs(x) >= 1 else 0
    if whole:
        return f"{x:,.{max(0, digits - whole)}f}"
    return f"{x:.{digits}g}"


def ratio(value: Any) -> str:
    """A ratio of rates: ``1.23×``."""
    x = finite(value)
    return ABSENT if x is None else f"{_ratio(x)}×"


def _ratio(x: float) -> str:
    return f"{x:.3f}" if abs(x) < 10 else number(x)


def interval(low: Any, high: Any) -> str:
    """An interval of ratios, or words where it was not computed."""
    a, b = finite(low), finite(high)
    if a is None or b is None:
        return "no interval"
    return f"[{_ratio(a)}, {_ratio(b)}]"


def percent(value: Any) -> str:
    """A share as percent."""
    x = finite(value)
    return ABSENT if x is None else f"{number(100 * x, 2)}{NBSP}%"


GAPS = {"oom": "out of memory", "missing": "not run", "timeout": "timed out", "error": "failed"}
"""Kinds of missing points in words, where the kind is not one already."""


def gap(kind: Any) -> str:
    """The kind of a missing point in words."""
    return GAPS.get(str(kind), plain(kind))


def size(value: Any) -> str:
    """Bytes in GiB or MiB."""
    x = finite(value)
    if x is None:
        return ABSENT
    return f"{number(x / 2**30)}{NBSP}GiB" if x >= 2**30 else f"{number(x / 2**20)}{NBSP}MiB"


def duration(nanoseconds: Any) -> str:
    """A time in s or ms."""
    x = finite(nanoseconds)
    if x is None:
        return ABSENT
    return f"{number(x / 1e9)}{NBSP}s" if x >= 1e9 else f"{number(x / 1e6)}{NBSP}ms"


def plain(value: Any) -> str:
    """Any recorded value on one line."""
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(v) for v in value) or ABSENT
    if isinstance(value, dict):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items()) or ABSENT
    return one_line(str(value))


def one_line(text: str) -> str:
    """`text` without line breaks and control characters, which would break tables and titles."""
    return re.sub(
        r"\s+", " ", "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
    ).strip()


def markdown(value: Any) -> str:
    """`value` so that Markdown shows it as it is, also inside a table."""
    escaped = re.sub(r"([\\`*\[\]<>|~$])", r"\\\1", one_line(str(value)))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\_", escaped)


def slug(text: str) -> str:
    """`text` as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.")[:60] or "x"


def count(n: int, noun: str) -> str:
    """``1 block``, ``5 blocks``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
