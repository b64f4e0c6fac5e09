"""Which model `serve` and `chat` load: a folder, the real checkpoint in the cache, or the small embedded one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import SpeculativeConfig
from engine.ops.registry import DECODE_ROWS
from engine.tiny import CHECKPOINT

DEFAULT = "tiny"
"""The model served when none is named."""

REAL = "qwen3.6-35b"
"""Short name of the real checkpoint, as `python -m sweeps model=` has it."""


class SourceError(ValueError):
    """A model that cannot be found; one line that names it and the fix."""


DRAFTERS = ("off", "mtp", "ngram")
"""What ``--draft`` takes: the checkpoint's draft head, lookup in the context, or nothing."""


@dataclass(frozen=True)
class Source:
    """Where a model is: its name for clients, and its folder."""

    name: str
    path: Path


def drafting(name: str, depth: int) -> SpeculativeConfig:
    """Drafting for people who wait for answers: up to `depth` tokens, fewer or none where they do not pay.

    Raises:
        SourceError: a depth that no pass verifies.
    """
    if not 1 <= depth < DECODE_ROWS:
        raise SourceError(f"--draft-depth must be 1 to {DECODE_ROWS - 1}, got {depth}")
    if name == "off":
        return SpeculativeConfig()
    return SpeculativeConfig(name, depth, adaptive=True)  # type: ignore[arg-type]


def find(model: str = DEFAULT) -> Source:
    """The checkpoint that `model` names; nothing is downloaded.

    Args:
        model: ``"tiny"``, ``"qwen3.6-35b"``, or a folder with config.json, weights and tokenizer.

    Raises:
        SourceError: an unknown name, a folder that is not there, or a checkpoint that was not fetched yet.
    """
    if model == DEFAULT:
        return Source(DEFAULT, CHECKPOINT)
    if model == REAL:
        from engine.fetch import cached

        folder = cached()
        if folder is None:
            raise SourceError(f"{REAL} is not on this machine: fetch it with python -m engine fetch")
        return Source(REAL, folder)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"--model {model}: no such folder with a config.json; give {DEFAULT}, {REAL} or a checkpoint's folder"
        )
    return Source(folder.resolve().name, folder)
