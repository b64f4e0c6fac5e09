"""Mistakes put into the kernels of a decode step, each caught by the check that is there to catch it."""

from __future__ import annotations

import gated_delta_cases
import mlx.core as mx
import pytest
import rotary_cases
import simulator
from attention_cases import FRESH_SIZES, OP, fresh_arguments, settings
from simulator import CompileError, LaunchReport, Simulator

from engine.kernels import attention, gated_delta, loader, rotary
from engine.kernels.loader import Launch
from engine.ops import relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
STAGED = f"  }}\n  {MEET}\n\n  for (uint t = 0u; t < count; ++t) {{"
USED = f"  {MEET}\n\n  if constexpr (NORMED) {{"


def step(simulated: Simulator, monkeypatch: pytest.MonkeyPatch, rows: int = 11, normed: bool = True) -> float:
    """Error of a Gated DeltaNet step of two blocks of rows, or one."""
    given = gated_delta_cases.arguments((rows, 1, 2, 4), mx.float32)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return gated_delta_cases.error(given, gated_delta.gated_delta_metal(*given, normed=normed), normed=normed)


def turn(simulated: Simulator, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether norm and rotary embedding agree with MLX's at a long context."""
    size = rotary_cases.SIZES[1]
    given = rotary_cases.arguments(size, mx.float32)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return rotary_cases.agrees(size, given, rotary.rotate_metal(*given, simdgroups=4), "float32")


def attend(simulated: Simulator, monkeypatch: pytest.MonkeyPatch) -> float:
    """Error of attention with new rows beside the cache."""
    given, fresh, whole = fresh_arguments(FRESH_SIZES[1], mx.float32)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    got = attention.attention_metal(*given, **settings(("8", "blocks", "coalesced")), fresh=fresh)
    return relative_rms(got, OP.reference.run(*whole))


# name: the kernel's text, what it is replaced by, the kind of report
RUN = {
    "no barrier after staging": (STAGED, STAGED.replace(MEET, ""), "race"),
    "no barrier before the norm": (USED, USED.replace(MEET, ""), "race"),
    "barrier of the simdgroup only": (STAGED, STAGED.replace("threadgroup_b", "simdgroup_b"), "uninitialised"),
    "barrier once a row, by how many the simdgroup has": (
        "    const uint t = unit / uint(UNITS);\n",
        f"    const uint t = unit / uint(UNITS);\n    {MEET}\n",
        "divergence",
    ),
    "sum over half of the lanes": (
        "    UNROLL for (int mask = 1; mask < HEAD_LANES",
        "    if (lane < 16u) UNROLL for (int mask = 1; mask < HEAD_LANES",
        "divergence",
    ),
    "values past the last": ("2u * width + head", "3u * width + head", "bounds"),
    "kept row by the wrong width": ("from == 2u ? kept2", "from == 9u ? kept2", "bounds"),
    "gate of a row that nothing made": ("if (from_end < count) {", "if (from_end + 1u < count) {", "uninitialised"),
    "state column stored by two": ("own = simdgroup * uint(COLUMNS) + lane / 8u", "own = lane / 8u", "race"),
    "read-out of one column only": ("if (part < uint(HELD)) {", "if (part == 0u) {", "uninitialised"),
}

# name: the kernel's text and what it is replaced by; only the numbers can show it
WRONG = {
    "value heads tiled over key heads": (
        "key_head = head * (width / 128u) / heads",
        "key_head = head % (width / 128u)",
    ),
    "taps in reverse": ("taps[i * 4 + tap]", "taps[i * 4 + 3 - tap]"),
    "epsilon on the mean": ("square + 1.0e-6f) * (key", "square + 1.28e-4f) * (key"),
    "query not scaled": ("0.08838834764831845f", "1.0f"),
    "decay after the update": (
        "multiply_add(delta, key[i], decay * held[c][i])",
        "decay * (held[c][i] + delta * key[i])",
    ),
    "read before the write": ("multiply_add(decay, sum[HELD + c], delta * sum[2 * HELD])", "decay * sum[HELD + c]"),
    "gate of the first row for all": ("const float decay = shared_decay[t]", "const float decay = shared_decay[0]"),
    "sum of a quarter of the keys": ("mask < 8; mask *= 2", "mask < 4; mask *= 2"),
}


def test_without_a_mistake_nothing_is_reported(monkeypatch):
    simulated = Simulator(checked=True)
    tolerance = gated_delta_cases.OP.tolerance["float32"]
    assert step(simulated, monkeypatch) <= tolerance and step(simulated, monkeypatch, 1, False) <= tolerance
    assert turn(simulated, monkeypatch)
    assert attend(simulated, monkeypatch) <= OP.tolerance["float32"]


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_of_the_gated_delta_step_reports(name, monkeypatch):
    old, new, kind = RUN[name]
    assert loader.load(gated_delta.TOPIC)["step"].body.count(old) == 1
    with pytest.raises(LaunchReport) as caught:
        step(Simulator(checked=True, replace={old: new}), monkeypatch)
    kinds = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    # A race may also be seen as the load of what the other thread has yet to store.
    assert kind in kinds and kinds <= {kind, *(("uninitialised",) if kind == "race" else ())}, caught.value


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_tells_wrong_arithmetic_of_the_gated_delta_step(name, monkeypatch):
    old, new = WRONG[name]
    assert loader.load(gated_delta.TOPIC)["step"].body.count(old) == 1
    given = gated_delta_cases.arguments((3, 2, 4, 4), mx.float32, faint=True)
    monkeypatch.setattr(loader, "launch", Simulator(replace={old: new}).launch)
    error = gated_delta_cases.error(given, gated_delta.gated_delta_metal(*given))
    assert error > gated_delta_cases.OP.tolerance["float32"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("own * 512u + column", "own * 256u + column"),
        ("+ row) * exp2_of", ") * exp2_of"),
        ("x[0] * cosine - x[1] * sine", "x[0] * cosine + x[1] * sine"),
        ("exp2_of(float(lane) * (-1.0f / 32.0f)", "exp2_of(float(lane) * (-1.0f / 128.0f)"),
        ("* (1.0f / 256.0f) + as_type<float>(EPS_BITS)", "+ as_type<float>(EPS_BITS)"),
        ("+ as_type<float>(EPS_BITS))", "+ 1.0e-5f)"),
        ("const float angle = ", "const float angle = 0.9999999f * "),
        ("query ? float(q_gain[column])", "query ? float(k_gain[column])"),
    ],
    ids=[
        "gate for query",
        "row",
        "turned back",
        "all 256 dims",
        "sum for mean",
        "epsilon",
        "angle in fewer bits",
        "gain",
    ],
)
def test_the_comparison_tells_wrong_arithmetic_of_the_rotary_embedding(old, new, monkeypatch):
    assert loader.load(rotary.TOPIC)["rotate"].body.count(old) == 1
    assert not turn(Simulator(replace={old: new}), monkeypatch)


