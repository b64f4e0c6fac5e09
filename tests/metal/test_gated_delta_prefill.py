"""The kernels of `gated_delta` over many rows on the simulator, against the op's float32 reference."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest
import simulator
from gated_delta_cases import OP, TYPES, arguments, error
from gated_delta_prefill_cases import CHOICES, EXTREMES, FORMS, SIZES, extreme, worst
from simulator import LaunchReport, Simulator

from engine.config import EngineConfig
from engine.kernels import gated_delta_prefill as prefill
from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import bind, gated_delta, relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


def use(simulated: Simulator, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Send launches to a simulator; what was launched."""
    seen: list[Launch] = []

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call)
        return simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    return seen


def test_every_instance_compiles_under_metals_rules(monkeypatch):
    texts: dict[str, None] = {}

    def note(call: Launch) -> list[mx.array]:
        texts[simulator.source(call)] = None
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    monkeypatch.setattr(loader, "launch", note)
    for form, tile in CHOICES:
        run, _, types = FORMS[form]
        # Of few heads the gates are `constant`, of many `device`.
        for dtype, size in product(types, ((1, 1, 2, 4), (9, 1, 8, 4))):
            run(*arguments(size, TYPES[dtype]), tile=tile)
    # prepare of three types, with few or many gates and heads; scan, solve, carry, norm.
    assert len(texts) == 3 * 2 + 3 * 7 + 2 * 3 + 2 * 6 + 3
    simulator.check(list(texts))
    one = [text for text in texts if "using T = bfloat16_t" in simulator.parse(text).template][:1]
    simulator.check_pointers(one)
    simulator.check_calls(one)


@pytest.mark.parametrize("turn", range(len(CHOICES)))
def test_tile_agrees_with_the_reference(turn, monkeypatch):
    form, tile = CHOICES[turn]
    # Simdgroups in ascending, descending and shuffled order.
    use(Simulator(order=turn % 3), monkeypatch)
    dtype = FORMS[form][2][turn % 2]
    assert worst(form, arguments(SIZES[turn], TYPES[dtype], apart=turn % 3 > 0), tile) <= 1


@pytest.mark.full
@pytest.mark.parametrize(("form", "tile"), CHOICES)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(form, tile, monkeypatch):
    for dtype, size, checked in product(FORMS[form][2], SIZES, (False, True)):
        use(Simulator(checked=checked), monkeypatch)
        for apart in (True, False):
            assert worst(form, arguments(size, TYPES[dtype], apart=apart), tile) <= 1


@pytest.mark.parametrize("rows", [15, 16, 17, 31, 32, 33])
def test_chunk_edges_agree_with_the_reference(rows, monkeypatch):
    use(Simulator(), monkeypatch)
    given = arguments((rows, 1, 2, 8), mx.bfloat16)
    for form, tile in (("scan", prefill.SCAN_TILES[0]), ("chunked", "16x1x4"), ("chunked", "32x1x4")):
        assert worst(form, given, tile) <= 1


@pytest.mark.parametrize("name", EXTREMES)
def test_gates_at_their_ends_agree_with_the_reference(name, monkeypatch):
    use(Simulator(), monkeypatch)
    size = (70, 1, 2, 4)
    assert worst("scan", extreme(name, size, mx.float32), prefill.SCAN_TILES[0]) <= 1
    assert worst("chunked", extreme(name, size, mx.bfloat16), prefill.CHUNK_TILES[0]) <= 1


@pytest.mark.parametrize(("form", "tile"), [("scan", "8x2x4"), ("chunked", "16x1x4")])
def test_rows_in_two_calls_are_the_rows_in_one(form, tile, monkeypatch):
    """The state and the kept rows carry over, wherever a run of rows is cut."""
    use(Simulator(), monkeypatch)
    run, _, types = FORMS[form]
    given = arguments((43, 1, 2, 8), TYPES["float32" if "float32" in types else "bfloat16"])
    allowed = 1e-6 if form == "scan" else OP.tolerance["bfloat16"]
    together = run(*given, tile=tile)
    for cut in (1, 2, 26):
        first = run(*(part[:, :cut] for part in given[:4]), *given[4:], tile=tile)
        second = run(*(part[:, cut:] for part in given[:4]), *first[1:], *given[6:], tile=tile)
        assert relative_rms(mx.concatenate([first[0], second[0]], axis=1), together[0]) < allowed
        assert relative_rms(second[2], together[2]) < allowed
        for got, want in zip(second[1], together[1], strict=True):
            assert got.shape == want.shape and mx.array_equal(got, want).item()


def test_the_scan_is_clean_and_counted(monkeypatch):
    """Bounds, races and unwritten memory by the checked build; rows and state are moved no oftener than said."""
    simulated = Simulator(checked=True)
    use(simulated, monkeypatch)
    given = arguments((20, 1, 2, 4), mx.bfloat16, apart=False)
    assert worst("scan", given, "8x2x4") <= 1
    prepare, scan, norm = (moved for _, moved in simulated.traffic)
    channels = given[0].shape[2]
    # Three blocks of eight rows read 8, 11 and 7 rows of their own and of the block before, the last keeps three.
    assert prepare["qkv"].loaded == (8 + 11 + 7 + 3) * channels * 2
    assert prepare["kept0"].loaded == channels * 2
    assert prepare["queries"].stored == prepare["keys"].stored == 24 * 128 * 2
    assert prepare["values"].stored == 2 * 24 * 128 * 2
    assert scan["state"].loaded == scan["new_state"].stored == 2 * 128 * 128 * 4
    # Four slices of a head and two value heads share the queries; a value and a result move once.
    assert scan["queries"].loaded == scan["keys"].loaded == 8 * 24 * 128 * 2
    assert scan["values"].loaded == 2 * 24 * 128 * 2
    assert scan["out"].stored == 2 * 24 * 128 * 4
    assert norm["z"].loaded == norm["out"].stored == 20 * 256 * 2
    for moved, names in (
        (prepare, ("qkv", "queries", "keys", "values", "row0", "row1", "row2")),
        (scan, ("queries", "keys", "state", "new_state", "out")),
        (norm, ("z", "out")),
    ):
        for name in names:
            assert moved[name].lines <= 1.1 * moved[name].ideal, name


