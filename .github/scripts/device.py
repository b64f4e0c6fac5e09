"""Names the device that tests will run on; fails where MLX sees no Metal device: `device.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import engine  # noqa: F401  (chooses the BLAS before MLX loads)

# isort: split
import mlx.core as mx


def main() -> int:
    """0 and the device's name, or 1."""
    if not mx.metal.is_available():
        print("::error title=device::MLX sees no Metal device on this runner")
        return 1
    info = mx.device_info()
    name = str(info.get("device_name", "")).strip()
    if not name:
        print(f"::error title=device::the Metal device has no name: {info}")
        return 1
    lines = [f"Metal device: {name}", f"MLX {mx.__version__}", *(f"{key}: {value}" for key, value in info.items())]
    print("\n".join(lines))
    if step := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(step).open("a", encoding="utf-8") as file:
            file.write(f"{', '.join(lines[:2])}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
