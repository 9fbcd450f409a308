"""The next step of a job, from its training data or handed in, whole or in parts: planned, run, applied and recorded.

[Note: a step that is handed in]
Nothing is known of such a step before the call, so nothing of it can be planned ahead. In order:

  read      each rank reads its own share; an error of one is raised on all, with the rank and the item
  gather    one small message: every rank learns all lengths, and with them whose the sequences are
  plan      rank 0 plans, by compiled kernels in milliseconds, and tells the others
  deliver   token ids go from the rank that has them to those that run them (`step.delivery`)

Until the last of these nothing of the engine has changed: a script may catch the error and hand in something else.

A step may come in parts, by `Parts.forward_backward`: see [Note: a step in parts], [Note: losses of log-probabilities].

Start reading at `TrainingSteps.train`, whose lines stand in the order in which a step happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_hydra.costs.analytic import flops_of
from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.stream import StreamSampler, is_stream
from ds_hydra.data.tokens import LeftOut, Sequences, TokenSequence, with_targets
from ds_hydra.engine.costs import explained
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.data import Dispatched, Gathered, Mine, SequenceExchange, deliver_streamed
from ds_hydra.engine.losses import (
    LossRequest,
    Mixed,
    SequenceLoss,
    Weighed,
    by_gradients,
    check_objective,
    checked_normaliser,
    counted,
    mix,
    weigh,
)
from ds_hydra.engine.record import Measured, stage_times, step_record
from ds_hydra.engine.scoring import Scoring, check_all, refuse_without_loss
from ds_hydra.host.devices import refuse_modes
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.pipe.loss import Objective
from ds_hydra.pipe.models.refusals import in_evaluation
from ds_hydra.pipe.placement import Strategy
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PlannedStep
from ds_hydra.planner.recipe import joined_steps
from ds_hydra.ranks.channel import agree
from ds_hydra.ranks.rank_stats import RankStats
from ds_hydra.step.batching import BuiltStep
from ds_hydra.step.delivery import Delivered
from ds_hydra.step.outcome import Floats, PhaseOutcome, StepOutcome, mean_of
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import norm_of
from ds_hydra.zero_hetero.norm_table import NormTable

logger = logging.getLogger(__name__)


class Intake:
    """Takes the share of each step from what a script passes: the share itself, or an iterator or loader of shares."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())

    def take(self, handed: Any) -> Any:
        """The share of the next step. Raises StopIteration when an iterator has none left.

        A loader, which can be iterated but not indexed, is iterated again when it ends, as long as the script passes
        the same one.
        """
        if hasattr(handed, "__next__"):
            return next(handed)
        if not is_stream(handed):
            return handed
        if handed is not self._loader:
            self._loader, self._iterator = handed, iter(handed)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(handed)
            return next(self._iterator)


class HandedStep(NamedTuple):
    """A step whose sequences a script has handed in: planned, and delivered to the ranks that run them."""

    planned: PlannedStep
    sequences: Sequences
    loss: float | None = None  # the step's, where it is not that of its tokens
    batches: tuple[slice, ...] | None = None  # the sequences of each of this rank's batches, where their losses count
    run_twice: int = 0  # batches that have run before, of all ranks

    def completed(self, outcome: StepOutcome) -> StepOutcome:
        """The outcome of the step, with the losses that scripts are told."""
        kept = outcome.of_sequences
        # A model's own output has its routers' loss in it: a batch is told the whole step's.
        own = [mean_of(kept, part) + outcome.router_loss for part in self.batches or ()] if kept else []
        by_script = self.loss is not None
        return replace(outcome, other_loss=self.loss, by_script=by_script, batch_losses=own, run_twice=self.run_twice)


