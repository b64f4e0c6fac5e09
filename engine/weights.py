"""The weights of a model as the forward pass reads them, whatever file they came from.

Names and layouts are MLX-LM's: a packed matrix is ``weight`` (uint32, 32/bits codes a word along the
input dimension), ``scales`` and ``biases`` (one pair per 64 inputs). Nothing is repacked at load, so the
engine and MLX-LM can share one copy (`Weights.from_tensors` takes the arrays of a loaded mlx_lm model).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from engine.config import GROUP_SIZE, ModelConfig


class WeightError(ValueError):
    """A tensor that is missing, of the wrong shape, or packed in a way the engine cannot run.

    `tensor` is its name without ``language_model.``, so that a loader can add the file it came from.
    """

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


@dataclass(frozen=True)
class Matrix:
    """A weight ``[..., out, in]``, packed (`bits` 4 or 8) or dense (`bits` None).

    ``weight`` is uint32 ``[..., out, in * bits / 32]`` if packed, else a float ``[..., out, in]``;
    ``scales`` and ``biases`` are ``[..., out, in / 64]``. Leading dimensions are experts.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int | None = None
    group_size: int = GROUP_SIZE

    @property
    def packed(self) -> bool:
        """Whether the weight is stored as integer codes."""
        return self.bits is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``(..., out, in)``."""
        *lead, out, words = self.weight.shape
        return (*lead, out, words * 32 // self.bits if self.bits else words)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases together."""
        return sum(a.nbytes for a in (self.weight, self.scales, self.biases) if a is not None)

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """The expanded float matrix ``[..., out, in]``."""
        if self.scales is None:
            return self.weight.astype(dtype)
        scales, biases = self.scales, self.biases
        if dtype == mx.float32 and biases is not None:
            # A reference must not round to the type of the scales first.
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        made = mx.dequantize(self.weight, scales, biases, group_size=self.group_size, bits=self.bits)
        return made.astype(dtype)


@dataclass(frozen=True)
class Attention:
    """Full attention: `q_proj` yields query and gate interleaved per head."""

    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    q_norm: mx.array
    k_norm: mx.array


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet: `conv` is ``[conv_dim, kernel, 1]``, `a_log` float32 ``[value heads]``, `norm` a plain gain."""

    in_proj_qkv: Matrix
    in_proj_z: Matrix
    in_proj_b: Matrix
    in_proj_a: Matrix
    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    out_proj: Matrix


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: router `gate`, routed stacks ``[experts, out, in]`` and the shared expert."""

    gate: Matrix
    gate_proj: Matrix
    up_proj: Matrix
    down_proj: Matrix
    shared_gate_proj: Matrix
    shared_up_proj: Matrix
    shared_down_proj: Matrix
    shared_gate: Matrix


@dataclass(frozen=True)
class Layer:
    """One decoder layer; exactly one of `attention` and `gated_delta` is set."""

    input_norm: mx.array
    post_norm: mx.array
    experts: Experts
    attention: Attention | None = None
    gated_delta: GatedDelta | None = None


@dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction head; norms are stored shifted (gain = weight), like the trunk's."""

    fc: Matrix
    norm_embedding: mx.array
    norm_hidden: mx.array
    norm: mx.array
    layer: Layer


@dataclass(frozen=True)
class Weights:
    """All weights of a model. `embed` and `lm_head` may be packed; `mtp` is None if the checkpoint has none."""

    embed: Matrix
    layers: tuple[Layer, ...]
    norm: mx.array
    lm_head: Matrix
    mtp: Mtp | None = None
    tensors: Mapping[str, mx.array] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(a.nbytes for a in self.tensors.values())

    @classmethod
    def from_tensors(
        cls, config: ModelConfig, tensors: Mapping[str, mx.array], dtype: mx.Dtype | None = None
    ) -> Weights:
        """Bind MLX-LM tensor names to the structure the forward pass reads.

        Args:
            config: the architecture; every shape is checked against it.
            tensors: arrays by MLX-LM name (``language_model.model.layers.0…``; the ``language_model.``
                prefix may be absent), norms already shifted, ``mtp.*`` optional. Arrays are borrowed.
            dtype: cast floats to this activation type (``A_log`` stays float32); None leaves them.

        Raises:
            WeightError: names the tensor, both shapes, or the unsupported packing.
        """
        return _Binder(config, tensors, dtype).bind()


