"""The checker's own test: mistakes put into the kernels, each caught by the check that is there to catch it."""

from __future__ import annotations

import mlx.core as mx
import pytest
import simulator
from simulator import CompileError, LaunchReport, Simulator

from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

HELPER = "HELPER float half_bits"
ADDED = "total = multiply_add(scaled, sums"
STORED = "out[row * 256u + threadgroup_position_in_grid.x * 128u + index] = T(column_sum / all);"
WRITTEN = "if (lane == 0u) shared_weight[simdgroup] = total;"
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FIRST_MEET = f"if (lane == 0u) shared_largest[simdgroup] = largest;\n{MEET}"

# name: the kernel's text, what it is replaced by, and what clang says
COMPILE = {
    "threadgroup array for device pointer": (
        "load_word(partial + (row * parts + p) * 256u + column, word);",
        "load_word(shared_out, word);",
        "no matching function",
    ),
    "small constant input for device pointer": (
        ADDED,
        "float near[8]; load_word(tiny, near); " + ADDED,
        "no matching function",
    ),
    "store to an input": (STORED, STORED + " sums[0] = 0.0f;", "read-only|const-qualified"),
    "double": ("float all = 0.0f;", "double all = 0.0;", "double"),
    "implicit conversion to bfloat": ("T(column_sum / all)", "column_sum / all", "implicit conversion"),
    "literal that Metal does not have": ("float all = 0.0f;", "float all = 0.0f16;", "no literal of Metal"),
    "max of int and uint": ("float all = 0.0f;", "float all = float(metal::max(0, index));", "no matching function"),
    "variable read before it is set": ("float total = 0.0f;", "float total;", "uninitialized"),
    "misspelt position": ("= simdgroup_index_in_threadgroup", "= simdgroup_index_in_thread_group", "undeclared"),
    "index past a thread's array": ("sum[i] = multiply_add", "sum[4] = multiply_add", "past the end"),
    "vector from a vector of another length": (
        "float all = 0.0f;",
        "float all = 0.0f; const float4 four = float2{0.0f, 0.0f};",
        "cannot|initializing",
    ),
}

# name: the kernel's text, what it is replaced by, the kind of report
RUN = {
    "load past a buffer": ("uint p = simdgroup; p < parts;", "uint p = simdgroup; p <= parts;", "bounds"),
    "store past a buffer": (STORED, STORED.replace("+ index]", "+ index + 128u]"), "bounds"),
    "store past a threadgroup array": (WRITTEN, WRITTEN.replace("[simdgroup]", "[simdgroup + 1u]"), "bounds"),
    "store to an input by a cast": (STORED, STORED + " ((device float*)sums)[0] = 0.0f;", "const"),
    "no barrier": (FIRST_MEET, FIRST_MEET.replace(MEET, ""), "race"),
    "barrier for the wrong memory": (FIRST_MEET, FIRST_MEET.replace("mem_threadgroup", "mem_device"), "race"),
    "barrier of the simdgroup only": (FIRST_MEET, FIRST_MEET.replace("threadgroup_b", "simdgroup_b"), "race"),
    "two threadgroups store one element": (STORED, STORED.replace("row * 256u + ", ""), "race"),
    "sum in place without atomics": (STORED, STORED + " out[0] = T(float(out[0]) + 1.0f);", "race"),
    "threadgroup array read before it is written": (
        WRITTEN,
        WRITTEN.replace("lane == 0u", "lane == 0u && simdgroup < 3u"),
        "uninitialised",
    ),
    "barrier that some threads skip": (
        "if (index < 128u) {",
        f"if (index < 96u) {MEET}\nif (index < 128u) {{",
        "divergence",
    ),
    "barrier after an early return": (FIRST_MEET, "if (simdgroup == 2u) return;\n" + FIRST_MEET, "divergence"),
    "simdgroup operation that some lanes skip": (
        "largest = simd_max(largest);",
        "if (lane < 16u) largest = simd_max(largest);",
        "divergence",
    ),
    "simdgroup operation in a loop as long as the lane": (
        "largest = simd_max(largest);",
        "for (uint i = 0u; i <= lane; ++i) largest = simd_max(largest);",
        "divergence",
    ),
    "output element that nothing writes": ("if (index < 128u) {", "if (index < 127u) {", "unwritten"),
    "16-byte load off its boundary": ("* 256u + column, word", "* 256u + column - lane, word", "alignment"),
    "integer division by zero": (
        "uint parts = uint(partial_shape[2])",
        "uint parts = 7u / (uint(partial_shape[2]) - 3u)",
        "arithmetic",
    ),
}

