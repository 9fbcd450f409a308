"""A job with proposed strategies and slices is the same to the bit on a busy machine and after a restart: a share of
`tools.check_load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.check_load import Case
from tools.load.job import Settings, run


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run(Settings(str(tmp_path_factory.mktemp("calm"))))
    assert found["slices"] > 3
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("restarted", "", beside=2, restarted=True), marks=pytest.mark.long),
        Case("hurt", "", {"hurt": "killed", "ahead": 1}, beside=2),
    ],
    ids=lambda case: case.kind,
)
def test_the_same_job_beside_busy_processes(case: Case, calm: dict[str, Any], tmp_path: Path) -> None:
    found = case.run(str(tmp_path))
    assert (found["plans"], found["recipes"], found["bits"]) == (calm["plans"], calm["recipes"], calm["bits"])
    assert ("restarted" in found["makers"]) == case.replaces
