"""The kernels of a prefill's products on the simulator, against the references of `experts` and `linear`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import simulator
from experts_prefill_cases import (
    LINEAR,
    OP,
    PRODUCTS,
    SIZES,
    TYPES,
    Product,
    Size,
    chosen,
    dense,
    layer,
    multiplied,
    multiply,
    nothing,
    sorted_pairs,
)
from simulator import LaunchReport, Simulator

from engine.kernels import experts_prefill as kernels
from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

TILES = list(kernels.TILES)
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def type_of(tile: str) -> mx.Dtype:
    return list(TYPES.values())[TILES.index(tile) % 2]


def launches(run: object, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What a call would launch."""
    seen: list[Launch] = []

    def note(one: Launch) -> list[mx.array]:
        seen.append(one)
        return nothing(one)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", note)
        run()  # type: ignore[operator]
    return seen


@pytest.fixture(scope="module")
def ready() -> Simulator:
    """A simulator with the dense product of every tile compiled together."""
    made = Simulator()
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        for tile, size in PRODUCTS.items():
            calls += launches(lambda: multiply(*dense(size, type_of(tile)), tile), patch)  # noqa: B023
        made.prepare(calls)
    return made


def test_every_instance_compiles_under_metals_rules(monkeypatch):
    texts: dict[str, list[str]] = {}
    for tile in TILES:
        call = layer(SIZES[0], type_of(tile))
        for one in launches(lambda: call.run(tile), monkeypatch):  # noqa: B023
            texts.setdefault(one.kernel.name, []).append(simulator.source(one))
        for one in launches(lambda: multiply(*dense(PRODUCTS[tile], type_of(tile)), tile), monkeypatch):  # noqa: B023
            texts[one.kernel.name].append(simulator.source(one))
    assert texts.keys() == {kernel.name for kernel in loader.load(kernels.TOPIC).values()}
    for instances in texts.values():
        simulator.check(list(dict.fromkeys(instances)))
        simulator.check_pointers(instances[:1])
        simulator.check_calls(instances[:1])


def test_every_tile_is_an_instance_of_its_own(monkeypatch):
    """Two tiles that led to the same launch would be measured as a difference of nothing."""
    call = layer(SIZES[0], mx.bfloat16)
    made = {str(launches(lambda: call.run(tile), monkeypatch)[1].template) for tile in TILES}  # noqa: B023
    assert len(made) == len(TILES) <= 12


