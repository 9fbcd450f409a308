"""Systems of one layout for all steps, and such layouts with our assignment. Pure: no torch.

Every layout is one scheme on as many pipelines as the GPUs hold, and must hold a sequence of the whole context, as a
job that is set up before its data is seen must.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.fixed_layout import packed, packed_in_turn, step_plan
from ds_hydra.report.calibration import StageLoad
from ds_hydra.rivals.costs import Setting, Way, powers_of_two, table_of
from ds_hydra.rivals.waits import WaitingCost
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True)
class _RowLoad(StageLoad):
    """Coefficients of a stage whose ranks share sequences: each micro-batch waits as its row does."""

    cost: WaitingCost | None = None

    def load_ms(self, lengths: Sequence[int], starts: Sequence[int] | None = None) -> float:
        """See `StageLoad`."""
        assert self.cost is not None, "made below, of one"
        waits = self.cost.in_rows.load_ms(lengths) - self.cost.without_waits.load_ms(lengths)
        return StageLoad.load_ms(self, lengths, starts) + waits


class RowSimulator(Simulator):
    """A simulator that knows what messages of shared sequences leave exposed: pulls go on meanwhile."""

    def _stage_loads(self, shape: PipelineShape) -> tuple[StageLoad, ...]:
        loads, cost = super()._stage_loads(shape), self.job.table[shape]
        return tuple(_RowLoad(**vars(one), cost=cost) for one in loads) if isinstance(cost, WaitingCost) else loads


Lengths = Sequence[int]
PlanStep = Callable[[int, Lengths], StepPlan]


class StepMs(Protocol):
    """What a step takes by a plan and the costs that it was made with."""

    def __call__(self, plan: StepPlan, table: CostTable) -> float: ...


class PlansSteps(Protocol):
    """Plans steps, as `Planner` does."""

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan: ...


class Configuration(NamedTuple):
    """One way to set a system up: a text for readers, its costs, and how it plans a step of these lengths."""

    text: str
    table: CostTable
    plan: PlanStep


def planned_by(text: str, table: CostTable, planner: PlansSteps) -> Configuration:
    """A configuration whose steps such a planner plans."""
    return Configuration(text, table, lambda step, lengths: planner.plan(step, range(len(lengths)), lengths))


class Chosen(NamedTuple):
    """A system's configuration and what it made of each batch."""

    configuration: Configuration
    plans: tuple[StepPlan, ...]


_SCREENED = 5  # batches on which configurations are compared first, at even ranks of their longest sequence
_FINALISTS = 4
_CLOSE = 1.1  # finalists take at most so many times the least, on the few batches


def hindsight(
    configurations: Iterable[Configuration], batches: Sequence[Lengths], ms: StepMs, *, finalists: int = _FINALISTS
) -> Chosen:
    """The configuration whose steps take the least `ms` in the mean. PlanError when none holds all batches.

    All are compared on a few of the batches, that with the longest sequence among them, and `finalists` on all. One
    is left when its plans alone, without transfers, take clearly more on most of the few than the best so far in all.
    """
    # The longest sequences come first: what cannot hold them is left at once.
    order = sorted(range(len(batches)), key=lambda step: (-max(batches[step]), step))
    last = len(order) - 1
    few = list(dict.fromkeys(order[round(last * part / (_SCREENED - 1))] for part in range(_SCREENED)))
    ranked: list[tuple[float, int, Configuration, dict[int, StepPlan]]] = []
    best: dict[int, float] = {}  # what the best so far takes for each of the few
    refused: PlanError | None = None
    for number, configuration in enumerate(configurations):
        plans: dict[int, StepPlan] = {}
        try:
            for step in few:
                plans[step] = configuration.plan(step, batches[step])
                known = sum(best.get(one, math.inf) for one in plans)
                alone = sum(plan.predicted_ms for plan in plans.values())
                if 2 * len(plans) > len(few) and alone > _CLOSE * known:
                    break
            else:
                taken = {step: ms(plan, configuration.table) for step, plan in plans.items()}
                ranked.append((sum(taken.values()), number, configuration, plans))
                if not best or sum(taken.values()) < sum(best.values()):
                    best = taken
        except PlanError as error:
            refused = error
    last_ones: list[Chosen] = []
    for of_few, _, configuration, plans in sorted(ranked, key=lambda row: row[:2])[:finalists]:
        if last_ones and of_few > _CLOSE * sum(best.values()):
            break
        try:
            plans |= {step: configuration.plan(step, batches[step]) for step in order if step not in plans}
        except PlanError as error:
            refused = error
            continue
        last_ones.append(Chosen(configuration, tuple(plans[step] for step in range(len(batches)))))
    if not last_ones:
        raise PlanError(f"no configuration holds these batches: {refused}")
    if len(last_ones) == 1:
        return last_ones[0]
    return min(last_ones, key=lambda one: sum(ms(plan, one.configuration.table) for plan in one.plans))


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
