"""The packed products of decoding on the simulator: every template instance, against references in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
import simulator
from linear_cases import CASES, OP, TILES, TYPES, Products, arguments, exact, run, wanted
from simulator import CompileError, LaunchReport, Simulator

from engine.config import EngineConfig
from engine.kernels import linear, loader
from engine.kernels.loader import Launch
from engine.ops import OPS, bind, relative_rms
from engine.ops.linear import linear_reference, norm_reference, packed
from engine.weights import Matrix

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))


def launches(monkeypatch: pytest.MonkeyPatch, function: Callable, *given: object, **settings: object) -> list[Launch]:
    """What a call of `function` would launch."""
    seen: list[Launch] = []

    def note(launch: Launch) -> list[mx.array]:
        seen.append(launch)
        return [mx.zeros(shape, kind) for shape, kind in zip(launch.shapes, launch.dtypes)]

    with monkeypatch.context() as patch:
        patch.setattr(loader, "launch", note)
        function(*given, **settings)
    return seen


def case_launches(case: Products, dtype: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    x, matrices, folded = arguments(case, TYPES[dtype])
    return launches(monkeypatch, linear.products_metal, x, matrices, tile=tile, **folded)


def error(case: Products, dtype: str, tile: str) -> float:
    """Worst relative RMS error of a case's results; `loader.launch` is to be a simulator's."""
    results = run(case, TYPES[dtype], tile)
    assert all(got.dtype == TYPES[dtype] for got, _ in results)
    return max(relative_rms(got, want) for got, want in results)


def head(rows: int, dtype: mx.Dtype, vocabulary: int = 261, padded: int = 320) -> tuple:
    h = mx.random.normal((1, rows, 256), key=mx.random.key(1)).astype(dtype)
    gain = (1 + 0.1 * mx.random.normal((256,), key=mx.random.key(2))).astype(dtype)
    return h, gain, 1e-6, packed(3, (padded, 256), dtype), vocabulary


def head_logits(h: mx.array, gain: mx.array, eps: float, w: Matrix, vocabulary: int) -> mx.array:
    return linear_reference(norm_reference(h.astype(mx.float32), gain, eps), exact(w))[..., :vocabulary]


@pytest.fixture(scope="module")
def ready() -> dict[str, Simulator]:
    """A simulator an element type with the instances of `test_tile_agrees_with_the_reference` compiled together."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for dtype in ("bfloat16", "float32"):
            made[dtype] = Simulator()
            made[dtype].prepare(
                launch
                for turn, tile in enumerate(TILES)
                for launch in case_launches(CASES[turn % len(CASES)], dtype, tile, patch)
            )
    return made


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    texts: dict[str, list[str]] = {}
    made = [launch for case in CASES for tile in TILES for launch in case_launches(case, dtype, tile, monkeypatch)]
    for tile in TILES:
        for logits in (False, True):
            given = head(1 + len(made) % 8, TYPES[dtype])
            made += launches(monkeypatch, linear.head_metal, *given, logits=logits, tile=tile)
    for launch in made:
        texts.setdefault(launch.kernel.name, []).append(simulator.source(launch))
    assert texts.keys() == {kernel.name for kernel in loader.load(linear.TOPIC).values()}
    for instances in texts.values():
        simulator.check(list(dict.fromkeys(instances)))
        simulator.check_pointers(instances[:1])
        simulator.check_calls(instances[:1])


