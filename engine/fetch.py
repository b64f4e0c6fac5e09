"""Get the real checkpoint from the Hugging Face hub, and the draft head that its conversion left out.

``python -m engine fetch`` downloads the pinned 4-bit checkpoint into the Hugging Face cache, or finds it there without
asking the network. ``python -m engine fetch mtp`` reads only the draft head's tensors out of the original
bf16 shards, by byte ranges, packs them like the trunk and puts ``mtp.safetensors`` beside the checkpoint.

Large files are read here rather than by the hub's client, which throws away a partly read file when it is stopped:
what has arrived stays in ``<hash>.partial`` and the next run goes on from there. Everything
else is left to the client, which reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import mlx.core as mx
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from engine.arguments import Arguments
from engine.checkpoint import (
    INDEX,
    MTP_FILE,
    NORMS_KEY,
    CheckpointError,
    TensorInfo,
    inspect,
    parse_header,
    read_json,
    read_mtp,
)
from engine.config import GROUP_SIZE

MODEL = "mlx-community/Qwen3.6-35B-A3B-4bit"
MTP_MODEL = "Qwen/Qwen3.6-35B-A3B"
PINNED = {MODEL: "38740b847e4c", MTP_MODEL: "995ad96e"}
"""Revisions that are read unless another is named. Only the beginnings of the hashes are kept: the hub's list of
commits gives the whole one."""

WANTED = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
"""Files of a repository's top folder that a checkpoint needs."""

_PARALLEL = 4
_ATTEMPTS = 5


class FetchError(ValueError):
    """A download that cannot be made or did not come out right; one line with the fix."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it: bytes, and its SHA-256 if the hub keeps it as a large file."""

    name: str
    size: int
    sha256: str | None


# -- public functions ----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """``fetch [model|mtp] [--model NAME[@REVISION]] [--into FOLDER]``: prints the path last; 2 if it cannot be had."""
    parser = Arguments(prog="python -m engine fetch", description="Get the real checkpoint.")
    parser.add_argument("what", nargs="?", choices=("model", "mtp"), default="model")
    parser.add_argument("--model", metavar="NAME[@REVISION]", help=f"repository (default {MODEL}; mtp: {MTP_MODEL})")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="mtp: checkpoint to put the draft head beside")
    arguments = parser.parse_args(argv)
    if arguments.into and arguments.what != "mtp":
        parser.error("--into goes with mtp only; the model goes into the Hugging Face cache (HF_HOME)")
    name, _, revision = (arguments.model or (MTP_MODEL if arguments.what == "mtp" else MODEL)).partition("@")
    try:
        path = fetch(name, revision or None, arguments.what, arguments.into)
    except (FetchError, CheckpointError) as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def fetch(
    model: str | None = None,
    revision: str | None = None,
    what: Literal["model", "mtp"] = "model",
    into: Path | None = None,
) -> Path:
    """Bring a checkpoint, or the draft head of one, onto this machine.

    Args:
        model: repository; None takes the pinned one.
        revision: branch, tag, or the beginning of a commit hash; None takes the pinned one, else ``main``.
        what: ``"model"`` for the checkpoint, ``"mtp"`` for only the draft head of an original bf16 repository.
        into: with ``"mtp"``, the checkpoint folder that gets the file; None takes the cached pinned model.

    Returns:
        The checkpoint folder.

    Raises:
        FetchError: offline without a copy, no access, not enough disk, wrong sizes, a broken connection.
        CheckpointError: what arrived is no checkpoint that this engine reads.
    """
    model = model or (MTP_MODEL if what == "mtp" else MODEL)
    revision = revision or PINNED.get(model, "main")
    if what == "mtp":
        return _fetch_mtp(model, revision, into)
    with _one_clear_error(model):
        return cached(model, revision) or _fetch_model(model, revision)


def cached(model: str | None = None, revision: str | None = None) -> Path | None:
    """The folder of a complete copy in the Hugging Face cache, None without one; never asks the network.

    Arguments as in `fetch`.
    """
    model = model or MODEL
    revision = revision or PINNED.get(model, "main")
    store = _store(model)
    named = store / "refs" / revision
    if named.is_file():
        revision = named.read_text(encoding="utf-8").strip()
    for folder in sorted(store.glob("snapshots/*")):
        exact = folder.name == revision or (len(revision) >= 7 and folder.name.startswith(revision))
        if exact and (folder / "tokenizer.json").is_file():
            try:
                inspect(folder)
            except CheckpointError:
                continue
            return folder
    return None


