"""The kernel of norm and rotary embedding on the simulator: every instance, against MLX's two ops in float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import simulator
from rotary_cases import SIZES, TYPES, agrees, arguments
from simulator import Simulator

from engine.kernels import loader, rotary
from engine.kernels.loader import Launch
from engine.ops import relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


def run(simulated: Simulator, given: tuple, monkeypatch: pytest.MonkeyPatch, simdgroups: int = 1) -> tuple:
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return rotary.rotate_metal(*given, simdgroups=simdgroups)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    texts: list[str] = []

    def note(call: Launch) -> list[mx.array]:
        texts.append(simulator.source(call))
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    monkeypatch.setattr(loader, "launch", note)
    for simdgroups in rotary.TILES:
        rotary.rotate_metal(*arguments(SIZES[0], TYPES[dtype]), simdgroups=simdgroups)
    assert len(set(texts)) == len(rotary.TILES)
    simulator.check(texts)
    simulator.check_pointers(texts[:1])
    simulator.check_calls(texts[:1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("turn", range(len(SIZES)))
def test_tile_agrees_with_mlx(turn, dtype, monkeypatch):
    size = SIZES[turn]
    given = arguments(size, TYPES[dtype], apart=turn % 2 == 0)
    result = run(Simulator(), given, monkeypatch, rotary.TILES[turn % len(rotary.TILES)])
    assert agrees(size, given, result, dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("simdgroups", rotary.TILES)
def test_tile_agrees_with_mlx_and_is_clean_on_every_size(simdgroups, dtype, monkeypatch):
    for size in SIZES:
        for apart in (True, False):
            given = arguments(size, TYPES[dtype], apart)
            for checked in (False, True):
                assert agrees(size, given, run(Simulator(checked), given, monkeypatch, simdgroups), dtype)


def test_float16_agrees_with_mlx(monkeypatch):
    given = arguments(SIZES[1], mx.float16)
    assert agrees(SIZES[1], given, run(Simulator(), given, monkeypatch), "float16")


def test_angles_at_long_contexts_are_those_of_their_float32_products(monkeypatch):
    """A sine without range reduction, or an angle in 16 bits, is off by whole turns here."""
    rows, position = 8, 131072
    q = mx.ones((1, rows, 512))
    ones = mx.ones((256,))
    given = (q, mx.ones((1, rows, 256)), ones, ones, mx.array([position], dtype=mx.int32))
    queries, _ = run(Simulator(), given, monkeypatch)
    turns = np.exp2(np.arange(32, dtype=np.float32) / np.float32(-32) * np.float32(np.log2(1e7)), dtype=np.float32)
    angles = ((position + np.arange(rows, dtype=np.float32))[:, None] * turns).astype(np.float64)
    want = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], axis=1)
    got = np.array(queries)[0, 0, :, :64]
    # One last place of an angle of 1e5 is 0.008; the first pair's angle is exact.
    assert np.abs(got - want).max() < 0.02
    assert np.abs(got[:, [0, 32]] - want[:, [0, 32]]).max() < 1e-5


def test_rows_together_are_the_rows_one_by_one(monkeypatch):
    simulated, size = Simulator(), (8, 2, 1, 500)
    q, k, *gains, _ = arguments(size, mx.float32)
    together = run(simulated, (q, k, *gains, mx.array([500], dtype=mx.int32)), monkeypatch)
    for row in range(8):
        position = mx.array([500 + row], dtype=mx.int32)
        single = run(simulated, (q[:, row : row + 1], k[:, row : row + 1], *gains, position), monkeypatch)
        for got, want in zip(together, single, strict=True):
            assert relative_rms(got[:, :, row : row + 1], want) < 1e-6


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, monkeypatch):
    given = arguments(SIZES[1], mx.float32)
    assert agrees(SIZES[1], given, run(Simulator(order=order), given, monkeypatch, 4), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_accesses_are_clean_and_counted(dtype, monkeypatch):
    """Bounds and unwritten memory by the checked build; every query and key byte once, and no gate."""
    simulated = Simulator(checked=True)
    rows, heads, kv, _ = size = SIZES[1]
    given = arguments(size, TYPES[dtype], apart=False)
    assert agrees(size, given, run(simulated, given, monkeypatch, 2), dtype)
    ((_, moved),) = simulated.traffic
    head = 256 * TYPES[dtype].size * rows
    assert moved["q"].loaded == moved["q_out"].stored == heads * head
    assert moved["k"].loaded == moved["k_out"].stored == kv * head
    for name in ("q", "k", "q_out", "k_out"):
        assert moved[name].lines <= 1.1 * moved[name].ideal
