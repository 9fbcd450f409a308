"""What a step came to: the figures of one phase on one rank, and those of the step, equal on all ranks.

[Note: phases of a step]
The phases of a step follow each other in the order of the plan. Each pulls under its own strategy, runs its pipelines,
and adds its gradients to those in the masters; the first overwrites what the step before has left there. Norm,
clipping and update come once, after the last. Example: `2*tp1 then tp2`, where rank 1's pipeline of the first phase has
two micro-batches and rank 0's has one, as rank 0 sees it:

    phase 0   pull  F0 B0  push: send, wait for what rank 1 pushes to rank 0's masters, add
    phase 1                                                                             pull  F0 B0  push, add
    step                                                                                                     update

What may overlap, and what may not:
- Within a phase, its pull overlaps its forwards, and its push its last backward [Note: one strategy on one rank].
- On one rank, nothing of a phase begins before the push of the phase before is over there: its gradients are sent, and
  those that others push to its masters are received and added. There are three reasons. The pull writes to the memory
  in which the phase before has its parameters, and the first backward to that of its gradients (`arena`). Pulls and
  pushes borrow their message buffers from one pool. And a transport without tags matches messages by their order:
  on every rank it is all pulls of phase 0, all pushes of phase 0, all pulls of phase 1, and so on.
- Between ranks nothing else waits: no barrier stands between two phases. A rank's push is over when those who hold a
  part of its masters have sent their gradients, which is about when the slowest pipeline has run its last backward;
  its pull of the next phase then brings each bucket as soon as the owners have come to that pull themselves.
- Masters keep their values until all phases are over. So it does not matter for a result which rank is in which phase.

[Note: a step in parts]
A script may give the sequences of a step in parts, by one call each, and end it by another. The phases of a part follow
those of the parts before as if they were one plan's, and their gradients add up as those do. Between two parts other
plans may run forward; they use the memory in which a single phase leaves its sums, so these move before that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ds_hydra.pipe.placement import Strategy
from ds_hydra.ranks.rank_stats import Floats, RankStats
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.zero_hetero.clock import COMPUTING, Kind, Laps, Spent


@dataclass(frozen=True)
class PhaseRun:
    """What this rank did in one phase. The runtime may have run another phase of the step since."""

    runtime: StrategyRuntime
    loss: Tensor  # (), this rank's share of the step's loss
    router_loss: Tensor  # (), the part of it that the routers of its stage have
    losses: Mapping[int, Tensor]  # of its micro-batches, where its stage is the last
    laps: Laps
    num_padding: int
    imbalances: tuple[tuple[float, ...], ...] = ()  # of experts spread over ranks, by part of its stage and layer

    def stats(
        self, loss: float, router_loss: float, spent: Mapping[Kind, Spent], *, peak_memory_bytes: int, request: int
    ) -> RankStats:
        """The figures of the phase, once the device has passed it; the losses are the numbers that the tensors hold."""
        place = self.runtime.place
        counts = place.tp_rank == 0  # a tensor parallel group computes one loss: its first rank counts it
        whole_s = {kind: seconds.whole_s for kind, seconds in spent.items()}
        return RankStats(
            loss=loss if counts else 0.0,
            router_loss=router_loss if counts else 0.0,
            run_s=whole_s.get("run", 0.0),
            compute_s=sum(seconds.own_s for kind, seconds in spent.items() if kind in COMPUTING),
            exposed_pull_s=whole_s.get("pull", 0.0),
            exposed_push_s=whole_s.get("push", 0.0),
            optimizer_s=whole_s.get("optimizer", 0.0),
            num_padding=self.num_padding if counts and place.is_last and place.sp_rank == 0 else 0,
            peak_memory_bytes=peak_memory_bytes,
            request=request,
        )


class PhaseOutcome(NamedTuple):
    """The figures of one phase, equal on all ranks."""

    strategy: Strategy
    stats: tuple[RankStats, ...]  # of every rank
    imbalances: tuple[float, ...] = ()  # of each pipeline's layers whose experts are spread: `largest_of_ranks`


WANTED = 4  # added to what a signal has asked a rank for: a process waits to join


@dataclass(frozen=True)
class StepOutcome:
    """The results of a step; equal on all ranks, except for the two counts of bytes and the batches' losses."""

    phases: tuple[PhaseOutcome, ...]
    weight: int  # the loss's normaliser: targets, sequences or micro-batches of the whole step
    grad_norm: float  # not finite: the step was skipped
    pull_bytes: int  # received by this rank, in all phases
    push_bytes: int  # sent by this rank, in all phases
    coming: Tensor | None  # all ranks' rows of agreement on the next step, if they gave one
    other_loss: float | None = None  # the step's, where its tokens' losses add up to another number
    of_sequences: tuple[Floats, Floats] | None = None  # sums of their targets' losses, and the counts, where kept
    run_twice: int = 0  # batches whose gradients were of no use, as they count otherwise than they had run with
    by_script: bool = False  # what its tokens count follows from a loss of the script's own
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
        """The largest request that a signal has made on any rank (`host.ending`)."""
        return max(int(rank.request) % WANTED for rank in self.stats)

    def asked(self, request: int) -> tuple[int, ...]:
        """Ranks that a signal has asked for this."""
        first, *_ = self.phases  # all ranks run each
        return tuple(rank for rank, of in enumerate(first.stats) if int(of.request) % WANTED == request)

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
