"""The mixture of experts by our own kernels: the op's variant `metal`, and the form fused into a decode step.

Two launches: `up` from rows and router logits to what goes into every chosen expert's `down_proj`, `down` from there to
the layer's output. Weights are read once per row and chosen expert, so this is the form for a few rows; with many, an
expert's weights are read again for every row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from engine.config import GROUP_SIZE
from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.ops.registry import Case
    from engine.weights import Experts, Matrix

TOPIC = "experts_decode"
BITS = 4
UP_TILES = ((1, 4), (2, 4), (4, 4), (1, 8), (2, 8), (4, 8))
"""(columns a lane works on, simdgroups of a threadgroup) of the launch `up`; a lane reads two matrices."""
DOWN_TILES = ((1, 1), (2, 1), (1, 3), (2, 3), (4, 3), (2, 9), (4, 9), (8, 9))
"""(columns a lane works on, simdgroups that share the experts) of `down`; 3 and 9 divide 8 experts and one shared."""
UP_TILE, DOWN_TILE = (2, 4), (4, 9)
SPACE = (
    *({"up_tile": tile} for tile in UP_TILES if tile != UP_TILE),
    *({"down_tile": tile} for tile in DOWN_TILES if tile != DOWN_TILE),
)
"""What the tuner tries: one launch's tile at a time, the other's as it is."""
MOST_CHOSEN = SIMD
"""A lane keeps one chosen expert."""
MOST_EXPERTS = 8192
"""An expert's number has to fit beside a 16-bit logit."""
_BLOCK = 32
"""Inputs of one 16-byte word of codes."""


def supports(case: Case | None, device: str) -> str | None:
    """Needs a GPU."""
    return None if device in ("metal", "cuda") else "the kernel runs on Metal and CUDA, not on a CPU"


