"""What the ops of one decode step or prefill chunk look like for a model: the cases on which variants are timed.

Each function is an `Op.timing`: it takes the architecture, the new rows of a pass and the positions that the last of
them sees, and gives one case for every call that a period of layers makes, in order; none where it makes no such call.
"""

from __future__ import annotations

from engine.config import ModelConfig
from engine.ops.registry import DECODE_ROWS, Case


def linear(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """Projections of the mixers and the router, over one period of Gated DeltaNet and full-attention layers."""
    c = config
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    small = c.linear_num_value_heads
    recurrent = [(c.hidden_size, n) for n in (c.conv_dim, c.value_dim, small, small)] + [(c.value_dim, c.hidden_size)]
    attention = [(c.hidden_size, n) for n in (2 * heads, kv, kv)] + [(heads, c.hidden_size)]
    made = []
    for layer in range(c.full_attention_interval):
        for inputs, outputs in attention if c.is_full_attention(layer) else recurrent:
            made.append(_case(rows=rows, inputs=inputs, outputs=outputs, bits=4))
        made.append(_case(rows=rows, inputs=c.hidden_size, outputs=c.num_experts, bits=8))
    return tuple(made)


def route(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """The router's decision for every row."""
    return (_case(rows=rows, experts=config.num_experts, k=config.num_experts_per_tok),)


def experts(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """One layer's mixture."""
    sizes = {"hidden": config.hidden_size, "wide": config.moe_intermediate_size}
    return (_case(rows=rows, **sizes, experts=config.num_experts, k=config.num_experts_per_tok),)


def decode_attention(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """A few rows over `context` positions, the position on the device as in a traced step."""
    return _attention(config, rows, context, context - rows) if rows <= DECODE_ROWS else ()


def prefill_attention(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """A chunk at the end of `context` positions."""
    return _attention(config, rows, context, -1) if rows > DECODE_ROWS else ()


def _attention(config: ModelConfig, rows: int, context: int, at: int) -> tuple[Case, ...]:
    kv = config.num_key_value_heads
    if config.head_dim != 256 or config.num_attention_heads != 8 * kv:
        return ()
    return (_case(rows=rows, n=context, kv=kv, at=at),)


def gated_delta(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """One layer's convolution, recurrence and gated norm."""
    if config.linear_key_head_dim != 128 or config.linear_value_head_dim != 128:
        return ()
    heads = {"key_heads": config.linear_num_key_heads, "value_heads": config.linear_num_value_heads}
    return (_case(rows=rows, **heads, slow=4),)


def head(config: ModelConfig, rows: int, context: int) -> tuple[Case, ...]:
    """The end of a step; a prefill scores its last row only."""
    if rows > DECODE_ROWS:
        return ()
    return (_case(rows=rows, hidden=config.hidden_size, padded=config.vocab_size, vocabulary=config.vocab_size),)


def _case(**sizes: int) -> Case:
    return Case(" ".join(f"{name} {value}" for name, value in sizes.items()), sizes)
