"""The kernel of norm and rotary embedding where no simulator is needed: on a GPU, and what it refuses."""

from __future__ import annotations

import mlx.core as mx
import pytest
from rotary_cases import SIZES, TYPES, agrees, arguments

from engine.kernels import loader, rotary


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("simdgroups", rotary.TILES)
def test_tile_agrees_with_mlx_on_a_gpu(simdgroups, dtype):
    for size in SIZES:
        for apart in (True, False):
            given = arguments(size, TYPES[dtype], apart)
            assert agrees(size, given, rotary.rotate_metal(*given, simdgroups=simdgroups), dtype)


def test_what_does_not_exist_is_refused():
    q, k, *rest = arguments(SIZES[0], mx.float32)
    with pytest.raises(loader.KernelError, match="no tile of 3 simdgroups"):
        rotary.rotate_metal(q, k, *rest, simdgroups=3)
    with pytest.raises(loader.KernelError, match="heads of 256"):
        rotary.rotate_metal(q[..., :-256], k, *rest)
    with pytest.raises(loader.KernelError, match="one type"):
        rotary.rotate_metal(q, k.astype(mx.bfloat16), *rest)
