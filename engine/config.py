"""The two configurations of the engine: what the model is, and how it is run.

`ModelConfig` is the architecture (read from a checkpoint's ``config.json``); it never
changes how fast a run is by choice. `EngineConfig` holds every optimisation as a field;
it never changes what the model computes beyond rounding. Both are plain dataclasses and
neither imports MLX, so plans and reports can read them on any machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

GROUP_SIZE = 64
"""Inputs that share one scale and bias in MLX's affine packing (the only group size supported)."""


class ConfigError(ValueError):
    """A configuration that names something unknown or contradicts itself."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a `qwen3_5_moe` text model.

    Field names follow ``config.json``. Dimensions are counts of elements; `rope_theta` is in
    radians' base; defaults are those of Qwen3.6-35B-A3B.
    """

    vocab_size: int = 248_320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    full_attention_interval: int = 4
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 262_144
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    mtp_num_hidden_layers: int = 1
    bos_token_id: int | None = 248_044
    eos_token_ids: tuple[int, ...] = (248_046, 248_044)

    # -- derived sizes ---------------------------------------------------------------------

    def is_full_attention(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is full attention; the others are Gated DeltaNet."""
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers, the only ones whose cache grows."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_full_attention(i))

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers, whose state has a constant size."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_full_attention(i))

    @property
    def rotary_dims(self) -> int:
        """Leading dimensions of a head that rotary embedding turns; the rest pass through."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Width of all Gated DeltaNet key heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all Gated DeltaNet value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values side by side."""
        return 2 * self.key_dim + self.value_dim

    def cache_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that one token adds over all attention layers."""
        row = self.num_key_value_heads * self.head_dim * itemsize
        return 2 * row * len(self.attention_layers)

    def state_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the constant part of a cache: float32 recurrent state and convolution rows."""
        state = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        conv = (self.linear_conv_kernel_dim - 1) * self.conv_dim
        return len(self.linear_layers) * (4 * state + itemsize * conv)

    # -- config.json -----------------------------------------------------------------------

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Read ``config.json`` (nested ``text_config`` or flat).

        Raises:
            ConfigError: another architecture, a missing field, or a shape this engine cannot run.
        """
        text = config.get("text_config", config)
        kind = config.get("model_type", text.get("model_type", ""))
        if kind not in ("qwen3_5_moe", "qwen3_5_moe_text"):
            raise ConfigError(
                f"config.json: model_type is {kind!r}; this engine runs qwen3_5_moe "
                "(Qwen3.5 and Qwen3.6 mixture-of-experts) only"
            )
        try:
            return cls._from_text(config, text)
        except (TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
            raise ConfigError(f"config.json: a field has a value of the wrong kind ({error})") from error

    @classmethod
    def _from_text(cls, config: dict[str, Any], text: dict[str, Any]) -> ModelConfig:
        for name, (default, runs) in _FIXED.items():
            if text.get(name, default) != runs:
                raise ConfigError(f"config.json: {name} is {text[name]!r}; this engine runs {runs!r} only")
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        values: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            if f.name in ("eos_token_ids", "rope_theta", "partial_rotary_factor"):
                continue
            if f.name in text:
                values[f.name] = text[f.name]
            elif f.name in _REQUIRED:
                raise ConfigError(f"config.json: {f.name} is missing from the text configuration")
        values["rope_theta"] = float(rope.get("rope_theta", text.get("rope_theta", 1e7)))
        values["partial_rotary_factor"] = float(
            rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        )
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        values["eos_token_ids"] = tuple(eos if isinstance(eos, list) else [eos] if eos is not None else [])
        values.setdefault("mtp_num_hidden_layers", 0)
        kind_of_rope = rope.get("rope_type", rope.get("type", "default"))
        if kind_of_rope != "default":
            raise ConfigError(f"config.json: rope type {kind_of_rope!r} is not supported, only 'default'")
        made = cls(**values)
        made.validate()
        return made

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` form, nested under ``text_config`` as checkpoints carry it."""
        text = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        eos = text.pop("eos_token_ids")
        theta, factor = text.pop("rope_theta"), text.pop("partial_rotary_factor")
        interval = self.full_attention_interval
        text |= {
            "model_type": "qwen3_5_moe_text",
            "eos_token_id": eos[-1] if eos else None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": factor,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "layer_types": [
                "full_attention" if (i + 1) % interval == 0 else "linear_attention"
                for i in range(self.num_hidden_layers)
            ],
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "tie_word_embeddings": False,
            "mamba_ssm_dtype": "float32",
        }
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "text_config": text,
        }

    def validate(self) -> None:
        """Raise `ConfigError` for sizes that do not fit together, naming the field."""

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ConfigError(f"config.json: {what}")

        counts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "int"}
        for name, value in counts.items():
            least = 0 if name == "mtp_num_hidden_layers" else 1
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
            need(ok, f"{name} is {value!r}, not a whole number from {least} up")
        for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
            need(good, f"{name} is {value!r}, not a number above 0")
        need(self.partial_rotary_factor <= 1, f"partial_rotary_factor is {self.partial_rotary_factor}, beyond 1")
        need(self.hidden_size % GROUP_SIZE == 0, f"hidden_size {self.hidden_size} is no multiple of {GROUP_SIZE}")
        need(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is no multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )
        need(
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
            f"linear_num_value_heads {self.linear_num_value_heads} is no multiple of "
            f"linear_num_key_heads {self.linear_num_key_heads}",
        )
        need(
            0 < self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok {self.num_experts_per_tok} does not fit num_experts {self.num_experts}",
        )
        need(self.num_hidden_layers > 0, "num_hidden_layers must be at least 1")

    def hash(self) -> str:
        """Twelve hex digits that name this architecture in rows."""
        return _digest(dataclasses.asdict(self))


