"""Shared test set-up: no network, a fast BLAS before MLX loads, and GPU tests counted where there is no GPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Before any import that could ask a hub: a test never downloads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
# MLX multiplies float32 in TF32 on CUDA unless told not to; a reference must not.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Tests that run side by side (pytest -n) are no timings that must not meet: each process has a lock of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix=f"lilybench-{worker}-")

# The engine loads the BLAS that MLX is to use, so it comes before MLX.
import engine  # noqa: F401

# isort: split
import mlx.core as mx
import pytest

from engine import tuned

# What this machine's user has tuned would change which variants a test meets.
tuned.USER = Path(os.devnull)

_GPU = mx.metal.is_available() or mx.cuda.is_available()
_NO_GPU = "needs a GPU: MLX sees no Metal or CUDA device here"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that turn an expected skip into a run or a failure."""
    parser.addoption("--require-gpu", action="store_true", help="fail at once without a Metal or CUDA device")
    parser.addoption("--full", action="store_true", help="also run tests that need the real checkpoint or hours")
    parser.addoption(
        "--graphs", action="store_true", help="on CUDA run kernels as replayed steps do: they compile ten times faster"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A run that is to prove the GPU path must not turn green by skipping it."""
    if config.getoption("--require-gpu") and not _GPU:
        raise pytest.UsageError("--require-gpu: MLX sees no Metal or CUDA device here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with its reason, what this machine or this run cannot do."""
    no_gpu = pytest.mark.skip(reason=_NO_GPU)
    not_full = pytest.mark.skip(reason="needs --full")
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(not_full)
        if item.get_closest_marker("gpu") and not _GPU:
            item.add_marker(no_gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much of the suite this machine could not show."""
    # By what was reported: tests may have run in other processes than this one.
    count = sum(_NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if count:
        terminalreporter.write_line(f"{count} tests need a GPU and were skipped")
    elif _GPU:
        terminalreporter.write_line("a GPU was there: no test was skipped for want of one")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty run folder; the test's working folder is its parent, so relative paths land nowhere else."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder
