"""A planned step and its data in; this rank's micro-batches, and the loss weight on which all ranks agree, out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.together import agree
from ds_hydra.step.agreement import FAILED, agreed, failed, row_of
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

    Raises PlanError on all ranks when their plans differ, and what `agree` raises when one of them cannot build its
    batches: its dataset fails, say, or there is no memory for a strategy that is used for the first time.
    """
    built, error = None, None
    try:
        built = build()
    except Exception as raised:  # first this rank takes part in the message that the others wait for
        error = raised
    rows = channel.first_rows(row_of(plan, costs, FAILED if built is None else built.weight))
    weight = settled(plan.step, rows, error, channel)
    assert built is not None, "else a rank has failed"
    assert weight is not None, "all ranks have built their batches"
    return built, weight


def settled(step: int, rows: Tensor, error: BaseException | None, channel: Channel) -> int | None:
    """What `agreed` makes of all ranks' rows on `step`, counted from 0. Where a rank has failed, all raise."""
    if failed(rows):
        # One message more, but the step is lost anyway: the others read the error of the rank that has one.
        agree(channel, error, f"making step {step + 1} ready")
    return agreed(step + 1, rows)
