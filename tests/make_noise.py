"""Adds recorded noise to tests/data/noise.json: `python tests/make_noise.py NAME "how it was recorded" RUN [RUN…]`.

From the A/A arms of run folders, best of `python -m sweeps calibrate` with five sessions or more. What is there under
the name is replaced; runs are pooled, each frontier and session a series of its own.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

from ablations.statistics import noise_from_samples
from sweeps.rows import to_json
from sweeps.store import Store, read_job

NOISE = Path(__file__).parent / "data" / "noise.json"


def main(name: str, how: str, runs: list[str]) -> None:
    """Write the entry `name` and print its SDs."""
    found: dict[str, list[dict]] = {}
    for run in runs:
        job, samples = read_job(Path(run) / "job.json"), [to_json(row) for row in Store(run).read().samples]
        again = {arm.name for arm in job.arms if arm.aa}
        for contrast in job.contrasts:
            if contrast.arm in again:
                for phase, noise in noise_from_samples(samples, contrast.arm, contrast.reference).items():
                    found.setdefault(phase, []).append(noise)
    made = {"how": how} | {phase: _pooled(parts) for phase, parts in found.items()}
    every = json.loads(NOISE.read_text(encoding="utf-8")) | {name: made}
    NOISE.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    for phase in found:
        noise = made[phase]
        print(f"{name} {phase}: SD of blocks {noise['sd_block']:.2%}, of sessions {noise['sd_session']:.2%}")


def _pooled(parts: list[dict]) -> dict:
    series = [[round(value, 6) for value in one] for part in parts for one in part["blocks"] if len(one) > 1]

    def mean_square(key: str) -> float:
        known = [part[key] for part in parts if part[key] is not None]
        return round(math.sqrt(float(np.mean(np.square(known)))), 6) if known else 0.0

    return {
        "sd_block": mean_square("sd_block"),
        "sd_session": mean_square("sd_session"),
        "autocorrelation": round(float(np.mean([part["autocorrelation"] for part in parts])), 4),
        "blocks": series,
    }


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
