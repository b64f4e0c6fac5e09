"""The embedded checkpoint: a small trained model of the same architecture, and the scripts that made it.

In order: `corpus` gathers free text and trains the tokenizer, `train` runs on one GPU, `convert` turns the
result into the MLX 4-bit layout, `evaluate` measures it and writes the model card. Only `CHECKPOINT` is
needed to use the model; the scripts are here so that anyone can make it again.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the embedded checkpoint (config.json, safetensors shards, tokenizer), in MLX-LM's layout."""
