"""A step's plan in, an update of the masters out: pull, run, push, clip, step, in the order of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_hydra.pipe.dropout import step_key
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.plan.runnable import only_phase
from ds_hydra.ranks.rank_stats import RankStats, gather_stats
from ds_hydra.step.agreement import FAILED, agree
from ds_hydra.step.arena import Arena
from ds_hydra.step.batching import RankBatches, build_batches
from ds_hydra.step.connections import connections_of
from ds_hydra.step.peak_memory import PeakMemory
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.zero_hetero.buffer_pool import BufferPool
from ds_hydra.zero_hetero.clock import COMPUTING, Kind, Laps, Spent
from ds_hydra.zero_hetero.errors import PlanError

if TYPE_CHECKING:
    from ds_hydra.data.sequences import SequenceData
    from ds_hydra.host.loss_scale import LossScale
    from ds_hydra.pipe.rows import MicroBatch
    from ds_hydra.pipe.runtime import Doing
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.step.update import Update


@dataclass(frozen=True)
class Outcome:
    """The results of a step; equal on all ranks, except for the two counts of bytes."""

    strategy: Strategy
    stats: tuple[RankStats, ...]  # of every rank
    weight: int  # the loss's normaliser: targets, sequences or micro-batches of the whole step
    grad_norm: float  # not finite: the step was skipped
    pull_bytes: int  # received by this rank
    push_bytes: int  # sent by this rank

    @property
    def loss(self) -> float:
        """Mean loss of the step."""
        return sum(rank.loss for rank in self.stats)

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)

    @property
    def request(self) -> int:
        """The largest request that a signal has made on any rank (`engine.signals`)."""
        return int(max(rank.request for rank in self.stats))


class Stepper:
    """Runs plans on this rank. The runtime of a strategy is built in the first step that uses it, and kept.

    All ranks call the same methods with the same plans. `strategies` are the candidates by their text; `request`
    returns what a signal has asked this rank for.
    """

    def __init__(
        self,
        source: ModelSource,
        masters: ModelMasters,
        world: World,
        *,
        strategies: Mapping[str, Strategy],
        compute_dtype: torch.dtype,
        loss_norm: str,
        seed: int,
        loss_scale: LossScale,
        update: Update,
        activity: Doing,
        request: Callable[[], int],
    ):
        self._source, self._masters, self._world = source, masters, world
        self._loss_norm, self._seed, self._loss_scale, self._update = loss_norm, seed, loss_scale, update
        self._strategies, self._activity, self._request = strategies, activity, request
        self._peak = PeakMemory(world.device)
        self._pool = BufferPool()
        self._arena = Arena.for_strategies(
            source.plan, list(strategies.values()), world.rank, world.device, compute_dtype
        )
        self._runtimes: dict[str, StrategyRuntime] = {}
        # Is given the laps of every step as soon as they can be read, for a trace; otherwise they are dropped.
        self.keep_laps: Callable[[int, Laps], None] | None = None
        self._connect(strategies.values())

    def run(self, plan: StepPlan, step: int, data: SequenceData) -> Outcome:
        """Train one step. Raises PlanError on all ranks when their plans differ or one cannot load its sequences."""
        self._peak.restart()
        runtime = self._runtime(plan)
        batches, weight = self._batches(plan, runtime, data, step)
        self._activity.now = "pull"
        loss, laps = runtime.train(_normalised(batches.batches, weight, self._loss_scale.value))
        loss = loss / self._loss_scale.value
        self._activity.now = "optimizer"
        # The comparison comes before the update. Until then the masters are still what the pull has sent, so there is
        # something to compare with; and a gradient that was computed from flipped bits must never reach them.
        self._update.compare(step, runtime)
        applied = self._update.apply(loss)
        self._activity.now = "report"
        laps = Laps(laps.clock, [*laps.laps, *applied.laps.laps])
        if self.keep_laps is not None:
            self.keep_laps(step, laps)
        stats = self._stats(applied.loss, runtime, batches, laps.spent())
        # Explaining takes messages between all ranks. They all come here together, since the norm is equal on them to
        # the bit, and the gradients are still there: a skipped step leaves them as they were.
        if not math.isfinite(applied.norm):
            self._update.explain(step, plan, runtime)
        return Outcome(runtime.strategy, stats, weight, applied.norm, runtime.pull_bytes, runtime.push_bytes)

    def evaluate(self, plan: StepPlan, data: SequenceData) -> float:
        """Mean loss of a batch, without an update."""
        runtime = self._runtime(plan)
        batches, weight = self._batches(plan, runtime, data)
        loss = runtime.evaluate(_normalised(batches.batches, weight))
        return sum(rank.loss for rank in self._stats(float(loss), runtime, batches, {}))

    def _runtime(self, plan: StepPlan) -> StrategyRuntime:
        # A strategy that is no candidate, as a replayed plan may bring one, is connected at its first use; that takes
        # all ranks. They agree on the moment without a message: a plan is the same on all of them, so they meet a
        # strategy for the first time in the same step.
        if plan.strategy not in self._runtimes:
            strategy = self._strategies.get(plan.strategy)
            if strategy is None:
                strategy = place_strategy(only_phase(plan).shape, self._world.num_ranks, self._source.plan.num_layers)
                self._connect([strategy])
            self._runtimes[plan.strategy] = StrategyRuntime(
                strategy,
                self._source,
                self._masters,
                self._arena,
                self._pool,
                self._world,
                self._activity,
            )
        return self._runtimes[plan.strategy]

    def _connect(self, strategies: Collection[Strategy]) -> None:
        """Connect what steps under these strategies use, so that none of them has to."""
        world = self._world
        world.connect(strategies, *connections_of(self._source.plan, strategies, world.node_size))

    def _batches(
        self, plan: StepPlan, runtime: StrategyRuntime, data: SequenceData, step: int = 0
    ) -> tuple[RankBatches, int]:
        """This rank's micro-batches; then all ranks compare plans and agree on the step's total loss weight.

        A sequence that one rank cannot load is an error on all of them.
        """
        try:
            batches = build_batches(
                only_phase(plan).pipelines[runtime.pipeline_index].microbatches,
                plan.sequence_ids,
                runtime.place,
                data.load_sequence,
                self._loss_norm,
                self._world.device,
                step_key=step_key(self._seed, step),
            )
        except Exception:
            # This rank fails, but first it takes part in the message that the others wait for; its weight says why.
            with suppress(PlanError):
                agree(plan, FAILED, self._world.channel)
            raise
        return batches, agree(plan, batches.weight, self._world.channel)

    def _stats(
        self, loss: float, runtime: StrategyRuntime, batches: RankBatches, spent: Mapping[Kind, Spent]
    ) -> tuple[RankStats, ...]:
        """Every rank's figures of the step. A tensor parallel group computes one loss: its first rank counts it."""
        place = runtime.place
        counts = place.tp_rank == 0
        whole_s = {kind: seconds.whole_s for kind, seconds in spent.items()}
        mine = RankStats(
            loss=loss if counts else 0.0,
            run_s=whole_s.get("run", 0.0),
            compute_s=sum(seconds.own_s for kind, seconds in spent.items() if kind in COMPUTING),
            exposed_pull_s=whole_s.get("pull", 0.0),
            exposed_push_s=whole_s.get("push", 0.0),
            optimizer_s=whole_s.get("optimizer", 0.0),
            num_padding=batches.num_padding if counts and place.is_last and place.sp_rank == 0 else 0,
            peak_memory_bytes=self._peak.read(),
            request=self._request(),
        )
        return gather_stats(mine, self._world.channel)


def _normalised(batches: Sequence[MicroBatch], total: int, scale: float = 1.0) -> Sequence[MicroBatch]:
    """Divide the batches' loss weights by the step's normaliser and multiply them by a loss scale, in place.

    Call it once for each batch: the batches are made for one step and not used again.
    """
    # Two pipelines with 3 and 5 targets: each weight becomes 1/8, and the sum over both is the mean over the step's 8
    # targets. The mean of the pipelines' own means would give the 3 targets as much to say as the 5.
    for batch in batches:
        if batch.weights is not None:
            batch.weights.div_(max(1, total) / scale)
    return batches