class HandedSteps:
    """Makes steps of what scripts hand in [Note: a step that is handed in]. Every rank must call the same methods.

    They raise on all ranks ConfigError for items that cannot be trained on, and PlanError where no strategy holds the
    longest sequence.
    """

    def __init__(self, crew: Crew, shares: SequenceExchange):
        self._crew, self._intake, self.shares = crew, Intake(), shares
        self._by_batch, self._told_other = crew.job.config.loss_norm == "batch", False
        self.run_twice = 0  # batches of the coming step that have run before, of all ranks

    def next(self, step: int, handed: Any, sequence_loss: SequenceLoss | None = None) -> HandedStep:
        """Plan and deliver `step`, counted from 0, from what this rank's script passed to `train_batch`.

        With a `sequence_loss` the sequences run forward first [Note: losses of whole sequences]. Raises StopIteration
        when the iterators of all ranks have ended.
        """
        mine = self._taken(handed)
        if sequence_loss is None:
            return self._planned(step, mine)
        return self._weighed_by(sequence_loss, step, self.shares.dispatch(self._all_of(mine), step=step))

    def collected(self, step: int, batches: Iterable[tuple[Any, float]], whole: int) -> HandedStep:
        """Plan and deliver `step` from this rank's batches and the factors of their losses; `whole` batches of all
        ranks make an update."""
        return self._planned(step, self.read(batches), whole)

    def read(self, batches: Iterable[tuple[Any, float]]) -> Mine:
        """This rank's batches of the three calls, with the factors of their losses; or why they cannot be trained
        on."""
        mine = self.shares.read(batches)
        model = self._crew.job.model
        if (path := in_evaluation(model, self._crew.job.source.drawing)) is not None:
            mine = Mine(error=ConfigError(
                f"{path} is in evaluation mode, as from_pretrained makes a model: in DeepSpeed's loop it would train "
                "as in an evaluation, without dropout and noise, and stages train as in training. Call engine.train() "
                "before the first batch, or set the rates to 0 in the model's config"
            ))  # fmt: skip
        return mine

    def _taken(self, handed: Any) -> Mine:
        try:
            return self.shares.read([(self._intake.take(handed), 1.0)])
        except StopIteration:
            return Mine(ended=True)
        except Exception as raised:  # of the script's own iterator: the other ranks wait for this one
            return Mine(error=raised)

    def _planned(self, step: int, mine: Mine, whole: int = 0) -> HandedStep:
        """`whole`: of the three calls, whose batches are told their losses; else as many as there are."""
        mine = self.with_targets(mine)
        _, planned, gathered, delivered = self.shares.dispatch(
            mine, step=step, run=lambda _, of_all: self.weighed(mine, of_all, whole or of_all.num_batches)
        )
        self.tell_other(gathered.num_batches, whole or gathered.num_batches)
        own = tuple(mine.places(gathered.begins[self._crew.world.rank])) if whole else None
        return HandedStep(planned, delivered, batches=own, run_twice=self.run_twice)

    def with_targets(self, mine: Mine) -> Mine:
        """An error in place of batches whose means count and are none."""
        empty = [number for number, (share, _) in enumerate(mine.batches) if share.num_items and not share.num_targets]
        if not (self._by_batch and empty):
            return mine
        return Mine(error=ConfigError(
            f"batch {empty[0]} has no target, so the mean over its targets is no number, but hydra.loss_norm is "
            '"batch": hand in none without targets, or use "token"'
        ))  # fmt: skip

    @property
    def by_batch(self) -> bool:
        """Whether each batch counts by itself what it counts in a step."""
        return self._by_batch

    def _all_of(self, mine: Mine) -> Mine:
        """An error in place of a share that a loss of whole sequences cannot be computed on."""
        config = self._crew.job.config
        if mine.left_out != LeftOut() and mine.error is None:
            return Mine(
                error=ConfigError(f"a sequence_loss is of all sequences that are handed in, but {mine.left_out}")
            )
        if config.loss_norm in ("sequence", "micro_batch"):
            return Mine(error=ConfigError(
                f'a sequence_loss says itself what sequences count, but hydra.loss_norm is "{config.loss_norm}": leave '
                'it at "token"'
            ))  # fmt: skip
        if self._crew.job.source.balances:
            return Mine(error=ConfigError(
                "a sequence_loss may count a sequence negatively, and its routers' loss with it: set "
                "output_router_logits to false in the model's config"
            ))  # fmt: skip
        return mine

    def _weighed_by(self, function: SequenceLoss, step: int, handed: Dispatched) -> HandedStep:
        """Run a step's sequences forward, and let their tokens count what the function makes of the sums."""
        mine, planned, gathered, delivered = handed
        crew, plan, channel = self._crew, planned.plan, self._crew.world.channel
        with crew.together("evaluation"):
            sums, _ = crew.stepper.forwards.sequence_losses(plan, delivered, crew.plans.table_of(step), step=step + 1)
        own = gathered.own(channel.rank)
        factors = torch.tensor([sequence.weight for sequence in mine.sequences], dtype=torch.float64)
        weighed, error = Weighed(0.0, 0, factors), None
        try:
            if len(factors):
                weighed = weigh(function, torch.from_numpy(sums[own]) * factors, crew.job.model)
        except Exception as raised:  # of the script's own function: the other ranks wait for this one
            error = raised
        agree(channel, error, f"the sequence_loss of step {step + 1}", alike=True)
        row = torch.zeros(2 + len(plan.lengths), dtype=torch.float64)
        row[0], row[1] = weighed.total, weighed.num_groups
        row[2:][own] = factors * weighed.gradients
        total, num_groups, *counts = channel.rows(row).sum(dim=0).tolist()
        # The step divides by all targets; this loss by all groups.
        scale = gathered.num_targets / num_groups
        weights = {number: count * scale for number, count in zip(plan.sequence_ids, counts, strict=True)}
        return HandedStep(planned, delivered.weighed(weights), total / num_groups)

    def tell_other(self, num_batches: int, whole: int) -> None:
        """Say once where an update has more or fewer batches than configured, and what each counts."""
        if not self._by_batch or num_batches == whole or self._told_other:
            return
        self._told_other = True
        if self._crew.world.rank == 0:
            logger.warning(
                "an update of %d batches, where gradient_accumulation_steps and ranks make %d: by hydra.loss_norm "
                '"batch" each counts 1/%d as in DeepSpeed\'s loop, so it is %.3g of their mean; "token" takes the '
                "mean over the targets that there are (told once)",
                num_batches, whole, whole, num_batches / whole,
            )  # fmt: skip

    def weighed(self, mine: Mine, gathered: Gathered, whole: int) -> list[TokenSequence]:
        """This rank's sequences, with what their losses count; `whole` batches make an update [Note: three calls]."""
        weighed: list[TokenSequence] = []
        for share, factor in mine.batches:
            # The step divides by all targets, 50. To count 1/4 in all, the 10 targets of one of 4 batches weigh
            # 50 / (4 * 10) each: 10 * 1.25 / 50 is 1/4.
            if self._by_batch:
                factor *= gathered.num_targets / max(1, whole * share.num_targets)
            weighed += [sequence._replace(weight=sequence.weight * factor) for sequence in share.sequences]
        return weighed


