"""The kernels of `experts` on the simulator: every template instance, against the op's float32 reference."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
import simulator
from experts_cases import FORMS, FULL, OP, SIZES, TILES, TYPES, Call, Size, call_for, make, tiles_of
from simulator import Simulator

from engine.kernels import experts, loader
from engine.kernels.loader import Launch
from engine.ops import relative_rms
from engine.weights import Experts, Matrix

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


def launches(call: Call, form: str, monkeypatch: pytest.MonkeyPatch, **tiles: object) -> list[Launch]:
    """What a call would launch."""
    seen: list[Launch] = []

    def note(one: Launch) -> list[mx.array]:
        seen.append(one)
        return [mx.zeros(shape, kind) for shape, kind in zip(one.shapes, one.dtypes)]

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", note)
        call.run(form, **tiles)
    return seen


def shapes_only(size: Size, dtype: mx.Dtype, logits: mx.Dtype | None = None) -> Call:
    """A call whose arrays are never looked at: stacks of the full model cost nothing."""

    def nothing(*shape: int, kind: mx.Dtype = dtype) -> mx.array:
        return mx.broadcast_to(mx.zeros((1,), kind), shape)

    def matrix(*shape: int) -> Matrix:
        *lead, inputs = shape
        scales = nothing(*lead, inputs // 64)
        return Matrix(nothing(*lead, inputs // 8, kind=mx.uint32), scales, scales, 4)

    stacks = [(size.wide, size.hidden), (size.wide, size.hidden), (size.hidden, size.wide)]
    singles = [matrix(*shape) for shape in (*stacks, (1, size.hidden))]
    w = Experts(matrix(size.experts, size.hidden), *(matrix(size.experts, *shape) for shape in stacks), *singles)
    x = nothing(1, size.rows, size.hidden)
    shared = (nothing(1, size.rows, size.wide), nothing(1, size.rows, size.wide), nothing(1, size.rows, 1))
    scores = nothing(size.rows, size.experts, kind=logits or dtype)
    return Call(x, scores, w, size, shared, nothing(size.hidden), x)


def run(simulated: Simulator, call: Call, form: str, monkeypatch: pytest.MonkeyPatch, **tiles: object) -> float:
    """Relative RMS error on the simulator."""
    monkeypatch.setattr(loader, "launch", simulated.launch)
    got = call.run(form, **tiles)
    assert got.dtype == call.x.dtype
    return relative_rms(got, call.want(form).astype(got.dtype))


def turn_of(turn: int, dtype: str) -> tuple[tuple, Call, str]:
    tile = TILES[turn]
    return tile, call_for(tile[2], SIZES[turn % len(SIZES)], TYPES[dtype]), tile[2]


@pytest.fixture(scope="module")
def ready() -> dict[str, Simulator]:
    """A simulator an element type with all of its instances compiled together."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bfloat16", "float32"):
            made[name] = Simulator()
            calls = (turn_of(turn, name) for turn in range(len(TILES)))
            made[name].prepare(
                one for tile, call, form in calls for one in launches(call, form, patch, **tiles_of(tile))
            )
    return made


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    """Of the full model and of the small one, with logits of the activations' type and in float32."""
    texts: dict[str, list[str]] = {}
    for size, logits in ((FULL, TYPES[dtype]), (SIZES[0], mx.float32), (Size(2, 256, 64, 32, 8), TYPES[dtype])):
        call = shapes_only(size, TYPES[dtype], logits)
        for up_tile, form in product(experts.UP_TILES, FORMS):
            for down_tile in experts.DOWN_TILES if up_tile == experts.UP_TILES[0] else experts.DOWN_TILES[:1]:
                for one in launches(call, form, monkeypatch, up_tile=up_tile, down_tile=down_tile):
                    texts.setdefault(one.kernel.name, []).append(simulator.source(one))
    assert texts.keys() == {kernel.name for kernel in loader.load(experts.TOPIC).values()}
    for instances in texts.values():
        simulator.check(list(dict.fromkeys(instances)))
        simulator.check_pointers(instances[:1])
        simulator.check_calls(instances[:1])


