"""Rows of a made-up part of a suite: two toggles in the directions asked, their interaction, and a ladder over both."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import report_rows as rows

from sweeps.contrasts import contrast_rows
from sweeps.points import Arm, Contrast, Job, Point

GAINS = {"neither": 1.0, "packed": 1.5, "routed": 1.2, "both": 1.5 * 1.2 * 1.3, "full": 3.0, "tiled": 0.0}
"""Made-up speed of each arm over that of everything off; an arm at 0 cannot run here."""

FIGURES = {
    "positions": 2048,
    "perplexity_ratio": 1.0002,
    "perplexity_ratio_upper": 1.001,
    "top1": 0.991,
    "top1_outside_ties": 0.9995,
    "kl_mean": 2e-5,
    "kl_p999": 8e-4,
}
CHECK = {
    "name": "logits",
    "passed": True,
    "reason": "ok",
    "figures": FIGURES | {"reference": "neither", "first_192": {**FIGURES, "top1": 0.9896}},
    "also": [{"name": "logits", "passed": True, "reason": "ok", "figures": FIGURES | {"reference": "mlx_lm"}}],
}


def job(phase: str = "prefill", frontier: int = 512) -> Job:
    """The plan of the made-up run."""

    def asked(arm: str, reference: str, **about: list[str]) -> Contrast:
        return Contrast(f"{arm} vs {reference}", arm, reference, about)

    contrasts = [
        asked("packed", "neither", claims=["packed_dequant"], directions=["in", "claim"], ladder=["packed_dequant"]),
        asked("both", "packed", claims=["gpu_routing"], directions=["claim"], ladder=["gpu_routing"]),
        asked("routed", "neither", claims=["gpu_routing"], directions=["in"]),
        asked("tiled", "neither", claims=["tile_rows"], directions=["in"]),
        asked("full", "both", ladder=["all the rest"]),
        asked("full", "neither", ladder=["together"]),
        asked("neither.again", "neither"),
    ]
    arms = [Arm(name, "engine", {}, hash=f"h-{name}") for name in GAINS]
    arms.append(Arm("neither.again", "engine", {}, hash="h-neither", aa=True))
    point = Point(f"{phase}-{frontier}", phase, frontier, 6, skip={"tiled": "no variant of this build has tiles"})  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        "ladders": [
            {
                "arms": ["neither", "packed", "both", "full"],
                "steps": ["plain", "packed_dequant", "gpu_routing", "all the rest"],
                "left_out": {"tile_rows": "no variant of this build has tiles"},
            }
        ],
        "interactions": [
            {"toggles": ["packed_dequant", "gpu_routing"], "arms": ["neither", "packed", "routed", "both"]}
        ],
    }
    return Job("", "r1", {"name": "m"}, {}, arms, contrasts, [point], 5, 0, 60, 60, settings)


def write(folder: Path, wrong: str | None = None) -> Path:
    """The run as a folder; the arm called `wrong` fails its guard."""
    made = job()
    (point,) = made.points
    noise = random.Random(7)
    samples = []
    for session in range(made.sessions):
        for block in range(point.blocks):
            for slot, arm in enumerate([*made.arms, *reversed(made.arms)]):
                speed = 1000 * GAINS[arm.name.removesuffix(".again")] * math.exp(noise.gauss(0, 0.003))
                if not speed:
                    continue
                bad = {"passed": False, "reason": "top-1 agreement is 12 %"} if arm.name == wrong else {}
                samples.append(
                    rows.sample(
                        arm.name,
                        point.phase,
                        point.frontier,
                        session,
                        block,
                        slot,
                        point=point.key,
                        arm_hash=arm.hash,
                        subject="engine",
                        elapsed_ns=int(point.frontier / speed * 1e9),
                        flags=["aa"] if arm.aa else [],
                        check=CHECK | bad,
                    )
                )
        note = {"status": "skipped", "elapsed_ns": None, "reason": point.skip["tiled"], "block": -1, "slot": -1}
        samples.append(
            rows.sample("tiled", point.phase, point.frontier, session, point=point.key, arm_hash="h-tiled", **note)
        )
    runs = [rows.run_row(session) for session in range(made.sessions)]
    plain = {
        "run_id": made.run_id,
        "arms": [vars(arm) for arm in made.arms],
        "contrasts": [vars(contrast) for contrast in made.contrasts],
        "points": [vars(p) for p in made.points],
        "settings": made.settings,
    }
    return rows.write_run(folder, runs, samples, contrast_rows(made, samples), plain)
