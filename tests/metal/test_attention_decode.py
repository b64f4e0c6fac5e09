"""The kernels of `decode_attention` on the simulator: every template instance, against the op's float32 reference."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest
import simulator
from simulator import Simulator

from engine.config import DecodeAttentionConfig, EngineConfig
from engine.kernels import attention, loader
from engine.kernels.loader import Launch
from engine.ops import OPS, bind, relative_rms
from engine.ops.registry import Case

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

OP = OPS["decode_attention"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
TILES = list(product(attention.HEADS, attention.SPLITS, attention.LANES))
BLOCKS = 3
SIZES = [
    # rows, keys, key/value heads, position (-1: none), positions the cache has room for past the keys it shows
    (1, 1, 2, -1, 0),
    (1, 63, 2, -1, 0),
    (1, 77, 1, 76, 3),
    (1, 300, 1, 130, 20),
    (1, 260, 2, 0, 0),
    (3, 259, 1, -1, 5),
    (2, 66, 2, 31, 0),
]


def settings(tile: tuple[str, str, str]) -> dict[str, object]:
    heads, split, lanes = tile
    return {"heads": heads, "split": split, "lanes": lanes, "blocks": BLOCKS}


def arguments(size: tuple[int, int, int, int, int], dtype: mx.Dtype) -> tuple:
    """The op's arguments; keys and values show a part of a larger cache."""
    rows, n, kv, at, room = size
    case = Case("", {"rows": rows, "n": n + room, "kv": kv, "at": at})
    q, keys, values, scale, position = OP.inputs(case, dtype, 0)
    if room:
        # What lies past the shown part must not be read.
        keys[:, :, n:], values[:, :, n:] = float("nan"), float("nan")
    return q, keys[:, :, :n], values[:, :, :n], scale, position


def launches(tile: tuple[str, str, str], dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the variant would launch for a tile."""
    seen: list[Launch] = []

    def note(call: Launch) -> list[mx.array]:
        seen.append(call)
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", note)
        attention.attention_metal(*arguments(SIZES[0], dtype), **settings(tile))
    return seen


def run(simulated: Simulator, size: tuple, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, **chosen: object) -> float:
    """Relative RMS error of the variant on the simulator."""
    given = arguments(size, dtype)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return relative_rms(attention.attention_metal(*given, **chosen), OP.reference.run(*given))


@pytest.fixture(scope="module")
def ready() -> dict[str, Simulator]:
    """A simulator an element type with all of its instances compiled together."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bfloat16", "float32"):
            made[name] = Simulator()
            made[name].prepare(call for tile in TILES for call in launches(tile, TYPES[name], patch))
    return made


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    texts: dict[str, list[str]] = {}
    for tile in TILES:
        for call in launches(tile, TYPES[dtype], monkeypatch):
            texts.setdefault(call.kernel.name, []).append(simulator.source(call))
    assert texts.keys() == {kernel.name for kernel in loader.load(attention.TOPIC).values()}
    for instances in texts.values():
        simulator.check(list(dict.fromkeys(instances)))
        simulator.check_pointers(instances[:1])


def test_every_setting_chooses_an_instance_of_its_own(monkeypatch):
    """A toggle that led to the same template would measure nothing."""
    chosen = {tile: launches(tile, mx.bfloat16, monkeypatch)[0] for tile in TILES}
    made = {(tuple(call.template), call.grid) for call in chosen.values()}
    assert len(made) == len(TILES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("turn", range(len(TILES)))
def test_tile_agrees_with_the_reference(turn, dtype, ready, monkeypatch):
    size, tile = SIZES[turn % len(SIZES)], TILES[turn]
    assert run(ready[dtype], size, TYPES[dtype], monkeypatch, **settings(tile)) <= OP.tolerance[dtype]


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids="-".join)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(tile, dtype, monkeypatch):
    fast, checked = Simulator(), Simulator(checked=True)
    for size in SIZES:
        for simulated in (fast, checked):
            assert run(simulated, size, TYPES[dtype], monkeypatch, **settings(tile)) <= OP.tolerance[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids="-".join)
def test_tile_agrees_with_the_reference_on_a_gpu(tile, dtype):
    for size in SIZES:
        given = arguments(size, TYPES[dtype])
        error = relative_rms(attention.attention_metal(*given, **settings(tile)), OP.reference.run(*given))
        assert error <= OP.tolerance[dtype]


