"""One fixed layout as other systems run it: sequences packed and dealt out in, step plans out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.pipelines import whole_phase
from ds_hydra.zero_hetero.errors import PlanError

Bins = list[list[int]]  # positions in the step's batch, by micro-batch


def packed(positions: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """First fit decreasing: micro-batches of at most `capacity` tokens. PlanError for a sequence above it.

    With 100 tokens the lengths 70, 60, 40, 30 become (70 30) and (60 40).
    """
    bins: Bins = []
    room: list[int] = []
    for position in sorted(positions, key=lambda at: (-lengths[at], at)):
        length = lengths[position]
        if length > capacity:
            raise PlanError(f"the sequence at position {position} has {length} tokens but a micro-batch {capacity}")
        at = next((number for number, left in enumerate(room) if left >= length), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(position)
        room[at] -= length
    return bins


def in_turn(bins: Bins, pipelines: int) -> list[Bins]:
    """Micro-batches dealt out evenly: of five, pipeline 0 of 2 gets the first, third and fifth."""
    return [bins[first::pipelines] for first in range(pipelines)]


def step_plan(
    step: int, lengths: Sequence[int], strategy: StrategyShape, dealt: Sequence[Bins], table: CostTable
) -> StepPlan:
    """The plan of pipelines of whole sequences under 1F1B with these micro-batches each."""
    tokens = tuple(lengths)
    phase, predicted = whole_phase(strategy.pipelines, dealt, table, tokens)
    return StepPlan(step, tuple(range(len(tokens))), tokens, (phase,), predicted)


def packed_in_turn(
    step: int, lengths: Sequence[int], strategy: StrategyShape, table: CostTable, capacity: int
) -> StepPlan:
    """What most trainers do: sequences packed to `capacity` tokens, and the packs dealt out evenly.

    PlanError as `packed`.
    """
    bins = packed(range(len(lengths)), lengths, capacity)
    return step_plan(step, lengths, strategy, in_turn(bins, len(strategy.pipelines)), table)


def layouts_that_hold(table: CostTable, num_ranks: int, longest: int) -> list[StrategyShape]:
    """Every layout of one scheme for all ranks whose pipelines hold a sequence of `longest` tokens."""
    return [
        StrategyShape.of([cost.uniform] * (num_ranks // cost.scheme.num_ranks))
        for cost in table.costs
        if num_ranks % cost.scheme.num_ranks == 0 and cost.max_length >= longest
    ]


def layouts_by_length(table: CostTable, num_ranks: int, longest: int) -> list[StrategyShape]:
    """Layouts of pipelines of one stage, small ones first, each with a larger MaxLen, up to one that holds `longest`.

    As systems have them that switch the layout within a step (HotSPa). Empty where fewer than two are needed, or no
    such layout holds the longest sequence.
    """
    found: list[StrategyShape] = []
    most = 0
    for cost in sorted(table.costs, key=lambda cost: cost.scheme.num_ranks):
        if cost.scheme.pp == 1 and num_ranks % cost.scheme.num_ranks == 0 and cost.max_length > most and most < longest:
            found.append(StrategyShape.of([cost.uniform] * (num_ranks // cost.scheme.num_ranks)))
            most = int(cost.max_length)
    return found if len(found) > 1 and most >= longest else []
