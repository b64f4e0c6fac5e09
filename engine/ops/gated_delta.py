"""`gated_delta`: the core of a Gated DeltaNet layer between its input and output projections.

Arguments, ``T`` new rows:
    qkv ``[1, T, conv_dim]`` before the convolution, laid out queries | keys | values;
    z ``[1, T, value_dim]`` output gate; b, a ``[1, T, value heads]``; conv the last three rows of `qkv`
    before this call, oldest first, each ``[1, 1, conv_dim]``; state float32 ``[1, value heads, value dim, key dim]``;
    w the layer's weights; sizes ``(key heads, key dim, value heads, value dim)``.
Returns ``(out [1, T, value_dim], new conv, new state)``.

Per value head h, which reads key head ``h // (value heads / key heads)``, with
``g = exp(-exp(A_log) softplus(a + dt_bias))`` and ``β = sigmoid(b)`` (Gated Delta Networks, Yang et al.,
arXiv:2412.06464):
    ``S ← g S;  d = β (v - S k);  S ← S + d kᵀ;  o = S q``
then ``RMSNorm(o) · silu(z)``. Queries and keys are l2-normalised with ε = 1e-6 on the sum of squares, queries scaled
by ``key dim ** -0.5``. The state stays in float32: rounding it to 16 bits destroys long outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import mlx.core as mx

from engine.device import device_kind
from engine.kernels import gated_delta as kernels
from engine.kernels import gated_delta_prefill as prefill
from engine.ops import geometry
from engine.ops.registry import DECODE_ROWS, Case, Op, Variant, declare, same_order
from engine.weights import GatedDelta, Matrix

Sizes = tuple[int, int, int, int]
Rows = list[mx.array]
Result = tuple[mx.array, Rows, mx.array]
# (q, k [1, T, key heads, dk], v [1, T, value heads, dv], log g, β float32 [1, T, value heads], state) -> (o, state)
Core = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
# One token: q, k ``[1, H, dk]``, v ``[1, H, dv]``, g, β ``[1, H]``, state -> (o, state)
Step = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]

CHUNK = 64
"""Rows that the chunked form handles as one block; the inverse's depth is log2 of it."""


def _convolve(qkv: mx.array, conv: Rows, w: GatedDelta) -> tuple[mx.array, Rows]:
    """Causal depthwise convolution and SiLU, float32: ``([1, T, conv_dim], new conv rows)``."""
    taps, rows = w.conv.shape[1], qkv.shape[1]
    # Slices, not integer indices: those are gathers, a launch each.
    kernel = mx.split(w.conv.squeeze(-1).T, taps)
    if rows == 1:
        # Each kept row is an array of its own: moving on by one row copies nothing.
        parts = [*conv, qkv]
        kept = [*conv[1:], qkv]
    else:
        window = mx.concatenate([*conv, qkv], axis=1)
        parts = [window[:, tap : tap + rows] for tap in range(taps)]
        # Copies: a slice would keep the whole window alive in the cache.
        kept = [mx.contiguous(window[:, -n : window.shape[1] - n + 1]) for n in range(taps - 1, 0, -1)]
    mixed = parts[0].astype(mx.float32) * kernel[0]
    for tap in range(1, taps):
        mixed = mixed + parts[tap].astype(mx.float32) * kernel[tap]
    return mixed * mx.sigmoid(mixed), kept


def _split(mixed: mx.array, sizes: Sizes) -> tuple[mx.array, mx.array, mx.array]:
    """Unit queries (scaled by ``key dim ** -0.5``), keys ``[1, T, key heads, dk]``, values ``[1, T, value heads, dv]``.

    l2 normalisation with ε on the sum of squares is RMS normalisation with ε / dim, times ``dim ** -0.5``.
    """
    key_heads, dim, value_heads, value_dim = sizes
    width, rows = key_heads * dim, mixed.shape[1]
    q, k, v = mx.split(mixed, [width, 2 * width], axis=-1)
    q = mx.fast.rms_norm(q.reshape(1, rows, key_heads, dim), _gain(dim, 1 / dim), 1e-6 / dim)
    k = mx.fast.rms_norm(k.reshape(1, rows, key_heads, dim), _gain(dim, dim**-0.5), 1e-6 / dim)
    return q, k, v.reshape(1, rows, value_heads, value_dim)


