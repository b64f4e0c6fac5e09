"""One loaded model for all subjects of a process.

MLX-LM's model and the engine hold the very same arrays, so that a full-size model exists once and both sides are
measured on one set of weights. A folder is loaded by MLX-LM's own loader whenever the baseline takes part, and the
engine borrows from it; synthetic weights are made by the engine, and MLX-LM's model class is built around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from engine.checkpoint import Inventory, draft_head, inspect, load
from engine.config import GROUP_SIZE, ModelConfig
from engine.device import activation_dtype
from engine.synthetic import make_weights
from engine.weights import Layer, Weights
from sweeps.subjects.base import SubjectError, SubjectUnsupported, memory_errors

PREFIX = "language_model."
"""What MLX-LM's parameter names start with and `Weights.tensors` leaves off."""

SMALL_BYTES = 2**30
"""Weights up to this size may be held a second time, for checks."""


class Shared:
    """The model of a job, loaded on first use.

    Args:
        model: the job's model: ``kind`` ``"checkpoint"`` with its folder as ``path``, or ``"synthetic"`` with
            ``config`` (fields of `ModelConfig`), ``seed`` and optionally ``bits``, ``skew`` and ``mtp``.
        baseline: whether MLX-LM takes part; then a folder is loaded by MLX-LM's loader.

    Raises:
        SubjectError: the model is of another kind, or is missing.
    """

    def __init__(self, model: Mapping[str, Any], baseline: bool = True):
        self.spec, self.baseline = dict(model), baseline
        self.dtype = activation_dtype()
        name, kind = self.spec.get("name", "?"), self.spec.get("kind")
        if self.spec.get("missing"):
            raise SubjectError(f"model {name}: {self.spec['missing']}")
        if kind not in ("checkpoint", "synthetic") or (kind == "checkpoint" and not self.spec.get("path")):
            raise SubjectError(f"model {name}: kind {kind!r} is neither a checkpoint with a path nor synthetic")
        self.path = Path(self.spec["path"]) if kind == "checkpoint" else None

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random, so that what the model says means nothing."""
        return self.path is None or bool(self.spec.get("synthetic"))

    @cached_property
    def inventory(self) -> Inventory | None:
        """Headers of the folder, no data; None for weights made here."""
        return inspect(self.path) if self.path else None

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture."""
        if self.inventory is not None:
            return self.inventory.config
        fields = dict(self.spec.get("config") or {})
        if "eos_token_ids" in fields:
            fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return ModelConfig(**fields)

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer; None where there is none."""
        if self.path is None or not (self.path / "tokenizer.json").is_file():
            return None
        from engine.tokenizer import Tokenizer

        return Tokenizer.from_path(self.path)

    @property
    def real_vocab(self) -> int:
        """Number of ids that are tokens; rows of the head beyond are padding."""
        known = self.tokenizer.real_vocab if self.tokenizer else None
        return min(known or self.config.vocab_size, self.config.vocab_size)

    @cached_property
    def weights(self) -> Weights:
        """The weights both sides run on, in memory, floats in `dtype` (checkpoints on a GPU: as stored).

        MLX-LM drops draft heads: that of a folder is read beside what is borrowed from it.

        Raises:
            SubjectOutOfMemory: they do not fit.
        """
        with memory_errors("loading the weights"):
            if self.path is None:
                made = Weights.from_tensors(self.config, self._random().tensors, self.dtype)
            elif self.baseline and self._loaded is not None:
                parameters = dict(tree_flatten(self._loaded.parameters()))
                assert self.inventory is not None
                head = draft_head(self.inventory, self.dtype if self.dtype == mx.float32 else None)
                made = Weights.from_tensors(self.config, parameters | head)
            else:
                made = load(self.path, self.dtype).weights
            mx.eval(made.tensors)
        return made

    @cached_property
    def lm_model(self) -> Any:
        """MLX-LM's model in evaluation mode, on the arrays of `weights`.

        Raises:
            SubjectUnsupported: MLX-LM's loader refuses this folder; the reason is its own.
        """
        weights = self.weights
        if self.path is None or not self.baseline:
            return build_lm_model(self.config, weights.tensors)
        if self._loaded is None:
            raise SubjectUnsupported(f"MLX-LM cannot load {self.path}: {self._refusal}")
        return self._loaded

    @cached_property
    def _loaded(self) -> Any:
        """What MLX-LM's own loader makes of the folder, not evaluated; None if it refuses."""
        from mlx_lm.utils import load_model

        assert self.path is not None
        try:
            model, _ = load_model(self.path, lazy=True)
        except (ValueError, KeyError, FileNotFoundError) as error:
            self._refusal = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            return None
        if self.dtype == mx.float32:
            model.set_dtype(mx.float32)
        return model

    def _random(self) -> Weights:
        spec = self.spec
        return make_weights(
            self.config,
            seed=int(spec.get("seed", 0)),
            bits=spec.get("bits", 4),
            mtp=bool(spec.get("mtp", False)),
            skew=float(spec.get("skew", 1.0)),
        )

    def independent(self) -> Weights:
        """The same weights by a road that does not pass through MLX-LM's loader, floats in float32: the oracle's.

        A checkpoint up to 1 GiB is read again by the engine's loader. Of a larger one in MLX's layout the packed
        codes are shared, since a second copy would not fit (a loader cannot bend codes without changing their
        shape); gains, scales and biases are read again. Layers of a larger model are made when asked for, one at a
        time: all float32 scales together are gigabytes.
        """
        if self.weights.nbytes > SMALL_BYTES and (self.inventory is None or self.inventory.layout == "mlx"):
            whole = self._float32()
            layers: Any = _LayersOnDemand(self._float32, len(whole.layers))
            return dataclasses.replace(whole, layers=layers, tensors={})
        if self.path is None:
            return self._float32()
        return load(self.path, mx.float32, mtp=False).weights

    def _float32(self) -> Weights:
        """Nothing evaluated: casts happen where they are used."""
        tensors = {k: v for k, v in self.weights.tensors.items() if self.path is None or v.dtype == mx.uint32}
        return Weights.from_tensors(self.config, self._stored_floats() | tensors, mx.float32)

    def _stored_floats(self) -> dict[str, mx.array]:
        if self.inventory is None or self.path is None:
            return {}
        opened: dict[str, Any] = {file: mx.load(str(self.path / file)) for file in self.inventory.files}
        made = {}
        for name in self.inventory.names("text"):
            value = opened[self.inventory.tensors[name].file][name]
            if value.dtype != mx.uint32:
                made[name.removeprefix(PREFIX)] = value
        return made

    def facts(self) -> dict[str, Any]:
        """What rows say about the model: names, hashes, bytes, type of the floats, synthetic or not."""
        return {
            "name": self.spec.get("name"),
            "path": str(self.path) if self.path else None,
            "repo": self.spec.get("repo"),
            "revision": self.spec.get("revision"),
            "config_hash": self.config.hash(),
            "weights_hash": self.inventory.weights_hash if self.inventory else f"seed {self.spec.get('seed', 0)}",
            "bytes": self.weights.nbytes,
            "dtype": str(self.weights.norm.dtype).removeprefix("mlx.core."),
            "synthetic": self.synthetic,
            "real_vocab": self.real_vocab,
        }

    def close(self) -> None:
        """Forget every array that was loaded."""
        for name in ("weights", "lm_model", "_loaded"):
            self.__dict__.pop(name, None)
        mx.clear_cache()


