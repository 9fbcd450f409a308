"""Plans of layouts that are given, as other systems run them: one for all steps, or phases of a step. Pure: no torch.

`Planner` chooses one strategy for a step. Of `PhasedPlanner` the phases are given, as rivals have them: short ones run
under many small pipelines, the long ones then under few large ones, and the gradients of all phases make one update
(hot switching between homogeneous strategies, as in HotSPa). Nothing is chosen but who runs what in each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.pipelines import whole_phase
from ds_hydra.planner.selection import Planner
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


class PhasedPlanner:
    """Plans steps of given phases: each sequence runs in the first phase that it is short enough for.

    `longest[p]` is the longest sequence of phase p in tokens; in any case a phase takes only what one of its pipelines
    can hold. A phase that gets no sequence is not in the step's plan. Raises PlanError for a layout without costs.
    """

    # Example: "4*tp1 then tp4" with `longest` (100, 900) and the lengths 50, 300, 80. Phase 0 runs 50 and 80 on four
    # pipelines, phase 1 runs 300 on one; a step of 50 and 80 alone has one phase only.

    def __init__(
        self,
        cost_table: CostTable,
        phases: Sequence[StrategyShape],
        options: PlannerOptions | None = None,
        *,
        longest: Sequence[int] | None = None,
    ) -> None:
        self._table, self._options = cost_table, replace(options or PlannerOptions(), choose="best", replay_file=None)
        self._planners = [Planner(cost_table, [shape], self._options) for shape in phases]
        held = [planner.max_length for planner in self._planners]
        longest = held if longest is None else longest
        if len(longest) != len(phases):
            raise PlanError(f"{len(longest)} longest lengths were given for {len(phases)} phases; give one each")
        self.longest = tuple(map(min, longest, held))

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """The plan of one step; it states no lower bound. PlanError for a sequence that is too long for every phase."""
        ids, tokens = tuple(sequence_ids), tuple(lengths)
        members: list[list[int]] = [[] for _ in self._planners]  # of each phase: positions in the step's batch
        for position, length in enumerate(tokens):
            fitting = [number for number, most in enumerate(self.longest) if length <= most]
            if not fitting:
                raise PlanError(
                    f"step {step}: sequence {ids[position]} has {length} tokens but the phases take up to "
                    f"{', '.join(map(str, self.longest))}; let one of them take longer sequences, or add a phase with "
                    "a larger tp or sp"
                )
            members[fitting[0]].append(position)
        planned = [
            (planner.plan(step, [ids[i] for i in own], [tokens[i] for i in own]), own)
            for planner, own in zip(self._planners, members, strict=True)
            if own
        ]
        phases = tuple(phase.at(own) for plan, own in planned for phase in plan.phases)
        sources = {plan.source for plan, _ in planned}
        source = sources.pop() if len(sources) == 1 else "fast"
        whole = StepPlan(step, ids, tokens, phases, sum(plan.predicted_ms for plan, _ in planned), source=source)
        validate_plan(whole, self._table, self._planners[0].num_ranks)
        return whole
