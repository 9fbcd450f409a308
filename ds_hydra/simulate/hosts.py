"""How hosts of reinforcement learning, such as TRL and verl, would deal out the sequences of a step, and its times.

[Note: hosts' ways]
A host such as TRL or verl deals the sequences of an update to data parallel ranks before it knows what they cost, and
each rank packs what it got into micro-batches. All ways here have the layouts of one scheme that hold the context, and
of these the best in hindsight; packs are as large as memory holds, and no token is padded, which favours the host:

  equal counts        each rank gets as many sequences as every other, in the order in which they were drawn
  equal tokens        each gets about as many tokens: the longest first, to the rank with the fewest (verl's balancing)
  dynamic context     a bound of it: sequences are shared among 1, 2, 4, ... pipelines of one scheme as suits the
  parallelism         step, the best such mix of each by our own planner, and its keys and values travel in no time

Pure: no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.fixed_layout import layouts_that_hold, packed, step_plan
from ds_hydra.planner.kernels.problem import Floats
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner

Lengths = Sequence[int]
Dealt = list[list[int]]  # positions in the step's batch, by rank
StepMs = Callable[[StepPlan, CostTable], float]  # by the costs that a plan was made with

_MOST_GROUPS = 3  # of one size in a step, beside pipelines that share nothing


EQUAL_COUNTS, EQUAL_TOKENS, SHARED = "equal counts", "equal tokens", "dynamic context parallelism without messages"
DEALT = (EQUAL_COUNTS, EQUAL_TOKENS)


class HostWay(NamedTuple):
    """How a host runs the steps: its layout, and their times in ms."""

    layout: str
    step_ms: Floats


def in_equal_counts(lengths: Lengths, ranks: int) -> Dealt:
    """As many sequences for each rank, in the order drawn: of five, rank 0 of 2 gets the first, third and fifth."""
    return [list(range(first, len(lengths), ranks)) for first in range(ranks)]


def in_equal_tokens(lengths: Lengths, ranks: int) -> Dealt:
    """About as many tokens for each rank."""
    dealt: Dealt = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for position in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        tokens, rank = heapq.heappop(loads)
        dealt[rank].append(position)
        heapq.heappush(loads, (tokens + lengths[position], rank))
    return dealt


def hosts_ways(
    table: CostTable, num_ranks: int, batches: Sequence[Lengths], context: int, options: PlannerOptions, step_ms: StepMs
) -> dict[str, HostWay]:
    """What the steps of these batches take by each of hosts' ways [Note: hosts' ways]; without those that no layout
    makes possible."""
    found: dict[str, HostWay] = {}
    for name, deal in ((EQUAL_COUNTS, in_equal_counts), (EQUAL_TOKENS, in_equal_tokens)):
        dealt = [
            (str(strategy), [_dealt(deal, step, batch, strategy, table) for step, batch in enumerate(batches)])
            for strategy in layouts_that_hold(table, num_ranks, context)
        ]
        found |= _best(name, [(text, [step_ms(plan, table) for plan in plans]) for text, plans in dealt])
    shared = []
    for text, mixed, strategies in _mixes(table, num_ranks, context):
        planner = Planner(mixed, strategies, replace(options, no_slices="hosts run whole sequences"))
        plans = (planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches))
        shared.append((text, [step_ms(plan, mixed) for plan in plans]))
    return found | _best(SHARED, shared)


def _best(name: str, tried: Sequence[tuple[str, Sequence[float]]]) -> dict[str, HostWay]:
    """The layout whose steps take the least in the mean."""
    ways = [HostWay(text, np.array(taken)) for text, taken in tried]
    return {name: min(ways, key=lambda way: fmean(way.step_ms))} if ways else {}


def _dealt(
    deal: Callable[[Lengths, int], Dealt], step: int, lengths: Lengths, strategy: StrategyShape, table: CostTable
) -> StepPlan:
    own, most = deal(lengths, len(strategy.pipelines)), table[strategy.pipelines[0]].max_length
    return step_plan(step, lengths, strategy, [packed(one, lengths, most) for one in own], table)


def _mixes(table: CostTable, num_ranks: int, context: int) -> Iterator[tuple[str, CostTable, list[StrategyShape]]]:
    """For each scheme: costs of groups of 1, 2, 4, ... of its pipelines, and mixes of such groups on all ranks."""
    for scheme in table.schemes:
        if not isinstance(scheme, ParallelScheme) or scheme.sp > 1 or num_ranks % scheme.num_ranks:
            continue
        units = num_ranks // scheme.num_ranks
        sizes = [1 << power for power in range(units.bit_length()) if units % (1 << power) == 0]
        needed = next((size for size in sizes if table[scheme].max_length * size >= context), None)
        if needed is None:
            continue
        costs = tuple(_shared(table[scheme], size) for size in sizes)
        several = [size for size in sizes if size > 1]
        mixes = {StrategyShape.of([replace(scheme, sp=size)] * (units // size)) for size in sizes if size >= needed}
        for size in several:
            for count in range(1, _MOST_GROUPS + 1):
                left = units - count * size
                if size >= needed and left > 0:
                    mixes.add(_mix(scheme, {size: count, 1: left}))
                    mixes |= {
                        _mix(scheme, {size: count, small: more, 1: left - more * small})
                        for small in several
                        for more in range(1, _MOST_GROUPS + 1)
                        if small < size and left - more * small > 0
                    }
        yield f"groups of {scheme}", CostTable(costs, table.source), sorted(mixes, key=str)


def _mix(scheme: ParallelScheme, counts: dict[int, int]) -> StrategyShape:
    return StrategyShape.of([replace(scheme, sp=size) for size, count in counts.items() for _ in range(count)])


def _shared(cost: SchemeCost, size: int) -> SchemeCost:
    """Costs of a group: each pipeline has a share of the tokens, and messages take no time."""
    scheme = cost.scheme
    assert isinstance(scheme, ParallelScheme), "only such are asked for"
    return SchemeCost(
        replace(scheme, sp=size), cost.a / size, cost.b / size, cost.c, cost.max_length * size,
        min(cost.util_length * size, cost.max_length * size), derived=f"{size} times {scheme}, without messages",
        floor=cost.floor,
    )  # fmt: skip
