"""Measured micro-batches in; a, b, c of one scheme, with residuals and what the points cannot tell, out. Pure.

[Note: fit]
T = a * sum(l^2) + b * sum(l) + c with a, b, c >= 0 (Hydraulis, appendix C.2). Timing noise grows with the time, so
residuals are relative; points that a passing disturbance slowed are weighed down by Huber's rule. A coefficient
is identifiable when the points fix it to within 5%: 3 standard errors are no more than that.

A device that waits for its host to launch kernels takes no less than the launches do, whatever the tokens: of packs of
256, 1024, 2048, 4096 and 8192 tokens that take 70, 85, 84, 106 and 175 ms the first three show a floor of 84 ms, and a
line through all of them would be off by 7 to 8 % at four. There the floor is the median of the shortest packs, as
many of them as leave the least error of all, and a, b and c are fitted to the rest.

A last stage whose logits pass one block computes its head twice: from there on a token costs r more. With a small
vocabulary that step lies at common lengths, so it is fitted apart and not smeared over a, b and c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ds_hydra.zero_hetero.errors import PlanError

Floats = NDArray[np.float64]
NAMES = ("a", "b", "c")
_HUBER = 1.345  # of robust standard deviations: 95% efficient on clean normal noise
_ROUNDS = 50
_CONFIDENCE = 3.0  # standard errors
_WITHIN = 0.05  # what "identifiable" promises
_FLOOR_GAIN = 0.8  # a floor is a number more: it has to bring the errors down to this share
_LEAST_NOISE = 1e-4  # clocks are no better than this share of what they measure


@dataclass(frozen=True, slots=True)
class Point:
    """One measured micro-batch: tokens of its sequences and milliseconds of one stage, forward plus backward."""

    lengths: tuple[int, ...]
    ms: float
    compute_ms: float = 0.0  # of `ms`, measured
    comm_ms: float = 0.0  # of `ms`, from link figures; 0 where collectives really ran
    spread: float = 0.0  # (median - least) / least of the repeats
    held_out: bool = False  # kept from the fit, to test it
    chunked: bool = False  # the loss was computed in blocks, its head twice; cost tables hold it by this name
    start: int = 0  # tokens of the first sequence before these, of which they are a slice

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """What a, b, c and r are multiplied by."""
        tokens = float(sum(self.lengths))
        squares = float(sum(n * n for n in self.lengths) + 2 * self.start * self.lengths[0])
        return squares, tokens, 1.0, tokens if self.chunked else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients (ms per token^2, ms per token, ms) and how far to trust them; errors are shares of the time."""

    a: float
    b: float
    c: float
    standard_errors: tuple[float | None, ...]  # of a, b, c, in their own units; None: the points say nothing of it
    unidentified: tuple[str, ...]  # names of coefficients that the points do not fix to within 5%
    residual_median: float
    residual_worst: float
    held_out_median: float | None = None
    held_out_p90: float | None = None
    r: float = 0.0  # ms per token, on top where the loss is computed in blocks
    floor: float = 0.0  # ms that every micro-batch takes

    def line(self, point: Point) -> float:
        """Milliseconds of a micro-batch by a, b, c and r."""
        return math.fsum(k * x for k, x in zip((self.a, self.b, self.c, self.r), point.terms, strict=True))

    def predict(self, point: Point) -> float:
        """Milliseconds of a micro-batch."""
        return max(self.floor, self.line(point))

    def error(self, point: Point) -> float:
        """(predicted - measured) / measured."""
        return self.predict(point) / point.ms - 1.0


def fit_points(points: Sequence[Point], *, a: float | None = None, floor: bool = False) -> Fit:
    """Fit the points that are not held out; test on those that are. PlanError for fewer than two lengths.

    With an `a` that others have fixed, in ms per token^2, only the rest is fitted. `floor`: there may be one.
    """
    used = sorted((point for point in points if not point.held_out), key=lambda point: point.terms[1])
    tested = [point for point in points if point.held_out]
    for point in points:
        if not (point.ms > 0 and math.isfinite(point.ms)) or not point.lengths:
            raise PlanError(
                f"fit: a micro-batch of lengths {point.lengths} took {point.ms} ms; every point needs sequences and a "
                "time above 0 ms. Measure again, with longer sequences if the clock is too coarse for these"
            )
    if len({sum(point.lengths) for point in used}) < 2:
        raise PlanError(
            f"fit: needs at least two different lengths but has {len(used)} points of "
            f"{sorted({sum(point.lengths) for point in used})} tokens; measure more lengths"
        )
    terms = np.array([point.terms for point in used])
    times = np.array([point.ms for point in used])
    below = _num_below_line(terms, times, a) if floor else 0
    least = float(np.median(times[:below])) if below else 0.0
    relative = (terms / times[:, None])[below:]
    if a is None:
        coefficients, weights = _robust(relative, np.ones(len(relative)))
        errors = _standard_errors(relative, coefficients, weights)
    else:
        left = 1.0 - a * relative[:, 0]
        rest, weights = _robust(relative[:, 1:], left)
        coefficients = np.array([a, *rest])
        errors = np.array([math.inf, *_standard_errors(relative[:, 1:], rest, weights, left)])
    unidentified = tuple(
        name
        for name, one, error in zip(NAMES, coefficients, errors, strict=False)
        if one <= 0 or _CONFIDENCE * error > _WITHIN * one
    )
    a, b, c, r = (float(x) for x in coefficients)
    known = tuple(float(e) if math.isfinite(e) else None for e in errors[:3])
    fit = Fit(a, b, c, known, unidentified, 0.0, 0.0, r=r, floor=least)
    residuals, held = (np.array([abs(fit.error(point)) for point in some]) for some in (used, tested))
    return replace(
        fit,
        residual_median=float(np.median(residuals)),
        residual_worst=float(residuals.max()),
        held_out_median=float(np.median(held)) if len(held) else None,
        held_out_p90=float(np.quantile(held, 0.9)) if len(held) else None,
    )


