"""A step whose parts a script hands in one by one, in; gradients after each, and an update at its end, out.

Start reading at `Parts.forward_backward`; see [Note: a step in parts] and [Note: losses of log-probabilities].
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.tokens import with_targets
from ds_hydra.engine.mixing import Mixed, counted, mix, of_mixed
from ds_hydra.engine.objectives import Asked, check_objective, checked_normaliser
from ds_hydra.engine.out_of_memory import explained
from ds_hydra.engine.scoring import Scoring, check_all, refuse_without_loss
from ds_hydra.engine.shares import Gathered, Mine
from ds_hydra.pipe.loss import Objective
from ds_hydra.planner import PlannedStep
from ds_hydra.planner.recipe import joined_steps
from ds_hydra.ranks.together import agree
from ds_hydra.step.outcome import Outcome
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.engine.steps import Steps
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.step.delivery import Delivered


class Parts:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, steps: Steps):
        self._steps, self._crew, self._host = steps, steps.crew, steps.host
        self._planned: list[PlannedStep] = []
        self.losses: list[float] = []  # of the parts that wait for an update
        self._seconds = 0.0
        self._shares = steps.handed.shares
        self.scoring = Scoring(self._crew, self._shares, self._host.device)

    @property
    def count(self) -> int:
        """Parts whose gradients wait for an update."""
        return len(self._crew.stepper.plans)

    def refuse_if_any(self, what: str, error: type[Exception] = ConfigError) -> None:
        """Raise where gradients wait for an update, with which `what` would not agree."""
        if self.count:
            raise error(
                f"{what} cannot be called while the gradients of {self.count} forward_backward() calls wait for an "
                "update: call optimizer_step() before it, or zero_grad() to drop them"
            )

    def forget(self) -> None:
        """Drop what waits for an update."""
        self._crew.stepper.forget()
        self._planned, self.losses, self._seconds = [], [], 0.0

    def forward_backward(
        self, batch: Any, loss: Any, normaliser: float | None, temperature: float | None, mixes_tokens: bool | None
    ) -> float:
        """See `HydraEngine.forward_backward`."""
        began = time.perf_counter()
        crew, step = self._crew, self._host.global_steps + 1
        self._steps.refuse(handed=True)
        if not self.count or crew.masters.trained.dropped_grads:  # by the optimizer's own zero_grad
            self.forget()
        with crew.activity("reading sequences"):
            asked, mine = self._asked(batch, loss, normaliser, temperature, mixes_tokens)
            call = f"forward_backward with {asked or f'the loss of the job over {normaliser}'}"
            gathered = self._shares.gather(mine, f"step {step}", call)
            first = sum(len(planned.plan.lengths) for planned in self._planned)
            planned = crew.plans.given(step - 1, gathered.lengths, first)
            delivered = self._deliver(planned.plan, mine, gathered)
        with crew.together("planning"):
            crew.real_sequences.before_step(planned.plan, delivered, crew.stepper.runtimes.strategy_of)
            of_loss, objective, divisor = None, None, normaliser and float(normaliser)
            if asked is not None and asked.mixes:
                of_loss, divisor, delivered = self._mix(asked, planned.plan, mine, gathered, delivered)
                objective = of_mixed(gathered.layout, valued=asked.valued)
            elif asked is not None:
                objective, divisor = asked.objective(gathered.layout), _counted(asked, gathered)
            if objective is not None:
                objective = replace(objective, routing=self.scoring.routing_in(gathered.layout))
            share = self._run(planned.plan, delivered, objective, divisor)
            if of_loss is None:
                of_loss = sum(crew.world.channel.rows(torch.tensor([share], dtype=torch.float64)).flatten().tolist())
        self._planned.append(planned)
        self.losses.append(of_loss)
        self._seconds += time.perf_counter() - began
        return of_loss

    def _asked(
        self, batch: Any, loss: Any, normaliser: float | None, temperature: float | None, mixes_tokens: bool | None
    ) -> tuple[Asked | None, Mine]:
        """What a call asks for, None for the job's own loss, and its sequences; or the error, which all ranks raise."""
        try:
            if loss is not None:
                self.scoring.check_model(trains=True)
                asked = Asked.of(loss, normaliser, mixes_tokens, valued=self.scoring.valued)
                mine = self._shares.read([(batch, 1.0)], self.scoring.reads(temperature))
                return asked, mine.checked(partial(self._check, asked))
            refuse_without_loss(self._crew.job.source)
            if temperature is not None or mixes_tokens:
                raise ConfigError("temperature and mixes_tokens are for a loss of log-probabilities: pass one")
            if normaliser is not None:
                checked_normaliser(normaliser)
        except ConfigError as error:
            return None, Mine(error=error)
        return None, self._shares.read([(batch, 1.0)])

    def _run(self, plan: StepPlan, delivered: Delivered, objective: Objective | None, divisor: float | None) -> float:
        """Train on a part; returns this rank's share of its loss."""
        crew, step = self._crew, self._host.global_steps + 1
        stepper, memory = crew.stepper, crew.prepared.memory
        built, weight = stepper.build_together(plan, delivered, crew.plans.table_of(step - 1), step, objective)
        with explained(plan, memory, crew.world.rank, lambda: stepper.running, lambda: stepper.peak_bytes):
            stepper.forward_backward(built, weight, step, normaliser=divisor)
            return stepper.loss_of_part

    def optimizer_step(self) -> Outcome:
        """Update the masters by the gradients of all parts since the last update, and record the step."""
        crew, step = self._crew, self._host.global_steps + 1
        if crew.masters.trained.dropped_grads:
            self.forget()
        if not self.count:
            raise ConfigError("optimizer_step() has no gradients to apply: call forward_backward() before it")
        began = time.perf_counter() - self._seconds
        planned, loss = joined_steps(self._planned), sum(self.losses)
        self._planned, self.losses, self._seconds = [], [], 0.0
        with crew.together("planning"):
            with crew.tracing.step(step):
                outcome = replace(crew.stepper.update(step), other_loss=loss)
            self._steps.record(planned, outcome, time.perf_counter() - began, schedule=False)
            crew.update.count(step, outcome.grad_norm)
        return outcome

    def _check(self, asked: Asked, mine: Mine) -> None:
        if mine.layout is not None:
            vocabulary = self._crew.job.source.vocab_size
            check_objective(asked, mine.sequences, with_targets(mine.layout), vocabulary, self._crew.job.model)
        if asked.mixes:
            check_all(mine)
            if any(sequence.weight != 1.0 for sequence in mine.sequences):
                raise ConfigError(
                    "a loss that mixes tokens says itself what sequences count: leave sequence_weight out"
                )

    def _deliver(self, plan: StepPlan, mine: Mine, gathered: Gathered) -> Delivered:
        return self._shares.deliver(plan, mine.sequences, gathered, gathered.layout.num_columns)

    def _mix(
        self, asked: Asked, plan: StepPlan, mine: Mine, gathered: Gathered, delivered: Delivered
    ) -> tuple[float, float, Delivered]:
        """The loss, its normaliser, and the sequences with what their scores count in it."""
        crew, sequences = self._crew, mine.sequences
        scores, _ = self.scoring.of_sequences(plan, delivered, gathered, self._host.global_steps + 1)
        nothing = [np.zeros((len(one.labels), 1 if asked.valued else 2)) for one in sequences]
        mixed, error = Mixed(0.0, 0, list(map(counted, sequences, nothing))), None
        try:
            if any((sequence.labels != IGNORE_INDEX).any() for sequence in sequences):
                mixed = mix(asked, gathered.layout, sequences, scores, crew.job.model, self._host.device)
        except Exception as raised:  # of the script's own function: the other ranks wait for this one
            error = raised
        agree(crew.world.channel, error, f"the loss of step {self._host.global_steps + 1}", alike=True)
        row = torch.tensor([mixed.total, mixed.num_losses], dtype=torch.float64)
        total, count = crew.world.channel.rows(row).sum(dim=0).tolist()
        divisor = float(asked.normaliser) if not isinstance(asked.normaliser, str) else count or 1.0
        columns = of_mixed(gathered.layout, valued=asked.valued).layout.num_columns
        again = self._shares.deliver(plan, mixed.sequences, gathered, columns)
        return total / divisor, divisor, again


def _counted(asked: Asked, gathered: Gathered) -> float:
    """What the losses of a part are divided by."""
    if not isinstance(asked.normaliser, str):
        return asked.normaliser
    return float(max(1, gathered.num_learnt if asked.normaliser == "sequences" else gathered.num_targets))
