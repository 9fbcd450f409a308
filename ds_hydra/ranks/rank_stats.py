"""What each rank tells the others at the end of a step, in small messages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RankStats(NamedTuple):
    """One rank's figures of a step; they travel as FP64."""

    loss: float  # its share of the step's loss: 0 but on one tensor parallel rank of last stages
    run_s: float  # from the first pull waited for to the last backward
    compute_s: float  # of that in forwards and backwards, their collectives included
    exposed_pull_s: float  # waiting for pulls, not overlapped
    exposed_push_s: float
    num_padding: float  # tokens added so that every sequence parallel rank holds one, counted once a pipeline
    peak_memory_bytes: float
    request: float  # what a signal has asked this rank for


def gather_stats(mine: RankStats, control: dist.ProcessGroup | None) -> tuple[RankStats, ...]:
    """All ranks' figures, in rank order; every rank must call it. `control` takes CPU tensors."""
    table = torch.empty(dist.get_world_size(), len(mine), dtype=torch.float64)
    dist.all_gather(list(table.unbind()), torch.tensor(mine, dtype=torch.float64), group=control)
    return tuple(RankStats(*row) for row in table.tolist())


def unequal_pairs(checksums: Tensor, control: dist.ProcessGroup | None) -> list[tuple[int, int]]:
    """(sender, receiver) whose `link_checksums` disagree, on every rank; every rank must call it."""
    table = torch.empty(dist.get_world_size(), *checksums.shape, dtype=torch.int64)
    dist.all_gather(list(table.unbind()), checksums, group=control)
    sent, held = table[:, 0], table[:, 1].T
    return [(sender, receiver) for sender, receiver in (sent != held).nonzero().tolist()]
