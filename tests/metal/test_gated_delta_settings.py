"""The variant `registers` of `gated_delta` where no simulator is needed: on a GPU, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from gated_delta_cases import OP, SIZES, TILES, TYPES, arguments, error, named, settings

from engine.kernels import gated_delta, loader
from engine.ops.registry import VariantUnsupported


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids=named)
def test_tile_agrees_with_the_reference_on_a_gpu(tile, dtype):
    for size in SIZES:
        for apart in (True, False):
            given = arguments(size, TYPES[dtype], apart=apart)
            result = gated_delta.gated_delta_metal(*given, **settings(tile))
            assert error(given, result, normed=tile[2]) <= OP.tolerance[dtype]


@pytest.mark.gpu
def test_a_thousand_steps_stay_within_tolerance_on_a_gpu():
    ours = exact = arguments(SIZES[0], mx.float32)
    for step in range(1000):
        row = arguments(SIZES[0], mx.float32, seed=100 + step)[:4]
        ours, exact = (*row, *ours[4:]), (*row, *exact[4:])
        got, want = gated_delta.gated_delta_metal(*ours), OP.reference.run(*exact)
        mx.eval(got, want)
        ours, exact = (*row, *got[1:], *ours[6:]), (*row, *want[1:], *exact[6:])
    assert error(exact, got, want) <= OP.tolerance["float32"]


@pytest.mark.parametrize(
    "chosen",
    [
        {"columns": 12},
        {"columns": 4},
        {"columns": 8, "simdgroups": 4},
        {"columns": 16, "simdgroups": 8, "normed": False},
    ],
)
def test_a_tile_that_does_not_exist_is_refused(chosen):
    with pytest.raises(loader.KernelError, match=f"no tile of {chosen['columns']} columns"):
        gated_delta.gated_delta_metal(*arguments(SIZES[0], mx.float32), **chosen)


def test_another_head_size_and_mixed_types_are_refused():
    *given, w, sizes = arguments(SIZES[0], mx.float32)
    with pytest.raises(loader.KernelError, match="heads of 128"):
        gated_delta.gated_delta_metal(*given, w, (1, 64, 2, 64))
    with pytest.raises(loader.KernelError, match="one type"):
        gated_delta.gated_delta_metal(*given, replace(w, conv=w.conv.astype(mx.bfloat16)), sizes)
    with pytest.raises(loader.KernelError, match="float32 state"):
        gated_delta.gated_delta_metal(*given[:5], given[5].astype(mx.bfloat16), w, sizes)


def test_it_runs_on_gpus_only():
    with pytest.raises(VariantUnsupported, match="not on a CPU"):
        OP.choose("registers", "cpu", "decode")
    assert {OP.choose("registers", device, "prefill").name for device in ("metal", "cuda")} == {"registers"}
