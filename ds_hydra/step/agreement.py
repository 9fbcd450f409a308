"""What all ranks must agree on before the first byte of a step moves: the plan, and the loss's normaliser."""

from __future__ import annotations

import torch

from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.channel import Channel
from ds_hydra.zero_hetero.errors import PlanError

_DIGEST_WORDS = 4  # a SHA-256 as int64
FAILED = -1  # weight of a rank that could not load its sequences


def agree(plan: StepPlan, weight: int, channel: Channel) -> int:
    """Compare the plan's digest over all ranks and sum their `weight`, in one message.

    Raises PlanError naming the ranks whose plan differs from rank 0's, or whose weight is FAILED.
    """
    digest = torch.frombuffer(bytearray(plan.digest()), dtype=torch.int64)
    table = channel.rows(torch.cat((digest, torch.tensor([weight], dtype=torch.int64))))
    differing = (table[:, :_DIGEST_WORDS] != table[0, :_DIGEST_WORDS]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        raise PlanError(f"step {plan.step}: ranks {differing} hold another plan than rank 0; nothing was computed")
    failed = (table[:, _DIGEST_WORDS] == FAILED).nonzero().flatten().tolist()
    if failed:
        raise PlanError(f"step {plan.step}: ranks {failed} could not load their sequences; their own errors say why")
    return int(table[:, _DIGEST_WORDS].sum())
