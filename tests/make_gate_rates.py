"""How often the gate finds a slowdown planted in the embedded model on this machine, as a small table.

    python tests/make_gate_rates.py [--runs 5] [--shares 10% 20%] [--output FILE]

One arm is the engine, the other the same engine that then waits for the share of its time (``planted=``): 3 sessions
of 12 blocks of decoding at 256 positions, and fresh sessions where that looks slower, as the gate does. About two
minutes a run on two cores, so twenty for five of each share; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from reports import facts
from reports.gate import Answer, gate
from reports.load import read_rows

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = "subject=none frontiers=[256] phases=[decode] sessions=3 blocks=12 probe=false wait=true".split()


def measured(folder: Path, share: str, seed: int) -> Path:
    """A run with that share planted; the folder it lies in."""
    words = [*SETTINGS, f"planted={share}", f"seed={seed}", f"run_dir={folder}"]
    subprocess.run([sys.executable, "-m", "sweeps", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def judged(folder: Path, share: str, number: int) -> Answer:
    """The gate's two stages."""
    first = measured(folder / f"{share}-{number}", share, number)
    answer = gate(first)
    if not answer.suspects:
        return answer
    return gate(first, [measured(folder / f"{share}-{number}-again", share, 1000 + number)])


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shares", nargs="+", default=["10%", "20%"])
    parser.add_argument("--output", type=Path, default=ROOT / "reports" / "published" / "gate-rates-cpu.md")
    given = parser.parse_args()
    began = os.getloadavg()[0]
    rows = ["| planted | runs | exit 1 (found) | exit 2 (cannot tell) | exit 0 (passed) |", "|---|--:|--:|--:|--:|"]
    with tempfile.TemporaryDirectory() as folder:
        for share in given.shares:
            codes = [judged(Path(folder), share, number).code for number in range(given.runs)]
            rows.append(f"| {share} | {given.runs} | {codes.count(1)} | {codes.count(2)} | {codes.count(0)} |")
            print(rows[-1], flush=True)
        run = read_rows([next(Path(folder).iterdir())]).runs[0]
    place = f"{facts.chip_name(run)}, {os.cpu_count()} cores, {run.machine.get('os')}, MLX {facts.version(run, 'mlx')}"
    words = " ".join([f"--runs {given.runs}", "--shares", *given.shares])
    given.output.write_text(
        "# How often the gate finds a planted slowdown on a CPU\n\n"
        "The embedded model, on whose small windows a CPU scatters by several percent. As it came out.\n\n"
        + "\n".join(rows)
        + f"\n\n- Machine: {place}; load average {began:.1f} before, {os.getloadavg()[0]:.1f} after\n"
        f"- Command: `python tests/make_gate_rates.py {words}`; each run\n  `{' '.join(SETTINGS)}`,\n"
        "  confirmed on as many fresh sessions\n"
        f"- Date: {datetime.date.today().isoformat()}\n",
        encoding="utf-8",
    )
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
