"""A planned step and its data in; this rank's micro-batches, and the loss weight on which all ranks agree, out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.channel import Channel
from ds_hydra.step.agreement import FAILED, agreed, row_of
from ds_hydra.step.batching import RankBatches


@dataclass(frozen=True)
class Built:
    """A planned step on this rank: its micro-batches, phase by phase, and the costs that its schedules follow."""

    plan: StepPlan
    costs: CostTable
    batches: tuple[RankBatches, ...]  # in the host's memory

    @property
    def weight(self) -> int:
        """This rank's share of the step's loss normaliser."""
        return sum(batches.weight for batches in self.batches)


def build_together(plan: StepPlan, costs: CostTable, build: Callable[[], Built], channel: Channel) -> tuple[Built, int]:
    """What `build` makes of a plan, and the step's loss weight, by one message between all ranks.

    Raises PlanError on all ranks when their plans differ, or when one of them cannot load its sequences.
    """
    try:
        built = build()
    except Exception:
        # This rank fails, but first it takes part in the message that the others wait for; its weight says why.
        channel.rows(row_of(plan, costs, FAILED))
        raise
    weight = agreed(plan.step, channel.rows(row_of(plan, costs, built.weight)))
    assert weight is not None, "all ranks have built their batches"
    return built, weight
