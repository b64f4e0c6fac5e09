"""How kernel tests launch on CUDA, and how many of them this machine could not run."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
import simulator

from engine.kernels import cuda, loader
from engine.kernels.loader import Launch


def run_as_graph(call: Launch) -> list[mx.array]:
    """One launch as `engine.replay` makes it, its outputs full of NaN (or ones) before."""
    device = cuda.device()
    floats = (mx.float32, mx.bfloat16, mx.float16)
    made = [
        mx.full(shape, float("nan"), dtype) if dtype in floats else mx.full(shape, -1, mx.int32).view(dtype)
        for shape, dtype in zip(call.shapes, call.dtypes)
    ]
    arrays = [*call.inputs, *made]
    mx.eval(arrays)
    mx.synchronize()
    device.enter()
    placed = device.addresses(arrays)
    graph = device.graph([(call, [at for at, _ in placed], [steps for _, steps in placed[: len(call.inputs)]])])
    device.wait(device.run(graph))
    device.drop(graph)
    return made


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
