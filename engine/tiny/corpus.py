"""Gather free text, split it by file, train the tokenizer, and encode everything as token ids.

    python -m engine.tiny.corpus --out .tiny

The text is the Python standard library, Python's documentation, and documentation and Python sources that
Debian ships in its `main` section. Packages are fetched with ``apt-get download`` and unpacked, never
installed. The split is by file (a hash of package and path), so no file is on two sides. Written to the
output folder: ``tokenizer/``, one ``<split>.<kind>.xz`` of uint16 ids each, ``heldout/`` and ``sources.json``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import gzip
import hashlib
import html
import json
import lzma
import random
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.tiny.tokenizer import END, encode_many, train_tokenizer, write_tokenizer

KINDS = ("code", "prose", "chat")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Source:
    """One Debian package: which of its files are read (`glob` under its root) and as which kind."""

    package: str
    kind: str
    glob: str = "**/*"
    licence: str = ""


PYTHON_CODE = (
    "python3-django BSD-3-Clause|python3-sqlalchemy MIT|python3-twisted MIT|python3-sphinx BSD-2-Clause|"
    "python3-networkx BSD-3-Clause|python3-pandas BSD-3-Clause|python3-matplotlib PSF-based|"
    "python3-sklearn BSD-3-Clause|python3-nltk Apache-2.0|python3-docutils public-domain and BSD-2-Clause|"
    "mercurial-common GPL-2+|python3-tornado Apache-2.0|python3-aiohttp Apache-2.0|python3-pygments BSD-2-Clause|"
    "python3-babel BSD-3-Clause|python3-jinja2 BSD-3-Clause|python3-werkzeug BSD-3-Clause|python3-flask BSD-3-Clause|"
    "python3-requests Apache-2.0|python3-urllib3 MIT|python3-click BSD-3-Clause|python3-rich MIT|python3-mypy MIT|"
    "python3-jedi MIT|python3-setuptools MIT|python3-hypothesis MPL-2.0|python3-astropy BSD-3-Clause|"
    "python3-dask BSD-3-Clause|python3-ipython BSD-3-Clause|python3-scrapy BSD-3-Clause|python3-paramiko LGPL-2.1+|"
    "python3-cherrypy3 BSD-3-Clause|python3-scipy BSD-3-Clause|python3-numpy BSD-3-Clause|python3-pytest MIT|"
    "python3-trio MIT or Apache-2.0|python3-attr MIT|python3-celery BSD-3-Clause|python3-gevent MIT|"
    "ansible-core GPL-3+|python3-breezy GPL-2+|python3-statsmodels BSD-3-Clause|python3-ase LGPL-2.1+|"
    "python3-sympy BSD-3-Clause|libpython3.11-testsuite PSF-2.0|idle-python3.11 PSF-2.0"
)

PROSE = (
    Source("python3.11-doc", "prose", "**/_sources/**/*.txt", "PSF-2.0"),
    Source("python-pandas-doc", "prose", "**/_sources/**/*.txt", "BSD-3-Clause"),
    Source("sphinx-doc", "prose", "**/*.txt", "BSD-2-Clause"),
    Source("python-django-doc", "prose", "**/*.html", "BSD-3-Clause"),
    Source("python-scipy-doc", "prose", "**/html/**/*.html", "BSD-3-Clause"),
    Source("debian-policy", "prose", "**/*.html", "GPL-2+"),
    Source("debian-reference-en", "prose", "**/*.html", "GPL-2+"),
    Source("developers-reference", "prose", "**/*.html", "GPL-2+"),
    Source("debian-handbook", "prose", "**/html/en-US/*.html", "CC-BY-SA-3.0 or GPL-2+"),
    Source("debian-faq", "prose", "**/*.html", "GPL-2+"),
    Source("debian-history", "prose", "**/*.html", "GPL-2+"),
    Source("git-doc", "prose", "**/*.txt", "GPL-2"),
    Source("dict-wn", "prose", "**/*.dict.dz", "WordNet (MIT-like)"),
    Source("dict-jargon", "prose", "**/*.dict.dz", "public domain"),
    Source("dict-foldoc", "prose", "**/*.dict.dz", "GFDL-1.1+ without invariant sections"),
    Source("dict-devil", "prose", "**/*.dict.dz", "public domain"),
    Source("postgresql-doc-15", "prose", "**/*.html", "PostgreSQL"),
    Source("sqlite3-doc", "prose", "**/*.html", "public domain"),
    Source("perl-doc", "prose", "**/*.pod", "Artistic or GPL-1+"),
    Source("vim-runtime", "prose", "**/doc/*.txt", "Vim"),
    Source("linux-doc-6.1", "prose", "**/Documentation/**/*.rst.gz", "GPL-2"),
    Source("gnome-user-docs", "prose", "**/help/C/**/*.page", "CC-BY-SA-3.0"),
    Source("libreoffice-help-en-us", "prose", "**/en-US/text/**/*.html", "MPL-2.0"),
    Source("installation-guide-amd64", "prose", "**/en/*.html", "GPL-2+"),
    Source("debian-kernel-handbook", "prose", "**/*.html", "GPL-2+"),
    Source("octave-doc", "prose", "**/*.html", "GPL-3+"),
    Source("r-doc-html", "prose", "**/*.html", "GPL-2+"),
    Source("gnuplot-doc", "prose", "**/*.html", "gnuplot"),
    Source("python-cryptography-doc", "prose", "**/*.txt", "BSD-3-Clause or Apache-2.0"),
    Source("python-attr-doc", "prose", "**/*.txt", "MIT"),
    Source("python-click-doc", "prose", "**/*.txt", "BSD-3-Clause"),
    Source("python-jinja2-doc", "prose", "**/*.txt", "BSD-3-Clause"),
    Source("python-werkzeug-doc", "prose", "**/*.txt", "BSD-3-Clause"),
)

SOURCES = PROSE + tuple(
    Source(entry.split(" ", 1)[0], "code", "**/*.py", entry.split(" ", 1)[1]) for entry in PYTHON_CODE.split("|")
)

STDLIB = Source("python-stdlib", "code", "**/*.py", "PSF-2.0")
"""The running Python's own standard library; the split names its files the same on any version."""

