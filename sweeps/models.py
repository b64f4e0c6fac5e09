"""What `model=` names: an alias of `configs/model`, a folder, or a Hugging Face id with ``@revision``.

Resolving reads headers and configuration only; nothing is downloaded unless `fetch` says so, and no weights are
loaded. A model that is not here yet still has a geometry if it is known, so that a plan can be shown without it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelConfig
from engine.memory import weight_bytes
from engine.tiny import CHECKPOINT
from sweeps.compose import Request, UsageError, _near, options, resolve

TOY_BYTES = 2_000_000_000
"""Below this size a model is a toy: its report ends with the command for the real one."""

REAL_COMMAND = "python -m sweeps model=qwen3.6-35b sweep=ten"
"""The run that people come for."""


@dataclass(frozen=True)
class Model:
    """A model as the plan and the worker need it.

    Attributes:
        name: what people call it. kind: ``"checkpoint"`` (a folder) or ``"synthetic"`` (made from `seed` in memory).
        path: absolute folder of a checkpoint, or None. repo, revision: where it comes from, or None.
        config: the architecture. weights_bytes: bytes of its tensors, or None where only the geometry is known.
        weights_hash: digest of headers and samples of the files, or None.
        synthetic: whether the weights are random, so that text means nothing.
        skew: how often the busiest expert of synthetic weights is chosen, in multiples of the even share.
        missing: why it cannot run now, or None.
    """

    name: str
    kind: str
    config: ModelConfig
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    weights_bytes: int | None = None
    weights_hash: str | None = None
    synthetic: bool = False
    seed: int = 0
    skew: float = 1.0
    missing: str | None = None

    @property
    def toy(self) -> bool:
        """Whether speeds of this model say nothing about the real one."""
        return self.weights_bytes is not None and self.weights_bytes < TOY_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the job: the fields, `config` as plain fields of `ModelConfig`, and `toy`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "config"}
        config = dataclasses.asdict(self.config) | {"eos_token_ids": list(self.config.eos_token_ids)}
        return values | {"config": config, "toy": self.toy}

    def fingerprint(self) -> dict[str, Any]:
        """What identifies its weights in keys of points; not where they lie on this machine."""
        return {
            "architecture": self.config.hash(),
            "weights": self.weights_hash or f"seed {self.seed} skew {self.skew:g}",
            "revision": self.revision,
        }


def find(request: Request) -> Model:
    """The model of a request.

    Raises:
        UsageError: an unknown name, a folder that is no checkpoint, or a download that failed.
    """
    group = request.model
    if group["kind"] == "embedded":
        return _embedded(group)
    if group["kind"] == "synthetic":
        config, name = ModelConfig(), group["name"]
        if (layers := group["layers"]) is not None:
            every = config.full_attention_interval
            if not (isinstance(layers, int) and 0 < layers <= config.num_hidden_layers and layers % every == 0):
                raise UsageError(
                    f"model.layers={layers} is no cut of the model: write a multiple of {every} "
                    f"up to {config.num_hidden_layers}"
                )
            config, name = dataclasses.replace(config, num_hidden_layers=layers), f"{name}-{layers}layers"
        return _synthetic(name, config, group)
    if group["kind"] == "hub":
        return _hub(group["name"], group["repo"], group["revision"], request.fetch, f"model={group['name']}")
    return _custom(str(group["reference"]), request)


def _embedded(group: dict[str, Any]) -> Model:
    """The trained model that is part of the package."""
    return read(CHECKPOINT, group["name"])


def _synthetic(name: str, config: ModelConfig, group: dict[str, Any]) -> Model:
    try:
        skew = float(group.get("skew", 1.0))
    except (TypeError, ValueError):
        skew = math.nan
    if not 1 <= skew <= config.num_experts:
        raise UsageError(
            f"model.skew={group.get('skew')} is no share of the busiest expert: write 1 (even) to {config.num_experts}"
        )
    if skew != 1.0:
        name += f"-skew{skew:g}"
    seed, size = int(group["seed"]), weight_bytes(config)
    return Model(name, "synthetic", config, synthetic=True, seed=seed, skew=skew, weights_bytes=size)


def _custom(reference: str, request: Request) -> Model:
    launch = request.launch
    folder = resolve(reference, launch)
    if (folder / "config.json").is_file():
        return read(folder, folder.name)
    if folder.is_dir():
        raise UsageError(f"model folder {folder} has no config.json: give the one with it and *.safetensors files")
    named = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", reference)
    if named and not reference.startswith((".", "~", "/")):
        return _hub(named[1].split("/")[1], named[1], named[2], request.fetch, f"model={reference}", folder)
    if "/" not in reference and not folder.exists():
        known = options("model")
        raise UsageError(
            f"model={reference} is unknown{_near(reference, known)}; give one of {', '.join(known)}, "
            "a folder (./NAME) or a Hugging Face id (ORG/NAME@REVISION)"
        )
    raise UsageError(
        f"model folder {folder} does not exist (relative paths start at {launch}, where the command was started): "
        "give a full path"
    )


def read(folder: Path, name: str, repo: str | None = None, revision: str | None = None) -> Model:
    """A checkpoint on disk, or the list of its tensors (``.json.gz``), checked by its headers.

    Raises:
        UsageError: what is wrong with it, naming file and tensor.
    """
    from engine.checkpoint import inspect

    found = inspect(folder)
    found.bind(mtp=False)
    return Model(
        name,
        "checkpoint",
        found.config,
        path=str(folder),
        repo=repo,
        revision=revision,
        weights_bytes=found.bytes_of("text"),
        weights_hash=found.weights_hash,
    )


def _hub(name: str, repo: str, revision: str | None, fetch: bool, word: str, folder: Path | None = None) -> Model:
    from engine import fetch as hub

    found = hub.cached(repo, revision)
    if found is None and fetch:
        found = hub.fetch(repo, revision)
    if found is not None:
        return read(Path(found), name, repo, revision)
    also = f", and there is no folder {folder}" if folder else ""
    missing = f"{repo} is not on this machine{also}: fetch it with  python -m sweeps {word} fetch=true"
    return Model(name, "checkpoint", ModelConfig(), repo=repo, revision=revision, missing=missing)
