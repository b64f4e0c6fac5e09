"""The packed products where no simulator is needed: on a GPU, how a launch is laid out, and what is refused."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest
from linear_cases import CASES, OP, TILES, TYPES, exact, run

from engine.kernels import linear
from engine.kernels.linear import Gate, GatedNorm, Norm
from engine.kernels.loader import KernelError
from engine.ops import OPS, relative_rms
from engine.ops.linear import linear_reference, norm_reference, packed
from engine.weights import Matrix


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", [*TILES, "best"])
def test_tile_agrees_with_the_reference_on_a_gpu(tile, dtype):
    for case in CASES:
        for got, want in run(case, TYPES[dtype], tile):
            assert relative_rms(got, want) <= OP.tolerance[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("tile", [*TILES, "best"])
def test_the_best_token_is_that_of_the_logits_on_a_gpu(tile, rows):
    h, gain, eps, w, vocabulary = OPS["head"].inputs(OPS["head"].cases[0], mx.bfloat16, 0)
    h = mx.random.normal((1, rows, h.shape[2]), key=mx.random.key(9)).astype(mx.bfloat16)
    want = linear_reference(norm_reference(h.astype(mx.float32), gain, eps), exact(w))[..., :vocabulary]
    tokens, best = linear.head_metal(h, gain, eps, w, vocabulary, tile=tile)
    same, _, logits = linear.head_metal(h, gain, eps, w, vocabulary, logits=True, tile=tile)
    assert relative_rms(logits, want) <= OP.tolerance["float32"]
    assert mx.array_equal(tokens, same) and mx.array_equal(tokens, mx.argmax(logits, axis=-1))
    assert relative_rms(best, want.max(axis=-1)) <= OP.tolerance["float32"]


def weight(outputs: int = 16, inputs: int = 256) -> Matrix:
    return packed(1, (outputs, inputs), mx.float32)


def ones(*shape: int) -> mx.array:
    return mx.ones(shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear.products_metal(ones(1, 9, 256), [weight()]), "1 to 8 rows"),
        (lambda: linear.products_metal(ones(1, 1, 256), [weight()] * 5), "1 to 4 matrices"),
        (lambda: linear.products_metal(ones(1, 1, 256), []), "not 1 and 0"),
        (lambda: linear.linear_metal(ones(1, 1, 256), Matrix(ones(16, 256))), "a dense one is a product of linear=mlx"),
        (lambda: linear.linear_metal(ones(1, 1, 128), weight()), r"\[16, 256\] does not multiply 128 inputs"),
        (lambda: linear.linear_metal(ones(1, 1, 256), weight(), tile="3x4"), "no tile 3x4; there are 1x2"),
        (lambda: linear.linear_metal(ones(1, 1, 256).astype(mx.bfloat16), weight()), "x that or float32"),
        (lambda: linear.products_metal(ones(1, 1, 256), [weight()] * 2, residual=ones(1, 1, 16)), "one matrix"),
        (lambda: linear.products_metal(ones(1, 2, 256), [weight()], residual=ones(1, 1, 16)), "a residual"),
        (lambda: linear.products_metal(ones(1, 1, 256), [weight()], prologue=Norm(ones(128), 1e-6)), "a gain of shape"),
        (
            lambda: linear.products_metal(ones(1, 1, 256), [weight()], prologue=Gate(ones(1, 1, 128))),
            "a gate of shape",
        ),
        (
            lambda: linear.products_metal(
                ones(1, 1, 192), [weight(16, 192)], prologue=GatedNorm(ones(128), ones(1, 1, 192), 1e-6)
            ),
            "heads of 128",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(KernelError, match=message):
        call()


def test_scales_of_two_types_are_refused():
    with pytest.raises(KernelError, match="bfloat16, not mlx.core.float32"):
        linear.products_metal(ones(1, 1, 256), [weight(), packed(1, (8, 256), mx.bfloat16)])


@pytest.mark.parametrize(
    ("codes", "outputs"),
    [
        ((2048,), (8192, 4096, 32, 32)),
        ((4096,), (2048,)),
        ((4096, 2048), (256, 512, 512, 1)),
        ((512,), (2048,)),
        ((2048,), (248_320,)),
        ((256, 512), (512, 32)),
        ((64,), (5,)),
    ],
)
def test_a_launch_fits_its_memory_and_registers(codes, outputs):
    for rows, tile in product(range(1, 9), [*TILES, "best"]):
        made = linear.shape_of(rows, codes, outputs, tile)
        assert rows * made["STEPS"] * made["SPAN"] * 128 <= 16384
        assert made["SPAN"] in (8, 16, 32) and made["STEPS"] & (made["STEPS"] - 1) == 0
        assert made["OUTPUTS"] * rows <= 32
        if rows == 1:
            # All inputs of the model's own products wait at once.
            assert made["STEPS"] * made["SPAN"] * 32 >= max(codes)


def test_lm_head_keeps_its_threadgroups_busy():
    made = linear.shape_of(1, (2048,), (248_320,), "best")
    blocks = 248_320 // (made["SIMDGROUPS"] * made["OUTPUTS"])
    assert made["LOOP"] > 1 and 1000 <= blocks // made["LOOP"] <= 4000
