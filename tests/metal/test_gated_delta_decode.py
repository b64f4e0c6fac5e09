"""The kernel of `gated_delta` on the simulator: every template instance, against the op's float32 reference."""

from __future__ import annotations

import mlx.core as mx
import pytest
import simulator
from gated_delta_cases import OP, SIZES, TILES, TYPES, Tile, arguments, error, named, settings
from simulator import Simulator

from engine.config import EngineConfig
from engine.kernels import gated_delta, loader
from engine.kernels.loader import KernelError, Launch
from engine.ops import bind, relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

STATE = 128 * 128 * 4
"""Bytes of a head's state."""


def launches(tile: Tile, size: tuple, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the variant would launch for a tile."""
    seen: list[Launch] = []

    def note(call: Launch) -> list[mx.array]:
        seen.append(call)
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", note)
        gated_delta.gated_delta_metal(*arguments(size, dtype), **settings(tile))
    return seen


def run(simulated: Simulator, given: tuple, monkeypatch: pytest.MonkeyPatch, **chosen: object) -> tuple:
    """The variant's result on the simulator."""
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return gated_delta.gated_delta_metal(*given, **chosen)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    texts = []
    for tile in TILES:
        # Of few heads the gates are `constant`, of many `device`.
        for size in ((1, 1, 2, 4), (2, 1, 2, 4), (1, 1, 8, 4), (2, 1, 8, 4)):
            texts += [simulator.source(call) for call in launches(tile, size, TYPES[dtype], monkeypatch)]
    assert len(set(texts)) == len(texts) == 4 * len(TILES)
    simulator.check(texts)
    simulator.check_pointers(texts[:2])
    simulator.check_calls(texts[:2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("turn", range(len(TILES)))
def test_tile_agrees_with_the_reference(turn, dtype, monkeypatch):
    size, tile = SIZES[turn % len(SIZES)], TILES[turn]
    given = arguments(size, TYPES[dtype], apart=turn % 2 == 0)
    result = run(Simulator(), given, monkeypatch, **settings(tile))
    assert error(given, result, normed=tile[2]) <= OP.tolerance[dtype]


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids=named)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(tile, dtype, monkeypatch):
    fast, checked = Simulator(), Simulator(checked=True)
    for size in SIZES:
        for apart in (True, False):
            given = arguments(size, TYPES[dtype], apart=apart)
            want = OP.reference.run(*given)
            for simulated in (fast, checked):
                result = run(simulated, given, monkeypatch, **settings(tile))
                assert error(given, result, want, normed=tile[2]) <= OP.tolerance[dtype]


def test_float16_agrees_with_the_reference(monkeypatch):
    given = arguments(SIZES[1], mx.float16)
    assert error(given, run(Simulator(), given, monkeypatch)) <= OP.tolerance["float16"]


def test_the_full_geometry_agrees_with_the_reference(monkeypatch):
    """16 key heads and 32 value heads, in 128 threadgroups: enough for a large GPU."""
    given, seen = arguments((1, 16, 32, 4), mx.bfloat16), []
    simulated = Simulator()

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call)
        return simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    result = gated_delta.gated_delta_metal(*given, normed=False, dtype=mx.float32)
    assert error(given, result, normed=False) <= OP.tolerance["bfloat16"]
    threads, heads, _ = seen[0].grid
    assert threads // seen[0].threadgroup[0] * heads == 128


def test_faint_rows_agree_with_the_reference(monkeypatch):
    given = arguments(SIZES[1], mx.float32, faint=True)
    assert error(given, run(Simulator(), given, monkeypatch)) <= OP.tolerance["float32"]


def test_a_read_out_in_float32_is_the_one_that_is_rounded(monkeypatch):
    given = arguments(SIZES[0], mx.bfloat16)
    simulated = Simulator()
    wide = run(simulated, given, monkeypatch, normed=False, dtype=mx.float32)[0]
    out = run(simulated, given, monkeypatch, normed=False)[0]
    assert (wide.dtype, out.dtype) == (mx.float32, mx.bfloat16)
    assert mx.array_equal(out, wide.astype(mx.bfloat16)).item()


def test_twenty_steps_in_a_row_stay_within_tolerance(monkeypatch):
    """The state and the kept rows are fed back, by the reference its own."""
    simulated = Simulator()
    ours = exact = arguments(SIZES[0], mx.float32)
    for step in range(20):
        row = arguments(SIZES[0], mx.float32, seed=100 + step)[:4]
        ours, exact = (*row, *ours[4:]), (*row, *exact[4:])
        got, want = run(simulated, ours, monkeypatch), OP.reference.run(*exact)
        assert error(exact, got, want) <= OP.tolerance["float32"]
        ours, exact = (*row, *got[1:], *ours[6:]), (*row, *want[1:], *exact[6:])


@pytest.mark.parametrize("rows", [*range(1, 9), 19])
def test_rows_together_are_the_rows_one_by_one(rows, monkeypatch):
    simulated = Simulator()
    given = arguments((rows, 1, 2, 4), mx.float32)
    together = run(simulated, given, monkeypatch)
    conv, state, out = given[4], given[5], []
    for row in range(rows):
        single = [part[:, row : row + 1] for part in given[:4]]
        one, conv, state = run(simulated, (*single, conv, state, *given[6:]), monkeypatch)
        out.append(one)
    assert relative_rms(together[0], mx.concatenate(out, axis=1)) < 1e-6
    assert relative_rms(together[2], state) < 1e-6
    for got, want in zip(together[1], conv, strict=True):
        assert got.shape == want.shape and mx.array_equal(got, want).item()


@pytest.mark.parametrize(("rows", "tile"), [(2, (4, 2)), (8, (8, 4)), (11, (16, 2))])
def test_the_state_after_each_row_may_be_kept(rows, tile, monkeypatch):
    """The last one first, the others at their number; accesses clean, and each state written once."""
    simulated, checked = Simulator(), Simulator(checked=True)
    given = arguments((rows, 1, 2, 4), mx.float32)
    conv, state = given[4], given[5]
    several = mx.concatenate([state, mx.full((rows - 1, *state.shape[1:]), float("nan"))])
    how = {"columns": tile[0], "simdgroups": tile[1], "normed": False}
    out, _, every = run(checked, (*given[:5], several, *given[6:]), monkeypatch, **how)
    assert every.shape == several.shape
    ((_, moved),) = checked.traffic
    assert moved["new_state"].stored == rows * moved["state"].loaded == rows * 2 * STATE
    assert relative_rms(out, run(simulated, given, monkeypatch, **how)[0]) < 1e-6
    for row in range(rows):
        single = [part[:, row : row + 1] for part in given[:4]]
        _, conv, state = run(simulated, (*single, conv, state, *given[6:]), monkeypatch, **how)
        assert relative_rms(every[(row + 1) % rows][None], state) < 1e-6
    with pytest.raises(KernelError, match="one for each of"):
        run(simulated, (*given[:5], mx.repeat(state, rows + 1, axis=0), *given[6:]), monkeypatch, **how)


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, monkeypatch):
    given = arguments(SIZES[4], mx.float32)
    for tile in ((8, 4, False), (16, 8, True)):
        result = run(Simulator(order=order), given, monkeypatch, **settings(tile))
        assert error(given, result, normed=tile[2]) <= OP.tolerance["float32"]


