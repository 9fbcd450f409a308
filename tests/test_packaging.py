"""What a wheel and a source archive hold: every module of the tree once, the shipped tables, the console command."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import setuptools

from ds_hydra.commands.figures import FILES, FOLDER

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("ds_hydra", "pipe", "zero_hetero")


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py", run_name="__main__")
    return given


def folders_of_modules() -> set[str]:
    """Folders of the checkout that hold Python files, links left out."""
    found: set[str] = set()
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT)
            if not any((ROOT / parent).is_symlink() for parent in (folder, *folder.parents)):
                found.add(str(folder))
    return found


def test_every_folder_of_modules_is_a_package_once(arguments: dict[str, Any]) -> None:
    folders = arguments["package_dir"]
    assert sorted(folders.values()) == sorted(folders_of_modules())
    assert sorted(folders) == sorted(arguments["packages"])
    for package, folder in folders.items():
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has no __init__.py"
        # The links of a checkout and the map of an installation lead to the same folder.
        assert (ROOT / package.replace(".", "/")).resolve() == ROOT / folder


def test_what_is_for_development_alone_is_in_no_package(arguments: dict[str, Any]) -> None:
    tops = {folder.split("/")[0] for folder in arguments["package_dir"].values()}
    assert tops == set(TOPS)
    assert (ROOT / "benchmarks" / "rivals" / "__init__.py").is_file()
    assert "recursive-include benchmarks *.py" in (ROOT / "MANIFEST.in").read_text(), "tests of an archive import it"


def test_an_archive_without_links_gets_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {*TOPS, "ds_hydra/commands", "examples/cost_tables"}
    for folder in copied:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
        made = {str(path.relative_to(tmp_path)): path.resolve() for path in tmp_path.rglob("*") if path.is_symlink()}
        assert made == {
            "ds_hydra/pipe": tmp_path / "pipe",
            "ds_hydra/zero_hetero": tmp_path / "zero_hetero",
            "ds_hydra/commands/tables": tmp_path / "examples" / "cost_tables",
        }
        assert all((ROOT / link).is_symlink() for link in made), "those of a checkout"


def test_an_archive_holds_what_tests_read() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.*") if "__pycache__" not in path.parts]
    read = {path.suffix for path in files if path.suffix != ".py"}
    (patterns,) = re.findall(r"^recursive-include tests (.*)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE)
    assert read <= {pattern.removeprefix("*") for pattern in patterns.split()}


def test_shipped_tables_are_package_data(arguments: dict[str, Any]) -> None:
    patterns = arguments["package_data"]["ds_hydra.commands"]
    packed = {path.name for pattern in patterns for path in FOLDER.parent.glob(pattern)}
    assert set(FILES.values()) <= packed
    assert sum((FOLDER / name).stat().st_size for name in packed) < 20_000, "a wheel is no place for data sets"


def test_the_console_command_is_there() -> None:
    module, function = re.findall(r'^ds-hydra = "(\S+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    assert callable(getattr(import_module(module), function))


def built(kind: str, source: Path, into: Path) -> Path:
    """A "wheel" or an "sdist" of a folder of sources, built as pip builds it, but with the setuptools that is here."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return into / done.stdout.splitlines()[-1]


def anywhere(installed: Path, *command: str, limit_s: float = 600.0) -> str:
    """What a command prints in an empty folder, where nothing of the checkout is on the path."""
    installed.with_name("elsewhere").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=installed.with_name("elsewhere"), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(installed)}, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel of the source archive of this checkout holds."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    archive = built("sdist", folder / "tree", folder)
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    assert {"tools/check.py", "tests/conftest.py", "examples/train.py", "Makefile", "constraints.txt"} <= {
        str(path.relative_to(unpacked)) for path in unpacked.rglob("*")
    }
    wheels = [built("wheel", folder / "tree", folder), built("wheel", unpacked, folder / "unpacked")]
    held = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert held[0] == held[1], "the wheel of the checkout, and of the archive"
    zipfile.ZipFile(wheels[1]).extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.drawn
def test_a_wheel_of_the_source_archive_works_elsewhere(installed: Path) -> None:
    modules = "import ds_hydra, ds_hydra.engine.engine as e, ds_hydra.hugging_face; print(e.__file__)"
    assert anywhere(installed, "-c", modules).splitlines()[-1].startswith(str(installed))  # DeepSpeed may warn before
    commands = "-m", "ds_hydra.commands"
    assert '"context_length"' in anywhere(installed, *commands, "settings", "--schema")
    fitted = anywhere(installed, *commands, "memory", "--model", str(ROOT / "examples/llama_tiny.json"), "--gpus", "4",
                      "--device-memory", "80")  # fmt: skip
    assert "tp" in fitted


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "demo --quick",
        "train-tiny --steps 2",
        "preview --cost-table a800-32b --lengths lognormal:6.22,1.233 --gpus 64 --tokens 200000 --context 32768 "
        "--tp-across-nodes --steps 2",
    ],
)
def test_commands_of_newcomers_run_elsewhere(installed: Path, command: str) -> None:
    anywhere(installed, "-m", "ds_hydra.commands", *command.split())
