"""Systems of one layout for all steps: Megatron-LM, DeepSpeed, Hugging Face; such layouts with our assignment.

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
    """Megatron-LM: TP, PP and CP by rings or all-to-alls, with any recomputation, or what `ways` say.

    Its all-to-alls (`cp_comm_type` "a2a") are Ulysses, which nothing hides. Sequences are packed first fit decreasing
    to the context, or to all that memory holds, and the packs dealt out in turn (Hydraulis, section 8.4: "max-length
    packing and even dispatching").
    """
    return _packed_full(setting, _megatron_ways(setting) if ways is None else ways)


def deepspeed(setting: Setting) -> Iterator[Configuration]:
    """DeepSpeed: Ulysses and ZeRO-3, with any recomputation; packed and dealt out as Megatron-LM's batches."""
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


def balanced(setting: Setting) -> Iterator[Configuration]:
    """Every layout of Megatron-LM's kinds, with our assignment: none of them need be the best where packs are dealt out
    in turn."""
    for text, table, _, strategy in _layouts(setting, _megatron_ways(setting)):
        yield with_our_assignment(strategy, table)._replace(text=text)


def _megatron_ways(setting: Setting) -> Iterator[Way]:
    for ulysses in (False, True):
        yield from _with_recomputation(setting, Way(powers_of_two(setting.gpus), ulysses=ulysses))


def _ulysses_ways(setting: Setting) -> Iterator[Way]:
    return _with_recomputation(setting, Way(powers_of_two(setting.gpus), ulysses=True, zero_3=True))


def _with_recomputation(setting: Setting, way: Way) -> Iterator[Way]:
    """A way with nothing computed again, and with all that may be."""
    return (replace(way, again=again) for again in setting.of_model.forms)


def _layouts(setting: Setting, ways: Iterable[Way]) -> Iterator[tuple[str, CostTable, SchemeCost, StrategyShape]]:
    """(text, table, costs, strategy) of every scheme that divides the GPUs and holds the context, each once."""
    known: set[tuple[StrategyShape, Way]] = set()
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
            # Where nobody shares a sequence it does not matter how that would be done.
            shared = scheme.sp > 1
            one = strategy, way if shared else replace(way, ulysses=way.zero_3)
            if one not in known:
                known.add(one)
                how = f" {'Ulysses' if way.ulysses else 'ring'}" if shared else ""
                yield f"{strategy}{how}{way.again.value}", table, cost, strategy


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
