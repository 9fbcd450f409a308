"""The next step of a job in, from its training data or handed in; the step planned, run, applied and recorded out.

Start reading at `Steps.train`, whose lines stand in the order in which a step happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ds_hydra.costs.analytic import flops_of
from ds_hydra.data.stream import StreamSampler
from ds_hydra.data.tokens import Sequences
from ds_hydra.elastic.view import NormTable
from ds_hydra.engine.crew import Crew
from ds_hydra.engine.evaluation import Evaluation, evaluate
from ds_hydra.engine.handed import HandedSteps, ReadyStep
from ds_hydra.engine.out_of_memory import explained
from ds_hydra.engine.parts import Parts
from ds_hydra.engine.record import Measured, stage_times, step_record
from ds_hydra.engine.scoring import refuse_without_loss
from ds_hydra.engine.shares import deliver_streamed
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.modes import refuse_without_gradients
from ds_hydra.pipe.loss import TokenFunction, width_of
from ds_hydra.pipe.models.refusals import in_evaluation
from ds_hydra.pipe.placement import Strategy
from ds_hydra.planner import PlannedStep
from ds_hydra.ranks.rank_stats import RankStats
from ds_hydra.step.built import Built
from ds_hydra.step.outcome import Floats, Outcome, PhaseOutcome, mean_of
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import norm_of

logger = logging.getLogger(__name__)
Handed = Callable[[], ReadyStep]


class OpenStep(NamedTuple):
    """A step that was begun."""

    step: int  # counted from 0
    planned: PlannedStep
    weight: int
    began: float  # by `time.perf_counter`
    strategies: tuple[Strategy, ...]  # of its phases

    def voted(self, table: NormTable, scale: float) -> Outcome:
        """What is known of it by the vote alone: loss and norm; `scale` was the loss scale [Note: the vote]."""
        nothing = dict.fromkeys(RankStats._fields, 0.0)
        stats = [tuple(RankStats(**nothing) for _ in table.rows) for _ in self.strategies]
        stats[0] = tuple(RankStats(**{**nothing, "loss": loss}) for _, _, loss in table.rows)
        norm = float(norm_of(torch.tensor(table.rows, dtype=torch.float64))) / scale
        phases = tuple(PhaseOutcome(*one) for one in zip(self.strategies, stats, strict=True))
        return Outcome(phases, self.weight, norm, 0, 0, None)


class Steps:
    """Runs the steps and evaluations of a host on its crew. Every rank must call the same methods."""

    def __init__(self, host: HostEngine, crew: Crew):
        self.host, self.crew = host, crew
        self.open: OpenStep | None = None  # the last step that was begun
        self.handed = HandedSteps(crew, host.limits())
        self.parts = Parts(self)

    def drop(self) -> None:
        """Let go of the crew: its parts hold each other, and it."""
        for held in (self.parts, self):
            vars(held).clear()

    def begin_training(self, call: str) -> None:
        """Put the model into training where that changes what it computes, as DeepSpeed's own train_batch does.
        RuntimeError under torch.no_grad()."""
        refuse_without_gradients(call, "call eval_batch() to evaluate")
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

    def train(self, handed: Handed | None = None) -> Outcome:
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
            self._protect()
            planned, (built, weight) = self._ready(ready)
            step, strategies = host.global_steps + 1, map(crew.stepper.runtimes.strategy_of, planned.plan.phases)
            self.open = OpenStep(host.global_steps, planned, weight, began, tuple(strategies))
            self._begin_next()
            stepper, prepared = crew.stepper, crew.prepared
            no_memory = explained(
                planned.plan, prepared.memory, crew.world.rank, lambda: stepper.running, lambda: stepper.peak_bytes
            )
            with crew.tracing.step(step), no_memory:
                keep = ready is not None and ready.batches is not None
                outcome = stepper.run(built, weight, step, crew.coming.row, keep_losses=keep)
            crew.coming.heard(outcome.coming)
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

    def evaluate_handed(self, batch: Any) -> tuple[float, float]:
        """Mean losses of what the ranks hand in, without an update: over this rank's targets, and over all; NaN where
        there are none."""
        refuse_without_loss(self.crew.job.source)
        with self.crew.activity("evaluation"):
            plan, data, own = self.handed.evaluated(batch)
        with self.crew.together("evaluation"):
            found = self.crew.stepper.forwards.sequence_losses(plan, data, self.crew.plans.table)
        return mean_of(found, own), mean_of(found)

    def predict_handed(self, batch: Any, function: TokenFunction) -> tuple[float, Floats]:
        """Mean loss of the batches that the ranks hand in, and what a function of logits gives for each token of this
        rank's: (tokens, k), sequence after sequence."""
        refuse_without_loss(self.crew.job.source)
        width = width_of(function, self.crew.job.source.vocab_size or 2)
        with self.crew.activity("evaluation"):
            plan, data, own = self.handed.evaluated(batch)
        with self.crew.together("evaluation"):
            loss, found = self.crew.stepper.forwards.predictions(plan, data, self.crew.plans.table, function, width)
        begin = sum(plan.lengths[: own.start])
        return loss, found[begin : begin + sum(plan.lengths[own])]

    def evaluate_batch(self, batch: Any) -> float:
        """Mean loss of a dataset that all ranks have, run at once."""
        refuse_without_loss(self.crew.job.source)
        data = self.host.sequences(batch)
        ids = tuple(i for i, length in enumerate(data.lengths) if length)
        with self.crew.together("evaluation"):
            plan = self.crew.plans.plan_once(ids, tuple(int(data.lengths[i]) for i in ids))
            return self.crew.stepper.forwards.evaluate(plan, data, self.crew.plans.table)

    def evaluate(self, dataset: Any) -> Evaluation:
        """The loss of each sequence of a dataset that all ranks have, some at a time."""
        refuse_without_loss(self.crew.job.source)
        data = self.host.sequences(dataset)
        with self.crew.together("evaluation"):
            return evaluate(self.crew, data, self.host.hydra_config.tokens_per_step)

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

    def _ready(self, handed: ReadyStep | None) -> tuple[PlannedStep, tuple[Built, int]]:
        """The next step with its micro-batches and its loss weight."""
        host, crew = self.host, self.crew
        made = crew.coming.take(host.global_steps) if handed is None else None
        if made is not None and made.built is not None:
            if host.data is not None:
                host.data.check_unchanged(host.global_steps)
            return made.planned, made.built
        planned, data = handed[:2] if handed else self._drawn(made.planned if made else None)
        crew.real_sequences.before_step(planned.plan, data, crew.stepper.runtimes.strategy_of)
        built = crew.stepper.build_together(
            planned.plan, data, crew.plans.table_of(host.global_steps), host.global_steps + 1
        )
        return planned, built

    def _begin_next(self) -> None:
        """Make the step after the present one ready, if it can be and there is one."""
        host, total = self.host, self.host.hydra_config.total_steps
        step = host.global_steps + 1
        if self.crew.plans.makes_ready and host.data is not None and (total is None or step < total):
            host.data.unchanged.begin()
            self.crew.coming.begin(step, host.data)

    def _drawn(self, planned: PlannedStep | None) -> tuple[PlannedStep, Sequences]:
        """The next step of the training data, `planned` if it is already."""
        host = self.host
        planned = planned or self.crew.plans.next(host.global_steps)
        if isinstance(host.sampler, StreamSampler):
            return planned, deliver_streamed(self.crew, planned.plan, host.sampler)
        assert host.data is not None, "data that are not streamed are map-style"
        return planned, host.data

    def record(self, planned: PlannedStep, outcome: Outcome, seconds: float, *, schedule: bool = True) -> None:
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
            watched=watched,
        )
        host.finish_step(record, schedule=schedule)
        crew.tracing.write(step, planned.plan, crew.plans.table_of(step - 1))
        crew.learned.learn(step, planned.plan)

    def _flops(self, lengths: Sequence[int]) -> float | None:
        """Of the model, for these sequences; None on CPUs, whose speed nobody asks for, or where it is not known."""
        crew = self.crew
        on_gpu = crew.world.device.type == "cuda"
        return flops_of(crew.job.source.plan, crew.prepared.hidden, lengths) if on_gpu else None