def test_the_chunked_form_is_clean_and_counted(monkeypatch):
    simulated = Simulator(checked=True)
    use(simulated, monkeypatch)
    assert worst("chunked", arguments((65, 1, 2, 4), mx.bfloat16), "32x1x4") <= 1
    _, solve, carry, _ = (moved for _, moved in simulated.traffic)
    matrix = 3 * 32 * 128 * 2  # of three chunks
    assert solve["carried"].stored == 2 * matrix and solve["own"].stored == 4 * matrix
    assert solve["tiled_queries"].stored == solve["tiled_keys"].stored == matrix
    # Sixteen simdgroups of a head each read all but their own columns of `own`.
    assert carry["carried"].loaded == 16 * 2 * matrix and carry["own"].loaded == 4 * matrix
    assert carry["tiled_queries"].loaded == carry["tiled_keys"].loaded == 16 * 2 * matrix
    assert carry["state"].loaded == carry["new_state"].stored == 2 * 128 * 128 * 4
    for moved, names in (
        (solve, ("carried", "own", "inner", "tiled_queries", "tiled_keys", "values")),
        (carry, ("carried", "own", "inner", "tiled_queries", "tiled_keys")),
    ):
        for name in names:
            assert moved[name].lines <= 1.1 * moved[name].ideal, name


# name: form, the kernel's text, what it is replaced by, whether the checked run reports it (else the result is off)
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MISTAKES = {
    "scan without its barrier": ("scan", f"  {MEET}\n\n  if (block > 0u) {{", "  if (block > 0u) {", True),
    "scan that decays twice": ("scan", "multiply_add(-faded, seen", "multiply_add(-faded * gate.x, seen", False),
    "gates of rows that are not there": ("scan", "if (t < rows) {", "if (t <= rows) {", True),
    "substitution without a barrier": ("chunked", f"x[t]);\n    }}\n  }}\n  {MEET}", "x[t]);\n    }\n  }", True),
    "rows that see later ones": ("chunked", "past <= t ? exp_of", "past <= t + 1u ? exp_of", False),
    "state that forgets to decay": ("chunked", "sum_get(held[n][m], i) * last", "sum_get(held[n][m], i)", False),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name, monkeypatch):
    form, old, new, reported = MISTAKES[name]
    simulated = Simulator(checked=reported, replace={old: new})
    seen = use(simulated, monkeypatch)
    given = arguments((35, 1, 1, 2), mx.bfloat16)
    tile = "8x2x4" if form == "scan" else "32x1x4"
    if reported:
        with pytest.raises(LaunchReport):
            worst(form, given, tile)
    else:
        assert worst(form, given, tile) > 1
    assert any(simulator.source(call).count(old) == 1 for call in seen)


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
    use(Simulator(), monkeypatch)
    given = list(arguments((9, 1, 2, 4), mx.float32))
    given[which] = spoil(given[which])
    assert mx.isnan(prefill.scan(*given)[0].reshape(-1)[0]).item()


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_the_config_reaches_the_kernels_and_few_rows_the_step(device, monkeypatch):
    seen = use(Simulator(), monkeypatch)
    monkeypatch.setattr(gated_delta, "device_kind", lambda: device)
    few, many = (arguments((rows, 1, 2, 4), mx.bfloat16) for rows in (8, 9))

    def ran(name: str, given: tuple) -> list[str]:
        seen.clear()
        bound = bind(EngineConfig(gated_delta=name), device)
        assert error(given, bound.gated_delta(*given, rows=given[0].shape[1])) <= OP.tolerance["bfloat16"]
        assert bound.recorder.executed()[0]["variant"] == name
        return [call.kernel.name.removeprefix("gated_delta_") for call in seen]

    assert ran("registers", few) == ["decode_step"]
    assert ran("registers", many) == ["prefill_prepare", "prefill_scan", "prefill_norm"]
    assert ran("chunked", many) == ["prefill_prepare", "prefill_solve", "prefill_carry", "prefill_norm"]
    assert ran("chunked", few) == ran("products", many) == []


def test_a_tile_or_type_that_does_not_exist_is_refused():
    given = arguments((9, 1, 2, 4), mx.float32)
    with pytest.raises(loader.KernelError, match="no tile 8x3x4; there are 8x2x8, 8x2x4"):
        prefill.scan(*given, tile="8x3x4")
    with pytest.raises(loader.KernelError, match="bfloat16 or float16"):
        prefill.chunked(*given)
    with pytest.raises(loader.KernelError, match="float32 state"):
        prefill.scan(*given[:5], given[5].astype(mx.bfloat16), *given[6:])


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "tile"), CHOICES)
def test_tile_agrees_with_the_reference_on_a_gpu(form, tile):
    for dtype, size in product(FORMS[form][2], SIZES):
        for apart in (True, False):
            assert worst(form, arguments(size, TYPES[dtype], apart=apart), tile) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXTREMES)
def test_gates_at_their_ends_agree_with_the_reference_on_a_gpu(name):
    given = extreme(name, (300, 2, 4, 4), mx.bfloat16)
    for form, tile in CHOICES:
        assert worst(form, given, tile) <= 1
