"""One loaded model for all subjects of a process.

MLX-LM's model and the engine hold the very same arrays, so that a full-size model exists once and both sides are
measured on one set of weights. A folder is loaded by MLX-LM's own loader whenever the baseline takes part, and the
engine borrows from it; synthetic weights are made by the engine, and MLX-LM's model class is built around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from engine.tokenizer import Tokenizer
from mlx.utils import tree_flatten

from engine.checkpoint import Checkpoint, load
from engine.config import GROUP_SIZE, ModelConfig
from engine.device import activation_dtype
from engine.synthetic import make_weights, tiny_config
from engine.weights import Weights
from sweeps.subjects.base import SubjectError, SubjectUnsupported, memory_errors

PREFIX = "language_model."
"""What MLX-LM's parameter names start with and `Weights.tensors` leaves off."""


class Shared:
    """The model of a job, loaded on first use.

    Args:
        model: the job's model. Either ``path`` (a checkpoint folder), or ``kind: synthetic`` (or ``embedded``
            without a path) with optional ``geometry`` (fields of `ModelConfig`; absent is the real one, or for
            ``embedded`` the tiny one), ``seed``, ``bits``, ``skew``, ``mtp`` and ``real_vocab``.
        baseline: whether MLX-LM takes part; then a folder is loaded by MLX-LM's loader.

    Raises:
        SubjectError: neither a folder nor a synthetic model is named.
    """

    def __init__(self, model: Mapping[str, Any], baseline: bool = True):
        self.spec, self.baseline = dict(model), baseline
        self.dtype = activation_dtype()
        path = self.spec.get("path")
        self.path = Path(path) if path else None
        if self.path is None and self.spec.get("kind") not in ("synthetic", "embedded"):
            raise SubjectError(f"model {self.spec.get('name', '?')!r} has neither a folder (path) nor kind=synthetic")

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random, so that what the model says means nothing."""
        return self.path is None or bool(self.spec.get("synthetic"))

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The folder as the engine's loader reads it, arrays not yet in memory; None for weights made here."""
        return load(self.path) if self.path else None

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture."""
        if self.checkpoint is not None:
            return self.checkpoint.config
        fields = self.spec.get("geometry")
        if self.spec["kind"] == "embedded":
            return tiny_config(**(fields or {}))
        return ModelConfig(**(fields or {}))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer; None for weights made here."""
        return self.checkpoint.tokenizer if self.checkpoint is not None else None

    @property
    def real_vocab(self) -> int | None:
        """Number of ids that are tokens; the rows beyond are padding. None if nobody says."""
        said = self.spec.get("real_vocab")
        return said if said else self.tokenizer.real_vocab if self.tokenizer else None

    @cached_property
    def weights(self) -> Weights:
        """The weights both sides run on, in memory, floats in `dtype`."""
        with memory_errors("loading the weights"):
            if self.path and self.baseline:
                made = self._borrowed()
            elif self.checkpoint is not None:
                made = Weights.from_tensors(self.config, self.checkpoint.weights.tensors, self.dtype)
            else:
                made = self._random()
            mx.eval(made.tensors)
        return made

    @cached_property
    def lm_model(self) -> Any:
        """MLX-LM's model in evaluation mode, on the arrays of `weights`.

        Raises:
            SubjectUnsupported: MLX-LM's loader refuses this folder.
        """
        return self._loaded if self.path and self.baseline else build_lm_model(self.config, self.weights.tensors)

    @cached_property
    def _loaded(self) -> Any:
        from mlx_lm.utils import load_model

        assert self.path is not None
        try:
            model, _ = load_model(self.path, lazy=True)
        except (ValueError, KeyError, FileNotFoundError) as error:
            first = str(error).strip().splitlines()[0][:200]
            raise SubjectUnsupported(f"MLX-LM cannot load {self.path}: {first}") from error
        if self.dtype == mx.float32:
            model.set_dtype(mx.float32)
        return model

    def _borrowed(self) -> Weights:
        """MLX-LM's arrays, and the draft head, which MLX-LM drops, from the engine's own loader."""
        try:
            tensors = dict(tree_flatten(self._loaded.parameters()))
        except SubjectUnsupported:
            self.baseline = False
            return self._own()
        own = self._own()
        head = {name: value for name, value in own.tensors.items() if name.startswith("mtp.")}
        borrowed = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
        return Weights.from_tensors(self.config, borrowed | head)

    def _own(self) -> Weights:
        assert self.checkpoint is not None
        return Weights.from_tensors(self.config, self.checkpoint.weights.tensors, self.dtype)

    def _random(self) -> Weights:
        spec = self.spec
        made = make_weights(
            self.config,
            seed=int(spec.get("seed", 0)),
            bits=spec.get("bits", 4),
            mtp=bool(spec.get("mtp", False)),
            skew=float(spec.get("skew", 1.0)),
        )
        return Weights.from_tensors(self.config, made.tensors, self.dtype)

    def independent(self) -> Weights:
        """The weights by a road that does not pass through MLX-LM, floats in float32, for the oracle.

        Packed codes of a model above 1 GiB are those of `weights`, since a second copy would not fit; a loader
        cannot bend them without changing their shape. All other tensors are read again.
        """
        if self.checkpoint is None:
            return Weights.from_tensors(self.config, self.weights.tensors, mx.float32)
        tensors = dict(self.checkpoint.weights.tensors)
        if self.weights.nbytes > 2**30:
            tensors |= {k: v for k, v in self.weights.tensors.items() if v.dtype == mx.uint32}
        return Weights.from_tensors(self.config, tensors, mx.float32)

    def facts(self) -> dict[str, Any]:
        """What rows say about the model: name, architecture hash, bytes, type of the floats, synthetic or not."""
        return {
            "name": self.spec.get("name"),
            "path": str(self.path) if self.path else None,
            "config_hash": self.config.hash(),
            "bytes": self.weights.nbytes,
            "dtype": str(self.dtype).removeprefix("mlx.core."),
            "synthetic": self.synthetic,
            "real_vocab": self.real_vocab,
            "one_copy": True,
        }

    def close(self) -> None:
        """Forget every array that was loaded."""
        for name in ("weights", "lm_model", "_loaded", "checkpoint"):
            self.__dict__.pop(name, None)
        mx.clear_cache()


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

    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config.to_dict()))
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
