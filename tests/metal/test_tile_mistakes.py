"""Mistakes put into attention by matrix tiles, each caught by the check that is there to catch it."""

from __future__ import annotations

import mlx.core as mx
import pytest
import simulator
from attention_cases import FRESH_SIZES, OP, fresh_arguments, settings
from simulator import LaunchReport, Simulator

from engine.kernels import attention, loader
from engine.ops import relative_rms

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

MEET = "threadgroup_barrier(mem_flags::mem_threadgroup);"
STAGED = f"shared_q[e] = pair[0] | pair[1] << 16;\n}}\n{MEET}"
WRITTEN = f"  {MEET}\n  for (uint e = index; e < 512u"


def attend(simulated: Simulator, monkeypatch: pytest.MonkeyPatch) -> float:
    """Error of attention with new rows beside the cache, in one part of three steps."""
    given, fresh, whole = fresh_arguments(FRESH_SIZES[4], mx.float16)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    got = attention.attention_metal(*given, **settings(("8", "none", "tiles")), fresh=fresh)
    return relative_rms(got, OP.reference.run(*whole))


# name: the kernel's text, what it is replaced by, the kind of report
RUN = {
    "no barrier after staging the query": (STAGED, STAGED.replace(MEET, ""), "race"),
    "no barrier before the sums are read": (WRITTEN, WRITTEN.replace(MEET, ""), "race"),
    "fresh row after the last": (
        "fresh + (at - cached) * fresh_stride",
        "fresh + (at - cached + 1u) * fresh_stride",
        "bounds",
    ),
    "product that some lanes skip": (
        "tile_multiply(out[4 * j + w]",
        "if (wanted_lane) tile_multiply(out[4 * j + w]",
        "divergence",
    ),
    "loop as long as the lane": (
        "base < end; base += uint(SIMDGROUPS) * STEP",
        "base + lane < end; base += uint(SIMDGROUPS) * STEP",
        "divergence",
    ),
    "half of a word": (
        "key_row[a] = tile_c * 4u",
        "key_row[a] = tile_c * 2u",
        "alignment",
    ),
}

# A race may also be seen as the load of what the other thread has yet to store; a word off its boundary faults too.
ALSO = {"race": ("uninitialised",), "alignment": ("bounds",)}

# name: the kernel's text and what it is replaced by; only the numbers can show it
WRONG = {
    "past the end with weight": ("* factor : NOTHING", "* factor : 0.0f"),
    "stale largest score": ("exp2_of(weight[p][i] - largest[i % 2])", "exp2_of(weight[p][i] - largest[0])"),
    "sums not faded": ("sum_get(out[t], i) * fade[i % 2]", "sum_get(out[t], i)"),
    "dimensions in memory's order": ("k % 8u / 2u * 8u + tile % 2u * 4u", "k % 8u / 2u * 4u + tile % 2u * 16u"),
    "positions swapped in a pair": (
        "const uint even = value[p][j][2 * k][w]",
        "const uint even = value[p][j][2 * (1 - k)][w]",
    ),
    "sum over half of the rows": ("weight_sum[s] = tile_rows_sum(weight_sum[s]);", ""),
}


def test_without_a_mistake_nothing_is_reported(monkeypatch):
    assert attend(Simulator(checked=True), monkeypatch) <= OP.tolerance["float16"]


@pytest.mark.parametrize("name", RUN)
def test_the_checked_run_reports(name, monkeypatch):
    old, new, kind = RUN[name]
    kernel = loader.load(attention.TOPIC)["tiles"]
    assert (kernel.header + kernel.body).count(old) == 1
    with pytest.raises(LaunchReport) as caught:
        attend(Simulator(checked=True, replace={old: new.replace("wanted_lane", "lane != 7u")}), monkeypatch)
    kinds = {line.partition(" at ")[0].partition("\t")[0] for line in str(caught.value).splitlines()}
    assert kind in kinds and kinds <= {kind, *ALSO.get(kind, ())}, caught.value


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_tells_wrong_arithmetic(name, monkeypatch):
    old, new = WRONG[name]
    kernel = loader.load(attention.TOPIC)["tiles"]
    assert (kernel.header + kernel.body).count(old) == 1
    assert not attend(Simulator(replace={old: new}), monkeypatch) <= OP.tolerance["float16"]
