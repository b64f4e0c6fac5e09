"""A prefill's products where no simulator is needed: on a GPU, which tile runs, and what is refused."""

from __future__ import annotations

import mlx.core as mx
import pytest
from experts_prefill_cases import LINEAR, OP, PRODUCTS, SIZES, TYPES, Size, dense, layer, multiplied, multiply, nothing

from engine.config import EngineConfig, ExpertsConfig
from engine.kernels import experts_prefill as kernels
from engine.kernels import loader
from engine.kernels.loader import KernelError, Launch
from engine.ops import bind, relative_rms
from engine.ops.linear import packed
from engine.ops.registry import VariantUnsupported
from engine.weights import Experts, Matrix


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", kernels.TILES)
def test_tile_agrees_with_the_reference_on_a_gpu(tile, dtype):
    for size in SIZES:
        call = layer(size, TYPES[dtype])
        assert relative_rms(call.run(tile), call.want()) <= OP.tolerance[dtype]
    for size in PRODUCTS.values():
        x, matrices = dense(size, TYPES[dtype])
        assert relative_rms(multiply(x, matrices, tile), multiplied(x, matrices)) <= LINEAR.tolerance[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ["random", "one", "few"])
def test_the_full_models_layer_agrees_with_the_reference_on_a_gpu(chosen):
    """300 rows: experts with no row, a part of a tile, and several tiles."""
    call = layer(Size(300, 2048, 512, 256, 8, chosen), mx.bfloat16)
    want = call.want()
    for tile in ("best", *kernels.TILES):
        assert relative_rms(call.run(tile), want) <= OP.tolerance["bfloat16"]


def bound(tile: str, variant: str = "best", device: str = "cuda"):
    return bind(EngineConfig(experts=ExpertsConfig(variant, tile)), device)


def test_a_named_tile_runs_in_prefill_and_is_recorded():
    call = layer(SIZES[0], mx.bfloat16)
    arguments = (call.x, call.routing, call.w)
    for device in ("cuda", "metal"):
        experts = bound("32x256", device=device).experts
        variant, settings, _ = experts.pick(37, arguments)
        assert (variant.name, settings) == ("packed", {"tile": "32x256"})
        assert "tile" not in experts.pick(1, arguments)[1]
    variant, settings, _ = bound("best", "packed").experts.pick(37, arguments)
    assert (variant.name, settings) == ("packed", {"tile": "32x256"})


@pytest.mark.parametrize(
    ("tile", "variant", "message"),
    [("48", "best", "variant packed has tiles 16, 16x256, 32"), ("32", "mlx", "variant mlx does not.*take packed")],
)
def test_a_tile_that_cannot_be_honoured_is_refused_by_name(tile, variant, message):
    with pytest.raises(VariantUnsupported, match=f"experts=tile {tile} cannot run here: {message}"):
        bound(tile, variant)
    with pytest.raises(VariantUnsupported, match="cannot run here"):
        bound("32", device="cpu")


def test_the_best_tile_follows_the_rows_of_an_expert():
    assert [kernels.tile_for_experts("best", rows * 8, 256) for rows in (1, 512, 1024, 1025, 2048, 8192)] == [
        *("32x256", "32x256", "32x256", "64", "64", "64")
    ]
    assert kernels.tile_for_experts("64x256", 8, 256) == "64x256"
    assert [kernels.tile_for_rows("best", rows, 4096) for rows in (1, 16, 64, 512, 8192)] == [
        *("16", "16", "64", "64", "64")
    ]
    with pytest.raises(KernelError, match="no tile 48; there are 16, "):
        kernels.tile_for_rows("48", 9, 64)


def test_the_largest_chunk_fits_a_grid(monkeypatch):
    """131,072 rows of the full model, as shapes alone."""
    seen: list[Launch] = []
    rows, k = 131_072, 8

    def note(call: Launch) -> list[mx.array]:
        seen.append(call)
        return [mx.broadcast_to(mx.zeros((1,), kind), shape) for shape, kind in zip(call.shapes, call.dtypes)]

    def empty(*shape: int, kind: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.broadcast_to(mx.zeros((1,), kind), shape)

    def matrix(*shape: int) -> Matrix:
        *lead, inputs = shape
        scales = empty(*lead, inputs // 64)
        return Matrix(empty(*lead, inputs // 8, kind=mx.uint32), scales, scales, 4)

    stacks = [matrix(256, 512, 2048), matrix(256, 512, 2048), matrix(256, 2048, 512)]
    shared = [matrix(512, 2048), matrix(512, 2048), matrix(2048, 512), matrix(1, 2048)]
    monkeypatch.setattr(loader, "launch", note)
    for tile in kernels.TILES:
        kernels.experts_packed(
            empty(1, rows, 2048),
            empty(rows, k, kind=mx.uint32),
            empty(rows, k),
            Experts(matrix(256, 2048), *stacks, *shared),
            logit=empty(1, rows, 1),
            tile=tile,
        )
    assert max(call.grid[0] for call in seen) < 2**31
    assert len(seen) == 6 * len(kernels.TILES)


def test_what_the_kernels_do_not_read_is_refused(monkeypatch):
    monkeypatch.setattr(loader, "launch", nothing)
    x, (w,) = dense(PRODUCTS["64"], mx.bfloat16)
    wrong = {
        "takes? bfloat16 or float16 activations": lambda: kernels.linear_packed(x.astype(mx.float32), w),
        "does not multiply 128 inputs": lambda: kernels.linear_packed(mx.zeros((1, 9, 128), mx.bfloat16), w),
        "scales of the activations' type": lambda: kernels.linear_packed(x.astype(mx.float16), w),
        "dense weights of the activations' type": lambda: kernels.linear_packed(x, Matrix(w.dense(mx.float16))),
        "not 4 in 32": lambda: kernels.linear_packed(x, Matrix(w.weight, w.scales, w.biases, 4, 32)),
        "same shape and packing": lambda: kernels.gated_packed(x, w, packed(1, w.shape, mx.bfloat16, 8)),
    }
    for message, run in wrong.items():
        with pytest.raises(KernelError, match=message):
            run()
    call = layer(SIZES[0], mx.bfloat16)
    with pytest.raises(KernelError, match="do not fit together"):
        kernels.experts_packed(call.x, call.routing.ids[1:], call.routing.weights[1:], call.w, logit=call.logit)


def test_the_variants_need_a_gpu():
    for op in (OP, LINEAR):
        assert "not on a CPU" in str(op.variants["packed"].supports(None, "cpu"))
        assert op.variants["packed"].supports(None, "cuda") is op.variants["packed"].supports(None, "metal") is None