@lru_cache(maxsize=16)
def _gain(dim: int, value: float) -> mx.array:
    """A constant gain ``[dim]`` for a norm: the scale that would otherwise be a launch of its own. Kept evaluated."""
    made = mx.full((dim,), value, dtype=mx.float32)
    mx.eval(made)
    return made


def _unit(x: mx.array) -> mx.array:
    """l2-normalised over the last axis, written out: the reference does not lean on a fast op."""
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _log_decay(a: mx.array, w: GatedDelta) -> mx.array:
    """``log g`` in float32; kept as a logarithm so that an underflowing g never meets log()."""
    raised = a.astype(mx.float32) + w.dt_bias.astype(mx.float32)
    return -mx.exp(w.a_log) * mx.logaddexp(raised, mx.array(0.0))


def _gated_norm(o: mx.array, z: mx.array, w: GatedDelta, eps: float = 1e-6) -> mx.array:
    """``RMSNorm(o) · silu(z)``, normalised per head: ``[1, T, heads, dv] -> [1, T, value_dim]``."""
    normed = mx.fast.rms_norm(o.astype(mx.float32), None, eps) * w.norm
    gate = z.reshape(o.shape).astype(mx.float32)
    return (normed * gate * mx.sigmoid(gate)).astype(z.dtype).reshape(z.shape)


def _layer(core: Core) -> Callable[..., Result]:
    """Wrap a recurrence with convolution, normalisation, gates and the gated norm."""

    def run(
        qkv: mx.array,
        z: mx.array,
        b: mx.array,
        a: mx.array,
        conv: Rows,
        state: mx.array,
        w: GatedDelta,
        sizes: Sizes,
    ) -> Result:
        mixed, conv = _convolve(qkv, conv, w)
        q, k, v = _split(mixed, sizes)
        beta = mx.sigmoid(b.astype(mx.float32))
        o, state = core(q, k, v, _log_decay(a, w), beta, state)
        return _gated_norm(o, z, w), conv, state

    return run


def gated_delta_reference(
    qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, conv: Rows, state: mx.array, w: GatedDelta, sizes: Sizes
) -> Result:
    """Everything in float32, the recurrence token by token as written above; only the result is rounded."""
    mixed, conv_out = _convolve(qkv.astype(mx.float32), [row.astype(mx.float32) for row in conv], w)
    key_heads, dim, value_heads, value_dim = sizes
    q, k, v = mx.split(mixed, [key_heads * dim, 2 * key_heads * dim], axis=-1)
    q = _unit(q.reshape(1, -1, key_heads, dim)) * dim**-0.5
    k = _unit(k.reshape(1, -1, key_heads, dim))
    v = v.reshape(1, -1, value_heads, value_dim)
    o, state = _recurrence(q, k, v, _log_decay(a, w), mx.sigmoid(b.astype(mx.float32)), state)
    normed = o * mx.rsqrt((o * o).mean(axis=-1, keepdims=True) + 1e-6) * w.norm.astype(mx.float32)
    gate = z.reshape(o.shape).astype(mx.float32)
    out = (normed * gate * mx.sigmoid(gate)).reshape(z.shape)
    return out.astype(z.dtype), [row.astype(qkv.dtype) for row in conv_out], state


