"""Rows of a made-up run, as a real one would write them: an engine arm against MLX-LM over the ten frontiers."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

from sweeps.points import FRONTIERS
from sweeps.rows import ContrastRow, RunRow, SampleRow, to_json

GIB = 2**30
MAC = {
    "chip": "Apple M9 Max",
    "device": "metal",
    "cores": 16,
    "memory": 128 * GIB,
    "os": "macOS 27.0",
    "bandwidth_bytes_per_second": 614e9,
    "flops_per_second": 40e12,
    "versions": {"python": "3.11.9", "mlx": "0.32.4", "mlx_lm": "0.32.2"},
}
H200 = {
    "chip": "NVIDIA H200",
    "device": "cuda",
    "cores": 16,
    "memory": 139 * GIB,
    "os": "Linux 6.1",
    "versions": {"python": "3.11.9", "mlx": "0.32.4", "mlx_lm": "0.32.2"},
}
CPU = {
    "chip": "AMD EPYC",
    "device": "cpu",
    "cores": 2,
    "memory": 8 * GIB,
    "os": "Linux 6.1",
    "versions": {"python": "3.11.9", "mlx": "0.32.4", "mlx_lm": "0.32.2"},
}
REAL = {"name": "mlx-community/Qwen3.6-35B-A3B-4bit", "revision": "38740b847e4c", "synthetic": False}
TOY = {"name": "tiny", "toy": True, "synthetic": False}


def run_row(session: int = 0, run_id: str = "r1", **changes: Any) -> RunRow:
    """One worker process."""
    values: dict[str, Any] = {
        "run_id": run_id,
        "session": session,
        "started": f"2026-11-30T0{session % 10}:15:00Z",
        "argv": ["python", "-m", "sweeps", "model=qwen3.6-35b", "sweep=publish"],
        "config": {"sweep": {"name": "publish"}, "seed": 7},
        "config_hash": "c0ffee",
        "git": {"commit": "0123abc", "dirty": False},
        "machine": MAC,
        "conditions": {"power": "AC", "low_power": False, "load": 0.5 + session / 10, "swap": 0},
        "model": REAL,
        "prompt": {"kind": "text", "hash": "abcd"},
        "project_version": "0.1.0",
    }
    return RunRow(**(values | changes))


def sample(
    arm: str, phase: str, frontier: int, session: int = 0, block: int = 0, slot: int = 0, **changes: Any
) -> SampleRow:
    """One timed window at a plausible speed; `changes` are fields to set."""
    subject = "mlx_lm" if arm.startswith("mlx_lm") else "engine"
    work = frontier if phase == "prefill" else 63
    noise = random.Random(f"{arm} {phase} {frontier} {session} {block} {slot}").gauss(0, 0.008)
    rate = speed(arm, phase, frontier) * math.exp(noise)
    passes = work if phase == "decode" else 1 + frontier // 2048
    executed = [
        {"op": "experts", "variant": "packed" if subject == "engine" else "mlx", "tile": "32x64", "calls": 40},
        {"op": "gated_delta", "variant": "registers" if subject == "engine" else "mlx", "tile": None, "calls": 30},
    ]
    values: dict[str, Any] = {
        "run_id": "r1",
        "session": session,
        "point": f"{phase}-{frontier}",
        "arm": arm,
        "arm_hash": f"h-{subject}",
        "subject": subject,
        "phase": phase,
        "frontier": frontier,
        "block": block,
        "slot": slot,
        "status": "ok",
        "work_tokens": work,
        "elapsed_ns": int(work / rate * 1e9),
        "enqueue_ns": 1000,
        "peak_bytes": 20 * GIB + frontier * 40_000,
        "active_bytes": 19 * GIB + frontier * 20_480,
        "footprint_bytes": 21 * GIB + frontier * 40_000,
        "least_bytes": passes * (2 * GIB + frontier * 20_480),
        "least_flops": work * 6_000_000_000,
        "chunks": [min(frontier, 2048)] * max(1, frontier // 2048),
        "executed": executed,
        "tokens_hash": "t0",
    }
    return SampleRow(**(values | changes))


def speed(arm: str, phase: str, frontier: int) -> float:
    """Made-up tokens a second of an arm."""
    depth = frontier / 131_072
    if phase == "decode":
        return (190 if arm != "mlx_lm" else 148) / (1 + depth)
    climb = 1 - math.exp(-frontier / 900)
    return (5800 if arm != "mlx_lm" else 5200) * climb / (1 + (2.2 if arm != "mlx_lm" else 1.4) * depth)


def contrast(phase: str, frontier: int, arm: str = "full", reference: str = "mlx_lm", **changes: Any) -> ContrastRow:
    """The answer to one question, from the speeds above."""
    ratio = speed(arm, phase, frontier) / speed(reference, phase, frontier)
    verdict = "faster" if ratio > 1.02 else "slower" if ratio < 0.98 else "unclear"
    values: dict[str, Any] = {
        "run_ids": ["r1"],
        "contrast": f"{arm}_vs_{reference}",
        "arm": arm,
        "reference": reference,
        "phase": phase,
        "frontier": frontier,
        "ratio": ratio,
        "low": ratio * 0.985,
        "high": ratio * 1.015,
        "low90": ratio * 0.988,
        "high90": ratio * 1.012,
        "units": 5,
        "unit": "session",
        "margin": 0.01,
        "verdict": verdict,
        "reason": None,
        "detectable": 1.021,
        "method": "paired log ratios, t interval over sessions",
        "check": {"name": "teacher-forced", "passed": True, "perplexity_ratio": 1.0004, "top1": 0.998},
    }
    return ContrastRow(**(values | changes))


def realistic(sessions: int = 2, blocks: int = 2) -> tuple[list[RunRow], list[SampleRow], list[ContrastRow]]:
    """A publish-like run with an A/A arm, a hot block, an arm out of memory and the points skipped after it."""
    runs = [run_row(session) for session in range(sessions)]
    samples, contrasts = [], []
    for session in range(sessions):
        samples.append(sample("full", "decode", 256, session, -1, -1, flags=["warmup"], elapsed_ns=10**9))
        for phase in ("prefill", "decode"):
            for frontier in FRONTIERS:
                samples += _blocks(phase, frontier, session, blocks)
    for phase in ("prefill", "decode"):
        for frontier in FRONTIERS:
            if not (phase == "prefill" and frontier > 65_536):
                contrasts.append(contrast(phase, frontier, units=sessions))
            even = {"ratio": 1.001, "low": 0.995, "high": 1.007, "verdict": "same", "units": sessions}
            contrasts.append(contrast(phase, frontier, "full", "full_aa", **even))
    return runs, samples, contrasts


def _blocks(phase: str, frontier: int, session: int, blocks: int) -> list[SampleRow]:
    rows = []
    for block in range(blocks):
        for slot, arm in enumerate(("full", "mlx_lm", "mlx_lm", "full", "full_aa")):
            flags = ["aa"] if arm == "full_aa" else []
            if phase == "decode" and frontier == 8192 and block == 0:
                flags.append("hot")
            sentinel = {"sentinel_ns": 1_000_000 + 2000 * block}
            warm = {"warmup": {"rounds": 3, "elapsed_ns": [3_000, 1_100, 1_000], "capped": False}} if not block else {}
            row = sample(arm, phase, frontier, session, block, slot, flags=flags, extra=sentinel | warm)
            if arm == "mlx_lm" and phase == "prefill" and frontier >= 65_536:
                if block or slot != 1:
                    continue
                oom = frontier == 65_536
                row = dataclasses.replace(
                    row,
                    status="oom" if oom else "skipped",
                    elapsed_ns=None,
                    work_tokens=0,
                    reason="device out of memory at chunk 29 of 32" if oom else "out of memory at 64K already",
                )
            rows.append(row)
    return rows


def write_run(
    folder: Path,
    runs: list[RunRow],
    samples: list[SampleRow],
    contrasts: list[ContrastRow],
    job: dict[str, Any] | None = None,
) -> Path:
    """Write the three tables as a run folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("runs", runs), ("samples", samples), ("contrasts", contrasts)):
        text = "".join(json.dumps(to_json(row)) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    if job is not None:
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return folder
