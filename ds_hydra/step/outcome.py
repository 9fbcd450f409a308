"""What a step came to: figures that are equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ds_hydra.pipe.placement import Strategy
from ds_hydra.ranks.rank_stats import RankStats

Floats = npt.NDArray[np.float64]


class PhaseOutcome(NamedTuple):
    """The figures of one phase, equal on all ranks."""

    strategy: Strategy
    stats: tuple[RankStats, ...]  # of every rank


WANTED = 4  # added to what a signal has asked a rank for: a process waits to join


@dataclass(frozen=True)
class Outcome:
    """The results of a step; equal on all ranks, except for the two counts of bytes and the batches' losses."""

    phases: tuple[PhaseOutcome, ...]
    weight: int  # the loss's normaliser: targets, sequences or micro-batches of the whole step
    grad_norm: float  # not finite: the step was skipped
    pull_bytes: int  # received by this rank, in all phases
    push_bytes: int  # sent by this rank, in all phases
    coming: Tensor | None  # all ranks' rows of agreement on the next step, if they gave one
    other_loss: float | None = None  # the step's, where its tokens' losses add up to another number
    of_sequences: tuple[Floats, Floats] | None = None  # sums of their targets' losses, and the counts, where kept
    batch_losses: list[float] = field(default_factory=list)  # of this rank's batches, where asked for

    @property
    def stats(self) -> Iterator[RankStats]:
        """Of every rank in every phase."""
        return (stats for phase in self.phases for stats in phase.stats)

    @property
    def loss(self) -> float:
        """Mean loss of the step."""
        return sum(rank.loss for rank in self.stats) if self.other_loss is None else self.other_loss

    @property
    def router_loss(self) -> float:
        """The part of it that the model's routers have."""
        return sum(rank.router_loss for rank in self.stats)

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)

    @property
    def request(self) -> int:
        """The largest request that a signal has made on any rank (`engine.signals`)."""
        return max(int(rank.request) % WANTED for rank in self.stats)

    @property
    def wanted(self) -> bool:
        """Whether a process waits to join."""
        return any(rank.request >= WANTED for rank in self.stats)


def mean_of(losses: tuple[Floats, Floats], sequences: slice = slice(None)) -> float:
    """Mean over the targets of some sequences, given every sequence's sum and count; NaN where they have none."""
    total, count = (float(numbers[sequences].sum()) for numbers in losses)
    return total / count if count else math.nan
