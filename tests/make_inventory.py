"""Writes tests/data/qwen3.6-35b-a3b-4bit.json.gz: the tensor list of the published 4-bit checkpoint, without its data.

Run it as ``python tests/make_inventory.py``; it needs the test extras. The text half is what MLX-LM's own model class
holds after its own quantisation recipe, the vision half what transformers' own vision model holds, so that
the list is independent of the engine that is tested against it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3_5_moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

TARGET = Path(__file__).parent / "data" / "qwen3.6-35b-a3b-4bit.json.gz"
LAYERS = 40


def text_config() -> dict[str, Any]:
    """The text half of config.json."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }


def vision_config() -> dict[str, Any]:
    """The vision half of config.json."""
    return {
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def document() -> dict[str, Any]:
    """The whole config.json."""
    table: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    for layer in range(LAYERS):
        for gate in ("gate", "shared_expert_gate"):
            table[f"language_model.model.layers.{layer}.mlp.{gate}"] = {"group_size": 64, "bits": 8}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe",
        "quantization": table,
        "quantization_config": table,
        "text_config": text_config(),
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": vision_config(),
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def text_tensors() -> dict[str, list[Any]]:
    """Names, types and shapes of MLX-LM's model, quantised by its own rule; nothing is evaluated."""
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(document()))
    floats = tree_map_with_path(lambda _, v: v.astype(mx.bfloat16), model.parameters())
    model.update(floats)
    rule = model.language_model.quant_predicate
    nn.quantize(model, group_size=64, bits=4, class_predicate=lambda p, m: hasattr(m, "to_quantized") and rule(p, m))
    kinds = {mx.bfloat16: "BF16", mx.uint32: "U32"}
    return {name: [kinds[v.dtype], list(v.shape)] for name, v in tree_flatten(model.parameters())}


def vision_tensors() -> dict[str, list[Any]]:
    """Names, types and shapes of the vision tower; MLX keeps the patch kernel channels-last."""
    fields = {k: v for k, v in vision_config().items() if k != "model_type"}
    with torch.device("meta"):
        model = Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**fields))
    made = {}
    for name, value in model.state_dict().items():
        shape = list(value.shape)
        if name == "patch_embed.proj.weight":
            shape = [shape[0], *shape[2:], shape[1]]
        made[f"vision_tower.{name}"] = ["BF16", shape]
    return made


if __name__ == "__main__":
    value = {"config": document(), "tensors": text_tensors() | vision_tensors()}
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0))
    print(TARGET, len(value["tensors"]), "tensors,", TARGET.stat().st_size, "bytes")
