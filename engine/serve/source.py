"""Which model `serve` and `chat` load: a folder, the real checkpoint in the cache, or the small embedded one."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import engine

DEFAULT = "tiny"
"""The model served when none is named."""

REAL = "qwen3.6-35b"
"""Short name of the real checkpoint, as `python -m sweeps model=` has it."""

NOISE = (
    "NOTE: this model has random weights, since this build comes without a trained small one. "
    "Everything works as with a real model, but its text is noise."
)
SYNTHETIC_CONTEXT = 32_768


class SourceError(ValueError):
    """A model that cannot be found; one line that names it and the fix."""


@dataclass(frozen=True)
class Source:
    """Where a model is: its name for clients, its folder, and whether its weights are random."""

    name: str
    path: Path
    noise: bool = False


def find(model: str = DEFAULT) -> Source:
    """The checkpoint that `model` names; nothing is downloaded.

    Args:
        model: ``"tiny"``, ``"qwen3.6-35b"``, or a folder with config.json, weights and tokenizer.

    Raises:
        SourceError: an unknown name, a folder that is not there, or a checkpoint that was not fetched yet.
    """
    if model == DEFAULT:
        return _tiny()
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


def _tiny() -> Source:
    folder = Path(engine.__file__).parent / "tiny" / "checkpoint"
    if (folder / "config.json").is_file():
        return Source(DEFAULT, folder)
    return Source(f"{DEFAULT}-noise", _synthetic(), noise=True)


def _synthetic() -> Path:
    """The folder of a random checkpoint of the small geometry, written once."""
    from engine.synthetic import tiny_config, write_checkpoint

    # The context is part of the name, so that a later version that changes it does not meet an old folder.
    folder = cache_folder() / f"tiny-noise-{SYNTHETIC_CONTEXT}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a second process never reads half of it.
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        made = write_checkpoint(Path(aside) / "made", tiny_config(max_position_embeddings=SYNTHETIC_CONTEXT))
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    return folder


def cache_folder() -> Path:
    """The user's cache folder of this project."""
    base = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / base / "lilybench"
