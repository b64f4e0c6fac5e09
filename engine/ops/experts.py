"""`experts`: the mixture's products, from routed rows to their weighted sum, shared expert included.

``y = Σ_k w_k · down_e(silu(gate_e x) · up_e x) + sigmoid(shared_gate x) · shared(x)``; every variant takes
``x [1, rows, hidden]``, a `Routing` and the layer's `Experts`, and returns ``[1, rows, hidden]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from engine.config import GROUP_SIZE
from engine.device import second_stream
from engine.kernels import experts as kernels
from engine.kernels import experts_prefill
from engine.ops import geometry
from engine.ops.linear import linear_expanded, linear_mlx, linear_reference, packed
from engine.ops.registry import DECODE_ROWS, Case, Op, Variant, declare, same_order
from engine.ops.route import Routing, route_reference
from engine.weights import Experts, Matrix

SORT_FROM = 64
"""Routed pairs from which rows are sorted by expert (MLX-LM's threshold): fewer do not repay the sort."""


Product = Callable[[mx.array, Matrix], mx.array]
# (x, matrices, row of each pair or None if x is already one row a pair, expert of each pair, sorted)
GatherProduct = Callable[[mx.array, Matrix, mx.array | None, mx.array, bool], mx.array]


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) · up``."""
    return gate * mx.sigmoid(gate) * up


def shared_expert(x: mx.array, w: Experts, product: Product, shared: str = "after") -> mx.array:
    """The expert every row passes, scaled by its own sigmoid gate: ``[1, rows, hidden]``.

    shared: ``after`` the routed experts, or ``beside`` them, on a stream of the device of its own.
    """
    with mx.stream(second_stream()) if shared == "beside" else nullcontext():
        hidden = swiglu(product(x, w.shared_gate_proj), product(x, w.shared_up_proj))
        return mx.sigmoid(product(x, w.shared_gate)) * product(hidden, w.shared_down_proj)


def _combine(rows: mx.array, weights: mx.array) -> mx.array:
    """Weighted sum over the k experts of each row, as one product: ``[rows, k, hidden] -> [1, rows, hidden]``."""
    return (weights[:, None].astype(rows.dtype) @ rows).reshape(1, rows.shape[0], -1)


@lru_cache(maxsize=64)
def _row_of_pair(rows: int, k: int) -> mx.array:
    """uint32 ``[rows, k]``: the row each pair reads. Kept, because made afresh it is a launch in every layer."""
    made = mx.array(np.repeat(np.arange(rows, dtype=np.uint32), k).reshape(rows, k))
    mx.eval(made)
    return made


def _gathered(x: mx.array, routing: Routing, w: Experts, product: GatherProduct) -> mx.array:
    """Routed products with one gathered product per matrix; rows sorted by expert where that pays."""
    rows, k = routing.ids.shape
    flat = x.reshape(rows, 1, -1)
    if rows * k < SORT_FROM:
        ids, row, pair = routing.ids, _row_of_pair(rows, k), _row_of_pair(rows * k, 1).reshape(rows, k)
        hidden = swiglu(product(flat, w.gate_proj, row, ids, False), product(flat, w.up_proj, row, ids, False))
        out = product(hidden.reshape(rows * k, 1, -1), w.down_proj, pair, ids, False)
        return _combine(out.reshape(rows, k, -1), routing.weights)
    order = _order(routing)
    ids, pairs = routing.ids.flatten()[order], flat[order // k]
    hidden = swiglu(product(pairs, w.gate_proj, None, ids, True), product(pairs, w.up_proj, None, ids, True))
    out = product(hidden, w.down_proj, None, ids, True)
    return _combine(out[mx.argsort(order)].reshape(rows, k, -1), routing.weights)


def _order(routing: Routing) -> mx.array:
    """Indices of the routed pairs sorted by expert; sorted in NumPy if the routing was made on the host."""
    if routing.host_ids is not None:
        return mx.array(np.argsort(routing.host_ids, axis=None, kind="stable").astype(np.uint32))
    return mx.argsort(routing.ids.flatten())


def _gather_packed(x: mx.array, w: Matrix, row: mx.array | None, ids: mx.array, sort: bool) -> mx.array:
    if w.scales is None:
        return _gather_dense(x, w, row, ids, sort)
    return mx.gather_qmm(
        x,
        w.weight,
        w.scales,
        w.biases,
        lhs_indices=row,
        rhs_indices=ids,
        transpose=True,
        group_size=w.group_size,
        bits=w.bits,
        sorted_indices=sort,
    )


def _gather_dense(x: mx.array, w: Matrix, row: mx.array | None, ids: mx.array, sort: bool) -> mx.array:
    dense = w.dense(x.dtype).swapaxes(-1, -2)
    return mx.gather_mm(x, dense, lhs_indices=row, rhs_indices=ids, sorted_indices=sort)


def _gather_expanded(x: mx.array, w: Matrix, row: mx.array | None, ids: mx.array, sort: bool) -> mx.array:
    if row is None:
        return _gather_dense(x, w, row, ids, sort)
    # Few pairs: expand only the experts they chose.
    chosen = Matrix(w.weight[ids], _take(w.scales, ids), _take(w.biases, ids), w.bits, w.group_size)
    return x[row] @ chosen.dense(x.dtype).swapaxes(-1, -2)


def _take(array: mx.array | None, ids: mx.array) -> mx.array | None:
    return None if array is None else array[ids]


def experts_mlx(x: mx.array, routing: Routing, w: Experts, *, shared: str = "after") -> mx.array:
    """MLX's gathered packed products (`mx.gather_qmm`), rows sorted by expert."""
    return _gathered(x, routing, w, _gather_packed) + shared_expert(x, w, linear_mlx, shared)


