"""Read a checkpoint folder: config.json, safetensors shards, and which conventions they follow.

Two layouts are read, told apart by the shape of the convolution kernels and by nothing else:

- **MLX** (`mlx-community/Qwen3.6-35B-A3B-4bit` and its kind): ``[C, kernel, 1]``, packed matrices of mixed
  bits, gains stored as they are used.
- **raw Hugging Face**: ``[C, 1, kernel]``, dense, gains stored minus 1, experts fused or one by one.

That draft-head tensors (``mtp.*``) are present says nothing about the layout. A file
``mtp.safetensors`` beside the shards adds a draft head to a checkpoint that has none; its metadata may say
how its gains are stored, else its trunk's layout decides.

Headers are parsed here, without MLX, so that a damaged download is named before anything is mapped,
and so that a plan can count bytes on any machine (`inspect`, `inventory_from_json`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from engine.config import GROUP_SIZE, ConfigError, ModelConfig
from engine.weights import WeightError, Weights, matrices

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"
NORMS_KEY = "norms"
"""Metadata key of ``mtp.safetensors``: ``"gain"`` (used as stored) or ``"gain-1"`` (1 is added on loading)."""

DTYPES: dict[str, tuple[int, mx.Dtype | None]] = {
    "BOOL": (1, None),
    "U8": (1, mx.uint8),
    "I8": (1, None),
    "F8_E4M3": (1, None),
    "F8_E5M2": (1, None),
    "U16": (2, None),
    "I16": (2, None),
    "F16": (2, mx.float16),
    "BF16": (2, mx.bfloat16),
    "U32": (4, mx.uint32),
    "I32": (4, None),
    "F32": (4, mx.float32),
    "U64": (8, None),
    "I64": (8, None),
    "F64": (8, None),
}
"""Bytes an element, and the MLX type where a text tensor may have it, by safetensors name."""

_VISION = ("vision_tower.", "model.visual.", "visual.", "model.vision_tower.")
_RENAMES = (("model.language_model.", "model."), ("language_model.", ""))
_ONE_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_AGAIN = "download it again: python -m engine fetch"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; one line that names the file, the tensor and the fix."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header declares it; `name` is the stored name, `dtype` safetensors' word for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPES[self.dtype][0]


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds, from headers alone; no tensor data is read.

    `tensors` is keyed by stored name (those of a side file with the ``mtp.`` prefix); `files` gives bytes by
    file name; `metadata` is that of ``mtp.safetensors``, if there is one.
    """

    source: Path
    config: ModelConfig
    document: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, int]
    weights_hash: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def names(self, kind: Literal["text", "vision", "mtp"]) -> list[str]:
        """Stored names of the language model's, the vision tower's or the draft head's tensors."""
        return [name for name in self.tensors if _kind(name) == kind]

    def bytes_of(self, kind: Literal["text", "vision", "mtp"]) -> int:
        """Bytes of data of that kind."""
        return sum(self.tensors[name].nbytes for name in self.names(kind))

    @property
    def nbytes(self) -> int:
        """Bytes of data of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def has_mtp(self) -> bool:
        """Whether a draft head is there."""
        return any(_kind(name) == "mtp" for name in self.tensors)

    @cached_property
    def layout(self) -> Literal["mlx", "hf"]:
        """Layout of the trunk, by the shape of its convolution kernels.

        Raises:
            CheckpointError: kernels of neither layout, or of both.
        """
        taps, found = self.config.linear_conv_kernel_dim, set()
        for name in self.names("text"):
            if not name.endswith("conv1d.weight"):
                continue
            info = self.tensors[name]
            if len(info.shape) != 3 or taps not in info.shape[1:] or 1 not in info.shape[1:]:
                raise CheckpointError(
                    f"{info.file}: tensor {name} has shape {list(info.shape)}, expected "
                    f"{[self.config.conv_dim, taps, 1]} or {[self.config.conv_dim, 1, taps]}; "
                    "take weights and config.json from one revision"
                )
            found.add("mlx" if info.shape[2] == 1 else "hf")
        if len(found) > 1:
            raise CheckpointError(
                f"{self.source}: some conv1d tensors are in MLX layout and some in raw Hugging Face layout; "
                "convert the whole checkpoint at once"
            )
        return "hf" if found == {"hf"} else "mlx"

    @property
    def mtp_shifted(self) -> bool:
        """Whether the draft head's gains are stored minus 1."""
        stated = self.metadata.get(NORMS_KEY)
        return stated == "gain-1" if stated else self.layout == "hf"

    def bind(self, mtp: bool = True) -> Weights:
        """The structure these tensors fill, as unevaluated placeholders: names and shapes are checked, no data read.

        Raises:
            CheckpointError: names file, tensor, both shapes, and the fix.
        """
        made = {}
        for name, info in self.tensors.items():
            if _kind(name) != "vision":
                made[name] = mx.zeros(info.shape, _dtype(name, info))
        return _bind(self, made, None, mtp)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: architecture, weights in the engine's structure, and where they came from.

    `info` holds plain values for rows: files (bytes by name), layout, bits (count of matrices by bits),
    bits_by_module, dtype, has_mtp, mtp_gains, vision_tensors (how many were skipped), weights_hash,
    generation_config, tokenizer (path or None).
    """

    config: ModelConfig
    weights: Weights
    path: Path
    info: dict[str, Any]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of this folder, read when first asked for."""
        from engine.tokenizer import Tokenizer

        return Tokenizer.from_path(self.path)


