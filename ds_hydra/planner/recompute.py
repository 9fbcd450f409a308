"""Micro-batches that do not fit a stage in; the least layers to compute again, so that they do, out. Pure: no torch.

[Note: layers computed again]
A layer of a micro-batch that the backward computes again (activation checkpointing) keeps little more than its input
meanwhile, and costs a forward. Which micro-batches live at one time follows from the schedule: all slices of a sequence
do, with what stands between them. Each such group, a window, must fit the room of a stage:

  minimise   sum over micro-batches m of  F_m * c_m             F_m: milliseconds of one layer's forward
  so that    sum over m in a window of    saved_m * c_m  >=  what the window has too much
  and        c_m is one of 0, 1, ..., layers of a stage

The plan's own search chooses by a simpler rule, which suits its schedule [Note: layers of a run].

The later a slice, the longer its forward takes, for its tokens attend to more, while they save no more than others. So
layers of early slices are computed again first. An example with one window of three slices of 4K tokens, of which a
layer takes 4, 5 and 6 ms, saves 1 unit, and there are 4: for 6 units c is 4, 2, 0 and costs 16 + 10 = 26 ms.

InfiniPipe (arXiv 2509.21275, Eq. 20) lets c differ between the stages of a micro-batch too, so that one variable
stands for what runs at one time in the stages of a 1F1B pipeline: the k-th backward of stage p (from 1) of S computes
C[k + S - p] layers again, and the pipeline loses the sum of C. `diagonal_problem` states that, for comparison; a plan
has one share for a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.actions import Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import orders, weighs
from ds_hydra.plan.phase import MicroBatchPlan
from ds_hydra.plan.works import batches_of
from ds_hydra.planner.exact.highs import solve_milp
from ds_hydra.planner.kernels.arrays import Floats, Ints

_ROUNDING = 1e-9  # of a window's excess


class Scheduled(NamedTuple):
    """Micro-batches of a pipeline, each with the one that it follows, and what their schedule is made from."""

    microbatches: tuple[MicroBatchPlan, ...]
    before: tuple[int, ...]  # [Note: chains]
    cost: SchemeCost
    shares: Shares
    schedule: str = "list"
    parts: int = 1  # ranges of layers of a stage

    def batches(self) -> Batches:
        """As a schedule wants them."""
        return batches_of(self.microbatches, self.before, self.cost, self.shares, parts=self.parts)

    def recomputing(self, shares: Iterable[float]) -> Scheduled:
        """The same with these shares of layers computed again."""
        batches = zip(self.microbatches, shares, strict=True)
        return self._replace(microbatches=tuple(replace(batch, recompute=share) for batch, share in batches))


class Covering(NamedTuple):
    """Minimise cost @ c over whole 0 <= c <= layers with saved @ c >= missing [Note: layers computed again]."""

    cost: Floats  # (variables,) of one layer
    saved: Floats  # (windows, variables) units of memory by one layer; 0 where the variable is not in the window
    missing: Floats  # (windows,) units, all above 0
    layers: int


def recomputed(made: Scheduled, layers: int) -> Scheduled | None:
    """The micro-batches with the shares of `layers`, those of a stage, that are computed again so that all fits.

    As few as the fast method finds. None where it does not fit with all of them.
    """
    found = cover(covering(made, layers))
    return None if found is None else made.recomputing((found / layers).tolist())


def covering(made: Scheduled, layers: int) -> Covering:
    """Which layers to compute again, with a variable for each micro-batch."""
    whole, again = _kept_all_or_none(made)
    saved = _saved(whole, again, layers)
    found = _windows(made, whole)
    cost = np.array([work.forward / layers for work in whole.works])
    problem = _problem(found, whole, lambda _, m: m, (cost, saved), layers)
    # A layer keeps everything while it is computed again: what one saves must be free on top.
    return problem._replace(missing=problem.missing + problem.saved.max(axis=1, initial=0.0) / made.parts)


def diagonal_problem(made: Scheduled, layers: int) -> Covering:
    """Eq. 20 of InfiniPipe: a variable for each diagonal of a 1F1B pipeline; all cost the same."""
    whole, again = _kept_all_or_none(made)
    num_stages = made.cost.scheme.pp
    made_orders = orders("1f1b", whole, num_stages)
    of_backward = {m: k for k, m in enumerate(a.microbatch for a in made_orders[0] if a.kind == "backward")}
    windows = [(stage, live) for stage, order in enumerate(made_orders) for live in _live_sets(order)]
    cost = np.ones(len(whole) + num_stages - 1)

    def diagonal(stage: int, microbatch: int) -> int:
        return of_backward[microbatch] + num_stages - 1 - stage

    return _problem(windows, whole, diagonal, (cost, _saved(whole, again, layers)), layers)


def cover(problem: Covering) -> Ints | None:
    """A fast solution: layers of each variable. None if all of them are not enough.

    Layer by layer the one that saves the most of what is missing for its cost; then one layer is taken back and the gap
    filled anew, as long as that makes it cheaper.
    """
    layers = np.zeros(len(problem.cost), dtype=np.int64)
    if (problem.saved.sum(axis=1, initial=0.0) * problem.layers < problem.missing * (1.0 - _ROUNDING)).any():
        return None
    best = _filled(problem, layers)
    while True:
        others = [_filled(problem, best, without=v) for v in np.flatnonzero(best).tolist()]
        cheapest = min(others, key=lambda found: float(problem.cost @ found), default=best)
        if problem.cost @ cheapest >= problem.cost @ best:
            return best
        best = cheapest


def cover_exactly(problem: Covering, *, seconds: float | None = None) -> tuple[Ints, float] | None:
    """HiGHS's layers of each variable, and its bound on the least cost. None if it found nothing.

    The reference for `cover`; it needs up to seconds.
    """
    windows, variables = problem.saved.shape
    # Scaled, so that coefficients are near 1: a window misses 1, and a layer costs about 1.
    scale = float(problem.cost.mean())
    shares = problem.saved / problem.missing[:, None]
    rows = [[(int(v), float(row[v])) for v in np.flatnonzero(row)] for row in shares]
    found = solve_milp(
        problem.cost / scale, np.full(variables, float(problem.layers)), rows, [1.0] * windows, [np.inf] * windows,
        integers=variables, seconds=seconds,
    )  # fmt: skip
    return None if (point := found.point) is None else (np.rint(point).astype(np.int64), found.bound * scale)


def _filled(problem: Covering, begin: Ints, without: int | None = None) -> Ints:
    """A solution: `begin` with layers added until nothing is missing, less those that are then too many; `begin` itself
    if there is none. The variable `without` gives one layer away and gets none."""
    layers, most = begin.copy(), np.full(len(begin), problem.layers)
    if without is not None:
        layers[without] -= 1
        most[without] = layers[without]
    eps = _ROUNDING * problem.missing
    missing = problem.missing - problem.saved @ layers
    while (missing > eps).any():
        useful = np.minimum(problem.saved, np.maximum(missing, 0.0)[:, None]) / problem.missing[:, None]
        gain = np.where(layers < most, useful.sum(axis=0), 0.0) / problem.cost
        if gain.max() <= 0.0:
            return begin  # the variable that gave one away was needed
        layers[gain.argmax()] += 1
        missing = problem.missing - problem.saved @ layers
    for v in np.argsort(-problem.cost, kind="stable"):
        while layers[v] and (missing + problem.saved[:, v] <= eps).all():
            layers[v] -= 1
            missing = missing + problem.saved[:, v]
    return layers


def _kept_all_or_none(made: Scheduled) -> tuple[Batches, Batches]:
    """What a schedule is told if no layer is computed again, and if all are."""
    none, every = (made.recomputing([share] * len(made.microbatches)).batches() for share in (0.0, 1.0))
    return none, every


def _saved(whole: Batches, again: Batches, layers: int) -> Floats:
    return np.array([(one.kept - few.kept) / layers for one, few in zip(whole.works, again.works, strict=True)])


def _windows(made: Scheduled, batches: Batches) -> list[tuple[int, frozenset[int]]]:
    """(stage, micro-batches that live there at one time); the schedules that look at the room reserve it for runs."""
    if weighs(made.schedule):
        return [(0, frozenset(run)) for run in batches.runs]
    of_stages = orders(made.schedule, batches, made.cost.scheme.pp)
    return [(stage, live) for stage, order in enumerate(of_stages) for live in _live_sets(order)]


def _live_sets(order: Order) -> Iterable[frozenset[int]]:
    """The micro-batches whose forward has begun and whose last use has not, where these are the most."""
    live: set[int] = set()
    last = {action.microbatch: position for position, action in enumerate(order)}
    grown = False
    for position, (kind, microbatch, _) in enumerate(order):
        if kind == "forward":
            live.add(microbatch)
            grown = True
        elif last[microbatch] == position:
            if grown:
                yield frozenset(live)
            live.remove(microbatch)
            grown = False


def _problem(
    windows: Sequence[tuple[int, frozenset[int]]],
    batches: Batches,
    variable: Callable[[int, int], int],
    figures: tuple[Floats, Floats],
    layers: int,
) -> Covering:
    """The windows with too much, with `variable(stage, micro-batch)` standing for a micro-batch; each once."""
    cost, saved = figures
    rows: dict[tuple[tuple[int, float], ...], float] = {}
    for stage, live in windows:
        missing = batches.parts * sum(batches.works[m].kept for m in live) - batches.room
        if missing > 0:
            rows[tuple(sorted((variable(stage, m), batches.parts * float(saved[m])) for m in live))] = float(missing)
    matrix = np.zeros((len(rows), len(cost)))
    for at, row in enumerate(rows):
        for column, units in row:
            matrix[at, column] = units
    return Covering(cost, matrix, np.array(list(rows.values())), layers)