def lanes_of(inputs: int) -> tuple[int, int]:
    """How many lanes share a row of `inputs` codes, a power of two up to 32, and how many words each reads."""
    blocks = inputs // _BLOCK
    lanes = min(1 << (blocks - 1).bit_length(), SIMD)
    return lanes, -(-blocks // lanes)


def experts_metal(
    x: mx.array,
    logits: mx.array,
    w: Experts,
    k: int,
    renormalise: bool,
    *,
    shared: tuple[mx.array, mx.array, mx.array],
    gain: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    up_tile: tuple[int, int] = UP_TILE,
    down_tile: tuple[int, int] = DOWN_TILE,
) -> mx.array:
    """Routing, routed experts, their weighted sum and the shared expert, in two launches: ``[1, rows, hidden]``.

    The k experts of largest logit are chosen, the highest of equal ones; a product is summed in float32, and so is the
    output up to its one rounding. Products see `x`, normed or not, rounded to its type. Rows of `x` and of `shared`
    must start on 16 bytes and be dense along their last axis: otherwise the output is NaN, or its first element.

    Args:
        x: ``[1, rows, hidden]``, normed, or the residual stream if `gain` is given.
        logits: ``[rows, experts]`` of any float type, or ``[1, rows, experts]``.
        w: packed with 4 bits in groups of 64, scales of the type of `x`; the router and the shared expert's first
            products are not read.
        renormalise: weights are softmax probabilities over the chosen, not over all experts.
        shared: ``gate`` and ``up`` products of the shared expert, ``[1, rows, wide]`` each, and its gate's logit
            ``[1, rows, 1]``.
        gain: ``[hidden]``: `x` is RMS-normalised first, with `eps`.
        residual: ``[1, rows, hidden]``, added to the output.
        up_tile: one of `UP_TILES`; down_tile: one of `DOWN_TILES`.

    Raises:
        KernelError: another packing or type, sizes that do not fit together, or a tile that does not exist.
    """
    if logits.shape[-2:] != (x.shape[1], w.gate_proj.shape[0]) or logits.size != logits.shape[-2] * logits.shape[-1]:
        raise KernelError(f"experts=metal takes logits [rows, experts], not {list(logits.shape)}")
    hidden, ids, weights = _up(x, logits, w, k, up_tile, False, renormalise, gain, eps)
    return _down(hidden, ids, weights, w, shared, residual, down_tile)


def experts_metal_routed(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    w: Experts,
    *,
    shared: tuple[mx.array, mx.array, mx.array],
    up_tile: tuple[int, int] = UP_TILE,
    down_tile: tuple[int, int] = DOWN_TILE,
) -> mx.array:
    """As `experts_metal`, with the routing given: ids uint32 and weights of any float type, ``[rows, k]``.

    Raises:
        KernelError: as `experts_metal`.
    """
    hidden, *_ = _up(x, ids, w, ids.shape[1], up_tile, True, True, None, 0.0)
    return _down(hidden, ids, weights, w, shared, None, down_tile)


def _staged(dtype: mx.Dtype) -> mx.Dtype:
    """What a product's inputs wait in: float16 has too few exponents for what `stage` divides them by."""
    return mx.bfloat16 if dtype == mx.bfloat16 else mx.float32


def _check(name: str, w: Matrix, dtype: mx.Dtype) -> None:
    """Refuse a weight that the kernels do not read.

    Raises:
        KernelError: naming it.
    """
    if w.bits != BITS or w.group_size != GROUP_SIZE or w.scales is None or w.biases is None:
        raise KernelError(
            f"experts=metal takes {BITS}-bit weights in groups of {GROUP_SIZE}; {name} is packed otherwise"
        )
    if not w.scales.dtype == w.biases.dtype == dtype:
        raise KernelError(f"experts=metal takes scales of the activations' type {dtype}; {name} has {w.scales.dtype}")


def _up(
    x: mx.array,
    routes: mx.array,
    w: Experts,
    k: int,
    tile: tuple[int, int],
    routed: bool,
    renormalise: bool,
    gain: mx.array | None,
    eps: float,
) -> list[mx.array]:
    """hidden ``[rows, k, wide]``, ids and weights ``[rows, k]`` (one element if `routed`)."""
    experts, wide, inputs = w.gate_proj.shape
    rows = x.shape[1]
    if tile not in UP_TILES:
        raise KernelError(f"experts=metal has no up_tile {tile}; there are {UP_TILES}")
    if not 0 < k <= min(experts, MOST_CHOSEN) or experts > MOST_EXPERTS:
        raise KernelError(f"experts=metal takes up to {MOST_CHOSEN} of {MOST_EXPERTS} experts, not {k} of {experts}")
    _check("gate_proj", w.gate_proj, x.dtype)
    _check("up_proj", w.up_proj, x.dtype)
    if x.shape[2] != inputs or w.up_proj.shape != w.gate_proj.shape:
        raise KernelError(f"experts=metal: x {list(x.shape)} does not fit gate_proj {list(w.gate_proj.shape)}")
    if gain is not None and (gain.dtype != x.dtype or gain.shape != (inputs,)):
        raise KernelError(f"experts=metal takes a gain [{inputs}] of {x.dtype}, not {list(gain.shape)} of {gain.dtype}")
    lanes, steps = lanes_of(inputs)
    columns, simdgroups = tile
    per_threadgroup = columns * simdgroups * SIMD // lanes
    kernel = loader.load(TOPIC)["up"].without(**({"gain": "gate_scales"} if gain is None else {}))
    routing = (1, 1) if routed else (rows, k)
    return loader.launch(
        Launch(
            kernel,
            (
                x,
                *(() if gain is None else (gain,)),
                routes,
                *_parts(w.gate_proj),
                *_parts(w.up_proj),
            ),
            kernel.arguments(
                T=x.dtype,
                X=_staged(x.dtype),
                EXPERTS=experts,
                LANES=lanes,
                STEPS=steps,
                ROWS=columns,
                SIMDGROUPS=simdgroups,
                ROUTED=routed,
                NARROW=not routed and routes.dtype.size == 2,
                RENORMALISE=renormalise,
                NORM=gain is not None,
                ROWS_AXIS=routes.ndim - 2,
                EPS_BITS=loader.float_bits(eps if gain is not None else 0.0),
            ),
            grid=(-(-wide // per_threadgroup) * simdgroups * SIMD, k, rows),
            threadgroup=(simdgroups * SIMD, 1, 1),
            shapes=[(rows, k, wide), routing, routing],
            dtypes=[x.dtype, mx.uint32, mx.float32],
        )
    )


def _down(
    hidden: mx.array,
    ids: mx.array,
    weights: mx.array,
    w: Experts,
    shared: tuple[mx.array, mx.array, mx.array],
    residual: mx.array | None,
    tile: tuple[int, int],
) -> mx.array:
    """``[1, rows, hidden]`` from what `up` left."""
    rows, k, wide = hidden.shape
    _, outputs, inputs = w.down_proj.shape
    if tile not in DOWN_TILES:
        raise KernelError(f"experts=metal has no down_tile {tile}; there are {DOWN_TILES}")
    _check("down_proj", w.down_proj, hidden.dtype)
    _check("shared_down_proj", w.shared_down_proj, hidden.dtype)
    gate, up, logit = shared
    fits = gate.shape == up.shape == (1, rows, wide) and logit.shape == (1, rows, 1) and inputs == wide
    if not fits or w.shared_down_proj.shape != (outputs, wide) or not gate.dtype == up.dtype == hidden.dtype:
        raise KernelError(f"experts=metal takes a shared expert of {wide} columns and {hidden.dtype}, as the routed")
    if residual is not None and residual.shape != (1, rows, outputs):
        raise KernelError(f"experts=metal takes a residual [1, {rows}, {outputs}], not {list(residual.shape)}")
    lanes, steps = lanes_of(wide)
    columns, split = tile
    kernel = loader.load(TOPIC)["down"].without(**({"residual": "shared_gate"} if residual is None else {}))
    (out,) = loader.launch(
        Launch(
            kernel,
            (
                hidden,
                ids,
                weights,
                *_parts(w.down_proj),
                gate,
                up,
                logit,
                *_parts(w.shared_down_proj),
                *(() if residual is None else (residual,)),
            ),
            kernel.arguments(
                T=hidden.dtype,
                X=_staged(hidden.dtype),
                CHOSEN=k,
                LANES=lanes,
                STEPS=steps,
                ROWS=columns,
                SPLIT=split,
                RESIDUAL=residual is not None,
            ),
            grid=(-(-outputs // (columns * SIMD // lanes)) * split * SIMD, rows, 1),
            threadgroup=(split * SIMD, 1, 1),
            shapes=[(1, rows, outputs)],
            dtypes=[hidden.dtype],
        )
    )
    return out


def _parts(w: Matrix) -> tuple[mx.array, mx.array, mx.array]:
    assert w.scales is not None and w.biases is not None
    return w.weight, w.scales, w.biases