def test_every_tile_chooses_an_instance_of_its_own(monkeypatch):
    """A tile that led to the same template would measure nothing."""
    made = [case_launches(CASES[0], "bfloat16", tile, monkeypatch)[0] for tile in TILES]
    assert len({(tuple(launch.template), launch.grid) for launch in made}) == len(TILES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("turn", range(len(TILES)))
def test_tile_agrees_with_the_reference(turn, dtype, ready, monkeypatch):
    monkeypatch.setattr(loader, "launch", ready[dtype].launch)
    assert error(CASES[turn % len(CASES)], dtype, TILES[turn]) <= OP.tolerance[dtype]


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_case(tile, dtype, monkeypatch):
    for simulated in (Simulator(), Simulator(checked=True)):
        simulated.prepare(launch for case in CASES for launch in case_launches(case, dtype, tile, monkeypatch))
        monkeypatch.setattr(loader, "launch", simulated.launch)
        for case in CASES:
            assert error(case, dtype, tile) <= OP.tolerance[dtype]
        for rows in (1, 8):
            given = head(rows, TYPES[dtype])
            tokens, best = linear.head_metal(*given, tile=tile)
            same, largest, logits = linear.head_metal(*given, logits=True, tile=tile)
            assert mx.array_equal(tokens, same) and mx.array_equal(best, largest)
            assert mx.array_equal(tokens, mx.argmax(logits, axis=-1))


def test_float16_agrees_with_the_reference(monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    assert error(CASES[1], "float16", "4x4") <= OP.tolerance["float16"]


def test_bfloat16_is_rounded_once(ready, monkeypatch):
    """Norm and product apart round twice more; here only the result is rounded, by 2^-8 at most."""
    monkeypatch.setattr(loader, "launch", ready["bfloat16"].launch)
    x, matrices, folded = arguments(CASES[0], mx.bfloat16)
    (got,) = linear.products_metal(x, matrices, tile=TILES[0], **folded)
    (want,) = wanted(x, matrices, **folded)
    assert (mx.abs(got.astype(mx.float32) - want) <= mx.abs(want) * 2**-8 + 1e-5).all().item()


@pytest.mark.parametrize("order", [1, 2], ids=["reversed", "shuffled"])
def test_the_order_of_simdgroups_changes_nothing(order, ready, monkeypatch):
    simulated = ready["float32"]
    monkeypatch.setattr(loader, "launch", simulated.launch)
    for turn in (5, 6):
        ascending = [got for got, _ in run(CASES[turn], mx.float32, TILES[turn])]
        monkeypatch.setattr(simulated, "order", order)
        turned = [got for got, _ in run(CASES[turn], mx.float32, TILES[turn])]
        monkeypatch.setattr(simulated, "order", 0)
        assert all(mx.array_equal(a, b) for a, b in zip(ascending, turned))


def asked_for(launch: Launch, name: str) -> tuple[int, int]:
    """Rows of a matrix and words of each that a launch loads: a lane past the last of them loads that one again."""
    outputs, codes = launch.inputs[launch.kernel.inputs.index(name)].shape
    shape = dict(launch.template)
    span, each = int(shape["SPAN"]), int(shape["OUTPUTS"])
    block = launch.threadgroup[0] * each // span
    together = span * min(max(1, 4 // each), int(shape["STEPS"]))
    return -(-outputs // block) * block, -(-codes // 4 // together) * together


@pytest.mark.parametrize("turn", [0, 1, 3, 5, 6])
def test_accesses_are_clean_and_each_weight_is_read_once(turn, monkeypatch):
    """Bounds, races and unwritten memory by the checked build; each byte of codes once, whatever the rows."""
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    case = CASES[turn]
    assert error(case, "bfloat16", "4x4") <= OP.tolerance["bfloat16"]
    ((launch, traffic),) = simulated.traffic
    ordered = sorted(case.matrices, key=lambda m: case.rows * m[0] % 8 != 0)
    for number, (outputs, bits) in enumerate(ordered):
        codes = traffic[f"weight{number}"]
        rows, words = asked_for(launch, f"weight{number}")
        assert launch.inputs[launch.kernel.inputs.index(f"weight{number}")].shape == (outputs, case.inputs * bits // 32)
        assert codes.loaded == rows * words * 16
        assert codes.lines <= 1.1 * rows * case.inputs * bits / 8 / 128
        # Lanes on one group of 64 load its scale together: one access of one line, though every lane asks.
        scales = traffic[f"scales{number}"]
        assert scales.loaded == traffic[f"biases{number}"].loaded == codes.loaded // 16 * 2
    # Every threadgroup reads the inputs once.
    groups = launch.grid[0] // launch.threadgroup[0]
    assert traffic["x"].loaded == groups * case.rows * case.inputs * (4 if case.wide else 2)
    assert traffic["out"].stored == case.rows * sum(outputs for outputs, _ in case.matrices) * 2


def test_float32_accesses_are_clean(monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator(checked=True).launch)
    assert error(CASES[4], "float32", "2x8") <= OP.tolerance["float32"]


@pytest.mark.parametrize("turn", [1, 6])
def test_threadgroups_that_work_off_several_blocks(turn, monkeypatch):
    """As for lm_head; with inputs that wait all at once and, for eight rows, in chunks that come anew every turn."""
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    monkeypatch.setattr(linear, "FULL", 2)
    assert error(CASES[turn], "bfloat16", "2x2") <= OP.tolerance["bfloat16"]
    ((launch, traffic),) = simulated.traffic
    assert dict(launch.template)["LOOP"] > 1
    rows, words = asked_for(launch, "weight0")
    assert traffic["weight0"].loaded == rows * words * 16


def test_every_number_of_rows_agrees(monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    for rows in range(1, 9):
        assert error(Products(rows, 192, ((11, 4), (3, 8)), "norm"), "float32", "best") <= OP.tolerance["float32"]


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize(("rows", "tile", "full"), [(1, "4x8", 8192), (8, "1x2", 2), (3, "2x4", 4)])
def test_head_finds_the_best_token_in_two_launches(rows, tile, full, logits, monkeypatch):
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    monkeypatch.setattr(linear, "FULL", full)
    given = head(rows, mx.bfloat16)
    want = head_logits(*given)
    tokens, best, *rest = linear.head_metal(*given, logits=logits, tile=tile)
    assert tokens.shape == best.shape == (1, rows) and tokens.dtype == mx.uint32 and best.dtype == mx.float32
    assert mx.array_equal(tokens, mx.argmax(want, axis=-1))
    assert relative_rms(best, want.max(axis=-1)) <= OP.tolerance["float32"]
    assert len(simulated.traffic) == 2
    first = simulated.traffic[0][1]
    # The padded tail lies behind what is read, and logits are not written unless they are asked for.
    launch = simulated.traffic[0][0]
    assert launch.inputs[launch.kernel.inputs.index("weight0")].shape == (261, 32)
    asked, words = asked_for(launch, "weight0")
    assert first["weight0"].loaded == asked * words * 16
    if logits:
        assert relative_rms(rest[0], want) <= OP.tolerance["float32"]
        assert first["out"].stored == rows * 261 * 4
    else:
        assert not rest and first["out"].stored <= rows * 8 * -(-261 // 2)


def tied(dtype: mx.Dtype, at: dict[int, float]) -> Matrix:
    """A matrix of 261 rows that are zero but for those in `at`, whose scale they give."""
    scales = np.zeros((261, 4), np.float32)
    for row, value in at.items():
        scales[row] = value
    words = mx.full((261, 32), 0x11111111, dtype=mx.uint32)
    return Matrix(words, mx.array(scales).astype(dtype), mx.zeros((261, 4), dtype), 4)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize(
    ("at", "token", "logit"),
    [
        ({7: 1.0, 9: 1.0, 200: 1.0}, 7, 256.0),
        ({260: 2.0, 31: 1.0}, 260, 512.0),
        ({33: -1.0}, 0, 0.0),  # zeros elsewhere
        ({row: -1.0 for row in range(261)} | {64: -0.5}, 64, -128.0),
        ({5: 3.0, 90: math.nan, 100: math.nan}, 90, math.nan),
        ({5: math.inf, 90: math.nan}, 90, math.nan),
        ({5: -math.inf, 90: math.inf, 91: math.inf}, 90, math.inf),
        (dict.fromkeys(range(261), -math.inf), 0, -math.inf),
    ],
)
def test_ties_go_to_the_lowest_token_and_nan_is_not_hidden(at, token, logit, logits, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    monkeypatch.setattr(linear, "FULL", 2)
    h, gain = mx.ones((1, 2, 256)), mx.ones((256,))
    tokens, best, *_ = linear.head_metal(h, gain, 0.0, tied(mx.float32, at), 261, logits=logits, tile="2x2")
    assert tokens.tolist() == [[token, token]]
    assert mx.array_equal(best, mx.full((1, 2), logit), equal_nan=True)


def test_an_input_that_is_not_dense_gives_nan(ready, monkeypatch):
    monkeypatch.setattr(loader, "launch", ready["float32"].launch)
    x, matrices, folded = arguments(CASES[0], mx.float32)
    twice = mx.repeat(x, 2, axis=2)
    mx.eval(twice)
    (out,) = linear.products_metal(twice[..., ::2], matrices, tile=TILES[0], **folded)
    assert mx.isnan(out.reshape(-1)[0]).item()
    gate = CASES[4]
    x, matrices, folded = arguments(gate, mx.float32)
    turned = mx.contiguous(folded["prologue"].gate.swapaxes(2, 3)).swapaxes(2, 3)
    out, *_ = linear.products_metal(
        x, matrices, prologue=linear.Gate(turned), residual=folded["residual"], tile=TILES[4]
    )
    assert mx.isnan(out.reshape(-1)[0]).item()


def test_a_head_whose_input_is_not_dense_gives_nan_and_a_token_there_is(monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    h, *rest = head(2, mx.float32)
    turned = mx.contiguous(h.swapaxes(1, 2)).swapaxes(1, 2)
    tokens, best = linear.head_metal(turned, *rest)
    assert mx.isnan(best).all().item() and tokens.tolist() == [[0, 0]]


def test_matrices_that_would_misalign_others_come_last(monkeypatch):
    """A kernel that reads a result by 16-byte words would otherwise fault after the product of one odd row."""
    x, _, _ = arguments(CASES[0], mx.bfloat16)
    given = [packed(1, (n, 2048), mx.bfloat16) for n in (1, 64, 7, 32)]
    (launch,) = launches(monkeypatch, linear.products_metal, x, given)
    weights = [launch.inputs[launch.kernel.inputs.index(f"weight{i}")] for i in range(4)]
    assert [weight.shape[0] for weight in weights] == [64, 32, 1, 7]


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_the_variants_run_by_name_and_in_no_order(device, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    bound = bind(EngineConfig(linear="metal", head="metal"), device)
    x, w = OP.inputs(OP.cases[2], mx.float32, 0)
    assert relative_rms(bound.linear(x, w, rows=3), OP.reference.run(x, w)) <= OP.tolerance["float32"]
    # More than eight rows, as in a prefill by a config that names the variant.
    many = mx.random.normal((1, 19, 256), key=mx.random.key(4))
    w = packed(5, (33, 256), mx.float32)
    assert relative_rms(bound.linear(many, w, rows=19), OP.reference.run(many, w)) <= OP.tolerance["float32"]
    op = OPS["head"]
    for case in op.cases:
        given = op.inputs(case, mx.float32, 0)
        assert relative_rms(bound.head(*given, rows=case["rows"]), op.reference.run(*given)) <= op.tolerance["float32"]
    assert {e["variant"] for e in bound.recorder.executed()} == {"metal"}
    assert not any("metal" in names for name in ("linear", "head") for names in OPS[name].order.values())


# ---- mistakes put into the text, each caught by the check that is there to catch it ----

STAGED = "if (q > 1u) threadgroup_barrier(mem_flags::mem_threadgroup);"
READY = "      threadgroup_barrier(mem_flags::mem_threadgroup);\n      if constexpr (PROLOGUE == 1) {"
STORED = "out[begin + uint(t) * outputs + output] = O(total);"

COMPILE = {
    "a weight stored to": (STORED, STORED + " weight0[0] = 0u;", "read-only|const-qualified"),
    "inputs read as threadgroup memory": (
        "(const threadgroup float4*)shared_x",
        "(const threadgroup float4*)x",
        "address space",
    ),
    "a result that is not converted": ("= O(total);", "= total;", "implicit conversion"),
    "a double": ("* 0.0078125f + epsilon", "* 0.0078125f + double(epsilon)", "double"),
}

# name: the case, the text, what it is replaced by, the kinds of report
RUN = {
    "inputs used before they are ready": (
        0,
        READY,
        "        if constexpr (PROLOGUE == 1) {",
        {"race", "uninitialised"},
    ),
    "inputs replaced while others use them": (5, STAGED, "", {"race"}),
    "outputs past the last": (0, "sub < uint(OUTPUTS) && output < outputs", "sub < uint(OUTPUTS)", {"bounds"}),
    "weights past the last": (
        0,
        "asked < outputs ? asked : outputs - 1u",
        "asked",
        {"bounds"},
    ),
    "words past the row's end": (2, "wanted < words ? wanted : words - 1u", "wanted", {"bounds"}),
    "padding left unwritten": (2, "if (here < chunk_inputs) {", "if (inside) {", {"uninitialised"}),
    "lanes of a span that write the same": (3, "if (sub < uint(OUTPUTS) && ", "if (", {"race"}),
    "a sum over lanes that some skip": (
        0,
        "squares = simd_sum(squares);",
        "if (inside && lane < 16u) squares = simd_sum(squares);",
        {"divergence"},
    ),
    "rows that start off 16 bytes": (
        0,
        "k / uint(DIM) * uint(x_strides[2]) + k % uint(DIM)",
        "k - k % 2048u + 1u",
        {"alignment"},
    ),
    "the last output forgotten": (
        0,
        "output < outputs) {\n          if",
        "output + 1u < outputs) {\n          if",
        {"unwritten"},
    ),
}


@pytest.mark.parametrize("name", COMPILE)
def test_the_compiler_stops(name, monkeypatch):
    old, new, message = COMPILE[name]
    (launch,) = case_launches(CASES[0], "bfloat16", "4x4", monkeypatch)
    text = simulator.source(launch)
    assert old in text
    with pytest.raises(CompileError) as caught:
        simulator.check([text.replace(old, new)])
    caught.match(message)


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_reports(name, monkeypatch):
    turn, old, new, kinds = RUN[name]
    (launch,) = case_launches(CASES[turn], "bfloat16", "4x4", monkeypatch)
    assert old in simulator.source(launch)
    with pytest.raises(LaunchReport) as caught:
        Simulator(checked=True, replace={old: new}).launch(launch)
    found = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    assert found and found <= kinds, caught.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("biases[output * groups + (at >> group_shift)]", "biases[output * groups]"),
        ("four.w = value[4 * h + 3] * 16.0f;", "four.w = value[4 * h + 3] * 17.0f;"),
        ("if (!wide) {\n          total += other;", "{\n          total += other;"),
        ("i % 2 == 0 ? 256.0f : 16.0f", "256.0f"),
        ("squares * (1.0f / float(INPUTS))", "squares * (1.0f / float(chunk_inputs))"),
        ("multiply_add(float(bias[a][r]), total, sum[r][t])", "multiply_add(float(bias[a][r]), dot[r][t], sum[r][t])"),
    ],
)
def test_wrong_arithmetic_is_seen_by_the_reference(old, new, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator(replace={old: new}).launch)
    case = Products(1, 192, ((9, 4), (9, 8)), "norm")
    assert max(relative_rms(*pair) for pair in run(case, mx.float32, "2x2")) > 100 * OP.tolerance["float32"]