HELDOUT = {"code": ("python-stdlib",), "prose": ("python3.11-doc", "postgresql-doc-15", "sqlite3-doc")}
"""Packages whose test files are kept in the repository as held-out text: all under permissive licences."""

MAX_FILE = 400_000
"""Characters of one file that are kept; longer ones are tables more often than text."""
CAPS = {"code": 3_000_000, "prose": 6_000_000}
"""Characters taken from one package, so that none dominates (files in order of their hash)."""
UNCAPPED = ("python-stdlib", "python3.11-doc")
DICTIONARY_PIECE = 40_000
"""Characters that a dictionary is cut into, so that it too can be split by piece."""


@dataclass(frozen=True)
class Document:
    """One file's text and where it came from."""

    package: str
    name: str
    kind: str
    text: str

    @property
    def split(self) -> str:
        """``test`` and ``valid`` get about one file in 80 each."""
        return split_of(self.package, self.name)


def split_of(package: str, name: str) -> str:
    """The side a file is on, from its package and path alone."""
    bucket = int.from_bytes(hashlib.sha256(f"{package}/{name}".encode()).digest()[:4], "big") % 80
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"


# -- fetching and reading ----------------------------------------------------------------------


def fetch(packages: list[str], folder: Path) -> None:
    """Download and unpack Debian packages that are not there yet (needs a Debian system and its network)."""
    debs = folder / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    for package in packages:
        root = folder / "x" / package
        if root.exists():
            continue
        if not list(debs.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=debs, check=True, capture_output=True)
        root.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(next(debs.glob(f"{package}_*.deb"))), str(root)], check=True)


_DROPPED = re.compile(r"<(script|style|nav|head|svg)\b.*?</\1\s*>", re.S | re.I)
_BLOCK = re.compile(r"</?(p|div|li|ul|ol|tr|table|h[1-6]|pre|dt|dd|dl|br|section|title|item|note|page)\b[^>]*>", re.I)
_TAG = re.compile(r"<[^>]*>")


