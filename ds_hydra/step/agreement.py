"""A rank's plan, costs and loss weight in; the step's whole loss weight out, once all ranks hold the same plan.

Each rank makes a `row_of` these, all ranks gather the rows, and each reads them all by `agreed`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.told import Told, mark_told

_DIGEST_WORDS = 4  # a SHA-256 as int64
# In the place of a rank's weight: it could not load its sequences, or it has not built them yet, as all others.
FAILED, LATER = -1, -2


def row_of(plan: StepPlan, costs: CostTable, weight: int) -> Tensor:
    """What a rank says of a step: (9,) int64, the digests of plan and costs and its weight."""
    # Ranks whose plans differ would wait for messages that nobody sends, until a collective times out after minutes.
    # One row of 72 bytes from each rank finds that before the first byte of a step moves: 4 words of each digest and
    # the weight, which the ranks must add up anyway. Costs count where a schedule's order is made from them.
    weighed = any(weighs(pipeline.schedule) for pipeline in plan.pipelines)
    digests = plan.digest() + (_digest(costs) if weighed else bytes(8 * _DIGEST_WORDS))
    return torch.cat((torch.frombuffer(bytearray(digests), dtype=torch.int64), torch.tensor([weight])))


def row_without_plan() -> Tensor:
    """The row of a rank that could not get its plan."""
    return torch.full((2 * _DIGEST_WORDS + 1,), FAILED)


def failed(rows: Tensor) -> bool:
    """Whether a rank has no batches, because of an error."""
    return bool((rows[:, 2 * _DIGEST_WORDS] == FAILED).any())


def agreed(step: int, rows: Tensor) -> int | None:
    """The sum of the weights, of all ranks' rows for the step; None where their batches are not built.

    Raises PlanError naming the ranks whose plan or costs differ from rank 0's. `step` counts from 1.
    """
    for index, what in enumerate(("another plan", "other costs, from which its schedules are made,")):
        words = rows[:, index * _DIGEST_WORDS : (index + 1) * _DIGEST_WORDS]
        differing = (words != words[0]).any(dim=1).nonzero().flatten().tolist()
        if differing:
            error = PlanError(f"step {step}: ranks {differing} hold {what} than rank 0; nothing was computed")
            raise mark_told(error, Told(differing[0], f"PlanError: {error}", here=True))
    weights = rows[:, -1]
    return None if weights[0] == LATER else int(weights.sum())


@lru_cache(maxsize=2)
def _digest(costs: CostTable) -> bytes:
    return hashlib.sha256(repr(costs.costs).encode()).digest()
