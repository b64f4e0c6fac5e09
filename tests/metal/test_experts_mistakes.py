"""Mistakes put into the kernels of `experts`, each caught by the check that is there to catch it."""

from __future__ import annotations

import mlx.core as mx
import pytest
import simulator
from experts_cases import OP, Size, call_for
from simulator import CompileError, LaunchReport, Simulator

from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

# Six words of inputs on eight lanes, half a tile of columns to spare, ties at the last place.
SIZE = Size(2, 192, 192, 40, 3, "ties")
TILES = {"up_tile": (4, 8), "down_tile": (4, 3)}
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
ORDER = "const bool first_of_row"

# name: the kernel, its text, what it is replaced by, and what clang says
COMPILE = {
    "inputs of threadgroup memory for device ones": (
        0,
        "load_eight(gain + unit * 8u, factor[pass]);",
        "load_eight(block_sums, factor[pass]);",
        "no matching function",
    ),
    "small constant input for device pointer": (
        1,
        "float sum[ROWS];",
        "float near[8]; load_eight(shared_logit, near); float sum[ROWS];",
        "no matching function",
    ),
    "output that takes a float32 as it is": (1, "= T(total);", "= total;", "implicit conversion"),
    "signed with unsigned": (0, "round <= slot", "int(round) <= slot", "different signs"),
}

# name: the text, what it is replaced by, the kind of report
RUN = {
    "row past the stack": ("n = n < wide ? n : wide - 1u;", "n = n < wide ? n : uint(EXPERTS) * wide;", "bounds"),
    "row of the output past the end": ("part == 0u && n < wide", "part == 0u", "bounds"),
    "word past the inputs": ("unit = unit < last_unit ? unit : last_unit;", "", "bounds"),
    "part of a block past the staged": ("sums, unit, unit < UNITS", "sums, unit, true", "bounds"),
    "no barrier between routing and product": (f"{MEET}\nconst uint expert", "const uint expert", "race"),
    "no barrier between simdgroups' sums": (f"{MEET}\nfor (uint c = index", "for (uint c = index", "race"),
    "simdgroup barrier for the wrong memory": (
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n\nfloat sum",
        "simdgroup_barrier(mem_flags::mem_device);\n\nfloat sum",
        "race",
    ),
    "rounds as many as the lane": ("round <= slot", "round <= slot + lane / 16u", "divergence"),
    "routing that some lanes skip": ("top = simd_max(top);", "if (lane < 20u) top = simd_max(top);", "divergence"),
    "routing that no one writes": ("if (lane < k) {", "if (lane + 1u < k) {", "unwritten"),
    "routing that every tile writes": (ORDER, "const bool first_of_row = slot == k - 1u; //", "race"),
    "columns that no one writes": ("c < COLUMNS; c +=", "c + 1u < COLUMNS; c +=", "unwritten"),
    "words off their boundary": ("((const device uint4*)up)[at]", "((const device uint4*)(up + 1))[at]", "alignment"),
}
# A race may also be seen as the load of what the other thread has yet to store, a store past the columns lands in
# another's first, and the CPU itself stops at a word off its boundary.
ALSO = {"race": ("uninitialised",), "bounds": ("race",), "alignment": ("bounds",)}

# name: what is replaced; the result is wrong and nothing else shows it
WRONG = {
    "lowest of equal logits": {
        "(keys[i] & ~INDEX) | e": "(keys[i] & ~INDEX) | (uint(EXPERTS) - 1u - e)",
        "expert = top & INDEX;": "expert = uint(EXPERTS) - 1u - (top & INDEX);",
    },
    "an expert chosen twice": {"i * 32u + lane == expert ? 0u": "i * 32u + lane == expert + 1u ? 0u"},
    "biases left out": {"const float all = block_sums[2u * block];": "const float all = 0.0f;"},
    "scale of another group": {"(inputs / 64u) + block / 2u": "(inputs / 64u) + block / 4u"},
    "codes taken in another order": {"word >> (4 * i)": "word >> (4 * (i ^ 1))"},
    "constants of the codes left in": {" - constants;": ";"},
    "norm of another length": {"total / float(inputs)": "total / float(inputs + 16u)"},
    "weights left out": {"multiply_add(factor[i], product": "multiply_add(1.0f, product"},
    "shared expert without its gate": {"sigmoid_of(float(shared_logit": "(float(shared_logit"},
    "residual left out": {"if constexpr (RESIDUAL)": "if constexpr (false)"},
}


def call(kernel: int) -> Launch:
    """A launch of `up` (0) or `down` (1) with everything folded in, in bfloat16."""
    seen: list[Launch] = []

    def note(one: Launch) -> list[mx.array]:
        seen.append(one)
        return [mx.ones(shape, kind) for shape, kind in zip(one.shapes, one.dtypes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "launch", note)
        call_for("step", SIZE, mx.bfloat16).run("step", **TILES)
    return seen[kernel]


def error(simulated: Simulator, monkeypatch: pytest.MonkeyPatch) -> float:
    made = call_for("step", SIZE, mx.bfloat16)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    return relative_rms(made.run("step", **TILES), made.want("step").astype(mx.bfloat16))


def in_either(text: str) -> bool:
    return any(text in simulator.source(call(kernel)) for kernel in (0, 1))


def test_without_a_mistake_nothing_is_reported(monkeypatch):
    assert error(Simulator(checked=True), monkeypatch) <= OP.tolerance["bfloat16"]


@pytest.mark.parametrize("name", COMPILE)
def test_the_compiler_stops(name):
    kernel, old, new, message = COMPILE[name]
    text = simulator.source(call(kernel))
    assert old in text
    with pytest.raises(CompileError) as caught:
        simulator.check([text.replace(old, new)])
    caught.match(message)


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_reports(name, monkeypatch):
    old, new, kind = RUN[name]
    assert in_either(old)
    with pytest.raises(LaunchReport) as caught:
        error(Simulator(checked=True, replace={old: new}), monkeypatch)
    kinds = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    assert kind in kinds and kinds <= {kind, *ALSO.get(kind, ())}, caught.value


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_result(name, monkeypatch):
    """Each a slip that runs cleanly: the sizes and inputs must be such that it shows."""
    assert all(in_either(old) for old in WRONG[name])
    assert error(Simulator(replace=WRONG[name]), monkeypatch) > 2 * OP.tolerance["bfloat16"]
