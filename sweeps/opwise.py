"""Which op became slower: the ops of base and head, timed one by one.

    python -m sweeps.opwise RUN PHASE FRONTIER      a line of JSON; RUN is what `python -m sweeps base=…` left

Every op that both engines have runs as each has bound it, on the shapes of the model, base, head and head again in
rounds of random order (`sweeps.bench`). An op stands out if head takes longer by more than the noise: 2 %, the spread
of either, and what separates head from its repeat, whichever is most. Ops alone are not a pass: what is fused, or runs
beside something else, shows here by itself only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sweeps import environment
from sweeps.bench import MARGIN, Bench, Timing
from sweeps.clock import Clock, SystemClock
from sweeps.lock import device_lock
from sweeps.points import Job
from sweeps.store import read_job

SIDES = ("base", "head", "head.again")
WINDOW_NS = 100_000_000
"""Length of a window, in ns: the way to another process and back, some 0.1 ms, is a small part of it."""
SECONDS = 8.0
"""Time for the rounds of one op."""


class Side(Protocol):
    """An engine whose ops can be run one at a time (`sweeps.subjects.remote.Remote`)."""

    def op(self, name: str, rows: int, context: int, passes: int) -> int:
        """Run the op `passes` times and wait; returns the calls of a pass, 0 if it is not timed for a model."""
        ...


def compare(sides: dict[str, Side], ops: Sequence[str], rows: int, context: int, clock: Clock) -> list[dict[str, Any]]:
    """Time `ops` on every side and say of each how much longer head takes, and whether beyond the noise.

    Returns:
        A row an op: ``op``, ``ratio`` (time of head over base), ``noise``, ``slower``, ``ns`` by side; or ``op`` and
        the ``reason`` why it has no time.
    """
    bench = Bench(clock, lambda: None, WINDOW_NS, SECONDS)
    made = []
    for op in ops:
        failed: dict[str, str] = {}
        try:
            calls = min(side.op(op, rows, context, 1) for side in sides.values())
        except Exception as error:
            made.append({"op": op, "reason": " ".join(str(error).split())})
            continue
        if not calls:
            continue
        works = {name: partial(side.op, op, rows, context) for name, side in sides.items()}
        timings = bench.compare(works, "base", everyone=True, failed=partial(_note, failed))
        made.append({"op": op, **({"reason": "; ".join(failed.values())} if failed else _judged(timings))})
    return made


def _note(failed: dict[str, str], name: str, error: Exception) -> None:
    failed[name] = f"{name}: {' '.join(str(error).split())}"


def _judged(timings: dict[str, Timing]) -> dict[str, Any]:
    base, head, again = (timings[name] for name in SIDES)
    apart = abs(again.median / head.median - 1)
    noise = max(MARGIN, base.spread, head.spread, apart)
    ratio = min(head.median, again.median) / base.median
    return {
        "ratio": ratio,
        "noise": noise,
        "slower": ratio - 1 > noise,
        "ns": {name: round(timing.median) for name, timing in timings.items()},
    }


def of_run(job: Job, phase: str, frontier: int) -> list[dict[str, Any]]:
    """The ops of a base-against-head job at one of its points.

    Raises:
        ValueError: the job has no base and head.
    """
    from engine.ops import OPS
    from sweeps.subjects.remote import Remote

    arms = {arm.name: arm for arm in job.arms}
    if not set(SIDES) <= set(arms):
        raise ValueError(f"{job.run_dir} does not hold base against head: its arms are {', '.join(arms)}")
    chunk = int(arms["head"].config.get("prefill", {}).get("chunk", 2048))
    rows = 1 if phase == "decode" else min(frontier, chunk)
    with device_lock(environment.runtime_dir(), environment.accelerator_key(), "opwise", wait=True):
        sides: dict[str, Side] = {name: Remote(arms[name], job) for name in SIDES}
        try:
            return compare(sides, [op for op in OPS], rows, frontier, SystemClock())
        finally:
            for side in sides.values():
                side.close()  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows of one point as one line of JSON; 2 if the run is none of base against head."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.opwise", description="Which op became slower?")
    parser.add_argument("run", type=Path)
    parser.add_argument("phase", choices=["prefill", "decode"])
    parser.add_argument("frontier", type=int)
    given = parser.parse_args(argv)
    try:
        print(json.dumps(of_run(read_job(given.run / "job.json"), given.phase, given.frontier)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