def _num_below_line(terms: Floats, times: Floats, a: float | None) -> int:
    """Of points in the order of their tokens, how many are at a floor [Note: fit]; 0 where none pays."""
    relative, fixed = terms / times[:, None], a or 0.0
    best, best_loss = 0, math.inf
    for below in (0, *range(2, len(times))):
        if below and (len(times) - below < 3 or terms[below, 1] == terms[-1, 1]):
            break  # no line is known by what is left
        left = 1.0 - fixed * relative[below:, 0]
        free = relative[below:, 1:] if a is not None else relative[below:]
        rest = nonnegative_least_squares(free, left)
        line = terms @ (rest if a is None else np.array([fixed, *rest]))
        # Errors as they are and not squared: one disturbed point is not to decide it.
        loss = float(np.abs(np.maximum(np.median(times[:below]) if below else 0.0, line) / times - 1.0).sum())
        if loss < (best_loss if best else _FLOOR_GAIN * best_loss):
            best, best_loss = below, loss
    return best


def _robust(relative: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Coefficients for `relative @ k = target` by iteratively reweighted non-negative least squares; weights."""
    # Solve, weigh each point by how far it is off in units of the typical error, solve again. A point 10 typical errors
    # off, as a passing disturbance leaves it, gets a weight of 1.345 / 10. The typical error is taken from the median,
    # which such points do not move; 1.4826 makes it a standard deviation where errors are normal.
    weights = np.ones(len(relative))
    coefficients = nonnegative_least_squares(relative, target)
    for _ in range(_ROUNDS):
        residuals = relative @ coefficients - target
        scale = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(residuals))))
        weights = np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(residuals), 1e-300))
        root = np.sqrt(weights)
        again = nonnegative_least_squares(relative * root[:, None], root * target)
        settled = np.allclose(again, coefficients, rtol=1e-9, atol=0.0)
        coefficients = again
        if settled:
            break
    return coefficients, weights


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """argmin |matrix @ k - target|^2 over k >= 0, exact for few columns: (points, columns), (points,) -> (columns,).

    The optimum is the unconstrained one of some subset of columns: with three columns there are seven.
    """
    # sum(l^2) is some 10^4 times sum(l): columns of one size, so that the rank is told from rounding.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    best, best_loss = np.zeros(matrix.shape[1]), float(target @ target)
    for size in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), size):
            chosen = scaled[:, columns]
            k, _, rank, _ = np.linalg.lstsq(chosen, target, rcond=None)
            if rank < size or (k < 0).any():
                continue
            residual = chosen @ k - target
            loss = float(residual @ residual)
            if loss < best_loss:
                best, best_loss = np.zeros(matrix.shape[1]), loss
                best[list(columns)] = k
    return best / scale


def _standard_errors(relative: Floats, coefficients: Floats, weights: Floats, target: Floats | float = 1.0) -> Floats:
    """Standard errors of the coefficients; infinite where the points say nothing."""
    # A column of zeros, such as r where no loss is computed in blocks, would make the matrix singular: leave it out.
    known = np.asarray((relative != 0).any(axis=0))
    if not known.all():
        errors = np.zeros(len(known))
        errors[known] = _standard_errors(relative[:, known], coefficients[known], weights, target)
        return errors
    num_points, num_terms = relative.shape
    if num_points <= num_terms:
        return np.full(num_terms, math.inf)
    residuals = relative @ coefficients - target
    freedom = max(1.0, float(weights.sum()) - num_terms)
    robust = 1.4826 * float(np.median(np.abs(residuals)))
    variance = max(_LEAST_NOISE**2, robust**2, float((weights * residuals**2).sum()) / freedom)
    scale = np.linalg.norm(relative, axis=0)
    scaled = relative / scale
    normal = scaled.T @ (scaled * weights[:, None])
    if np.linalg.cond(normal) > 1e12:
        return np.full(num_terms, math.inf)
    return np.sqrt(variance * np.diag(np.linalg.inv(normal))) / scale
