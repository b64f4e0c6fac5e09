"""How kernel tests launch on CUDA, and how many of them this machine could not run."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
import simulator
from graphs import run_as_graph

from engine.kernels import loader


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--graphs``, tests of the GPU launch by `run_as_graph`."""
    if not (request.config.getoption("--graphs") and request.node.get_closest_marker("gpu") and mx.cuda.is_available()):
        yield
        return
    with loader.recorded(run_as_graph):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A suite without its simulator must not look like one with it."""
    reason = simulator.missing()
    count = sum(str(reason) in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if count:
        terminalreporter.write_line(f"{count} kernel tests were skipped: {reason}")