def test_a_head_past_the_last_is_reported(monkeypatch):
    with pytest.raises(LaunchReport, match="bounds"):
        turn(Simulator(checked=True, replace={"if (head < q_heads + kv_heads) {": "if (head < 99u) {"}), monkeypatch)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const uint visible = FRESH ? cached + row + 1u", "const uint visible = FRESH ? cached + row"),
        ("if (FRESH && at >= cached) {", "if (FRESH && at > cached) {"),
        ("value_row = fresh_value_rows + (at - cached)", "value_row = fresh_value_rows + (at - cached + 1u)"),
    ],
    ids=["own row unseen", "stale row for the first new one", "value of the next row"],
)
def test_the_comparison_tells_new_rows_in_the_wrong_place(old, new, monkeypatch):
    assert loader.load(attention.TOPIC)["split"].body.count(old) == 1
    try:
        error = attend(Simulator(replace={old: new}), monkeypatch)
    except LaunchReport:
        # The row after the last one, too, may lie past a buffer.
        return
    assert error > OP.tolerance["float32"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("load_word(row + channel, word)", "load_word(shared_heads, word)", "no matching function"),
        ("float query[KEYS];", "double query[KEYS];", "double|matching"),
        ("= O(read);", "= read;", "implicit conversion"),
        ("float mixed[PER_WORD];\n    UNROLL for (int i = 0; i < PER_WORD; ++i) mixed[i] = 0.0f;", "", "undeclared"),
        ("store_word(held[c] + w * 4, new_state", "store_word(held[c] + w * 4, state", "no matching function"),
    ],
    ids=["threadgroup array for device pointer", "double", "bfloat", "undeclared", "store to an input"],
)
def test_the_compiler_stops(old, new, message, monkeypatch):
    texts: list[str] = []

    def note(call: Launch) -> list[mx.array]:
        texts.append(simulator.source(call))
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    monkeypatch.setattr(loader, "launch", note)
    gated_delta.gated_delta_metal(*gated_delta_cases.arguments((1, 1, 2, 4), mx.bfloat16), normed=False)
    assert old in texts[0]
    with pytest.raises(CompileError) as caught:
        simulator.check([texts[0].replace(old, new)])
    caught.match(message)