def test_every_tile_chooses_an_instance_of_its_own(monkeypatch):
    """Two tiles that led to the same launch would be measured as a difference of nothing."""
    call = shapes_only(FULL, mx.bfloat16)
    ups = [launches(call, "step", monkeypatch, up_tile=tile)[0] for tile in experts.UP_TILES]
    downs = [launches(call, "step", monkeypatch, down_tile=tile)[1] for tile in experts.DOWN_TILES]
    for calls in (ups, downs):
        assert len({(tuple(one.template), one.grid) for one in calls}) == len(calls) <= 12


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_two_launches(form, monkeypatch):
    assert [one.kernel.name for one in launches(shapes_only(FULL, mx.bfloat16), form, monkeypatch)] == [
        "experts_decode_up",
        "experts_decode_down",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("turn", range(len(TILES)))
def test_tile_agrees_with_the_reference(turn, dtype, ready, monkeypatch):
    tile, call, form = turn_of(turn, dtype)
    assert run(ready[dtype], call, form, monkeypatch, **tiles_of(tile)) <= OP.tolerance[dtype]


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(tile, dtype, monkeypatch):
    checked = Simulator(checked=True)
    for size, form in product(SIZES, FORMS):
        call = call_for(form, size, TYPES[dtype])
        assert run(checked, call, form, monkeypatch, **tiles_of(tile)) <= OP.tolerance[dtype]


def test_float16_agrees_with_the_reference(monkeypatch):
    error = run(Simulator(), call_for("step", SIZES[0], mx.float16), "step", monkeypatch)
    assert error <= OP.tolerance["float16"]


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, ready, monkeypatch):
    monkeypatch.setattr(ready["float32"], "order", order)
    for turn in (0, 6):
        tile, call, form = turn_of(turn, "float32")
        assert run(ready["float32"], call, form, monkeypatch, **tiles_of(tile)) <= OP.tolerance["float32"]


def routed(simulated: Simulator, call: Call, monkeypatch: pytest.MonkeyPatch, form: str) -> tuple[np.ndarray, ...]:
    """ids and weights that the first launch writes."""
    seen: list[list[mx.array]] = []

    def launch(one: Launch) -> list[mx.array]:
        seen.append(simulated.launch(one))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", launch)
        call.run(form)
    return np.array(seen[0][1]), np.array(seen[0][2])


def assert_routed(got: tuple[np.ndarray, ...], call: Call, renormalise: bool) -> None:
    """The same experts with the same weights, in any order."""
    want = call.routing(renormalise)
    ids, order = np.array(want.ids), np.argsort(np.array(want.ids), axis=-1)
    mine = np.argsort(got[0], axis=-1)
    assert np.array_equal(np.take_along_axis(got[0], mine, -1), np.take_along_axis(ids, order, -1))
    weights = np.take_along_axis(np.array(want.weights.astype(mx.float32)), order, -1)
    assert np.allclose(np.take_along_axis(got[1], mine, -1), weights, rtol=2e-6, atol=0)


@pytest.mark.parametrize("logits", TYPES)
@pytest.mark.parametrize("form", ["step", "bare"])
def test_routing_is_the_references(logits, form, monkeypatch):
    """Ties at rank k / k + 1, both zeros, all experts, one expert; float32 rows, so that logits alone differ."""
    simulated = Simulator()
    for size in (Size(5, 64, 64, 40, 8, "ties"), Size(3, 64, 64, 40, 1, "ties"), Size(2, 64, 64, 40, 8)):
        call = make(size, mx.float32, TYPES[logits])
        assert_routed(routed(simulated, call, monkeypatch, form), call, bool(FORMS[form]["renormalise"]))
    zeros = mx.where(mx.arange(40) % 2 == 0, 0.0, -0.0)[None].astype(TYPES[logits])
    call = make(Size(1, 64, 64, 40, 8), mx.float32, TYPES[logits])
    ids, weights = routed(simulated, Call(**(vars(call) | {"logits": zeros})), monkeypatch, form)
    assert sorted(ids[0].tolist()) == list(range(32, 40))
    assert np.allclose(weights, 1 / 8 if form == "step" else 1 / 40)


