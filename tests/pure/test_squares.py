"""A square that a scheme's points hardly show is fitted together with that of schemes with as many heads on a rank."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.entry import SchemeEntry, StageEntry, entry_from_record
from ds_hydra.profiling.fit import Point, fit_points
from ds_hydra.profiling.squares import with_shared_squares
from ds_hydra.zero_hetero.safe_json import parse_json

OF_LAYER, LAYERS = 2.5e-7, 60  # ms a token^2, of one rank


def _entry(scheme: ParallelScheme, longest: int, seed: int, noise: float = 0.02) -> SchemeEntry:
    """Points of noisy times of one stage, up to so many tokens."""
    rng, layers, points = np.random.default_rng(seed), LAYERS // scheme.pp, []
    for n in np.geomspace(64, longest, 9).astype(int).tolist():
        for lengths in ((n,), (n // 4,) * 4):
            squares, tokens = sum(x * x for x in lengths), sum(lengths)
            ms = layers / (scheme.tp * scheme.sp) * (OF_LAYER * squares + 0.0142 * tokens) + 30.0
            points.append(Point(lengths, ms * float(1.0 + noise * rng.standard_normal())))
    return SchemeEntry(scheme, (StageEntry(0, layers, "ranks", tuple(points), fit_points(points)),), "wall", False)


def test_a_square_of_one_percent_of_the_time_is_that_of_its_siblings() -> None:
    short, long = _entry(ParallelScheme(1, 4), 1_994, 0), _entry(ParallelScheme(1, 6), 65_536, 1)
    other = _entry(ParallelScheme(2, 2), 2_000, 2)
    fitted, same, alone = with_shared_squares([short, long, other])
    true = OF_LAYER * LAYERS / 4
    assert abs(short.slowest.fit.a / true - 1.0) > 0.2, "its own points say nothing"
    assert fitted.slowest.fit.a == pytest.approx(true, rel=0.05)
    assert fitted.slowest.fit.b == pytest.approx(0.0142 * LAYERS / 4, rel=0.05)
    assert "a" in fitted.slowest.fit.unidentified
    assert (same, alone) == (long, other), "what is seen well, or has no siblings, is left"
    assert "as many heads" in fitted.cost(1_994).derived
    assert not same.cost(65_536).derived
    # As a table's file is read: it may not hold infinity, where the error of what others fixed is not known.
    assert entry_from_record(fitted.scheme, parse_json(json.dumps(fitted.record()))) == fitted


def test_siblings_that_all_show_little_have_one_square_together() -> None:
    true = OF_LAYER * LAYERS
    entries = [_entry(ParallelScheme(1, pp), 6_000, seed) for seed, pp in enumerate((1, 2, 3, 4, 5, 6))]
    found = [entry.slowest.fit.a * entry.scheme.pp for entry in with_shared_squares(entries)]
    assert found == pytest.approx([found[0]] * len(found))
    assert found[0] == pytest.approx(true, rel=0.25)
    apart = [abs(entry.slowest.fit.a * entry.scheme.pp / true - 1.0) for entry in entries]
    assert abs(found[0] / true - 1.0) < np.mean(apart)
