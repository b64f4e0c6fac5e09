"""`route`: the router's decision, from logits to the chosen experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.ops import geometry
from engine.ops.registry import Case, Op, Variant, declare, same_order


@dataclass(frozen=True)
class Routing:
    """Chosen experts of every row.

    ids: uint32 ``[rows, k]``, ascending by score as `mx.argpartition` leaves them (no order is promised).
    weights: ``[rows, k]``, the softmax probabilities of the chosen, renormalised to sum 1 where the model asks.
    host_ids: the same ids as a NumPy array if the decision was made on the host.
    """

    ids: mx.array
    weights: mx.array
    host_ids: np.ndarray | None = None


def _select(probabilities: mx.array, k: int, renormalise: bool, dtype: mx.Dtype) -> Routing:
    # argpartition keeps the highest indices among equal scores; every variant must copy that rule.
    ids = mx.argpartition(probabilities, kth=-k, axis=-1)[..., -k:]
    weights = mx.take_along_axis(probabilities, ids, axis=-1)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(ids.astype(mx.uint32), weights.astype(dtype))


def route_reference(logits: mx.array, k: int, renormalise: bool) -> Routing:
    """Softmax over all experts in float32, the k largest, renormalised in float32, then cast."""
    return _select(mx.softmax(logits.astype(mx.float32), axis=-1), k, renormalise, logits.dtype)


def route_mlx(logits: mx.array, k: int, renormalise: bool) -> Routing:
    """MLX-LM's composition: softmax accumulated in float32 and rounded to the activation type first."""
    return _select(mx.softmax(logits, axis=-1, precise=True), k, renormalise, logits.dtype)


def route_topk(logits: mx.array, k: int, renormalise: bool) -> Routing:
    """The k largest logits first, then a softmax over the chosen: the same weights, since softmax keeps the order."""
    ids = mx.argpartition(logits, kth=-k, axis=-1)[..., -k:]
    chosen = mx.take_along_axis(logits, ids, axis=-1)
    if renormalise:
        weights = mx.softmax(chosen, axis=-1, precise=True)
    else:
        weights = mx.exp(chosen.astype(mx.float32) - mx.logsumexp(logits.astype(mx.float32), axis=-1, keepdims=True))
    return Routing(ids.astype(mx.uint32), weights.astype(logits.dtype))


def route_host(logits: mx.array, k: int, renormalise: bool) -> Routing:
    """The logits are read back and the decision is made in NumPy: a wait for the device in every layer."""
    wide = np.array(logits.astype(mx.float32))
    wide = np.exp(wide - wide.max(axis=-1, keepdims=True))
    probabilities = wide / wide.sum(axis=-1, keepdims=True)
    # A stable ascending sort puts the higher index last among equals, as argpartition does.
    ids = np.argsort(probabilities, axis=-1, kind="stable")[..., -k:].astype(np.uint32)
    weights = np.take_along_axis(probabilities, ids.astype(np.int64), axis=-1)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(mx.array(ids), mx.array(weights).astype(logits.dtype), ids)


def _inputs(case: Case, dtype: mx.Dtype, seed: int) -> tuple[mx.array, int, bool]:
    logits = mx.random.normal((case["rows"], case["experts"]), key=mx.random.key(seed))
    if case.sizes.get("ties"):
        logits = mx.round(logits)  # few distinct values, so that rank k / k+1 is often a tie
    return logits.astype(dtype), case["k"], True


def _case(rows: int, experts: int, k: int, ties: int = 0) -> Case:
    sizes = {"rows": rows, "experts": experts, "k": k, "ties": ties}
    return Case(f"{rows}of{experts}top{k}{'ties' if ties else ''}", sizes)


ROUTE = declare(
    Op(
        name="route",
        summary="softmax over all experts, top-k, renormalise",
        variants={
            "reference": Variant("reference", route_reference, "float32 throughout"),
            "mlx": Variant("mlx", route_mlx, "MLX-LM's composition, on the device"),
            "topk": Variant("topk", route_topk, "largest logits first, softmax over the chosen, on the device"),
            "host": Variant("host", route_host, "logits read back, decided in NumPy", reads_host=True),
        },
        cases=(_case(1, 256, 8), _case(5, 32, 8), _case(33, 256, 8), _case(7, 32, 8, ties=1)),
        inputs=_inputs,
        timing=geometry.route,
        order=same_order(("topk", "mlx")),
        tolerance={"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3},
        least_bytes=lambda c: 2 * c["rows"] * (c["experts"] + c["k"]) + 4 * c["rows"] * c["k"],
        least_flops=lambda c: 5 * c["rows"] * c["experts"],
    )
)
