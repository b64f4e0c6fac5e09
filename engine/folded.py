"""The forward pass of a few rows with norms, gates and residuals folded into the kernels beside them.

The same mathematics as `engine.model`, in fewer launches. Per layer, for 1 to 8 new rows:

    Gated DeltaNet    norm + four projections · convolution, gates and recurrence · gated norm + out_proj + residual
    full attention    norm + three projections · q/k norm and rotary · attention · gate + o_proj + residual
    experts           norm + router and shared expert · routing + gate/up + SwiGLU · down, weighted sum, residual

Longer passes, and everything that is not listed, are `Model`'s. What is folded stays in float32 where a launch of its
own would round to the activation type, so results differ by that rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import mlx.core as mx

from engine.cache import ExactView, Inputs, Recurred
from engine.config import GROUP_SIZE, ModelConfig
from engine.kernels import attention, experts, gated_delta, linear, rotary, step
from engine.model import Model
from engine.ops import BoundOps
from engine.ops.registry import DECODE_ROWS
from engine.weights import Attention, Experts, GatedDelta, Layer, Matrix, Weights

TILES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "experts.up": tuple({"up_tile": tile} for tile in experts.UP_TILES),
    "experts.down": tuple({"down_tile": tile} for tile in experts.DOWN_TILES),
    "gated_delta": tuple({"columns": columns, "simdgroups": many} for columns, many in gated_delta.TILES),
    "head": tuple({"tile": tile} for tile in linear.TILES),
}
"""What the tuner tries of the kernels of a wholly fused step, one after another, beside the rule of each."""


def unfit(config: ModelConfig, weights: Weights, dtype: mx.Dtype) -> str | None:
    """Why the kernels of a folded step cannot run a model with activations of `dtype`, or None."""
    c = config
    if c.head_dim != attention.HEAD_DIM or c.rotary_dims != rotary.ROTARY_DIMS:
        return f"attention heads of {c.head_dim} with {c.rotary_dims} rotary dimensions"
    if {c.linear_key_head_dim, c.linear_value_head_dim} != {gated_delta.DIM} or c.linear_conv_kernel_dim != 4:
        return f"Gated DeltaNet heads of {c.linear_key_head_dim} and {c.linear_value_head_dim}"
    if c.num_experts_per_tok > experts.MOST_CHOSEN or c.num_experts > experts.MOST_EXPERTS:
        return f"{c.num_experts_per_tok} of {c.num_experts} experts"
    if c.shared_expert_intermediate_size != c.moe_intermediate_size:
        return "a shared expert of another width than the routed ones"
    if (other := next(filter(None, map(_packed_otherwise, weights.layers)), None)) is not None:
        return f"{other} is not packed as they read it"
    for name, matrix in (("embed", weights.embed), ("lm_head", weights.lm_head)):
        if matrix.bits not in (4, 8) or matrix.scales is None or matrix.scales.dtype != dtype:
            return f"{name} is not packed with scales of the activations' {dtype}"
    return None


def _packed_otherwise(layer: Layer) -> str | None:
    """A matrix of a layer that the kernels do not read, or None."""
    four = {"gate_proj", "up_proj", "down_proj", "shared_down_proj"}
    for part in (layer.attention, layer.gated_delta, layer.experts):
        for f in fields(part) if part is not None else ():
            matrix, bits = getattr(part, f.name), (4,) if f.name in four else (4, 8)
            if isinstance(matrix, Matrix) and (matrix.group_size != GROUP_SIZE or matrix.bits not in bits):
                return f.name
    return None


class FoldedModel(Model):
    """`Model` with our own kernels in the decode step; weights must be packed (`KernelError` names what is not).

    With ``fusion="partial"`` only what stands beside a mixer's products is folded: norms, gates, residuals.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: BoundOps, vocabulary: int):
        super().__init__(config, weights, ops, vocabulary)
        self._read: dict[int, bool] = {}

    @property
    def whole(self) -> bool:
        """Whether routing, experts, recurrence and head are fused too."""
        return self.ops.fusion == "full"

    def embed(self, ids: mx.array) -> mx.array:
        """Rows of the embedding: few of a packed table by one launch."""
        if ids.shape[0] > DECODE_ROWS or self.weights.embed.scales is None:
            return super().embed(ids)
        self._ran("embed", "metal")
        return step.embed_metal(ids, self.weights.embed)

    def decoder(self, layer: Layer, index: int, h: mx.array, view: ExactView) -> mx.array:
        """A decoder layer; few rows take the folded form."""
        # A draft head may be dense beside a packed trunk.
        if h.shape[1] > DECODE_ROWS or not self._read.setdefault(id(layer), _packed_otherwise(layer) is None):
            return super().decoder(layer, index, h, view)
        if layer.attention is not None:
            h = self._attend(layer.attention, layer.input_norm, index, h, view)
        else:
            assert layer.gated_delta is not None
            h = self._recur(layer.gated_delta, layer.input_norm, index, h, view)
        return self._mix(layer.experts, layer.post_norm, h)

    def _attend(self, w: Attention, gain: mx.array, index: int, h: mx.array, view: ExactView) -> mx.array:
        c, rows = self.config, h.shape[1]
        heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        both, k, v = self._project(h, gain, w.q_proj, w.k_proj, w.v_proj)
        at = mx.array([view.offset], dtype=mx.int32) if view.position is None else view.position
        q, k = rotary.rotate_metal(both, k, w.q_norm, w.k_norm, at, eps=c.rms_norm_eps, base=c.rope_theta)
        keys, values = view.append(index, k, v.reshape(1, rows, kv, dim).swapaxes(1, 2))
        out = self.ops.decode_attention(q, keys, values, dim**-0.5, view.position, rows=rows)
        gate = both.reshape(1, rows, heads, 2 * dim)[..., dim:]
        return self._out(out.swapaxes(1, 2), w.o_proj, h, linear.Gate(gate))

    def _recur(self, w: GatedDelta, gain: mx.array, index: int, h: mx.array, view: ExactView) -> mx.array:
        c = self.config
        sizes = (c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads, c.linear_value_head_dim)
        qkv, z, b, a = self._project(h, gain, w.in_proj_qkv, w.in_proj_z, w.in_proj_b, w.in_proj_a)

        def core(inputs: Inputs, conv: list[mx.array], state: mx.array) -> Recurred:
            if not self.whole:
                return self.ops.gated_delta(*inputs, conv, state, w, sizes, rows=inputs[0].shape[1])
            tile = self._ran("gated_delta", "registers", "gated_delta")
            # Float32 up to the norm: a read-out may be far from the size that its norm gives it.
            return gated_delta.gated_delta_metal(*inputs, conv, state, w, sizes, normed=False, dtype=mx.float32, **tile)

        out = view.recur(index, (qkv, z, b, a), core)
        return self._out(out, w.out_proj, h, linear.GatedNorm(w.norm, z, c.rms_norm_eps) if self.whole else None)

    def _mix(self, w: Experts, gain: mx.array, h: mx.array) -> mx.array:
        c = self.config
        if not self.whole:
            return self.experts(w, self._norm(h, gain), h)
        logits, gate, up, shared = self._project(h, gain, w.gate, w.shared_gate_proj, w.shared_up_proj, w.shared_gate)
        self._ran("route", "metal")
        tiles = self._ran("experts", "metal", "experts.up", "experts.down")
        return experts.experts_metal(
            h,
            logits,
            w,
            c.num_experts_per_tok,
            c.norm_topk_prob,
            shared=(gate, up, shared),
            gain=gain,
            eps=c.rms_norm_eps,
            residual=h,
            **tiles,
        )

    def head(self, h: mx.array) -> mx.array:
        """Logits; of few rows by the kernel that `choose` runs too."""
        if h.shape[1] > DECODE_ROWS or not self.whole:
            return super().head(h)
        w = self.weights
        tile = self._ran("head", "metal", "head")
        return linear.logits_metal(h, w.norm, self.config.rms_norm_eps, w.lm_head, self.vocabulary, **tile)

    def choose(self, h: mx.array) -> tuple[mx.array, mx.array]:
        """The greedy token of one row, without logits."""
        if h.shape[1] > DECODE_ROWS or not self.whole:
            return super().choose(h)
        tokens, best, *_ = self.scored(h)
        return tokens.squeeze(0), mx.isfinite(best).squeeze(0)

    def scored(self, h: mx.array, logits: bool = False) -> tuple[mx.array, ...]:
        """Best tokens of few rows, their logits, and with `logits` all of them: `linear.head_metal`."""
        w = self.weights
        tile = self._ran("head", "metal", "head")
        given = (h, w.norm, self.config.rms_norm_eps, w.lm_head, self.vocabulary)
        return linear.head_metal(*given, logits=logits, **tile)

    def _project(self, h: mx.array, gain: mx.array, *matrices: Matrix) -> tuple[mx.array, ...]:
        """Products of the normed rows with several matrices."""
        self._ran("norm", "folded")
        self._ran("linear", "metal")
        return linear.products_metal(h, matrices, prologue=linear.Norm(gain, self.config.rms_norm_eps))

    def _out(self, x: mx.array, w: Matrix, residual: mx.array, prologue: linear.Prologue | None) -> mx.array:
        """The product that ends a mixer, added to the stream."""
        self._ran("linear", "metal")
        return linear.products_metal(x, (w,), prologue=prologue, residual=residual)[0]

    def _ran(self, op: str, variant: str, *kernels: str) -> dict[str, Any]:
        """Count a call; the tuned tiles of its kernels."""
        tiles = {name: value for kernel in kernels for name, value in self.ops.folded.get(kernel, {}).items()}
        self.ops.recorder.record(op, variant, " ".join(["folded", *(f"{k} {v}" for k, v in tiles.items())]))
        return tiles
