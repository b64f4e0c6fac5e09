"""The kernels of `decode_attention` on the simulator: every template instance, against the op's float32 reference."""

from __future__ import annotations

import mlx.core as mx
import pytest
import simulator
from attention_cases import (
    BLOCKS,
    FRESH_SIZES,
    MATRIX,
    OP,
    PAGED_SIZES,
    PAGED_TILES,
    SCALAR,
    SIZES,
    TILES,
    TYPES,
    arguments,
    fresh_arguments,
    kind,
    paged_arguments,
    recent_arguments,
    settings,
)
from simulator import Simulator

from engine.config import DecodeAttentionConfig, EngineConfig
from engine.kernels import attention, loader
from engine.kernels import recent as recent_kernels
from engine.kernels.loader import Launch
from engine.ops import bind, relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


def launches(
    tile: tuple[str, str, str], dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, fresh: bool = False, size: int = 3
) -> list[Launch]:
    """What the variant would launch for a tile on `SIZES[size]`."""
    seen: list[Launch] = []

    def note(call: Launch) -> list[mx.array]:
        seen.append(call)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(call.shapes, call.dtypes)]

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", note)
        if fresh:
            given, new, _ = fresh_arguments(FRESH_SIZES[0], dtype)
            attention.attention_metal(*given, **settings(tile), fresh=new)
        else:
            attention.attention_metal(*arguments(SIZES[size], dtype), **settings(tile))
    return seen


def run(simulated: Simulator, size: tuple, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, **chosen: object) -> float:
    """Relative RMS error of the variant on the simulator."""
    given = arguments(size, dtype)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return relative_rms(attention.attention_metal(*given, **chosen), OP.reference.run(*given))


def run_fresh(
    simulated: Simulator, size: tuple, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, **chosen: object
) -> float:
    """Relative RMS error of the variant where the new rows are inputs of their own."""
    given, fresh, whole = fresh_arguments(size, dtype)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return relative_rms(attention.attention_metal(*given, **chosen, fresh=fresh), OP.reference.run(*whole))