class _Binder:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, mx.array], dtype: mx.Dtype | None):
        strip = "language_model."
        self.config, self.dtype = config, dtype
        self.source = {k[len(strip) :] if k.startswith(strip) else k: v for k, v in tensors.items()}
        self.used: dict[str, mx.array] = {}

    def tensor(self, name: str, shape: tuple[int, ...], keep: bool = False) -> mx.array:
        if name not in self.source:
            raise WeightError(f"tensor {name} is missing (expected shape {list(shape)})", name)
        value = self.source[name]
        if tuple(value.shape) != shape:
            raise WeightError(f"tensor {name} has shape {list(value.shape)}, expected {list(shape)}", name)
        if self.dtype is not None and not keep and value.dtype != mx.uint32:
            value = value.astype(self.dtype)
        self.used[name] = value
        return value

    def decay(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """A tensor in float32, cast here and now: a cast left for later is a launch in every step."""
        value = self.tensor(name, shape, keep=True)
        if value.dtype != mx.float32:
            value = value.astype(mx.float32)
            mx.eval(value)
        return value

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        *lead, out, width = shape
        scales = self.source.get(f"{name}.scales")
        if scales is None:
            return Matrix(self.tensor(f"{name}.weight", shape))
        if f"{name}.weight" not in self.source:
            raise WeightError(f"tensor {name}.weight is missing though {name}.scales is there", f"{name}.weight")
        groups = scales.shape[-1]
        size = width // groups if groups else 0
        words = self.source[f"{name}.weight"].shape[-1]
        bits = words * 32 // width if width else 0
        if size != GROUP_SIZE or bits not in (4, 8):
            raise WeightError(
                f"tensor {name} is packed with {bits} bits in groups of {size}; "
                f"this engine runs 4 and 8 bits in groups of {GROUP_SIZE}",
                f"{name}.weight",
            )
        if f"{name}.biases" not in self.source:
            raise WeightError(
                f"tensor {name} has scales but no biases: only affine packing is supported, not mxfp4",
                f"{name}.weight",
            )
        return Matrix(
            self.tensor(f"{name}.weight", (*lead, out, width * bits // 32), keep=True),
            self.tensor(f"{name}.scales", (*lead, out, groups)),
            self.tensor(f"{name}.biases", (*lead, out, groups)),
            bits,
        )

    def layer(self, at: str, full: bool) -> Layer:
        c = self.config
        hidden, heads = c.hidden_size, c.num_attention_heads
        attention = gated = None
        if full:
            kv = c.num_key_value_heads * c.head_dim
            a = f"{at}.self_attn"
            attention = Attention(
                self.matrix(f"{a}.q_proj", (2 * heads * c.head_dim, hidden)),
                self.matrix(f"{a}.k_proj", (kv, hidden)),
                self.matrix(f"{a}.v_proj", (kv, hidden)),
                self.matrix(f"{a}.o_proj", (hidden, heads * c.head_dim)),
                self.tensor(f"{a}.q_norm.weight", (c.head_dim,)),
                self.tensor(f"{a}.k_norm.weight", (c.head_dim,)),
            )
        else:
            g = f"{at}.linear_attn"
            vh = c.linear_num_value_heads
            gated = GatedDelta(
                self.matrix(f"{g}.in_proj_qkv", (c.conv_dim, hidden)),
                self.matrix(f"{g}.in_proj_z", (c.value_dim, hidden)),
                self.matrix(f"{g}.in_proj_b", (vh, hidden)),
                self.matrix(f"{g}.in_proj_a", (vh, hidden)),
                self.tensor(f"{g}.conv1d.weight", (c.conv_dim, c.linear_conv_kernel_dim, 1)),
                self.decay(f"{g}.A_log", (vh,)),
                self.tensor(f"{g}.dt_bias", (vh,)),
                self.tensor(f"{g}.norm.weight", (c.linear_value_head_dim,)),
                self.matrix(f"{g}.out_proj", (hidden, c.value_dim)),
            )
        m, e = f"{at}.mlp", c.num_experts
        wide, shared = c.moe_intermediate_size, c.shared_expert_intermediate_size
        experts = Experts(
            self.matrix(f"{m}.gate", (e, hidden)),
            self.matrix(f"{m}.switch_mlp.gate_proj", (e, wide, hidden)),
            self.matrix(f"{m}.switch_mlp.up_proj", (e, wide, hidden)),
            self.matrix(f"{m}.switch_mlp.down_proj", (e, hidden, wide)),
            self.matrix(f"{m}.shared_expert.gate_proj", (shared, hidden)),
            self.matrix(f"{m}.shared_expert.up_proj", (shared, hidden)),
            self.matrix(f"{m}.shared_expert.down_proj", (hidden, shared)),
            self.matrix(f"{m}.shared_expert_gate", (1, hidden)),
        )
        return Layer(
            self.tensor(f"{at}.input_layernorm.weight", (hidden,)),
            self.tensor(f"{at}.post_attention_layernorm.weight", (hidden,)),
            experts,
            attention,
            gated,
        )

    def bind(self) -> Weights:
        c = self.config
        embed = self.matrix("model.embed_tokens", (c.vocab_size, c.hidden_size))
        layers = tuple(self.layer(f"model.layers.{i}", c.is_full_attention(i)) for i in range(c.num_hidden_layers))
        norm = self.tensor("model.norm.weight", (c.hidden_size,))
        head = self.matrix("lm_head", (c.vocab_size, c.hidden_size))
        mtp = None
        if "mtp.norm.weight" in self.source:
            mtp = Mtp(
                self.matrix("mtp.fc", (c.hidden_size, 2 * c.hidden_size)),
                self.tensor("mtp.pre_fc_norm_embedding.weight", (c.hidden_size,)),
                self.tensor("mtp.pre_fc_norm_hidden.weight", (c.hidden_size,)),
                self.tensor("mtp.norm.weight", (c.hidden_size,)),
                self.layer("mtp.layers.0", full=True),
            )
        return Weights(embed, layers, norm, head, mtp, self.used)


def matrices(weights: Weights) -> Iterator[tuple[str, Matrix]]:
    """Every matrix with its tensor name, for tables of bits by module."""
    for name, value in weights.tensors.items():
        if name.endswith(".weight") and value.ndim >= 2 and "conv1d" not in name:
            base = name[: -len(".weight")]
            scales = weights.tensors.get(f"{base}.scales")
            bits = None
            if scales is not None:
                bits = value.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            yield base, Matrix(value, scales, weights.tensors.get(f"{base}.biases"), bits)
