"""Turn trained weights into the MLX 4-bit checkpoint, by the path any user's model takes.

    python -m engine.tiny.convert --trained OUT --tokenizer .tiny/tokenizer --to engine/tiny/checkpoint

``mlx_lm.convert`` packs the trunk (4 bits, groups of 64, router gates in 8). It drops the draft head, so that is
packed here by the same recipe and added to the shard and the index.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import engine  # noqa: F401  puts a fast BLAS before MLX  # isort: skip
import mlx.core as mx

from engine.config import GROUP_SIZE
from engine.tiny.rounding import bits_of

SHARD = "model.safetensors"
LIMIT = 16 * 2**20
"""Bytes that the whole folder may take."""
CARRIED = ("config.json", "model.safetensors.index.json")


def pack_draft_head(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """MLX-LM's layout of trained ``mtp.*`` tensors: experts split, gains shifted by 1, matrices packed.

    Args:
        tensors: bfloat16, transformers' layout (gains stored minus 1, experts fused).

    Returns:
        ``weight``, ``scales`` and ``biases`` of each matrix, and the gains in bfloat16.
    """
    split: dict[str, mx.array] = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("experts.gate_up_proj")
            half = value.shape[-2] // 2
            split[f"{base}switch_mlp.gate_proj.weight"] = value[..., :half, :]
            split[f"{base}switch_mlp.up_proj.weight"] = value[..., half:, :]
        elif name.endswith("experts.down_proj"):
            split[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
        else:
            split[name] = value
    packed: dict[str, mx.array] = {}
    for name, value in split.items():
        bits = bits_of(name, value.shape)
        if bits is None:
            packed[name] = value + 1.0 if value.ndim == 1 else value
            continue
        base = name.removesuffix(".weight")
        packed[name], packed[f"{base}.scales"], packed[f"{base}.biases"] = mx.quantize(value, GROUP_SIZE, bits)
    return packed


def convert(trained: Path, tokenizer: Path, to: Path) -> None:
    """Write the checkpoint folder `to`, replacing one that is there.

    Raises:
        ValueError: parts are missing, or the result is over 16 MiB.
    """
    parts = sorted(trained.glob("model-*.safetensors"))
    index = json.loads((trained / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    missing = sorted(set(index.values()) - {p.name for p in parts})
    if missing:
        raise ValueError(f"{trained}: part {missing[0]} is missing; copy every part of the training run there")
    with tempfile.TemporaryDirectory() as folder:
        staged, packed = Path(folder) / "trained", Path(folder) / "packed"
        staged.mkdir()
        for path in [*parts, *(trained / name for name in CARRIED), *sorted(tokenizer.iterdir())]:
            shutil.copy(path, staged)
        command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(staged), "--mlx-path", str(packed), "-q"]
        subprocess.run([*command, "--q-bits", "4", "--q-group-size", str(GROUP_SIZE)], check=True)
        arrays = mx.load(str(packed / SHARD))
        head = {n: v for p in parts for n, v in mx.load(str(p)).items() if n.startswith("mtp.")}  # type: ignore[union-attr]
        arrays |= pack_draft_head(head)  # type: ignore[operator]
        config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
        for name in ("quantization", "quantization_config"):
            for gate in ("gate", "shared_expert_gate"):
                config[name][f"mtp.layers.0.mlp.{gate}"] = {"group_size": GROUP_SIZE, "bits": 8}
        card = (to / "README.md").read_text(encoding="utf-8") if (to / "README.md").is_file() else None
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        mx.save_safetensors(str(to / SHARD), arrays, metadata={"format": "mlx"})  # type: ignore[arg-type]
        (to / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        total = sum(v.nbytes for v in arrays.values())  # type: ignore[union-attr]
        written = {"metadata": {"total_size": total}, "weight_map": {n: SHARD for n in sorted(arrays)}}
        (to / f"{SHARD}.index.json").write_text(json.dumps(written, indent=0) + "\n", encoding="utf-8")
        for path in sorted(tokenizer.iterdir()):
            shutil.copy(path, to)
        if card is not None:
            (to / "README.md").write_text(card, encoding="utf-8")
    size = sum(p.stat().st_size for p in to.iterdir())
    print(f"{to}: {size / 2**20:.2f} MiB, {len(arrays)} tensors")
    if size > LIMIT:
        raise ValueError(f"{to}: {size} bytes is over the limit of {LIMIT}")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, required=True, help="folder written by engine.tiny.train")
    parser.add_argument("--tokenizer", type=Path, default=Path(".tiny/tokenizer"))
    parser.add_argument("--to", type=Path, default=Path("engine/tiny/checkpoint"))
    options = parser.parse_args()
    convert(options.trained, options.tokenizer, options.to)


if __name__ == "__main__":
    main()
