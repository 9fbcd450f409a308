"""Systems of one layout for all steps: Megatron-LM, DeepSpeed, Hugging Face; and the same layouts with our assignment.

Every layout is one scheme on as many pipelines as the GPUs hold, and must hold a sequence of the whole context, as a
job that is set up before its data is seen must.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.fixed_layout import packed, packed_in_turn, step_plan
from ds_hydra.rivals.costs import Way, powers_of_two, table_of
from ds_hydra.rivals.hindsight import Configuration, PlanStep, planned_by
from ds_hydra.rivals.setting import Setting

OPTIONS = PlannerOptions(kernels="compiled", no_slices="other systems run whole sequences", layers=0)


def megatron(setting: Setting, ways: Iterable[Way] | None = None) -> Iterator[Configuration]:
    """Megatron-LM: TP, PP and CP, with and without checkpointing, or what `ways` say.

    Sequences are packed first fit decreasing to the context, or to all that memory holds, and the packs dealt out in
    turn (Hydraulis, section 8.4: "max-length packing and even dispatching").
    """
    return _packed_full(setting, _with_checkpointing(Way(powers_of_two(setting.gpus))) if ways is None else ways)


def deepspeed(setting: Setting) -> Iterator[Configuration]:
    """DeepSpeed: Ulysses and ZeRO-3, with and without checkpointing; packed and dealt out as Megatron-LM's batches."""
    return _packed_full(setting, _ulysses_ways(setting))


def batch_rebalance(setting: Setting) -> Iterator[Configuration]:
    """Hugging Face's `batch_rebalance` (transformers, pull request 47340) over DeepSpeed's layouts.

    A step's sequences are dealt so that all data parallel ranks get equal work, and packed to what memory holds; its
    sampler pads and balances tokens, this one balances times and packs, which is better.
    """
    for text, table, cost, strategy in _layouts(setting, _ulysses_ways(setting)):
        yield Configuration(text, table, _rebalanced(strategy, cost, table))


def with_our_assignment(strategy: StrategyShape, table: CostTable) -> Configuration:
    """A fixed layout whose sequences our planner deals out and packs."""
    return planned_by(str(strategy), table, Planner(table, [strategy], OPTIONS))


def _ulysses_ways(setting: Setting) -> Iterator[Way]:
    return _with_checkpointing(Way(powers_of_two(setting.gpus), ulysses=True, zero_3=True))


def _with_checkpointing(way: Way) -> Iterator[Way]:
    """A way, and the same with checkpointing."""
    yield way
    yield replace(way, checkpointing=True)


def _layouts(setting: Setting, ways: Iterable[Way]) -> Iterator[tuple[str, CostTable, SchemeCost, StrategyShape]]:
    """(text, table, costs, strategy) of every scheme that divides the GPUs and holds the context."""
    for way in ways:
        table = table_of(setting, way)
        for cost in table.costs:
            scheme = cost.uniform
            # ZeRO-3 stands instead of TP and PP; TP reaches out of a node only where it fills several.
            if way.zero_3 and (scheme.tp, scheme.pp) != (1, 1):
                continue
            if setting.gpus % scheme.num_ranks or cost.max_length < setting.context:
                continue
            strategy = StrategyShape.of([scheme] * (setting.gpus // scheme.num_ranks))
            yield f"{strategy}{' AC' if way.checkpointing else ''}", table, cost, strategy


def _packed_full(setting: Setting, ways: Iterable[Way]) -> Iterator[Configuration]:
    """Every layout with sequences packed to the context, and to all that memory holds, and dealt out in turn."""
    for text, table, cost, strategy in _layouts(setting, ways):
        for capacity in sorted({setting.context, cost.max_length}):
            plan = partial(packed_in_turn, strategy=strategy, table=table, capacity=capacity)
            yield Configuration(f"{text}, packed to {capacity}", table, plan)


def _rebalanced(strategy: StrategyShape, cost: SchemeCost, table: CostTable) -> PlanStep:
    def plan(step: int, lengths: Sequence[int]) -> StepPlan:
        dealt = by_load(lengths, cost, len(strategy.pipelines))
        bins = [packed(own, lengths, cost.max_length) for own in dealt]
        return step_plan(step, lengths, strategy, bins, table)

    return plan


def by_load(lengths: Sequence[int], cost: SchemeCost, pipelines: int) -> list[list[int]]:
    """Each sequence, the dearest first, to the pipeline with the least work so far: positions by pipeline."""
    work = cost.sequence_ms(lengths)
    dealt: list[list[int]] = [[] for _ in range(pipelines)]
    loads = [(0.0, index) for index in range(pipelines)]
    for position in sorted(range(len(lengths)), key=lambda at: (-work[at], at)):
        load, index = heapq.heappop(loads)
        dealt[index].append(position)
        heapq.heappush(loads, (load + float(work[position]), index))
    return dealt