@pytest.mark.parametrize("logits", ["bfloat16", "float32"])
def test_logits_that_are_not_finite_give_nan_and_no_wild_read(logits, monkeypatch):
    call = make(Size(2, 64, 64, 40, 8), mx.float32, TYPES[logits])
    broken = mx.where(mx.arange(2)[:, None] == 1, float("nan"), call.logits.astype(mx.float32)).astype(TYPES[logits])
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    out = Call(**(vars(call) | {"logits": broken})).run("step")
    assert mx.isnan(out[0, 1]).all().item() and not mx.isnan(out[0, 0]).any().item()


def test_accesses_are_clean_and_counted(monkeypatch):
    """Bounds, races and unwritten memory by the checked build; each weight of a chosen expert once per row."""
    simulated = Simulator(checked=True)
    size = Size(2, 1024, 512, 6, 2)
    call = call_for("step", size, mx.bfloat16)
    assert run(simulated, call, "step", monkeypatch) <= OP.tolerance["bfloat16"]
    up, down = (traffic for _, traffic in simulated.traffic)
    pairs = size.rows * size.k
    codes, groups = size.hidden * size.wide // 2, size.hidden * size.wide // 64 * 2
    for name in ("gate", "up"):
        assert up[name].loaded == pairs * codes
        # A group of 64 is two lanes' words; both read its scale, in one access.
        assert up[f"{name}_scales"].loaded == up[f"{name}_biases"].loaded == pairs * 2 * groups
    assert (down["down"].loaded, down["shared"].loaded) == (pairs * codes, size.rows * codes)
    assert down["down_scales"].loaded == pairs * 2 * groups
    for launch in (up, down):
        for name, moved in launch.items():
            if moved.loaded + moved.stored > 1024:
                assert moved.lines <= 1.1 * moved.ideal, name


@pytest.mark.parametrize("turn", [1, 4, 7])
def test_float32_accesses_are_clean(turn, monkeypatch):
    tile, call, form = turn_of(turn, "float32")
    assert run(Simulator(checked=True), call, form, monkeypatch, **tiles_of(tile)) <= OP.tolerance["float32"]


def test_views_are_read_by_their_strides(ready, monkeypatch):
    """What MLX hands on without a copy: ids from the end of a partition, products that are parts of a wider one."""
    call = call_for("step", SIZES[0], mx.float32)
    both = mx.concatenate([call.shared[0], call.shared[1]], axis=-1)
    parts = mx.split(both, 2, axis=-1)
    wider = mx.concatenate([call.logits, call.logits], axis=-1)
    view = Call(
        **(
            vars(call)
            | {
                "shared": (parts[0], parts[1], call.shared[2]),
                "logits": wider[:, : call.size.experts],
                "residual": mx.contiguous(call.residual.swapaxes(1, 2)).swapaxes(1, 2),
            }
        )
    )
    assert run(ready["float32"], view, "step", monkeypatch) <= OP.tolerance["float32"]


def test_rows_that_are_not_dense_give_nan(monkeypatch):
    call = call_for("bare", SIZES[0], mx.float32)
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    turned = mx.repeat(call.x, 2, axis=-1)[..., ::2]
    assert mx.isnan(Call(**(vars(call) | {"x": turned})).run("bare")).all().item()
    gate = mx.repeat(call.shared[0], 2, axis=-1)[..., ::2]
    assert mx.isnan(Call(**(vars(call) | {"shared": (gate, *call.shared[1:])})).run("bare").reshape(-1)[0]).item()
