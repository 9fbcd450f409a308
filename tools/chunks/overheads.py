"""Time of a pipeline over its pure work, by schedule and scheme, for batches of the planner's benchmark.

Pure work is the sum of a*l^2 + b*l. A pipeline gets as many tokens as its share of the GPUs is of a step, in sequences
that its scheme holds as a whole, so that all schedules run the same ones; each finds its own best micro-batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner.cutting import Effort, Pipe, cut_best
from tools.bench_planner import DATA, Workload


class Variant(NamedTuple):
    """A row of the table."""

    name: str
    schedule: str
    parts: int
    slices: bool


VARIANTS = (
    Variant("1F1B, whole", "1f1b", 1, False),
    Variant("1F1B, slices", "1f1b", 1, True),
    Variant("list, whole", "list", 1, False),
    Variant("ZB-H1, slices", "zb-h1", 1, True),
    Variant("list, slices", "list", 1, True),
    Variant("V, whole", "list", 2, False),
    Variant("V, slices", "list", 2, True),
)
SCHEMES = ("tp2pp4", "pp4", "tp4pp2", "tp4pp4", "tp2pp6", "tp2pp2")
QUICK_SCHEMES = SCHEMES[:2]
AIMS = {("list, slices", "tp2pp4"): 1.20, ("V, slices", "tp2pp4"): 1.16}
THOROUGH, QUICK = Effort(40, 60), Effort(30, 30)


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
    """A row for each variant: scheme -> mean of time / pure work over all pipelines of the batches."""
    work = Workload.of("32b", next(iter(DATA)), 64)
    batches = [batch.tolist() for batch in work.batches(1 if quick else 10)]
    return [
        {"schedule": variant.name, **{
            name: _overhead(work.table, name, variant, batches, QUICK if quick else THOROUGH)
            for name in (QUICK_SCHEMES if quick else SCHEMES)
        }} for variant in VARIANTS
    ]  # fmt: skip


def _overhead(table: CostTable, name: str, variant: Variant, batches: list[list[int]], effort: Effort) -> float:
    scheme = ParallelScheme.parse(name)
    cost = table[scheme]
    pipe = Pipe(cost, table.shares(scheme), variant.schedule, variant.parts, variant.slices)
    found = []
    for batch in batches:
        for lengths in dealt(batch, cost):
            best = cut_best(pipe, range(len(lengths)), lengths, effort=effort)
            assert best is not None, f"{name} holds each of {lengths}"
            found.append(best.us / 1e3 / float(cost.sequence_ms(lengths).sum()))
    return statistics.fmean(found)
