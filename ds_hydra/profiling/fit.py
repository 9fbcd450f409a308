"""A scheme's row of a cost table: the points to measure, and coefficients fitted to them. Pure: no torch.

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

Single sequences stand on a geometric ladder; packs of the same tokens in shorter sequences tell a from b. Every
other rung between is held out of the fit, to test it on lengths it has not seen. Some rungs run a second time with the
backward split, to time its parts; and with them slices of sequences, which no fit sees.

[Note: shared squares]
Attention takes a layer as long on as many heads and tokens, whatever the pipeline around it. So schemes of equal TP *
SP have one a of a layer. Where memory ends a scheme's points before the square is a fifth of the time, its own a is
mostly noise, and whoever extrapolates it to long sequences is off by factors. There the a is taken that suits the
points of all schemes with as many heads on a rank best, each with b and c of its own; b and c are fitted anew.

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

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.cost_table import SEEN, SchemeCost
from ds_hydra.costs.memory import Activations
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.zero_hetero.errors import ConfigError, PlanError


@dataclass(frozen=True, slots=True)
class Rung:
    """One micro-batch to measure: tokens of its sequences."""

    lengths: tuple[int, ...]
    held_out: bool
    start: int = 0  # tokens of the sequence before these, which are a slice of it


def make_ladder(shortest: int, longest: int, num_rungs: int) -> tuple[Rung, ...]:
    """Micro-batches of `shortest` up to `longest` tokens, shortest first.

    `num_rungs` single sequences for the fit, packs of every second of them in four sequences, packs of up to twice
    `longest` tokens, and held-out single sequences and packs between the rungs. ConfigError for a range without room.
    """
    if not 1 <= shortest < longest:
        raise ConfigError(f"lengths to measure: needs 1 <= shortest < longest but has {shortest} and {longest}")
    if num_rungs < 3:
        raise ConfigError(f"lengths to measure: three coefficients need at least 3 rungs, not {num_rungs}")
    # Equal ratios between lengths: from 128 to 8192 in four rungs 128, 512, 2048, 8192. Halfway between, on the same
    # scale, lie the lengths that are held out: 256, 1024, 4096.
    ratio = (longest / shortest) ** (1.0 / (num_rungs - 1))
    fitted = sorted({round(shortest * ratio**i) for i in range(num_rungs)})
    between = sorted({round(shortest * ratio ** (i + 0.5)) for i in range(num_rungs - 1)} - set(fitted))
    rungs = [Rung((n,), False) for n in fitted]
    # The same tokens in four sequences have a quarter of sum(l^2): only such pairs tell a from b.
    rungs += [Rung(split_evenly(n, 4), False) for n in fitted[1::2] if n >= 16]
    rungs += [Rung(split_evenly(longest * n // 4, n), n == 6) for n in (5, 6, 8)]
    rungs += [Rung((n,), True) if i % 2 == 0 else Rung(split_evenly(n, 3), True) for i, n in enumerate(between)]
    return tuple(sorted(rungs, key=lambda rung: (sum(rung.lengths), len(rung.lengths))))


def beyond_block(rungs: Sequence[Rung], block_tokens: int | None, most_tokens: int) -> tuple[Rung, ...]:
    """Packs above `block_tokens`, where the head is computed twice.

    None where the ladder has some, or where `block_tokens` are as many as a micro-batch of the job can ever have.
    """
    most, longest = max(sum(rung.lengths) for rung in rungs), max(max(rung.lengths) for rung in rungs)
    if block_tokens is None or most > block_tokens or block_tokens >= most_tokens:
        return ()
    # Two packs to fit by and one between them to test, all a little above the step in the head's time.
    totals = ((block_tokens * 9 // 8, False), (block_tokens * 5 // 4, True), (block_tokens * 11 // 8, False))
    return tuple(Rung(split_evenly(total, -(-4 * total // longest)), held_out) for total, held_out in totals)


def beyond_floor(rungs: Sequence[Rung], most_tokens: int) -> tuple[Rung, ...]:
    """Packs of twice to eight times the ladder's most tokens, up to `most_tokens`, each of long and of short sequences.

    For devices that may wait for their host's launches on all of the ladder, so that it tells nothing of the tokens.
    """
    most, longest = max(sum(rung.lengths) for rung in rungs), max(max(rung.lengths) for rung in rungs)
    packs = ((2, 1, False), (2, 4, False), (3, 1, True), (4, 1, False), (4, 4, True), (8, 1, False), (8, 4, False))
    return tuple(
        Rung(split_evenly(most * times, -(-most * times * parts // longest)), held_out)
        for times, parts, held_out in packs
        if most * times <= most_tokens
    )


def split_rungs(rungs: Sequence[Rung], block_tokens: int | None) -> tuple[Rung, ...]:
    """Micro-batches to run with the backward split, in rising order, and slices after them.

    Of the ladder every second one of the fit and every second one that is held out, as far as the head is computed once
    (if there are such). The slices are an eighth and a quarter of the longest sequence at its end, and a quarter that
    ends in its middle; all held out.
    """
    once = [rung for rung in rungs if block_tokens is None or sum(rung.lengths) <= block_tokens]
    once = once if len({sum(rung.lengths) for rung in once if not rung.held_out}) > 1 else list(rungs)
    chosen = [rung for held_out in (False, True) for rung in [r for r in once if r.held_out == held_out][::2]]
    longest = max(max(rung.lengths) for rung in rungs)
    ends = ((7 * longest // 8, longest), (3 * longest // 4, longest), (longest // 4, longest // 2))
    slices = [Rung((stop - start,), True, start) for start, stop in ends if 0 < start < stop]
    return (*sorted(chosen, key=lambda rung: (sum(rung.lengths), len(rung.lengths))), *slices)


def split_evenly(tokens: int, parts: int) -> tuple[int, ...]:
    """`tokens` in up to `parts` sequences that differ by one token at most."""
    parts = min(parts, tokens)
    return tuple(tokens // parts + (i < tokens % parts) for i in range(parts))


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


_DRAWN = 1e-3  # towards the usual shares, in micro-batches
_FORWARD, _WEIGHT = (0.15, 0.6), (0.0, 0.6)  # least and most of any term; about a third is usual
_SPLIT_ROUNDS = 300


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
    for _ in range(_SPLIT_ROUNDS):
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


How = Literal["ranks", "local shapes"]
UTILISED = 0.85  # of the best throughput: where UtilLen lies (Hydraulis, appendix D)


@dataclass(frozen=True)
class StageEntry:
    """One stage of a scheme: what was measured of it and its own coefficients."""

    index: int
    num_layers: int
    how: How
    points: tuple[Point, ...]
    fit: Fit
    block_tokens: int | None = None  # a micro-batch of more computes its head twice
    no_room_tokens: int | None = None  # tokens of the micro-batch at which the device ran out of memory
    split_points: tuple[SplitPoint, ...] = ()  # with the backward split
    split: SplitFit | None = None  # None: the model or the memory did not allow any
    shared_square: bool = False  # a is that of all schemes with as many heads on a rank [Note: shared squares]

    def record(self) -> dict[str, Any]:
        """As the table file holds it."""
        split = {} if self.split is None else {
            "split": asdict(self.split) | {"forward": self.split.forward._asdict(),
                                           "weight": self.split.weight._asdict()},
            "split_points": [asdict(point) for point in self.split_points],
        }  # fmt: skip
        return {
            "index": self.index,
            "num_layers": self.num_layers,
            "chunk_tokens": self.block_tokens,
            "no_room_tokens": self.no_room_tokens,
            "fit": asdict(self.fit),
            "points": [asdict(point) for point in self.points],
            **({"shared_square": True} if self.shared_square else {}),
            **split,
        }


@dataclass(frozen=True)
class SchemeEntry:
    """One scheme: its slowest stage's coefficients are the scheme's."""

    scheme: ParallelScheme
    stages: tuple[StageEntry, ...]
    clock: str
    scaled_links: bool  # some collective's time was scaled from a group of another size

    @property
    def slowest(self) -> StageEntry:
        """The stage with the largest load in the middle of the ladder, on a logarithmic scale."""
        # Which stage that is depends on the lengths: a large head weighs per token, c per micro-batch.
        probe = self.stages[0].points[len(self.stages[0].points) // 2]
        return max(self.stages, key=lambda stage: stage.fit.predict(probe))

    def cost(self, max_length: int, kept: Activations | None = None) -> SchemeCost:
        """The scheme's row of a cost table; `kept` tells what stays from a part of the backward to the next.

        With PP = 1 a plan fills its micro-batches, so their heads are computed twice if any are; with more it keeps
        them small. Where the device ran out of memory MaxLen is smaller, whatever the memory model says.
        """
        max_length = min([max_length, *(s.no_room_tokens - 1 for s in self.stages if s.no_room_tokens is not None)])
        fit, block = self.slowest.fit, self.slowest.block_tokens
        filled = self.scheme.pp == 1 and block is not None and max_length > block
        a, b = fit.a, fit.b + (fit.r if filled else 0.0)
        b = b if a or b else 1e-9  # a table refuses costs that do not grow with the length
        split, shares = self.slowest.split, None
        if split is not None and kept is not None:
            shares = kept.shares(split.forward, split.weight)
        derived = "a fitted with all schemes of as many heads on a rank" if self.slowest.shared_square else ""
        return SchemeCost(self.scheme, a, b, fit.c, max_length, utilised_length(fit, max_length), shares, derived,
                          floor=fit.floor)  # fmt: skip

    def record(self) -> dict[str, Any]:
        """As the table file holds it."""
        slowest = self.slowest
        return {
            "how": slowest.how,
            "clock": self.clock,
            "scaled_links": self.scaled_links,
            "slowest_stage": slowest.index,
            "held_out_median": slowest.fit.held_out_median,
            "held_out_p90": slowest.fit.held_out_p90,
            "unidentified": list(slowest.fit.unidentified),
            "stages": [stage.record() for stage in self.stages],
        }


def utilised_length(fit: Fit, max_length: int) -> int:
    """UtilLen: the fewest tokens with 85% of the best throughput l / T(l) up to `max_length`."""
    lengths = np.unique(np.geomspace(1, max_length, 512).astype(np.int64))
    rate = lengths / np.maximum(fit.floor, fit.a * lengths.astype(np.float64) ** 2 + fit.b * lengths + fit.c)
    return int(lengths[int(np.argmax(rate >= UTILISED * rate.max()))])


def entry_from_record(scheme: ParallelScheme, record: Mapping[str, Any]) -> SchemeEntry:
    """Inverse of `SchemeEntry.record`."""
    stages = tuple(_stage_from_record(stage, record["how"]) for stage in record["stages"])
    return SchemeEntry(scheme, stages, record["clock"], record["scaled_links"])


def _stage_from_record(stage: Mapping[str, Any], how: How) -> StageEntry:
    fit, split = stage["fit"], stage.get("split")
    lists = {key: tuple(fit[key]) for key in ("standard_errors", "unidentified")}
    points = (Point(**{**point, "lengths": tuple(point["lengths"])}) for point in stage["points"])
    in_parts = (SplitPoint(**{**p, "lengths": tuple(p["lengths"])}) for p in stage.get("split_points", ()))
    return StageEntry(
        stage["index"], stage["num_layers"], how, tuple(points), Fit(**{**fit, **lists}), stage.get("chunk_tokens"),
        stage.get("no_room_tokens"), tuple(in_parts),
        None if split is None else SplitFit(
            **{**split, "forward": Terms(**split["forward"]), "weight": Terms(**split["weight"])}
        ),
        stage.get("shared_square", False),
    )  # fmt: skip


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
