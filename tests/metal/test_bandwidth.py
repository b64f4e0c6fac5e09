"""The kernels that measure bandwidth: every instance on the simulator, on a GPU as they are timed, and refusals."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import simulator
from simulator import Simulator

from engine.kernels import bandwidth, loader
from engine.kernels.bandwidth import TILES

simulated = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


def source(each: int, simdgroups: int, groups: int = 3) -> mx.array:
    return mx.random.randint(0, 2**31 - 1, (groups * 128 * each * simdgroups,), key=mx.random.key(0)).astype(mx.uint32)


def agrees(given: mx.array, each: int, simdgroups: int) -> bool:
    copied = bandwidth.copy_metal(given, each=each, simdgroups=simdgroups)
    read = bandwidth.read_metal(given, each=each, simdgroups=simdgroups)
    # A threadgroup's lanes lie side by side, and so do the words of each of its rounds.
    by_lane = np.array(given).reshape(-1, each, simdgroups, 128)
    want = np.bitwise_xor.reduce(np.bitwise_xor.reduce(by_lane, axis=3), axis=1).reshape(-1)
    return bool(mx.array_equal(copied, given)) and np.array_equal(np.array(read), want)


@simulated
@pytest.mark.parametrize("name", ["copy_metal", "read_metal"])
def test_every_instance_compiles_under_metals_rules(name, monkeypatch):
    texts: list[str] = []

    def note(call: loader.Launch) -> list[mx.array]:
        texts.append(simulator.source(call))
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    monkeypatch.setattr(loader, "launch", note)
    for each, simdgroups in TILES:
        getattr(bandwidth, name)(source(each, simdgroups), each=each, simdgroups=simdgroups)
    assert len(set(texts)) == len(TILES)
    simulator.check(texts)
    simulator.check_pointers(texts[:1])
    simulator.check_calls(texts[:1])


@simulated
@pytest.mark.parametrize("tile", TILES)
def test_tile_is_right_and_moves_every_byte_once(tile, monkeypatch):
    checked = Simulator(checked=tile == TILES[0])
    monkeypatch.setattr(loader, "launch", checked.launch)
    given = source(*tile)
    assert agrees(given, *tile)
    if checked.checked:
        (_, copied), (_, read) = checked.traffic
        assert copied["source"].loaded == copied["out"].stored == read["source"].loaded == given.nbytes
        assert copied["source"].lines == copied["source"].ideal and read["source"].lines == read["source"].ideal


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_tile_is_right_on_a_gpu(tile):
    assert agrees(source(*tile, groups=1000), *tile)


def test_what_does_not_fit_is_refused():
    with pytest.raises(loader.KernelError, match="no tile of 3 words"):
        bandwidth.copy_metal(source(2, 4), each=3)
    with pytest.raises(loader.KernelError, match="a multiple of 1024"):
        bandwidth.copy_metal(source(2, 4)[:-4])
    with pytest.raises(loader.KernelError, match="takes uint32"):
        bandwidth.read_metal(source(4, 8).astype(mx.float32))
