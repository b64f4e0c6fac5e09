"""`linear` and `norm`: products with a weight matrix, and RMS normalisation."""

from __future__ import annotations

import mlx.core as mx

from engine.config import GROUP_SIZE
from engine.kernels import experts_prefill
from engine.kernels import linear as kernels
from engine.ops import geometry
from engine.ops.registry import DECODE_ROWS, Case, Op, Variant, declare, same_order
from engine.weights import Matrix


def linear_reference(x: mx.array, w: Matrix) -> mx.array:
    """``x [..., in] · Wᵀ -> [..., out]``, expanded and multiplied in float32, cast to the type of `x`."""
    return (x.astype(mx.float32) @ w.dense(mx.float32).T).astype(x.dtype)


def linear_mlx(x: mx.array, w: Matrix) -> mx.array:
    """MLX's packed product, or its dense one where the weight is dense."""
    if w.scales is None:
        return x @ w.weight.astype(x.dtype).T
    return mx.quantized_matmul(x, w.weight, w.scales, w.biases, transpose=True, group_size=w.group_size, bits=w.bits)


def linear_expanded(x: mx.array, w: Matrix) -> mx.array:
    """Expand the weight into an array once per use, then MLX's dense product."""
    return x @ w.dense(x.dtype).T


def linear_packed(x: mx.array, w: Matrix, *, tile: str = "best") -> mx.array:
    """Our kernel for many rows; up to 8 are MLX's packed product. tile: one of the kernel's.

    Raises:
        KernelError: as `engine.kernels.experts_prefill.linear_packed`.
    """
    return linear_mlx(x, w) if x.shape[1] <= DECODE_ROWS else experts_prefill.linear_packed(x, w, tile=tile)


def _many_rows(case: Case | None, device: str) -> str | None:
    if case is not None and case["rows"] <= DECODE_ROWS:
        return f"up to {DECODE_ROWS} rows are MLX's packed product"
    return experts_prefill.supports(case, device)


def packed(seed: int, shape: tuple[int, ...], dtype: mx.Dtype, bits: int = 4) -> Matrix:
    """A seeded packed matrix whose products with unit inputs have unit size."""
    key = mx.random.key(seed)
    dense = mx.random.normal(shape, key=key) * shape[-1] ** -0.5
    weight, scales, biases = mx.quantize(dense, group_size=GROUP_SIZE, bits=bits)
    return Matrix(weight, scales.astype(dtype), biases.astype(dtype), bits)


def _linear_inputs(case: Case, dtype: mx.Dtype, seed: int) -> tuple[mx.array, Matrix]:
    x = mx.random.normal((1, case["rows"], case["inputs"]), key=mx.random.key(seed)).astype(dtype)
    return x, packed(seed + 1, (case["outputs"], case["inputs"]), dtype, case["bits"])


def _case(rows: int, inputs: int, outputs: int, bits: int = 4) -> Case:
    sizes = {"rows": rows, "inputs": inputs, "outputs": outputs, "bits": bits}
    return Case(f"{rows}x{inputs}x{outputs}b{bits}", sizes)


LINEAR = declare(
    Op(
        name="linear",
        summary="product of activations with a packed or dense weight matrix",
        variants={
            v.name: v
            for v in (
                Variant("reference", linear_reference, "expand and multiply in float32"),
                Variant("mlx", linear_mlx, "mx.quantized_matmul: packed weights expanded inside the product"),
                Variant("expanded", linear_expanded, "mx.dequantize into an array, then MLX's dense product"),
                Variant(
                    "metal",
                    kernels.linear_metal,
                    "our kernel for packed weights: each read once for up to 8 rows, one text for Metal and CUDA",
                    supports=kernels.supports,
                    tiles=kernels.TILES,
                ),
                Variant(
                    "packed",
                    linear_packed,
                    "our kernel for many rows: weights expanded in registers, by matrix units; few rows as mlx",
                    supports=_many_rows,
                    tiles=tuple(experts_prefill.TILES),
                ),
            )
        },
        cases=(
            _case(1, 256, 1024),
            _case(1, 2048, 33),
            _case(3, 320, 65),
            _case(8, 512, 512),
            _case(63, 256, 192),
            _case(1, 256, 1, bits=8),
            _case(5, 256, 32, bits=8),
        ),
        inputs=_linear_inputs,
        timing=geometry.linear,
        # On a CPU the packed product runs at about 1.5 GFLOP/s whatever the rows, a BLAS product at 50. On CUDA MLX's
        # dense product is several times as fast as its packed one.
        order=same_order(("mlx",), cpu_prefill=("expanded",), cuda_prefill=("expanded", "packed", "mlx")),
        tolerance={"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3},
        least_bytes=lambda c: (
            c["outputs"] * (c["inputs"] * c["bits"] // 8 + c["inputs"] // GROUP_SIZE * 4)
            + 2 * c["rows"] * (c["inputs"] + c["outputs"])
        ),
        least_flops=lambda c: 2 * c["rows"] * c["inputs"] * c["outputs"],
    )
)


def norm_reference(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    """RMS normalisation over the last axis in float32, one rounding at the end."""
    wide = x.astype(mx.float32)
    scale = mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * gain.astype(mx.float32)).astype(x.dtype)


def norm_mlx(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    """`mx.fast.rms_norm`."""
    return mx.fast.rms_norm(x, gain, eps)


def _norm_inputs(case: Case, dtype: mx.Dtype, seed: int) -> tuple[mx.array, mx.array, float]:
    x = mx.random.normal((1, case["rows"], case["width"]), key=mx.random.key(seed)).astype(dtype)
    gain = (1 + 0.2 * mx.random.normal((case["width"],), key=mx.random.key(seed + 1))).astype(dtype)
    return x, gain, 1e-6


NORM = declare(
    Op(
        name="norm",
        summary="RMS normalisation with a gain (layer, head and final norms)",
        variants={
            "reference": Variant("reference", norm_reference, "float32, one rounding"),
            "mlx": Variant("mlx", norm_mlx, "mx.fast.rms_norm"),
        },
        cases=tuple(Case(f"{r}x{w}", {"rows": r, "width": w}) for r, w in ((1, 256), (7, 2048), (65, 128))),
        inputs=_norm_inputs,
        order=same_order(("mlx",)),
        tolerance={"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3},
        least_bytes=lambda c: 4 * c["rows"] * c["width"],
        least_flops=lambda c: 4 * c["rows"] * c["width"],
    )
)
