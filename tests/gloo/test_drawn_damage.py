"""Damages and forgeries of checkpoints, drawn at random, in jobs of every kind: none is loaded by halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.damages import DAMAGES, JOBS, damaged, forged, save

# Saved by as many ranks as load, and by more: 400 damages and 300 forgeries besides those that a run draws.
LONG = [
    pytest.param(kind, saved_by, tried, range(n * count, (n + 1) * count), marks=pytest.mark.long)
    for tried, count in ((damaged, 67), (forged, 50))
    for n, (kind, saved_by) in enumerate((kind, saved_by) for saved_by in (2, 3) for kind in JOBS)
]


@pytest.mark.parametrize(
    ("kind", "saved_by", "tried", "seeds"),
    [
        pytest.param("usual", 3, damaged, range(len(DAMAGES)), marks=pytest.mark.drawn),
        pytest.param("usual", 3, forged, range(40), marks=pytest.mark.drawn),
        *LONG,
    ],
)
def test_a_changed_checkpoint_is_refused_or_loaded_whole(
    kind: str, saved_by: int, tried: Callable[..., dict[str, list[str]]], seeds: range, tmp_path: Path
) -> None:
    save(kind, tmp_path / "saved", saved_by)
    found = tried(kind, tmp_path / "saved", tmp_path / "run", seeds)
    assert {what: wrong for what, wrong in found.items() if wrong} == {}
    assert sum("(refused" in what for what in found) > len(seeds) // 4
    assert any("(loaded" in what for what in found)
