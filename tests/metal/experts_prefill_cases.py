"""Sizes, forms and inputs on which the kernels of a prefill's products are tried."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.kernels import experts_prefill as kernels
from engine.kernels.loader import Launch
from engine.ops import OPS
from engine.ops.linear import linear_reference, packed
from engine.ops.registry import Case
from engine.ops.route import Routing
from engine.weights import Experts, Matrix

OP, LINEAR = OPS["experts"], OPS["linear"]
TYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class Size:
    """Rows, widths, experts and k; `chosen` is ``random``, ``one`` (all rows agree) or ``few`` (some get no row)."""

    rows: int
    hidden: int
    wide: int
    experts: int
    k: int
    chosen: str = "random"


SIZES = [
    Size(37, 192, 64, 8, 2),
    Size(1, 64, 64, 8, 2),
    Size(40, 64, 64, 8, 2, "one"),
    Size(12, 320, 64, 8, 2, "few"),
]
"""Inputs that fill half, all, or more of blocks of 128; an expert with several tiles, with one row, with none. Experts
are as many everywhere, since each number is an instance to compile."""


@dataclass(frozen=True)
class Call:
    """Arguments of a layer."""

    x: mx.array
    routing: Routing
    w: Experts
    logit: mx.array
    residual: mx.array

    def run(self, tile: str = "best") -> mx.array:
        """What the kernels make of them."""
        ids, weights = self.routing.ids, self.routing.weights
        return kernels.experts_packed(self.x, ids, weights, self.w, logit=self.logit, residual=self.residual, tile=tile)

    def want(self) -> mx.array:
        """What the reference makes of them."""
        return OP.reference.run(self.x, self.routing, self.w) + self.residual


def layer(size: Size, dtype: mx.Dtype) -> Call:
    """Seeded arguments."""
    case = Case("", {n: getattr(size, n) for n in ("rows", "hidden", "wide", "experts", "k")})
    x, routing, w = OP.inputs(case, dtype, 0)
    if size.chosen != "random":
        routing = Routing(mx.array(chosen(size)), routing.weights)
    residual = (0.3 * mx.random.normal(x.shape, key=mx.random.key(9))).astype(dtype)
    return Call(x, routing, w, linear_reference(x, w.shared_gate), residual)


def chosen(size: Size) -> np.ndarray:
    """Different experts for every row: any, the same for all, or some of each third one only."""
    random = np.random.default_rng(size.rows)
    allowed = np.arange(size.experts)[:: 3 if size.chosen == "few" else 1]
    rows = [random.permutation(allowed)[: size.k] for _ in range(size.rows)]
    return np.array(rows[:1] * size.rows if size.chosen == "one" else rows, np.uint32)


def sorted_pairs(ids: np.ndarray, rows: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Pairs by expert in order, and the tiles that have rows: expert, first place, pairs."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.uint32)
    tiles = []
    for expert in np.unique(flat):
        places = np.flatnonzero(flat[order] == expert)
        for start in range(0, places.size, rows):
            tiles.append((int(expert), int(places[start]), min(rows, places.size - start)))
    return order, tiles


@dataclass(frozen=True)
class Product:
    """A dense product: rows, inputs, outputs; 4, 8 or 16 bits; gated by a second matrix or not."""

    rows: int
    inputs: int
    outputs: int
    bits: int = 4
    gated: bool = False


PRODUCTS = {
    "16": Product(9, 64, 33),
    "16x256": Product(16, 192, 65, gated=True),
    "32": Product(31, 128, 64, bits=8),
    "32x256": Product(33, 320, 8),
    "64": Product(65, 64, 200),
    "64x256": Product(40, 128, 130, bits=16),
    "128": Product(129, 64, 1, gated=True),
    "128x128": Product(100, 256, 72),
}
"""One for every tile."""


def dense(size: Product, dtype: mx.Dtype) -> tuple[mx.array, list[Matrix]]:
    """Seeded input ``[1, rows, inputs]`` and one or two matrices."""
    x = mx.random.normal((1, size.rows, size.inputs), key=mx.random.key(1)).astype(dtype)
    shape = (size.outputs, size.inputs)
    made = [packed(2 + i, shape, dtype, min(size.bits, 8)) for i in range(2 if size.gated else 1)]
    if size.bits == 16:
        made = [Matrix(w.dense(dtype)) for w in made]
    return x, made


def multiply(x: mx.array, matrices: list[Matrix], tile: str) -> mx.array:
    """What the kernel makes of `dense`."""
    if len(matrices) == 2:
        return kernels.gated_packed(x, *matrices, tile=tile)
    return kernels.linear_packed(x, matrices[0], tile=tile)


def multiplied(x: mx.array, matrices: list[Matrix]) -> mx.array:
    """What the reference makes of `dense`."""
    gate, *up = [linear_reference(x.astype(mx.float32), w) for w in matrices]
    return (gate * mx.sigmoid(gate) * up[0] if up else gate).astype(x.dtype)


def nothing(call: Launch) -> list[mx.array]:
    """In place of a launch where only what would be launched matters."""
    return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]
