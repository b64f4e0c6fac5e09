"""Loading: both layouts give the same weights, and every broken checkpoint is refused by name."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.checkpoint import (
    INDEX,
    MTP_FILE,
    CheckpointError,
    inspect,
    inventory_from_json,
    load,
    read_header,
)
from engine.config import ConfigError, ModelConfig
from engine.synthetic import hf_tensors, make_weights, tiny_config, write_checkpoint
from engine.weights import Weights

REAL_LIST = Path(__file__).parent / "data" / "qwen3.6-35b-a3b-4bit.json.gz"
TINY = tiny_config(4)
SHARD = "model-00001-of-00001.safetensors"


def same(a: Weights, b: Weights) -> None:
    """Assert equal tensors under equal names."""
    assert set(a.tensors) == set(b.tensors)
    for name, value in a.tensors.items():
        assert value.dtype == b.tensors[name].dtype, name
        assert mx.array_equal(value, b.tensors[name]), name


# -- the published checkpoint, without its data --------------------------------------------------


def test_published_list_adds_up():
    held = inspect(REAL_LIST)
    assert len(held.tensors) == 2090
    assert len(held.names("text")) == 1757 and held.bytes_of("text") == 19_508_787_456
    assert len(held.names("vision")) == 333 and held.bytes_of("vision") == 893_142_496
    assert held.nbytes == 20_401_929_952
    assert held.layout == "mlx" and not held.has_mtp


def test_published_list_fills_the_structure():
    held = inventory_from_json(REAL_LIST)
    assert held.config == ModelConfig(eos_token_ids=(248_044,))
    weights = held.bind()
    assert {f"language_model.{name}" for name in weights.tensors} == set(held.names("text"))
    assert weights.nbytes == held.bytes_of("text")
    assert weights.layers[39].attention is not None and weights.layers[38].gated_delta is not None
    assert weights.layers[0].experts.gate.bits == 8 and weights.layers[0].experts.gate_proj.bits == 4
    assert weights.mtp is None


def edited(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the published list with one thing changed."""
    value = json.loads(gzip.decompress(REAL_LIST.read_bytes()))
    change(value)
    path = tmp_path / "list.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


GATE = "language_model.model.layers.7.mlp.gate"
UP = "language_model.model.layers.7.mlp.switch_mlp.up_proj"


def three_bits(value):
    value["tensors"][f"{UP}.weight"][1] = [256, 512, 192]


def group_32(value):
    value["tensors"][f"{UP}.scales"][1] = value["tensors"][f"{UP}.biases"][1] = [256, 512, 64]


def no_biases(value):
    del value["tensors"][f"{UP}.biases"]


def four_bit_gate(value):
    value["tensors"][f"{GATE}.weight"][1] = [256, 256]


def wrong_shape(value):
    value["tensors"]["language_model.model.layers.3.self_attn.q_norm.weight"][1] = [128]


def absent(value):
    del value["tensors"]["language_model.model.norm.weight"]


def surplus(value):
    value["tensors"]["language_model.model.layers.40.input_layernorm.weight"] = ["BF16", [2048]]


def float8(value):
    value["tensors"]["language_model.model.norm.weight"][0] = "F8_E4M3"


def strange_conv(value):
    value["tensors"]["language_model.model.layers.0.linear_attn.conv1d.weight"][1] = [8192, 4]


def both_convs(value):
    value["tensors"]["language_model.model.layers.0.linear_attn.conv1d.weight"][1] = [8192, 1, 4]