# A race may also be seen as the load of what the other thread has yet to store.
ALSO = {"race": ("uninitialised",)}


def call() -> Launch:
    """A merge of three parts of two rows, in bfloat16."""
    kernel = loader.load("attention_decode")["merge"]
    partial = mx.random.normal((2, 1, 3, 256), key=mx.random.key(0))
    sums = mx.random.uniform(1, 2, (2, 1, 3, 2), key=mx.random.key(1))
    arguments = kernel.arguments(T=mx.bfloat16, SIMDGROUPS=4)
    return Launch(kernel, (partial, sums), arguments, (256, 2, 1), (128, 1, 1), [(2, 1, 256)], [mx.bfloat16])


def spoilt(old: str, new: str, launch: Launch | None = None) -> str:
    """The generated text of `call` with a mistake."""
    text = simulator.source(launch or call())
    assert old in text
    return text.replace(old, new)


def test_without_a_mistake_nothing_is_reported():
    text = simulator.source(call())
    simulator.check([text])
    simulator.check_pointers([text])
    simulator.check_calls([text])
    simulated = Simulator(checked=True)
    (got,) = simulated.launch(call())
    partial, sums = call().inputs
    scaled = mx.power(2.0, sums[..., 0] - sums[..., 0].max(axis=-1, keepdims=True))
    want = (scaled[..., None] * partial).sum(axis=2) / (scaled * sums[..., 1]).sum(axis=2)[..., None]
    assert relative_rms(got, want) < 4e-3


@pytest.mark.parametrize("name", COMPILE)
def test_the_compiler_stops(name):
    old, new, message = COMPILE[name]
    if "tiny" in new:
        # Under 8 elements MLX gives an input as `constant`, so the very same body may compile for larger ones only.
        new = new.replace("tiny", "sums")
        kernel, small = call().kernel, call()
        one = (small.inputs[0][:1, :, :1], small.inputs[1][:1, :, :1])
        small = Launch(kernel, one, small.template, (256, 1, 1), (128, 1, 1), [(1, 1, 256)], [mx.bfloat16])
        simulator.check([spoilt(old, new)])
        text = spoilt(old, new, small)
    else:
        text = spoilt(old, new)
    with pytest.raises(CompileError) as caught:
        simulator.check([text])
    caught.match(message)


def test_a_pointer_without_an_address_space_is_named():
    text = spoilt(HELPER, "HELPER float first_of(const float* from) { return from[0]; }\n" + HELPER)
    simulator.check([text])
    with pytest.raises(CompileError, match="no address space: from"):
        simulator.check_pointers([text])


def test_recursion_is_named():
    text = spoilt(HELPER, "HELPER uint steps(uint n) { return n == 0u ? 0u : 1u + steps(n / 2u); }\n" + HELPER)
    text = text.replace("float all = 0.0f;", "float all = 0.0f * float(steps(index));")
    simulator.check([text])
    with pytest.raises(CompileError, match="recursion: .*steps"):
        simulator.check_calls([text])


def test_too_much_threadgroup_memory_is_refused():
    with pytest.raises(CompileError, match="threadgroup arrays take"):
        simulator.build([spoilt("shared_out, SIMDGROUPS * 128)", "shared_out, SIMDGROUPS * 2048)")], checked=False)


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_reports(name):
    old, new, kind = RUN[name]
    assert old in simulator.source(call())
    with pytest.raises(LaunchReport) as caught:
        Simulator(checked=True, replace={old: new}).launch(call())
    kinds = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    assert kind in kinds and kinds <= {kind, *ALSO.get(kind, ())}, caught.value


def test_a_report_names_the_line_of_the_text():
    old, new, _ = RUN["no barrier"]
    with pytest.raises(LaunchReport, match=r"race at attention_decode\.metal:\d+: "):
        Simulator(checked=True, replace={old: new}).launch(call())


def test_the_fast_run_stops_at_the_page_after_a_buffer():
    past = STORED.replace("out[row", "out[1024u + row")
    with pytest.raises(LaunchReport, match="bounds"):
        Simulator(replace={STORED: past}).launch(call())


def test_lanes_that_read_apart_are_counted_by_the_lines_they_touch():
    together, apart = Simulator(checked=True), Simulator(checked=True)
    apart.replace["(row * parts + p) * 256u + column, word"] = "(lane % 6u) * 256u + column, word"
    for simulated in (together, apart):
        simulated.launch(call())
    near, far = (simulated.traffic[-1][1]["partial"] for simulated in (together, apart))
    assert near.loaded == far.loaded and near.lines == near.ideal and far.lines == 6 * far.ideal
