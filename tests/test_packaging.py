"""What a wheel and a source archive hold: every module of the tree once, the shipped tables, the console command."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import setuptools

from ds_hydra.commands.shipped import FILES, FOLDER

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
