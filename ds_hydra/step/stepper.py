"""A step's plan in, an update of the masters out: pull, run, push for each phase, then clip and step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_hydra.costs.rank_bytes import ElementBytes
from ds_hydra.pipe.dropout import step_key
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.predictions import Predictions, TokenFunction
from ds_hydra.plan.works import schedule_batches
from ds_hydra.ranks.rank_stats import RankStats, gather_stats
from ds_hydra.step.arena import Arena
from ds_hydra.step.batching import RankBatches, build_batches
from ds_hydra.step.built import Built, build_together
from ds_hydra.step.connections import connections_of
from ds_hydra.step.outcome import Outcome, PhaseOutcome
from ds_hydra.step.peak_memory import PeakMemory
from ds_hydra.step.phase_run import PhaseRun
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.zero_hetero.clock import Laps

if TYPE_CHECKING:
    from ds_hydra.costs.cost_table import CostTable
    from ds_hydra.data.tokens import Sequences
    from ds_hydra.host.loss_scale import LossScale
    from ds_hydra.pipe.rows import MicroBatch
    from ds_hydra.pipe.runtime import Doing
    from ds_hydra.pipe.schedules.actions import Action
    from ds_hydra.pipe.schedules.batches import Batches
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.plan.phase import Phase
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.step.update import Applied, Update

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
_NUMBERS_AT_ONCE = 1 << 24


class Running(NamedTuple):
    """Where a rank is in a step."""

    phase: int
    pipeline: int
    stage: int
    action: Action | None  # of its slots; None: it is in none of them


class Stepper:
    """Runs plans on this rank. The runtime of a strategy is built in the first step that uses it, and kept.

    All ranks call the same methods with the same plans. `strategies` are the candidates by their text; `request`
    returns what a signal has asked this rank for; `least_arena` as `least` of `Arena`. The constructor allocates and
    sends no message; `connect` comes next.
    """

    def __init__(
        self,
        source: ModelSource,
        masters: ModelMasters,
        world: World,
        *,
        strategies: Mapping[str, Strategy],
        compute_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        loss_norm: str,
        seed: int,
        loss_scale: LossScale,
        update: Update,
        activity: Doing,
        request: Callable[[], int],
        least_arena: tuple[int, int] = (0, 0),
    ):
        self._source, self._masters, self._world = source, masters, world
        self._loss_norm, self._seed, self._loss_scale, self._update = loss_norm, seed, loss_scale, update
        self._strategies, self._activity, self._request = strategies, activity, request
        self._peak = PeakMemory(world.device)
        self._grad_dtype, self._wire_dtype = grad_dtype, wire_dtype
        self._arena = Arena.for_strategies(
            source.plan,
            list(strategies.values()),
            world.rank,
            world.device,
            dtype=compute_dtype,
            element=ElementBytes(
                compute_dtype.itemsize, grad_dtype.itemsize, masters.trained.flat.itemsize, wire_dtype.itemsize
            ),
            node_size=world.node_size,
            least=least_arena,
        )
        self._runtimes: dict[str, StrategyRuntime] = {}
        self._running: tuple[int, StrategyRuntime] | None = None  # the phase of a step, and who runs it
        # Is given the laps of every step as soon as they can be read, for a trace; otherwise they are dropped.
        self.keep_laps: Callable[[int, Laps], None] | None = None
        # Which pushes wait for which where the model is a small one that stands for another: the other's.
        self.turns_of: Callable[[Strategy], Sequence[int]] | None = None

    def connect(self) -> None:
        """Connect what steps under the candidates use; every rank must call it before the first step."""
        self._connect(self._strategies.values())

    def can_build(self, plan: StepPlan) -> bool:
        """Whether all strategies of a plan were used before, so that `build` sends no message; equal on all ranks."""
        return all(str(phase.shape) in self._runtimes for phase in plan.phases)

    def build(self, plan: StepPlan, data: Sequences, costs: CostTable, step: int = 0) -> Built:
        """This rank's micro-batches of a step, whose schedules are made from `costs` where they weigh times."""
        key = step_key(self._seed, step)
        return Built(
            plan,
            costs,
            tuple(
                build_batches(
                    phase.pipelines[runtime.pipeline_index].microbatches,
                    plan.sequence_ids,
                    runtime.place,
                    data.load_sequence,
                    self._loss_norm,
                    self._world.device,
                    step_key=key,
                    balances=self._source.balances,
                )
                for phase, runtime in ((phase, self._runtime(phase)) for phase in plan.phases)
            ),
        )

    def build_together(self, plan: StepPlan, data: Sequences, costs: CostTable, step: int = 0) -> tuple[Built, int]:
        """`build`, and the step's loss weight, on which all ranks agree.

        Raises PlanError on all ranks when their plans differ or one cannot load its sequences.
        """
        return build_together(plan, costs, lambda: self.build(plan, data, costs, step), self._world.channel)

    def run(
        self,
        built: Built,
        weight: int,
        step: int,
        coming: Callable[[], Tensor | None] = lambda: None,
        *,
        keep_losses: bool = False,
    ) -> Outcome:
        """Train one step, whose loss weight is `weight`.

        `coming` returns this rank's row of agreement on the next step, which goes along with the step's figures; None
        on all ranks if there is none. With `keep_losses` the outcome has the losses of each sequence.
        """
        self._peak.restart()
        if keep_losses:
            on_device = (batches.on(self._world.device) for batches in built.batches)
            built = replace(built, batches=tuple(batches.keeping_losses() for batches in on_device))
        plan, phases = built.plan, self._phases(built)
        if weight == 0 and self._world.rank == 0:
            logger.warning(
                "step %d: none of its %d sequences (%d tokens) has a target, all labels are %d: the loss is 0, and the "
                "parameters move by momentum and weight decay alone. Look at the data's labels and masks",
                step, len(plan.lengths), sum(plan.lengths), IGNORED,
            )  # fmt: skip
        runs: list[PhaseRun] = []
        self._running = None
        for runtime, mine, of_schedule in phases:  # see [Note: phases of a step]
            self._running = len(runs), runtime
            how = {"accumulate": bool(runs), "alone": len(phases) == 1}
            runs.append(self._train(runtime, mine, of_schedule, weight, **how))
            self._activity.now = "optimizer"
            # The comparison comes before the update and before another pull. Until then the masters are still what the
            # pull has sent, and the buffers what it has brought; and a gradient that was computed from flipped bits
            # must never reach the masters.
            self._update.compare(step, runtime)
        self._running = None
        applied = self._update.apply([run.loss for run in runs], [run.router_loss for run in runs])
        self._activity.now = "planning"
        row = coming()
        self._activity.now = "report"
        stats, rows = self._stats(step, runs, applied, row)
        # Explaining takes messages between all ranks. They all come here together, since the norm is equal on them to
        # the bit, and the gradients are still there: a skipped step leaves them as they were.
        if not math.isfinite(applied.norm):
            self._update.explain(step, plan, runs)
        return Outcome(
            tuple(PhaseOutcome(run.runtime.strategy, of_ranks) for run, of_ranks in zip(runs, stats, strict=True)),
            weight,
            applied.norm,
            sum(run.runtime.pull_bytes for run in runs),
            sum(run.runtime.push_bytes for run in runs),
            rows,
            of_sequences=self._losses_of(phases, len(plan.lengths)) if keep_losses else None,
        )

    @property
    def running(self) -> Running | None:
        """Where this rank is in a step's phases, or was when an error has ended it; None: in none."""
        if self._running is None:
            return None
        phase, runtime = self._running
        return Running(phase, runtime.pipeline_index, runtime.stage_index, runtime.stage_runtime.present)

    @property
    def peak_bytes(self) -> int:
        """The most that the allocator has given out in the step."""
        return self._peak.read()

    def evaluate(self, plan: StepPlan, data: Sequences, costs: CostTable) -> float:
        """Mean loss of a batch, without an update. `costs` as in `run`."""
        built, weight = self.build_together(plan, data, costs)
        share = 0.0
        for runtime, mine, of_schedule in self._phases(built):
            loss = runtime.evaluate(self._normalised(mine, weight), of_schedule)
            share += float(loss) if runtime.place.tp_rank == 0 else 0.0  # a tensor parallel group counts it once
        return sum(self._world.channel.rows(torch.tensor([share], dtype=torch.float64)).flatten().tolist())

    def predictions(
        self, plan: StepPlan, data: Sequences, costs: CostTable, function: TokenFunction, width: int
    ) -> tuple[float, Floats]:
        """Mean loss of a batch, and the numbers that a function gives for each token, (tokens, width), in the order of
        the plan's sequences."""
        built, weight = self.build_together(plan, data, costs)
        offsets = [0, *accumulate(plan.lengths)]
        found, share = np.zeros((offsets[-1], width)), 0.0
        for runtime, mine, of_schedule in self._phases(built):
            taking = [replace(batch, predictions=Predictions(function)) for batch in self._normalised(mine, weight)]
            loss = runtime.evaluate(taking, of_schedule)
            if runtime.place.tp_rank > 0:  # equal to those of the first
                continue
            share += float(loss)
            for batch, places in zip(taking, mine.places(offsets), strict=True):
                if batch.labels is not None and batch.predictions is not None:
                    values = batch.predictions.found().double().cpu().numpy()
                    found[places[places >= 0]] = values[places >= 0]
        return self._sum([share]).item(), self._sum(found)

    def _sum(self, mine: Any) -> Floats:
        """The sum of all ranks' arrays, some rows at a time: every rank holds those of all while they are added."""
        rows = torch.from_numpy(np.asarray(mine, dtype=np.float64))
        at_once = max(1, _NUMBERS_AT_ONCE // (self._world.num_ranks * max(1, rows[:1].numel())))
        return torch.cat([self._world.channel.rows(part).sum(dim=0) for part in rows.split(at_once)]).numpy()

    def sequence_losses(
        self, plan: StepPlan, data: Sequences, costs: CostTable, *, step: int | None = None
    ) -> tuple[Floats, Floats]:
        """The sum of each sequence's token losses, and how many it has, both (sequences,) in the order of the plan.

        With a `step` they are those of its training, dropout included.
        """
        built, _ = self.build_together(plan, data, costs, step or 0)
        kept = []
        for runtime, mine, of_schedule in self._phases(built):
            kept.append((runtime, mine.on(self._world.device).keeping_losses(), of_schedule))
            runtime.evaluate(kept[-1][1].batches, of_schedule, training=step is not None)
        return self._losses_of(kept, len(plan.lengths))

    def _losses_of(
        self, ran: Iterable[tuple[StrategyRuntime, RankBatches, Batches]], num_sequences: int
    ) -> tuple[Floats, Floats]:
        """What was kept of the losses of a step's sequences, of all ranks: sums and counts, (sequences,)."""
        found = np.zeros((2, num_sequences))
        for runtime, batches, _ in ran:
            if runtime.place.tp_rank == 0:  # a tensor parallel group counts them once
                batches.add_losses(found)
        sums, counts = self._world.channel.rows(torch.from_numpy(found)).sum(dim=0).numpy()
        return sums, counts

    def _train(
        self, runtime: StrategyRuntime, batches: RankBatches, known: Batches, weight: int, **how: bool
    ) -> PhaseRun:
        """Run a phase; `weight` is the whole step's, `how` as of `StrategyRuntime.train`."""
        scale = self._loss_scale.value
        self._activity.now = "pull"
        loss, laps = runtime.train(self._normalised(batches, weight, scale), known, **how)
        ran = runtime.stage_runtime
        return PhaseRun(runtime, loss / scale, ran.router_loss / scale, ran.losses, laps, batches.num_padding)

    def _phases(self, built: Built) -> list[tuple[StrategyRuntime, RankBatches, Batches]]:
        """What runs each phase, its micro-batches, and what the schedule of this rank's pipeline has to know."""
        runtimes = [self._runtime(phase) for phase in built.plan.phases]
        known = [
            schedule_batches(phase.pipelines[runtime.pipeline_index], built.costs)
            for phase, runtime in zip(built.plan.phases, runtimes, strict=True)
        ]
        return list(zip(runtimes, built.batches, known, strict=True))

    def _normalised(self, batches: RankBatches, total: int, scale: float = 1.0) -> tuple[MicroBatch, ...]:
        """The micro-batches on the device, their loss weights divided by the step's normaliser and multiplied by a loss
        scale, in place.

        Call it once for each batch: the batches are made for one step and not used again.
        """
        # Two pipelines with 3 and 5 targets: each weight becomes 1/8, and the sum over both is the mean over the step's
        # 8 targets. The mean of the pipelines' own means would give the 3 targets as much to say as the 5.
        for batch in batches.batches:
            for weights in (batch.weights, batch.balance and batch.balance.weights):
                if weights is not None:
                    weights.div_(max(1, total) / scale)
        return batches.on(self._world.device).batches

    def strategy_of(self, phase: Phase) -> Strategy:
        """A phase's strategy, placed on the ranks."""
        placed = self._strategies.get(str(phase.shape))
        return placed or place_strategy(phase.shape, self._world.num_ranks, self._source.plan.num_layers)

    def _runtime(self, phase: Phase) -> StrategyRuntime:
        # A strategy that is no candidate, as HiGHS composes them and replayed plans may bring one, is connected at its
        # first use; that takes all ranks. They agree on the moment without a message: a plan is the same on all of
        # them, so they meet a strategy for the first time in the same step, before its first phase begins.
        name = str(phase.shape)
        if name not in self._runtimes:
            strategy = self.strategy_of(phase)
            if name not in self._strategies:
                self._connect([strategy])
            self._runtimes[name] = StrategyRuntime(
                strategy,
                self._source,
                self._masters,
                self._arena,
                self._world,
                self._activity,
                grad_dtype=self._grad_dtype,
                wire_dtype=self._wire_dtype,
                turns=None if self.turns_of is None else self.turns_of(strategy),
            )
        return self._runtimes[name]

    def _connect(self, strategies: Collection[Strategy]) -> None:
        """Connect what steps under these strategies use, so that none of them has to."""
        world = self._world
        pairs = connections_of(self._source.plan, strategies, world.node_size)
        world.connect(strategies, links=pairs.links, edges=pairs.edges, teams=pairs.teams)

    def _stats(
        self, step: int, runs: Sequence[PhaseRun], applied: Applied, row: Tensor | None
    ) -> tuple[tuple[tuple[RankStats, ...], ...], Tensor | None]:
        """Every rank's figures of each phase, those of the update with the last; and every rank's `row`, if any."""
        if self.keep_laps is not None:
            laps = [*(lap for run in runs for lap in run.laps.laps), *applied.laps.laps]
            self.keep_laps(step, Laps(applied.laps.clock, laps))
        spent = [run.laps.spent() for run in runs]
        spent[-1] |= applied.laps.spent()
        peak, request = self._peak.read(), self._request()
        mine = [
            run.stats(loss, of_routers, seconds, peak_memory_bytes=peak, request=request)
            for run, loss, of_routers, seconds in zip(runs, applied.losses, applied.router_losses, spent, strict=True)
        ]
        return gather_stats(mine, self._world.channel, beside=row)
