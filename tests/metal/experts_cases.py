"""Sizes, forms, tiles and inputs on which the kernels of `experts` are tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.kernels import experts
from engine.ops import OPS
from engine.ops.linear import linear_reference, norm_reference
from engine.ops.registry import Case
from engine.ops.route import Routing, route_reference
from engine.weights import Experts

OP = OPS["experts"]
TYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32, "float16": mx.float16}
EPS = 1e-5


@dataclass(frozen=True)
class Size:
    """Rows, widths and experts; `logits` are ``random``, ``ties`` (few values) or ``one`` (all rows agree)."""

    rows: int
    hidden: int
    wide: int
    experts: int
    k: int
    logits: str = "random"


SIZES = [
    Size(1, 256, 64, 32, 8),
    Size(3, 192, 128, 20, 2, "ties"),
    Size(8, 64, 64, 8, 8),
    Size(2, 320, 192, 40, 1, "one"),
    Size(1, 1088, 512, 4, 3, "ties"),
    Size(7, 128, 64, 33, 4, "one"),
]
FULL = Size(1, 2048, 512, 256, 8)
# What a call asks for besides its product: norm before and residual after it, weights over the chosen or over all.
FORMS = {
    "step": {"norm": True, "residual": True, "renormalise": True},
    "bare": {"norm": False, "residual": False, "renormalise": False},
    "routed": {},
}
TILES = [
    (experts.UP_TILES[i % len(experts.UP_TILES)], tile, list(FORMS)[i % len(FORMS)])
    for i, tile in enumerate(experts.DOWN_TILES)
]
"""Up tile, down tile and form, each tile at least once."""


@dataclass(frozen=True)
class Call:
    """Arguments of a call, and what it should give, in float32."""

    x: mx.array
    logits: mx.array
    w: Experts
    size: Size
    shared: tuple[mx.array, mx.array, mx.array]
    gain: mx.array
    residual: mx.array

    def routing(self, renormalise: bool = True) -> Routing:
        """The reference's decision on the logits, as the device has them."""
        return route_reference(self.logits.astype(mx.float32), self.size.k, renormalise)

    def run(self, form: str, **tiles: Any) -> mx.array:
        """The kernels' result."""
        asked = FORMS[form]
        if not asked:
            routing = self.routing()
            weights = routing.weights.astype(self.x.dtype)
            return experts.experts_metal_routed(self.x, routing.ids, weights, self.w, shared=self.shared, **tiles)
        return experts.experts_metal(
            self.x,
            self.logits,
            self.w,
            self.size.k,
            asked["renormalise"],
            shared=self.shared,
            gain=self.gain if asked["norm"] else None,
            eps=EPS,
            residual=self.residual if asked["residual"] else None,
            **tiles,
        )

    def want(self, form: str) -> mx.array:
        """The reference's result."""
        asked = {"norm": False, "residual": False, "renormalise": True} | FORMS[form]
        x = self.x.astype(mx.float32)
        if asked["norm"]:
            x = norm_reference(x, self.gain, EPS)
        out = OP.reference.run(x, self.routing(asked["renormalise"]), self.w)
        return out + self.residual.astype(mx.float32) if asked["residual"] else out


def make(size: Size, dtype: mx.Dtype, logits: mx.Dtype | None = None, norm: bool = False) -> Call:
    """Seeded arguments; the shared expert's products are those of the normed rows if `norm`."""
    case = Case("", {n: getattr(size, n) for n in ("rows", "hidden", "wide", "experts", "k")})
    x, _, w = OP.inputs(case, dtype, 0)
    keys = [mx.random.key(100 + i) for i in range(3)]
    scores = mx.random.normal((size.rows, size.experts), key=keys[0])
    if size.logits == "ties":
        scores = mx.round(scores)
    elif size.logits == "one":
        scores = mx.broadcast_to(scores[:1], scores.shape)
    gain = (1 + 0.2 * mx.random.normal((size.hidden,), key=keys[1])).astype(dtype)
    residual = (0.3 * mx.random.normal(x.shape, key=keys[2])).astype(dtype)
    if norm:
        # Far from unit size, so that a norm left out would show.
        x = 5 * x
    seen = norm_reference(x.astype(mx.float32), gain, EPS) if norm else x
    matrices = (w.shared_gate_proj, w.shared_up_proj, w.shared_gate)
    gate, up, logit = (linear_reference(seen, m).astype(dtype) for m in matrices)
    return Call(x, scores.astype(logits or dtype), w, size, (gate, up, logit), gain, residual)


def call_for(form: str, size: Size, dtype: mx.Dtype) -> Call:
    """Seeded arguments for a form."""
    return make(size, dtype, norm=bool(FORMS[form].get("norm")))


def tiles_of(tile: tuple[tuple[int, int], tuple[int, int], str]) -> dict[str, Any]:
    return {"up_tile": tile[0], "down_tile": tile[1]}
