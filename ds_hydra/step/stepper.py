"""Runs planned steps on one rank: pull, run and push for each phase, then clip and update; or forward only.

Start reading at `Stepper.run`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_hydra.costs.memory import ElementBytes
from ds_hydra.data.tokens import Float64Array
from ds_hydra.pipe.dropout import step_key
from ds_hydra.pipe.loss import IGNORED, TokenFunction
from ds_hydra.plan.simulate import schedule_batches
from ds_hydra.plan.step_plan import joined
from ds_hydra.ranks.rank_stats import RankStats, gather_stats
from ds_hydra.step.batching import FAILED, BuiltStep, RankBatches, build_batches, row_of, settled
from ds_hydra.step.outcome import Floats, PhaseOutcome, PhaseRun, StepOutcome, largest_of_ranks, routed_of
from ds_hydra.step.strategy_runtime import Arena, PeakMemory, Runtimes, StrategyRuntime
from ds_hydra.zero_hetero.clock import Laps

if TYPE_CHECKING:
    from ds_hydra.costs.cost_table import CostTable
    from ds_hydra.data.tokens import Sequences
    from ds_hydra.pipe.loss import Objective
    from ds_hydra.pipe.placement import Strategy
    from ds_hydra.pipe.rows import MicroBatch
    from ds_hydra.pipe.runtime import Doing
    from ds_hydra.pipe.schedules.actions import Action
    from ds_hydra.pipe.schedules.batches import Batches
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.step.update import Applied, LossScale, Update

logger = logging.getLogger(__name__)


class Running(NamedTuple):
    """Where a rank is in a step."""

    phase: int
    pipeline: int
    stage: int
    action: Action | None  # of its slots; None: it is in none of them


class _Part(NamedTuple):
    """What ran between two calls of a script; the runs of all parts of a step go into its update."""

    plan: StepPlan
    weight: int
    runs: tuple[PhaseRun, ...]
    kept: tuple[RankBatches, ...] | None  # that this rank counts; None where losses of sequences are not kept
    normaliser: float  # of its losses


class Stepper:
    """Runs plans on this rank.

    All ranks call the same methods with the same plans. `strategies` are the candidates by their text; `request`
    returns what a signal has asked this rank for; `least_arena` as `least` of `Arena`. The constructor allocates and
    sends no message; `connect` of its `runtimes` comes next.
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
        self._activity, self._request, self._peak = activity, request, PeakMemory(world.device)
        element = ElementBytes(
            compute_dtype.itemsize, grad_dtype.itemsize, masters.trained.flat.itemsize, wire_dtype.itemsize,
            masters.trained.on_host,
        )  # fmt: skip
        self.arena = Arena.for_strategies(
            source.plan,
            list(strategies.values()),
            world.rank,
            world.device,
            dtype=compute_dtype,
            element=element,
            node_size=world.node_size,
            least=least_arena,
        )
        self.runtimes = Runtimes(
            source, masters, world, self.arena, activity,
            strategies=strategies, grad_dtype=grad_dtype, wire_dtype=wire_dtype,
        )  # fmt: skip
        self._running: tuple[int, StrategyRuntime] | None = None  # the phase of a step, and who runs it
        self._parts: list[_Part] = []  # of a step that is to end in an update [Note: a step in parts]
        # Of what ran last: a micro-batch's tokens (1, T_local), where this rank has one, and how long sequences are.
        self.sample: tuple[Tensor | None, int] = None, 0
        self.forwards = Forwards(self, world)
        # Is given the laps of every step as soon as they can be read, for a trace; otherwise they are dropped.
        self.keep_laps: Callable[[int, Laps], None] | None = None

    def build(
        self, plan: StepPlan, data: Sequences, costs: CostTable, step: int = 0, objective: Objective | None = None
    ) -> BuiltStep:
        """This rank's micro-batches of a step, whose schedules are made from `costs` where they weigh times.

        With an `objective`, each target counts once, whatever the job's loss norm.
        """
        key = step_key(self._seed, step)
        return BuiltStep(
            plan,
            costs,
            tuple(
                build_batches(
                    pipeline.microbatches,
                    plan.sequence_ids,
                    replace(place, room=costs[pipeline.shape].max_length) if place.near else place,
                    data.load_sequence,
                    self._loss_norm if objective is None else "token",
                    self._world.device,
                    step_key=key,
                    balances=self._source.balances,
                    objective=objective,
                )
                for phase, runtime in ((phase, self.runtimes.of(phase)) for phase in plan.phases)
                for pipeline, place in ((phase.pipelines[runtime.pipeline_index], runtime.place),)
            ),
        )

    def build_together(
        self,
        plan: StepPlan,
        data: Sequences,
        costs: CostTable,
        step: int = 0,
        objective: Objective | None = None,
    ) -> tuple[BuiltStep, int]:
        """`build`, and the step's loss weight, on which all ranks agree by one message.

        Raises PlanError on all ranks when their plans differ, and what `agree` raises when one of them cannot build its
        batches: its dataset fails, say, or there is no memory for a strategy that is used for the first time.
        """
        built, error = None, None
        try:
            built = self.build(plan, data, costs, step, objective)
        except Exception as raised:  # first this rank takes part in the message that the others wait for
            error = raised
        rows = self._world.channel.first_rows(row_of(plan, costs, FAILED if built is None else built.weight))
        weight = settled(plan.step, rows, error, self._world.channel)
        assert built is not None, "else a rank has failed"
        assert weight is not None, "all ranks have built their batches"
        return built, weight

    def run(
        self,
        built: BuiltStep,
        weight: int,
        step: int,
        coming: Callable[[], Tensor | None] = lambda: None,
        *,
        keep_losses: bool = False,
    ) -> StepOutcome:
        """Train one step, whose loss weight is `weight`.

        `coming` returns this rank's row of agreement on the next step, which goes along with the step's figures; None
        on all ranks if there is none. With `keep_losses` the outcome has the losses of each sequence.
        """
        self.forget()
        self.forward_backward(built, weight, step, keep_losses=keep_losses, last=True)
        return self.update(step, coming)

    def forward_backward(
        self,
        built: BuiltStep,
        weight: int,
        step: int,
        *,
        normaliser: float | None = None,
        keep_losses: bool = False,
        last: bool = False,
    ) -> None:
        """Add the gradients of a part of a step to the masters' [Note: a step in parts].

        Its losses are divided by the `normaliser`, or by its `weight` where there is none. `last`: nothing is added
        to them before the update.
        """
        parts, self._parts = self._parts, []  # an error leaves none: what the masters hold is no gradient then
        if not parts:
            self._peak.restart()
        else:
            self._masters.trained.keep_grads()
        if keep_losses:
            on_device = (batches.on(self._world.device) for batches in built.batches)
            built = replace(built, batches=tuple(batches.keeping_losses() for batches in on_device))
        plan, phases = built.plan, self.phases(built)
        self.sample = next((one.input_ids for of in built.batches for one in of.batches), None), max(plan.lengths)
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
            how: dict[str, Any] = {"accumulate": bool(parts or runs), "alone": not parts and len(phases) == 1}
            if last and self._update.copy is not None and len(runs) == len(phases) - 1:
                how["summed"] = self._update.copy.leave
            runs.append(self._train(runtime, mine, of_schedule, normaliser or max(1, weight), **how))
            self._activity.now = "optimizer"
            # The comparison comes before the update and before another pull. Until then the masters are still what the
            # pull has sent, and the buffers what it has brought; and a gradient that was computed from flipped bits
            # must never reach the masters.
            self._update.compare(step, runtime)
        self._running = None
        kept = tuple(mine for runtime, mine, _ in phases if runtime.place.tp_rank == 0) if keep_losses else None
        self._parts = [*parts, _Part(plan, weight, tuple(runs), kept, normaliser or max(1, weight))]

    @property
    def loss_of_part(self) -> float:
        """This rank's share of the loss of the last part, where a tensor parallel group counts it once; it waits for
        the device."""
        return sum(float(run.loss) for run in self._parts[-1].runs if run.runtime.place.tp_rank == 0)

    def taken_losses(self) -> tuple[Floats, Floats]:
        """What the last part, which keeps them, has found of its sequences' losses, as `Forwards.sequence_losses`."""
        part = self._parts[-1]
        assert part.kept is not None, "the part keeps its losses"
        self._parts[-1] = part._replace(kept=None)
        return self.forwards.losses_of(part.kept, len(part.plan.lengths))

    @property
    def routers_of_part(self) -> float:
        """As `loss_of_part`, of the routers alone, before it was divided."""
        part = self._parts[-1]
        return part.normaliser * sum(float(run.router_loss) for run in part.runs if run.runtime.place.tp_rank == 0)

    @property
    def weight(self) -> int:
        """The loss weight of all parts that are waiting for an update."""
        return sum(part.weight for part in self._parts)

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """Of the parts that are waiting for an update."""
        return tuple(part.plan for part in self._parts)

    def close(self) -> None:
        """Let go of all strategies, their memory and their groups; it cannot be used afterwards."""
        self.runtimes.close()
        for held in (self.forwards, self.arena, self):
            vars(held).clear()

    def forget(self) -> None:
        """Drop the gradients of all parts: the next part's overwrite them."""
        self._parts = []

    def update(
        self, step: int, coming: Callable[[], Tensor | None] = lambda: None, *, scale: float | None = None
    ) -> StepOutcome:
        """Update the masters by the gradients of all parts since the last update, times `scale`; `coming` as in
        `run`."""
        parts, self._parts = self._parts, []
        plan = joined([part.plan for part in parts])
        runs = [run for part in parts for run in part.runs]
        if scale is not None:
            self._masters.trained.scale_grads(scale)
            runs = [replace(run, loss=run.loss * scale, router_loss=run.router_loss * scale) for run in runs]
        counted = [run.loss for run in runs if run.runtime.place.tp_rank == 0]
        applied = self._update.apply(
            [run.loss for run in runs],
            [run.router_loss for run in runs],
            lambda: sum((loss.detach() for loss in counted), torch.zeros(())),
        )
        self._activity.now = "planning"
        row = coming()
        self._activity.now = "report"
        stats, routed, rows = self._stats(step, runs, applied, row)
        # Explaining takes messages between all ranks. They all come here together, since the norm is equal on them to
        # the bit, and the gradients are still there: a skipped step leaves them as they were.
        if not math.isfinite(applied.norm):
            self._update.explain(step, plan, runs)
        keeps = all(part.kept is not None for part in parts)  # alike on all ranks, whatever this one counts
        kept = [one for part in parts for one in part.kept or ()]
        return StepOutcome(
            tuple(
                PhaseOutcome(run.runtime.strategy, of_ranks, largest_of_ranks(run.runtime.strategy, shares))
                for run, of_ranks, shares in zip(runs, stats, routed.swapaxes(0, 1), strict=True)
            ),
            sum(part.weight for part in parts),
            applied.norm,
            sum(run.runtime.pull_bytes for run in runs),
            sum(run.runtime.push_bytes for run in runs),
            rows,
            of_sequences=self.forwards.losses_of(kept, len(plan.lengths)) if keeps else None,
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

    def _train(
        self, runtime: StrategyRuntime, batches: RankBatches, known: Batches, normaliser: float, **how: Any
    ) -> PhaseRun:
        """Run a phase; `normaliser` is the whole step's, `how` as of `StrategyRuntime.train`."""
        scale = self._loss_scale.value
        self._activity.now = "pull"
        loss, laps = runtime.train(self.normalised(batches, normaliser, scale), known, **how)
        ran = runtime.stage_runtime
        losses, padding = (loss / scale, ran.router_loss / scale), batches.num_padding
        return PhaseRun(runtime, *losses, ran.losses, laps, padding, ran.imbalances)

    def phases(self, built: BuiltStep) -> list[tuple[StrategyRuntime, RankBatches, Batches]]:
        """What runs each phase, its micro-batches, and what the schedule of this rank's pipeline has to know.

        Call it before they run: gradients that wait for an update leave the memory that runs use.
        """
        if self._parts:
            self._masters.trained.keep_grads()
        runtimes = [self.runtimes.of(phase) for phase in built.plan.phases]
        known = [
            schedule_batches(phase.pipelines[runtime.pipeline_index], built.costs)
            for phase, runtime in zip(built.plan.phases, runtimes, strict=True)
        ]
        return list(zip(runtimes, built.batches, known, strict=True))

    def normalised(self, batches: RankBatches, normaliser: float, scale: float = 1.0) -> tuple[MicroBatch, ...]:
        """The micro-batches on the device, their loss weights divided by the step's normaliser and multiplied by a loss
        scale, in place.

        Call it once for each batch: the batches are made for one step and not used again.
        """
        # Two pipelines with 3 and 5 targets: each weight becomes 1/8, and the sum over both is the mean over the step's
        # 8 targets. The mean of the pipelines' own means would give the 3 targets as much to say as the 5.
        for batch in batches.batches:
            for weights in (batch.weights, batch.balance and batch.balance.weights):
                if weights is not None:
                    weights.div_(normaliser / scale)
        return batches.on(self._world.device).batches

    def _stats(
        self, step: int, runs: Sequence[PhaseRun], applied: Applied, row: Tensor | None
    ) -> tuple[tuple[tuple[RankStats, ...], ...], Floats, Tensor | None]:
        """Every rank's figures of each phase, those of the update with the last; what its experts computed; its `row`,
        if any."""
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
        routed = routed_of(runs, self._source.plan.num_layers)
        return gather_stats(mine, self._world.channel, routed=routed, beside=row)


class Forwards:
    """Plans run forward only, without an update: losses, predictions and scores of their tokens.

    All ranks call the same methods with the same plans; `costs` as in `Stepper.build`. With a `step` a forward is that
    of its training, dropout included.
    """

    def __init__(self, stepper: Stepper, world: World):
        self._stepper, self._world = stepper, world
        self._shares: list[Tensor] = []  # of the loss of what ran last, with that of routers
        self.adapted = True  # whether adapters run, where the model has any

    def _ran(
        self, plan: StepPlan, data: Sequences, costs: CostTable, keep: Callable[[RankBatches], RankBatches], *,
        mean: bool = False, step: int | None = None, objective: Objective | None = None,
    ) -> Iterator[tuple[RankBatches, Tensor]]:  # fmt: skip
        """Run each phase forward; what `keep` has made of its batches, and this rank's share of the loss, which is that
        of the `mean` or of the sum. Of a tensor parallel group, whose results are equal, the first rank has them."""
        built, weight = self._stepper.build_together(plan, data, costs, step or 0, objective)
        for runtime, mine, of_schedule in self._stepper.phases(built):
            normalised = mean and replace(mine, batches=self._stepper.normalised(mine, max(1, weight)))
            kept = keep(normalised or mine.on(self._world.device))
            loss = runtime.evaluate(kept.batches, of_schedule, training=step is not None, adapted=self.adapted)
            if runtime.place.tp_rank == 0:
                yield kept, loss

    def evaluate(self, plan: StepPlan, data: Sequences, costs: CostTable) -> float:
        """Mean loss of a batch."""
        share = sum(float(loss) for _, loss in self._ran(plan, data, costs, lambda given: given, mean=True))
        return sum(self._world.channel.rows(torch.tensor([share], dtype=torch.float64)).flatten().tolist())

    def predictions(
        self, plan: StepPlan, data: Sequences, costs: CostTable, function: TokenFunction, width: int
    ) -> tuple[float, Float64Array]:
        """Mean loss of a batch, and the numbers that a function gives for the tokens that this rank has, (tokens,
        width), in the order of its pieces (`step.delivery`)."""
        found, share = [np.zeros((0, width))], 0.0
        predicting = partial(RankBatches.predicting, function=function)
        for kept, loss in self._ran(plan, data, costs, predicting, mean=True):
            share += float(loss)
            found += kept.predicted()
        return self._of_all(share), np.concatenate(found)

    def _of_all(self, share: float) -> float:
        return self._world.channel.rows(torch.tensor([share], dtype=torch.float64)).sum(dim=0).item()

    def sequence_losses(
        self, plan: StepPlan, data: Sequences, costs: CostTable, *, step: int | None = None
    ) -> tuple[Floats, Floats]:
        """The sum of each sequence's token losses, and how many it has, both (sequences,) in the order of the plan."""
        ran = list(self._ran(plan, data, costs, RankBatches.keeping_losses, step=step))
        self._shares = [loss for _, loss in ran]
        return self.losses_of([kept for kept, _ in ran], len(plan.lengths))

    def router_loss(self, found: tuple[Floats, Floats]) -> float:
        """What the model's routers add to the mean loss of the sequences whose losses, each counting 1, were `found`
        last."""
        sums, counts = found
        return float((self._of_all(float(sum(self._shares))) - sums.sum()) / max(1.0, counts.sum()))

    def losses_of(self, kept: Iterable[RankBatches], num_sequences: int) -> tuple[Floats, Floats]:
        """What was kept of the losses of a step's sequences, of all ranks: sums and counts, (sequences,)."""
        found = np.zeros((2, num_sequences))
        for batches in kept:
            batches.add_losses(found)
        sums, counts = self._world.channel.rows(torch.from_numpy(found)).sum(dim=0).numpy()
        return sums, counts

    def scores(
        self, plan: StepPlan, data: Sequences, costs: CostTable, objective: Objective, *, step: int | None = None
    ) -> tuple[Float64Array, Float64Array]:
        """What this rank has found of the scores of a batch's tokens [Note: scores], (tokens, num_scores), in the
        order of its pieces (`step.delivery`). And the experts that its routers have chosen, (tokens, routers *
        chosen), if they are wanted."""
        routing = objective.routing
        found: list[Float64Array] = [np.zeros((0, objective.num_scores))]
        chosen: list[Float64Array] = [np.zeros((0, 0 if routing is None else len(routing.paths) * routing.chosen))]
        for kept, _ in self._ran(plan, data, costs, RankBatches.keeping_scores, step=step, objective=objective):
            found += kept.scores()
            chosen += kept.chosen()
        return np.concatenate(found), np.concatenate(chosen)
