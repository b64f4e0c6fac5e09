"""Synthetic checkpoints: real shapes, sound magnitudes, and files that MLX-LM and transformers read."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from transformers import AutoModelForCausalLM

from engine.checkpoint import inspect
from engine.config import ModelConfig
from engine.generate import Engine
from engine.ops.choice import Tuned
from engine.synthetic import (
    REAL,
    SyntheticError,
    _random_words,
    make_weights,
    tiny_config,
    train_tokenizer,
    write_checkpoint,
)
from engine.weights import Weights, matrices
from sweeps.routed import busiest


def test_tiny_keeps_every_real_head_size():
    tiny = tiny_config(8)
    for name in (
        "head_dim",
        "partial_rotary_factor",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "num_experts_per_tok",
        "full_attention_interval",
    ):
        assert getattr(tiny, name) == getattr(REAL, name), name
    assert tiny.num_attention_heads // tiny.num_key_value_heads == 8
    assert tiny.attention_layers == (3, 7)
    assert ModelConfig.from_dict(tiny.to_dict()).hidden_size == tiny.hidden_size


def test_random_words_use_all_32_bits():
    # A word drawn through float32 has empty low bits, which would give eight equal codes a group.
    words = np.array(_random_words((300, 101), mx.random.key(5)))
    assert words.shape == (300, 101) and words.dtype == np.uint32
    for bit in range(32):
        assert abs(((words >> bit) & 1).mean() - 0.5) < 0.02, bit
    for nibble in range(8):
        counts = np.bincount((words.ravel() >> (4 * nibble)) & 15, minlength=16) / words.size
        assert np.abs(counts - 1 / 16).max() < 0.01, nibble


@pytest.mark.parametrize("bits", [4, 8, None])
def test_matrices_have_the_spread_of_their_width(bits):
    weights = make_weights(tiny_config(4), seed=3, bits=bits, dtype=mx.float32)
    seen = 0
    for name, matrix in matrices(weights):
        values = matrix.dense(mx.float32)
        wanted = 1.0 if name == "model.embed_tokens" else matrix.shape[-1] ** -0.5
        if values.size >= 1024:
            assert abs(values.std().item() / wanted - 1) < 0.1, name
            assert abs(values.mean().item()) < 0.2 * wanted, name
        gate = name.endswith(("mlp.gate", "shared_expert_gate"))
        assert matrix.bits == (None if bits is None else 8 if gate else bits), name
        seen += 1
    assert seen == 2 + 3 * 5 + 4 + 4 * 8


def test_every_tensor_has_its_own_draw():
    tiny = tiny_config(4)
    one, same, other = make_weights(tiny, 1), make_weights(tiny, 1), make_weights(tiny, 2)
    longer = make_weights(tiny_config(8), 1, mtp=True)
    name = "model.layers.1.mlp.switch_mlp.up_proj.weight"
    assert mx.array_equal(one.tensors[name], same.tensors[name])
    assert mx.array_equal(one.tensors[name], longer.tensors[name])
    assert not mx.array_equal(one.tensors[name], other.tensors[name])
    assert not mx.array_equal(one.tensors[name], one.tensors[name.replace("up_proj", "gate_proj")])
    assert longer.mtp is not None and one.mtp is None


def test_decay_neither_vanishes_nor_stays():
    layer = make_weights(tiny_config(4, linear_num_value_heads=64), 0, dtype=mx.float32).layers[0].gated_delta
    assert layer is not None
    step = mx.logaddexp(layer.dt_bias, mx.array(0.0))
    decay = np.array(mx.exp(-mx.exp(layer.a_log) * step))
    assert decay.min() > 0.15 and decay.max() < 1.0
    assert np.quantile(decay, 0.9) > 0.95 and np.quantile(decay, 0.1) < 0.9


def test_skew_makes_one_expert_busy():
    tiny = tiny_config(2, experts=256)
    x = mx.random.normal((4000, tiny.hidden_size), key=mx.random.key(0))
    share = tiny.num_experts_per_tok / tiny.num_experts
    for layer in range(2):
        busy = {}
        for skew in (1.0, 8.0):
            gate = make_weights(tiny, 7, dtype=mx.float32, skew=skew).layers[layer].experts.gate.dense(mx.float32)
            chosen = np.argsort(-np.array(x @ gate.T), axis=1)[:, : tiny.num_experts_per_tok]
            busy[skew] = np.bincount(chosen.ravel(), minlength=tiny.num_experts) / len(chosen) / share
        assert 5.5 < busy[8.0][layer] < 10.5
        assert busy[8.0].argmax() == layer
        assert busy[1.0].max() < 3


def test_skew_holds_for_the_rows_of_a_pass_in_every_layer():
    """As a run counts it: an expert in a quarter of all rows, not in all of one layer and none of the next."""
    tiny = tiny_config(8, hidden_size=128, experts=256)
    ids = np.random.default_rng(0).integers(0, 450, 256).tolist()
    told = {}
    for skew in (1.0, 8.0):
        engine = Engine(tiny, make_weights(tiny, 0, dtype=mx.float32, skew=skew), dtype=mx.float32, tuned=Tuned())
        told[skew] = busiest(engine, ids)["busiest_expert"]
        assert engine.position == 0 and not engine.executed()
    assert 6 < told[8.0]["mean"] < 10 and told[8.0]["least"] > 3 and told[8.0]["most"] < 14
    assert told[1.0]["mean"] < 0.6 * told[8.0]["mean"] and told[8.0]["tokens"] == 256


@pytest.mark.parametrize("skew", [0.5, 2.0])
def test_skew_out_of_reach_is_refused(skew):
    with pytest.raises(SyntheticError, match=r"8 of 32 experts .* between 1 and 1\.8"):
        make_weights(tiny_config(4), skew=skew)


def test_other_bits_are_refused():
    with pytest.raises(SyntheticError, match="bits=3"):
        make_weights(tiny_config(4), bits=3)


def test_mlx_lm_loads_the_mlx_layout(tmp_path: Path):
    tiny = tiny_config(4)
    made = make_weights(tiny, 1, mtp=True)
    write_checkpoint(tmp_path, tiny, made, shard_bytes=1_000_000, vision=True, mtp=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model, tokenizer = mlx_lm.load(str(tmp_path))
    theirs = Weights.from_tensors(tiny, dict(tree_flatten(model.parameters())))
    trunk = {name for name in made.tensors if not name.startswith("mtp.")}
    assert set(theirs.tensors) == trunk
    for name in trunk:
        assert mx.array_equal(theirs.tensors[name], made.tensors[name]), name
    assert tokenizer.eos_token_ids == {450, 448}
    assert "<|im_start|>user\nhi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )


@pytest.mark.parametrize("layout", ["hf", "hf_unfused"])
def test_transformers_reads_the_same_numbers(tmp_path: Path, layout):
    tiny = tiny_config(4)
    made = make_weights(tiny, 1, bits=None, dtype=mx.float32)
    write_checkpoint(tmp_path / "raw", tiny, made, layout=layout, dtype=mx.float32, vision=True, tokenizer=False)
    write_checkpoint(tmp_path / "mlx", tiny, made, tokenizer=False)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "raw", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    ids = [5, 300, 17, 441, 8, 90]
    with torch.no_grad():
        reference = theirs(torch.tensor([ids])).logits[0].numpy()
    model, _ = mlx_lm.utils.load_model(tmp_path / "mlx")
    ours = np.array(model(mx.array([ids]))[0])
    error = np.sqrt(((ours - reference) ** 2).mean() / (reference**2).mean())
    assert error < 2e-5
    assert 0.3 < reference.std() < 3  # order one, so that the relative error above means something


def test_config_json_tells_the_packing(tmp_path: Path):
    tiny = tiny_config(4)
    write_checkpoint(tmp_path, tiny, seed=1, mtp="side", tokenizer=False)
    document = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    table = document["quantization"]
    assert table == document["quantization_config"]
    assert {k: table[k] for k in ("bits", "group_size", "mode")} == {"bits": 4, "group_size": 64, "mode": "affine"}
    eight = [name for name, value in table.items() if isinstance(value, dict)]
    assert len(eight) == 2 * (4 + 1)
    assert "language_model.model.layers.0.mlp.gate" in eight and "mtp.layers.0.mlp.shared_expert_gate" in eight
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    held = inspect(tmp_path)
    assert index["metadata"]["total_size"] == held.bytes_of("text")
    assert held.has_mtp and not any(name.startswith("mtp.") for name in index["weight_map"])


def test_writing_twice_leaves_no_stale_shard(tmp_path: Path):
    tiny = tiny_config(4)
    write_checkpoint(tmp_path, tiny, seed=1, shard_bytes=500_000, tokenizer=False)
    write_checkpoint(tmp_path, tiny, seed=1, tokenizer=False)
    assert [f.name for f in tmp_path.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]


def test_a_draft_head_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(SyntheticError, match="no draft head"):
        write_checkpoint(tmp_path, tiny_config(4), make_weights(tiny_config(4)), mtp=True)


def test_small_tokenizer_ids_match_tiny_config():
    made = train_tokenizer(448)
    tiny = tiny_config()
    assert made.token_to_id("<|endoftext|>") == tiny.bos_token_id == 448
    assert (made.token_to_id("<|im_end|>"), 448) == tiny.eos_token_ids
    assert made.get_vocab_size() == 453 < tiny.vocab_size
    text = "naïve 日本語 👩‍🚀 e\u0301 and <think>so</think>"
    assert made.decode(made.encode(text).ids) == text.replace("e\u0301", "é")


def test_full_size_is_the_published_checkpoint_byte_for_byte(monkeypatch):
    # Nothing is evaluated, so 19.5 GB of shapes cost nothing.
    monkeypatch.setattr(mx, "eval", lambda *_: None)
    made = make_weights(REAL, 0)
    published = inspect(Path(__file__).parent / "data" / "qwen3.6-35b-a3b-4bit.json.gz").bind()
    assert {n: (a.shape, a.dtype) for n, a in made.tensors.items()} == {
        n: (a.shape, a.dtype) for n, a in published.tensors.items()
    }
    assert made.nbytes == 19_508_787_456
