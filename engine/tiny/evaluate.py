"""Measure the embedded checkpoint on held-out text and write its model card.

    python -m engine.tiny.evaluate --trained OUT --data .tiny

Without ``--trained`` the bfloat16 original is left out, without ``--data`` the 5-gram model. The
checkpoint is read from its shipped files and unpacked; the pass is PyTorch's in float32 (that
the engine and MLX-LM give the same logits from the same files is a test of its own), on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import engine  # noqa: F401  puts a fast BLAS before MLX  # isort: skip
import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F

from engine.config import GROUP_SIZE, ModelConfig
from engine.tiny import CHECKPOINT
from engine.tiny.corpus import load_ids
from engine.tiny.network import Forward, build, rms
from engine.tiny.ngram import ORDER, KneserNey
from engine.tiny.train import named

HELDOUT = Path(__file__).parent / "heldout"
WINDOW = 4096
SEAM = "\n\f\n"
"""What stands between two files of a held-out text."""

PROMPTS = {
    "code": (
        "import os\nimport sys\n\n\ndef main():\n    ",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
        "def read_lines(path):\n    with open(path) as f:\n",
        "    def test_empty(self):\n        self.assert",
        "for key, value in sorted(",
    ),
    "prose": (
        "The Python interpreter is",
        "When a transaction is committed, the database",
        "This function returns a new list that",
        "To install the package, you need to",
        "A file system is a way of",
    ),
}
"""Openings of the continuations in the card."""


# -- reading -------------------------------------------------------------------------------------


def read_trained(folder: Path) -> dict[str, torch.Tensor]:
    """The bfloat16 parts of a training run, as float32, under the names they were saved by."""
    from safetensors.torch import load_file

    return {n: v.float() for part in sorted(folder.glob("model-*.safetensors")) for n, v in load_file(part).items()}


def read_packed(folder: Path) -> dict[str, torch.Tensor]:
    """The shipped files unpacked to float32, under transformers' names and conventions."""
    stored: dict[str, mx.array] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored |= mx.load(str(shard))  # type: ignore[operator]
    plain: dict[str, np.ndarray] = {}
    for name, value in stored.items():
        if name.endswith((".scales", ".biases")):
            continue
        base = name.removesuffix(".weight")
        scales = stored.get(f"{base}.scales")
        if scales is not None:
            bits = value.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            biases = stored[f"{base}.biases"].astype(mx.float32)
            value = mx.dequantize(value, scales.astype(mx.float32), biases, GROUP_SIZE, bits)
        plain[name.removeprefix("language_model.")] = np.array(value.astype(mx.float32))
    found: dict[str, torch.Tensor] = {}
    for name, value in plain.items():
        if name.endswith("switch_mlp.gate_proj.weight"):
            other = plain[name.replace("gate_proj", "up_proj")]
            value = np.concatenate((value, other), -2)
            name = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
        elif name.endswith("switch_mlp.up_proj.weight"):
            continue
        elif name.endswith("switch_mlp.down_proj.weight"):
            name = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
        elif "conv1d" in name:
            value = np.moveaxis(value, 1, 2)
        elif value.ndim == 1 and not name.endswith(("linear_attn.norm.weight", "A_log", "dt_bias")):
            value = value - 1.0
        found[name] = torch.from_numpy(np.ascontiguousarray(value))
    return found


def make_forward(folder: Path, tensors: dict[str, torch.Tensor], device: str) -> Forward:
    """A float32 model with `tensors` in it; every parameter must be there, in its shape."""
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model, head = build(config)
    with torch.no_grad():
        for name, p in named(model, head).items():
            p.copy_(tensors[name])
    model.to(device)
    head.to(device)
    return Forward(config, model, head)


# -- figures -------------------------------------------------------------------------------------


