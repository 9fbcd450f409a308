"""A rank's figures of the phases of a step, gathered from all ranks to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_hydra.ranks.channel import Channel

Floats = npt.NDArray[np.float64]


class RankStats(NamedTuple):
    """One rank's figures of a phase of a step; they travel as FP64."""

    loss: float  # its share of the step's: 0 but on one tensor parallel rank of last stages, or of any with routers
    router_loss: float  # the part of it that routers have
    run_s: float  # from the first pull waited for to the last backward
    compute_s: float  # the part of run_s spent in forwards and backwards, their collectives included, pulls not
    exposed_pull_s: float  # waiting for pulls, not overlapped
    exposed_push_s: float
    optimizer_s: float  # gradient norm; clipping and update of the step before; of the last phase only
    num_padding: float  # tokens added so that every sequence parallel rank holds one, counted once a pipeline
    peak_memory_bytes: float  # of this step
    request: float  # what a signal has asked this rank for


def gather_stats(
    mine: Sequence[RankStats], channel: Channel, *, routed: Floats, beside: Tensor | None = None
) -> tuple[tuple[tuple[RankStats, ...], ...], Floats, Tensor | None]:
    """All ranks' figures, in rank order, for each phase of a step; every rank must call it with its own.

    `routed` (phases, layers) and `beside`, int64 of one shape on all ranks or None on all, go along; all ranks'
    of the first, (ranks, phases, layers), and rows of the second are returned.
    """
    figures = torch.tensor(mine, dtype=torch.float64).flatten()  # one message, however many phases
    numbers = len(figures)
    bits = torch.cat((figures, torch.from_numpy(routed).flatten())).view(torch.int64)
    table = channel.rows(bits if beside is None else torch.cat((bits, beside)))
    stats, rows = table[:, : len(bits)].view(torch.float64), table[:, len(bits) :]
    stats, shares = stats[:, :numbers], stats[:, numbers:].reshape(len(table), *routed.shape).numpy()
    phases = stats.reshape(len(table), len(mine), len(RankStats._fields)).transpose(0, 1)
    found = tuple(tuple(RankStats(*row) for row in rows) for rows in phases.tolist())
    return found, shares, None if beside is None else rows


def unequal_pairs(checksums: Tensor, channel: Channel) -> list[tuple[int, int]]:
    """(sender, receiver) whose `checksums_of` results disagree, on every rank; every rank must call it."""
    table = channel.rows(checksums)
    sent, held = table[:, 0], table[:, 1].T
    return [(sender, receiver) for sender, receiver in (sent != held).nonzero().tolist()]
