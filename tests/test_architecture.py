"""The house rules as tests: who imports whom, lint, types, docstrings, constructs that are banned and why."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "ablations", "sweeps", "reports")
PYTHON = Path(sys.executable)


def tracked() -> list[Path]:
    """Files that belong to the project: known to git, or new and not ignored."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def sources(room: str) -> list[Path]:
    """Python files of a room."""
    return sorted((ROOT / room).rglob("*.py"))


def run(*argv: str) -> None:
    """Run a tool of this environment in the root; its output is the failure."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}{done.stderr}"


# -- tools -------------------------------------------------------------------------------------------


def test_ruff_check() -> None:
    run(str(PYTHON), "-m", "ruff", "check", "--no-cache", ".")


def test_ruff_format() -> None:
    run(str(PYTHON), "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_types() -> None:
    run(str(PYTHON), "-m", "pyright", "--pythonpath", str(PYTHON), *ROOMS)


# -- imports -------------------------------------------------------------------------------------------


def test_import_contracts() -> None:
    run(str(PYTHON.parent / "lint-imports"), "--no-cache")


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("import sweeps.rows", "engine/planted.py"),
        ("import time", "engine/planted.py"),
        ("import mlx_lm", "engine/planted.py"),
        ("import hydra", "ablations/planted.py"),
        ("from sweeps import rows", "ablations/planted.py"),
        ("import engine.device", "reports/planted.py"),
        ("import mlx.core", "reports/planted.py"),
    ],
)
def test_import_contracts_catch_a_planted_import(line: str, file: str, tmp_path: Path) -> None:
    # A contract that lost its packages would keep silent; each forbidden direction is planted once.
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    (tmp_path / "sweeps" / "rows.py").touch()
    (tmp_path / "engine" / "device.py").write_text("import mlx.core\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
    command = [str(PYTHON.parent / "lint-imports"), "--no-cache"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    clean = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    (tmp_path / file).write_text(line + "\n", encoding="utf-8")
    broken = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert broken.returncode == 1 and "BROKEN" in broken.stdout, broken.stdout + broken.stderr


def test_reports_and_store_load_without_mlx() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources("reports")]
    modules = [m.removesuffix(".__init__") for m in modules if not m.endswith("__main__")] + ["sweeps.store"]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert not {'mlx', 'mlx_lm'} & set(sys.modules), 'MLX was loaded'\n"
    )
    run(str(PYTHON), "-c", code)


# -- banned constructs -----------------------------------------------------------------------------------

BANNED = [
    # (pattern, rooms, files that may, reason)
    (
        r"\bos\.(environ|getenv)\b",
        ROOMS,
        # What a CI system asks of a report is in its environment, and a report may not import what knows MLX; where
        # CUDA's headers are is told there too.
        ("sweeps/environment.py", "engine/fetch.py", "reports/announce.py", "engine/kernels/cuda.py"),
        "settings come from the config",
    ),
    (r"\bmx\.metal\.(get|set|reset|clear|device_info)", ROOMS, (), "old spelling; prints warnings into output"),
    (r"\b(breakpoint|pdb\.set_trace)\(", ROOMS, (), "left from debugging"),
    (r"\bexcept:\s*$", ROOMS, (), "swallows an interrupt"),
    (
        r"\b(time\.time|datetime\.now|datetime\.utcnow)\(\)",
        ("engine", "ablations"),
        ("engine/serve/app.py",),
        "no clock here",
    ),
    (r"#\s*(TODO|FIXME|XXX)\b", ROOMS, (), "write down the limit in the README instead"),
]


@pytest.mark.parametrize(("pattern", "rooms", "may", "reason"), BANNED)
def test_banned_constructs(pattern: str, rooms: tuple[str, ...], may: tuple[str, ...], reason: str) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in rooms
        for path in sources(room)
        if path.relative_to(ROOT).as_posix() not in may
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not hits, f"{reason}:\n" + "\n".join(hits)


def unencoded(tree: ast.Module) -> Iterator[int]:
    """Lines that read or write text without naming its encoding: what they do would hang on the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        call = ast.unparse(node.func)
        method = call.rpartition(".")[2]
        if method in ("read_text", "write_text"):
            # The encoding may stand by its place, and a distribution's read_text takes a name there.
            if len(node.args) == (method == "write_text"):
                yield node.lineno
        elif method == "open" and call not in ("tarfile.open", "os.open"):
            modes = [word.value for word in node.keywords if word.arg == "mode"] + node.args[call == "open" :]
            if not (modes and isinstance(modes[0], ast.Constant) and "b" in str(modes[0].value)):
                yield node.lineno


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_text_files_name_their_encoding(folder: str) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources(folder)
        for line in unencoded(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not hits, 'say encoding="utf-8":\n' + "\n".join(hits)


@pytest.mark.parametrize("line", ["p.read_text()", "p.write_text(s)", "open(p)", "p.open('w')", "p.open(mode='a')"])
def test_a_planted_file_without_encoding_is_seen(line: str) -> None:
    assert list(unencoded(ast.parse(line))) == [1]


@pytest.mark.parametrize("line", ["p.read_text(encoding='utf-8')", "p.open('rb')", "open(p, 'wb')", "tarfile.open(p)"])
def test_a_file_with_encoding_or_of_bytes_is_let_through(line: str) -> None:
    assert not list(unencoded(ast.parse(line)))


def test_the_forward_pass_has_no_branch_on_the_config() -> None:
    tree = ast.parse((ROOT / "engine" / "model.py").read_text(encoding="utf-8"))
    tests = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)]
    branches = [test for test in tests if re.search(r"\b(engine_config|cfg)\b\.\w", test)]
    assert not branches, f"variants are bound when the model is built, not chosen in the forward pass: {branches}"