_FIXED = {
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
    "attn_output_gate": (True, True),
    "tie_word_embeddings": (False, False),
}
"""What the forward pass takes for granted: (value where config.json is silent, value it runs)."""

_REQUIRED = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim num_experts num_experts_per_tok moe_intermediate_size "
    "shared_expert_intermediate_size".split()
)


# -- EngineConfig: every optimisation is a field ------------------------------------------------
# Not frozen: OmegaConf marks frozen dataclasses read-only and refuses to merge an arm into them.


@dataclass
class ExpertsConfig:
    """Variant of the `experts` op and its tile (``"best"`` = tuned, else first supported)."""

    variant: str = "best"
    tile: str = "best"


@dataclass
class DecodeAttentionConfig:
    """Variant of `decode_attention` and what its kernels are told.

    heads: query heads that share one fetch of a key/value row (``"best"`` or 1, 2, 4, 8).
    split: ``"best"``, ``"none"`` (one pass), ``"chunks"`` (256 positions each) or ``"blocks"`` (fixed number).
    lanes: ``"best"``, ``"coalesced"``, ``"apart"``, or matrix units: ``"tiles"``, ``"tiles_ahead"``.
    min_context: positions shown from which ``split="blocks"`` applies where it is named; fewer are split in chunks.
    """

    variant: str = "best"
    heads: str = "best"
    split: str = "best"
    lanes: str = "best"
    blocks: int = 128
    min_context: int = 32_768


@dataclass
class CacheConfig:
    """Layout of keys and values: ``"contiguous"``, growing by `step` positions, or ``"paged"``, by pages of 256."""

    layout: Literal["contiguous", "paged"] = "contiguous"
    step: int = 256


@dataclass
class PrefillConfig:
    """How a prompt is worked off.

    chunk: tokens a pass. submission: ``"chunk"`` (no host wait inside) or ``"layer"`` (wait after each).
    stretch: layers that are submitted together while the host still builds the rest of a chunk, as many as the model
        has or more for all at once; 0 is the engine's choice by device.
    """

    chunk: int = 2048
    submission: Literal["chunk", "layer"] = "chunk"
    stretch: int = 0


