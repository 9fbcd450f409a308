"""A rank's plan and loss weight in; the step's whole loss weight out, once all ranks hold the same plan."""

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
    # Ranks whose plans differ would wait for messages that nobody sends, until a collective times out after minutes.
    # One row of 40 bytes from each rank finds that before the first byte of a step moves: 4 words of the digest and
    # the weight, which the ranks must add up anyway.
    digest = torch.frombuffer(bytearray(plan.digest()), dtype=torch.int64)
    table = channel.rows(torch.cat((digest, torch.tensor([weight], dtype=torch.int64))))
    differing = (table[:, :_DIGEST_WORDS] != table[0, :_DIGEST_WORDS]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        raise PlanError(f"step {plan.step}: ranks {differing} hold another plan than rank 0; nothing was computed")
    failed = (table[:, _DIGEST_WORDS] == FAILED).nonzero().flatten().tolist()
    if failed:
        raise PlanError(f"step {plan.step}: ranks {failed} could not load their sequences; their own errors say why")
    return int(table[:, _DIGEST_WORDS].sum())