# -- public functions ----------------------------------------------------------------------------


def load(path: str | Path, dtype: mx.Dtype | None = None, mtp: bool = True) -> Checkpoint:
    """Load a checkpoint folder of either layout.

    Args:
        path: folder with config.json, one or more safetensors shards, and usually a tokenizer.
        dtype: activation type, to which floats are cast; None takes the type of the embedding, so that single
            float32 leftovers do not promote every activation. ``A_log`` is used in float32 either way.
        mtp: bind the draft head where there is one.

    Raises:
        CheckpointError: names the file, the tensor, both shapes, and the fix.
    """
    inventory = inspect(path)
    arrays: dict[str, mx.array] = {}
    opened = {file: mx.load(str(inventory.source / file)) for file in inventory.files}
    for name, info in inventory.tensors.items():
        kind = _kind(name)
        if kind == "text" or (kind == "mtp" and mtp):
            _dtype(name, info)
            arrays[name] = opened[info.file][info.name]  # type: ignore[index]
    del opened
    weights = _bind(inventory, arrays, dtype, mtp)
    del arrays
    _evaluate(weights)
    return Checkpoint(inventory.config, weights, inventory.source, _info(inventory, weights))


def inspect(path: str | Path) -> Inventory:
    """Inventory of a checkpoint folder, or of a ``.json`` / ``.json.gz`` list of one; reads headers only.

    Raises:
        CheckpointError: no such folder, no config.json, another architecture, no weights, a missing, truncated or
            damaged shard, or an index that names a tensor no shard has.
    """
    path = Path(path).expanduser()
    if path.is_file() and path.name.endswith((".json", ".json.gz")) and path.name != "config.json":
        return inventory_from_json(path)
    try:
        return _inspect(path)
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: config.json or {INDEX} holds something of the wrong kind ({said})") from error


def _inspect(path: Path) -> Inventory:
    document = _config_document(path)
    config = _config(document, path)
    files, index = _shards(path)
    tensors: dict[str, TensorInfo] = {}
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    for file in files:
        header, _ = read_header(path / file)
        for name, info in header.items():
            if index.get(name, file) != file:
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{path}: tensor {name} is both in {tensors[name].file} and in {file}; "
                    "remove the files of the other download"
                )
            tensors[name] = info
        sizes[file] = _sample(path / file, digest)
    for name, file in index.items():
        if name not in tensors:
            raise CheckpointError(f"{path / file}: tensor {name}, which {INDEX} places there, is absent; {_AGAIN}")
    metadata: Mapping[str, str] = {}
    if (path / MTP_FILE).is_file() and not any(_kind(name) == "mtp" for name in tensors):
        header, metadata = read_header(path / MTP_FILE)
        for name, info in header.items():
            tensors[name if _kind(name) == "mtp" else f"mtp.{name}"] = info
        sizes[MTP_FILE] = _sample(path / MTP_FILE, digest)
    return Inventory(path, config, document, tensors, sizes, digest.hexdigest()[:12], metadata)


