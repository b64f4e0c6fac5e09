"""Products of many rows with packed weights: the variants `packed` of the ops `experts` and `linear`.

The routed experts of a chunk are three launches and one that adds them up, without a word from the host: `group` sorts
the chosen pairs by expert and lists tiles of rows, `gate_up` reads rows of the input by that list and leaves
``silu(gate x) · up x`` in its order, `down` stores each product at its pair's place, and `combine` weighs and adds
the places of a row. No float is added out of order, so a result repeats to the bit. What the sum costs is one write and
one read of ``rows · k · hidden`` numbers of 16 bits, about 6 % of the layer's time at 8192 rows on an H200 by bytes.

A grid has a threadgroup for every tile that there might be: ``rows · k / ROWS + experts``; those without rows leave.

A tile is ``rows`` or ``rows x columns`` (`TILES`). ``best`` follows the rows that an expert gets on average: those of
32 rows up to 32, of 64 above. On an H200 (256 experts of 512, 8 chosen, hidden size 2048, bfloat16, both products of
a chunk, routing uniform or with one expert at 8 times its share alike) the winners and their next were, at 512 tokens,
32x256 0.242 ms (106 TFLOP/s), 32 0.257, 16 0.267; at 2048, 64 0.540 (191), 32 0.569, 64x256 0.645, 128 0.772; at
8192, 64 1.597 (258), 64x256 1.894, 128 1.909. For a dense matrix it is 64 as far as enough threadgroups are left to
fill a GPU: there 64 reached 187, 207 and 225 TFLOP/s at 512, 2048 and 8192 rows of 2048 x 8192, 128 at most 200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.config import GROUP_SIZE
from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch
from engine.weights import Experts, Matrix

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.ops.registry import Case

TOPIC = "experts_prefill"


@dataclass(frozen=True)
class Tile:
    """What a threadgroup multiplies.

    Attributes:
        rows: of the input.
        left: tiles of 16 rows of the weights that a simdgroup has, even.
        simdgroups: of a threadgroup.
        depth: inputs that are made ready together: 32, 64 or 128.
    """

    rows: int
    left: int
    simdgroups: int
    depth: int

    @property
    def columns(self) -> int:
        """Rows of the weights that a threadgroup multiplies."""
        return 16 * self.left * self.simdgroups


TILES = {
    "16": Tile(16, 2, 4, 128),
    "16x256": Tile(16, 2, 8, 128),
    "32": Tile(32, 2, 4, 128),
    "32x256": Tile(32, 2, 8, 128),
    "64": Tile(64, 2, 4, 64),
    "64x256": Tile(64, 2, 8, 64),
    "128": Tile(128, 2, 8, 32),
    "128x128": Tile(128, 2, 4, 32),
}
"""Tiles by name; a number alone is the usual one for so many rows."""
TYPES = (mx.bfloat16, mx.float16)
MOST_TILES = 2**24
"""Tiles of a launch: with 512 threadgroups of 256 threads each, MLX's grid would no longer fit 32 bits."""
# Threadgroups that leave no core of a large GPU without work.
_BUSY = 132
_GROUP_SIMDGROUPS = 16
_COMBINE_THREADS = 256


def supports(case: Case | None, device: str) -> str | None:
    """Needs a GPU."""
    return None if device in ("metal", "cuda") else "the kernel runs on Metal and CUDA, not on a CPU"


def tile_for_experts(wanted: str, pairs: int, experts: int) -> str:
    """The tile that runs: `wanted`, or for ``best`` by the rows an expert gets on average (see the module).

    Raises:
        KernelError: there is no such tile.
    """
    if wanted == "best":
        return "32x256" if pairs <= 32 * experts else "64"
    _tile(wanted)
    return wanted


def tile_for_rows(wanted: str, rows: int, outputs: int) -> str:
    """The tile of a product without grouping: of up to 64 rows, the most that are there and leave a GPU busy.

    Raises:
        KernelError: there is no such tile.
    """
    if wanted != "best":
        _tile(wanted)
        return wanted
    for name in ("64", "32", "16"):
        tile = TILES[name]
        if rows > tile.rows // 2 and -(-rows // tile.rows) * -(-outputs // tile.columns) >= _BUSY:
            return name
    return str(next((tile for tile in (16, 32, 64) if rows <= tile), 32))


def _tile(name: str) -> Tile:
    if name not in TILES:
        raise KernelError(f"no tile {name}; there are {', '.join(TILES)}")
    return TILES[name]