def strip_markup(text: str) -> str:
    """The readable text of an HTML or XML page, navigation dropped where its main part is marked."""
    for mark in ('role="main"', '<div class="body"', "<body", "<BODY"):
        at = text.find(mark)
        if at >= 0:
            text = text[at:]
            break
    text = _DROPPED.sub(" ", text)
    pieces = re.split(r"(<pre\b.*?</pre\s*>)", text, flags=re.S | re.I)
    joined = "".join(p if p.lower().startswith("<pre") else re.sub(r"\s+", " ", p) for p in pieces)
    plain = html.unescape(_TAG.sub("", _BLOCK.sub("\n", joined)))
    lines = [line.rstrip() for line in plain.replace("\xa0", " ").replace("¶", "").split("\n")]
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", "\n".join(line.strip() if len(line) < 2 else line for line in lines))


def readable(text: str) -> bool:
    """Whether this is text to learn from rather than a table of numbers, another script or minified data."""
    if len(text) < 400:
        return False
    lines = text.count("\n") + 1
    plain = sum(text.count(c) for c in "etaoinsr ")
    other = len(text) - len(text.encode("ascii", "ignore"))
    digits = sum(text.count(c) for c in "0123456789")
    size = len(text)
    return size / lines < 400 and plain > 0.28 * size and other < 0.02 * size and digits < 0.12 * size


def read(path: Path) -> str:
    """A file's text, uncompressed and without markup; undecodable files are empty."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    if path.suffix in (".html", ".page"):
        text = strip_markup(text)
    return text.replace("\r\n", "\n").replace("\t", "    ")


_SKIPPED = re.compile(r"genindex|/rubi/|_vendor|third_party|searchindex")
_SKIPPED_STDLIB = re.compile(r"site-packages|dist-packages|idlelib/Icons|pydoc_data/topics")


def documents(folder: Path) -> list[Document]:
    """Every usable document, in a fixed order; exact copies (by text without spaces) appear once.

    `pydoc_data.topics` is left out of every side: it repeats pages of Python's documentation.
    """
    seen: set[bytes] = set()
    found: list[Document] = []
    roots = [(STDLIB, Path(sysconfig.get_path("stdlib")))] + [(s, folder / "x" / s.package) for s in SOURCES]
    for source, root in roots:
        skipped = _SKIPPED_STDLIB if source is STDLIB else _SKIPPED
        for path in sorted(root.glob(source.glob)):
            name = path.relative_to(root).as_posix()
            if skipped.search(name) or path.is_symlink() or not path.is_file():
                continue
            text = read(path)
            if path.suffix == ".dz":
                pieces = {f"{name}#{i}": text[i : i + DICTIONARY_PIECE] for i in range(0, len(text), DICTIONARY_PIECE)}
            else:
                pieces = {name: text[:MAX_FILE]}
            for piece_name, piece in pieces.items():
                digest = hashlib.sha256("".join(piece.split()).encode()).digest()
                if readable(piece) and digest not in seen:
                    seen.add(digest)
                    found.append(Document(source.package, piece_name, source.kind, piece))
    return capped(found)


def capped(found: list[Document]) -> list[Document]:
    """Keep each package's documents up to its cap of characters."""
    total: dict[str, int] = {}
    kept: list[Document] = []
    for d in sorted(found, key=lambda d: hashlib.sha256(f"{d.package}/{d.name}".encode()).digest()):
        size = total.get(d.package, 0) + len(d.text)
        if d.package in UNCAPPED or size <= CAPS[d.kind]:
            total[d.package] = size
            kept.append(d)
    return kept


# -- chat --------------------------------------------------------------------------------------


def questions(document: Document) -> Iterator[tuple[str, str]]:
    """Questions that a file answers itself: what a documented function or class does, what a word means."""
    if document.kind == "code":
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError, RecursionError):
            return
        module = Path(document.name).stem
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                said = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                if 40 <= len(said) <= 600 and not node.name.startswith(("_", "test")):
                    what = "class" if isinstance(node, ast.ClassDef) else "function"
                    yield f"What does the {what} {node.name} in {module} do?", said
                    if isinstance(node, ast.FunctionDef) and len(node.body) <= 6:
                        code = ast.get_source_segment(document.text, node) or ""
                        if 80 <= len(code) <= 900:
                            lines = f"```python\n{code}\n```"
                            yield f"Write a Python function {node.name}. {said.splitlines()[0]}", lines
    elif document.package == "dict-wn":
        for word, rest in re.findall(r"^([a-z][a-z ]{2,24})\n((?:    .*\n?)+)", document.text, re.M):
            said = re.sub(r"\s+", " ", re.sub(r"\[.*?\]|\{|\}", "", rest)).strip()
            if 30 <= len(said) <= 500:
                yield f"What does the word {word} mean?", said


