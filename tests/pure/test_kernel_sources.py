"""Compiled kernels lie where every checkout with the same sources finds them, and nobody else can write."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_hydra.commands.__main__ import main
from ds_hydra.planner.kernels import load
from ds_hydra.planner.recipe import warm_up

ROOT = Path(__file__).resolve().parents[2]
COUNTED = """
import numba.core.event as event
import ds_hydra
from ds_hydra.planner.recipe import warm_up
with event.install_recorder("numba:compile") as recorded:
    warm_up()
print(ds_hydra.__file__, len(recorded.buffer))
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    load.folder_of_kernels.cache_clear()
    yield
    load.folder_of_kernels.cache_clear()


def test_another_clone_compiles_nothing(tmp_path: Path) -> None:
    warm_up()
    for name in ("zero_hetero", "pipe", "ds_hydra"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tmp_path / "ds_hydra/__init__.py"), "0"], done.stderr


@pytest.mark.usefixtures("fresh")
def test_a_folder_in_which_others_may_write_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    folder = load.folder_of_kernels()
    assert folder == tmp_path / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    caplog.set_level(logging.WARNING)
    folder.chmod(0o770)
    load.folder_of_kernels.cache_clear()
    assert load.folder_of_kernels() is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    load.folder_of_kernels.cache_clear()
    assert load.folder_of_kernels() is None
    assert caplog.text.count("can have this job run what they like") == 1
    assert "it is a link and no folder" in caplog.text
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folder.unlink()
    load.folder_of_kernels.cache_clear()
    assert load.folder_of_kernels() is None, "another user's"


@pytest.mark.usefixtures("fresh")
def test_without_a_folder_of_the_user_kernels_stay_where_numba_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    code = warm_up.__code__
    assert load.folder_of_kernels() is None
    assert load.as_copied(warm_up, "none", "0") is code  # type: ignore[arg-type]


def test_a_copy_is_the_source_at_a_time_of_its_own() -> None:
    copy = Path(load.as_copied(warm_up, "test", "0").co_filename)  # type: ignore[arg-type]
    try:
        assert copy.read_bytes() == (ROOT / "ds_hydra/planner/recipe.py").read_bytes()
        assert copy.stat().st_mtime_ns == load._TIME_NS
    finally:
        shutil.rmtree(copy.parent)


def test_an_image_can_be_built_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-up"]) == 0
    assert f"kept in {load.folder_of_kernels()}" in capsys.readouterr().out
