"""Sizes, tiles and inputs on which the packed products are tried, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engine.kernels import linear
from engine.kernels.linear import TILES, Gate, GatedNorm, Norm
from engine.ops import OPS
from engine.ops.linear import linear_reference, norm_reference, packed
from engine.weights import Matrix

__all__ = ["CASES", "OP", "TILES", "TYPES", "Products", "arguments", "exact", "run", "wanted"]

OP = OPS["linear"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
EPS = 1e-6


@dataclass(frozen=True)
class Products:
    """A launch: rows, inputs, matrices as (outputs, bits), what is folded in, and how the inputs lie.

    `by_heads`: x and gate are parts of a larger array, as attention leaves them. `wide`: x is float32 in any case.
    """

    rows: int
    inputs: int
    matrices: tuple[tuple[int, int], ...]
    prologue: str = "none"
    residual: bool = False
    by_heads: int = 0
    wide: bool = False

    def __str__(self) -> str:
        sizes = "+".join(f"{outputs}b{bits}" for outputs, bits in self.matrices)
        return f"{self.rows}x{self.inputs}x{sizes}-{self.prologue}{'-residual' if self.residual else ''}"


CASES = [
    Products(1, 2048, ((37, 4),), "norm"),
    Products(1, 256, ((65, 4), (9, 8), (33, 4), (1, 8)), "norm"),
    Products(3, 320, ((65, 4),), residual=True),
    Products(1, 512, ((40, 4),), "gated norm", residual=True, wide=True),
    Products(2, 1024, ((35, 4),), "gate", residual=True, by_heads=256),
    Products(5, 1024, ((12, 4), (3, 8)), "norm"),
    Products(8, 768, ((64, 4), (7, 4)), "gated norm", by_heads=128),
    Products(1, 64, ((5, 8), (70, 4), (2, 4))),
    Products(2, 1088, ((3, 4),), "gate", residual=True),
]


def _laid_out(array: mx.array, dim: int) -> mx.array:
    """The same numbers by heads of `dim`, as every second head of a larger array with NaN between."""
    _, rows, width = array.shape
    heads = array.reshape(1, rows, width // dim, 1, dim)
    both = mx.concatenate([heads, mx.full(heads.shape, float("nan"), dtype=array.dtype)], axis=3)
    mx.eval(both)
    return both[:, :, :, 0]


def arguments(case: Products, dtype: mx.Dtype, seed: int = 0) -> tuple[mx.array, list[Matrix], dict]:
    """``(x, matrices, keywords)`` for `products_metal`."""
    keys = iter(mx.random.split(mx.random.key(seed), 8))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(dtype)

    x = 3 * normal(1, case.rows, case.inputs)
    x = x.astype(mx.float32) if case.wide else x
    gate, gain = normal(1, case.rows, case.inputs), 1 + 0.2 * normal(case.inputs)
    residual = normal(1, case.rows, case.matrices[0][0]) if case.residual else None
    if case.by_heads:
        x, gate = _laid_out(x, case.by_heads), _laid_out(gate, case.by_heads)
    prologue = {
        "none": None,
        "norm": Norm(gain, EPS),
        "gated norm": GatedNorm(gain[: linear.HEAD], gate, EPS),
        "gate": Gate(gate),
    }[case.prologue]
    matrices = [packed(seed + 9 + i, (n, case.inputs), dtype, bits) for i, (n, bits) in enumerate(case.matrices)]
    return x, matrices, {"prologue": prologue, "residual": residual}


def exact(w: Matrix) -> Matrix:
    """The same matrix with float32 scales, which expands without rounding."""
    assert w.scales is not None and w.biases is not None
    return Matrix(w.weight, w.scales.astype(mx.float32), w.biases.astype(mx.float32), w.bits, w.group_size)


def wanted(x: mx.array, matrices: list[Matrix], prologue: linear.Prologue | None, residual: mx.array | None) -> list:
    """What `products_metal` computes, composed of references in float32."""
    rows = x.shape[1]
    y = x.astype(mx.float32).reshape(1, rows, -1)
    if isinstance(prologue, Norm):
        y = norm_reference(y, prologue.gain, prologue.eps)
    elif isinstance(prologue, GatedNorm):
        heads = norm_reference(y.reshape(1, rows, -1, linear.HEAD), prologue.gain, prologue.eps)
        z = prologue.z.astype(mx.float32).reshape(heads.shape)
        y = (heads * z * mx.sigmoid(z)).reshape(1, rows, -1)
    elif isinstance(prologue, Gate):
        y = y * mx.sigmoid(prologue.gate.astype(mx.float32).reshape(y.shape))
    products = [linear_reference(y, exact(w)) for w in matrices]
    return [p if residual is None else p + residual.astype(mx.float32) for p in products]


def run(case: Products, dtype: mx.Dtype, tile: str) -> list[tuple[mx.array, mx.array]]:
    """``(result, what it should be)`` for each matrix of a case."""
    x, matrices, folded = arguments(case, dtype)
    return list(
        zip(linear.products_metal(x, matrices, tile=tile, **folded), wanted(x, matrices, **folded), strict=True)
    )