class Parts:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, steps: TrainingSteps):
        self._steps, self._host, self._crew = steps, steps.host, steps.crew
        self._shares, self._scoring = steps.shares, steps.scoring
        self._planned: list[PlannedStep] = []
        self.losses: list[float] = []  # of the parts that wait for an update
        self._seconds, self._by_script = 0.0, False

    @property
    def count(self) -> int:
        """Parts whose gradients wait for an update."""
        return len(self._crew.waiting)

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
        self._planned, self.losses, self._seconds, self._by_script = [], [], 0.0, False

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
            first = sum(len(planned.plan.lengths) for planned in self._planned)
            handed = self._shares.dispatch(mine, call=call, step=step - 1, first=first)
            _, planned, gathered, delivered = handed
        with crew.together("planning"):
            crew.real_sequences.before_step(planned.plan, delivered, crew.stepper.runtimes.strategy_of)
            of_loss, objective, divisor = None, None, normaliser and float(normaliser)
            if asked is not None and asked.mixes:
                of_loss, divisor, delivered = self._mix(asked, handed)
                objective = by_gradients(gathered.layout, valued=asked.valued)
            elif asked is not None:
                objective, divisor = asked.objective(gathered.layout), _counted(asked, gathered)
            if objective is not None:
                objective = replace(objective, routing=self._scoring.routing_in(gathered.layout))
            share = self._run(planned.plan, delivered, objective, divisor)
            if of_loss is None:
                of_loss = sum(crew.world.channel.rows(torch.tensor([share], dtype=torch.float64)).flatten().tolist())
        self._planned.append(planned)
        self.losses.append(of_loss)
        self._seconds += time.perf_counter() - began
        return of_loss

    def _asked(
        self, batch: Any, loss: Any, normaliser: float | None, temperature: float | None, mixes_tokens: bool | None
    ) -> tuple[LossRequest | None, Mine]:
        """What a call asks for, None for the job's own loss, and its sequences; or the error, which all ranks raise."""
        try:
            if loss is not None:
                self._scoring.check_model(trains=True)
                asked = LossRequest.of(loss, normaliser, mixes_tokens, valued=self._scoring.valued)
                mine = self._shares.read([(batch, 1.0)], self._scoring.reads(temperature))
                return asked, mine.checked(partial(self._check, asked))
            refuse_without_loss(self._crew.job.source)
            if temperature is not None or mixes_tokens:
                raise ConfigError("temperature and mixes_tokens are for a loss of log-probabilities: pass one")
            if normaliser is not None:
                checked_normaliser(normaliser)
        except ConfigError as error:
            return None, Mine(error=error)
        return None, self._shares.read([(batch, 1.0)])

    def add_objective(self, planned: PlannedStep, delivered: Delivered, objective: Objective, divisor: float) -> None:
        """Train on a part of a step by a loss of scores."""
        with self._running(planned):
            self._run(planned.plan, delivered, objective, divisor)

    def add(self, planned: PlannedStep, delivered: Delivered, divisor: float | None) -> tuple[Floats, Floats]:
        """Train on a part of a step by the job's own loss; the losses of its sequences, as `sequence_losses` has
        them."""
        crew = self._crew
        with self._running(planned):
            crew.real_sequences.before_step(planned.plan, delivered, crew.stepper.runtimes.strategy_of)
            self._run(planned.plan, delivered, None, divisor, keep_losses=True)
            return crew.stepper.taken_losses()

    @contextmanager
    def _running(self, planned: PlannedStep) -> Iterator[None]:
        """A part of a step of the three calls runs within it."""
        began = time.perf_counter()
        with self._crew.together("planning"):
            self._crew.away.bring_back()
            yield
        self._planned.append(planned)
        self._seconds += time.perf_counter() - began

    def router_loss(self, weighed: Sequence[TokenSequence]) -> float:
        """What the routers add to the mean loss of the part that was added last, of these sequences of this rank."""
        by_targets = self._crew.job.config.loss_norm in ("token", "batch")
        known = [int((one.labels != IGNORE_INDEX).sum()) for one in weighed]
        counted = sum(one.weight * (n if by_targets else min(n, 1)) for one, n in zip(weighed, known, strict=True))
        row = torch.tensor([self._crew.stepper.routers_of_part, counted], dtype=torch.float64)
        total, weight = self._crew.world.channel.rows(row).sum(dim=0).tolist()
        return float(total / weight) if weight else 0.0

    def _run(
        self,
        plan: StepPlan,
        delivered: Delivered,
        objective: Objective | None,
        divisor: float | None,
        *,
        keep_losses: bool = False,
    ) -> float:
        """Train on a part; returns this rank's share of its loss."""
        crew, step = self._crew, self._host.global_steps + 1
        stepper, memory = crew.stepper, crew.prepared.memory
        self._by_script = self._by_script or objective is not None
        built, weight = stepper.build_together(plan, delivered, crew.plans.table_of(step - 1), step, objective)
        with explained(plan, memory, crew.world.rank, lambda: stepper.running, lambda: stepper.peak_bytes):
            stepper.forward_backward(built, weight, step, normaliser=divisor, keep_losses=keep_losses)
            return 0.0 if keep_losses else stepper.loss_of_part

    def optimizer_step(self) -> StepOutcome:
        """Update the masters by the gradients of all parts since the last update, and record the step."""
        if self._crew.masters.trained.dropped_grads:
            self.forget()
        if not self.count:
            raise ConfigError("optimizer_step() has no gradients to apply: call forward_backward() before it")
        return self._update(sum(self.losses), None, schedule=False)

    def end_step(self, scale: float, loss: float | None = None) -> StepOutcome:
        """The update of a step of the three calls whose parts were `add`ed; their sums count `scale`, and the step's
        `loss` is theirs if it is not given."""
        return self._update(loss, scale, schedule=True)

    def _update(self, loss: float | None, scale: float | None, *, schedule: bool) -> StepOutcome:
        crew, step, began = self._crew, self._host.global_steps + 1, time.perf_counter() - self._seconds
        planned, by_script = joined_steps(self._planned), self._by_script
        self._planned, self.losses, self._seconds, self._by_script = [], [], 0.0, False
        with crew.together("planning"):
            crew.away.bring_back()
            with crew.tracing.step(step):
                outcome = replace(crew.stepper.update(step, scale=scale), other_loss=loss, by_script=by_script)
            self._steps.record(planned, outcome, time.perf_counter() - began, schedule=schedule)
            crew.update.count(step, outcome.grad_norm)
        return outcome

    def _check(self, asked: LossRequest, mine: Mine) -> None:
        if mine.layout is not None:
            vocabulary = self._crew.job.source.vocab_size
            check_objective(asked, mine.sequences, with_targets(mine.layout), vocabulary, self._crew.job.model)
        if asked.mixes:
            check_all(mine)
            if any(sequence.weight != 1.0 for sequence in mine.sequences):
                raise ConfigError(
                    "a loss that mixes tokens says itself what sequences count: leave sequence_weight out"
                )

    def _mix(self, asked: LossRequest, handed: Dispatched) -> tuple[float, float, Delivered]:
        """The loss, its normaliser, and the sequences with what their scores count in it."""
        crew, gathered, sequences = self._crew, handed.gathered, handed.mine.sequences
        scores, _ = self._scoring.of_sequences(handed, self._host.global_steps + 1)
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
        columns = by_gradients(gathered.layout, valued=asked.valued).layout.num_columns
        return total / divisor, divisor, self._shares.deliver(handed.plan, mixed.sequences, gathered, columns)


