"""Each capability that stands apart can be taken away: what is left imports, and trains as before."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import ledger

OF_THE_TREE = tuple(f"tests/pure/test_{name}.py" for name in ("layers", "ledger", "tools"))  # which files there are
APART = [name for name, capability in ledger.CAPABILITIES.items() if capability.apart]
IMPORT_ALL = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path("ds_hydra").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith(("__main__", "producer_start", "ray.rank")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "ds_hydra").startswith("ds_hydra"):  # not of a package that is not installed here
                raise SystemExit(f"{name}: {error}") from error
"""
TRAIN = ("-m", "ds_hydra.commands", "train-tiny", "--ranks", "2", "--steps", "2", "--strategies", "tp2", "2*tp1")


def without(names: Iterable[str], folder: Path) -> list[str]:
    """A copy of all code in `folder` without the files of some capabilities; the files of tests that are left. Tests
    that import what is gone, by themselves or by what they share, are of it and left out."""
    names = {*names}
    names |= {name for name, capability in ledger.CAPABILITIES.items() if capability.needs in names}
    patterns = [pattern for name in names for pattern in ledger.CAPABILITIES[name].files.split()]
    gone = {path for pattern in patterns for path in ledger.ROOT.glob(pattern)}

    def ignored(where: str, files: list[str]) -> list[str]:
        return [file for file in files if Path(where, file) in gone or file == "__pycache__"]

    for top in (*ledger.LIBRARY, "tests", "examples", "tools", "benchmarks", "docs"):
        shutil.copytree(ledger.ROOT / top, folder / top, ignore=ignored, symlinks=True)
    shutil.copytree(ledger.ROOT / ".github", folder / ".github")
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile", ".pre-commit-config.yaml"):
        shutil.copy(ledger.ROOT / file, folder)
    left = (str(path.relative_to(folder)) for path in (folder / "tests").rglob("test_*.py"))
    return sorted(path for path in left if not _imports(path, folder, set()))


def _imports(path: str, folder: Path, seen: set[str]) -> bool:
    """Whether a module, or a module of the tests or tools that it imports, imports one that is gone."""
    seen.add(path)
    for node in ast.parse((folder / path).read_text("utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names)):
            file, package = f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"
            if any((ledger.ROOT / one).exists() and not (folder / one).exists() for one in (file, package)):
                return True
            of_tests = file.startswith(("tests/", "tools/", "benchmarks/")) and (folder / file).exists()
            if of_tests and file not in seen and _imports(file, folder, seen):
                return True
    return False


def run(folder: Path, *command: str) -> None:
    """Run Python in `folder`, which it imports from; AssertionError with what it wrote if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    if "pytest" not in command:  # whose tests compile kernels themselves
        environment["NUMBA_DISABLE_JIT"] = "1"
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.drawn
@pytest.mark.parametrize("names", [*([name] for name in APART), APART], ids=" ".join)
def test_what_is_left_imports_and_trains(names: list[str], tmp_path: Path) -> None:
    without(names, tmp_path)
    run(tmp_path, "-c", IMPORT_ALL)
    run(tmp_path, *TRAIN)


@pytest.mark.long
@pytest.mark.parametrize("names", [*([name] for name in APART), APART], ids=" ".join)
def test_all_tests_of_what_is_left_pass(names: list[str], tmp_path: Path) -> None:
    left = [file for file in without(names, tmp_path) if file.startswith(("tests/pure", "tests/gloo"))]
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(file for file in left if file not in OF_THE_TREE))
