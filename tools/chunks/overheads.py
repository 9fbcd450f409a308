"""Time of a pipeline over its pure work, by schedule and scheme, for batches of the planner's benchmark.

Pure work is the sum of a*l^2 + b*l. A pipeline gets as many tokens as its share of the GPUs is of a step, in sequences
that its scheme holds as a whole, so that all schedules run the same ones; each finds its own best micro-batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.cutting import Effort, cut_best, pipe_of
from tools.planner_workloads import DATA, Workload


class Variant(NamedTuple):
    """A row of the table; `parts` 0: 1F1B."""

    name: str
    parts: int
    slices: bool


VARIANTS = (
    Variant("1F1B, whole", 0, False),
    Variant("list, whole", 1, False),
    Variant("list, slices", 1, True),
    Variant("V, whole", 2, False),
    Variant("V, slices", 2, True),
)
SCHEMES = ("tp2pp4", "pp4", "tp4pp2", "tp4pp4", "tp2pp6", "tp2pp2")
QUICK_SCHEMES = SCHEMES[:1]
EFFORT = Effort(40, 200)


def dealt(lengths: list[int], cost: SchemeCost) -> Iterator[list[int]]:
    """The sequences that a scheme holds, longest first to the least loaded of its pipelines."""
    held = sorted((length for length in lengths if length <= cost.max_length), reverse=True)
    share = 3125 * cost.scheme.num_ranks
    pipelines: list[list[int]] = [[] for _ in range(max(1, round(sum(held) / share)))]
    loads = [0.0] * len(pipelines)
    for length, ms in zip(held, cost.sequence_ms(held).tolist(), strict=True):
        least = loads.index(min(loads))
        loads[least] += ms
        pipelines[least].append(length)
    return iter(pipelines)


def overheads(quick: bool) -> list[dict[str, Any]]:
    """A row for each variant and kind of data: scheme -> mean of time / pure work over all pipelines of the batches."""
    rows: list[dict[str, Any]] = []
    for data in list(DATA)[: 1 if quick else 3]:
        work = Workload.of("32b", data, 64)
        batches = [batch.tolist() for batch in work.batches(10)]
        names = QUICK_SCHEMES if quick else SCHEMES
        rows += [
            {"data": data, "schedule": variant.name}
            | {name: _overhead(work.table, name, variant, batches) for name in names}
            for variant in VARIANTS
        ]
    return rows


def _overhead(table: CostTable, name: str, variant: Variant, batches: list[list[int]]) -> float:
    scheme = ParallelScheme.parse(name)
    cost = table[scheme]
    found = []
    for batch in batches:
        for lengths in dealt(batch, cost):
            ms = _whole_ms(table, scheme, lengths) if not variant.parts else _list_ms(table, scheme, variant, lengths)
            found.append(ms / float(cost.sequence_ms(lengths).sum()))
    return statistics.fmean(found)


def _whole_ms(table: CostTable, scheme: ParallelScheme, lengths: list[int]) -> float:
    planner = Planner(table, [StrategyShape.of([scheme])], PlannerOptions(kernels="compiled"))
    return planner.plan(0, range(len(lengths)), lengths).predicted_ms


def _list_ms(table: CostTable, scheme: ParallelScheme, variant: Variant, lengths: list[int]) -> float:
    cost, tokens = table[scheme], np.array(lengths, dtype=np.int64)
    pipe = pipe_of(cost, table.shares(scheme), parts=variant.parts, slices=variant.slices)
    best = cut_best(kernels.compiled(), pipe, cost.sequence_ms(tokens), tokens, effort=EFFORT)
    assert best is not None, f"{scheme} holds each of {lengths}"
    return best.us / 1e3
