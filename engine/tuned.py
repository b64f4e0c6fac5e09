"""What measured fastest on this chip: the tuned files, read where the config says ``best``.

A file speaks for one chip and holds one entry for each model geometry. The user's own (`USER`, written by
``python -m sweeps tune``) comes before the one that is shipped (`SHIPPED`), op by op; where neither speaks, the op's
declared order decides. What an op's code was when it was measured is kept as its identity: an op that has changed
since, or another version of MLX, makes that part of a file void, with a note. Nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.config import ModelConfig
from engine.device import device_info
from engine.ops.choice import Choice, Tuned
from engine.ops.registry import OPS, Op
from engine.weights import Attention, Experts, GatedDelta, Matrix, Weights

FORMAT = 1
"""Version of the files."""

USER = Path.home() / ".cache" / "lilybench" / "tiles"
"""The user's tuned files, one a chip."""

SHIPPED = Path(__file__).resolve().parent.parent / "configs" / "tiles"
"""Tuned files that come with the project."""

STEP = "step"
"""The name under which the choices of a whole step stand beside the ops."""

_ENGINE = Path(__file__).resolve().parent


# -- which file, which entry -----------------------------------------------------------------------


@lru_cache(maxsize=1)
def chip() -> str:
    """Name of the chip for files: ``apple-m5-max``, ``nvidia-h200``, ``cpu-amd-epyc``."""
    info = device_info()
    name = str(info.get("device_name", "unknown"))
    if info["kind"] == "cpu" and not name.lower().startswith("cpu"):
        name = f"cpu {name}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def geometry(config: ModelConfig, weights: Weights, dtype: Any) -> str:
    """Twelve hex digits of all that decides which kernels a model runs and how fast, the number of layers left out."""
    shapes = {name: value for name, value in dataclasses.asdict(config).items() if name in _SHAPES}
    told = {"shapes": shapes, "bits": sorted(map(str, _bits(config, weights))), "dtype": str(dtype).rpartition(".")[2]}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


_SHAPES = frozenset(
    "vocab_size hidden_size full_attention_interval num_attention_heads num_key_value_heads head_dim "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
    "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size".split()
)


def _bits(config: ModelConfig, weights: Weights) -> set[int | None]:
    """Packings of the first period of layers and of the head."""
    parts: list[Attention | GatedDelta | Experts] = []
    for index in range(min(config.full_attention_interval, config.num_hidden_layers)):
        layer = weights.layers[index]
        parts += [part for part in (layer.attention, layer.gated_delta, layer.experts) if part is not None]
    values = [getattr(part, f.name) for part in parts for f in dataclasses.fields(part)]
    return {value.bits for value in (*values, weights.lm_head) if isinstance(value, Matrix)}


@lru_cache(maxsize=1)
def mlx_version() -> str:
    """The installed MLX."""
    return importlib.metadata.version("mlx")


def identities() -> dict[str, str]:
    """`identity` of every op, and of the step."""
    return {name: identity(name) for name in (*OPS, STEP)}


@lru_cache(maxsize=32)
def identity(name: str) -> str:
    """16 hex digits of an op's code: its module, the kernel modules that one uses, and their Metal texts.

    Of the step: of every op, of every kernel, and of the forward passes. Comment lines and empty ones do not count.
    """
    if name == STEP:
        passes = ("model.py", "folded.py", "replay.py")
        files = {*(_ENGINE / name for name in passes), *(_ENGINE / "kernels").glob("*.*")}
        parts = [identity(op) for op in OPS]
    else:
        files, parts = set().union(*map(_sources, _modules(OPS[name]))), []
    for path in sorted(files, key=Path.as_posix):
        if path.suffix in (".py", ".metal", ".h"):
            lines = path.read_text(encoding="utf-8").splitlines()
            comment = "#" if path.suffix == ".py" else "//"
            parts += [path.name, *(x for x in lines if x.strip() and not x.strip().startswith(comment))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _modules(op: Op) -> set[ModuleType]:
    return {sys.modules[inspect.unwrap(v.run).__module__] for v in op.variants.values()}


def _sources(module: ModuleType, seen: frozenset[str] = frozenset()) -> set[Path]:
    """A module's file, those of the kernel modules it uses, and the texts that those launch."""
    made = {Path(module.__file__ or "")}
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType) and value.__name__.startswith("engine.kernels") and value.__name__ not in seen:
            made |= _sources(value, seen | {module.__name__, value.__name__})
    for key, value in vars(module).items():
        if "TOPIC" in key and isinstance(value, str):
            made |= {_ENGINE / "kernels" / f"{value}.metal", _ENGINE / "kernels" / "portable.h"}
    return {path for path in made if path.is_file()}


