"""How much memory a model needs, from its geometry alone: weights, cache, and the scratch of a prefill chunk.

Pure arithmetic: no MLX, no files, so that a plan for another machine can use it. Only the full-attention layers'
keys and values grow with the context; a Gated DeltaNet layer keeps a state of constant size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config import GROUP_SIZE, ModelConfig

SMALLEST_FRONTIER = 256
"""The shortest context that a sweep measures, in tokens."""

SCORE_BYTES = 1 << 28
"""Most that the scores of one tile of a prefill may fill, where they are kept at all."""

_SCRATCH_FACTOR = 4
"""Intermediates of a chunk that are alive, or kept by the allocator, at once, in multiples of one layer's."""


@dataclass(frozen=True)
class Need:
    """Bytes of a run: `weights` once, `caches` of all live arms, `scratch` of one prefill chunk."""

    weights: int
    caches: int
    scratch: int

    @property
    def total(self) -> int:
        """All three together: the peak."""
        return self.weights + self.caches + self.scratch


def attention_is_fused(kind: str) -> bool:
    """Whether to count on prefill attention that keeps no scores, on a device of `kind` (metal, cuda, cpu).

    Not on a Mac. On an M5, MLX has such a kernel for heads of 256, but only from 1,024 queries on, and peaks published
    for an M5 (see the tests) are those of scores in memory: a run of which this says that it fits must fit.
    """
    return kind == "cuda"


def packed_bytes(elements: int, bits: int | None, itemsize: int) -> int:
    """Bytes of a matrix of `elements` weights: codes, and a scale and bias of `itemsize` bytes a group.

    bits: 4 or 8, or None for a dense matrix of `itemsize` bytes an element.
    """
    if bits is None:
        return elements * itemsize
    return elements * bits // 8 + 2 * itemsize * (elements // GROUP_SIZE)


def weight_bytes(config: ModelConfig, bits: int | None = 4, itemsize: int = 2) -> int:
    """Bytes of all text weights, as MLX-community checkpoints pack them.

    Args:
        bits: width of the packed matrices (routers and shared-expert gates always have 8); None = nothing packed.
        itemsize: bytes of a float (2 for bfloat16; 4 where floats are cast to float32, as on a CPU).
    """
    c, hidden = config, config.hidden_size
    heads = c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    attention = hidden * (2 * heads + 2 * kv) + heads * hidden
    delta = hidden * (c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads) + c.value_dim * hidden
    experts = 3 * hidden * (c.num_experts * c.moe_intermediate_size + c.shared_expert_intermediate_size)
    full, linear, layers = len(c.attention_layers), len(c.linear_layers), c.num_hidden_layers

    matrices = full * attention + linear * delta + layers * experts + 2 * c.vocab_size * hidden
    gates = layers * hidden * (c.num_experts + 1)
    delta_small = c.conv_dim * c.linear_conv_kernel_dim + c.linear_value_head_dim + c.linear_num_value_heads
    floats = full * 2 * c.head_dim + linear * delta_small + (2 * layers + 1) * hidden
    decay = linear * 4 * c.linear_num_value_heads
    gate_bits = None if bits is None else 8
    return packed_bytes(matrices, bits, itemsize) + packed_bytes(gates, gate_bits, itemsize) + floats * itemsize + decay


def cache_bytes(config: ModelConfig, positions: int, itemsize: int = 2, step: int = 256) -> int:
    """Bytes of one sequence's cache at `positions` tokens: keys and values in steps, and the constant state."""
    rounded = -(-positions // step) * step
    return rounded * config.cache_bytes_per_token(itemsize) + config.state_bytes(itemsize)


def scratch_bytes(
    config: ModelConfig, positions: int, chunk: int = 2048, itemsize: int = 2, fused_attention: bool = False
) -> int:
    """Bytes that a prefill chunk needs for a while, on top of weights and caches.

    With fused prefill attention (see `attention_is_fused`) it is `prefill_room`. Without, the scores of a chunk,
    ``[heads, chunk, positions]``, are an array. The rest is the widest intermediates of a layer, times what is alive
    at once; the factor is fitted to published peaks of MLX-LM on a Mac (see the tests).
    """
    rows = min(chunk, positions)
    if fused_attention:
        return prefill_room(config, rows, itemsize)
    scores = config.num_attention_heads * rows * positions * itemsize
    return scores + _SCRATCH_FACTOR * rows * _row_bytes(config, itemsize)


def _row_bytes(c: ModelConfig, itemsize: int) -> int:
    """Bytes of a row's intermediates in one layer."""
    experts = c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    return (experts + 3 * (c.conv_dim + c.value_dim)) * itemsize


def prefill_room(config: ModelConfig, rows: int, itemsize: int = 2) -> int:
    """Bytes in which a chunk of so many rows runs on CUDA without the device running out of work.

    They hold the intermediates of two layers, and three tiles of scores. MLX submits up to eleven graphs of a hundred
    operations there, far more than keeps a device busy, and keeps what they use; the engine has it stop at this.
    """
    return 2 * rows * _row_bytes(config, itemsize) + 3 * SCORE_BYTES


def run_need(
    config: ModelConfig,
    positions: int,
    *,
    arms: int = 1,
    chunk: int = 2048,
    itemsize: int = 2,
    bits: int | None = 4,
    weights: int | None = None,
    fused_attention: bool = False,
) -> Need:
    """What a run at a context of `positions` tokens keeps on the device at its peak.

    Args:
        arms: sequences alive at once; arms share the weights, each has its own cache, one prefills at a time.
        weights: bytes of the weights if known (a loaded checkpoint), else computed from the geometry.
        fused_attention: prefill attention keeps no scores (see `scratch_bytes`).
    """
    held = weight_bytes(config, bits, itemsize) if weights is None else weights
    scratch = scratch_bytes(config, positions, chunk, itemsize, fused_attention)
    return Need(held, arms * cache_bytes(config, positions, itemsize), scratch)


def run_bytes(config: ModelConfig, positions: int, **how: Any) -> int:
    """Peak device bytes of a run; arguments as for `run_need`."""
    return run_need(config, positions, **how).total


def largest_frontier(
    config: ModelConfig,
    budget: int,
    *,
    arms: int = 1,
    chunk: int = 2048,
    itemsize: int = 2,
    bits: int | None = 4,
    weights: int | None = None,
    fused_attention: bool = False,
) -> int:
    """The largest power-of-two context, from 256 to what the model supports, whose run fits `budget` bytes.

    The keyword arguments are those of `run_need`.

    Returns:
        Tokens, or 0 if not even the smallest frontier fits.
    """
    best, frontier = 0, SMALLEST_FRONTIER
    while frontier <= config.max_position_embeddings:
        need = run_bytes(
            config,
            frontier,
            arms=arms,
            chunk=chunk,
            itemsize=itemsize,
            bits=bits,
            weights=weights,
            fused_attention=fused_attention,
        )
        if need > budget:
            break
        best, frontier = frontier, 2 * frontier
    return best
