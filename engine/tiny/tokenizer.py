"""The tokenizer of the embedded checkpoint: byte-level BPE of 4,096 entries with Qwen's control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 4096
"""Entries in all, control tokens included."""
END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"
CONTROL = (END, TURN_START, TURN_END)
"""Special tokens, hidden when text is decoded; `THINK` and `THINK_END` are shown."""

# Words take one leading space, digits stand alone, and runs of spaces (indentation) are one piece.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content | trim }}{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def train_tokenizer(texts: list[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train byte-level BPE on `texts`; the control tokens take the last ids, as in Qwen's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 5,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (THINK, THINK_END)])
    return tokenizer


def encode_many(tokenizer: Tokenizer, texts: list[str], end: str | None = None) -> np.ndarray:
    """Token ids of all `texts` in a row, uint16, each followed by `end`."""
    tail = [tokenizer.token_to_id(end)] if end else []
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False):
            parts.append(np.asarray(encoding.ids + tail, dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    ids = {t: tokenizer.token_to_id(t) for t in (*CONTROL, THINK, THINK_END)}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": t in CONTROL,
            }
            for t, i in ids.items()
        },
    }
    generation = {
        "bos_token_id": ids[END],
        "eos_token_id": [ids[TURN_END], ids[END]],
        "pad_token_id": ids[END],
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
    }
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
