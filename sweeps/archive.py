"""A run folder as one file, to carry it from a borrowed machine to the one where reports are read."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from sweeps.compose import UsageError

SUFFIX = ".tar.gz"

MOST_BYTES = 4_000_000_000
"""Unpacked size above which an archive is refused: runs are megabytes, and a small file may unpack to anything."""


def pack(run: Path, file: Path | None = None) -> Path:
    """Write the folder `run` as one gzip'd tar; the default name is the folder's, beside it.

    Raises:
        UsageError: no run folder, the file exists, or it cannot be written.
    """
    if not (run / "job.json").is_file():
        raise UsageError(f"{run} is no run folder (it has no job.json): give a folder under reports/runs")
    file = file or run.with_name(run.name + SUFFIX)
    if file.exists():
        raise UsageError(f"{file} exists already: remove it or give another name")
    partial = file.with_name(file.name + ".part")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            archive.add(run, arcname=run.name, filter=_plain)
        partial.rename(file)
    except OSError as error:
        raise UsageError(f"{run} cannot be packed as {file} ({_why(error)}): give another name") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return file


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files and folders only, without the user's name and ids."""
    if not (member.isfile() or member.isdir()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(file: Path, into: Path) -> Path:
    """Put the run of an archive under the folder `into`, whole or not at all.

    Returns:
        The run folder.

    Raises:
        UsageError: no readable archive, an entry that is a link or leads outside, no run inside, too large, or the
            run is there already.
    """
    if not file.is_file():
        raise UsageError(f"{file} {'is no file' if file.exists() else 'does not exist'}: give a file written by pack")
    try:
        _whole(file)
        with tarfile.open(file, "r:gz") as archive:
            members = archive.getmembers()
            name = _checked(members, file)
            if (into / name).exists():
                raise UsageError(f"{into / name} exists already: remove it or unpack into another folder")
            into.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=into, prefix=".unpack-") as folder:
                archive.extractall(folder, members, filter="data")
                shutil.move(Path(folder) / name, into / name)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno and error.filename != str(file):
            raise UsageError(f"cannot unpack into {into} ({_why(error)}): give another folder") from error
        raise UsageError(f"{file} is no readable archive ({error}): copy it again or pack the run again") from error
    return into / name


def _whole(file: Path) -> None:
    """Read `file` to its checksum, which lies behind the end of the tar: reading members alone never meets it."""
    size = 0
    with gzip.GzipFile(file, "rb") as stream:
        while block := stream.read(1 << 20):
            size += len(block)
            if size > MOST_BYTES:
                raise UsageError(f"{file} would unpack to more than {MOST_BYTES / 1e9:.0f} GB: it is no run")


def _why(error: OSError) -> str:
    """What the system said, with the file where it is another than the one asked for."""
    return ": ".join(str(part) for part in (error.filename, error.strerror) if part) or type(error).__name__


def _checked(members: list[tarfile.TarInfo], file: Path) -> str:
    """Name of the one top folder, after every entry was found harmless."""
    tops = set()
    for member in members:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise UsageError(f"{file} has the entry {member.name!r}, which leads outside: do not trust this file")
        if not (member.isfile() or member.isdir()):
            raise UsageError(f"{file} has the entry {member.name!r}, which is a link or device: do not trust this file")
        tops.add(path.parts[0])
    if sum(member.size for member in members) > MOST_BYTES:
        raise UsageError(f"{file} would unpack to more than {MOST_BYTES / 1e9:.0f} GB: it is no run")
    names = {member.name for member in members}
    if len(tops) != 1 or f"{next(iter(tops), '')}/job.json" not in names:
        raise UsageError(f"{file} holds no run (one folder with job.json): give a file written by pack")
    return tops.pop()
