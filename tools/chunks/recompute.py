"""Layers to compute again where sequences are longer than a stage has room for: the fast method beside HiGHS.

One long sequence and some short ones stand in micro-batches of several profiles, for 32B LLaMA on A800. "Eq. 20" counts
layers of InfiniPipe's diagonals under 1F1B; "by micro-batch" counts what the forwards of layers cost that the list
order, the schedule of plans, needs computed again, and compares it with all layers of all micro-batches; "planner" is
the same for the simpler rule of the planner's search.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.list_walk import NEVER
from ds_hydra.pipe.schedules.orders import list_us
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import kernels
from ds_hydra.planner.cutting import (
    Covering,
    Effort,
    Scheduled,
    cover,
    cover_exactly,
    covering,
    cut_best,
    diagonal_problem,
    longest_of,
    microbatches_of,
    pipe_of,
    profiles_of,
    recomputed,
)
from ds_hydra.planner.kernels.cut_search import list_time
from ds_hydra.planner.kernels.problem import Floats
from tools import aims

LAYERS = 60  # of the model
SCHEMES = ("tp4pp4", "tp2pp4", "tp8pp2", "tp4pp6")
SLOTS = (6, 10, 17)
SHORT = (900, 2500, 400, 4000, 1500, 700)
_SECONDS = 2.0, 20.0  # for one solution, quick and not


def recompute_gaps(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each scheme: gaps of the fast method, its time, and what shares save against computing all again."""
    table = CostTable.load(shipped("a800-32b"))
    rows = []
    for name in SCHEMES[: 2 if quick else None]:
        scheme = ParallelScheme.parse(name)
        cost, shares = table[scheme], table.shares(scheme)
        layers = LAYERS // scheme.pp
        cases = list(_cases(cost, shares, (0.3,) if quick else (0.05, 0.3, 0.6, 0.95)))
        eq20 = [_gaps(diagonal_problem(made, layers), quick)[0] for made, _ in cases]
        both = [_gaps(covering(made, layers), quick, layers * again) for made, again in cases]
        ours, planned = ([gaps[i] for gaps in both] for i in (0, 1))
        began = time.process_time()
        found = [recomputed(made, layers) for made, _ in cases]
        ms = 1e3 * (time.process_time() - began) / len(cases)
        ratios = [_time(some) / _time(_all_again(made)) for some, (made, _) in zip(found, cases, strict=True)]
        rows.append({
            "scheme": name, "cases": len(cases), "longest": longest_of(cost, shares),
            "all again": longest_of(cost, shares, layers=layers),
            "Eq. 20 gap": statistics.fmean(eq20), "worst": max(eq20), "by micro-batch gap": statistics.fmean(ours),
            "its worst": max(ours), "planner gap": statistics.fmean(planned), "ms": ms,
            "time / all again": statistics.fmean(ratios),
        })  # fmt: skip
        for what, gaps in (("Eq. 20", eq20), ("by micro-batch", ours), ("the planner", planned)):
            if statistics.fmean(gaps) > aims.RECOMPUTED_GAP:
                missed.append(
                    f"{name}: gap of {what} {statistics.fmean(gaps):.2%} in the mean, not <= {aims.RECOMPUTED_GAP:.0%}"
                )
    return rows


def _cases(cost: SchemeCost, shares: Shares, between: tuple[float, ...]) -> Iterator[tuple[Scheduled, Floats]]:
    """Micro-batches with a sequence whose length lies between what fits without and with all layers again, and the
    shares of their layers that the planner chooses."""
    pipe = pipe_of(cost, shares, layers=LAYERS // cost.scheme.pp)
    endless = pipe._replace(room=16 * pipe.room)
    for share in between:
        least = longest_of(cost, shares)
        longest = int(least + share * (longest_of(cost, shares, layers=LAYERS // cost.scheme.pp) - least))
        held = [int(0.9 * longest), *(length for length in SHORT if length <= cost.max_length)]
        tokens = np.array(sorted(held, reverse=True), dtype=np.int64)
        for profile in profiles_of(pipe, tokens):
            if profile.slots in SLOTS:
                found = cut_best(
                    kernels.compiled(), endless, cost.sequence_ms(tokens), tokens,
                    profiles=[profile], effort=Effort(0, 0),
                )  # fmt: skip
                assert found is not None, "short sequences fit a micro-batch"
                batches = microbatches_of(found.pieces, range(len(tokens)))
                made = Scheduled(batches, tuple(found.pieces.before[: len(batches)].tolist()), cost, shares)
                if list_time(pipe, found.pieces, NEVER) < NEVER:
                    yield made, found.pieces.again[: len(batches)].copy()


def _gaps(problem: Covering, quick: bool, *others: Floats) -> list[float]:
    """Cost of the fast solution, and of others, over the bound that HiGHS proves, less 1."""
    fast, exact = cover(problem), cover_exactly(problem, seconds=_SECONDS[not quick])
    assert fast is not None, "the case can be solved with all layers again"
    assert exact is not None, "HiGHS finds a solution where the fast method does"
    for layers in (fast, *others):
        assert (problem.saved @ layers >= problem.missing * (1 - 1e-6)).all(), "nothing is missing"
    return [float(problem.cost @ layers) / exact[1] - 1.0 if exact[1] > 0 else 0.0 for layers in (fast, *others)]


def _all_again(made: Scheduled) -> Scheduled:
    return made.recomputing([1.0] * len(made.microbatches))


def _time(made: Scheduled | None) -> int:
    assert made is not None, "the case fits"
    return list_us(made.batches(), made.cost.scheme.pp)
