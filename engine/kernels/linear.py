"""Products of 1 to 8 rows with packed matrices, by our own kernels: the variants `metal` of `linear` and `head`.

`products_metal` takes what stands around a product in a decode step into the same launch: the norm or gate before it,
the residual after it, and other matrices of the same input. `head_metal` is the end of a step: final norm, `lm_head`
and the best token of each row in two launches, without logits unless they are asked for.

How a launch is laid out, from its sizes alone:

- template: `SPAN` lanes share an output, 32 where the shortest row of codes fills them, else 16 or 8; inputs wait in
  16 KiB of threadgroup memory at most, `STEPS` words of every lane (all of K up to 4096 for one row and 512 for eight).
- threadgroup: ``simdgroups`` × 32 threads, each simdgroup with ``outputs`` × 32 / SPAN outputs side by side.
- grid: one threadgroup for every block of outputs; `LOOP` blocks each once there are far more than a GPU can hold, so
  that the inputs are made ready less often.

A tile is ``outputs x simdgroups`` (`TILES`). ``best`` is a rule on the sizes. On an H200, as graphs of launches over a
whole model's weights, its choices took 8.6 us for the four projections into a Gated DeltaNet layer (the other tiles 9.1
to 11.2), 8.2 for those into attention (8.4 and 9.1), 5.3 and 4.8 for those out of them (5.8 and 5.2), 4.7 for router
and shared expert (5.0) and 86 for `lm_head` (90 to 112), each with its norm, gate and residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from engine.config import GROUP_SIZE
from engine.kernels import loader
from engine.kernels.loader import SIMD, KernelError, Launch
from engine.weights import Matrix

if TYPE_CHECKING:
    # The ops import their kernels, so at run time this must not import the ops.
    from engine.ops.registry import Case

TOPIC = "linear_decode"
ROWS = 8
"""Most rows of a launch."""
MATRICES = 4
"""Most matrices of a launch."""
HEAD = 128
"""Inputs that a `GatedNorm` normalises together."""
OUTPUTS = (1, 2, 4, 8)
SIMDGROUPS = (2, 4, 8)
TILES = tuple(f"{outputs}x{simdgroups}" for outputs in OUTPUTS for simdgroups in SIMDGROUPS)
FULL = 8192
"""Simdgroups beyond which a threadgroup works off several blocks."""
_WORD = 32  # 4-bit codes in 16 bytes
_WAITING = 4096  # inputs as float32: 16 KiB
_CHOOSE_SIMDGROUPS = 16


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS normalisation of the whole row: ``x · rsqrt(mean(x²) + eps) · gain``, gain ``[K]``."""

    gain: mx.array
    eps: float


@dataclass(frozen=True, eq=False)
class GatedNorm:
    """RMS normalisation of every 128 inputs, gain ``[128]``, times ``silu(z)``, z of the shape of `x`."""

    gain: mx.array
    z: mx.array
    eps: float


@dataclass(frozen=True, eq=False)
class Gate:
    """``x · sigmoid(gate)``, gate of the shape of `x`."""

    gate: mx.array


Prologue = Norm | GatedNorm | Gate


def supports(case: Case | None, device: str) -> str | None:
    """Needs a GPU."""
    return None if device in ("metal", "cuda") else "the kernel runs on Metal and CUDA, not on a CPU"


def _in_device_memory(array: mx.array) -> mx.array:
    """A view of at least 8 elements over the same memory: MLX gives smaller inputs in Metal's `constant` space."""
    return array if array.size >= 8 else mx.broadcast_to(array, (8, *array.shape[-2:]))


def _in_rows(array: mx.array) -> mx.array:
    """``[1, T, K]``; ``[1, T, heads, dim]`` only if there are several heads. A view is work for the host too."""
    return array.squeeze(2) if array.ndim == 4 and array.shape[2] == 1 else array


