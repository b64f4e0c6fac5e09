"""The training forward pass, over the parameters of transformers' own `Qwen3_5MoeForCausalLM`.

transformers owns the modules, their names and the saved form; its plain PyTorch forward is too slow to train
with. The functions here compute the same numbers from the same parameters (tested equal): experts as two dense
products, the gated delta rule in chunks with one short loop over chunks, attention through PyTorch's fused kernel.
The multi-token-prediction head, which transformers leaves out, is a module beside the model.

Shapes: B sequences of T tokens, N = B * T, width D; T is a multiple of 64.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.library import custom_op

from engine.config import ModelConfig

CHUNK = 64
"""Tokens of one chunk of the gated delta rule."""

TINY = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=1,
    max_position_embeddings=8192,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=32,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    bos_token_id=4091,
    eos_token_ids=(4093, 4091),
)
"""Architecture of the embedded checkpoint: every dimension that a kernel is written for is the large model's."""


def transformers_config(config: ModelConfig) -> Any:
    """The text configuration of `config` as transformers reads it."""
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    text = config.to_dict()["text_config"]
    text.pop("model_type")
    made = Qwen3_5MoeTextConfig(**text)
    made._attn_implementation = "sdpa"
    return made


class DraftHead(nn.Module):
    """The multi-token-prediction head: one attention layer that drafts the token after next.

    ``x = fc([norm(embedding of token t+1), norm(hidden state of t)])``, one decoder layer of the trunk's kind,
    a final norm; embedding and output matrix are the trunk's. Parameter names are those of ``mtp.*``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

        config = copy.deepcopy(config)
        config.layer_types = ["full_attention"]
        config.num_hidden_layers = 1
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen3_5MoeRMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = hf.Qwen3_5MoeRMSNorm(width, eps=eps)
        self.layers = nn.ModuleList([hf.Qwen3_5MoeDecoderLayer(config, 0)])
        self.norm = hf.Qwen3_5MoeRMSNorm(width, eps=eps)


def build(config: ModelConfig, seed: int = 0) -> tuple[nn.Module, DraftHead]:
    """transformers' model and the draft head beside it, float32, freshly initialised."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    torch.manual_seed(seed)
    text = transformers_config(config)
    model = Qwen3_5MoeForCausalLM(text).float()
    head = DraftHead(text).float()
    for module in (model, head):
        initialise(module)
    return model, head


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Inputs of a layer by fan-in, its outputs small, decay rates spread as in Mamba-style layers."""
    for name, p in module.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            p.normal_(0, 0.25 / math.sqrt(p.shape[-1]))
        elif name.endswith(("embed_tokens.weight",)):
            p.normal_(0, 0.5)
        elif name.endswith(("lm_head.weight", "gate.weight", "shared_expert_gate.weight")):
            p.normal_(0, 0.02)
        elif "conv1d" in name:
            p.uniform_(-0.5, 0.5)
        elif name.endswith("A_log"):
            p.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.exp(torch.rand_like(p) * math.log(100.0) + math.log(1e-3))
            p.copy_(step + torch.log(-torch.expm1(-step)))
        elif p.ndim >= 2:
            p.normal_(0, 0.6 / math.sqrt(p.shape[-1]))
        elif name.endswith("linear_attn.norm.weight"):
            p.fill_(1.0)
        else:
            p.zero_()


# -- the gated delta rule in chunks -------------------------------------------------------------
#
# Within a chunk the rule is a unit lower triangular system; between chunks only the state is carried. The two
# pieces with a loop are custom ops with hand-written gradients: eager loops of batched products, opaque to
# torch.compile, which would otherwise unroll them.


def _neumann(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 for strictly lower triangular `a` ``[..., n, n]``, n <= 8: exact, by doubling."""
    power = -a
    inverse = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) + power
    for _ in range(math.ceil(math.log2(a.shape[-1])) - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _block_inverse(a: torch.Tensor) -> torch.Tensor:
    # Doubling alone overflows in 64 rows of like keys, so blocks of 8 are joined by substitution.
    n = a.shape[-1]
    if n <= 8:
        return _neumann(a)
    half = n // 2
    first, second = _block_inverse(a[..., :half, :half]), _block_inverse(a[..., half:, half:])
    out = torch.zeros_like(a)
    out[..., :half, :half] = first
    out[..., half:, half:] = second
    out[..., half:, :half] = -(second @ a[..., half:, :half] @ first)
    return out


@custom_op("lilybench_tiny::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 for strictly lower triangular `a`, float32 ``[..., 64, 64]``, without TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(a.device.type, enabled=False):
            return _block_inverse(a.contiguous())
    finally:
        torch.set_float32_matmul_precision(precision)


@unit_lower_inverse.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape)


def _inverse_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return -(x.mT @ grad @ x.mT).tril(-1)


unit_lower_inverse.register_autograd(_inverse_gradient, setup_context=_inverse_context)


@custom_op("lilybench_tiny::carry", mutates_args=())
def carry(w: torch.Tensor, u: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before each chunk and each chunk's corrected values.

    ``v = u - w S;  S <- decay S + k^T v``, from S = 0.

    Args:
        w, k: ``[C, M, 64, K]`` for C chunks of M heads; u: ``[C, M, 64, V]``; decay: ``[C, M]``; all float32.

    Returns:
        states ``[C, M, K, V]`` and values ``[C, M, 64, V]``.
    """
    states = torch.empty(*w.shape[:2], w.shape[-1], u.shape[-1], dtype=w.dtype, device=w.device)
    values = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    state = torch.zeros_like(states[0])
    with torch.autocast(w.device.type, enabled=False):
        for c in range(w.shape[0]):
            states[c].copy_(state)
            torch.baddbmm(u[c], w[c], state, alpha=-1, out=values[c])
            state = torch.baddbmm(state * decay[c, :, None, None], k[c].mT, values[c])
    return states, values


@carry.register_fake
def _(w: torch.Tensor, u: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w.new_empty(*w.shape[:2], w.shape[-1], u.shape[-1]), u.new_empty(u.shape)


@custom_op("lilybench_tiny::carry_backward", mutates_args=())
def carry_backward(
    w: torch.Tensor, k: torch.Tensor, decay: torch.Tensor, grad_states: torch.Tensor, grad_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `carry`, from the last chunk to the first: of each chunk's values and of the state after it."""
    after = torch.empty(grad_states.shape, dtype=w.dtype, device=w.device)
    values = torch.empty(grad_values.shape, dtype=w.dtype, device=w.device)
    state = torch.zeros_like(grad_states[0])
    with torch.autocast(w.device.type, enabled=False):
        for c in reversed(range(w.shape[0])):
            after[c].copy_(state)
            torch.baddbmm(grad_values[c], k[c], state, out=values[c])
            state = torch.baddbmm(
                torch.addcmul(grad_states[c], state, decay[c, :, None, None]), w[c].mT, values[c], alpha=-1
            )
    return values, after


@carry_backward.register_fake
def _(
    w: torch.Tensor, k: torch.Tensor, decay: torch.Tensor, grad_states: torch.Tensor, grad_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad_values.new_empty(grad_values.shape), grad_states.new_empty(grad_states.shape)


def _carry_context(ctx: Any, inputs: Any, output: Any) -> None:
    w, _, k, decay = inputs
    ctx.save_for_backward(w, k, decay, *output)


def _carry_gradient(ctx: Any, grad_states: torch.Tensor, grad_values: torch.Tensor) -> Any:
    w, k, decay, states, values = ctx.saved_tensors
    grad_u, after = carry_backward(w, k, decay, grad_states.contiguous(), grad_values.contiguous())
    return -(grad_u @ states.mT), grad_u, values @ after.mT, (states * after).sum((-1, -2))


carry.register_autograd(_carry_gradient, setup_context=_carry_context)


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule over whole sequences, in chunks of 64.

    Args:
        q, k: ``[B, T, H, K]`` normalised, q scaled; v: ``[B, T, H, V]``; log_decay, beta: ``[B, T, H]``; float32.

    Returns:
        ``[B, T, H, V]`` float32, the state read after each token's write.
    """
    batch, length, heads, width = q.shape

    def chunks(x: torch.Tensor) -> torch.Tensor:
        x = x.view(batch, length // CHUNK, CHUNK, heads, -1)
        return x.permute(1, 0, 3, 2, 4).reshape(length // CHUNK, batch * heads, CHUNK, -1)

    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    total = log_decay.squeeze(-1).cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    system = unit_lower_inverse(((k * beta) @ k.mT * pair).tril(-1))
    reach = total.exp().unsqueeze(-1)
    u = system @ (v * beta)
    w = system @ (k * beta * reach)
    last = total[..., -1:]
    states, values = carry(w, u, k * (last - total).exp().unsqueeze(-1), last.squeeze(-1).exp())
    out = (q * reach) @ states + (q @ k.mT * pair) @ values
    return out.view(length // CHUNK, batch, heads, CHUNK, -1).permute(1, 0, 3, 2, 4).reshape(batch, length, heads, -1)


# -- layers ----------------------------------------------------------------------------------------


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """RMS norm whose stored weight is the gain minus one."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps) * (1.0 + norm.weight.float())
    return y.to(x.dtype)


def rotary(config: ModelConfig, length: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[length, rotary dims]`` float32, halves repeated."""
    half = config.rotary_dims // 2
    frequency = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def attention(x: torch.Tensor, m: Any, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gated full attention of transformers' module `m` over `x` ``[B, T, D]``."""
    batch, length, _ = x.shape
    q, gate = m.q_proj(x).view(batch, length, -1, 2 * m.head_dim).chunk(2, -1)
    k = m.k_proj(x).view(batch, length, -1, m.head_dim)
    v = m.v_proj(x).view(batch, length, -1, m.head_dim).transpose(1, 2)
    q = _rotate(rms(q, m.q_norm).float().transpose(1, 2), cos, sin).to(v.dtype)
    k = _rotate(rms(k, m.k_norm).float().transpose(1, 2), cos, sin).to(v.dtype)
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=m.scaling).transpose(1, 2)
    return m.o_proj((out * torch.sigmoid(gate)).reshape(batch, length, -1))


def _l2(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_net(x: torch.Tensor, m: Any) -> torch.Tensor:
    """Gated DeltaNet of transformers' module `m` over `x` ``[B, T, D]``."""
    batch, length, _ = x.shape
    mixed, z = m.in_proj_qkv(x), m.in_proj_z(x).view(batch, length, m.num_v_heads, m.head_v_dim)
    taps = m.conv1d.weight.squeeze(1)
    padded = F.pad(mixed, (0, 0, taps.shape[-1] - 1, 0))
    mixed = padded[:, :length] * taps[:, 0]
    for j in range(1, taps.shape[-1]):
        mixed = mixed + padded[:, j : j + length] * taps[:, j]
    mixed = F.silu(mixed)
    q, k, v = mixed.float().split((m.key_dim, m.key_dim, m.value_dim), -1)
    shared = m.num_v_heads // m.num_k_heads
    q = _l2(q.view(batch, length, m.num_k_heads, -1)).repeat_interleave(shared, 2) * m.head_k_dim**-0.5
    k = _l2(k.view(batch, length, m.num_k_heads, -1)).repeat_interleave(shared, 2)
    beta = m.in_proj_b(x).float().sigmoid()
    log_decay = -m.A_log.float().exp() * F.softplus(m.in_proj_a(x).float() + m.dt_bias)
    with torch.autocast(x.device.type, enabled=False):
        out = gated_delta(q, k, v.reshape(batch, length, m.num_v_heads, -1), log_decay, beta)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + m.norm.variance_epsilon)
    out = out * m.norm.weight * F.silu(z.float())
    return m.out_proj(out.reshape(batch, length, -1).to(x.dtype))


def mixture(x: torch.Tensor, m: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All experts as two dense products, unchosen ones weighted zero.

    Four times the work of the chosen experts alone, but as large products with nothing sorted or gathered.

    Returns:
        output ``[B, T, D]``, the load-balancing loss (1 when even), and each expert's share of assignments ``[E]``.
    """
    flat = x.reshape(-1, x.shape[-1])
    experts, router = m.experts, m.gate
    with torch.autocast(x.device.type, enabled=False):
        probability = (flat.float() @ router.weight.float().mT).softmax(-1)
    top, index = probability.topk(router.top_k, -1)
    top = top / top.sum(-1, keepdim=True)
    weight = torch.zeros_like(probability).scatter(-1, index, top)
    share = (weight > 0).float().mean(0) / router.top_k
    balance = router.num_experts * (share * probability.mean(0)).sum()

    up = F.linear(flat, experts.gate_up_proj.flatten(0, 1))
    gate, up = up.view(-1, router.num_experts, 2, experts.intermediate_dim).unbind(2)
    hidden = (F.silu(gate) * up * weight.to(up.dtype).unsqueeze(-1)).flatten(1)
    out = F.linear(hidden, experts.down_proj.transpose(0, 1).flatten(1))
    s = m.shared_expert
    alone = s.down_proj(F.silu(s.gate_proj(flat)) * s.up_proj(flat))
    out = out + torch.sigmoid(m.shared_expert_gate(flat)) * alone
    return out.view_as(x), balance, share.detach()


def delta_block(x: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One Gated DeltaNet layer: output, balance loss, expert shares."""
    x = x + delta_net(rms(x, layer.input_layernorm), layer.linear_attn)
    y, balance, share = mixture(rms(x, layer.post_attention_layernorm), layer.mlp)
    return x + y, balance, share


def attention_block(
    x: torch.Tensor, layer: Any, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One full-attention layer: output, balance loss, expert shares."""
    x = x + attention(rms(x, layer.input_layernorm), layer.self_attn, cos, sin)
    y, balance, share = mixture(rms(x, layer.post_attention_layernorm), layer.mlp)
    return x + y, balance, share


def token_loss(x: torch.Tensor, norm: Any, matrix: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each position ``[B, T]`` from the state before its final norm."""
    logits = F.linear(rms(x, norm), matrix)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)


class Forward:
    """The forward pass for training; its blocks can be compiled without changing what they compute."""

    def __init__(self, config: ModelConfig, model: Any, head: DraftHead) -> None:
        self.config, self.model, self.head = config, model, head
        self.delta_block, self.attention_block, self.token_loss = delta_block, attention_block, token_loss

    def compile(self) -> None:
        """Compile each kind of block once per sequence length."""
        self.delta_block = torch.compile(delta_block, dynamic=False)
        self.attention_block = torch.compile(attention_block, dynamic=False)
        self.token_loss = torch.compile(token_loss, dynamic=False)

    def trunk(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states before the final norm ``[B, T, D]``, balance losses ``[L]``, expert shares ``[L, E]``."""
        model = self.model.model
        x = model.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = rotary(self.config, tokens.shape[1], x.device)
        balances, shares = [], []
        for i, layer in enumerate(model.layers):
            if self.config.is_full_attention(i):
                x, balance, share = self.attention_block(x, layer, cos, sin)
            else:
                x, balance, share = self.delta_block(x, layer)
            balances.append(balance)
            shares.append(share)
        return x, torch.stack(balances), torch.stack(shares)

    def draft(self, hidden: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's state before its final norm, from normed hidden states and the tokens after them."""
        head = self.head
        embedded = rms(self.model.model.embed_tokens(following), head.pre_fc_norm_embedding)
        x = torch.cat((embedded.to(hidden.dtype), rms(hidden, head.pre_fc_norm_hidden)), -1)
        cos, sin = rotary(self.config, following.shape[1], x.device)
        x, balance, _ = self.attention_block(head.fc(x), head.layers[0], cos, sin)
        return x, balance

    def losses(self, window: torch.Tensor) -> dict[str, torch.Tensor]:
        """Losses of windows ``[B, T + 2]``: ``next`` and ``draft`` by position ``[B, T]``, ``balance``, ``share``."""
        x, balances, shares = self.trunk(window[:, :-2])
        following = window[:, 1:-1].contiguous()
        matrix = self.model.lm_head.weight
        drafted, balance = self.draft(rms(x, self.model.model.norm), following)
        return {
            "next": self.token_loss(x, self.model.model.norm, matrix, following),
            "draft": self.token_loss(drafted, self.head.norm, matrix, window[:, 2:].contiguous()),
            "balance": torch.cat((balances, balance[None])).mean(),
            "share": shares,
        }
