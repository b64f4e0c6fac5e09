"""A run to pass on: its report as one HTML file and its rows as one archive, without what names a machine or a person.

Taken out: host and user names, home folders, serial numbers and other identifiers of hardware, addresses of mail and
network, and the folder that the run lay in. What is known of this machine is looked for, and what the rows themselves
give away: a home folder in a path names its user, whatever machine it was written on. At the end every file that was
written is searched again; if anything is left, nothing is handed out.
"""

from __future__ import annotations

import getpass
import gzip
import io
import json
import re
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reports.load import ReportError, runs_of
from reports.page import build

_TEXT = ("job.json", "runs.jsonl", "samples.jsonl", "contrasts.jsonl", "conditions.jsonl", "baseline.json")
_GONE = "removed"

_NAMING_KEY = re.compile(
    r"(^|[_\s.-])(host|hostname|host_name|node|nodename|user|username|user_name|login|serial|serial_number|uuid|udid|"
    r"mac_address|ip_address|email|key_env)$|serial",
    re.I,
)
"""Keys whose values name a machine or a person, whatever they hold."""

_HOME = re.compile(r"(?:/home|/Users|/var/home|[A-Za-z]:\\+Users)[/\\]+([^/\\\s\"':,;]+)")
_ROOT_HOME = re.compile(r"/root(?=[/\s\"':,;]|$)")
_PATTERNS = (
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I), _GONE),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I), _GONE),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I), _GONE),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]*\w\b"), _GONE),
    (re.compile(r"(?<=://)(?:[^/\s:@]+(?::[^/\s@]*)?@)?(?!127\.0\.0\.1|localhost|\[::1\])[^/\s:\"']+"), "host"),
)
_SHORTEST = 3
"""Names shorter than this are not searched for as words: they would match anywhere."""

_COMMON = frozenset({"root", "user", "runner", "admin", "localhost", "host", "home", "shared", "public"})
"""Names that say nothing about anybody."""


def share(run: Path, output: Path | None = None) -> list[Path]:
    """Write ``report.html`` and ``rows.tar.gz`` of a run, or of all runs of a suite, into a folder of their own.

    Args:
        run: run folder, or the folder of a suite. output: where to write; by default ``NAME-shared`` beside the run.

    Returns:
        The two paths, the archive last.

    Raises:
        ReportError: no run, the output exists with other content, or a name could not be taken out.
    """
    run = run.resolve()
    folders = _runs(run)
    cleaner = Cleaner(_strings(folders))
    out = output or run.with_name(f"{cleaner.text(run.name)}-shared")
    with tempfile.TemporaryDirectory(prefix="lilybench-share-") as scratch:
        clean = [_clean_run(folder, Path(scratch) / "rows", cleaner) for folder in folders]
        page = build(clean, Path(scratch) / "report")
        html = page.read_bytes()
        archive = _packed(Path(scratch) / "rows")
        for name, data in (("report.html", html), ("rows.tar.gz", gzip.decompress(archive))):
            left = cleaner.left_in(data)
            if left:
                raise ReportError(f"{name} still holds {left} after cleaning, so nothing was written: tell its authors")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_bytes(html)
        (out / "rows.tar.gz").write_bytes(archive)
    except OSError as error:
        raise ReportError(f"{out}: cannot be written ({error.strerror}); give another folder with --output") from None
    return [out / "report.html", out / "rows.tar.gz"]


def _runs(run: Path) -> list[Path]:
    if (run / "samples.jsonl").is_file() or (run / "runs.jsonl").is_file():
        return [run]
    found = runs_of(run)
    if found == [run]:
        raise ReportError(f"{run}: no run folder and no suite; runs are kept under reports/runs/")
    return found


def _strings(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Every (key, string) in the text files of the runs."""
    for folder in folders:
        for name in _TEXT:
            for value in _values(folder / name):
                yield from _walk("", value)


def _values(path: Path) -> Iterator[Any]:
    """The JSON values of a file: one a line, or one in all; a torn line is left out."""
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for piece in text.splitlines() if path.suffix == ".jsonl" else [text]:
        try:
            yield json.loads(piece)
        except ValueError:
            continue


def _walk(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield "", str(name)
            yield from _walk(str(name), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(key, inner)
    elif isinstance(value, str):
        yield key, value


class Cleaner:
    """Knows the names to take out, of this machine and of the rows, and takes them out of any value."""

    def __init__(self, strings: Iterable[tuple[str, str]]) -> None:
        host = socket.gethostname()
        names = {host, host.split(".")[0], _user(), *_home_names(str(Path.home()))}
        for key, value in strings:
            names.update(_home_names(value))
            if _NAMING_KEY.search(key):
                names.add(value.strip())
        self.names = sorted(
            (n for n in names if len(n) >= _SHORTEST and n.lower() not in _COMMON), key=len, reverse=True
        )
        either = "|".join(map(re.escape, self.names))
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9])", re.I) if self.names else None
        home = str(Path.home())
        self._home = home if len(home) > 1 else None

    def text(self, value: str) -> str:
        """`value` without names."""
        if self._home:
            value = value.replace(self._home, "~")
        value = _ROOT_HOME.sub("~", _HOME.sub("~", value))
        for pattern, instead in _PATTERNS:
            value = pattern.sub(instead, value)
        return self._names.sub(_GONE, value) if self._names else value

    def value(self, value: Any, key: str = "") -> Any:
        """Any JSON value without names; what a naming key holds is taken out whole."""
        if isinstance(value, dict):
            return {self.text(str(name)): self.value(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, key) for inner in value]
        if _NAMING_KEY.search(key) and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return _GONE
        return self.text(value) if isinstance(value, str) else value

    def left_in(self, data: bytes) -> str | None:
        """A kind of name that is still in `data`, or None. The name itself is not repeated."""
        text = data.decode("utf-8", errors="replace")
        if self._names and self._names.search(text):
            return "a host, user or serial name"
        if _HOME.search(text) or (self._home and self._home in text):
            return "a home folder"
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _home_names(value: str) -> list[str]:
    return _HOME.findall(value)


def _clean_run(folder: Path, into: Path, cleaner: Cleaner) -> Path:
    """A cleaned copy of one run: its rows and series, nothing else."""
    made = into / cleaner.text(folder.name)
    made.mkdir(parents=True)
    for name in _TEXT:
        path = folder / name
        if not path.is_file():
            continue
        values = [_placeless(cleaner.value(value), folder.name, cleaner) for value in _values(path)]
        lines = [json.dumps(value, separators=(",", ":"), ensure_ascii=False) for value in values]
        (made / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for series in sorted(folder.glob("series/*.safetensors")):
        (made / "series").mkdir(exist_ok=True)
        shutil.copyfile(series, made / "series" / cleaner.text(series.name))
    return made


def _placeless(value: Any, name: str, cleaner: Cleaner) -> Any:
    """A row or plan without the folder that it lay in."""
    if isinstance(value, dict) and isinstance(value.get("run_dir"), str):
        value["run_dir"] = cleaner.text(name)
    if isinstance(value, dict) and isinstance(value.get("config"), dict) and value["config"].get("run_dir"):
        value["config"]["run_dir"] = cleaner.text(name)
    return value


def _packed(folder: Path) -> bytes:
    """All files below `folder` as a gzip'd tar without owners and times: the same rows give the same bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return gzip.compress(raw.getvalue(), mtime=0)
