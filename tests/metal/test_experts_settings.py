"""The kernels of `experts` where no simulator is needed: on a GPU, and what they refuse."""

from __future__ import annotations

import mlx.core as mx
import pytest
from experts_cases import FORMS, FULL, OP, SIZES, TILES, TYPES, Call, Size, call_for, make, tiles_of

from engine.kernels import experts, loader
from engine.ops import relative_rms
from engine.ops.linear import packed
from engine.weights import Experts, Matrix


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tile_agrees_with_the_reference_on_a_gpu(tile, form, dtype):
    for size in SIZES:
        call = call_for(form, size, TYPES[dtype])
        got = call.run(form, **tiles_of(tile))
        assert relative_rms(got, call.want(form).astype(got.dtype)) <= OP.tolerance[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("form", FORMS)
def test_the_full_models_layer_agrees_with_the_reference_on_a_gpu(form, rows):
    size = Size(rows, FULL.hidden, FULL.wide, FULL.experts, FULL.k)
    call = call_for(form, size, mx.bfloat16)
    want = call.want(form).astype(mx.bfloat16)
    for up_tile in experts.UP_TILES:
        assert relative_rms(call.run(form, up_tile=up_tile), want) <= OP.tolerance["bfloat16"]
    for down_tile in experts.DOWN_TILES:
        assert relative_rms(call.run(form, down_tile=down_tile), want) <= OP.tolerance["bfloat16"]


def changed(call: Call, **fields: object) -> Call:
    return Call(**(vars(call) | fields))


def with_weights(call: Call, **matrices: Matrix) -> Call:
    return changed(call, w=Experts(**(vars(call.w) | matrices)))


@pytest.mark.parametrize(
    ("tiles", "message"),
    [({"up_tile": (3, 4)}, r"no up_tile \(3, 4\)"), ({"down_tile": (2, 5)}, r"no down_tile \(2, 5\)")],
)
def test_a_tile_that_does_not_exist_is_refused(tiles, message, monkeypatch):
    monkeypatch.setattr(loader, "launch", lambda call: [mx.zeros(s, d) for s, d in zip(call.shapes, call.dtypes)])
    with pytest.raises(loader.KernelError, match=message):
        make(SIZES[0], mx.float32).run("step", **tiles)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "shared_down_proj"])
def test_weights_packed_otherwise_are_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(loader, "launch", lambda call: [mx.zeros(s, d) for s, d in zip(call.shapes, call.dtypes)])
    call = make(SIZES[0], mx.float32)
    matrix: Matrix = getattr(call.w, name)
    eight = packed(1, matrix.shape, mx.float32, 8)
    with pytest.raises(loader.KernelError, match=f"4-bit weights.*; {name} is packed otherwise"):
        with_weights(call, **{name: eight}).run("step")
    dense = Matrix(matrix.dense(mx.float32))
    with pytest.raises(loader.KernelError, match=f"4-bit weights.*; {name} is packed otherwise"):
        with_weights(call, **{name: dense}).run("step")
    half = packed(1, matrix.shape, mx.float16)
    with pytest.raises(loader.KernelError, match=f"scales of the activations' type.*; {name} has"):
        with_weights(call, **{name: half}).run("step")


def test_sizes_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(loader, "launch", lambda call: [mx.zeros(s, d) for s, d in zip(call.shapes, call.dtypes)])
    call = make(SIZES[0], mx.float32)
    wrong = {
        "logits": (call.logits[:, :7], "takes logits"),
        "x": (call.x[..., :64], "does not fit gate_proj"),
        "gain": (call.gain.astype(mx.bfloat16), "takes a gain"),
        "residual": (call.residual[..., :64], "takes a residual"),
        "shared": ((call.shared[0][..., :32], *call.shared[1:]), "takes a shared expert"),
        "size": (Size(1, 256, 64, 32, 33), "takes up to 32 of 8192 experts, not 33 of 32"),
    }
    for field, (value, message) in wrong.items():
        with pytest.raises(loader.KernelError, match=message):
            changed(call, **{field: value}).run("step")


def test_lanes_cover_every_width_with_little_waste():
    for blocks in range(2, 129, 2):
        lanes, steps = experts.lanes_of(32 * blocks)
        assert lanes & (lanes - 1) == 0 and 2 <= lanes <= 32 and blocks <= lanes * steps < 2 * blocks
    assert [experts.lanes_of(n) for n in (64, 256, 512, 2048)] == [(2, 1), (8, 1), (16, 1), (32, 2)]


def test_the_variant_needs_a_gpu():
    reason = OP.variants["metal"].supports(None, "cpu")
    assert reason is not None and "not on a CPU" in reason
    assert OP.variants["metal"].supports(None, "cuda") is OP.variants["metal"].supports(None, "metal") is None
