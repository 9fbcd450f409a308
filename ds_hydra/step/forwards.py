"""Plans run forward only: losses, predictions and scores of their tokens, without an update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_hydra.data.tokens import Float64Array
from ds_hydra.pipe.loss import Predictions, TokenFunction
from ds_hydra.step.batching import RankBatches
from ds_hydra.step.strategy_runtime import StrategyRuntime

if TYPE_CHECKING:
    from ds_hydra.costs.cost_table import CostTable
    from ds_hydra.data.tokens import Sequences
    from ds_hydra.pipe.loss import Objective
    from ds_hydra.pipe.schedules.batches import Batches
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.stepper import Stepper

_NUMBERS_AT_ONCE = 1 << 24


class Forwards:
    """Of one stepper. All ranks call the same methods with the same plans; `costs` as in `Stepper.build`."""

    def __init__(self, stepper: Stepper, world: World):
        self._stepper, self._world = stepper, world

    def evaluate(self, plan: StepPlan, data: Sequences, costs: CostTable) -> float:
        """Mean loss of a batch."""
        built, weight = self._stepper.build_together(plan, data, costs)
        share = 0.0
        for runtime, mine, of_schedule in self._stepper.phases(built):
            loss = runtime.evaluate(self._stepper.normalised(mine, max(1, weight)), of_schedule)
            share += float(loss) if runtime.place.tp_rank == 0 else 0.0  # a tensor parallel group counts it once
        return sum(self._world.channel.rows(torch.tensor([share], dtype=torch.float64)).flatten().tolist())

    def predictions(
        self, plan: StepPlan, data: Sequences, costs: CostTable, function: TokenFunction, width: int
    ) -> tuple[float, Float64Array]:
        """Mean loss of a batch, and the numbers that a function gives for each token, (tokens, width), in the order of
        the plan's sequences."""
        built, weight = self._stepper.build_together(plan, data, costs)
        offsets = [0, *accumulate(plan.lengths)]
        found, share = np.zeros((offsets[-1], width)), 0.0
        for runtime, mine, of_schedule in self._stepper.phases(built):
            normalised = self._stepper.normalised(mine, max(1, weight))
            taking = [replace(batch, predictions=Predictions(function)) for batch in normalised]
            loss = runtime.evaluate(taking, of_schedule)
            if runtime.place.tp_rank > 0:  # equal to those of the first
                continue
            share += float(loss)
            for batch, places in zip(taking, mine.places(offsets), strict=True):
                if batch.labels is not None and batch.predictions is not None:
                    values = batch.predictions.found().double().cpu().numpy()
                    found[places[places >= 0]] = values[places >= 0]
        return self._sum([share]).item(), self._sum(found)

    def _sum(self, mine: Any) -> Float64Array:
        """The sum of all ranks' arrays, some rows at a time: every rank holds those of all while they are added."""
        rows = torch.from_numpy(np.asarray(mine, dtype=np.float64))
        at_once = max(1, _NUMBERS_AT_ONCE // (self._world.num_ranks * max(1, rows[:1].numel())))
        return torch.cat([self._world.channel.rows(part).sum(dim=0) for part in rows.split(at_once)]).numpy()

    def sequence_losses(
        self, plan: StepPlan, data: Sequences, costs: CostTable, *, step: int | None = None
    ) -> tuple[Float64Array, Float64Array]:
        """The sum of each sequence's token losses, and how many it has, both (sequences,) in the order of the plan.

        With a `step` they are those of its training, dropout included.
        """
        built, _ = self._stepper.build_together(plan, data, costs, step or 0)
        kept = []
        for runtime, mine, of_schedule in self._stepper.phases(built):
            kept.append((runtime, mine.on(self._world.device).keeping_losses(), of_schedule))
            runtime.evaluate(kept[-1][1].batches, of_schedule, training=step is not None)
        return self.losses_of(kept, len(plan.lengths))

    def losses_of(
        self, ran: Iterable[tuple[StrategyRuntime, RankBatches, Batches]], num_sequences: int
    ) -> tuple[Float64Array, Float64Array]:
        """What was kept of the losses of a step's sequences, of all ranks: sums and counts, (sequences,)."""
        found = np.zeros((2, num_sequences))
        for runtime, batches, _ in ran:
            if runtime.place.tp_rank == 0:  # a tensor parallel group counts them once
                batches.add_losses(found)
        sums, counts = self._world.channel.rows(torch.from_numpy(found)).sum(dim=0).numpy()
        return sums, counts

    def scores(
        self,
        plan: StepPlan,
        data: Sequences,
        costs: CostTable,
        objective: Objective,
        *,
        step: int | None = None,
    ) -> tuple[Float64Array, Float64Array]:
        """What this rank has found of the scores of a batch's tokens [Note: scores], (tokens, num_scores), in the
        order of its pieces (`step.collecting`); `step` as of `sequence_losses`. And the experts that its routers have
        chosen, (tokens, routers * chosen), if they are wanted."""
        built, _ = self._stepper.build_together(plan, data, costs, step or 0, objective)
        found: list[Float64Array] = [np.zeros((0, objective.num_scores))]
        routing = objective.routing
        chosen: list[Float64Array] = [np.zeros((0, 0 if routing is None else len(routing.paths) * routing.chosen))]
        for runtime, mine, of_schedule in self._stepper.phases(built):
            kept = mine.on(self._world.device).keeping_scores()
            runtime.evaluate(kept.batches, of_schedule, training=step is not None)
            if runtime.place.tp_rank == 0:
                found += kept.scores()
                chosen += kept.chosen()
        return np.concatenate(found), np.concatenate(chosen)
