"""The least that work must cost on any machine: bytes moved and operations done, from the geometry alone.

Pure arithmetic, so that reports may use it.
"""

from __future__ import annotations

from engine.config import ModelConfig
from engine.memory import packed_bytes, weight_bytes


def token_bytes(config: ModelConfig, weights: int | None = None, itemsize: int = 2) -> int:
    """Bytes of weights that one decoded token reads: all but the embedding and the experts it was not routed to.

    Args:
        weights: bytes of the checkpoint where known (other packing than 4 bits); scales the result.
    """
    c = config
    unused = c.num_hidden_layers * (c.num_experts - c.num_experts_per_tok) * 3 * c.hidden_size * c.moe_intermediate_size
    total = weight_bytes(c, itemsize=itemsize)
    read = total - packed_bytes(unused + c.vocab_size * c.hidden_size, 4, itemsize)
    return int(read * (weights / total if weights else 1.0))


def active_flops(config: ModelConfig) -> float:
    """Operations of one token's products without the head and without attention over the context."""
    c = config
    hidden = c.hidden_size
    gated = hidden * (c.conv_dim + 2 * c.value_dim)
    recurrence = 3.5 * c.linear_key_head_dim * c.value_dim
    heads = c.num_attention_heads * c.head_dim
    attention = hidden * (3 * heads + 2 * c.num_key_value_heads * c.head_dim)
    wide = c.num_experts_per_tok * c.moe_intermediate_size + c.shared_expert_intermediate_size
    moe = 3 * hidden * wide + hidden * c.num_experts
    return 2 * (
        len(c.linear_layers) * (gated + recurrence) + len(c.attention_layers) * attention + c.num_hidden_layers * moe
    )


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Operations of a prefill of `tokens`: products linear in them, causal attention quadratic."""
    scores = 2 * config.num_attention_heads * config.head_dim * len(config.attention_layers)
    return tokens * (active_flops(config) + scores * tokens)


def least_work(
    config: ModelConfig, phase: str, frontier: int, tokens: int = 0, itemsize: int = 2, weights: int | None = None
) -> tuple[int, int]:
    """Bytes that one window must at least move and operations it must at least do, whatever the arm.

    A decode step reads the weights of one token and the keys and values of `frontier` positions, and reads and writes
    the recurrent state. A prefill reads each weight that its tokens use once, however it is cut into chunks, and writes
    its keys, values and state once. Which experts those are is taken from even routing.

    Args:
        phase: ``"prefill"`` of `frontier` tokens, or ``"decode"`` of `tokens` steps from there.
        itemsize: bytes of an activation. weights: bytes of the checkpoint where known; scales the packed part.
    """
    times = tokens if phase == "decode" else 1
    each = least_by_op(config, phase, frontier, itemsize, weights).values()
    return int(times * sum(moved for moved, _ in each)), int(times * sum(done for _, done in each))


def least_by_op(
    config: ModelConfig, phase: str, frontier: int, itemsize: int = 2, weights: int | None = None
) -> dict[str, tuple[float, float]]:
    """`least_work` of one decode step, or of one prefill, by op: ``{op: (bytes, operations)}``.

    Activations are left out: between ops that are fused they never reach memory. `norm` is the gains alone.
    """
    c, hidden, decode = config, config.hidden_size, phase == "decode"
    layers, full, linear = c.num_hidden_layers, len(c.attention_layers), len(c.linear_layers)
    tokens = 1 if decode else frontier
    scale = weights / weight_bytes(c, itemsize=itemsize) if weights else 1.0

    def packed(elements: float, bits: int = 4) -> float:
        return scale * packed_bytes(int(elements), bits, itemsize)

    def floats(elements: int, size: int = itemsize) -> float:
        return scale * size * elements

    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    gates = linear * hidden * 2 * c.linear_num_value_heads
    wide = full * hidden * (3 * heads + 2 * kv) + linear * hidden * (c.conv_dim + 2 * c.value_dim)
    expert, shared = 3 * hidden * c.moe_intermediate_size, 3 * hidden * c.shared_expert_intermediate_size
    used = c.num_experts_per_tok
    met = used + (c.num_experts - used) * (1 - (1 - used / c.num_experts) ** (tokens - 1))
    delta_floats = c.conv_dim * c.linear_conv_kernel_dim + c.linear_value_head_dim + c.linear_num_value_heads
    # A prefill writes the state it ends with; a step reads it too.
    state = c.state_bytes(itemsize) * (2 if decode else 1)
    # Causal: a prefill attends over half its positions on average.
    seen = frontier if decode else frontier / 2
    return {
        # `active_flops` leaves the narrow gates of Gated DeltaNet out too.
        "linear": (packed(wide + gates), 2.0 * tokens * wide),
        "route": (packed(layers * hidden * c.num_experts, 8), 2.0 * tokens * layers * hidden * c.num_experts),
        "experts": (
            packed(layers * (met * expert + shared)) + packed(layers * hidden, 8),
            2.0 * tokens * layers * (used * expert + shared),
        ),
        "gated_delta": (
            linear * (floats(delta_floats) + floats(c.linear_num_value_heads, 4)) + state,
            7.0 * tokens * linear * c.linear_key_head_dim * c.value_dim,
        ),
        "attention": (
            full * floats(2 * c.head_dim) + c.cache_bytes_per_token(itemsize) * frontier,
            4.0 * tokens * c.num_attention_heads * c.head_dim * full * seen,
        ),
        "norm": (floats((2 * layers + 1) * hidden), 0.0),
        "head": (packed(c.vocab_size * hidden), 2.0 * c.vocab_size * hidden),
    }
