"""What is installed: the embedded model, configuration and templates are in the wheel, tests and runs are not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from engine.tiny import CHECKPOINT

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"__pycache__", "runs", "published"}
PACKAGES = ("engine", "ablations", "configs", "sweeps", "reports")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as `pip` has it built, by the same backend without its isolated environment."""
    backend = pytest.importorskip("hatchling.builders.wheel", reason="hatchling comes with the test extra")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = backend.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def test_it_holds_the_model_the_configuration_and_nothing_of_the_tests(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    inside = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert inside == set(PACKAGES)
    files = [path for room in PACKAGES for path in (ROOT / room).rglob("*") if path.is_file()]
    kept = {p.relative_to(ROOT).as_posix() for p in files if not LEFT_OUT & set(p.parts)}
    assert (CHECKPOINT / "model.safetensors").relative_to(ROOT).as_posix() in kept
    assert not kept - set(names)
    assert not [name for name in names if LEFT_OUT & set(name.split("/"))]


def test_the_model_in_it_is_the_one_that_was_measured(wheel: zipfile.ZipFile) -> None:
    for path in CHECKPOINT.iterdir():
        assert wheel.read(path.relative_to(ROOT).as_posix()) == path.read_bytes(), path.name


def test_the_command_is_in_it(wheel: zipfile.ZipFile) -> None:
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "lilybench = reports.cli:main" in wheel.read(entry).decode()