def _step(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array):
    """One token: q, k ``[1, H, dk]``, v ``[1, H, dv]``, g, β ``[1, H]``; returns (o ``[1, H, dv]``, state)."""
    state = state * g[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None, :]).sum(axis=-1))
    state = state + delta[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(axis=-1), state


def _single(
    qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, conv: Rows, state: mx.array, w: GatedDelta, sizes: Sizes
) -> Result:
    """One token in few launches: two matrix-vector products around one elementwise update.

    ``S k`` is taken before the decay, which then needs no copy of S of its own. Value heads stay grouped by key head,
    so no key is repeated. Constant factors of q and k are moved to where a multiplication is free: k's into the
    update, q's into the ε of the norm that follows, which is blind to scale but for it.
    """
    key_heads, dim, value_heads, value_dim = sizes
    group, width = value_heads // key_heads, key_heads * dim
    mixed, conv = _convolve(qkv, conv, w)
    heads, v = mx.split(mixed, [2 * width], axis=-1)
    unit = mx.fast.rms_norm(heads.reshape(2, key_heads, dim), None, 1e-6 / dim)  # of length dim ** 0.5
    q, k = (x.reshape(key_heads, dim, 1) for x in mx.split(unit, 2))
    each = (key_heads, group, 1, 1)
    # Reshaped after, not before: MLX fuses at most eleven operations deep, and this would be cut in four.
    g = mx.exp(_log_decay(a, w)).reshape(each)
    beta = mx.sigmoid(b.reshape(each).astype(mx.float32))
    seen = (state.reshape(key_heads, -1, dim) @ k).reshape(key_heads, group, value_dim, 1) * dim**-0.5
    delta = beta * (v.reshape(key_heads, group, value_dim, 1) - g * seen)
    updated = g * state.reshape(key_heads, group, value_dim, dim) + delta * (
        k.reshape(key_heads, 1, 1, dim) * dim**-0.5
    )
    out = (updated.reshape(key_heads, -1, dim) @ q).reshape(1, 1, value_heads, value_dim)  # dim times the read-out
    return _gated_norm(out, z, w, 1e-6 * dim**2), conv, updated.reshape(state.shape)


@cache
def _compiled_step() -> Step:
    """`_step` in six launches instead of nine: on a GPU each token of each layer costs the host that many."""
    return mx.compile(_step)


def _stepwise(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array):
    """`_recurrence` as a variant."""
    return _recurrence(q, k, v, log_g, beta, state, _step if device_kind() == "cpu" else _compiled_step())


def _recurrence(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array, step: Step = _step
):
    repeat = v.shape[2] // q.shape[2]
    q, k = mx.repeat(q, repeat, axis=2), mx.repeat(k, repeat, axis=2)
    v, g = v.astype(mx.float32), mx.exp(log_g)
    out = []
    for t in range(q.shape[1]):
        o, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        out.append(o)
    return mx.stack(out, axis=1), state


def _fast(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array):
    # Everything in float32: rounding q, k and v to 16 bits first costs more accuracy than it saves time.
    o, state = mx.fast.gated_delta_update(q, k, v, mx.exp(log_g), beta, state)
    return o, state


def _unit_lower_inverse(lower: mx.array) -> mx.array:
    """``(I + A)⁻¹`` for strictly lower triangular A ``[..., n, n]``, n a power of two.

    Block forward substitution: the inverse of ``[[P, 0], [R, Q]]`` is ``[[P⁻¹, 0], [-Q⁻¹ R P⁻¹, Q⁻¹]]``, doubled
    log2(n) times over all diagonal blocks at once. (A Neumann series needs fewer products and overflows.)
    """
    *lead, n, _ = lower.shape
    inverse = mx.ones((*lead, n, 1, 1), dtype=lower.dtype)
    size = 1
    while size < n:
        count = n // (2 * size)
        tiles = lower.reshape(*lead, count, 2, size, count, 2, size)
        # Diagonal pairs' lower-left blocks: row block 2i+1, column block 2i.
        grid = tiles[..., :, 1, :, :, 0, :]
        corner = mx.moveaxis(mx.diagonal(grid, axis1=-4, axis2=-2), -1, -3)
        pairs = inverse.reshape(*lead, count, 2, size, size)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        below = -(second @ corner @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(*lead, n, n)


def _chunked(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array):
    """The WY form: inside a chunk all deltas come from one triangular system, between chunks the state carries.

    With ``Γ_t`` the decay from the chunk's start to t and S the state there,
    ``(I + A) D = β V - β Γ (K Sᵀ)`` where ``A_ti = β_t (Γ_t / Γ_i) k_t·k_i`` for i < t;
    ``O = Γ (Q Sᵀ) + P D`` where ``P_ti = (Γ_t / Γ_i) q_t·k_i`` for i ≤ t; ``S ← Γ_L S + Σ (Γ_L / Γ_i) d_i k_iᵀ``
    (Yang et al., arXiv:2406.06484, section 3, with the decay of arXiv:2412.06464). Ratios are formed from
    differences of logarithms, masked before exp.
    """
    rows = q.shape[1]
    length = min(CHUNK, 1 << (rows - 1).bit_length())
    pad = -rows % length
    chunks = (rows + pad) // length

    def blocks(x: mx.array, heads: int) -> mx.array:
        """``[1, T, heads, ...] -> [chunks, heads, length, ...]`` float32; padding rows change nothing."""
        x = x.astype(mx.float32)
        if pad:
            x = mx.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(chunks, length, *x.shape[2:]).swapaxes(1, 2)
        return mx.repeat(x, heads // x.shape[1], axis=1)

    heads = v.shape[2]
    q, k, v, log_g, beta = (blocks(x, heads) for x in (q, k, v, log_g, beta))
    run = mx.cumsum(log_g, axis=-1)
    causal = mx.tri(length, dtype=mx.bool_)
    decay = mx.exp(mx.where(causal, run[..., :, None] - run[..., None, :], -mx.inf))
    key_key = k @ k.swapaxes(-1, -2)
    strict = mx.tri(length, k=-1, dtype=mx.float32)
    solve = _unit_lower_inverse(beta[..., None] * decay * key_key * strict)
    own = solve @ (beta[..., None] * v)
    carried = solve @ ((beta * mx.exp(run))[..., None] * k)
    local = (q @ k.swapaxes(-1, -2)) * decay
    reach = q * mx.exp(run)[..., None]
    tail = k * mx.exp(run[..., -1:] - run)[..., None]
    fade = mx.exp(run[..., -1])[..., None, None]
    out = []
    by_chunk = (mx.split(x, chunks) for x in (own, carried, reach, local, tail, fade))
    for own_c, carried_c, reach_c, local_c, tail_c, fade_c in zip(*by_chunk, strict=True):
        turned = state.swapaxes(-1, -2)
        delta = own_c - carried_c @ turned
        out.append(reach_c @ turned + local_c @ delta)
        state = fade_c * state + delta.swapaxes(-1, -2) @ tail_c
    o = mx.concatenate(out).swapaxes(1, 2).reshape(1, rows + pad, heads, -1)
    return o[:, :rows], state


_scan = _layer(_chunked)


def gated_delta_products(
    qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, conv: Rows, state: mx.array, w: GatedDelta, sizes: Sizes
) -> Result:
    """Chunks of 64 rows as matrix products of mx ops; a single row by `_single`."""
    run = _single if qkv.shape[1] == 1 else _scan
    return run(qkv, z, b, a, conv, state, w, sizes)


def gated_delta_chunked(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv: Rows,
    state: mx.array,
    w: GatedDelta,
    sizes: Sizes,
    *,
    tile: str = prefill.CHUNK_TILES[0],
) -> Result:
    """The chunked form by our kernels on a GPU, for more than 8 rows of 16 bits and heads of 128; else by products.

    tile: one of the kernels' tiles; products have none.
    """
    arguments = (qkv, z, b, a, conv, state, w, sizes)
    fits = qkv.dtype != mx.float32 and sizes[1] == sizes[3] == kernels.DIM and w.conv.shape[1] == 4
    if device_kind() == "cpu" or qkv.shape[1] <= DECODE_ROWS or not fits:
        return gated_delta_products(*arguments)
    return prefill.chunked(*arguments, tile=tile)


def gated_delta_registers(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv: Rows,
    state: mx.array,
    w: GatedDelta,
    sizes: Sizes,
    *,
    columns: int = 8,
    tile: str = prefill.SCAN_TILES[0],
) -> Result:
    """Row by row with the state in registers: up to 8 rows in one launch, more as a scan between two others.

    columns: value columns of a simdgroup for few rows. tile: one of the scan's, for many.
    """
    arguments = (qkv, z, b, a, conv, state, w, sizes)
    if qkv.shape[1] <= DECODE_ROWS:
        return kernels.gated_delta_metal(*arguments, columns=columns)
    return prefill.scan(*arguments, tile=tile)


def _fast_supports(case: Case | None, device: str) -> str | None:
    if device == "cpu":
        return "MLX's gated_delta_update kernel needs a GPU; on a CPU MLX composes it token by token"
    return None


def _products_supports(case: Case | None, device: str) -> str | None:
    return "on a CPU these are what `chunked` runs" if device == "cpu" else None


def _inputs(case: Case, dtype: mx.Dtype, seed: int):
    key_heads, value_heads, rows, dim = case["key_heads"], case["value_heads"], case["rows"], 128
    conv_dim = (2 * key_heads + value_heads) * dim
    keys = iter(mx.random.split(mx.random.key(seed), 14))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(dtype)

    w = GatedDelta(
        *[Matrix(mx.zeros((1, 1)))] * 4,
        conv=normal(conv_dim, 4, 1) * 0.5,
        a_log=mx.log(mx.random.uniform(0.1, 16, (value_heads,), key=next(keys))),
        dt_bias=normal(value_heads),
        norm=1 + 0.1 * normal(dim),
        out_proj=Matrix(mx.zeros((1, 1))),
    )
    a = normal(1, rows, value_heads) - case.sizes.get("slow", 4)
    state = 0.1 * mx.random.normal((1, value_heads, dim, dim), key=next(keys))
    return (
        normal(1, rows, conv_dim),
        normal(1, rows, value_heads * dim),
        normal(1, rows, value_heads),
        a,
        [normal(1, 1, conv_dim) for _ in range(3)],
        state,
        w,
        (key_heads, dim, value_heads, dim),
    )


def _case(rows: int, key_heads: int = 1, value_heads: int = 2, slow: int = 4) -> Case:
    """`slow` lowers the decay rate: large keeps the state long, negative makes g underflow."""
    sizes = {"rows": rows, "key_heads": key_heads, "value_heads": value_heads, "slow": slow}
    return Case(f"{rows}k{key_heads}v{value_heads}s{slow}", sizes)


GATED_DELTA = declare(
    Op(
        name="gated_delta",
        summary="Gated DeltaNet: convolution, gates, recurrence, gated norm (one step or a scan)",
        variants={
            v.name: v
            for v in (
                Variant("reference", gated_delta_reference, "float32 throughout, token by token"),
                Variant("recurrence", _layer(_stepwise), "the recurrence in mx ops, token by token"),
                Variant("mlx", _layer(_fast), "mx.fast.gated_delta_update", _fast_supports),
                Variant(
                    "products",
                    gated_delta_products,
                    "WY form: chunks of 64 rows as matrix products of mx ops",
                    _products_supports,
                ),
                Variant(
                    "chunked",
                    gated_delta_chunked,
                    "WY form: our kernels on matrix units for many 16-bit rows on a GPU, else as products",
                    tiles=prefill.CHUNK_TILES,
                    unsteady="keys that repeat leave its state several percent off in 16 bits",
                ),
                Variant(
                    "registers",
                    gated_delta_registers,
                    "our kernels: the state in registers from row to row, one text for Metal and CUDA",
                    kernels.supports,
                    space=(
                        *({"columns": columns} for columns, _ in kernels.NORMED_TILES),
                        *({"tile": tile} for tile in prefill.SCAN_TILES),
                    ),
                ),
            )
        },
        cases=(
            _case(1),
            _case(2),
            _case(5, 2, 4),
            _case(63),
            _case(64),
            _case(65, 2, 2),
            _case(130, 1, 2, 8),
            _case(70, 1, 1, -20),
        ),
        inputs=_inputs,
        timing=geometry.gated_delta,
        # Off Metal MLX's op runs at 5 tokens per millisecond and layer (our kernels: see
        # `engine.kernels.gated_delta_prefill`). On a CPU a single row is cheaper as elementwise
        # passes than as 32 small matrix-vector products.
        order=same_order(
            ("mlx", "chunked"),
            cuda_decode=("chunked", "products"),
            # Chunks take less time, but of one token repeated 63 times they leave a state that is 8 % off in bfloat16
            # (the scan 0.8 %): keys that are the same make their triangular system ill-conditioned.
            cuda_prefill=("registers", "chunked", "products"),
            cpu_decode=("recurrence",),
            cpu_prefill=("chunked",),
        ),
        tolerance={"float32": 5e-5, "bfloat16": 2e-2, "float16": 4e-3},
        least_bytes=lambda c: (
            8 * c["value_heads"] * 128 * 128 + 2 * c["rows"] * 128 * (2 * c["key_heads"] + 3 * c["value_heads"])
        ),
        least_flops=lambda c: 7 * 128 * 128 * c["value_heads"] * c["rows"],
    )
)
