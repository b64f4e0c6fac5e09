"""Acceptance and speed of drafting on the embedded model: ``python -m tests.speculative_figures [tokens] [kind]``.

For held-out code and prose, each drafter and depths 1 to 4: drafts accepted, tokens a verification, and the time of
plain decoding over that with drafts. Times are processor time of this process, the best of three alternating runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import engine as package

import mlx.core as mx  # isort: skip  (after the engine, which puts a fast BLAS in front)

from engine.checkpoint import load
from engine.config import DecodeConfig, EngineConfig, SpeculativeConfig
from engine.generate import Engine

HERE = Path(package.__file__).parent / "tiny"
PROMPT = 256


def main(tokens: int = 96, *kinds: str) -> None:
    """Print one line for each setting."""
    held = load(HERE / "checkpoint", mx.float32)

    def make(**fields) -> Engine:
        config = EngineConfig(decode=DecodeConfig(trace="eager"), speculative=SpeculativeConfig(**fields))
        return Engine(held.config, held.weights, config, held.tokenizer.real_vocab)

    for kind in kinds or ("code", "prose"):
        ids = held.tokenizer.encode((HERE / f"heldout/{kind}.txt").read_text(encoding="utf-8")[: 8 * PROMPT])[:PROMPT]
        settings = [(d, n, a) for d in ("mtp", "ngram") for n, a in ((1, 0), (2, 0), (3, 0), (4, 0), (4, 1))]
        for drafter, depth, adaptive in settings:
            plain, drafted = make(), make(drafter=drafter, depth=depth, adaptive=bool(adaptive))
            firsts = [engine.prefill(ids) for engine in (plain, drafted)]
            starts = [engine.snapshot() for engine in (plain, drafted)]
            best, made = [float("inf")] * 2, [[], []]
            for _ in range(3):
                for i, engine in enumerate((plain, drafted)):
                    engine.restore(starts[i])
                    engine.reset_executed()
                    began = time.process_time_ns()
                    made[i] = engine.decode(firsts[i], tokens)
                    best[i] = min(best[i], time.process_time_ns() - began)
            counts = drafted.speculation()
            by_depth = [f"{r / t:.0%}" for r, t in zip(counts["right"], counts["tried"], strict=True) if t]
            same = "equal" if made[0] == made[1] else f"differ from {_first(*made)}"
            print(
                f"{kind:5} {drafter:5} depth {depth}{' adaptive' if adaptive else '':9} accepted "
                f"{counts['accepted']}/{counts['drafted']} by position {' '.join(by_depth) or '-'}, "
                f"per verification {counts['per_step'] or 1:.2f}, ratio {best[0] / best[1]:.2f}, tokens {same}",
                flush=True,
            )


def _first(a: list[int], b: list[int]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
