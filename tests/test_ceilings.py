"""Ceilings: which of several ways to the same becomes the ceiling. What a real device reaches is in test_forecast."""

from __future__ import annotations

import pytest

from engine.kernels import bandwidth
from sweeps import ceilings
from sweeps.clock import ManualClock


def test_a_faster_copy_of_our_own_lifts_the_ceiling_and_one_that_does_not_compile_is_left_out(monkeypatch):
    """On a GPU; here the kernels are stand-ins whose time is known."""
    clock, took = ManualClock(), {"copy_metal": 3_000, "read_metal": 2_000}
    monkeypatch.setitem(ceilings._COPY_ITEMS, "metal", 4096)
    monkeypatch.setitem(ceilings._SIZE, "metal", 8)

    def taking(nanoseconds):
        return lambda *_: lambda: clock.advance(nanoseconds)

    def own(name):
        def run(source, **_):
            clock.advance(took[name])
            return source + 0

        return run

    monkeypatch.setattr(ceilings, "_copy", taking(100_000))
    monkeypatch.setattr(ceilings, "_read", taking(10_000))
    for name in took:
        monkeypatch.setattr(bandwidth, name, own(name))
    made = ceilings.measure("metal", clock)
    assert made["bandwidth_bytes_per_second"] == pytest.approx(8 * 2 * 4 * 4096 / (8 * 3_000e-9))
    assert made["read_bytes_per_second"] == pytest.approx(8 * 4 * 4096 / 10_000e-9)  # MLX's is the faster one

    def broken(source, **_):
        raise RuntimeError("no such function")

    monkeypatch.setattr(bandwidth, "copy_metal", broken)
    made = ceilings.measure("metal", clock)
    assert made["bandwidth_bytes_per_second"] == pytest.approx(8 * 2 * 4 * 4096 / 100_000e-9)