# -- the model -----------------------------------------------------------------------------------


def _fetch_model(model: str, revision: str) -> Path:
    commit = _commit(model, revision)
    files = _listing(model, commit)
    store = _store(model)
    large = [f for f in files.values() if f.sha256 is not None]
    small = [f for f in files.values() if f.sha256 is None]
    _need_space(_missing_bytes(store, files.values(), commit), store)
    folder = store / "snapshots" / commit
    for file in small:
        _link(model, commit, file, folder)
    if (folder / INDEX).is_file():
        _check_index(folder / INDEX, files)
    with _Transfer(sum(f.size for f in large)) as transfer, ThreadPoolExecutor(_PARALLEL) as pool:
        try:
            for done in [pool.submit(_fetch_blob, model, commit, f, store, transfer) for f in large]:
                done.result()
        except BaseException:
            transfer.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for file in large:
        # The blob is in place, so the client only has to link it into the snapshot.
        _link(model, commit, file, folder)
    inspect(folder)
    if not commit.startswith(revision):
        # A branch or tag: kept as the client keeps it, so that the copy is found by that name offline.
        ref = store / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")
    return folder


def _link(model: str, commit: str, file: RemoteFile, folder: Path) -> None:
    hf_hub_download(model, file.name, revision=commit)
    size = (folder / file.name).stat().st_size
    if size != file.size:
        raise FetchError(
            f"{folder / file.name}: has {size:,} bytes, the hub's list says {file.size:,}; delete it and fetch again"
        )


def _commit(model: str, revision: str) -> str:
    """Whole commit hash of a branch, a tag or the beginning of a hash."""
    api = HfApi()
    if 7 <= len(revision) < 40 and all(c in "0123456789abcdef" for c in revision):
        for commit in api.list_repo_commits(model):
            if commit.commit_id.startswith(revision):
                return commit.commit_id
        raise FetchError(
            f"{model}: has no commit {revision} on its main branch; name another: --model {model}@REVISION"
        )
    found = api.model_info(model, revision=revision).sha
    if found is None:
        raise FetchError(f"{model}: the hub gives no commit for {revision}; name one: --model {model}@COMMIT")
    return found


def _listing(model: str, commit: str) -> dict[str, RemoteFile]:
    made = {}
    for entry in HfApi().model_info(model, revision=commit, files_metadata=True).siblings or []:
        if any(fnmatch.fnmatch(entry.rfilename, pattern) for pattern in WANTED) and "/" not in entry.rfilename:
            sha = entry.lfs.sha256 if entry.lfs else None
            if entry.size is None:
                raise FetchError(f"{model}: the hub gives no size for {entry.rfilename}; try again later")
            made[entry.rfilename] = RemoteFile(entry.rfilename, entry.size, sha)
    if not any(name.endswith(".safetensors") for name in made):
        raise FetchError(
            f"{model}: holds no *.safetensors at {commit[:12]}; name a repository with MLX or bf16 weights"
        )
    return made


def _check_index(path: Path, files: dict[str, RemoteFile]) -> None:
    """Refuse before the large download when list and index cannot both be right."""
    index = read_json(path)
    shards = set(index.get("weight_map", {}).values())
    absent = sorted(shards - set(files))
    if absent:
        raise FetchError(f"{path}: names {absent[0]}, which the repository does not hold; name another revision")
    held, promised = sum(files[s].size for s in shards), index.get("metadata", {}).get("total_size", 0)
    if promised > held:
        raise FetchError(
            f"{path}: promises {promised:,} bytes of tensors, its {len(shards)} shards have {held:,}; "
            "name another revision"
        )


def _fetch_blob(model: str, commit: str, file: RemoteFile, store: Path, transfer: _Transfer) -> None:
    assert file.sha256 is not None
    blob = store / "blobs" / file.sha256
    if blob.is_file() and blob.stat().st_size == file.size:
        transfer.advance(file.size)
        return
    blob.unlink(missing_ok=True)
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.partial")
    with partial.open("ab") as sink:
        _lock(sink, partial)
        if sink.tell() > file.size:
            sink.truncate(0)
        transfer.advance(sink.tell())
        _pull(hf_hub_url(model, file.name, revision=commit), sink, sink.tell(), file.size, file.size, transfer)
    with partial.open("rb") as source:
        found = hashlib.file_digest(source, "sha256").hexdigest()
    if found != file.sha256:
        partial.unlink()
        raise FetchError(
            f"{model}/{file.name}: SHA-256 is {found[:12]}…, the hub says {file.sha256[:12]}…; fetch again"
        )
    partial.rename(blob)


