"""`head`: final norm and the product with `lm_head`, cut to the real vocabulary."""

from __future__ import annotations

import mlx.core as mx

from engine.kernels import linear as kernels
from engine.ops import geometry
from engine.ops.linear import linear_expanded, linear_mlx, linear_reference, norm_mlx, norm_reference, packed
from engine.ops.registry import Case, Op, Variant, declare, same_order
from engine.weights import Matrix


def head_reference(h: mx.array, gain: mx.array, eps: float, w: Matrix, vocabulary: int) -> mx.array:
    """Logits ``[1, rows, vocabulary]`` of hidden rows ``[1, rows, hidden]``, in float32 throughout.

    The padded tail of `lm_head` is cut off before anything is chosen, so that it can never be sampled.
    """
    return linear_reference(norm_reference(h.astype(mx.float32), gain, eps), w)[..., :vocabulary]


def head_mlx(h: mx.array, gain: mx.array, eps: float, w: Matrix, vocabulary: int) -> mx.array:
    """MLX's norm and packed product."""
    return linear_mlx(norm_mlx(h, gain, eps), w)[..., :vocabulary]


def head_expanded(h: mx.array, gain: mx.array, eps: float, w: Matrix, vocabulary: int) -> mx.array:
    """The weight expanded into an array once, then MLX's dense product."""
    return linear_expanded(norm_mlx(h, gain, eps), w)[..., :vocabulary]


def _inputs(case: Case, dtype: mx.Dtype, seed: int) -> tuple[mx.array, mx.array, float, Matrix, int]:
    hidden, padded = case["hidden"], case["padded"]
    h = mx.random.normal((1, case["rows"], hidden), key=mx.random.key(seed)).astype(dtype)
    gain = (1 + 0.1 * mx.random.normal((hidden,), key=mx.random.key(seed + 1))).astype(dtype)
    return h, gain, 1e-6, packed(seed + 2, (padded, hidden), dtype), case["vocabulary"]


def _case(rows: int, hidden: int, padded: int, vocabulary: int) -> Case:
    sizes = {"rows": rows, "hidden": hidden, "padded": padded, "vocabulary": vocabulary}
    return Case(f"{rows}x{hidden}x{vocabulary}of{padded}", sizes)


HEAD = declare(
    Op(
        name="head",
        summary="final norm, lm_head, logits of the real vocabulary",
        variants={
            v.name: v
            for v in (
                Variant("reference", head_reference, "float32 norm and product"),
                Variant("mlx", head_mlx, "mx.fast.rms_norm and the packed product"),
                Variant("expanded", head_expanded, "lm_head expanded into an array, then the dense product"),
                Variant(
                    "metal",
                    kernels.logits_metal,
                    "our kernel: norm and product in one launch, float32 logits, the padded tail not read",
                    supports=kernels.supports,
                    tiles=kernels.TILES,
                ),
            )
        },
        cases=(_case(1, 256, 512, 500), _case(3, 128, 320, 261), _case(19, 256, 512, 512)),
        inputs=_inputs,
        timing=geometry.head,
        order=same_order(("mlx",), cpu_prefill=("expanded",)),
        tolerance={"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 3e-3},
        least_bytes=lambda c: c["vocabulary"] * c["hidden"] * 9 // 16 + 2 * c["rows"] * c["vocabulary"],
        least_flops=lambda c: 2 * c["rows"] * c["vocabulary"] * c["hidden"],
    )
)