def experts_packed(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    w: Experts,
    *,
    logit: mx.array,
    residual: mx.array | None = None,
    tile: str = "best",
) -> mx.array:
    """Routed experts, their weighted sum and the shared expert: ``[1, rows, hidden]``.

    Weights are expanded to the type of `x`, products summed in float32, and hidden rows and each expert's output
    rounded to it; the sum over the experts is in float32. Rows of `x` must start on 16 bytes and be dense along their
    last axis: otherwise what comes out begins with NaN.

    Args:
        x: ``[1, rows, hidden]`` of bfloat16 or float16.
        ids: uint32 ``[rows, k]``; weights: ``[rows, k]`` of any float type.
        w: 4- or 8-bit packed in groups of 64 with scales of the type of `x`, or dense of that type.
        logit: ``[1, rows, 1]``, of the shared expert's gate.
        residual: ``[1, rows, hidden]``, added to the output.
        tile: one of `TILES`, or ``best``.

    Raises:
        KernelError: another packing or type, sizes that do not fit together, or a tile that does not exist.
    """
    rows, k = ids.shape
    experts = w.gate_proj.shape[0]
    if x.shape[1] != rows or weights.shape != ids.shape or logit.shape != (1, rows, 1):
        raise KernelError(f"experts=packed: x {list(x.shape)}, ids {list(ids.shape)} and weights do not fit together")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise KernelError(f"experts=packed takes a residual {list(x.shape)} of {x.dtype}, not {list(residual.shape)}")
    name = tile_for_experts(tile, rows * k, experts)
    pairs, tiles = group(ids, experts, _tile(name).rows)
    hidden = _products(x, w.gate_proj, w.up_proj, name, (pairs, tiles), k)
    routed = _products(hidden, w.down_proj, None, name, (pairs, tiles), 1)
    wide = tile_for_rows("best", rows, 2 * w.shared_gate_proj.shape[0])
    shared = _products(x, w.shared_gate_proj, w.shared_up_proj, wide)
    shared = linear_packed(shared, w.shared_down_proj)
    return _combine(routed.reshape(rows, k, -1), weights, shared, logit, residual)


