"""Releases of other packages: the bounds are pyproject.toml's, and older ones are refused before they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ds_hydra.config.versions import NEEDED, refuse_older
from ds_hydra.zero_hetero.errors import ConfigError
from tools import check_installs

ROOT = Path(__file__).parents[2]
OF = {one.package: one for one in NEEDED}


def test_the_table_is_what_pip_is_told() -> None:
    told = (ROOT / "pyproject.toml").read_text("utf-8")
    assert [one.requirement for one in NEEDED if f'"{one.requirement}"' not in told] == []


@pytest.mark.parametrize(
    ("package", "installed", "said"),
    [
        ("torch", "2.10.0+cu128", "older than 2.11"),
        ("torch", "2.10.0a0+b4e4ee81d3.nv25.12", "older than 2.11"),
        ("torch", "2.11.0a0+eb65b36914.nv26.2", ""),  # an image's
        ("torch", "2.11.0", ""),
        ("torch", "2.16.0.dev20261120", ""),  # nothing is known against it
        ("transformers", "4.57.6", "older than 5.5"),
        ("transformers", "5.5.0", ""),
        ("transformers", "5.6.0", "broken"),
        ("transformers", "5.6", "broken"),
        ("transformers", "5.6.0.dev0", "broken"),
        ("transformers", "5.6.1", ""),
        ("transformers", "5.10.4", ""),
        ("deepspeed", "0.18.5", "older than 0.18.6"),
        ("deepspeed", "0.18.10+3f1c2e", ""),
        ("accelerate", "1.12.0", "older than 1.13"),
        ("trl", "1.1.0", ""),
    ],
)  # fmt: skip
def test_what_is_said_of_a_release(package: str, installed: str, said: str) -> None:
    objection = OF[package].objection(installed)
    assert (said in objection and installed in objection) if said else objection == ""


def test_frameworks_are_shut_out_by_bounds_that_are_too_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_installs.main([]) == 0
    assert "16 of 18 frameworks" in capsys.readouterr().out
    own = [Requirement(text) for text in ("torch>=2.13,<2.15", "deepspeed>=0.19.8,<0.20", "transformers>=5.20,<6")]
    releases = {name: text.split() for name, text in check_installs.RELEASES.items()}
    found = {name: check_installs.disagreement(host, own, releases) for name, host in check_installs.HOSTS.items()}
    assert sum(bool(python) for python, _ in found.values()) == 6
    assert found["verl==0.9.1"] == ("", "transformers: <6,>=5.20 and !=5.6.0,<5.11,>=5.5.3")


def test_a_package_of_an_extra_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # as one that is not there
    monkeypatch.setattr("ds_hydra.config.versions.metadata.version", _missing)
    with pytest.raises(ConfigError, match=r"trl is not installed.*ds-hydra\[trl\].*pip install \"trl>=1\.1\""):
        refuse_older("trl")
    refuse_older("torch")  # importing it tells


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("imported", "older"),
    [
        ("ds_hydra.entry", {"transformers": "4.57.6", "deepspeed": "0.17.6"}),
        ("ds_hydra.engine.engine", {"torch": "2.10.0"}),
        ("ds_hydra.hugging_face", {"accelerate": "1.11.0"}),
        ("ds_hydra.hugging_face.sft", {"trl": "0.24.0"}),
        ("ds_hydra.hugging_face.scores", {"trl": "0.24.0"}),
        ("ds_hydra.testing", {"transformers": "5.4.0"}),
    ],
)
def test_older_releases_are_refused_at_import_with_the_command(
    imported: str, older: dict[str, str], tmp_path: Path
) -> None:
    """All in one refusal; what stands first on the path is what would be imported."""
    for package, version in older.items():
        folder = tmp_path / f"{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", f"import {imported}"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("ds_hydra.zero_hetero.errors.ConfigError: ds-hydra cannot run in this environment"), told
    assert all(f"{package} {version}" in told for package, version in older.items()), told
    assert told.endswith(" ".join(f'"{OF[one.package].requirement}"' for one in NEEDED if one.package in older))
