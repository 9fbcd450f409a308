"""A few damages and forgeries of checkpoints, of those that `tools.check_faults` draws: none is loaded by halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.damages import DAMAGES, damaged, forged, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save("usual", folder, 3)
    return folder


@pytest.mark.drawn
@pytest.mark.parametrize(("tried", "count"), [(damaged, len(DAMAGES)), (forged, 40)])
def test_a_changed_checkpoint_is_refused_or_loaded_whole(
    tried: Callable[..., dict[str, list[str]]], count: int, saved: Path, tmp_path: Path
) -> None:
    found = tried("usual", saved, tmp_path / "run", range(count))
    assert {what: wrong for what, wrong in found.items() if wrong} == {}
    assert sum("(refused" in what for what in found) > count // 4
    assert any("(loaded" in what for what in found)
