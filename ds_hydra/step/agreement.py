"""A rank's plan, costs and loss weight in; the step's whole loss weight out, once all ranks hold the same plan."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.schedules.registry import WEIGHED
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.channel import Channel
from ds_hydra.zero_hetero.errors import PlanError

_DIGEST_WORDS = 4  # a SHA-256 as int64
FAILED = -1  # weight of a rank that could not load its sequences


def agree(plan: StepPlan, costs: CostTable, weight: int, channel: Channel) -> int:
    """Compare the digest of plan and costs over all ranks and sum their `weight`, in one message.

    Raises PlanError naming the ranks whose plan or costs differ from rank 0's, or whose weight is FAILED.
    """
    # Ranks whose plans differ would wait for messages that nobody sends, until a collective times out after minutes.
    # One row of 72 bytes from each rank finds that before the first byte of a step moves: 4 words of each digest and
    # the weight, which the ranks must add up anyway. Costs count where a schedule's order is made from them.
    weighed = any(pipeline.schedule in WEIGHED for pipeline in plan.pipelines)
    digests = plan.digest() + (_digest(costs) if weighed else bytes(8 * _DIGEST_WORDS))
    mine = torch.cat((torch.frombuffer(bytearray(digests), dtype=torch.int64), torch.tensor([weight])))
    rows = channel.rows(mine)
    for index, what in enumerate(("another plan", "other costs, from which its schedules are made,")):
        words = rows[:, index * _DIGEST_WORDS : (index + 1) * _DIGEST_WORDS]
        differing = (words != words[0]).any(dim=1).nonzero().flatten().tolist()
        if differing:
            raise PlanError(f"step {plan.step}: ranks {differing} hold {what} than rank 0; nothing was computed")
    weights = rows[:, -1]
    failed = (weights == FAILED).nonzero().flatten().tolist()
    if failed:
        raise PlanError(f"step {plan.step}: ranks {failed} could not load their sequences; their own errors say why")
    return int(weights.sum())


@lru_cache(maxsize=2)
def _digest(costs: CostTable) -> bytes:
    return hashlib.sha256(repr(costs.costs).encode()).digest()
