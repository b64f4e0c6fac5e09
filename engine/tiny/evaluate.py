"""Measure the embedded checkpoint on held-out text and write its model card.

    python -m engine.tiny.evaluate --trained OUT --data .tiny

Without ``--trained`` the bfloat16 original is left out; without ``--data`` the 5-gram model, the chats and the load
of experts over the whole test side are (the held-out text stands in for it). The checkpoint is read from its shipped
files and unpacked; the pass is PyTorch's in float32 (that the engine and MLX-LM give the same logits from the same
files is a test of its own), on a GPU if there is one.
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
from engine.tiny.corpus import KINDS, load_ids
from engine.tiny.network import CHUNK, Forward, build, rms
from engine.tiny.ngram import ORDER, KneserNey
from engine.tiny.tokenizer import END
from engine.tiny.train import named

WRITTEN = ("README.md", "evaluation.json")
"""What this script puts beside the weights."""
HELDOUT = Path(__file__).parent / "heldout"
WINDOW = 4096
DEPTHS = (0, 512, 1536, 3584, 7680)
"""Tokens before a block of `BLOCK` tokens whose perplexity is taken at each; training saw up to 4,096 in all."""
BLOCK = 512
SEAM = "\n\f\n"
"""What stands between two files of a held-out text."""

PROMPTS = {
    "code": (
        "import os\nimport sys\n\n\ndef main():\n",
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
    return {
        "tokens": int(scored["loss"].size),
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "perplexity": math.exp(loss),
        "top1": float(scored["hit"].mean()),
        "draft_after_norm": float(scored["agree_after"].mean()),
        "draft_before_norm": float(scored["agree_before"].mean()),
        "by_window": [math.exp(float(row.mean())) for row in scored["loss"]],
    }


@torch.no_grad()
def by_depth(forward: Forward, ids: np.ndarray, device: str, blocks: int) -> dict[str, float]:
    """Perplexity of the same `blocks` blocks of text with more and more text before them, by its tokens.

    Positions of one long text differ in what stands there; here only what the model has read differs.
    """
    starts = np.linspace(DEPTHS[-1], len(ids) - BLOCK - 1, blocks).astype(int)
    found: dict[str, float] = {}
    for depth in DEPTHS:
        losses = []
        for start in starts:
            window = torch.from_numpy(ids[start - depth : start + BLOCK + 1].astype(np.int64)).to(device)
            hidden, _, _ = forward.trunk(window[None, :-1])
            logits = F.linear(rms(hidden[0, -BLOCK:], forward.model.model.norm), forward.model.lm_head.weight)
            losses.append(F.cross_entropy(logits, window[-BLOCK:]).item())
        found[str(depth)] = math.exp(float(np.mean(losses)))
    return found


@torch.no_grad()
def expert_load(forward: Forward, texts: dict[str, np.ndarray], device: str, windows: int) -> dict[str, Any]:
    """Load of each layer's least and most used expert, as a multiple of the fair share, by text and over ``all``.

    Of each text at most `windows` windows are read, spread evenly over it.
    """
    assigned: dict[str, torch.Tensor] = {}
    for kind, ids in texts.items():
        length = min(WINDOW, len(ids) // CHUNK * CHUNK)
        count = min(windows, len(ids) // length)
        for start in np.linspace(0, len(ids) - length, count).astype(int):
            window = torch.from_numpy(ids[start : start + length].astype(np.int64))[None].to(device)
            _, _, share = forward.trunk(window)
            assigned[kind] = assigned.get(kind, torch.zeros(())) + share.cpu() * length
    assigned["all"] = torch.stack(list(assigned.values())).sum(0)
    loads = {kind: counts / counts.mean(-1, keepdim=True) for kind, counts in assigned.items()}
    return {
        "tokens": {kind: round(float(counts[0].sum())) for kind, counts in assigned.items()},
        "load": {kind: [[float(row.min()), float(row.max())] for row in load] for kind, load in loads.items()},
    }


def continuations(folder: Path, count: int = 48) -> dict[str, list[dict[str, str]]]:
    """Continuations by the engine itself, from the shipped files: greedy, and drawn as the checkpoint asks, seed 0."""
    from engine.checkpoint import load
    from engine.generate import Engine, Sampling
    from engine.tokenizer import Tokenizer

    checkpoint = load(folder)
    tokenizer = Tokenizer.from_path(folder)
    running = Engine(checkpoint.config, checkpoint.weights)
    asked = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    ways = {"greedy": Sampling(), "drawn": Sampling(*(asked[name] for name in ("temperature", "top_k", "top_p")))}
    found: dict[str, list[dict[str, str]]] = {}
    for kind, prompts in PROMPTS.items():
        for prompt in prompts:
            made = {"prompt": prompt}
            for name, way in ways.items():
                running.reset()
                ids = running.generate(tokenizer.encode(prompt), count, way, 0, stop_ids=tuple(tokenizer.stop_ids))
                made[name] = tokenizer.decode(list(ids))
            found.setdefault(kind, []).append(made)
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
    texts = {kind: heldout_ids(tokenizer, kind) for kind in ("code", "prose")}
    if options.data:
        chats = load_ids(options.data, "test", "chat")
        texts["chat"] = chats, len(tokenizer.decode(chats.tolist(), skip_special_tokens=False).encode()) / len(chats)
    result: dict[str, Any] = {"windows": options.windows, "window": WINDOW}
    for kind, (ids, per_token) in texts.items():
        scored = score(packed, ids, device, options.windows)
        entry: dict[str, Any] = {"bytes_per_token": per_token, "four_bit": summary(scored, per_token)}
        if original:
            entry["bf16"] = summary(score(original, ids, device, options.windows), per_token)
        if counted:
            # Same targets but for the first four, which have no full context.
            loss = -float(counted.log_probabilities(ids[: scored["loss"].size + 1]).mean())
            entry["five_gram"] = {"perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / per_token}
        if len(ids) > DEPTHS[-1] + 2 * BLOCK and options.blocks:
            entry["by_depth"] = by_depth(packed, ids, device, options.blocks)
        result[kind] = entry
        print(json.dumps({kind: entry}), flush=True)
    result["continuations"] = continuations(options.checkpoint, options.continue_tokens)
    whole = {kind: load_ids(options.data, "test", kind) for kind in KINDS} if options.data else None
    whole = whole or {kind: ids for kind, (ids, _) in texts.items()}
    result["experts"] = expert_load(packed, whole, device, options.load_windows)
    return result


def heldout_ids(tokenizer: Any, kind: str) -> tuple[np.ndarray, float]:
    """Token ids of a held-out text, uint16, each file followed by the end token, and its bytes a token."""
    text = (HELDOUT / f"{kind}.txt").read_text(encoding="utf-8")
    end = tokenizer.token_to_id(END)
    ids: list[int] = []
    for piece in text.split(SEAM):
        ids += [*tokenizer.encode(piece, add_special_tokens=False).ids, end]
    return np.asarray(ids, np.uint16), len(text.encode()) / len(ids)


# -- the card ------------------------------------------------------------------------------------


def card(result: dict[str, Any], checkpoint: Path, sources: dict[str, Any] | None, log: list[dict[str, Any]]) -> str:
    """The model card in Markdown."""
    parts = [what_it_is(checkpoint), how_it_was_made(log), what_it_scores(result), text_of(result)]
    if sources:
        parts.append(licences(sources))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def what_it_is(checkpoint: Path) -> list[str]:
    """Purpose and architecture."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
    size = sum(p.stat().st_size for p in checkpoint.iterdir() if p.name not in WRITTEN)
    count = sum(tensor.numel() for tensor in read_packed(checkpoint).values())
    return [
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
        f"{config['moe_intermediate_size']} and a shared one, a vocabulary of {config['vocab_size']:,}, one "
        "multi-token-prediction layer (`mtp.*`, stored as the trunk is).",
        f"{count / 1e6:.1f} M parameters, {size / 2**20:.2f} MiB with its tokenizer: MLX-LM's affine packing, 4 bits",
        "in groups of 64, router gates in 8.",
    ]


