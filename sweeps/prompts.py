"""Prompts that are the same everywhere: real text that ships with Python, in a fixed order.

Routing of a mixture of experts depends on the text, so rates are measured on real text. Every trial opens with a line
of its own, so that no prefix cache can serve it, and no passage comes twice in one prompt.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

KINDS = ("text", "code", "prose", "repetitive", "random", "lily")
"""Kinds of prompt: documentation then sources, sources alone, documentation and docstrings, one passage over and over,
ids drawn at random, and the published id sequence."""

PASSAGE_CHARS = 2000
LILY_FACTOR = 2_654_435_761

# Left out: what some distributions package apart, so that the text is the same on all machines of one Python version.
_NOT_EVERYWHERE = {
    "test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "distutils",
    "__phello__",
    "__pycache__",
}


class PromptError(ValueError):
    """A kind of prompt that does not exist, or more tokens than a kind can give without repeating a passage."""


class Encoder(Protocol):
    """What prompts need of a tokenizer."""

    real_vocab: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        ...


class Prompts:
    """Prompts of one kind for one tokenizer, deterministic from the seed.

    Text is tokenised passage by passage as needed and kept: a long prompt is tokenised once a process.

    Args:
        tokenizer: encodes text; its `real_vocab` bounds random ids.
        kind: one of `KINDS`. vocabulary: ids of the model, padding included (for ``lily``; default `real_vocab`).

    Raises:
        PromptError: an unknown kind.
    """

    def __init__(self, tokenizer: Encoder, seed: int = 0, kind: str = "text", vocabulary: int | None = None) -> None:
        if kind not in KINDS:
            raise PromptError(f"prompt={kind}: must be one of {', '.join(KINDS)}")
        self.kind = kind
        self.seed = seed
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary or tokenizer.real_vocab
        self._ids: dict[int, list[int]] = {}

    def take(self, tokens: int, trial: int = 0) -> list[int]:
        """Ids of a prompt of exactly `tokens`; each `trial` has another opening (``lily``: always the same ids).

        Raises:
            PromptError: the text ends before `tokens`.
        """
        if self.kind == "lily":
            return [(i * LILY_FACTOR % 2**32) % self._vocabulary for i in range(tokens)]
        if self.kind == "random":
            generator = random.Random(f"{self.seed}/{trial}")
            return [generator.randrange(self._tokenizer.real_vocab) for _ in range(tokens)]
        ids = self._tokenizer.encode(self._opening(trial))
        passages = _passages(self.kind)
        start = random.Random(f"{self.seed}/{trial}").randrange(_starts(self.kind))
        for step in range(len(passages)):
            if len(ids) >= tokens:
                break
            ids += self._passage((start + step) % len(passages)) if self.kind != "repetitive" else self._repeat(tokens)
        if len(ids) < tokens:
            raise PromptError(f"prompt={self.kind} has {len(ids)} tokens, {tokens} were asked for; use prompt=text")
        return ids[:tokens]

    def _opening(self, trial: int) -> str:
        mark = hashlib.sha256(f"{self.seed}/{self.kind}/{trial}".encode()).hexdigest()[:16]
        return f"{mark}: reading {trial + 1} begins here.\n\n"

    def _passage(self, index: int) -> list[int]:
        if index not in self._ids:
            self._ids[index] = list(self._tokenizer.encode(_passages(self.kind)[index]))
        return self._ids[index]

    def _repeat(self, tokens: int) -> list[int]:
        once = self._passage(0)
        return once * (tokens // len(once) + 1)


class WordEncoder:
    """Stands in for a tokenizer where weights are random: each word and space run is an id, the same everywhere.

    Args:
        real_vocab: number of ids.
    """

    def __init__(self, real_vocab: int) -> None:
        self.real_vocab = real_vocab

    def encode(self, text: str) -> list[int]:
        """Ids of words and of the marks between them, by checksum."""
        return [zlib.crc32(word.encode()) % self.real_vocab for word in re.findall(r"\w+|[^\w ]", text)]


def digest(ids: Sequence[int]) -> str:
    """Sixteen hex digits that name a sequence of ids in rows."""
    return hashlib.sha256(b"".join(int(i).to_bytes(4, "little") for i in ids)).hexdigest()[:16]


@lru_cache(maxsize=4)
def _passages(kind: str) -> tuple[str, ...]:
    """Distinct passages of whole lines, about 2,000 characters each, in a fixed order."""
    if kind == "prose":
        text = _documentation() + _docstrings()
    elif kind == "code":
        text = _sources()
    elif kind == "repetitive":
        text = _documentation()[: 2 * PASSAGE_CHARS]
    else:
        text = _documentation() + _sources()
    passages: dict[str, None] = {}
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PASSAGE_CHARS:
            passages.setdefault("".join(lines))
            lines, size = [], 0
    return tuple(passages)


def _starts(kind: str) -> int:
    """Passages a prompt may begin with: for ``text`` those of the documentation, so that sources follow it."""
    return len(_passages(kind)) if kind != "text" else len(_documentation()) // (PASSAGE_CHARS + 200)


@lru_cache(maxsize=1)
def _documentation() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _docstrings() -> str:
    return "\n\n".join(text for text in re.findall(r'"""(.+?)"""', _sources(), re.DOTALL) if " " in text)


@lru_cache(maxsize=1)
def _sources() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    tops = [path for path in library.iterdir() if path.name not in _NOT_EVERYWHERE]
    tops = [path for path in tops if not path.name.startswith(("_sysconfig", "config-", "."))]
    files = [path for top in tops for path in (top.rglob("*.py") if top.is_dir() else [top]) if path.suffix == ".py"]
    files.sort(key=lambda path: path.relative_to(library).as_posix())
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