class SharedElsewhere(Shared):
    """The model of a job whose engines live in other processes: here its weights are loaded only if asked for."""

    def facts(self) -> dict[str, Any]:
        """As `Shared.facts`, from headers and geometry alone."""
        return {
            "name": self.spec.get("name"),
            "path": str(self.path) if self.path else None,
            "repo": self.spec.get("repo"),
            "revision": self.spec.get("revision"),
            "config_hash": self.config.hash(),
            "weights_hash": self.inventory.weights_hash if self.inventory else f"seed {self.spec.get('seed', 0)}",
            "bytes": self.spec.get("weights_bytes"),
            "synthetic": self.synthetic,
            "real_vocab": self.real_vocab,
        }


class _LayersOnDemand(Sequence[Layer]):
    """Layers of weights that are made anew for each, so that only the last one asked for is held."""

    def __init__(self, make: Callable[[], Weights], count: int):
        self._make, self._count = make, count
        self._held: tuple[int, Layer] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Layer:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._held is None or self._held[0] != index:
            self._held = index, self._make().layers[index]
        return self._held[1]


def build_lm_model(config: ModelConfig, tensors: Mapping[str, mx.array]) -> Any:
    """MLX-LM's model class around given arrays, in evaluation mode.

    The class draws random parameters when it is built; they are lazy and replaced before anything evaluates
    them, so nothing is held twice. Modules are packed as the tensors say (bits from the shapes).

    Args:
        tensors: by name without ``language_model.``; ``mtp.*`` is left out, MLX-LM has no place for it.

    Raises:
        ValueError: a tensor is missing, unknown, or of the wrong shape.
    """
    from mlx_lm.models import qwen3_5_moe

    arguments: Any = qwen3_5_moe.ModelArgs.from_dict(config.to_dict())
    model = qwen3_5_moe.Model(arguments)
    held = {f"{PREFIX}{name}": value for name, value in tensors.items() if not name.startswith("mtp.")}

    def packing(path: str, module: nn.Module) -> bool | dict[str, Any]:
        scales = held.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        bits = held[f"{path}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        return {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}

    nn.quantize(model, class_predicate=packing)
    model.eval()
    model.load_weights(list(held.items()), strict=True)
    return model