def inventory_from_json(path: str | Path) -> Inventory:
    """Inventory from a list of tensors: an object with ``config`` (config.json) and ``tensors`` (name: [dtype, shape]).

    Lets a plan be made for a checkpoint that is not on this machine.

    Raises:
        CheckpointError: not such a file, or another architecture.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        value = json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)
        document = value["config"]
        tensors = {
            name: TensorInfo(name, tuple(shape), dtype, path.name) for name, (dtype, shape) in value["tensors"].items()
        }
        total = sum(t.nbytes for t in tensors.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(
            f"{path}: no readable tensor list ({type(error).__name__}: {error}); "
            'expected {"config": {...}, "tensors": {name: [dtype, shape]}}'
        ) from error
    digest = hashlib.sha256(json.dumps(value["tensors"], sort_keys=True).encode()).hexdigest()[:12]
    return Inventory(path, _config(document, path), document, tensors, {path.name: total}, digest)


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata that a safetensors file declares, checked against the file's size.

    Raises:
        CheckpointError: the file is missing, truncated, a Git LFS pointer, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise CheckpointError(f"{path}: a Git LFS pointer, not weights; run `git lfs pull` there or {_AGAIN}")
            if len(start) < 8 or length > size - 8:
                raise CheckpointError(f"{path}: {size:,} bytes, cut off inside its header; {_AGAIN}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: its safetensors header is damaged; {_AGAIN}") from error
    return parse_header(header, path, size - 8 - length)


def read_mtp(path: Path, config: ModelConfig) -> dict[str, mx.array]:
    """Draft-head tensors of a file of its own, by MLX name, with gains as they are used; unevaluated.

    Raises:
        CheckpointError: as `read_header`, or experts that do not fit `config`.
    """
    header, metadata = read_header(path)
    tensors = {name if _kind(name) == "mtp" else f"mtp.{name}": info for name, info in header.items()}
    inventory = Inventory(path.parent, config, {}, tensors, {}, "", metadata)
    opened: Any = mx.load(str(path), format="safetensors")
    arrays = {name: opened[info.name] for name, info in tensors.items()}
    return _to_mlx(inventory, arrays, {}, None, mtp=True)


def draft_head(inventory: Inventory, dtype: mx.Dtype | None = None) -> dict[str, mx.array]:
    """The draft head's tensors of a checkpoint, by MLX name, as they are used; unevaluated, and none if it has none.

    Args:
        dtype: cast floats to this type; None leaves them.

    Raises:
        CheckpointError: a file that cannot be read, or experts that do not fit.
    """
    names = inventory.names("mtp")
    files = {inventory.tensors[name].file for name in names}
    opened: dict[str, Any] = {file: mx.load(str(inventory.source / file)) for file in files}
    arrays = {name: opened[info.file][info.name] for name in names if (info := inventory.tensors[name])}
    made = _to_mlx(inventory, arrays, {}, dtype, mtp=True)
    return {name: a if dtype is None or a.dtype == mx.uint32 else a.astype(dtype) for name, a in made.items()}


def parse_header(header: Any, path: Path, data_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """As `read_header`, for a decoded header of a file with `data_bytes` bytes after it."""
    made: dict[str, TensorInfo] = {}
    end = 0
    try:
        metadata = header.pop("__metadata__", None) or {}
        for name, entry in header.items():
            info = TensorInfo(name, tuple(entry["shape"]), entry["dtype"], path.name)
            first, last = entry["data_offsets"]
            if info.dtype not in DTYPES:
                raise CheckpointError(f"{path}: tensor {name} has the unknown type {info.dtype}")
            if last - first != info.nbytes:
                raise CheckpointError(
                    f"{path}: tensor {name} of shape {list(info.shape)} and type {info.dtype} takes {info.nbytes:,} "
                    f"bytes, its header gives it {last - first:,}; {_AGAIN}"
                )
            made[name], end = info, max(end, last)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its safetensors header is damaged; {_AGAIN}") from error
    if end != data_bytes:
        late = [name for name, entry in header.items() if entry["data_offsets"][1] > data_bytes]
        missing = f"; tensor {late[0]} is cut off" if late else ""
        raise CheckpointError(
            f"{path}: holds {data_bytes:,} bytes of tensors, its header promises {end:,}{missing}; {_AGAIN}"
        )
    return made, metadata


# -- reading the folder --------------------------------------------------------------------------


def _config_document(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a checkpoint's folder, or get one: python -m engine fetch")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: has no config.json; give the folder that holds it and the safetensors files")
    return read_json(path / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: unreadable, no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is no readable JSON ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object; {_AGAIN}")
    return value


def _config(document: dict[str, Any], path: Path) -> ModelConfig:
    try:
        config = ModelConfig.from_dict(document)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: config.json has a field of the wrong kind ({error})") from error
    table = document.get("quantization") or document.get("quantization_config") or {}
    method, mode = table.get("quant_method"), table.get("mode", "affine")
    if method is not None:
        raise CheckpointError(
            f"{path}: config.json: quantization method {method!r} is not supported; take the bf16 weights "
            "or a 4- or 8-bit MLX conversion"
        )
    if mode != "affine":
        raise CheckpointError(
            f"{path}: config.json: quantization mode {mode!r} is not supported, only affine 4 and 8 bits in groups "
            f"of {GROUP_SIZE}; take such a conversion, for example mlx-community/Qwen3.6-35B-A3B-4bit"
        )
    return config


def _shards(path: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the weight files, and which file holds which tensor if there is an index."""
    if (path / INDEX).is_file():
        index = read_json(path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{path / INDEX}: has no weight_map; {_AGAIN}")
        files = sorted(set(index.values()))
        absent = [name for name in files if not (path / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{path / absent[0]}: missing shard ({len(absent)} of the {len(files)} that {INDEX} names); {_AGAIN}"
            )
        return files, index
    files = sorted(f.name for f in path.glob("*.safetensors") if f.name != MTP_FILE)
    if not files:
        others = sorted(f.name for f in path.iterdir() if f.suffix in (".gguf", ".bin", ".npz", ".pt", ".pth"))
        found = f" ({others[0]} is of a kind not read here)" if others else ""
        raise CheckpointError(f"{path}: has no weights, that is no *.safetensors file{found}; {_AGAIN}")
    return files, {}


def _sample(path: Path, digest: Any) -> int:
    """Feed a file's name, size, head, middle and tail to `digest`; returns its size.

    Cheap, yet two sets of weights of one geometry, whose headers and sizes agree, get two hashes.
    """
    size, window = path.stat().st_size, 1 << 16
    digest.update(f"{path.name}:{size}".encode())
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        digest.update(file.read(head))
        for at in (8 + head, size // 2, max(0, size - window)):
            file.seek(at)
            digest.update(file.read(window))
    return size


def _kind(name: str) -> Literal["text", "vision", "mtp"]:
    if name.startswith(_VISION):
        return "vision"
    return "mtp" if _canonical(name).startswith("mtp.") else "text"


def _canonical(name: str) -> str:
    """The name without the prefixes by which the layouts differ."""
    for prefix, to in _RENAMES:
        if name.startswith(prefix):
            return to + name[len(prefix) :]
    return name.removeprefix("model.") if name.startswith("model.mtp.") else name


def _dtype(name: str, info: TensorInfo) -> mx.Dtype:
    made = DTYPES[info.dtype][1]
    if made is None:
        raise CheckpointError(
            f"{info.file}: tensor {name} has type {info.dtype}; supported are BF16, F16, F32 and packed U32; "
            "take the bf16 weights or a 4- or 8-bit MLX conversion"
        )
    return made


# -- from stored tensors to the engine's structure -----------------------------------------------


def _bind(inventory: Inventory, arrays: Mapping[str, mx.array], dtype: mx.Dtype | None, mtp: bool) -> Weights:
    """Bring stored arrays into MLX names and layout, and bind them; nothing is evaluated."""
    origin: dict[str, str] = {}
    tensors = _to_mlx(inventory, arrays, origin, dtype, mtp)
    try:
        weights = Weights.from_tensors(inventory.config, tensors, dtype or _float_type(tensors))
    except WeightError as error:
        raise CheckpointError(_located(inventory, origin, error)) from error
    unused = [name for name in tensors if name not in weights.tensors]
    if unused:
        stored = origin[unused[0]]
        raise CheckpointError(
            f"{_file_of(inventory, stored)}: tensor {stored} has no place in this architecture "
            f"({len(unused)} such); take weights and config.json from one revision"
        )
    _check_quantization(inventory, weights, origin)
    return weights


def _to_mlx(
    inventory: Inventory, arrays: Mapping[str, mx.array], origin: dict[str, str], dtype: mx.Dtype | None, mtp: bool
) -> dict[str, mx.array]:
    """Arrays by MLX name in MLX layout; fills `origin` with the stored name of each."""
    made: dict[str, mx.array] = {}
    lone: dict[str, dict[int, str]] = {}
    raw = inventory.layout == "hf"
    for name, value in arrays.items():
        kind, to = _kind(name), _canonical(name)
        if kind == "mtp" and not mtp:
            continue
        one = _ONE_EXPERT.fullmatch(to)
        if one:
            lone.setdefault(f"{one[1]}.switch_mlp.{one[3]}.weight", {})[int(one[2])] = name
        elif to.endswith("mlp.experts.gate_up_proj"):
            stem = to.removesuffix("experts.gate_up_proj")
            gate, up = _split_fused(inventory, name, value)
            for part, half in (("gate_proj", gate), ("up_proj", up)):
                made[f"{stem}switch_mlp.{part}.weight"] = half
                origin[f"{stem}switch_mlp.{part}.weight"] = name
        else:
            if to.endswith("mlp.experts.down_proj"):
                to = to.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")
            if raw and to.endswith("conv1d.weight"):
                value = mx.contiguous(value.moveaxis(2, 1))
            if _is_gain(to) and (inventory.mtp_shifted if kind == "mtp" else raw):
                value = (value.astype(mx.float32) + 1).astype(dtype or value.dtype)
            made[to], origin[to] = value, name
    for to, parts in lone.items():
        made[to], origin[to] = _stack(inventory, arrays, to, parts), parts[min(parts)]
    return made


def _is_gain(name: str) -> bool:
    """Whether a norm gain follows the "stored minus 1" convention of the raw layout."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") or ".pre_fc_norm_" in name


def _split_fused(inventory: Inventory, name: str, value: mx.array) -> tuple[mx.array, mx.array]:
    c = inventory.config
    expected = (c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size)
    if tuple(value.shape) != expected:
        raise CheckpointError(
            f"{_file_of(inventory, name)}: tensor {name} has shape {list(value.shape)}, expected {list(expected)}; "
            "take weights and config.json from one revision"
        )
    # Copies: a view would keep both halves alive and hand strided weights to the grouped products.
    gate, up = mx.split(value, 2, axis=-2)
    return mx.contiguous(gate), mx.contiguous(up)


def _stack(inventory: Inventory, arrays: Mapping[str, mx.array], to: str, parts: dict[int, str]) -> mx.array:
    count = inventory.config.num_experts
    absent = sorted(set(range(count)) - set(parts))
    first = parts[min(parts)]
    if absent or len(parts) != count:
        which = f"expert {absent[0]} is missing" if absent else f"expert {max(parts)} is one too many"
        raise CheckpointError(
            f"{_file_of(inventory, first)}: {first} is there but {which}; config.json says {count} experts; {_AGAIN}"
        )
    shape = arrays[first].shape
    for e in range(count):
        if arrays[parts[e]].shape != shape:
            raise CheckpointError(
                f"{_file_of(inventory, parts[e])}: tensor {parts[e]} has shape {list(arrays[parts[e]].shape)}, "
                f"expected {list(shape)} as {first}; {_AGAIN}"
            )
    return mx.stack([arrays[parts[e]] for e in range(count)])


def _float_type(tensors: Mapping[str, mx.array]) -> mx.Dtype | None:
    for name in ("model.embed_tokens.scales", "model.embed_tokens.weight"):
        if name in tensors and tensors[name].dtype != mx.uint32:
            return tensors[name].dtype
    return None


def _file_of(inventory: Inventory, stored: str) -> str:
    folder = inventory.source.parent if inventory.source.is_file() else inventory.source
    return str(folder / inventory.tensors[stored].file)


def _located(inventory: Inventory, origin: Mapping[str, str], error: WeightError) -> str:
    """The binder's message with the file in front and the fix behind."""
    stored = origin.get(error.tensor)
    fix = "take weights and config.json from one revision"
    if stored is None:
        return f"{inventory.source}: {error}; no file has it: {fix}, or {_AGAIN}"
    if "packed" in str(error) or "packing" in str(error):
        fix = "take a 4- or 8-bit conversion in groups of 64, for example mlx-community/Qwen3.6-35B-A3B-4bit"
    alias = "" if stored == error.tensor else f" (stored as {stored})"
    return f"{_file_of(inventory, stored)}: {error}{alias}; {fix}"


def _check_quantization(inventory: Inventory, weights: Weights, origin: Mapping[str, str]) -> None:
    """Compare the packing that the shapes show with what config.json says of each module."""
    table = inventory.document.get("quantization") or inventory.document.get("quantization_config")
    if not table:
        return
    overrides: dict[str, Any] = {_canonical(k): v for k, v in table.items() if isinstance(v, dict)}
    for name, matrix in matrices(weights):
        if matrix.bits is None:
            continue
        said = overrides.get(name) or table
        bits, size = said.get("bits", table.get("bits")), said.get("group_size", table.get("group_size", GROUP_SIZE))
        if name.startswith("mtp.") and name not in overrides:
            continue  # A side file is packed on its own; the trunk's table does not speak of it.
        if (bits, size) != (matrix.bits, matrix.group_size):
            stored = origin[f"{name}.weight"]
            raise CheckpointError(
                f"{_file_of(inventory, stored)}: tensor {stored} of shape {list(matrix.weight.shape)} is packed with "
                f"{matrix.bits} bits in groups of {matrix.group_size}, config.json says {bits} in groups of {size}; "
                "take weights and config.json from one revision"
            )


def _evaluate(weights: Weights) -> None:
    """Read the data now, a few tensors at a time: a lazy read would land inside somebody's timing."""
    for group in _groups(weights.tensors.values(), 64):
        mx.eval(group)


def _groups(values: Iterable[mx.array], size: int) -> Iterable[list[mx.array]]:
    every = list(values)
    return (every[i : i + size] for i in range(0, len(every), size))


def _info(inventory: Inventory, weights: Weights) -> dict[str, Any]:
    path = inventory.source
    by_module: dict[str, Counter[str]] = {}
    for name, matrix in matrices(weights):
        kind = re.sub(r"^(model|mtp)\.layers\.\d+\.", lambda m: "mtp." if m[1] == "mtp" else "", name)
        by_module.setdefault(kind, Counter())[str(matrix.bits or "dense")] += 1
    generation = path / "generation_config.json"
    tokenizer = path / "tokenizer.json"
    return {
        "files": dict(inventory.files),
        "layout": inventory.layout,
        "bits": dict(sum(by_module.values(), Counter())),
        "bits_by_module": {kind: dict(count) for kind, count in by_module.items()},
        "dtype": str(weights.norm.dtype).removeprefix("mlx.core."),
        "has_mtp": weights.mtp is not None,
        "mtp_gains": None if weights.mtp is None else "stored minus 1" if inventory.mtp_shifted else "as stored",
        "vision_tensors": len(inventory.names("vision")),
        "weights_hash": inventory.weights_hash,
        "generation_config": read_json(generation) if generation.is_file() else {},
        "tokenizer": str(tokenizer) if tokenizer.is_file() else None,
    }
