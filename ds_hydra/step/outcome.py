"""What a step came to: figures that are equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from ds_hydra.pipe.placement import Strategy
from ds_hydra.ranks.rank_stats import Floats, RankStats

if TYPE_CHECKING:
    from ds_hydra.step.phase_run import PhaseRun


class PhaseOutcome(NamedTuple):
    """The figures of one phase, equal on all ranks."""

    strategy: Strategy
    stats: tuple[RankStats, ...]  # of every rank
    imbalances: tuple[float, ...] = ()  # of each pipeline's layers whose experts are spread: `largest_of_ranks`


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
    def expert_imbalances(self) -> list[float]:
        """Of every layer of every pipeline whose experts are spread over ranks, in every phase."""
        return [each for phase in self.phases for each in phase.imbalances]

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


def routed_of(runs: Sequence[PhaseRun], num_layers: int) -> Floats:
    """What each phase's experts of this rank have computed, (phases, layers) as of `StageModule.take_imbalances`; no
    layers where no strategy spreads experts, which all ranks know."""
    stages = (stage for run in runs for pipeline in run.runtime.strategy.pipelines for stage in pipeline.stages)
    found = np.zeros((len(runs), num_layers * any(stage.ep > 1 for stage in stages)))
    for of_phase, run in zip(found, runs, strict=True):
        for part in run.imbalances:
            of_phase[: len(part)] = np.maximum(of_phase[: len(part)], part)
    return found


def largest_of_ranks(strategy: Strategy, routed: Floats) -> tuple[float, ...]:
    """Of what all ranks' experts have computed in a phase, (ranks, layers), the largest of each pipeline's ranks in
    each layer whose experts they share."""
    shares = [routed[list(pipeline.ranks)].max(axis=0) for pipeline in strategy.pipelines]
    return tuple(float(each) for of_layers in shares for each in of_layers if each > 0)


def mean_of(losses: tuple[Floats, Floats], sequences: slice = slice(None)) -> float:
    """Mean over the targets of some sequences, given every sequence's sum and count; NaN where they have none."""
    total, count = (float(numbers[sequences].sum()) for numbers in losses)
    return total / count if count else math.nan