def grouped(ids: mx.array, experts: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    pairs, tiles = kernels.group(ids, experts, rows)
    return np.array(pairs), np.array(tiles)


@pytest.mark.parametrize(
    "size", [SIZES[1], Size(70, 0, 0, 8, 2, "one"), Size(17, 0, 0, 33, 3, "few"), Size(600, 0, 0, 5, 1)], ids=str
)
def test_pairs_are_sorted_and_tiled_on_the_device(size, monkeypatch):
    """Bounds, races and words that no one writes by the checked build; ids as `argpartition` leaves them, in a row."""
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    ids = chosen(size)
    wider = mx.concatenate([mx.zeros((size.rows, 3), mx.uint32), mx.array(ids)], axis=1)
    pairs, tiles = grouped(wider[:, 3:], size.experts, 16)
    order, wanted = sorted_pairs(ids, 16)
    assert np.array_equal(pairs, order)
    assert [tuple(tile[:3]) for tile in tiles.tolist() if tile[2]] == wanted
    assert len(tiles) == ids.size // 16 + size.experts


@pytest.mark.parametrize("tile", TILES)
def test_tile_agrees_with_the_reference(tile, ready, monkeypatch):
    dtype = type_of(tile)
    x, matrices = dense(PRODUCTS[tile], dtype)
    monkeypatch.setattr(loader, "launch", ready.launch)
    got = multiply(x, matrices, tile)
    assert relative_rms(got, multiplied(x, matrices)) <= LINEAR.tolerance[str(dtype).rpartition(".")[2]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_layer_agrees_with_the_reference(size, monkeypatch, whole):
    call = layer(size, mx.bfloat16)
    monkeypatch.setattr(loader, "launch", whole.launch)
    assert relative_rms(call.run("16"), call.want()) <= OP.tolerance["bfloat16"]


@pytest.mark.full
def test_stacks_expanded_first_agree_with_the_reference(monkeypatch):
    call = layer(SIZES[0], mx.bfloat16)
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    got = OP.variants["expanded_grouped"].run(call.x, call.routing, call.w, tile="32") + call.residual
    assert relative_rms(got, call.want()) <= OP.tolerance["bfloat16"]


@pytest.fixture(scope="module")
def whole() -> Simulator:
    """A simulator for whole layers, which keeps what it compiled."""
    return Simulator()


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, whole, monkeypatch):
    call = layer(SIZES[0], mx.bfloat16)
    monkeypatch.setattr(loader, "launch", whole.launch)
    plain = call.run("16")
    monkeypatch.setattr(whole, "order", order)
    assert mx.array_equal(call.run("16"), plain).item()


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(tile, dtype, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    for size in SIZES:
        call = layer(size, TYPES[dtype])
        assert relative_rms(call.run(tile), call.want()) <= OP.tolerance[dtype]
    for other in (tile, TILES[TILES.index(tile) - 1]):
        x, matrices = dense(PRODUCTS[other], TYPES[dtype])
        assert relative_rms(multiply(x, matrices, tile), multiplied(x, matrices)) <= LINEAR.tolerance[dtype]


def test_accesses_are_clean_and_each_weight_is_read_once_per_tile(monkeypatch):
    """Bounds, races and unwritten memory by the checked build."""
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    size = Size(20, 128, 128, 4, 2)
    call = layer(size, mx.bfloat16)
    assert relative_rms(call.run("16"), call.want()) <= OP.tolerance["bfloat16"]
    _, tiles = sorted_pairs(np.array(call.routing.ids), 16)
    _, up, down, *_ = (traffic for _, traffic in simulated.traffic)
    codes, groups = size.hidden * size.wide // 2, size.hidden * size.wide // 64 * 2
    for moved, names in ((up, ("weight", "other")), (down, ("weight",))):
        for name in names:
            prefix = "" if name == "weight" else "other_"
            assert moved[name].loaded == len(tiles) * codes
            # A group of 64 is two lanes' words; both read its scale, in one access.
            assert moved[f"{prefix}scales"].loaded == moved[f"{prefix}biases"].loaded == len(tiles) * 2 * groups
            # Four lanes read 64 neighbouring bytes of each of eight rows.
            assert moved[name].lines <= 2 * moved[name].ideal
    pairs = size.rows * size.k
    assert up["out"].stored == pairs * size.wide * 2 and down["out"].stored == pairs * size.hidden * 2


# name: what is replaced in a gated product, and the kind of report
RUN = {
    "no barrier between staging and product": (f"STORE_ROWS(0u)\n{MEET}", "STORE_ROWS(0u)\n", "race"),
    "the buffer that is being read": ("STORE_ROWS(1u - buffer)", "STORE_ROWS(buffer)", "race"),
    "rows past the end": ("if (row < count && base + n < outputs)", "if (base + n < outputs)", "bounds"),
    "weights past the last row": ("(n < outputs ? n : outputs - 1u) * units", "n * units", "bounds"),
}
ALSO = {"race": ("uninitialised",), "bounds": ("race",)}
WRONG = {
    "pairs of codes exchanged": ("s % 2 * 2 + j", "s % 2 * 2 + 1 - j"),
    "scale of another group": ("scales_of[l / OWN][unit / 2u]", "scales_of[l / OWN][unit / 4u]"),
    "gate and up exchanged": ("codes_of[l / OWN][unit", "codes_of[1 - l / OWN][unit"),
}
WRONG_LAYER = {
    "row of another pair": ("uint(pairs[r]) / uint(CHOSEN)", "uint(pairs[r]) % uint(CHOSEN)"),
    "product at another pair's place": ("uint(pairs[to])", "to"),
    "unweighted": ("multiply_add(weight, value[i], sum[i])", "multiply_add(1.0f, value[i], sum[i])"),
}
GATED = Product(9, 192, 34, gated=True)
SMALL = Size(12, 192, 64, 8, 2)


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_reports(name, monkeypatch):
    old, new, kind = RUN[name]
    x, matrices = dense(GATED, mx.bfloat16)
    (one,) = launches(lambda: multiply(x, matrices, "16"), monkeypatch)
    assert simulator.source(one).count(old) == 1
    monkeypatch.setattr(loader, "launch", Simulator(checked=True, replace={old: new}).launch)
    with pytest.raises(LaunchReport) as caught:
        multiply(x, matrices, "16")
    kinds = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    assert kind in kinds and kinds <= {kind, *ALSO[kind]}, caught.value


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_result(name, monkeypatch):
    old, new = WRONG[name]
    x, matrices = dense(GATED, mx.bfloat16)
    (one,) = launches(lambda: multiply(x, matrices, "16"), monkeypatch)
    assert old in simulator.source(one)
    monkeypatch.setattr(loader, "launch", Simulator(replace={old: new}).launch)
    assert relative_rms(multiply(x, matrices, "16"), multiplied(x, matrices)) > 2 * LINEAR.tolerance["bfloat16"]


@pytest.mark.parametrize(
    "name", [name if i == 0 else pytest.param(name, marks=pytest.mark.full) for i, name in enumerate(WRONG_LAYER)]
)
def test_the_comparison_sees_a_wrong_layer(name, monkeypatch):
    old, new = WRONG_LAYER[name]
    call = layer(SMALL, mx.bfloat16)
    assert any(old in simulator.source(one) for one in launches(lambda: call.run("16"), monkeypatch))
    simulated = Simulator(replace={old: new})
    monkeypatch.setattr(loader, "launch", simulated.launch)
    assert relative_rms(call.run("16"), call.want()) > 2 * OP.tolerance["bfloat16"]


FAR = 2**27
"""Experts, rows of x and rows of the result, all counted from there: every offset is beyond 32 bits."""
SHIFTED = {
    "uint expert = 0u;": f"uint expert = {FAR}u;",
    "expert = uint(tiles[tile * 4u]);": f"expert = uint(tiles[tile * 4u]) + {FAR}u;",
    "{(const device uint4*)weight, (const device uint4*)other}": (
        f"{{(const device uint4*)weight - {FAR}ul * outputs * units * uint(WORDS), "
        f"(const device uint4*)other - {FAR}ul * outputs * units * uint(WORDS)}}"
    ),
    **{
        f"(const device ushort*){name} + first": (
            f"(const device ushort*){name} - {FAR}ul * outputs * (units / 2u) + first"
        )
        for name in ("scales", "other_scales", "biases", "other_biases")
    },
    "words_of_x = (const device uint4*)x": f"words_of_x = (const device uint4*)(x - {FAR} * x_strides[1])",
    "uint(r * x_strides[1] / 8)": f"uint((r + {FAR}u) * x_strides[1] / 8)",
    "out + ulong(to) * outputs": f"out - {FAR}ul * outputs + ulong(to + {FAR}u) * outputs",
    "routed + (ulong(row)": f"routed - {FAR}ul * uint(CHOSEN) * width * 8u + (ulong(row + {FAR}u)",
    "shared + ulong(row)": f"shared - {FAR}ul * width * 8u + ulong(row + {FAR}u)",
}
NARROW = {
    "ulong(expert) * outputs * units": "uint(expert) * outputs * units",
    "ulong(expert) * outputs * (units": "uint(expert) * outputs * (units",
    f"ulong(to + {FAR}u)": f"uint(to + {FAR}u)",
    f"(ulong(row + {FAR}u)": f"(uint(row + {FAR}u)",
}


def test_offsets_beyond_32_bits(monkeypatch):
    """The largest stacks by arithmetic alone: pointers begin far before their arrays, indices as far behind."""
    call = layer(SMALL, mx.bfloat16)
    texts = [simulator.source(one) for one in launches(lambda: call.run("16"), monkeypatch)]
    assert all(any(old in text for text in texts) for old in SHIFTED)
    monkeypatch.setattr(loader, "launch", Simulator(replace=SHIFTED).launch)
    assert relative_rms(call.run("16"), call.want()) <= OP.tolerance["bfloat16"]


@pytest.mark.full
@pytest.mark.parametrize("old", NARROW)
def test_an_offset_of_32_bits_is_seen(old, monkeypatch):
    call = layer(SMALL, mx.bfloat16)
    monkeypatch.setattr(loader, "launch", Simulator(replace={**SHIFTED, old: NARROW[old]}).launch)
    with pytest.raises(LaunchReport, match="bounds"):
        call.run("16")


def test_rows_that_are_not_dense_give_nan(whole, monkeypatch):
    call = layer(SMALL, mx.bfloat16)
    monkeypatch.setattr(loader, "launch", whole.launch)
    turned = mx.repeat(call.x, 2, axis=-1)[..., ::2]
    got = kernels.linear_packed(turned, call.w.shared_gate_proj, tile="16")
    assert mx.isnan(got.reshape(-1)[0]).item()