def test_float16_agrees_with_the_reference(monkeypatch):
    error = run(Simulator(), SIZES[3], mx.float16, monkeypatch, **settings(("8", "blocks", "coalesced")))
    assert error <= OP.tolerance["float16"]


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, ready, monkeypatch):
    monkeypatch.setattr(ready["float32"], "order", order)
    for tile in (("8", "chunks", "coalesced"), ("4", "blocks", "apart")):
        assert run(ready["float32"], SIZES[5], mx.float32, monkeypatch, **settings(tile)) <= OP.tolerance["float32"]


@pytest.mark.parametrize(("heads", "lanes"), [("8", "coalesced"), ("4", "coalesced"), ("8", "apart")])
def test_accesses_are_clean_and_counted(heads, lanes, monkeypatch):
    """Bounds, races and unwritten memory by the checked build; each key and value byte once per packed group."""
    simulated = Simulator(checked=True)
    rows, n, kv, at, room = size = (1, 300, 1, 130, 20)
    error = run(simulated, size, mx.bfloat16, monkeypatch, **settings((heads, "blocks", lanes)))
    assert error <= OP.tolerance["bfloat16"]
    split, merge = (traffic for _, traffic in simulated.traffic)
    fetches = 8 // int(heads)
    seen = (at + 1) * kv * 256 * 2
    assert split["keys"].loaded == split["values"].loaded == fetches * seen
    assert merge["partial"].loaded == merge["partial"].stored + 8 * BLOCKS * 256 * 4
    if lanes == "coalesced":
        for moved in (split["keys"], split["values"], split["partial"], merge["partial"], merge["out"]):
            assert moved.lines <= 1.1 * moved.ideal
    else:
        # What the toggle is about: a lane that walks its own row touches a line a word.
        assert split["keys"].lines > 4 * split["keys"].ideal


@pytest.mark.parametrize("lanes", attention.LANES)
def test_float32_accesses_are_clean(lanes, monkeypatch):
    simulated = Simulator(checked=True)
    error = run(simulated, SIZES[2], mx.float32, monkeypatch, **settings(("2", "none", lanes)))
    assert error <= OP.tolerance["float32"]


def test_an_input_that_is_not_dense_gives_nan(ready, monkeypatch):
    q, keys, values, scale, position = arguments(SIZES[1], mx.float32)
    monkeypatch.setattr(loader, "launch", ready["float32"].launch)
    turned = mx.contiguous(keys.swapaxes(2, 3)).swapaxes(2, 3)
    out = attention.attention_metal(q, turned, values, scale, position, **settings(("8", "none", "coalesced")))
    assert mx.isnan(out.reshape(-1)[0]).item()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [({"heads": "3"}, "heads=3"), ({"split": "halves"}, "split=halves"), ({"lanes": "far"}, "lanes=far")],
)
def test_a_setting_that_does_not_exist_is_refused(chosen, message):
    with pytest.raises(loader.KernelError, match=message):
        attention.attention_metal(*arguments(SIZES[0], mx.float32), **chosen)


def test_another_head_dim_and_mixed_types_are_refused():
    q, keys, values, scale, _ = arguments(SIZES[0], mx.float32)
    with pytest.raises(loader.KernelError, match="head_dim 256"):
        attention.attention_metal(q[..., :64], keys[..., :64], values[..., :64], scale)
    with pytest.raises(loader.KernelError, match="one type"):
        attention.attention_metal(q, keys.astype(mx.bfloat16), values, scale)


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_settings_of_the_config_reach_the_kernel(device, ready, monkeypatch):
    config = EngineConfig(decode_attention=DecodeAttentionConfig("metal", "4", "chunks", "apart"))
    bound = bind(config, device)
    seen: list[Launch] = []

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call)
        return ready["float32"].launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    given = arguments(SIZES[3], mx.float32)
    out = bound.decode_attention(*given, rows=1)
    assert relative_rms(out, OP.reference.run(*given)) <= OP.tolerance["float32"]
    template = dict(seen[0].template)
    assert (template["G"], template["CHUNK"], template["COALESCED"]) == (4, attention.CHUNK, False)
    assert bound.recorder.executed()[0]["tile"] == "chunks heads 4 lanes apart"


def test_a_step_is_two_launches_or_one_where_nothing_is_split(monkeypatch):
    counts = {tile[1]: len(launches(tile, mx.float32, monkeypatch)) for tile in TILES if tile[0] == "8"}
    # One chunk holds the few keys here, so there is nothing to merge either.
    assert counts == {"none": 1, "chunks": 1, "blocks": 2}