@pytest.mark.parametrize(("tile", "size"), [((8, 4, False), SIZES[0]), ((4, 4, False), SIZES[1])], ids=["one", "rows"])
def test_accesses_are_clean_and_counted(tile, size, monkeypatch):
    """Bounds, races and unwritten memory by the checked build; the state goes once in and once out."""
    simulated = Simulator(checked=True)
    rows, key_heads, value_heads, _ = size
    given = arguments(size, mx.bfloat16, apart=False)
    result = run(simulated, given, monkeypatch, **settings(tile))
    assert error(given, result, normed=False) <= OP.tolerance["bfloat16"]
    ((_, moved),) = simulated.traffic
    assert moved["state"].loaded == moved["new_state"].stored == value_heads * STATE
    assert moved["out"].stored == rows * value_heads * 128 * 2
    for name in ("state", "new_state", "out", "qkv", "kept0", "kept1", "kept2"):
        assert moved[name].lines <= 1.1 * moved[name].ideal
    # Each threadgroup convolves its head's query and key; a value is convolved once. A row is read as often as it is a
    # tap of a new one.
    slices = 128 // (tile[0] * tile[1])
    row = value_heads * (2 * slices + 1) * 128 * 2
    assert moved["kept0"].loaded == row
    assert moved["qkv"].loaded == row * sum(min(4, rows - i) for i in range(rows))


def test_the_gated_norm_is_clean(monkeypatch):
    """Rows that do not fill the second block, so that what is staged is used anew."""
    simulated = Simulator(checked=True)
    given = arguments((11, 1, 1, 4), mx.float32)
    assert error(given, run(simulated, given, monkeypatch)) <= OP.tolerance["float32"]
    ((_, moved),) = simulated.traffic
    assert moved["state"].loaded == moved["new_state"].stored == STATE
    assert moved["z"].loaded == moved["out"].stored == 11 * 128 * 4
    for name in ("state", "new_state", "out", "z"):
        assert moved[name].lines <= 1.1 * moved[name].ideal


@pytest.mark.parametrize(
    ("which", "spoil"),
    [
        (0, lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)),
        (1, lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)),
        (0, lambda x: mx.pad(x, [(0, 0), (0, 0), (0, 1)])[..., :-1]),
    ],
    ids=["qkv turned", "z turned", "qkv off 16 bytes"],
)
def test_an_input_that_it_cannot_read_gives_nan(which, spoil, monkeypatch):
    given = list(arguments(SIZES[1], mx.float32))
    given[which] = spoil(given[which])
    out, _, _ = run(Simulator(), tuple(given), monkeypatch)
    assert mx.isnan(out.reshape(-1)[0]).item()


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_the_config_reaches_the_kernel_in_one_launch(device, monkeypatch):
    bound = bind(EngineConfig(gated_delta="registers"), device)
    simulated, seen = Simulator(), []

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call)
        return simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    given = arguments(SIZES[0], mx.float32)
    assert error(given, bound.gated_delta(*given, rows=1)) <= OP.tolerance["float32"]
    assert len(seen) == 1 and dict(seen[0].template)["ROWS"] == 1
    assert bound.recorder.executed()[0]["variant"] == "registers"


def test_kept_rows_are_views_of_the_new_ones_but_for_long_runs(monkeypatch):
    """A decode step launches nothing for them; a chunk of a prompt must not stay alive for three rows."""
    monkeypatch.setattr(loader, "launch", lambda call: [mx.zeros(s, d) for s, d in zip(call.shapes, call.dtypes)])
    one = arguments(SIZES[0], mx.float32)
    conv = gated_delta.gated_delta_metal(*one)[1]
    assert conv[0] is one[4][1] and conv[1] is one[4][2] and conv[2] is one[0]
    made: list[mx.array] = []
    monkeypatch.setattr(mx, "contiguous", lambda row: made.append(row) or row)
    gated_delta.gated_delta_metal(*arguments(SIZES[5], mx.float32))
    assert not made
    gated_delta.gated_delta_metal(*arguments(SIZES[4], mx.float32))
    assert len(made) == 3