@torch.no_grad()
def score(forward: Forward, ids: np.ndarray, device: str, windows: int) -> dict[str, np.ndarray]:
    """Losses, hits, draft agreement and expert shares over whole windows of ``WINDOW`` predictions."""
    rows: dict[str, list[np.ndarray]] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        rows.setdefault(name, []).append(value.cpu().numpy())

    model, head = forward.model, forward.head
    count = min(windows, (len(ids) - 2) // WINDOW)
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens, under one window of {WINDOW}: give a longer one")
    for i in range(count):
        window = torch.from_numpy(ids[i * WINDOW : i * WINDOW + WINDOW + 2].astype(np.int64))[None].to(device)
        before, _, share = forward.trunk(window[:, :-2])
        after = rms(before, model.model.norm)
        logits = F.linear(after, model.lm_head.weight)[0]
        target = window[0, 1:-1]
        greedy = logits.argmax(-1)
        keep("loss", F.cross_entropy(logits, target, reduction="none"))
        keep("hit", greedy == target)
        keep("share", share)
        for name, hidden in (("after", after), ("before", before)):
            drafted, _ = forward.draft(hidden, window[:, 1:-1])
            draft = F.linear(rms(drafted, head.norm), model.lm_head.weight)[0].argmax(-1)
            # The head at position t drafts what the trunk picks at t + 1.
            keep(f"agree_{name}", draft[:-1] == greedy[1:])
    return {name: np.stack(values) for name, values in rows.items()}


def summary(scored: dict[str, np.ndarray], bytes_per_token: float) -> dict[str, Any]:
    """The card's figures of one text."""
    loss = float(scored["loss"].mean())
    experts = scored["share"].mean(0) * scored["share"].shape[-1]
    edges = (0, 64, 256, 1024, 2048, 3072, 4096)
    return {
        "tokens": int(scored["loss"].size),
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "perplexity": math.exp(loss),
        "top1": float(scored["hit"].mean()),
        "draft_after_norm": float(scored["agree_after"].mean()),
        "draft_before_norm": float(scored["agree_before"].mean()),
        "by_position": {f"{a}-{b}": math.exp(float(scored["loss"][:, a:b].mean())) for a, b in zip(edges, edges[1:])},
        "experts": [[float(row.min()), float(row.max())] for row in experts],
    }


def continuations(folder: Path, count: int = 48) -> dict[str, list[tuple[str, str]]]:
    """Greedy continuations by the engine itself, from the shipped files."""
    from engine.checkpoint import load
    from engine.generate import Engine
    from engine.tokenizer import Tokenizer

    checkpoint = load(folder)
    tokenizer = Tokenizer.from_path(folder)
    running = Engine(checkpoint.config, checkpoint.weights)
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, prompts in PROMPTS.items():
        for prompt in prompts:
            running.reset()
            ids = list(running.generate(tokenizer.encode(prompt), count))
            found.setdefault(kind, []).append((prompt, tokenizer.decode(ids)))
    return found


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as written to ``evaluation.json`` beside the card."""
    from tokenizers import Tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    packed = make_forward(options.checkpoint, read_packed(options.checkpoint), device)
    original = None
    if options.trained:
        original = make_forward(options.checkpoint, read_trained(options.trained), device)
    counted = None
    if options.data:
        counted = KneserNey(np.concatenate([load_ids(options.data, "train", k) for k in ("code", "prose", "chat")]))
    result: dict[str, Any] = {"windows": options.windows, "window": WINDOW}
    for kind in ("code", "prose"):
        text = (HELDOUT / f"{kind}.txt").read_text(encoding="utf-8")
        end = tokenizer.token_to_id("<|endoftext|>")
        ids: list[int] = []
        for piece in text.split(SEAM):
            ids += [*tokenizer.encode(piece, add_special_tokens=False).ids, end]
        array = np.asarray(ids, np.uint16)
        per_token = len(text.encode()) / len(array)
        scored = score(packed, array, device, options.windows)
        entry: dict[str, Any] = {"bytes_per_token": per_token, "four_bit": summary(scored, per_token)}
        if original:
            entry["bf16"] = summary(score(original, array, device, options.windows), per_token)
        if counted:
            used = scored["loss"].size
            # Same targets but for the first four, which have no full context.
            loss = -float(counted.log_probabilities(array[: used + 1]).mean())
            entry["five_gram"] = {"perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / per_token}
        result[kind] = entry
        print(json.dumps({kind: entry}), flush=True)
    if options.continue_tokens:
        result["continuations"] = continuations(options.checkpoint, options.continue_tokens)
    return result


# -- the card ------------------------------------------------------------------------------------


def card(result: dict[str, Any], checkpoint: Path, sources: dict[str, Any] | None, log: list[dict[str, Any]]) -> str:
    """The model card in Markdown."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
    size = sum(p.stat().st_size for p in checkpoint.iterdir() if p.name != "README.md")
    end = log[-1] if log else {}
    lines = [
        "# The embedded checkpoint",
        "",
        "A small trained language model of the `qwen3_5_moe` architecture, so that perplexity, top-1 agreement, greedy",
        "text and draft acceptance mean something on any machine with nothing to download. It is an instrument for",
        "testing an inference engine, not an assistant: it writes plausible Python and technical English and knows",
        "little.",
        "",
        "## What it is",
        "",
        f"{config['num_hidden_layers']} layers (every fourth full attention, the others Gated DeltaNet), width "
        f"{config['hidden_size']}, {config['num_attention_heads']} query heads on {config['num_key_value_heads']} "
        f"key/value head of {config['head_dim']} (64 rotary), "
        f"{config['linear_num_key_heads']} key and {config['linear_num_value_heads']} value state heads of "
        f"{config['linear_key_head_dim']}, top-{config['num_experts_per_tok']} of {config['num_experts']} experts of "
        f"{config['moe_intermediate_size']} and a shared one, a vocabulary of {config['vocab_size']}, one multi-token-"
        "prediction layer (`mtp.*`, stored as the trunk is).",
        f"25.2 M parameters, {size / 2**20:.2f} MiB: MLX-LM's affine packing, 4 bits in groups of 64, router gates",
        "in 8.",
        "",
        "## How it was made",
        "",
        "    python -m engine.tiny.corpus --out .tiny                # text, split by file, and tokenizer",
        "    python -m engine.tiny.train --data .tiny --out OUT      # one GPU",
        "    python -m engine.tiny.convert --trained OUT             # mlx_lm.convert, then the draft head",
        "    python -m engine.tiny.evaluate --trained OUT --data .tiny",
        "",
    ]
    if end:
        lines += [
            f"Trained from scratch on {end['device']}: {end['steps']:,} steps, {end['tokens'] / 1e6:.0f} M tokens, "
            f"{end['seconds'] / 60:.1f} minutes in all; windows of 1,024 tokens, of 4,096 in the last 35 %.",
            "In the last tenth the forward pass saw weights rounded to the 4-bit grid (straight-through gradients).",
            "Muon for the matrices inside layers, AdamW for the rest; the loss adds 0.3 of the draft head's and 0.01",
            "of each layer's load balance.",
            "",
        ]
    lines += [
        "## What it scores",
        "",
        f"Held-out files ([`../heldout`](../heldout)), windows of {WINDOW:,} tokens, every position counted.",
        "",
        "| text | model | bits a byte | perplexity | top-1 |",
        "|---|---|---|---|---|",
    ]
    for kind in ("code", "prose"):
        for key, label in (("four_bit", "4-bit, as shipped"), ("bf16", "bfloat16 original"), ("five_gram", "5-gram")):
            if key in result[kind]:
                f = result[kind][key]
                top = f"{f['top1']:.1%}" if "top1" in f else "-"
                lines.append(f"| {kind} | {label} | {f['bits_per_byte']:.3f} | {f['perplexity']:.2f} | {top} |")
    lines += [
        "",
        f"The {ORDER}-gram model is interpolated Kneser-Ney over the same training tokens.",
        "",
        "Perplexity by position in the window (4-bit):",
        "",
        "| text | " + " | ".join(result["code"]["four_bit"]["by_position"]) + " |",
        "|---" * (1 + len(result["code"]["four_bit"]["by_position"])) + "|",
    ]
    for kind in ("code", "prose"):
        values = result[kind]["four_bit"]["by_position"].values()
        lines.append(f"| {kind} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
    lines += [
        "",
        "First draft of the multi-token-prediction head equal to the greedy next token (4-bit, share of positions):",
        "",
        "| text | hidden state after the final norm | before it |",
        "|---|---|---|",
    ]
    for kind in ("code", "prose"):
        f = result[kind]["four_bit"]
        lines.append(f"| {kind} | {f['draft_after_norm']:.1%} | {f['draft_before_norm']:.1%} |")
    lines += ["", "Load of the experts, as a multiple of the fair share (least, most):", "", "| layer | code | prose |"]
    lines.append("|---|---|---|")
    for i, (a, b) in enumerate(zip(result["code"]["four_bit"]["experts"], result["prose"]["four_bit"]["experts"])):
        lines.append(f"| {i} | {a[0]:.2f}, {a[1]:.2f} | {b[0]:.2f}, {b[1]:.2f} |")
    if "continuations" in result:
        lines += ["", "## Greedy continuations", "", "The prompt, then `▸`, then what the engine wrote.", ""]
        for pairs in result["continuations"].values():
            for prompt, text in pairs:
                lines += ["~~~~", f"{prompt}▸{text}", "~~~~", ""]
    if sources:
        lines += [
            "## Text and licences",
            "",
            "Split by file: about one in 80 is held out for test, one for validation.",
            "",
        ]
        lines += ["| source | kind | licence | MB |", "|---|---|---|---|"]
        for s in sources["sources"]:
            lines.append(f"| {s['package']} | {s['kind']} | {s['licence']} | {s['bytes'] / 1e6:.1f} |")
        lines += [
            "",
            "Debian packages are of release 12, section `main`; the chat part is made of their docstrings and",
            "definitions.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--trained", type=Path, help="folder of the bfloat16 original")
    parser.add_argument("--data", type=Path, help="folder made by engine.tiny.corpus, for the 5-gram model")
    parser.add_argument("--windows", type=int, default=16, help="windows of 4,096 tokens of each text, at most")
    parser.add_argument("--continue-tokens", type=int, default=48, help="length of a continuation; 0 for none")
    parser.add_argument("--card", type=Path, help="where to write the card (default: README.md of the checkpoint)")
    options = parser.parse_args()
    result = evaluate(options)
    sources = json.loads((options.data / "sources.json").read_text(encoding="utf-8")) if options.data else None
    log_file = options.trained / "training.jsonl" if options.trained else None
    log = (
        [json.loads(line) for line in log_file.read_text(encoding="utf-8").splitlines()]
        if log_file and log_file.is_file()
        else []
    )
    to = options.card or options.checkpoint / "README.md"
    to.write_text(card(result, options.checkpoint, sources, log), encoding="utf-8")
    (to.parent / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
