"""Seeded random checkpoints of any geometry, in memory or written to disk as real shards.

Random weights have the real shapes, packing and byte counts, so speed and memory measured on them
carry over; what the model says does not. Nothing is quantised on the way: packed codes are drawn as raw
random words and scales are chosen for the spread wanted, which fills the full 19.5 GB in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pydoc_data.topics
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import mlx.core as mx
import tokenizers

from engine.config import GROUP_SIZE, ModelConfig
from engine.weights import Weights, matrices

REAL = ModelConfig()
"""The geometry of Qwen3.6-35B-A3B."""

TINY_TEXT_TOKENS = 448
"""Byte-pair tokens of the small tokenizer; its special tokens follow at once, as in the real one."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens in id order, starting right after the byte-pair tokens."""

THINK_TOKENS = ("<think>", "</think>")
"""Added tokens that decoding keeps visible, as in the real tokenizer."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

Layout = Literal["mlx", "hf", "hf_unfused"]


class SyntheticError(ValueError):
    """A synthetic checkpoint that cannot be made as asked."""


def tiny_config(
    layers: int = 4, *, hidden_size: int = 256, experts: int = 32, vocab_size: int = 512, **fields: Any
) -> ModelConfig:
    """A small geometry with every real head size (256, 64 rotary; 128; 8 query heads a key/value head).

    Args:
        layers: decoder layers; a multiple of 4 keeps the real 3:1 mix.
        hidden_size: width of the residual stream, a multiple of 64.
        experts: routed experts, of which 8 are chosen.
        vocab_size: padded vocabulary; the small tokenizer has 453 real tokens.
        fields: any other field of `ModelConfig`.
    """
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": experts,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "max_position_embeddings": 4096,
        "bos_token_id": TINY_TEXT_TOKENS,
        "eos_token_ids": (TINY_TEXT_TOKENS + 2, TINY_TEXT_TOKENS),
    }
    made = dataclasses.replace(REAL, **(values | fields))
    made.validate()
    return made


# -- tensors in memory ---------------------------------------------------------------------------


def make_weights(
    config: ModelConfig,
    seed: int = 0,
    bits: int | None = 4,
    dtype: mx.Dtype = mx.bfloat16,
    mtp: bool = False,
    skew: float = 1.0,
) -> Weights:
    """Random weights that keep activations of order one at any depth.

    Matrices have standard deviation ``1 / sqrt(in)`` (the embedding 1), norm gains lie near 1, and decay per
    step is spread from almost 1 to below a half, so states neither vanish nor grow. Each tensor is drawn from
    its own key (seed and name): `mtp`, `skew` or the number of layers do not change the others.

    Args:
        config: the geometry.
        seed: any integer from 0 below 2**32.
        bits: 4 or 8, the packing of all matrices but the router and shared-expert gates, which are always
            8 when packed; None for dense matrices of `dtype`.
        dtype: floats: gains, scales, biases, dense matrices.
        mtp: add the multi-token-prediction head.
        skew: how often the busiest expert of each layer is chosen, in multiples of the even share
            (`num_experts_per_tok` / `num_experts`). Expert ``layer % num_experts`` has its router row scaled
            so that its logit, normal with a larger spread, exceeds the usual top-k threshold this often. It is
            approximate: deep random layers correlate their tokens.

    Raises:
        SyntheticError: `bits` is none of 4, 8, None, or `skew` asks for more than 45 % of all tokens.
    """
    if bits not in (4, 8, None):
        raise SyntheticError(f"bits={bits}: packed weights have 4 or 8 bits, None makes dense ones")
    return Weights.from_tensors(config, _Maker(config, seed, bits, dtype, _router_gain(config, skew)).model(mtp))


def _router_gain(config: ModelConfig, skew: float) -> float:
    """Factor on one router row whose logit passes the top-k threshold `skew` times its even share."""
    share = config.num_experts_per_tok / config.num_experts
    if skew == 1.0 or share == 1.0:
        return 1.0
    if not 1.0 < skew <= 0.45 / share:
        raise SyntheticError(
            f"skew={skew:g}: with {config.num_experts_per_tok} of {config.num_experts} experts it must lie "
            f"between 1 and {0.45 / share:g}"
        )
    normal = NormalDist()
    return normal.inv_cdf(1 - share) / normal.inv_cdf(1 - skew * share)


class _Maker:
    def __init__(self, config: ModelConfig, seed: int, bits: int | None, dtype: mx.Dtype, router_gain: float):
        self.config, self.seed, self.bits, self.dtype, self.router_gain = config, seed, bits, dtype, router_gain
        self.tensors: dict[str, mx.array] = {}

    def key(self, name: str) -> mx.array:
        return mx.random.key((self.seed << 32) | zlib.crc32(name.encode()))

    def put(self, name: str, value: mx.array) -> None:
        self.tensors[name] = value.astype(self.dtype)

    def gain(self, name: str, size: int) -> None:
        self.put(f"{name}.weight", mx.random.uniform(0.8, 1.2, (size,), key=self.key(name)))

    def matrix(self, name: str, *shape: int, std: float | None = None, bits: int | None = None) -> None:
        """A matrix ``[..., out, in]`` with standard deviation `std` (default ``1 / sqrt(in)``)."""
        width = shape[-1]
        spread = float(width**-0.5 if std is None else std)
        if self.bits is None:
            self.put(f"{name}.weight", mx.random.normal(shape, scale=spread, key=self.key(name)))
            return
        bits = self.bits if bits is None else bits
        levels = 2**bits
        scale = spread / math.sqrt((levels**2 - 1) / 12)
        groups = (*shape[:-1], width // GROUP_SIZE)
        scales = mx.random.uniform(0.8 * scale, 1.2 * scale, groups, key=self.key(f"{name}.scales"))
        self.tensors[f"{name}.weight"] = _random_words((*shape[:-1], width * bits // 32), self.key(name))
        self.put(f"{name}.scales", scales)
        self.put(f"{name}.biases", scales * -((levels - 1) / 2))

    def attention(self, at: str) -> None:
        c = self.config
        kv, wide = c.num_key_value_heads * c.head_dim, c.num_attention_heads * c.head_dim
        self.matrix(f"{at}.q_proj", 2 * wide, c.hidden_size)
        self.matrix(f"{at}.k_proj", kv, c.hidden_size)
        self.matrix(f"{at}.v_proj", kv, c.hidden_size)
        self.matrix(f"{at}.o_proj", c.hidden_size, wide)
        self.gain(f"{at}.q_norm", c.head_dim)
        self.gain(f"{at}.k_norm", c.head_dim)

    def gated_delta(self, at: str) -> None:
        c, heads = self.config, (self.config.linear_num_value_heads,)
        self.matrix(f"{at}.in_proj_qkv", c.conv_dim, c.hidden_size)
        self.matrix(f"{at}.in_proj_z", c.value_dim, c.hidden_size)
        self.matrix(f"{at}.in_proj_b", *heads, c.hidden_size)
        self.matrix(f"{at}.in_proj_a", *heads, c.hidden_size)
        taps = c.linear_conv_kernel_dim
        conv = mx.random.normal((c.conv_dim, taps, 1), scale=taps**-0.5, key=self.key(f"{at}.conv1d"))
        self.put(f"{at}.conv1d.weight", conv)
        self.put(f"{at}.A_log", mx.log(mx.random.uniform(0.01, 16.0, heads, key=self.key(f"{at}.A_log"))))
        # A step size spread evenly in its logarithm from 0.001 to 0.1, stored through softplus's inverse.
        step = mx.exp(mx.random.uniform(math.log(1e-3), math.log(0.1), heads, key=self.key(f"{at}.dt_bias")))
        self.put(f"{at}.dt_bias", mx.log(mx.expm1(step)))
        self.gain(f"{at}.norm", c.linear_value_head_dim)
        self.matrix(f"{at}.out_proj", c.hidden_size, c.value_dim)

    def experts(self, at: str, busiest: int) -> None:
        c = self.config
        count, wide, shared = c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size
        self.matrix(f"{at}.gate", count, c.hidden_size, bits=8)
        if self.router_gain != 1.0:
            factor = mx.where(mx.arange(count) == busiest, self.router_gain, 1.0)[:, None]
            for part in ("weight",) if self.bits is None else ("scales", "biases"):
                self.put(f"{at}.gate.{part}", self.tensors[f"{at}.gate.{part}"] * factor)
        for part, shape in (
            ("gate_proj", (wide, c.hidden_size)),
            ("up_proj", (wide, c.hidden_size)),
            ("down_proj", (c.hidden_size, wide)),
        ):
            self.matrix(f"{at}.switch_mlp.{part}", count, *shape)
        self.matrix(f"{at}.shared_expert.gate_proj", shared, c.hidden_size)
        self.matrix(f"{at}.shared_expert.up_proj", shared, c.hidden_size)
        self.matrix(f"{at}.shared_expert.down_proj", c.hidden_size, shared)
        self.matrix(f"{at}.shared_expert_gate", 1, c.hidden_size, bits=8)

    def layer(self, at: str, index: int, full: bool) -> None:
        self.gain(f"{at}.input_layernorm", self.config.hidden_size)
        self.gain(f"{at}.post_attention_layernorm", self.config.hidden_size)
        if full:
            self.attention(f"{at}.self_attn")
        else:
            self.gated_delta(f"{at}.linear_attn")
        self.experts(f"{at}.mlp", index % self.config.num_experts)
        # Evaluated layer by layer: the float32 intermediates of all layers at once would not fit.
        mx.eval(self.tensors)

    def model(self, mtp: bool) -> dict[str, mx.array]:
        c = self.config
        self.matrix("model.embed_tokens", c.vocab_size, c.hidden_size, std=1.0)
        for i in range(c.num_hidden_layers):
            self.layer(f"model.layers.{i}", i, c.is_full_attention(i))
        self.gain("model.norm", c.hidden_size)
        self.matrix("lm_head", c.vocab_size, c.hidden_size)
        if mtp:
            self.matrix("mtp.fc", c.hidden_size, 2 * c.hidden_size)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
                self.gain(f"mtp.{name}", c.hidden_size)
            self.layer("mtp.layers.0", 0, full=True)
        mx.eval(self.tensors)
        return self.tensors


def _random_words(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Uniform uint32 words, every bit random.

    Splitting a key is MLX's public way to its raw generator: `mx.random.randint` passes through float32 and
    leaves the low eight bits of a 32-bit word empty.
    """
    count = math.prod(shape)
    return mx.random.split(key, (count + 1) // 2).reshape(-1)[:count].reshape(shape)


# -- checkpoints on disk -------------------------------------------------------------------------


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    weights: Weights | None = None,
    *,
    seed: int = 0,
    bits: int | None = 4,
    layout: Layout = "mlx",
    dtype: mx.Dtype = mx.bfloat16,
    shard_bytes: int = 5_000_000_000,
    tokenizer: bool | tokenizers.Tokenizer = True,
    vision: bool = False,
    mtp: bool | Literal["side"] = False,
) -> Path:
    """Write a checkpoint folder that this engine, MLX-LM and (`hf` layouts) transformers can load.

    Args:
        path: folder, made if absent; files of the same names are overwritten.
        config: the geometry; its token ids are replaced by those of the tokenizer written.
        weights: the weights; None draws them with `seed` and `bits` (and the head if `mtp`).
        layout: ``"mlx"`` keeps packing and names of MLX-LM; ``"hf"`` is the raw Hugging Face form: dense, gains
            stored minus 1, convolution ``[C, 1, K]``, experts fused; ``"hf_unfused"`` one tensor an expert.
        dtype: float type of the dense tensors of the ``hf`` layouts.
        shard_bytes: most bytes of tensors in one file; a single larger tensor gets a file of its own.
        tokenizer: True trains a small byte-level one, an object is saved as it is, False writes none.
        vision: add a few vision tensors, which every text loader must skip.
        mtp: write the draft head among the shards, or with ``"side"`` as ``mtp.safetensors`` beside them.

    Returns:
        `path`.

    Raises:
        SyntheticError: `mtp` is asked for but `weights` has none.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    weights = weights or make_weights(config, seed, bits, mtp=bool(mtp))
    if mtp and weights.mtp is None:
        raise SyntheticError("mtp is asked for but these weights have no draft head: make_weights(..., mtp=True)")
    trunk = {k: v for k, v in weights.tensors.items() if not k.startswith("mtp.")}
    head = {k: v for k, v in weights.tensors.items() if k.startswith("mtp.")} if mtp else {}
    if tokenizer:
        made = train_tokenizer(config.bos_token_id) if tokenizer is True else tokenizer
        config = _write_tokenizer(path, config, made)
    document = config.to_dict()
    if layout == "mlx":
        document |= quantization(weights)
        trunk = {f"language_model.{k}": v for k, v in trunk.items()}
    else:
        source = dataclasses.replace(weights, tensors=trunk | head)
        everything = hf_tensors(source, unfused=layout == "hf_unfused", dtype=dtype)
        trunk = {k: v for k, v in everything.items() if not k.startswith("mtp.")}
        head = {k: v for k, v in everything.items() if k.startswith("mtp.")}
    _write_json(path / "config.json", document)
    _write_json(
        path / "generation_config.json",
        {
            "eos_token_id": list(config.eos_token_ids),
            "bos_token_id": config.bos_token_id,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    extra = _vision_tensors("vision_tower" if layout == "mlx" else "model.visual", dtype) if vision else {}
    form = "mlx" if layout == "mlx" else "pt"
    _write_shards(path, trunk | ({} if mtp == "side" else head) | extra, shard_bytes, form)
    if mtp == "side":
        mx.save_safetensors(str(path / "mtp.safetensors"), head, metadata={"format": form})
    return path


def quantization(weights: Weights) -> dict[str, Any]:
    """The ``quantization`` keys of config.json for packed weights: most common bits, and each exception by module."""
    bits = {name: m.bits for name, m in matrices(weights) if m.bits is not None}
    if not bits:
        return {}
    most = max(set(bits.values()), key=list(bits.values()).count)
    table: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": most, "mode": "affine"}
    for name, own in bits.items():
        if own != most:
            full = name if name.startswith("mtp.") else f"language_model.{name}"
            table[full] = {"group_size": GROUP_SIZE, "bits": own}
    return {"quantization": table, "quantization_config": table}


def hf_tensors(weights: Weights, unfused: bool = False, dtype: mx.Dtype = mx.bfloat16) -> dict[str, mx.array]:
    """The same weights under raw Hugging Face names and conventions, dense in `dtype`, in the order of `tensors`.

    Gains but that of ``linear_attn.norm`` are stored minus 1, convolutions ``[C, 1, K]``; routed experts are
    ``experts.gate_up_proj`` ``[experts, 2 * wide, hidden]`` and ``experts.down_proj``, or one tensor each.
    """
    dense = {name: m.dense(dtype) for name, m in matrices(weights)}
    made: dict[str, mx.array] = {}
    for name, value in weights.tensors.items():
        base, part = name.rsplit(".", 1)
        if part in ("scales", "biases"):
            continue
        to = f"model.language_{name}" if name.startswith("model.") else name
        if ".switch_mlp." in base:
            _put_experts(made, to.split(".switch_mlp.")[0], base, dense, unfused)
        elif base in dense:
            made[to] = dense[base]
        elif base.endswith("conv1d"):
            made[to] = value.moveaxis(1, 2).astype(dtype)
        elif "norm" in base and not base.endswith("linear_attn.norm"):
            made[to] = (value.astype(mx.float32) - 1).astype(dtype)
        else:
            made[to] = value.astype(dtype)
    return made


def _put_experts(made: dict[str, mx.array], at: str, base: str, dense: Mapping[str, mx.array], unfused: bool) -> None:
    stem, part = base.rsplit(".", 1)
    if unfused:
        for e, one in enumerate(dense[base]):
            made[f"{at}.experts.{e}.{part}.weight"] = one
    elif part == "gate_proj":
        both = [dense[f"{stem}.gate_proj"], dense[f"{stem}.up_proj"]]
        made[f"{at}.experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
    elif part == "down_proj":
        made[f"{at}.experts.down_proj"] = dense[base]


def _vision_tensors(prefix: str, dtype: mx.Dtype) -> dict[str, mx.array]:
    shapes = {
        "patch_embed.proj.weight": (8, 2, 4, 4, 3),
        "patch_embed.proj.bias": (8,),
        "blocks.0.norm1.weight": (8,),
        "blocks.0.attn.qkv.weight": (24, 8),
        "merger.norm.weight": (8,),
    }
    return {f"{prefix}.{name}": mx.zeros(shape, dtype) for name, shape in shapes.items()}


def _write_shards(path: Path, tensors: Mapping[str, mx.array], shard_bytes: int, form: str) -> None:
    shards = list(_split(tensors, shard_bytes))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for old in path.glob("model*.safetensors"):
        old.unlink()
    for name, shard in zip(names, shards):
        mx.save_safetensors(str(path / name), shard, metadata={"format": form})
    where = {key: name for name, shard in zip(names, shards) for key in shard}
    total = sum(value.nbytes for value in tensors.values())
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
    )


def _split(tensors: Mapping[str, mx.array], shard_bytes: int) -> Iterator[dict[str, mx.array]]:
    shard: dict[str, mx.array] = {}
    size = 0
    for name, value in tensors.items():
        if shard and size + value.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = value
        size += value.nbytes
    yield shard


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# -- tokenizer -----------------------------------------------------------------------------------


def train_tokenizer(text_tokens: int | None = None) -> tokenizers.Tokenizer:
    """A byte-level byte-pair tokenizer trained on the standard library's help texts.

    Args:
        text_tokens: byte-pair tokens wanted (at least 256); at most 4,096 are trained. Special tokens follow.
    """
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(max(text_tokens or TINY_TEXT_TOKENS, 256), 4096),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator((text for _, text in sorted(pydoc_data.topics.topics.items())), trainer)
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS])
    made.add_tokens([AddedToken(t, normalized=False, special=False) for t in THINK_TOKENS])
    return made


def _write_tokenizer(path: Path, config: ModelConfig, made: tokenizers.Tokenizer) -> ModelConfig:
    """Save the tokenizer's files; returns `config` with the token ids that this tokenizer gives."""
    made.save(str(path / "tokenizer.json"))
    end, start_turn, end_turn = (made.token_to_id(t) for t in SPECIAL_TOKENS)
    if None in (end, start_turn, end_turn):
        raise SyntheticError(f"the tokenizer lacks one of {', '.join(SPECIAL_TOKENS)}")
    if made.get_vocab_size() > config.vocab_size:
        raise SyntheticError(
            f"the tokenizer has {made.get_vocab_size()} tokens, more than vocab_size {config.vocab_size}"
        )
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return dataclasses.replace(config, bos_token_id=end, eos_token_ids=(end_turn, end))