# -- reading -----------------------------------------------------------------------------------------


def load(config: ModelConfig, weights: Weights, dtype: Any, folders: Sequence[Path] | None = None) -> Tuned:
    """What the tuned files say to a model on this chip.

    Args:
        folders: where files are looked for, the first to speak wins; None takes `USER`, then `SHIPPED`.
    """
    paths = [folder / f"{chip()}.json" for folder in ((USER, SHIPPED) if folders is None else folders)]
    paths = [path for path in paths if path.is_file()]
    return read(paths, geometry(config, weights, dtype)) if paths else Tuned()


def digest() -> str:
    """Twelve hex digits of all that the tuned files of this chip say; empty where there are none."""
    paths = [path for folder in (USER, SHIPPED) if (path := folder / f"{chip()}.json").is_file()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12] if paths else ""


def about() -> list[tuple[Path, list[str]]]:
    """Tuned files of this chip, each with a line for every model in it: what it decides, and what no longer holds."""
    made = []
    for path in (folder / f"{chip()}.json" for folder in (USER, SHIPPED)):
        if not path.is_file():
            continue
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"]
            lines = [_summary(entry) for entry in models.values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            lines = [f"cannot be read ({error}): make it again with  python -m sweeps tune"]
        made.append((path, lines))
    return made


def _summary(entry: Mapping[str, Any]) -> str:
    choices, step, notes = unpack(entry)
    holds = ", ".join([*sorted(choices), *(["step"] if step else [])]) or "nothing"
    return f"{entry.get('name', '?')} ({entry.get('dtype', '?')}): {'; '.join([f'decides {holds}', *notes])}"


def read(paths: Sequence[Path], key: str) -> Tuned:
    """The entries of a geometry in several files, put together; a file that cannot be read is a note."""
    choices: dict[str, tuple[Choice, ...]] = {}
    step: dict[str, Any] = {}
    notes: list[str] = []
    used: list[Path] = []
    for path in paths:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["format"] != FORMAT:
                raise ValueError(f"format {told['format']}")
            found = told["models"].get(key)
            if found is None:
                continue
            made, own, void = unpack(found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{path} cannot be used ({error}): make it again with  python -m sweeps tune")
            continue
        if not choices.keys() >= made.keys() or (own and not step):
            used.append(path)
        notes += [f"{path.name}: {line}" for line in void]
        choices, step = made | choices, step or own
    return Tuned(choices, **step, notes=tuple(notes), files=tuple(used))


def unpack(entry: Mapping[str, Any]) -> tuple[dict[str, tuple[Choice, ...]], dict[str, Any], list[str]]:
    """Choices by op, of the step the fields of `Tuned`, and a note for every part that no longer holds."""
    if entry["mlx"] != mlx_version():
        return {}, {}, [f"measured with MLX {entry['mlx']}, this is {mlx_version()}: tune again"]
    void = [name for name, code in entry["identities"].items() if name not in (*OPS, STEP) or identity(name) != code]
    made: dict[str, list[Choice]] = {}
    for told in entry["choices"]:
        choice = _choice(told)
        if told["op"] not in void and choice.variant in OPS[told["op"]].variants:
            made.setdefault(told["op"], []).append(choice)
    told = {} if STEP in void else entry.get("step") or {}
    step = {name: told[name] for name in ("fusion", "trace", "costs") if name in told}
    if told.get("folded"):
        step["folded"] = {kernel: settings(values) for kernel, values in told["folded"].items()}
    notes = [f"{name} has changed since it was measured: tune again" for name in void]
    return {op: tuple(found) for op, found in made.items()}, step, notes


def _choice(told: Mapping[str, Any]) -> Choice:
    measured = {
        name: {"settings": settings(values["settings"]), "us": float(values["us"])}
        for name, values in told["measured"].items()
    }
    variant = str(told["variant"])
    return Choice(told["phase"], int(told["rows"]), told["context"], variant, settings(told["settings"]), measured)


def settings(told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as kernels take them: what JSON holds as a list is a tuple."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