@pytest.fixture(scope="module")
def ready() -> dict[str, Simulator]:
    """A simulator an element type with all of its instances compiled together."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bfloat16", "float32", "float16"):
            made[name] = Simulator()
            # float16 is for the tiles that float32 does not have.
            tiles = [tile for tile in TILES if name != "float16" or tile[2] in MATRIX]
            tiles = [tile for tile in tiles if kind(tile, name) == name]
            for fresh in (False, True):
                made[name].prepare(call for tile in tiles for call in launches(tile, TYPES[name], patch, fresh))
    return made


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    texts: dict[str, list[str]] = {}
    for tile in TILES:
        used = TYPES[kind(tile, dtype)]
        for call in [call for new in (False, True) for call in launches(tile, used, monkeypatch, new)]:
            texts.setdefault(call.kernel.name, []).append(simulator.source(call))
    assert texts.keys() == {kernel.name for kernel in loader.load(attention.TOPIC).values()}
    for instances in texts.values():
        simulator.check(list(dict.fromkeys(instances)))
        simulator.check_pointers(instances[:1])
        simulator.check_calls(instances[:1])


def test_every_setting_chooses_an_instance_of_its_own(monkeypatch):
    """A toggle that led to the same template would measure nothing."""
    chosen = {tile: launches(tile, mx.bfloat16, monkeypatch)[0] for tile in TILES}
    made = {(tuple(call.template), call.grid) for call in chosen.values()}
    assert len(made) == len(TILES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("turn", range(len(TILES)))
def test_tile_agrees_with_the_reference(turn, dtype, ready, monkeypatch):
    size, tile = SIZES[turn % len(SIZES)], TILES[turn]
    dtype = kind(tile, dtype)
    assert run(ready[dtype], size, TYPES[dtype], monkeypatch, **settings(tile)) <= OP.tolerance[dtype]


@pytest.mark.parametrize("turn", range(len(TILES)))
def test_tile_with_fresh_rows_agrees_with_the_reference(turn, ready, monkeypatch):
    size, tile = FRESH_SIZES[turn % len(FRESH_SIZES)], TILES[turn]
    dtype = kind(tile, ("bfloat16", "float32")[turn // len(SCALAR) % 2])
    assert run_fresh(ready[dtype], size, TYPES[dtype], monkeypatch, **settings(tile)) <= OP.tolerance[dtype]


# Each split, number of heads and order of lanes at least once; the others under --full.
@pytest.mark.parametrize(
    ("tile", "size"), [*zip(PAGED_TILES[::5], [*PAGED_SIZES, *PAGED_SIZES]), (PAGED_TILES[3], SIZES[5])]
)
def test_pages_are_read_through_the_table(tile, size, monkeypatch):
    """As the contiguous cache: bit for bit, with pages out of order, some in an extension, all else NaN."""
    given, chosen = arguments(size, mx.bfloat16), settings(tile)
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    got = attention.attention_metal(*paged_arguments(given), **chosen)
    assert mx.array_equal(got, attention.attention_metal(*given, **chosen))
    assert relative_rms(got, OP.reference.run(*given)) <= OP.tolerance["bfloat16"]


@pytest.mark.parametrize("size", [(1, 260, 2, 30), (3, 600, 1, 0), (1, 512, 1, -1)])
def test_fresh_rows_follow_pages(size, monkeypatch):
    """The page that the new rows will fall into may not exist yet."""
    given, fresh, whole = fresh_arguments(size, mx.float32)
    room = given[1].shape[2] - max(size[3], 0)
    q, keys, values, scale, position = given
    shown = (q, keys[:, :, :room], values[:, :, :room], scale, position)
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    chosen = settings(("8", "blocks", "coalesced"))
    got = attention.attention_metal(*paged_arguments(shown), **chosen, fresh=fresh)
    assert relative_rms(got, OP.reference.run(*whole)) <= OP.tolerance["float32"]


@pytest.mark.full
@pytest.mark.parametrize("tile", PAGED_TILES, ids="-".join)
def test_pages_are_read_by_every_tile_of_every_size(tile, monkeypatch):
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    for size in [*SIZES, *PAGED_SIZES]:
        for dtype in (mx.bfloat16, mx.float32):
            given, chosen = arguments(size, dtype), settings(tile)
            got = attention.attention_metal(*paged_arguments(given), **chosen)
            assert mx.array_equal(got, attention.attention_metal(*given, **chosen))


@pytest.mark.parametrize(
    ("tile", "size", "apart", "paged"),
    [
        (("8", "blocks", "coalesced"), (1, 300, 2, 3), 40, False),
        (("4", "chunks", "apart"), (3, 130, 1, 20), 130, False),
        (("8", "blocks", "tiles"), (1, 260, 1, 3), 17, False),
        (("8", "chunks", "tiles_ahead"), (2, 300, 2, 9), 45, False),
        (("2", "none", "coalesced"), (8, 70, 1, 8), 0, False),
        (("8", "blocks", "coalesced"), (1, 520, 2, 3), 40, True),
        (("2", "chunks", "apart"), (3, 290, 1, 20), 50, True),
    ],
)
def test_recent_rows_are_read_between_the_cache_and_the_new_ones(tile, size, apart, paged, monkeypatch):
    """A position in the cache, in pages or not, is stale from the first recent one on; new rows stand in neither."""
    given, whole = recent_arguments(size, apart, mx.bfloat16, paged)
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    got = attention.attention_metal(*given, **settings(tile))
    assert relative_rms(got, OP.reference.run(*whole)) <= OP.tolerance["bfloat16"]


@pytest.mark.parametrize(
    ("layers", "rows", "at", "dtype"), [(1, 1, 7, mx.float32), (3, 2, 0, mx.bfloat16), (10, 8, 16, mx.bfloat16)]
)
def test_recent_rows_are_made_anew_with_the_new_ones_in_place(layers, rows, at, dtype, monkeypatch):
    kv, room = 2, 24
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    keys = [mx.random.normal((1, kv, rows, 256), key=mx.random.key(i)).astype(dtype) for i in range(layers)]
    values = [mx.random.normal((1, rows, kv * 256), key=mx.random.key(i + 50)).astype(dtype) for i in range(layers)]
    recent = mx.random.normal((1, layers * 2 * kv, room, 256), key=mx.random.key(99)).astype(dtype)
    first = 1000
    got = recent_kernels.update_metal(recent, mx.array([first] * 4), mx.array([first + at] * 4), keys, values)
    for i in range(layers):
        planes = slice(2 * i * kv, (2 * i + 1) * kv), slice((2 * i + 1) * kv, (2 * i + 2) * kv)
        recent[:, planes[0], at : at + rows] = keys[i]
        recent[:, planes[1], at : at + rows] = values[i].reshape(1, rows, kv, 256).swapaxes(1, 2)
    assert mx.array_equal(got, recent)


def test_recent_rows_of_too_many_layers_are_refused():
    rows = [mx.zeros((1, 1, 1, 256))] * 11, [mx.zeros((1, 1, 256))] * 11
    with pytest.raises(loader.KernelError, match="1 to 10 layers"):
        recent_kernels.update_metal(mx.zeros((1, 22, 8, 256)), mx.zeros(4), mx.zeros(4), *rows)


def test_matrix_tiles_refuse_pages():
    with pytest.raises(loader.KernelError, match="not in pages"):
        attention.attention_metal(*paged_arguments(arguments(SIZES[0], mx.float16)), lanes="tiles")


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids="-".join)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(tile, dtype, monkeypatch):
    dtype = kind(tile, dtype)
    fast, checked = Simulator(), Simulator(checked=True)
    for size in SIZES:
        for simulated in (fast, checked):
            assert run(simulated, size, TYPES[dtype], monkeypatch, **settings(tile)) <= OP.tolerance[dtype]
    for size in FRESH_SIZES:
        for simulated in (fast, checked):
            assert run_fresh(simulated, size, TYPES[dtype], monkeypatch, **settings(tile)) <= OP.tolerance[dtype]


def test_float16_agrees_with_the_reference(monkeypatch):
    error = run(Simulator(), SIZES[3], mx.float16, monkeypatch, **settings(("8", "blocks", "coalesced")))
    assert error <= OP.tolerance["float16"]


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, ready, monkeypatch):
    monkeypatch.setattr(ready["float32"], "order", order)
    for tile in (("8", "chunks", "coalesced"), ("4", "blocks", "apart")):
        assert run(ready["float32"], SIZES[5], mx.float32, monkeypatch, **settings(tile)) <= OP.tolerance["float32"]
    monkeypatch.setattr(ready["float16"], "order", order)
    for lanes in MATRIX:
        chosen = settings(("8", "blocks", lanes))
        assert run(ready["float16"], SIZES[5], mx.float16, monkeypatch, **chosen) <= OP.tolerance["float16"]


@pytest.mark.parametrize(
    ("heads", "lanes"), [("8", "coalesced"), ("4", "coalesced"), ("8", "apart"), ("8", "tiles"), ("8", "tiles_ahead")]
)
def test_accesses_are_clean_and_counted(heads, lanes, monkeypatch):
    """Bounds, races and unwritten memory by the checked build; each key and value byte once per packed group."""
    simulated = Simulator(checked=True)
    rows, n, kv, at, room = size = (1, 300, 1, 130, 20)
    error = run(simulated, size, mx.bfloat16, monkeypatch, **settings((heads, "blocks", lanes)))
    assert error <= OP.tolerance["bfloat16"]
    split, merge = (traffic for _, traffic in simulated.traffic)
    fetches = 8 // int(heads)
    # Steps of 32 or 16 positions read the last row of their part again where it has fewer: 44, 44 and 43.
    seen = {"tiles": 3 * 64, "tiles_ahead": 3 * 48}.get(lanes, at + 1) * kv * 256 * 2
    assert split["keys"].loaded == split["values"].loaded == fetches * seen
    assert merge["partial"].loaded == merge["partial"].stored + 8 * BLOCKS * 256 * 4
    if lanes == "coalesced":
        for moved in (split["keys"], split["values"], split["partial"], merge["partial"], merge["out"]):
            assert moved.lines <= 1.1 * moved.ideal
    elif lanes in MATRIX:
        for moved in (split["values"], split["partial"]):
            assert moved.lines <= 1.1 * moved.ideal
        # Eight rows a load, half a line of each; the next load takes the other half.
        assert split["keys"].lines <= 2 * split["keys"].ideal
    else:
        # What the toggle is about: a lane that walks its own row touches a line a word.
        assert split["keys"].lines > 4 * split["keys"].ideal


@pytest.mark.parametrize("lanes", SCALAR)
def test_fresh_rows_are_read_as_often_as_cached_ones(lanes, monkeypatch):
    """The cache up to the first new row, and each new row by those that see it; nothing of what is stale."""
    simulated = Simulator(checked=True)
    rows, before, kv, _ = size = (3, 130, 1, 20)
    error = run_fresh(simulated, size, mx.bfloat16, monkeypatch, **settings(("8", "blocks", lanes)))
    assert error <= OP.tolerance["bfloat16"]
    split = simulated.traffic[0][1]
    row = kv * 256 * 2
    for cached, fresh in (("keys", "fresh_keys"), ("values", "fresh_values")):
        assert split[cached].loaded == rows * before * row
        assert split[fresh].loaded == sum(range(1, rows + 1)) * row
        assert lanes != "coalesced" or split[fresh].lines <= 1.1 * split[fresh].ideal


@pytest.mark.parametrize(("lanes", "step"), [("tiles", 32), ("tiles_ahead", 16)])
def test_tiles_with_fresh_rows_are_clean_and_read_whole_steps(lanes, step, monkeypatch):
    simulated = Simulator(checked=True)
    rows, before, kv, _ = size = (3, 130, 1, 20)
    error = run_fresh(simulated, size, mx.float16, monkeypatch, **settings(("8", "blocks", lanes)))
    assert error <= OP.tolerance["float16"]
    split = simulated.traffic[0][1]
    for cached, fresh in (("keys", "fresh_keys"), ("values", "fresh_values")):
        # Three parts of 43 to 45 positions.
        assert split[cached].loaded + split[fresh].loaded == rows * 3 * -(-44 // step) * step * kv * 256 * 2
        assert split[cached].loaded >= rows * before * kv * 256 * 2 and split[fresh].loaded > 0


@pytest.mark.parametrize("lanes", SCALAR)
def test_float32_accesses_are_clean(lanes, monkeypatch):
    simulated = Simulator(checked=True)
    error = run(simulated, SIZES[2], mx.float32, monkeypatch, **settings(("2", "none", lanes)))
    assert error <= OP.tolerance["float32"]


@pytest.mark.parametrize("which", range(5))
def test_an_input_of_tiles_that_is_not_dense_gives_nan(which, ready, monkeypatch):
    (q, keys, values, scale, position), fresh, _ = fresh_arguments(FRESH_SIZES[1], mx.float16)
    inputs = [q, keys, values, *fresh]
    inputs[which] = mx.contiguous(inputs[which].swapaxes(2, 3)).swapaxes(2, 3)
    monkeypatch.setattr(loader, "launch", ready["float16"].launch)
    chosen = settings(("8", "none", "tiles"))
    out = attention.attention_metal(*inputs[:3], scale, position, **chosen, fresh=tuple(inputs[3:]))
    assert mx.isnan(out.reshape(-1)[0]).item()


def test_an_input_that_is_not_dense_gives_nan(ready, monkeypatch):
    q, keys, values, scale, position = arguments(SIZES[1], mx.float32)
    monkeypatch.setattr(loader, "launch", ready["float32"].launch)
    turned = mx.contiguous(keys.swapaxes(2, 3)).swapaxes(2, 3)
    out = attention.attention_metal(q, turned, values, scale, position, **settings(("8", "none", "coalesced")))
    assert mx.isnan(out.reshape(-1)[0]).item()
    given, (fresh_keys, fresh_values), _ = fresh_arguments(FRESH_SIZES[1], mx.float32)
    turned = mx.contiguous(fresh_keys.swapaxes(2, 3)).swapaxes(2, 3)
    out = attention.attention_metal(*given, **settings(("8", "none", "coalesced")), fresh=(turned, fresh_values))
    assert mx.isnan(out.reshape(-1)[0]).item()


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


@pytest.mark.parametrize(("shown", "chunk"), [(300, attention.CHUNK), (600, 0)])
def test_blocks_apply_from_min_context_on(shown, chunk, monkeypatch):
    config = EngineConfig(
        decode_attention=DecodeAttentionConfig("metal", split="blocks", blocks=BLOCKS, min_context=512)
    )
    seen: list[Launch] = []
    simulated = Simulator()

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call)
        return simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    given = arguments((1, shown, 1, -1, 0), mx.bfloat16)
    out = bind(config, "cuda").decode_attention(*given, rows=1)
    assert relative_rms(out, OP.reference.run(*given)) <= OP.tolerance["bfloat16"]
    assert dict(seen[0].template)["CHUNK"] == chunk


def test_a_step_is_two_launches_or_one_where_nothing_is_split(monkeypatch):
    def counts(size: int) -> dict[str, set[int]]:
        made: dict[str, set[int]] = {}
        for tile in TILES:
            if tile[0] == "8":
                calls = launches(tile, TYPES[kind(tile, "float32")], monkeypatch, size=size)
                made.setdefault(tile[1], set()).add(len(calls))
        return made

    assert counts(3) == {"none": {1}, "chunks": {2}, "blocks": {2}}
    # One part holds the few keys here, so there is nothing to merge either.
    assert counts(0) == {"none": {1}, "chunks": {1}, "blocks": {1}}


@pytest.mark.parametrize(("lanes", "most"), attention.LEAST_PART.items())
def test_a_short_context_is_divided_into_fewer_blocks(lanes, most, monkeypatch):
    """The number depends on the keys shown alone, so one traced step keeps it."""
    seen: list[Launch] = []

    def note(call: Launch) -> list[mx.array]:
        seen.append(call)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(call.shapes, call.dtypes)]

    monkeypatch.setattr(loader, "launch", note)
    for keys in (256, 257, 128 * most, 4 * 128 * most):
        given = arguments((1, keys, 1, 0, 0), mx.bfloat16)
        attention.attention_metal(*given, heads="8", split="blocks", lanes=lanes, blocks=128)
    assert [call.shapes[0][2] for call in seen[::2]] == [256 // most, 256 // most + 1, 128, 128]
