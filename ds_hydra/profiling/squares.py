"""Measured schemes in; the same with a where their own points hardly show it, fitted together, out. Pure.

[Note: shared squares]
Attention takes a layer as long on as many heads and tokens, whatever the pipeline around it. So schemes of equal TP *
SP have one a of a layer. Where memory ends a scheme's points before the square is a fifth of the time, its own a is
mostly noise, and whoever extrapolates it to long sequences is off by factors. There the a is taken that suits the
points of all schemes with as many heads on a rank best, each with b and c of its own; b and c are fitted anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ds_hydra.costs.peak import SEEN
from ds_hydra.profiling.entry import SchemeEntry, StageEntry
from ds_hydra.profiling.fit import Floats, Point, fit_points, nonnegative_least_squares
from ds_hydra.profiling.split_fit import fit_split

_HALVINGS = 60  # of the range in which the shared a is sought


def with_shared_squares(entries: Sequence[SchemeEntry]) -> tuple[SchemeEntry, ...]:
    """The entries, those with stages whose squares are hardly seen with a shared a [Note: shared squares]."""
    found = []
    for entry in entries:
        alike = [stage for other in entries if _heads(other) == _heads(entry) for stage in other.stages]
        if len(alike) == len(entry.stages) or all(map(_is_seen, entry.stages)):
            found.append(entry)
            continue
        of_layer = _shared(alike)
        stages = (stage if _is_seen(stage) else _with_square(stage, of_layer) for stage in entry.stages)
        found.append(replace(entry, stages=tuple(stages)))
    return tuple(found)


def _heads(entry: SchemeEntry) -> int:
    """Ranks that share the heads."""
    return entry.scheme.tp * entry.scheme.sp


def _is_seen(stage: StageEntry) -> bool:
    """Whether the square is a good part of the time of the longest sequence that was fitted."""
    longest = max((p for p in stage.points if len(p.lengths) == 1 and not p.held_out), key=lambda p: p.lengths)
    return stage.fit.a * longest.terms[0] >= SEEN * stage.fit.predict(longest)


def _with_square(stage: StageEntry, of_layer: float) -> StageEntry:
    fit = fit_points(stage.points, a=of_layer * stage.num_layers, floor=stage.fit.floor > 0.0)
    return replace(stage, fit=fit, split=fit_split(stage.split_points, fit), shared_square=True)


def _shared(stages: Sequence[StageEntry]) -> float:
    """The a of a layer with the least squares over the points of all stages, ms a token^2."""
    used = [[p for p in stage.points if not p.held_out and stage.fit.line(p) >= stage.fit.floor] for stage in stages]
    # The least over b and c is convex in a, so thirds of a range close in on it; no point leaves more for a than this.
    low, high = 0.0, max(p.ms / p.terms[0] / stage.num_layers
                         for stage, points in zip(stages, used, strict=True) for p in points)  # fmt: skip

    def loss(of_layer: float) -> float:
        return sum(_loss(points, of_layer * stage.num_layers) for stage, points in zip(stages, used, strict=True))

    for _ in range(_HALVINGS):
        left, right = (2.0 * low + high) / 3.0, (low + 2.0 * high) / 3.0
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return (low + high) / 2.0


def _loss(points: Sequence[Point], a: float) -> float:
    """Least sum of relative errors, squared, with this a."""
    terms, times = np.array([point.terms for point in points]), np.array([point.ms for point in points])
    matrix: Floats = terms[:, 1:] / times[:, None]
    target = 1.0 - a * terms[:, 0] / times
    residual = matrix @ nonnegative_least_squares(matrix, target) - target
    return float(residual @ residual)