@dataclass
class DecodeConfig:
    """How a decode step is driven.

    feedback: ``"device"`` (token stays there) or ``"host"`` (read back each step).
    trace: ``"best"``, ``"replay"`` (CUDA: the step recorded once and replayed as one graph), ``"step"`` (compiled as a
        whole), ``"layer"`` or ``"eager"``.
    fusion: ``"best"``, ``"off"``, ``"partial"`` or ``"full"``.
    in_flight: steps submitted before the oldest is read (1 = no overlap).
    logprobs: also compute full-vocabulary log-probabilities, the work MLX-LM does.
    """

    feedback: Literal["device", "host"] = "device"
    trace: Literal["best", "replay", "step", "layer", "eager"] = "best"
    fusion: Literal["best", "off", "partial", "full"] = "best"
    in_flight: int = 2
    logprobs: bool = False


@dataclass
class SpeculativeConfig:
    """Drafting tokens and verifying several in one pass.

    drafter: ``"off"``, ``"mtp"`` (the checkpoint's head), ``"ngram"`` (lookup in the context) or ``"model"`` (a
    second engine). depth: tokens drafted, 1 to 7; with `adaptive` the most. draft_vocab: tokens that ``mtp`` may draft,
    the most frequent ones (0 = all). exact_verify: rows one at a time through the plain step, so that not
    even near-ties differ. rollback: how wrong rows are taken back: ``"replay"`` the right ones' recurrences, keep
    the ``"states"`` after every row, or ``"best"`` by cost; recorded passes (``decode.trace=replay``, greedy) always
    keep the states. force: ``"none"``, or the probability 0 to 1 with which
    each draft is accepted whatever the model says: for measuring costs, the text is then meaningless.
    """

    drafter: Literal["off", "mtp", "ngram", "model"] = "off"
    depth: int = 1
    draft_vocab: int = 0
    adaptive: bool = False
    exact_verify: bool = False
    rollback: Literal["best", "replay", "states"] = "best"
    force: str = "none"


@dataclass
class EngineConfig:
    """Every optimisation of the engine. The default is `engine=full`: everything on, ``best``.

    overlap: in passes of many rows the shared expert runs beside the routed ones, on a stream of its own.
    A variant field names a variant of the op or ``"best"``. A named variant that cannot run on the
    device raises with its reason; it never falls back.
    """

    linear: str = "best"
    route: str = "best"
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    decode_attention: DecodeAttentionConfig = field(default_factory=DecodeAttentionConfig)
    prefill_attention: str = "best"
    gated_delta: str = "best"
    head: str = "best"
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    overlap: bool = False
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Build from nested plain values.

        Raises:
            ConfigError: an unknown field (full dotted name) or a value of the wrong kind.
        """
        return _build(cls, values, "engine")

    def validate(self) -> None:
        """Raise `ConfigError` for a value that `from_dict` would refuse: a dataclass takes any."""
        self.from_dict(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, the form kept in rows."""
        return dataclasses.asdict(self)

    def hash(self) -> str:
        """Twelve hex digits that name this configuration in rows."""
        return _digest(self.to_dict())


_MAY_BE_ZERO = frozenset({"draft_vocab", "min_context", "stretch"})
"""Numbers for which 0 means something; all others count from 1."""


def _build(cls: Any, values: dict[str, Any], where: str) -> Any:
    import typing

    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}.{name} is no field; known: {', '.join(sorted(known))}")
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}.{name} takes fields, got {value!r}")
            made[name] = _build(kind, value, f"{where}.{name}")
        elif typing.get_origin(kind) is Literal:
            allowed = typing.get_args(kind)
            if value not in allowed:
                raise ConfigError(f"{where}.{name}={value!r}: must be one of {', '.join(map(str, allowed))}")
            made[name] = value
        else:
            if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
                value = str(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ConfigError(f"{where}.{name}={value!r}: must be of type {kind.__name__}")
            least = 0 if name in _MAY_BE_ZERO else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ConfigError(f"{where}.{name}={value!r}: must be at least {least}")
            made[name] = value
    return cls(**made)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
