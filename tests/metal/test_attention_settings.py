"""The variant `metal` of `decode_attention` where no simulator is needed: on a GPU, and what it refuses."""

from __future__ import annotations

import mlx.core as mx
import pytest
from attention_cases import FRESH_SIZES, OP, SIZES, TILES, TYPES, arguments, fresh_arguments, kind, settings

from engine.kernels import attention, loader
from engine.ops import relative_rms


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES, ids="-".join)
def test_tile_agrees_with_the_reference_on_a_gpu(tile, dtype):
    dtype = kind(tile, dtype)
    for size in SIZES:
        given = arguments(size, TYPES[dtype])
        error = relative_rms(attention.attention_metal(*given, **settings(tile)), OP.reference.run(*given))
        assert error <= OP.tolerance[dtype]
    for size in FRESH_SIZES:
        given, fresh, whole = fresh_arguments(size, TYPES[dtype])
        got = attention.attention_metal(*given, **settings(tile), fresh=fresh)
        assert relative_rms(got, OP.reference.run(*whole)) <= OP.tolerance[dtype]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [({"heads": "3"}, "heads=3"), ({"split": "halves"}, "split=halves"), ({"lanes": "far"}, "lanes=far")],
)
def test_a_setting_that_does_not_exist_is_refused(chosen, message):
    with pytest.raises(loader.KernelError, match=message):
        attention.attention_metal(*arguments(SIZES[0], mx.float32), **chosen)


def test_another_head_dim_and_mixed_types_are_refused():
    q, keys, values, scale, _ = arguments(SIZES[0], mx.float32)
    with pytest.raises(loader.KernelError, match="head_dim 256"):
        attention.attention_metal(q[..., :64], keys[..., :64], values[..., :64], scale)
    with pytest.raises(loader.KernelError, match="one type"):
        attention.attention_metal(q, keys.astype(mx.bfloat16), values, scale)


def test_fresh_rows_that_are_not_the_querys_are_refused():
    given, (keys, values), _ = fresh_arguments(FRESH_SIZES[1], mx.float32)
    with pytest.raises(loader.KernelError, match=r"fresh rows are \[1, 1, 8, 256\], not \[1, 1, 7, 256\]"):
        attention.attention_metal(*given, fresh=(keys[:, :, 1:], values))
    with pytest.raises(loader.KernelError, match="one type"):
        attention.attention_metal(*given, fresh=(keys, values.astype(mx.bfloat16)))


@pytest.mark.parametrize(("heads", "dtype"), [("4", mx.bfloat16), ("8", mx.float32)])
def test_tiles_that_do_not_exist_are_refused(heads, dtype):
    with pytest.raises(loader.KernelError, match="lanes=tiles_ahead takes 8 heads a fetch and a 16-bit type"):
        attention.attention_metal(*arguments(SIZES[0], dtype), heads=heads, lanes="tiles_ahead")
