"""Measured parts of micro-batches and the fit of their whole time in; the shares of a scheme's costs out. Pure.

[Note: fit of shares]
A micro-batch of T = a*x + b*y + c, with x = sum(l^2) and y = sum(l), spends F / T of its time in the forward. What it
spends there of each term is that term's share, so

  F / T = f_a * (a*x / T) + f_b * (b*y / T) + f_c * (c / T)

where the parts in brackets are known and add up to 1. An example with a*x = 1, b*y = 6 and c = 1 ms: of T = 8 ms, F =
2.75 ms are 34 %. With f_a = f_c = 1/3 that leaves f_b = (0.34 - 1/24 - 1/24) / 0.75 = 35 %. The weights' gradients are
fitted in the same way, where a has no share: attention has no weights.

A term that is small in all micro-batches says little about its share. Then the usual share holds, towards which all are
drawn by a thousandth of what one micro-batch weighs. And no share is outside of what kernels could take: a forward of
100 % of a and 0 % of b, say, is what noise leaves of two columns that are nearly alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.profiling.fit import Fit, Floats, Point

_DRAWN = 1e-3  # towards the usual shares, in micro-batches
_FORWARD, _WEIGHT = (0.15, 0.6), (0.0, 0.6)  # least and most of any term; about a third is usual
_ROUNDS = 300


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """One micro-batch with its backward split: whole sequences, or a slice that has `start` tokens before it; ms."""

    lengths: tuple[int, ...]
    start: int
    forward: float
    backward: float  # the gradient of the input
    weight: float
    held_out: bool = False
    chunked: bool = False  # as in `Point`

    @property
    def ms(self) -> float:
        return self.forward + self.backward + self.weight

    @property
    def point(self) -> Point:
        """The same as a whole; of a slice sum(l^2) is (start + l)^2 - start^2."""
        return Point(self.lengths, self.ms, held_out=self.held_out, chunked=self.chunked, start=self.start)


@dataclass(frozen=True, slots=True)
class SplitFit:
    """Shares of a, b and c in forward and weights' gradients, and how far off they are.

    `held_out` is the median error of a part, as a share of that part, in micro-batches of whole sequences that were not
    fitted; `slices` that of the whole time of slices with context, and `slice_parts` that of their parts. None where
    there were none.
    """

    forward: Terms
    weight: Terms
    held_out: float | None
    slices: float | None
    slice_parts: float | None


def fit_split(points: Sequence[SplitPoint], fit: Fit) -> SplitFit | None:
    """Fit the points that are not held out; test on those that are. None without any [Note: fit of shares]."""
    used = [point for point in points if not point.held_out and point.ms > 0.0]
    if not used:
        return None
    parts = np.array([_composition(point, fit) for point in used])
    usual = Shares.usual()
    forward = _fractions(parts, [point.forward / point.ms for point in used], usual.forward, _FORWARD)
    of_weight = _fractions(parts[:, 1:], [point.weight / point.ms for point in used], usual.weight[1:], _WEIGHT)
    weight = np.minimum([0.0, *of_weight], 1.0 - forward)  # what is left is the input's gradient
    whole = [point for point in points if point.held_out and not point.start]
    slices = [point for point in points if point.start and point.ms > 0.0]
    return SplitFit(
        Terms(*forward.tolist()),
        Terms(*weight.tolist()),
        _median([error for point in whole for error in _part_errors(point, fit, forward, weight)]),
        _median([abs(fit.error(point.point)) for point in slices]),
        _median([error for point in slices for error in _part_errors(point, fit, forward, weight)]),
    )


def _composition(point: SplitPoint, fit: Fit) -> list[float]:
    """Shares of a, b and c in the predicted time; a floor is made of launches, as c is."""
    squares, tokens, one, again = point.point.terms
    terms = (fit.a * squares, fit.b * tokens + fit.r * again, fit.c * one)
    if sum(terms) < fit.floor:
        return [0.0, 0.0, 1.0]
    return [term / sum(terms) for term in terms]


def _fractions(parts: Floats, shares: Sequence[float], usual: Sequence[float], bounds: tuple[float, float]) -> Floats:
    """Shares k of columns, within bounds, with `parts @ k` near `shares`, and near `usual` where that says little."""
    normal = parts.T @ parts + _DRAWN * np.eye(parts.shape[1])
    wanted = parts.T @ np.array(shares) + _DRAWN * np.array(usual)
    found = np.array(usual)
    # One column after the other at its best within the bounds, which comes to the least squares: they are convex.
    for _ in range(_ROUNDS):
        for column, scale in enumerate(np.diag(normal)):
            best = found[column] + (wanted[column] - normal[column] @ found) / scale
            found[column] = min(max(best, bounds[0]), bounds[1])
    return found


def _part_errors(point: SplitPoint, fit: Fit, forward: Floats, weight: Floats) -> list[float]:
    """Errors of the three parts if the whole time were known, as shares of each part."""
    parts = np.array(_composition(point, fit))
    predicted = (parts @ forward, parts @ (1.0 - forward - weight), parts @ weight)
    measured = (point.forward, point.backward, point.weight)
    return [abs(float(share) * point.ms / ms - 1.0) for share, ms in zip(predicted, measured, strict=True) if ms > 0.0]


def _median(errors: Sequence[float]) -> float | None:
    return statistics.median(errors) if errors else None