def how_it_was_made(log: list[dict[str, Any]]) -> list[str]:
    """The commands, and what the training log says of the run."""
    lines = [
        "## How it was made",
        "",
        "    python -m engine.tiny.corpus --out .tiny                # text, split by file, and tokenizer (Debian 12)",
        "    python -m engine.tiny.train --data .tiny --out OUT      # one GPU; a slower one wants more --minutes",
        "    python -m engine.tiny.convert --trained OUT             # mlx_lm.convert, then the draft head",
        "    python -m engine.tiny.evaluate --trained OUT --data .tiny",
    ]
    if log:
        end = log[-1]
        lines += [
            "",
            f"Trained from scratch on one {end['device']} in one run of {end['seconds']:.0f} seconds: {end['steps']:,} "
            f"steps, {end['tokens']:,} tokens;",
            "windows of 1,024 tokens, of 4,096 in the last 35 % of the time.",
            "In the last tenth the forward pass saw weights rounded to the 4-bit grid (straight-through gradients).",
            "Muon for the matrices inside layers, AdamW for the rest; the loss adds 0.3 of the draft head's and 0.01",
            "of each layer's load balance.",
        ]
    return lines


def what_it_scores(result: dict[str, Any]) -> list[str]:
    """Every table of figures."""
    kinds = [kind for kind in KINDS if kind in result]
    lines = [
        "## What it scores",
        "",
        "All of this is held-out text: files that training never saw. Code and prose are [`../heldout`](../heldout)"
        + (", chats are made of the test side's docstrings." if "chat" in kinds else "."),
        f"Windows of {WINDOW:,} tokens, every position counted. The command is the last one above; the same figures,",
        "unrounded, are in [`evaluation.json`](evaluation.json).",
        "",
        "| text | tokens | model | bits a byte | perplexity | top-1 |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        tokens = result[kind]["four_bit"]["tokens"]
        for key, label in (("four_bit", "4-bit, as shipped"), ("bf16", "bfloat16 original"), ("five_gram", "5-gram")):
            if key in result[kind]:
                f = result[kind][key]
                top = f"{f['top1']:.1%}" if "top1" in f else "-"
                scored = f"{f['bits_per_byte']:.3f} | {f['perplexity']:.3f} | {top}"
                lines.append(f"| {kind} | {tokens:,} | {label} | {scored} |")
    lines += ["", f"The {ORDER}-gram model is interpolated Kneser-Ney over the same training tokens."]
    compared = [result[kind] for kind in kinds if "bf16" in result[kind]]
    worse = [f["four_bit"]["perplexity"] / f["bf16"]["perplexity"] - 1 for f in compared]
    if worse:
        said = ", ".join(f"{value:+.2%} in {kind}" for kind, value in zip(kinds, worse))
        lines += [f"Perplexity in 4 bits against the bfloat16 original: {said}."]
    deep = [kind for kind in kinds if "by_depth" in result[kind]]
    if deep:
        lines += [
            "",
            f"Perplexity (4-bit) of the same tokens, in blocks of {BLOCK}, by how many tokens stand before a block.",
            "Training windows ended at 4,096 tokens; the last column is beyond them.",
            "",
            "| text | " + " | ".join(f"{depth:,}" for depth in DEPTHS) + " |",
            "|---" * (1 + len(DEPTHS)) + "|",
        ]
        for kind in deep:
            lines.append(f"| {kind} | " + " | ".join(f"{v:.3f}" for v in result[kind]["by_depth"].values()) + " |")
    lines += [
        "",
        "First draft of the multi-token-prediction head equal to the greedy next token (4-bit, share of positions):",
        "",
        "| text | hidden state after the final norm | before it |",
        "|---|---|---|",
    ]
    for kind in kinds:
        f = result[kind]["four_bit"]
        lines.append(f"| {kind} | {f['draft_after_norm']:.1%} | {f['draft_before_norm']:.1%} |")
    lines += ["", "The head was trained with the state after the norm.", ""]
    return lines + load_table(result["experts"])


def load_table(experts: dict[str, Any]) -> list[str]:
    """Load of the experts, layer by layer."""
    tokens, load = experts["tokens"], experts["load"]
    lines = [
        f"Load of the experts over {tokens['all']:,} tokens, evenly spread over the test side, as a multiple of the",
        "fair share (least, most used expert of each layer):",
        "",
        "| layer | " + " | ".join(f"{kind} ({tokens[kind]:,})" for kind in load) + " |",
        "|---" * (1 + len(load)) + "|",
    ]
    for layer in range(len(load["all"])):
        cells = [f"{least:.2f}, {most:.2f}" for least, most in (load[kind][layer] for kind in load)]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return lines


def text_of(result: dict[str, Any]) -> list[str]:
    """The continuations."""
    lines = [
        "## Continuations",
        "",
        "The prompt, then `▸`, then what the engine wrote: first the likeliest tokens, as tests and sweeps decode (a",
        "model of this size soon repeats itself so), then tokens drawn as `generation_config.json` asks (seed 0).",
    ]
    for made in (one for kind in PROMPTS for one in result["continuations"][kind]):
        for way in ("greedy", "drawn"):
            lines += ["", "~~~~", f"{made['prompt']}▸{made[way]}", "~~~~"]
    return lines


def licences(sources: dict[str, Any]) -> list[str]:
    """What the text is made of."""
    lines = [
        "## Text and licences",
        "",
        "Split by file (a hash of package and path): one file in 80 is held out for test, one for validation.",
        "",
        "| source | kind | licence | MB |",
        "|---|---|---|---|",
    ]
    for s in sources["sources"]:
        lines.append(f"| {s['package']} | {s['kind']} | {s['licence']} | {s['bytes'] / 1e6:.1f} |")
    return [
        *lines,
        "",
        "Debian packages are of release 12, section `main`; the chat part is made of their docstrings and",
        "definitions.",
    ]


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--trained", type=Path, help="folder of the bfloat16 original")
    parser.add_argument("--data", type=Path, help="folder made by engine.tiny.corpus, for the 5-gram model")
    parser.add_argument("--windows", type=int, default=12, help="windows of 4,096 tokens of each text, at most")
    parser.add_argument("--blocks", type=int, default=8, help="blocks for perplexity by depth; 0 leaves it out")
    parser.add_argument("--load-windows", type=int, default=32, help="windows of each text for the load of experts")
    parser.add_argument("--continue-tokens", type=int, default=48, help="length of a continuation")
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
