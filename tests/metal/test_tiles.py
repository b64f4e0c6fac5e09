"""Matrix tiles of portable.h on the simulator, against NumPy, and mistakes in their use."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
import simulator
from simulator import LaunchReport, Simulator
from tile_cases import LD, TYPES, call, expected

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

LAYOUTS = list(product((False, True), (False, True), (False, True)))
MEET = "simdgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize("dtype", TYPES)
def test_every_layout_compiles_under_metals_rules(dtype):
    texts = [simulator.source(call(TYPES[dtype], *layout)) for layout in LAYOUTS]
    simulator.check(texts)
    simulator.check_pointers(texts[:1])
    simulator.check_calls(texts[:1])


@pytest.mark.parametrize("dtype", TYPES)
def test_every_layout_agrees_with_numpy_and_is_clean(dtype):
    calls = [call(TYPES[dtype], *layout) for layout in LAYOUTS]
    simulated = Simulator(checked=True)
    simulated.prepare(calls)
    for made in calls:
        out, chained = (np.array(array) for array in simulated.launch(made))
        want, want_chained = expected(made)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(chained, want_chained, rtol=1e-4, atol=1e-3)


# name: the kernel's text, what it is replaced by, the kind of report
RUN = {
    "leading dimension past the end": (f"(l, left, {LD}u, lane)", f"(l, left, {LD + 8}u, lane)", "bounds"),
    "threadgroup array by too long a leading dimension": (
        f"(r, shared_right, {LD}u, lane)",
        f"(r, shared_right, {LD + 8}u, lane)",
        "bounds",
    ),
    "no barrier between store and load": (f"// staged\n{MEET}", "// staged\n", "race"),
    "no barrier between sums and their reader": (f"// summed\n{MEET}", "// summed\n", "race"),
    "product that some lanes skip": (
        "tile_multiply(sum, l, r);",
        "if (lane < 16u) tile_multiply(sum, l, r);",
        "divergence",
    ),
    "load that some lanes skip": ("left_load<LEFT>", "if (lane != 3u) left_load<LEFT>", "divergence"),
    "store that some lanes skip": ("sum_store_shared(sum", "if (lane != 3u) sum_store_shared(sum", "divergence"),
    "sums of part of the tile": ("shared_sums[e]", "shared_sums[e + 8u]", "bounds"),
}


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_reports(name):
    old, new, kind = RUN[name]
    made = call(mx.bfloat16, False, False, name.startswith(("threadgroup", "no barrier between store")))
    assert simulator.source(made).count(old) == 1
    with pytest.raises(LaunchReport) as caught:
        Simulator(checked=True, replace={old: new}).launch(made)
    kinds = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    assert kind in kinds and kinds <= {kind, *(("uninitialised",) if kind == "race" else ())}, caught.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left_load<LEFT>", "left_load<!LEFT>"),
        ("right_load<RIGHT>", "right_load<!RIGHT>"),
        ("right_from_sums(turned, sum);", "right_from_sums(turned, again);"),
        ("left_set(whole, i, j, ", "left_set(whole, j, i, "),
        ("right_row(lane, n)", "right_column(lane, n)"),
    ],
)
def test_the_comparison_tells_another_layout(old, new):
    made = call(mx.bfloat16, False, False, False)
    assert simulator.source(made).count(old) == 1
    outs = Simulator(replace={old: new}).launch(made)
    pairs = zip(outs, expected(made))
    assert any(not np.allclose(np.array(got), want, rtol=1e-2, atol=1e-2) for got, want in pairs)