def _counted(asked: LossRequest, gathered: Gathered) -> float:
    """What the losses of a part are divided by."""
    if not isinstance(asked.normaliser, str):
        return asked.normaliser
    return float(max(1, gathered.num_learnt if asked.normaliser == "sequences" else gathered.num_targets))


Handed = Callable[[], HandedStep]


class OpenStep(NamedTuple):
    """A step that was begun."""

    step: int  # counted from 0
    planned: PlannedStep
    weight: int
    began: float  # by `time.perf_counter`
    strategies: tuple[Strategy, ...]  # of its phases

    def voted(self, table: NormTable, scale: float) -> StepOutcome:
        """What is known of it by the vote alone: loss and norm; `scale` was the loss scale [Note: the vote]."""
        nothing = dict.fromkeys(RankStats._fields, 0.0)
        stats = [tuple(RankStats(**nothing) for _ in table.rows) for _ in self.strategies]
        stats[0] = tuple(RankStats(**{**nothing, "loss": loss}) for _, _, loss in table.rows)
        norm = float(norm_of(torch.tensor(table.rows, dtype=torch.float64))) / scale
        phases = tuple(PhaseOutcome(*one) for one in zip(self.strategies, stats, strict=True))
        return StepOutcome(phases, self.weight, norm, 0, 0, None)