def group(ids: mx.array, experts: int, rows: int) -> tuple[mx.array, mx.array]:
    """Sort pairs of a row and an expert by expert, on the device, equal ones in order.

    Args:
        ids: uint32 ``[T, k]``, each less than `experts`. rows: most pairs of a tile.

    Returns:
        Numbers ``row · k + place`` uint32 ``[T · k]``, and tiles uint32 ``[most, 4]``: expert, first place in the
        former, pairs (0: none), nothing.
    """
    total = ids.shape[0] * ids.shape[1]
    kernel = loader.load(TOPIC)["group"]
    threads = _GROUP_SIMDGROUPS * SIMD
    pairs, tiles = loader.launch(
        Launch(
            kernel,
            (ids,),
            kernel.arguments(EXPERTS=experts, CHOSEN=ids.shape[1], ROWS=rows, SIMDGROUPS=_GROUP_SIMDGROUPS),
            grid=(experts * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            shapes=[(total,), (total // rows + experts, 4)],
            dtypes=[mx.uint32, mx.uint32],
        )
    )
    return pairs, tiles


def linear_packed(x: mx.array, w: Matrix, *, tile: str = "best") -> mx.array:
    """``x [1, T, K] · Wᵀ -> [1, T, N]`` in the type of `x`; see `experts_packed` for how it is rounded.

    Args:
        x: bfloat16 or float16, its last axis dense and its rows on 16 bytes.
        w: ``[N, K]``, K a multiple of 64: 4 or 8 bits in groups of 64, or dense of the type of `x`.
        tile: one of `TILES`, or ``best``.

    Raises:
        KernelError: another packing or type, sizes that do not fit, or a tile that does not exist.
    """
    return _products(x, w, None, tile_for_rows(tile, x.shape[1], w.shape[-2]))


def gated_packed(x: mx.array, gate: Matrix, up: Matrix, *, tile: str = "best") -> mx.array:
    """``silu(gate x) · up x``, as `linear_packed`; both matrices of one shape and packing."""
    return _products(x, gate, up, tile_for_rows(tile, x.shape[1], 2 * gate.shape[-2]))


def _parts(w: Matrix, dtype: mx.Dtype, inputs: int) -> tuple[mx.array, mx.array, mx.array]:
    """weight ``[experts, out, words]``, scales and biases in device memory.

    Raises:
        KernelError: the matrix is packed otherwise, of another type, or does not take `inputs`.
    """
    if w.shape[-1] != inputs or inputs % GROUP_SIZE:
        raise KernelError(f"packed products: a matrix {list(w.shape)} does not multiply {inputs} inputs")
    weight = w.weight if w.weight.ndim == 3 else mx.expand_dims(w.weight, 0)
    if w.scales is None or w.biases is None:
        if w.weight.dtype != dtype:
            raise KernelError(f"packed products take dense weights of the activations' type {dtype}")
        return weight, weight, weight
    if w.bits not in (4, 8) or w.group_size != GROUP_SIZE:
        raise KernelError(f"packed products take 4 or 8 bits in groups of {GROUP_SIZE}, not {w.bits} in {w.group_size}")
    if not w.scales.dtype == w.biases.dtype == dtype:
        raise KernelError(f"packed products take scales of the activations' type {dtype}, not {w.scales.dtype}")
    few = w.scales.size < 8  # MLX would put them into Metal's `constant` space
    scales, biases = (mx.broadcast_to(a, (8, *a.shape)) if few else a for a in (w.scales, w.biases))
    return weight, scales, biases


def _products(
    x: mx.array,
    w: Matrix,
    other: Matrix | None,
    tile: str,
    groups: tuple[mx.array, mx.array] | None = None,
    chosen: int = 1,
) -> mx.array:
    """The launch.

    Args:
        other: the matrix whose products those of `w` gate, or None.
        groups: pairs and tiles of `group` for this tile, or None for a matrix without experts. With `other` the rows of
            `x` are read by them, without it the results are stored by them.
        chosen: experts of a row of `x`.

    Returns:
        ``[1, rows or pairs, out]``.
    """
    if x.dtype not in TYPES:
        raise KernelError(f"packed products take bfloat16 or float16 activations, not {x.dtype}")
    layout = _tile(tile)
    weights = _parts(w, x.dtype, x.shape[2])
    others = weights if other is None else _parts(other, x.dtype, x.shape[2])
    if other is not None and (other.shape != w.shape or other.bits != w.bits):
        raise KernelError("packed products gate one matrix by another of the same shape and packing")
    outputs = weights[0].shape[1]
    columns = layout.columns if other is None else layout.columns // 2
    if groups is None:
        tiles, rows = -(-x.shape[1] // layout.rows), x.shape[1]
    else:
        tiles, rows = groups[1].shape[0], groups[0].shape[0]
    if tiles > MOST_TILES:
        raise KernelError(f"packed products take at most {MOST_TILES} tiles of rows a launch, not {tiles}")
    pairs, listed = groups or (x, x)
    kernel = loader.load(TOPIC)["products"]
    threads = layout.simdgroups * SIMD
    (out,) = loader.launch(
        Launch(
            kernel,
            (x, pairs, listed, *weights, *others),
            kernel.arguments(
                T=x.dtype,
                BITS=w.bits or 16,
                CHOSEN=chosen,
                ROWS=layout.rows,
                LEFT=layout.left,
                SIMDGROUPS=layout.simdgroups,
                DEPTH=layout.depth,
                GROUPED=groups is not None,
                GATHER=groups is not None and other is not None,
                SCATTER=groups is not None and other is None,
                GATED=other is not None,
            ),
            grid=(tiles * -(-outputs // columns) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            shapes=[(1, rows, outputs)],
            dtypes=[x.dtype],
        )
    )
    return out


def _combine(
    routed: mx.array, weights: mx.array, shared: mx.array, logit: mx.array, residual: mx.array | None
) -> mx.array:
    """``[1, rows, hidden]`` from every place's product ``[rows, k, hidden]``."""
    rows, k, hidden = routed.shape
    kernel = loader.load(TOPIC)["combine"]
    threads = -(-rows * hidden // 8 // _COMBINE_THREADS) * _COMBINE_THREADS
    (out,) = loader.launch(
        Launch(
            kernel,
            (routed, weights, shared, logit, shared if residual is None else residual),
            kernel.arguments(T=routed.dtype, CHOSEN=k, RESIDUAL=residual is not None),
            grid=(threads, 1, 1),
            threadgroup=(_COMBINE_THREADS, 1, 1),
            shapes=[(1, rows, hidden)],
            dtypes=[routed.dtype],
        )
    )
    return out
