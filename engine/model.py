"""The forward pass, in execution order. Not one branch on the config: the bound ops carry every choice.

Shapes, for ``T`` new rows of one sequence: hidden ``[1, T, hidden_size]``; heads as in `engine.ops`.
Source of the formulas: Hugging Face transformers' `Qwen3_5MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from engine.cache import ExactView, Inputs, Recurred
from engine.config import ModelConfig
from engine.ops import BoundOps
from engine.ops.registry import DECODE_ROWS
from engine.weights import Attention, Experts, GatedDelta, Layer, Weights

Boundary = Callable[[mx.array], None]
"""Called with the hidden rows after each layer: where an engine may wait for the device."""


def best_of(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Of logits ``[T, vocabulary]`` the best token of each row, uint32 ``[T]``, and whether its logit is finite.

    One input gone bad makes every logit of its row NaN, so the chosen one tells.
    """
    token = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.uint32)
    finite = mx.isfinite(mx.take_along_axis(logits, token, axis=-1))
    return token.squeeze(-1), finite.squeeze(-1)


def no_wait(_: mx.array) -> None:
    """The boundary of a pass that never waits."""


class Model:
    """Weights and bound ops of one model; stateless, so that one instance serves many caches.

    Args:
        config: architecture. weights: as `Weights` binds them. ops: chosen variants.
        vocabulary: ids below it are real; the padded rows of `lm_head` are never scored.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: BoundOps, vocabulary: int):
        self.config, self.weights, self.ops, self.vocabulary = config, weights, ops, vocabulary

    def __call__(self, ids: mx.array, view: ExactView, boundary: Boundary = no_wait) -> mx.array:
        """Hidden rows after the last layer, before the final norm, for token ids ``[T]``."""
        h = self.embed(ids)
        for index in range(self.config.num_hidden_layers):
            h = self.layer(index, h, view)
            boundary(h)
        return h

    def embed(self, ids: mx.array) -> mx.array:
        """Rows of the embedding: ``[T] -> [1, T, hidden]``, no scaling."""
        table = self.weights.embed
        if table.scales is None or table.biases is None:
            return table.weight[ids][None]
        rows = mx.dequantize(
            table.weight[ids],
            table.scales[ids],
            table.biases[ids],
            group_size=table.group_size,
            bits=table.bits,
        )
        return rows[None]

    def layer(self, index: int, h: mx.array, view: ExactView) -> mx.array:
        """One decoder layer: mixer, then experts, each behind a norm and added to the stream."""
        return self.decoder(self.weights.layers[index], index, h, view)

    def decoder(self, layer: Layer, index: int, h: mx.array, view: ExactView) -> mx.array:
        """A decoder layer with the given weights."""
        x = self._norm(h, layer.input_norm)
        if layer.attention is not None:
            h = h + self.attention(layer.attention, index, x, view)
        else:
            assert layer.gated_delta is not None
            h = h + self.gated_delta(layer.gated_delta, index, x, view)
        return self.experts(layer.experts, self._norm(h, layer.post_norm), h)

    def attention(self, w: Attention, index: int, x: mx.array, view: ExactView) -> mx.array:
        """Gated full attention: query and gate per head from one projection, the gate applied before `o_proj`."""
        c, rows = self.config, x.shape[1]
        heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q, gate = mx.split(self._linear(x, w.q_proj).reshape(1, rows, heads, 2 * dim), 2, axis=-1)
        k = self._linear(x, w.k_proj).reshape(1, rows, kv, dim)
        v = self._linear(x, w.v_proj).reshape(1, rows, kv, dim).swapaxes(1, 2)
        q = self._rotate(self._norm(q, w.q_norm).swapaxes(1, 2), view)
        k = self._rotate(self._norm(k, w.k_norm).swapaxes(1, 2), view)
        keys, values = view.append(index, k, v)
        attend = self.ops.decode_attention if rows <= DECODE_ROWS else self.ops.prefill_attention
        out = attend(q, keys, values, dim**-0.5, view.position, rows=rows)
        out = out.swapaxes(1, 2).reshape(1, rows, heads * dim)
        return self._linear(out * mx.sigmoid(gate.reshape(1, rows, heads * dim)), w.o_proj)

    def gated_delta(self, w: GatedDelta, index: int, x: mx.array, view: ExactView) -> mx.array:
        """Gated DeltaNet mixer: four projections, the recurrent core, the output projection."""
        c = self.config
        sizes = (
            c.linear_num_key_heads,
            c.linear_key_head_dim,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
        )
        qkv, z = self._linear(x, w.in_proj_qkv), self._linear(x, w.in_proj_z)
        b, a = self._linear(x, w.in_proj_b), self._linear(x, w.in_proj_a)

        def core(inputs: Inputs, conv: list[mx.array], state: mx.array) -> Recurred:
            return self.ops.gated_delta(*inputs, conv, state, w, sizes, rows=inputs[0].shape[1])

        return self._linear(view.recur(index, (qkv, z, b, a), core), w.out_proj)

    def experts(self, w: Experts, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Route every row to its experts and add the shared one, and the residual if there is one."""
        rows = x.shape[1]
        logits = self._linear(x, w.gate).squeeze(0)
        routing = self.ops.route(logits, self.config.num_experts_per_tok, self.config.norm_topk_prob, rows=rows)
        return self.ops.experts(x, routing, w, rows=rows, residual=residual)

    def head(self, h: mx.array) -> mx.array:
        """Logits ``[1, T, vocabulary]`` of hidden rows ``[1, T, hidden]``."""
        w, eps = self.weights, self.config.rms_norm_eps
        return self.ops.head(h, w.norm, eps, w.lm_head, self.vocabulary, rows=h.shape[1])

    def choose(self, h: mx.array) -> tuple[mx.array, mx.array]:
        """The greedy token of each of ``[1, T, hidden]`` rows, uint32 ``[T]``, and whether its logit is finite."""
        return best_of(self.head(h).squeeze(0))

    def _norm(self, x: mx.array, gain: mx.array) -> mx.array:
        return self.ops.norm(x, gain, self.config.rms_norm_eps, rows=x.shape[1])

    def _linear(self, x: mx.array, w) -> mx.array:
        return self.ops.linear(x, w, rows=x.shape[1])

    def _rotate(self, x: mx.array, view: ExactView) -> mx.array:
        """Rotary embedding of the leading dimensions, half-split pairs, angles in float32."""
        c = self.config
        return mx.fast.rope(x, c.rotary_dims, traditional=False, base=c.rope_theta, scale=1.0, offset=view.offset)
