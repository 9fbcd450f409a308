"""A step's lengths and the strategies of its phases in, a plan of these phases out. Pure: no torch.

`Planner` chooses one strategy for a step. Here the phases are given, as rivals have them: short sequences first run
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
from ds_hydra.planner.selection import Planner
from ds_hydra.zero_hetero.errors import PlanError


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