def chat_documents(documents: list[Document], seed: int = 7) -> list[Document]:
    """Conversations made of what the documents say themselves; each stays on its document's side.

    About half carry a line of thought, so that both forms of the template have been seen.
    """
    rng = random.Random(seed)
    made: list[Document] = []
    for document in documents:
        asked = list(questions(document))
        rng.shuffle(asked)
        turns: list[str] = []
        for question, answer in asked[:12]:
            topic = question.rstrip("?.").split(". ")[0]
            thought = f"The user asks: {topic}. I will answer briefly.\n" if rng.random() < 0.5 else "\n"
            turns.append(
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n{thought}</think>\n\n"
                f"{answer}<|im_end|>\n"
            )
        for number in range(0, len(turns), 3):
            text = "".join(turns[number : number + rng.choice((1, 1, 2, 3))])
            made.append(dataclasses.replace(document, kind="chat", name=f"{document.name}@{number}", text=text))
    return made


# -- writing -----------------------------------------------------------------------------------


def heldout_text(documents: list[Document], kind: str, limit: int = 300_000) -> str:
    """Test documents of permissively licensed packages, joined, at most `limit` characters."""
    kept = [d.text[:30_000].strip() for d in documents if d.kind == kind and d.package in HELDOUT[kind]]
    random.Random(3).shuffle(kept)
    return "\n\f\n".join(kept)[:limit]


def build(folder: Path, cache: Path) -> None:
    """Write the whole data folder: tokenizer, ids of each split and kind, held-out text, sources."""
    fetch([s.package for s in SOURCES], cache)
    found = documents(cache)
    # A chat turn is on the side of the file it was made from, so the split is taken before the chats are made.
    sides = {split: [d for d in found if d.split == split] for split in SPLITS}
    texts = {split: {"chat": chat_documents(sides[split])} for split in SPLITS}
    for split, kinds in texts.items():
        for kind in ("code", "prose"):
            kinds[kind] = [d for d in sides[split] if d.kind == kind]
            random.Random(11).shuffle(kinds[kind])
        random.Random(11).shuffle(kinds["chat"])

    sample = [d.text for kind in KINDS for d in texts["train"][kind][:: 4 if kind != "chat" else 16]]
    tokenizer = train_tokenizer(sample)
    write_tokenizer(tokenizer, folder / "tokenizer")
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for split in SPLITS:
        for kind in KINDS:
            documents_ = texts[split][kind]
            ids = encode_many(tokenizer, [d.text for d in documents_], end=END)
            path = folder / f"{split}.{kind}.xz"
            path.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=6))
            size = sum(len(d.text.encode()) for d in documents_)
            counts.setdefault(split, {})[kind] = {"files": len(documents_), "bytes": size, "tokens": len(ids)}
            print(f"{split:5} {kind:5} {len(documents_):6} files {size / 1e6:7.2f} MB {len(ids) / 1e6:7.2f} M tokens")
    (folder / "heldout").mkdir(exist_ok=True)
    for kind in HELDOUT:
        (folder / "heldout" / f"{kind}.txt").write_text(heldout_text(sides["test"], kind), encoding="utf-8")
    used = {d.package: 0 for d in found}
    for d in found:
        used[d.package] += len(d.text.encode())
    sources = [
        {"package": s.package, "kind": s.kind, "licence": s.licence, "bytes": used[s.package]}
        for s in (STDLIB, *SOURCES)
        if used.get(s.package)
    ]
    manifest = {"split": "sha256 of package/path modulo 80: 0 test, 1 valid", "counts": counts, "sources": sources}
    (folder / "sources.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def load_ids(folder: Path, split: str, kind: str) -> np.ndarray:
    """Token ids of one split and kind, uint16."""
    return np.frombuffer(lzma.decompress((folder / f"{split}.{kind}.xz").read_bytes()), dtype="<u2")


def main() -> None:
    """Command line: gather, split, tokenize, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".tiny"), help="folder for the data")
    parser.add_argument("--cache", type=Path, default=Path(".tiny-cache"), help="folder for downloaded packages")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    build(options.out, options.cache)


if __name__ == "__main__":
    main()