def _check(rows: int, width: int, matrices: Sequence[Matrix], dtype: mx.Dtype) -> None:
    if not 1 <= rows <= ROWS or not 1 <= len(matrices) <= MATRICES:
        raise KernelError(
            f"linear=metal takes 1 to {ROWS} rows and 1 to {MATRICES} matrices a launch, not {rows} and {len(matrices)}"
        )
    for w in matrices:
        if w.scales is None or w.biases is None or w.bits not in (4, 8) or w.group_size != GROUP_SIZE:
            raise KernelError(
                f"linear=metal multiplies matrices packed in 4 or 8 bits and groups of {GROUP_SIZE}; "
                "a dense one is a product of linear=mlx"
            )
        if w.weight.ndim != 2 or w.shape[1] != width:
            raise KernelError(f"linear=metal: a matrix {list(w.shape)} does not multiply {width} inputs")
        if not w.scales.dtype == w.biases.dtype == dtype:
            raise KernelError(f"linear=metal: scales of {w.scales.dtype}, not {dtype} like the other arrays")


def shape_of(rows: int, codes: Sequence[int], outputs: Sequence[int], tile: str) -> dict[str, int]:
    """How a launch is laid out; see the module.

    Args:
        rows: of the input. codes: 4-bit codes in a row of each matrix (K, or 2 K for 8 bits). outputs: of each.
        tile: one of `TILES`, or ``best``.

    Raises:
        KernelError: there is no such tile.
    """
    if tile != "best" and tile not in TILES:
        raise KernelError(f"linear=metal has no tile {tile}; there are {', '.join(TILES)}")
    # Powers of two, since the kernel divides by them and unrolls over them.
    waiting = _WAITING // (1 << (rows - 1).bit_length())
    span = next((s for s in (32, 16) if s * _WORD <= min(min(codes), waiting)), 8)
    needed = -(-max(codes) // (span * _WORD))
    steps = min(1 << (needed - 1).bit_length(), waiting // (span * _WORD))
    side_by_side = SIMD // span
    total = sum(outputs)
    if tile == "best":
        per_lane, simdgroups, loop = _best(rows, total, max(codes))
    else:
        (per_lane, simdgroups), loop = map(int, tile.split("x")), 1
    # Every output and row has a sum of its own in a lane's registers.
    per_lane = min(per_lane, max(1, 32 // (1 << (rows - 1).bit_length())))
    while total > 2 * loop * per_lane * side_by_side * FULL:
        loop *= 2
    return {"OUTPUTS": per_lane, "SIMDGROUPS": simdgroups, "SPAN": span, "STEPS": steps, "LOOP": loop}


def _best(rows: int, outputs: int, codes: int) -> tuple[int, int, int]:
    """Outputs a lane, simdgroups and blocks of a threadgroup, for so many outputs and 4-bit codes a row."""
    if outputs >= 65_536:
        return 8, 4, 4
    if outputs >= 8192:
        return 4, 4, 2
    if rows == 1 and codes >= 4096:
        # Few outputs of long rows: what is made ready of the inputs serves as many simdgroups as a threadgroup has.
        return 1, 16, 1
    return (2, 4, 1) if outputs >= 1024 else (1, 4, 1)


def _products(
    x: mx.array,
    matrices: Sequence[Matrix],
    prologue: Prologue | None,
    residual: mx.array | None,
    tile: str,
    out: mx.Dtype | None,
) -> mx.array:
    """The launch. `out` None: the best of each threadgroup, uint32 ``[T, threadgroups, 2]``, instead of products."""
    x = _in_rows(x)
    rows, width = x.shape[1], x.size // x.shape[1]
    dtype = matrices[0].scales.dtype if matrices and matrices[0].scales is not None else x.dtype
    _check(rows, width, matrices, dtype)
    number, gain, gate, eps = 0, None, None, 0.0
    if isinstance(prologue, Norm):
        number, gain, eps = 1, prologue.gain, prologue.eps
    elif isinstance(prologue, GatedNorm):
        number, gain, gate, eps = 2, prologue.gain, _in_rows(prologue.z), prologue.eps
        if width % HEAD:
            raise KernelError(f"linear=metal: a gated norm of heads of {HEAD} does not divide {width} inputs")
    elif isinstance(prologue, Gate):
        number, gate = 3, _in_rows(prologue.gate)
    if x.dtype not in (dtype, mx.float32) or any(a is not None and a.dtype != dtype for a in (gain, gate, residual)):
        raise KernelError(f"linear=metal: gain, gate and residual are {dtype} like the scales, x that or float32")
    if gain is not None and gain.shape != ((HEAD,) if number == 2 else (width,)):
        raise KernelError(f"linear=metal: a gain of shape {gain.shape} for {width} inputs")
    if gate is not None and (gate.shape[1] != rows or gate.size != rows * width or gate.shape[-1] % 8):
        raise KernelError(f"linear=metal: a gate of shape {gate.shape} for {rows} rows of {width} inputs")
    if residual is not None and (len(matrices) > 1 or residual.shape != (1, rows, matrices[0].shape[0])):
        raise KernelError("linear=metal adds a residual [1, T, outputs] to the product of one matrix")

    outputs = [w.shape[0] for w in matrices]
    layout = shape_of(rows, [w.weight.shape[1] * 8 for w in matrices], outputs, tile)
    share = layout["LOOP"] * layout["SIMDGROUPS"] * layout["OUTPUTS"] * (SIMD // layout["SPAN"])
    groups = sum(-(-n // share) for n in outputs)
    weights: list[mx.array] = []
    for w in matrices:
        assert w.scales is not None and w.biases is not None
        weights += [w.weight, _in_device_memory(w.scales), _in_device_memory(w.biases)]
    absent = {"gate": "x"} if gate is None else {}
    absent |= {name: "scales0" for name, given in (("gain", gain), ("residual", residual)) if given is None}
    for number_of in range(len(matrices), MATRICES):
        absent |= {f"{part}{number_of}": f"{part}0" for part in ("weight", "scales", "biases")}
    kernel = loader.load(TOPIC)["products"].without(**absent)
    (made,) = loader.launch(
        Launch(
            kernel,
            (
                x,
                *(given for given in (gate, gain) if given is not None),
                *(() if residual is None else (_in_device_memory(residual),)),
                *weights,
            ),
            kernel.arguments(
                T=dtype,
                X=x.dtype,
                O=out or mx.uint32,
                ROWS=rows,
                INPUTS=width,
                DIM=x.shape[-1],
                GATE_DIM=x.shape[-1] if gate is None else gate.shape[-1],
                MATRICES=len(matrices),
                PROLOGUE=number,
                EPS_BITS=loader.float_bits(eps),
                RESIDUAL=residual is not None,
                BEST=out is None,
                **layout,
            ),
            grid=(groups * layout["SIMDGROUPS"] * SIMD, 1, 1),
            threadgroup=(layout["SIMDGROUPS"] * SIMD, 1, 1),
            shapes=[(rows, groups, 2) if out is None else _laid_out(rows, outputs)],
            dtypes=[out or mx.uint32],
        )
    )
    return made


def _laid_out(rows: int, outputs: Sequence[int]) -> tuple[int, ...]:
    """Shape of what a launch leaves: matrix after matrix, so that one of them or one row needs no view to be seen."""
    return (1, rows, sum(outputs)) if rows == 1 or len(outputs) == 1 else (rows * sum(outputs),)


def products_metal(
    x: mx.array,
    matrices: Sequence[Matrix],
    *,
    prologue: Prologue | None = None,
    residual: mx.array | None = None,
    tile: str = "best",
    dtype: mx.Dtype | None = None,
) -> tuple[mx.array, ...]:
    """``prologue(x) · Wᵀ (+ residual)`` of 1 to 8 rows for 1 to 4 packed matrices, in one launch.

    The prologue and the sums are in float32 and rounded once, at the end. Each weight is read once for all rows.
    Nothing is copied: an input whose last axis is not dense gives NaN, and rows must start on 16 bytes.

    Args:
        x: ``[1, T, K]``, or by heads ``[1, T, heads, dim]`` as a part of a larger array may lie; K a multiple of 64.
            The type of the scales, or float32.
        matrices: ``[N, K]`` each, 4 or 8 bits in groups of 64, in any mixture.
        prologue: `Norm`, `GatedNorm`, `Gate` or None; its gate may come by heads too.
        residual: ``[1, T, N]``, with one matrix only.
        tile: one of `TILES`, or ``best``.
        dtype: of the results; the scales' if None.

    Returns:
        ``[1, T, N]`` for each matrix, dense parts of one array. Those whose ``T · N`` is no multiple of 8 come last in
        it, so that the others start on 16 bytes.

    Raises:
        KernelError: a dense matrix, sizes or types that do not fit, or a tile that does not exist.
    """
    rows = x.shape[1]
    order = sorted(range(len(matrices)), key=lambda i: rows * matrices[i].shape[0] % 8 != 0)
    given = [matrices[i] for i in order]
    out = dtype or (given[0].scales.dtype if given and given[0].scales is not None else x.dtype)
    made = _products(x, given, prologue, residual, tile, out)
    if len(given) == 1:
        return (made,)
    ends, total = [], 0
    for w in given:
        total += rows * w.shape[0]
        ends.append(total)
    parts = mx.split(made, ends[:-1], axis=-1)
    if rows > 1:
        parts = [part.reshape(1, rows, w.shape[0]) for part, w in zip(parts, given)]
    results = dict(zip(order, parts))
    return tuple(results[i] for i in range(len(matrices)))


def linear_metal(x: mx.array, w: Matrix, *, tile: str = "best") -> mx.array:
    """``x [1, T, K] · Wᵀ -> [1, T, N]``; more than 8 rows are taken 8 at a time.

    Raises:
        KernelError: as `products_metal`.
    """
    if x.shape[1] <= ROWS:
        return products_metal(x, (w,), tile=tile, dtype=x.dtype)[0]
    parts = mx.split(x, list(range(ROWS, x.shape[1], ROWS)), axis=1)
    return mx.concatenate([linear_metal(part, w, tile=tile) for part in parts], axis=1)


def _cut(w: Matrix, vocabulary: int) -> Matrix:
    """The first rows of a matrix, as views: the padded tail is not even read."""
    if w.shape[0] == vocabulary or w.scales is None or w.biases is None:
        return w
    return Matrix(w.weight[:vocabulary], w.scales[:vocabulary], w.biases[:vocabulary], w.bits, w.group_size)


def logits_metal(
    h: mx.array, gain: mx.array, eps: float, w: Matrix, vocabulary: int, *, tile: str = "best"
) -> mx.array:
    """Logits ``[1, T, vocabulary]`` in float32: the op `head`. More than 8 rows are taken 8 at a time.

    Raises:
        KernelError: as `products_metal`.
    """
    if h.shape[1] <= ROWS:
        cut = (_cut(w, vocabulary),)
        return products_metal(h, cut, prologue=Norm(gain, eps), tile=tile, dtype=mx.float32)[0]
    parts = mx.split(h, list(range(ROWS, h.shape[1], ROWS)), axis=1)
    return mx.concatenate([logits_metal(part, gain, eps, w, vocabulary, tile=tile) for part in parts], axis=1)


def head_metal(
    h: mx.array,
    gain: mx.array,
    eps: float,
    w: Matrix,
    vocabulary: int,
    *,
    logits: bool = False,
    tile: str = "best",
) -> tuple[mx.array, mx.array] | tuple[mx.array, mx.array, mx.array]:
    """Final norm, `lm_head` and the best token of each row, in two launches.

    Compared in float32. Of equal logits the lowest token wins, as `mx.argmax` has it. NaN counts as larger than every
    number: a row with NaN among its logits gives the first such token, and NaN as its logit.

    Args:
        h: ``[1, T, K]``, T from 1 to 8. gain, eps: of the final norm. w: ``[padded vocabulary, K]``, packed.
        vocabulary: tokens to choose from; what is past them in `w` is not read.
        logits: return them as well; without, they are never written.

    Returns:
        ``(tokens uint32 [1, T], their logits float32 [1, T])``, and all logits float32 ``[1, T, vocabulary]``.

    Raises:
        KernelError: as `products_metal`.
    """
    rows = h.shape[1]
    if logits:
        everything = logits_metal(h, gain, eps, w, vocabulary, tile=tile)
        tokens, best = _choose(everything.reshape(rows, vocabulary), pairs=False)
        return tokens, best, everything
    return _choose(_products(h, (_cut(w, vocabulary),), Norm(gain, eps), None, tile, None), pairs=True)


def _choose(values: mx.array, pairs: bool) -> tuple[mx.array, mx.array]:
    rows = values.shape[0]
    kernel = loader.load(TOPIC)["choose"]
    tokens, best = loader.launch(
        Launch(
            kernel,
            (values,),
            kernel.arguments(V=values.dtype, SIMDGROUPS=_CHOOSE_SIMDGROUPS, PAIRS=pairs),
            grid=(_CHOOSE_SIMDGROUPS * SIMD, rows, 1),
            threadgroup=(_CHOOSE_SIMDGROUPS * SIMD, 1, 1),
            shapes=[(rows,), (rows,)],
            dtypes=[mx.uint32, mx.float32],
        )
    )
    return tokens.reshape(1, rows), best.reshape(1, rows)