@pytest.mark.parametrize(
    "change, parts",
    [
        (three_bits, ["list.json", "layers.7.mlp.switch_mlp.up_proj", "3 bits", "4 and 8 bits", "mlx-community"]),
        (group_32, ["layers.7.mlp.switch_mlp.up_proj", "groups of 32", "groups of 64", "mlx-community"]),
        (no_biases, ["layers.7.mlp.switch_mlp.up_proj", "no biases", "affine"]),
        (four_bit_gate, [f"{GATE}.weight", "[256, 256]", "4 bits in groups of 64", "config.json says 8", "revision"]),
        (wrong_shape, ["layers.3.self_attn.q_norm.weight", "[128]", "[256]", "one revision"]),
        (absent, ["model.norm.weight", "missing", "[2048]", "fetch"]),
        (surplus, ["layers.40.input_layernorm.weight", "no place", "config.json"]),
        (float8, ["language_model.model.norm.weight", "F8_E4M3", "BF16"]),
        (strange_conv, ["layers.0.linear_attn.conv1d.weight", "[8192, 4]", "[8192, 4, 1]", "[8192, 1, 4]"]),
        (both_convs, ["some conv1d tensors", "raw Hugging Face", "convert the whole"]),
    ],
)
def test_a_list_that_cannot_run_is_refused_by_name(tmp_path, change, parts):
    with pytest.raises(CheckpointError) as error:
        inspect(edited(tmp_path, change)).bind()
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    "document, parts",
    [
        ({"model_type": "llama", "hidden_size": 64}, ["'llama'", "qwen3_5_moe"]),
        ({"model_type": "qwen3_5_moe", "text_config": {"hidden_size": 64}}, ["vocab_size is missing"]),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, ["'mxfp4'", "affine 4 and 8", "mlx-comm"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["'fp8'", "bf16"]),
        ({"text_config": None}, ["config.json"]),
    ],
)
def test_another_architecture_is_refused(tmp_path, document, parts):
    if "model_type" not in document:
        document = TINY.to_dict() | document
    (tmp_path / "config.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        inspect(tmp_path)
    for part in (str(tmp_path), *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", '{"config": {}}', '{"config": {}, "tensors": {"a": ["Q9", [1]]}}'])
def test_a_list_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "list.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="no readable tensor list"):
        inspect(tmp_path / "list.json")


# -- both layouts, on real files -----------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Weights:
    return make_weights(TINY, 11, mtp=True)


@pytest.fixture
def folder(tmp_path: Path, made: Weights) -> Path:
    return write_checkpoint(tmp_path / "model", TINY, made, shard_bytes=1_000_000)


def test_mlx_layout_loads_as_written(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, shard_bytes=1_000_000, vision=True, mtp=True)
    held = load(tmp_path)
    same(held.weights, made)
    assert held.config.eos_token_ids == TINY.eos_token_ids[-1:]
    assert held.info["layout"] == "mlx" and held.info["has_mtp"] and held.info["mtp_gains"] == "as stored"
    assert held.info["bits"] == {"4": 2 + 3 * 5 + 4 + 4 * 6 + 1 + 4 + 6, "8": 2 * 5}
    assert held.info["bits_by_module"]["mlp.gate"] == {"8": 4}
    assert held.info["bits_by_module"]["mtp.self_attn.q_proj"] == {"4": 1}
    assert held.info["vision_tensors"] == 5
    assert held.info["generation_config"]["eos_token_id"] == [450, 448]
    assert sum(held.info["files"].values()) == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert held.weights.layers[0].gated_delta.a_log.dtype == mx.float32


def test_without_the_draft_head(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, mtp=True)
    assert load(tmp_path, mtp=False).weights.mtp is None
    assert load(tmp_path).weights.mtp is not None


@pytest.mark.parametrize("layout", ["hf", "hf_unfused"])
@pytest.mark.parametrize("mtp", [False, True, "side"])
def test_raw_layout_is_brought_to_the_same_weights(tmp_path, made, layout, mtp):
    write_checkpoint(tmp_path, TINY, made, layout=layout, mtp=mtp, vision=True, shard_bytes=3_000_000)
    held = load(tmp_path)
    assert held.info["layout"] == "hf" and held.info["has_mtp"] is bool(mtp)
    wanted = {}
    for name, value in made.tensors.items():
        base, part = name.rsplit(".", 1)
        if part in ("scales", "biases") or (name.startswith("mtp.") and not mtp):
            continue
        packed = made.tensors.get(f"{base}.scales")
        if packed is not None:
            bits = value.shape[-1] * 32 // (packed.shape[-1] * 64)
            value = mx.dequantize(value, packed, made.tensors[f"{base}.biases"], group_size=64, bits=bits)
        wanted[name] = value
    same(held.weights, Weights.from_tensors(TINY, wanted))


def test_a_draft_head_is_no_sign_of_raw_gains(tmp_path, made):
    # Loaders that took mtp.* for a raw checkpoint added 1 to every gain a second time.
    plain = load(write_checkpoint(tmp_path / "a", TINY, made)).weights
    with_head = load(write_checkpoint(tmp_path / "b", TINY, made, mtp=True)).weights
    assert mx.array_equal(plain.norm, with_head.norm)
    assert with_head.mtp is not None and mx.array_equal(with_head.mtp.norm_hidden, made.mtp.norm_hidden)


@pytest.mark.parametrize("stated, added", [("gain", 0), ("gain-1", 1), (None, 0)])
def test_side_file_says_how_its_gains_are_stored(folder, made, stated, added):
    head = {name: value for name, value in made.tensors.items() if name.startswith("mtp.")}
    mx.save_safetensors(str(folder / MTP_FILE), head, metadata={"norms": stated} if stated else {"format": "mlx"})
    held = load(folder)
    gain = made.mtp.norm_embedding.astype(mx.float32) + added
    assert mx.array_equal(held.weights.mtp.norm_embedding, gain.astype(mx.bfloat16))
    assert mx.array_equal(held.weights.norm, made.norm)


def test_side_file_with_bare_raw_names(folder, made):
    head = {name: value for name, value in made.tensors.items() if name.startswith("mtp.")}
    raw = hf_tensors(dataclasses.replace(made, tensors=head))
    bare = {name.removeprefix("mtp."): value for name, value in raw.items()}
    mx.save_safetensors(str(folder / MTP_FILE), bare, metadata={"norms": "gain-1"})
    held = load(folder).weights.mtp
    assert mx.array_equal(held.norm, made.mtp.norm)
    assert mx.array_equal(held.layer.experts.up_proj.weight, made.mtp.layer.experts.up_proj.dense(mx.bfloat16))


def test_float32_gains_do_not_promote_the_stream(tmp_path, made):
    # Qwen3.5 stores A_log and the gated norm in float32; left alone they drag every activation along.
    write_checkpoint(tmp_path, TINY, made, layout="hf", tokenizer=False)
    shard = tmp_path / SHARD
    arrays = dict(mx.load(str(shard)).items())
    for name in list(arrays):
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            arrays[name] = arrays[name].astype(mx.float32) * 1.001
    mx.eval(arrays)
    mx.save_safetensors(str(shard), arrays)
    first = load(tmp_path).weights.layers[0].gated_delta
    assert first.norm.dtype == mx.bfloat16
    stored = arrays["model.language_model.layers.0.linear_attn.A_log"]
    assert first.a_log.dtype == mx.float32 and mx.array_equal(first.a_log, stored)


def test_raw_gains_are_shifted_in_float32(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, layout="hf", tokenizer=False)
    shard = tmp_path / SHARD
    arrays = dict(mx.load(str(shard)).items())
    name = "model.language_model.norm.weight"
    arrays[name] = mx.full((TINY.hidden_size,), 0.00123, dtype=mx.bfloat16)
    mx.eval(arrays)
    mx.save_safetensors(str(shard), arrays)
    held = load(tmp_path, dtype=mx.float32).weights.norm
    assert mx.array_equal(held, arrays[name].astype(mx.float32) + 1)  # bf16 would have rounded this to 1


def test_weights_hash_tells_weights_of_one_geometry_apart(tmp_path):
    hashes = [
        inspect(write_checkpoint(tmp_path / str(i), TINY, seed=seed, tokenizer=False)).weights_hash
        for i, seed in enumerate((1, 1, 2))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_one_file_without_an_index(folder, tmp_path, made):
    lone = write_checkpoint(tmp_path / "lone", TINY, made)
    (lone / INDEX).unlink()
    (lone / SHARD).rename(lone / "model.safetensors")
    same(load(lone).weights, load(folder).weights)


def test_an_index_hides_files_of_another_download(folder, made):
    shutil.copy(next(folder.glob("model-*.safetensors")), folder / "old.safetensors")
    assert "old.safetensors" not in inspect(folder).files
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="both in .*old.safetensors"):
        inspect(folder)


# -- damage --------------------------------------------------------------------------------------


def cut(path: Path, to: int) -> None:
    with path.open("r+b") as file:
        file.truncate(to)


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_no_such_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no such folder", "engine fetch")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, str(folder), "no config.json")


def test_config_that_is_no_json(folder):
    cut(folder / "config.json", 100)
    refused(folder, "config.json", "no readable JSON")


def test_no_weights(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "model.gguf").touch()
    refused(folder, "no weights", "*.safetensors", "model.gguf", "fetch")


def test_missing_shard(folder):
    (folder / "model-00002-of-00009.safetensors").unlink(missing_ok=True)
    second = sorted(folder.glob("model-0*.safetensors"))[1]
    second.unlink(missing_ok=True)
    refused(folder, second.name, "missing shard", INDEX, "fetch")


@pytest.mark.parametrize(
    "keep, parts", [(-1000, ["promises", "is cut off"]), (40, ["inside its header"]), (0, ["0 b"])]
)
def test_truncated_shard(folder, keep, parts):
    shard = sorted(folder.glob("model-0*.safetensors"))[1]
    cut(shard, keep if keep >= 0 else shard.stat().st_size + keep)
    refused(folder, shard.name, "download it again", *parts)


def test_pointer_instead_of_weights(folder):
    shard = sorted(folder.glob("model-0*.safetensors"))[1]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", encoding="utf-8")
    refused(folder, shard.name, "Git LFS pointer")


def test_damaged_header(folder):
    shard = sorted(folder.glob("model-0*.safetensors"))[1]
    with shard.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff\xff\xff")
    refused(folder, shard.name, "header is damaged")


def test_index_names_a_tensor_that_no_shard_has(folder):
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    shard = sorted(folder.glob("model-0*.safetensors"))[0].name
    index["weight_map"]["language_model.model.layers.9.made_up"] = shard
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    refused(folder, shard, "language_model.model.layers.9.made_up", INDEX, "absent")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_empty_index(folder, text):
    (folder / INDEX).write_text(text, encoding="utf-8")
    refused(folder, INDEX, "weight_map")


def rewrite(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    """Change the tensors of the only shard of a raw checkpoint."""
    arrays = dict(mx.load(str(folder / SHARD)).items())
    mx.eval(arrays)
    change(arrays)
    mx.save_safetensors(str(folder / SHARD), arrays)
    (folder / INDEX).unlink()


def test_missing_expert(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, layout="hf_unfused", tokenizer=False)
    rewrite(tmp_path, lambda a: a.pop("model.language_model.layers.2.mlp.experts.17.up_proj.weight"))
    refused(tmp_path, SHARD, "layers.2.mlp.experts.0.up_proj.weight", "expert 17 is missing", "32 experts")


def test_expert_of_another_shape(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, layout="hf_unfused", tokenizer=False)
    name = "model.language_model.layers.2.mlp.experts.17.up_proj.weight"
    rewrite(tmp_path, lambda a: a.update({name: a[name][:8]}))
    refused(tmp_path, SHARD, name, "[8, 256]", "[64, 256]")


def test_fused_experts_of_another_shape(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, layout="hf", tokenizer=False)
    name = "model.language_model.layers.2.mlp.experts.gate_up_proj"
    rewrite(tmp_path, lambda a: a.update({name: a[name][:, :96]}))
    refused(tmp_path, SHARD, name, "[32, 96, 256]", "[32, 128, 256]")


def test_stored_name_is_told_where_it_differs(tmp_path, made):
    write_checkpoint(tmp_path, TINY, made, layout="hf", tokenizer=False)
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    rewrite(tmp_path, lambda a: a.update({name: a[name][:, :96]}))
    refused(tmp_path, SHARD, "switch_mlp.down_proj.weight", f"stored as {name}", "[32, 96, 64]", "[32, 256, 64]")


def test_header_that_disagrees_with_itself(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"tensor a of shape \[3\] and type F32 takes 12 bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", json.dumps(tiny_config(4).to_dict() | {"quantization": [1]})),
        ("config.json", json.dumps(tiny_config(4).to_dict() | {"quantization": "4bit"})),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": 5, "b": None}})),
    ],
)
def test_values_of_the_wrong_kind_are_one_line(tmp_path, file, text):
    folder = write_checkpoint(tmp_path / "made", tiny_config(4))
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        load(folder)
    assert "\n" not in str(error.value) and "json" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("tie_word_embeddings", True),
        ("rms_norm_eps", float("nan")),
        ("num_key_value_heads", 0),
        ("full_attention_interval", 0),
        ("num_experts_per_tok", 2.0),
        ("max_position_embeddings", "8192"),
        ("partial_rotary_factor", 5),
    ],
)
def test_what_the_forward_pass_takes_for_granted_is_checked(field, value):
    document = tiny_config(4).to_dict()
    document["text_config"][field] = value
    if field == "partial_rotary_factor":
        document["text_config"]["rope_parameters"][field] = value
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_dict(document)