class TrainingSteps:
    """Runs the steps and evaluations of a host on its crew. Every rank must call the same methods."""

    def __init__(self, host: HostEngine, crew: Crew):
        self.host, self.crew = host, crew
        self.open: OpenStep | None = None  # the last step that was begun
        self.shares = SequenceExchange(crew, host.limits())
        self.scoring = Scoring(host, crew, self.shares)
        self.handed = HandedSteps(crew, self.shares)
        self.parts = Parts(self)

    def drop(self) -> None:
        """Let go of the crew: its parts hold each other, and it."""
        for held in (self.parts, self):
            vars(held).clear()

    def begin_training(self, call: str) -> None:
        """Put the model into training where that changes what it computes, as DeepSpeed's own train_batch does.
        RuntimeError under torch.no_grad()."""
        refuse_modes(call, "call eval_batch() to evaluate")
        model = self.crew.job.model
        if (path := in_evaluation(model, self.crew.job.source.drawing)) is None:
            return
        model.train()
        if self.crew.world.rank == 0:
            logger.warning(
                "%s was in evaluation mode, in which it computes something else than in training: %s has put the whole "
                "model into training, as DeepSpeed's train_batch() does. To train without dropout set its rates to 0 "
                "in the config", path, call,
            )  # fmt: skip

    def train(self, handed: Handed | None = None) -> StepOutcome:
        """Run the next step: what `handed` gives, or of the training data where it is None.

        Raises NumericsError when too many steps in a row were skipped.
        """
        host, crew = self.host, self.crew
        self.parts.refuse_if_any("a whole step")
        refuse_without_loss(self.crew.job.source)
        self.refuse(handed=handed is not None)
        began = time.perf_counter()
        ready = None
        # Errors of what is handed in are raised on all ranks alike, and nothing has changed: a script may go on.
        if handed is not None:
            with crew.activity("reading sequences"):
                ready = handed()
        with crew.together("planning"):
            crew.away.bring_back()
            self._protect()
            planned, (built, weight) = self._ready(ready)
            step, strategies = host.global_steps + 1, crew.strategies_of(planned.plan)
            self.open = OpenStep(host.global_steps, planned, weight, began, tuple(strategies))
            self._begin_next()
            stepper, prepared = crew.stepper, crew.prepared
            no_memory = explained(
                planned.plan, prepared.memory, crew.world.rank, lambda: stepper.running, lambda: stepper.peak_bytes
            )
            with crew.tracing.step(step), no_memory:
                keep = ready is not None and ready.batches is not None
                outcome = stepper.run(built, weight, step, crew.next_step.row, keep_losses=keep)
            crew.next_step.heard(outcome.coming)
            if host.data is not None and outcome.coming is not None:
                host.data.unchanged.keep()
            if ready is not None:
                outcome = ready.completed(outcome)
            self.record(planned, outcome, time.perf_counter() - began)
            # Counting raises an error when too many steps in a row were skipped. It comes after the record, so that the
            # step which ended the job stands in the log and in `steps_file`.
            crew.update.count(step, outcome.grad_norm)
        return outcome

    def _protect(self) -> None:
        """Make the copies whole, if the masters have got other values, and compare them when that is due."""
        crew, step, elastic = self.crew, self.host.global_steps, self.host.hydra_config.elastic
        if crew.copy is None or elastic is None:
            crew.update.committed = step
            return
        if crew.copy.stale:
            crew.copy.refresh()
            crew.update.committed = step
        elif elastic.compare_every and step % elastic.compare_every == 0:
            crew.copy.compare(step)

    def refuse(self, *, handed: bool) -> None:
        """ConfigError where no step can come, or none that is handed in or of the training data."""
        host = self.host
        if not self.crew.masters.trained.buckets:
            raise ConfigError(
                "every parameter of the model is frozen: the engine evaluates and gives log-probabilities, and has "
                "nothing to train; call requires_grad_() on some before ds_hydra.initialize(), and give an optimizer"
            )
        host.refuse_further_steps()
        if handed and host.sampler is not None:
            raise ConfigError(
                "sequences cannot be handed in beside training_data: call train_batch(), or leave training_data out of "
                "initialize()"
            )
        if not handed and host.sampler is None:
            raise ConfigError("train_batch() needs sequences: pass them, or training_data to initialize()")

    def _ready(self, handed: HandedStep | None) -> tuple[PlannedStep, tuple[BuiltStep, int]]:
        """The next step with its micro-batches and its loss weight."""
        host, crew = self.host, self.crew
        planned, built = crew.next_step.take(host.global_steps) if handed is None else (None, None)
        if planned is not None and built is not None:
            if host.data is not None:
                host.data.check_unchanged(host.global_steps)
            return planned, built
        planned, data = handed[:2] if handed else self._drawn(planned)
        crew.real_sequences.before_step(planned.plan, data, crew.stepper.runtimes.strategy_of)
        costs = crew.plans.table_of(host.global_steps)
        return planned, crew.stepper.build_together(planned.plan, data, costs, host.global_steps + 1)

    def _begin_next(self) -> None:
        """Make the step after the present one ready, if it can be and there is one."""
        host, total = self.host, self.host.hydra_config.total_steps
        step = host.global_steps + 1
        if self.crew.plans.makes_ready and host.data is not None and (total is None or step < total):
            host.data.unchanged.begin()
            self.crew.next_step.begin(step, host.data)

    def _drawn(self, planned: PlannedStep | None) -> tuple[PlannedStep, Sequences]:
        """The next step of the training data, `planned` if it is already."""
        host = self.host
        planned = planned or self.crew.plans.next(host.global_steps)
        if isinstance(host.sampler, StreamSampler):
            return planned, deliver_streamed(self.crew, planned.plan, host.sampler)
        assert host.data is not None, "data that are not streamed are map-style"
        return planned, host.data

    def record(self, planned: PlannedStep, outcome: StepOutcome, seconds: float, *, schedule: bool = True) -> None:
        """Record a step that took `seconds` since it was asked for; `schedule` as of `HostEngine.finish_step`."""
        host, crew = self.host, self.crew
        step, measured = host.global_steps + 1, Measured.of(outcome, seconds)
        watched = crew.watch.fields(
            planned.plan,
            pipeline_ms=measured.pipeline_ms,
            stage_ms=measured.stage_ms,
            step_ms=measured.step_ms,
            moved_bytes=outcome.pull_bytes + outcome.push_bytes,
        )
        lines = crew.watch.uneven_experts(outcome.expert_imbalances)
        if predicted := watched.get("predicted_stage_ms"):  # on all ranks, as plans may follow from it
            lines += crew.watch.slow_ranks(stage_times(outcome, planned.plan, measured, predicted))
        for line in lines if crew.world.rank == 0 else ():
            logger.warning("%s", line)
        record = step_record(
            planned,
            outcome,
            measured,
            step=step,
            previous=host.last_step,
            learning_rate=host.get_lr()[0],
            skipped_steps=host.skipped_steps,
            flops=self._flops(planned.plan.lengths),
            cluster=crew.world.cluster.digest,
            watched={**watched, "new_costs": crew.learned.learn(step, planned.plan)},
        )
        record = replace(record, counts="script" if outcome.by_script else crew.job.config.loss_norm)
        if crew.job.source.options.activation_checkpointing:
            record = replace(record, recomputed=1.0)
        host.finish_step(record, schedule=schedule)
        crew.tracing.write(step, planned.plan, crew.plans.table_of(step - 1))

    def _flops(self, lengths: Sequence[int]) -> float | None:
        """Of the model, for these sequences; None on CPUs, whose speed nobody asks for, or where it is not known."""
        crew = self.crew
        on_gpu = crew.world.device.type == "cuda"
        return flops_of(crew.job.source.plan, crew.prepared.hidden, lengths) if on_gpu else None