def experts_expanded(x: mx.array, routing: Routing, w: Experts, *, shared: str = "after") -> mx.array:
    """Expand the stacks into arrays once per use, then MLX's gathered dense products."""
    return _gathered(x, routing, w, _gather_expanded) + shared_expert(x, w, linear_expanded, shared)


def experts_grouped(x: mx.array, routing: Routing, w: Experts, *, shared: str = "after") -> mx.array:
    """Rows grouped on the host, then one expanded dense product per expert; a single row is gathered instead.

    The form for a device whose dense product is far faster than its packed one and where a host read is cheap.
    """
    rows, k = routing.ids.shape
    if rows * k < SORT_FROM:
        return experts_mlx(x, routing, w)
    host = np.array(routing.ids) if routing.host_ids is None else routing.host_ids
    order = np.argsort(host, axis=None, kind="stable")
    edges = np.searchsorted(host.reshape(-1)[order], np.arange(w.gate_proj.shape[0] + 1))
    pairs = x.squeeze(0)[mx.array((order // k).astype(np.uint32))]
    out = []
    for expert in np.flatnonzero(np.diff(edges)):
        part = pairs[int(edges[expert]) : int(edges[expert + 1])]
        gate, up, down = (_one(m, int(expert)) for m in (w.gate_proj, w.up_proj, w.down_proj))
        out.append(linear_expanded(swiglu(linear_expanded(part, gate), linear_expanded(part, up)), down))
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    routed = mx.concatenate(out)[mx.array(inverse.astype(np.uint32))].reshape(rows, k, -1)
    return _combine(routed, routing.weights) + shared_expert(x, w, linear_expanded, shared)


def experts_metal(x: mx.array, routing: Routing, w: Experts, **tiles: tuple[int, int]) -> mx.array:
    """Our kernels for the routed experts and the sum, MLX's product for what the shared expert does to `x`."""
    shared = linear_mlx(x, w.shared_gate_proj), linear_mlx(x, w.shared_up_proj), linear_mlx(x, w.shared_gate)
    return kernels.experts_metal_routed(x, routing.ids, routing.weights, w, shared=shared, **tiles)


def experts_packed(
    x: mx.array, routing: Routing, w: Experts, tile: str = "best", residual: mx.array | None = None
) -> mx.array:
    """Our kernels for many rows: grouped on the device, packed products by matrix units, one sum at the end.

    A single row is gathered by MLX's product instead. The sum adds `residual` before it is rounded.

    Raises:
        KernelError: float32 activations, a packing the kernels do not read, or a tile that does not exist.
    """
    if x.shape[1] == 1:
        return _added(experts_mlx(x, routing, w), residual)
    logit = linear_mlx(x, w.shared_gate)
    call = experts_prefill.experts_packed
    return call(x, routing.ids, routing.weights, w, logit=logit, residual=residual, tile=tile)


def _added(x: mx.array, residual: mx.array | None) -> mx.array:
    return x if residual is None else residual + x


def _shared_settled(arguments: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """Streams are for passes of many rows: in a step of a few the waits between them cost more than they hide."""
    beside = settings.get("shared") == "beside" and arguments[0].shape[1] > DECODE_ROWS
    return {"shared": "beside"} if beside else {}


def experts_expanded_grouped(
    x: mx.array, routing: Routing, w: Experts, tile: str = "best", residual: mx.array | None = None
) -> mx.array:
    """As `experts_packed`, with the routed stacks expanded into arrays once per use, which the same kernels then read.

    Raises:
        KernelError: as `experts_packed`.
    """
    if x.shape[1] == 1:
        return _added(experts_expanded(x, routing, w), residual)
    gate, up, down = (Matrix(m.dense(x.dtype)) for m in (w.gate_proj, w.up_proj, w.down_proj))
    expanded = dataclasses.replace(w, gate_proj=gate, up_proj=up, down_proj=down)
    return experts_packed(x, routing, expanded, tile, residual)


def _settled(arguments: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """The tile that `experts_packed` is to run with; none for a single row."""
    x, routing, w = arguments
    if x.shape[1] == 1:
        return {}
    wanted = settings.get("tile", "best")
    return {"tile": experts_prefill.tile_for_experts(wanted, routing.ids.size, w.gate_proj.shape[0])}


def _several_rows(case: Case | None, device: str) -> str | None:
    if case is not None and case["rows"] == 1:
        return "a single row is gathered by MLX's product"
    return experts_prefill.supports(case, device)


def _one(w: Matrix, expert: int) -> Matrix:
    pick = lambda a: None if a is None else a[expert]  # noqa: E731
    return Matrix(w.weight[expert], pick(w.scales), pick(w.biases), w.bits, w.group_size)


def experts_reference(x: mx.array, routing: Routing, w: Experts) -> mx.array:
    """Every expert that any row chose, on every row in float32, masked by the routing: slow, and hard to get wrong."""
    wide = x.astype(mx.float32)[0]
    total = mx.zeros_like(wide)
    weights = routing.weights.astype(mx.float32)
    for expert in np.unique(np.array(routing.ids)).tolist():
        share = mx.where(routing.ids == expert, weights, 0).sum(axis=-1, keepdims=True)
        gate, up, down = (_one(m, expert) for m in (w.gate_proj, w.up_proj, w.down_proj))
        hidden = swiglu(linear_reference(wide, gate), linear_reference(wide, up))
        total = total + share * linear_reference(hidden, down)
    return (total[None] + shared_expert(wide[None], w, linear_reference)).astype(x.dtype)


def _inputs(case: Case, dtype: mx.Dtype, seed: int) -> tuple[mx.array, Routing, Experts]:
    hidden, wide, experts, rows = case["hidden"], case["wide"], case["experts"], case["rows"]
    x = mx.random.normal((1, rows, hidden), key=mx.random.key(seed)).astype(dtype)
    logits = mx.random.normal((rows, experts), key=mx.random.key(seed + 1))
    if case.sizes.get("one"):
        # All rows choose the same experts; the others get no row at all.
        logits = mx.broadcast_to(logits[:1], logits.shape)
    routing = route_reference(logits, case["k"], True)
    routing = Routing(routing.ids, routing.weights.astype(dtype))
    shapes = [(experts, hidden), (experts, wide, hidden), (experts, wide, hidden), (experts, hidden, wide)]
    shapes += [(wide, hidden), (wide, hidden), (hidden, wide), (1, hidden)]
    bits = [8, 4, 4, 4, 4, 4, 4, 8]
    made = [packed(seed + 2 + i, s, dtype, b) for i, (s, b) in enumerate(zip(shapes, bits, strict=True))]
    return x, routing, Experts(*made)


def _case(rows: int, hidden: int, wide: int, experts: int, k: int, one: int = 0) -> Case:
    sizes = {"rows": rows, "hidden": hidden, "wide": wide, "experts": experts, "k": k, "one": one}
    return Case(f"{rows}x{hidden}x{wide}e{experts}k{k}{'one' if one else ''}", sizes)


def _least_bytes(c: Case) -> int:
    touched = c["experts"] * (1 - (1 - c["k"] / c["experts"]) ** c["rows"])
    per_expert = 3 * c["hidden"] * c["wide"] * (4 / 8 + 4 / GROUP_SIZE)
    return int((touched + 1) * per_expert) + 4 * c["rows"] * c["hidden"]


EXPERTS = declare(
    Op(
        name="experts",
        summary="routed experts (gate, up, SwiGLU, down), weighted sum, shared expert",
        variants={
            v.name: v
            for v in (
                Variant(
                    "reference",
                    experts_reference,
                    "every chosen expert on every row in float32, masked",
                    reads_host=True,
                ),
                Variant(
                    "mlx",
                    experts_mlx,
                    "mx.gather_qmm on packed weights, rows sorted by expert",
                    settings=("shared",),
                    settled=_shared_settled,
                ),
                Variant(
                    "expanded",
                    experts_expanded,
                    "stacks expanded into arrays, then mx.gather_mm",
                    settings=("shared",),
                    settled=_shared_settled,
                ),
                Variant(
                    "grouped",
                    experts_grouped,
                    "rows grouped on the host, one dense product per expert",
                    settings=("shared",),
                    settled=_shared_settled,
                    reads_host=True,
                ),
                Variant(
                    "metal",
                    experts_metal,
                    "our kernels: two launches, each expert's weights read once per row, one text for Metal and CUDA",
                    supports=kernels.supports,
                    space=kernels.SPACE,
                ),
                Variant(
                    "packed",
                    experts_packed,
                    "our kernels for many rows: grouped on the device, packed products by matrix units; one row as mlx",
                    supports=_several_rows,
                    adds=True,
                    tiles=tuple(experts_prefill.TILES),
                    settings=("tile",),
                    settled=_settled,
                ),
                Variant(
                    "expanded_grouped",
                    experts_expanded_grouped,
                    "stacks expanded into arrays, then the kernels of packed on those; one row as expanded",
                    supports=_several_rows,
                    adds=True,
                    tiles=tuple(experts_prefill.TILES),
                    settings=("tile",),
                    settled=_settled,
                ),
            )
        },
        cases=(
            _case(1, 256, 64, 32, 8),
            _case(3, 128, 192, 16, 2),
            _case(7, 256, 64, 32, 8),
            _case(37, 128, 64, 32, 8),
            # Not of 64 hidden: MLX 0.32.4's packed product is wrong there on CUDA (more than 8 rows, bfloat16, H200).
            _case(65, 128, 64, 8, 1),
            _case(40, 128, 64, 32, 8, one=1),
        ),
        inputs=_inputs,
        timing=geometry.experts,
        # See `linear` for the CPU. On CUDA MLX's sorted packed product stays under 5 TFLOP/s, its dense one not.
        order=same_order(("mlx",), cpu_prefill=("grouped",), cuda_prefill=("packed", "expanded", "mlx")),
        tolerance={"float32": 3e-5, "bfloat16": 2e-2, "float16": 4e-3},
        # MLX 0.32.4's gathered packed product gave wrong values for 7 rows of 8 experts there (bfloat16, H200).
        decode_rows={"cuda": 1},
        least_bytes=_least_bytes,
        least_flops=lambda c: 6 * c["rows"] * (c["k"] + 1) * c["hidden"] * c["wide"],
    )
)