# -- the draft head ------------------------------------------------------------------------------


def _fetch_mtp(model: str, revision: str, into: Path | None) -> Path:
    folder = into or cached()
    if folder is None:
        raise FetchError(f"{MODEL} is not in the cache {constants.HF_HUB_CACHE}; first: python -m engine fetch")
    trunk = inspect(folder)
    if trunk.has_mtp:
        return folder
    packed = any(name.endswith(".scales") for name in trunk.tensors)
    raw = folder / "mtp.partial"
    with _one_clear_error(model):
        _pull_head(model, _commit(model, revision), raw)
    head = {}
    for name, value in read_mtp(raw, trunk.config).items():
        head |= _pack(name, value) if packed and value.ndim > 1 else {name: value}
        mx.eval(head)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        # Written elsewhere first: a half-written file must never stand under the real name.
        made = Path(aside) / MTP_FILE
        mx.save_safetensors(str(made), head, metadata={"format": "mlx", NORMS_KEY: "gain", "source": model})
        made.rename(folder / MTP_FILE)
    try:
        inspect(folder).bind()
    except CheckpointError:
        (folder / MTP_FILE).unlink()
        raise
    raw.unlink()
    return folder


def _pack(name: str, value: mx.array) -> dict[str, mx.array]:
    """A matrix packed by the trunk's recipe: 4 bits, the two gates 8."""
    base = name.removesuffix(".weight")
    bits = 8 if base.endswith((".mlp.gate", ".shared_expert_gate")) else 4
    parts = mx.quantize(value, group_size=GROUP_SIZE, bits=bits)
    return {f"{base}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}


def _pull_head(model: str, commit: str, raw: Path) -> None:
    """Write `raw`, a safetensors file with only the ``mtp.*`` tensors of a repository, or go on writing it."""
    sizes = _listing(model, commit)
    index = read_json(Path(hf_hub_download(model, INDEX, revision=commit)))
    shards = sorted({file for name, file in index.get("weight_map", {}).items() if name.startswith("mtp.")})
    if not shards:
        raise FetchError(f"{model}: has no mtp.* tensors; name the original repository: --model {MTP_MODEL}")
    pieces: list[tuple[str, int, TensorInfo]] = []
    for shard in shards:
        if shard not in sizes:
            raise FetchError(f"{model}: {INDEX} names {shard}, which the repository does not hold")
        pieces += _head_pieces(hf_hub_url(model, shard, revision=commit), Path(shard), sizes[shard].size)
    header = _header([info for _, _, info in pieces], {NORMS_KEY: "gain-1", "commit": commit})
    total = len(header) + sum(info.nbytes for _, _, info in pieces)
    # Beside the raw bf16 tensors, for a moment, their packed form.
    _need_space(total + total // 3 - (raw.stat().st_size if raw.is_file() else 0), raw.parent)
    with raw.open("a+b") as sink, _Transfer(total) as transfer:
        _lock(sink, raw)
        sink.seek(0)
        if sink.read(len(header)) != header:
            sink.truncate(0)
            sink.write(header)
        here = sink.seek(0, os.SEEK_END)
        transfer.advance(here)
        end = len(header)
        for url, first, info in pieces:
            start, end = end, end + info.nbytes
            if here < end:
                _pull(url, sink, first + here - start, first + info.nbytes, None, transfer)
                here = end


def _head_pieces(url: str, shard: Path, size: int) -> list[tuple[str, int, TensorInfo]]:
    """URL, first byte and description of each ``mtp.*`` tensor in a shard of `size` bytes."""
    length = int.from_bytes(_read_range(url, 0, 8, size), "little")
    if length > size - 8:
        raise FetchError(f"{shard}: is no safetensors file; name another revision")
    header = json.loads(_read_range(url, 8, 8 + length, size))
    tensors, _ = parse_header(dict(header), shard, size - 8 - length)
    return [
        (url, 8 + length + header[name]["data_offsets"][0], info)
        for name, info in tensors.items()
        if name.startswith("mtp.")
    ]


def _header(tensors: list[TensorInfo], metadata: dict[str, str]) -> bytes:
    """The opening of a safetensors file that holds these tensors one after the other."""
    table: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for info in tensors:
        table[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# -- bytes over the network ----------------------------------------------------------------------


class _Transfer:
    """Progress on stderr, and a signal to stop, shared by the threads of a download."""

    def __init__(self, total: int):
        self.stop = threading.Event()
        columns = (TextColumn("fetch"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> _Transfer:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, count: int) -> None:
        self._progress.update(self._task, advance=count)


def _pull(url: str, sink: BinaryIO, first: int, last: int, whole: int | None, transfer: _Transfer) -> None:
    """Append bytes `first` up to `last` of `url` to `sink`, asking again from where a connection broke.

    `whole` is the file's size as the hub lists it, None if not to be compared.
    """
    failures = 0
    while first < last:
        try:
            for block in _blocks(url, first, last, whole):
                if transfer.stop.is_set():
                    raise FetchError("stopped because another file failed")
                sink.write(block)
                first, failures = first + len(block), 0
                transfer.advance(len(block))
        except HfHubHTTPError:
            raise
        except HTTPError:
            failures += 1
            if failures == _ATTEMPTS:
                raise
            transfer.stop.wait(failures - 1)


def _read_range(url: str, first: int, last: int, whole: int) -> bytes:
    return b"".join(_blocks(url, first, last, whole))


def _blocks(url: str, first: int, last: int, whole: int | None) -> Iterator[bytes]:
    headers = build_hf_headers() | {"Range": f"bytes={first}-{last - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status_code != 206:
            raise FetchError(f"{url}: the server does not send byte ranges (HTTP {response.status_code})")
        if whole is not None and total.isdigit() and int(total) != whole:
            raise FetchError(f"{url}: has {int(total):,} bytes, the hub's list says {whole:,}; name another revision")
        left = last - first
        # As it arrives: asked for larger blocks, the client would drop what it had gathered when a connection breaks.
        for block in response.iter_bytes():
            left -= len(block)
            if left < 0:
                raise FetchError(f"{url}: sent more bytes than asked for; try again later")
            yield block


def _missing_bytes(store: Path, files: Iterable[RemoteFile], commit: str) -> int:
    """Bytes still to come, counting what earlier runs left."""
    missing = 0
    for file in files:
        if file.sha256 is None:
            here = store / "snapshots" / commit / file.name
            missing += 0 if here.exists() else file.size
            continue
        blob = store / "blobs" / file.sha256
        parts = [p.stat().st_size for p in (blob, blob.with_name(f"{blob.name}.partial")) if p.is_file()]
        missing += max(0, file.size - max(parts, default=0))
    return missing


def _need_space(needed: int, folder: Path) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed <= free:
        Console(stderr=True).print(f"fetch: {needed:,} bytes to come, {folder} has {free:,} free", highlight=False)
    else:
        raise FetchError(
            f"needs {needed:,} bytes, {folder} has {free:,} free; make room, or set HF_HOME to a folder on another disk"
        )


def _store(model: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise FetchError(f"{path}: another fetch is writing it; wait for that one") from error


@contextmanager
def _one_clear_error(model: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line with the fix."""
    try:
        yield
    except (OfflineModeIsEnabled, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FetchError(f"{model}: {_known(error)}") from error
    except EntryNotFoundError as error:
        raise FetchError(f"{model}: a file that the hub lists is not there; name another revision") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = _TOKEN if status in (401, 403) else "run the same command again, it goes on from where it stopped"
        raise FetchError(f"{model}: the hub answered HTTP {status}; {hint}") from error
    except HTTPError as error:
        raise FetchError(
            f"{model}: cannot reach {constants.ENDPOINT} ({type(error).__name__}); check the connection and run the "
            "same command again, it goes on from where it stopped"
        ) from error
    except HFValidationError as error:
        raise FetchError(f"{model!r} is no repository name; it has the form OWNER/NAME") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            raise FetchError(f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}; set HF_HOME") from error
        raise FetchError(
            f"{model}: {(str(error) or type(error).__name__).splitlines()[0]}; run the same command again"
        ) from error


_TOKEN = "accept the model's terms on its page if it has any, and set HF_TOKEN or run `hf auth login`"


def _known(error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"offline mode is on (HF_HUB_OFFLINE) and {constants.HF_HUB_CACHE} has no complete copy; unset it to fetch"
        )
    if isinstance(error, GatedRepoError):
        return f"the hub refuses access; {_TOKEN}"
    if isinstance(error, RevisionNotFoundError):
        return "has no such revision; name another: --model NAME@REVISION"
    return "no such repository, or a private one; check the name, and for a private one set HF_TOKEN"
