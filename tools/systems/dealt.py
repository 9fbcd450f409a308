"""Groups of units whose short sequences are dealt out whole: a plan's costs in, those of the same plan so made out.

[Note: dealt out]
In the plans of `groups` a group's units share its short sequences without a remainder and without messages. A group can
only have that in part: a sequence is shared, and goes round the ring with what else is shared, or one unit computes it.
Here so many of a group's longest sequences in the step are shared, and the others dealt out whole, the longest first,
each to the unit with the least work so far, and the group takes what its busiest unit does. How many are shared is
chosen for each group, the best of all. Three sequences of 40, 30 and 20 ms on a group of two: shared they take 45 ms
and what their rings leave exposed; with the first one shared the others make 20 + 30; with none shared it is 50 as
well. Units of several stages do so for each micro-batch.

Still in these systems' favour: units have room for what they get, a ring is hidden by attention of all that is shared,
units do not wait for each other between micro-batches, groups form and part without a wait, and adding up what each
turn of a ring gives takes no time. Against them: their plans were made as if there were no remainder.
Pure: no torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.plan.step_plan import PipelinePlan, StepPlan
from ds_hydra.rivals.waits import WaitingCost


@dataclass(frozen=True, slots=True)
class DealtCost(WaitingCost):
    """Costs of a group whose micro-batches are dealt out."""

    def load_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """One micro-batch by itself, in ms."""
        return self.c + self.work_ms(lengths)

    def work_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """These sequences with the best number of them shared, without micro-batches' c, in ms [Note: dealt out]."""
        units = self.uniform.sp
        longest_first = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
        attention, others = self.a * longest_first**2, self.b * longest_first
        least = math.inf
        for shared in range(len(longest_first) + 1):
            ring = self.message * float(longest_first[:shared].sum())
            ms = float(others[:shared].sum()) + max(float(attention[:shared].sum()), ring)
            if ms >= least:
                break  # more of them only take longer
            least = min(least, ms + busiest_ms(units * (attention + others)[shared:], units))
        return least


def busiest_ms(works: Sequence[float] | NDArray[np.float64], units: int) -> float:
    """Works in the order in which they are dealt out, each to the unit with the least so far; what most a unit gets."""
    busy = [0.0] * units
    for work in works:
        heapq.heapreplace(busy, busy[0] + float(work))
    return max(busy)


def dealt_out_ms(plan: StepPlan, table: CostTable) -> tuple[float, ...]:
    """What each pipeline of a plan takes where its group deals out; `table` is the plan's, with `dealt` costs."""
    return tuple(_pipeline_ms(pipeline, table) for pipeline in plan.pipelines)


def _pipeline_ms(pipeline: PipelinePlan, table: CostTable) -> float:
    cost = table[pipeline.shape]
    if not isinstance(cost, DealtCost) or pipeline.shape.pp > 1 or not pipeline.microbatches:
        return simulate_pipeline(pipeline, table)
    lengths = [length for batch in pipeline.microbatches for length in batch.lengths]
    return len(pipeline.microbatches) * cost.c + cost.work_ms(lengths)


def dealt(table: CostTable) -> CostTable:
    """The same costs where groups deal out what they do not share."""
    return CostTable(tuple(map(_dealt, table.costs)), table.source)


def _dealt(cost: SchemeCost) -> SchemeCost:
    if not isinstance(cost, WaitingCost):
        return cost
    return DealtCost(**{field.name: getattr(cost, field.name) for field in fields(cost)})