# -- docstrings and annotations ------------------------------------------------------------------------


def public_functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, list[str]]]:
    """Public classes, functions and methods of a module as (name, node, names of base classes)."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases]
            yield node.name, node, bases
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("_"):
                    yield f"{node.name}.{item.name}", item, bases
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, node, []


def documented_methods() -> set[tuple[str, str]]:
    """(class, method) of every documented method: an override inherits its base's docstring."""
    found = set()
    for room in ROOMS:
        for path in sources(room):
            for name, node, _ in public_functions(ast.parse(path.read_text(encoding="utf-8"))):
                if "." in name and ast.get_docstring(node):  # type: ignore[arg-type]
                    found.add(tuple(name.split(".", 1)))
    return found


def unannotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters (but self and cls) and the return that carry no annotation."""
    given = node.args
    names = [a for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a]
    missing = [a.arg for a in names if a.annotation is None and a.arg not in ("self", "cls")]
    return missing if node.returns is not None else [*missing, "return"]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_types_and_a_docstring(room: str) -> None:
    inherited = documented_methods()
    # Implementations of the subjects' protocol share its docstrings without inheriting from it.
    protocol = {method for owner, method in inherited if owner == "Subject"}
    faults = []
    for path in sources(room):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at = path.relative_to(ROOT)
        if tree.body and not ast.get_docstring(tree):
            faults.append(f"{at}: the module has no docstring")
        for name, node, bases in public_functions(tree):
            method = name.rpartition(".")[2]
            shared = any((base, method) in inherited for base in bases) or (
                "subjects" in at.parts and "." in name and method in protocol
            )
            if not ast.get_docstring(node) and not shared:  # type: ignore[arg-type]
                faults.append(f"{at}:{node.lineno}: {name} has no docstring")  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (missing := unannotated(node)):
                faults.append(f"{at}:{node.lineno}: {name} lacks types for {', '.join(missing)}")
    assert not faults, "\n".join(faults)


# -- the project stands alone ----------------------------------------------------------------------------

# Folders of the machine it was written on, and trackers other than a linked one, mean nothing to a reader.
FOREIGN = re.compile(r"(?<![\w.])/(?:home|root|Users|work|opt/ll)/\w|\bissue #?\d+\b|\.\./shared\b", re.IGNORECASE)
HELD_OUT = ROOT / "engine" / "tiny" / "heldout"  # other people's text, kept as it is
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".txt",
    ".j2",
    ".html",
    ".css",
    ".json",
    ".jsonl",
    ".metal",
    ".h",
    ".cpp",
}


def test_no_machine_paths_or_loose_tracker_numbers() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked()
        if (path.suffix in TEXT or path.name == "run") and path != Path(__file__) and path.parent != HELD_OUT
        for number, line in enumerate(path.read_text(errors="replace", encoding="utf-8").splitlines(), 1)
        if FOREIGN.search(line) and "github.com" not in line
    ]
    assert not hits, "\n".join(hits)


def test_no_large_file_but_the_embedded_checkpoint() -> None:
    large = [p for p in tracked() if p.stat().st_size > 2 << 20 and "tiny" not in p.parts]
    assert not large, [f"{p.relative_to(ROOT)}: {p.stat().st_size >> 10} KiB" for p in large]


# -- documents that commands depend on -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "last"), [("sweep", ".venv/bin/python -m sweeps"), ("tests", "-m pytest -q -n 2 --dist loadfile")]
)
def test_readme_blocks_are_what_ci_runs(name: str, last: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"README.md has {len(blocks)} blocks for {name}"
    assert blocks[0].startswith("python3 -m venv .venv && ") and blocks[0].endswith(last)
    assert "-c constraints.txt" in blocks[0] and "\n" not in blocks[0]
    function = re.search(
        r"^block\(\) \{.+?^\}", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert function, ".ci/run lost its function `block`"
    script = f"{function[0]}\nblock {name}"
    printed = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == blocks[0] + "\n"


def test_readme_lists_every_op_and_toggle_as_they_are() -> None:
    argv = [str(PYTHON), "-m", "reports", "catalogue", "--check"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_names_only_commands_that_exist() -> None:
    named = set(re.findall(r"python -m (engine|reports) ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    helps = {}
    for room in ("engine", "reports"):
        argv = [str(PYTHON), "-m", room, "--help"]
        helps[room] = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    absent = [f"{room} {command}" for room, command in sorted(named) if not re.search(rf"\b{command}\b", helps[room])]
    assert named and not absent, absent


def plain(distribution: str) -> str:
    """A distribution's name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def needs(extra: str | None = None) -> set[str]:
    """Distributions that pyproject.toml asks for, by themselves or with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    # An extra that takes in another one names the project itself.
    own = [match[1] for need in wanted if (match := re.fullmatch(rf"{project['name']}\[([\w,]+)\]", need))]
    named = {plain(re.split(r"[\[<>=;\s]", need)[0]) for need in wanted} - {project["name"]}
    return named.union(*(needs(one) for names in own for one in names.split(",")))


def test_what_is_imported_is_asked_for() -> None:
    # Something that comes along with another dependency today may not tomorrow.
    of_module = importlib.metadata.packages_distributions()
    trees = [ast.parse(path.read_text(encoding="utf-8")) for room in ROOMS for path in sources(room)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    modules = {name.partition(".")[0] for name in named} - set(sys.stdlib_module_names) - {*ROOMS, "configs"}
    needed = needs() | needs("test")
    absent = {m for m in modules if not {plain(name) for name in of_module.get(m, [m])} & needed}
    assert not absent, f"pyproject.toml does not list {sorted(absent)}"


def test_locked_versions_cover_every_dependency() -> None:
    names = needs() | needs("test")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = {plain(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    assert not names - locked, f"constraints.txt lacks {sorted(names - locked)}"
    loose = [line for line in lines if not line.startswith("#") and not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert not loose, f"constraints.txt must name exact versions and nothing else: {loose}"


def test_hooks_use_the_locked_ruff() -> None:
    locked = re.search(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = set(re.findall(r'"ruff==([^"]+)"', (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")))
    assert locked and hooks == {locked[1]}
