"""Batches of the sampler in; each step's plan, the same on every rank, out. Rank 0 plans, every rank checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.order import Order
from ds_hydra.engine.producer import command_of
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.runnable import check_runnable
from ds_hydra.plan.validate import check_safe, validate_plan
from ds_hydra.planner import PlannedStep, Planner, PlannerService, PlanRecipe, StepPlan
from ds_hydra.planner.producer_process import ProducerProcess
from ds_hydra.planner.service import Waiting
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.telling import Telling
from ds_hydra.ranks.together import as_text, error_from
from ds_hydra.simulate.producer import step_ms_of
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.errors import PlanError, Told, mark_told

logger = logging.getLogger(__name__)
_FAILED = "failed\n"  # before rank 0's error, in place of a plan
_WAITING = "waiting\n"  # in place of a plan that rank 0 is still waiting for


class _Batch(NamedTuple):
    """What is to be planned."""

    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class PlanSource:
    """Hands out the plan of each step, just before the step.

    Rank 0 has the plans made and tells them to the others: so only one process compiles and searches. Every rank
    validates a plan against the sequences that its own sampler drew. `recipe` is the job's, of which only rank 0 needs
    `exposed_ms` and `job`; `producer` is rank 0's, if it has been started.
    """

    def __init__(
        self,
        recipe: PlanRecipe,
        config: HydraConfig,
        sampler: Order | None,
        channel: Channel,
        activity: Activity,
        producer: ProducerProcess | None = None,
    ):
        self._recipe, self._config, self._sampler, self._channel = recipe, config, sampler, channel
        self._activity = activity
        self._rank, self._num_ranks, self._ahead = channel.rank, channel.num_ranks, config.planner.ahead
        self.first_table = recipe.table
        self.tables: tuple[tuple[int, CostTable], ...] = ((0, recipe.table),)  # with the step that each holds from
        self._before = ""  # digest of the recipe by which the job planned that this one goes on from
        self._set_planner()
        self._service = self._start_service(producer)
        self._submitted: int | None = None

    def _set_planner(self) -> None:
        recipe = replace(self._recipe, job=None)
        recipe.planner()  # refuses on every rank what cannot be planned or replayed
        # One plan is not worth compiling for.
        once = replace(recipe.options, kernels="pure", choose="best", replay_file=None)
        self._pure = Planner(recipe.table, recipe.strategies, once, exposed_ms=recipe.exposed_ms)

    def use_table(self, cost_table: CostTable, first: int = 0) -> None:
        """Plan by this cost table from step `first` on. Every rank must call it, with the same arguments."""
        self._recipe = replace(self._recipe, table=cost_table)
        self.tables = (*self.tables[-1:], (first, cost_table))
        self._set_planner()
        if self._service is not None:
            self._service.use_table(cost_table, first)

    @property
    def table(self) -> CostTable:
        """The cost table of the latest plans, and of those outside the training order."""
        return self._recipe.table

    def table_of(self, step: int) -> CostTable:
        """The cost table that the plan of a step is made by, and the schedules that weigh times."""
        return next(table for first, table in reversed(self.tables) if first <= step)

    def _start_service(self, producer: ProducerProcess | None = None) -> PlannerService | None:
        if self._rank != 0:
            return None
        return PlannerService(
            self._recipe, self._ahead, simulation=step_ms_of, frozen_s=self._config.faults.frozen_seconds,
            command=command_of(self._config), producer=producer,
        )  # fmt: skip

    def restart(self, tables: Sequence[tuple[int, CostTable]], before: str) -> None:
        """Go on at another place of the data, by these tables with the step that each holds from.

        `before` is the `first_digest` of the job that is gone on from.
        """
        self._before = before
        (_, table), *later = tables
        if self._submitted is not None:
            self.close()
            self._recipe = replace(self._recipe, table=table)
            self._service, self._submitted = self._start_service(), None
        elif tuple(tables) == self.tables:
            return
        else:
            self.use_table(table)
        self.tables = ((0, table),)
        for first, table in later:
            self.use_table(table, first)

    @property
    def first_digest(self) -> str:
        """Of the recipe without corrections, on rank 0 once a plan was made; else empty."""
        if self._service is None or self._service.kernels == "auto":
            return ""
        options = replace(self._recipe.options, kernels=self._service.kernels)
        return replace(self._recipe, table=self.first_table, options=options).digest

    @property
    def strategies(self) -> tuple[StrategyShape, ...]:
        """Candidates, in the order of the config."""
        return self._recipe.strategies

    @property
    def makes_ready(self) -> bool:
        """Whether a step may be planned while the one before it runs [Note: between two steps]."""
        return self._ahead > 0 and self._sampler is not None and self._sampler.known_to_all

    def next(self, step: int, telling: Telling | None = None) -> PlannedStep:
        """The plan of `step`, equal on all ranks, told by the channel, or in a thread of its own by `telling`.

        Every rank must call it.
        """
        assert self._sampler is not None, "plans of steps need a sampler"
        batch = self._drawn(step) if self._sampler.known_to_all else None
        with nullcontext() if telling else self._activity(f"waiting for plan {step + 1}"):
            return self._share(step, batch, lambda waiting: self._ahead_of(step, waiting), telling)

    def _ahead_of(self, step: int, waiting: Waiting) -> PlannedStep:
        """On rank 0: the plan of `step`, after the coming steps were submitted."""
        assert self._sampler is not None, "plans of steps need a sampler"
        batch = self._drawn(step)
        # With ahead = 2, next(0) submits the batches of steps 0, 1 and 2 and waits for plan 0; next(1) submits step 3
        # and finds plan 1, which was made while step 0 was trained. A stream may not have come that far.
        assert self._service is not None, "rank 0 has a service"
        first = step if self._submitted is None else self._submitted + 1
        for coming in range(first, step + self._ahead + 1):
            if coming > step and not self._sampler.ready(coming):
                break
            self._service.submit(*self._drawn(coming))
            self._submitted = coming
        if not self._service.waits(step):  # its plan was taken, but the step not trained
            self._service.submit(*batch)
        return self._service.get(step, waiting)

    def _drawn(self, step: int) -> _Batch:
        assert self._sampler is not None, "plans of steps need a sampler"
        return _Batch(step, self._sampler.batch(step), self._sampler.batch_lengths(step))

    def given(self, step: int, lengths: tuple[int, ...]) -> PlannedStep:
        """A plan for sequences 0, 1, 2, ... of these lengths, which are known only now. Every rank must call it.

        PlanError is raised on all ranks where no strategy holds the longest sequence.
        """
        batch = _Batch(step, tuple(range(len(lengths))), lengths)
        with self._activity(f"waiting for plan {step + 1}"):
            return self._share(step, batch, lambda waiting: self._at_once(batch, waiting))

    def _at_once(self, batch: _Batch, waiting: Waiting) -> PlannedStep:
        """On rank 0: the plan of a batch that was not known before."""
        assert self._service is not None, "rank 0 has a service"
        self._service.submit(*batch)
        return self._service.get(batch.step, waiting)

    def plan_once(self, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
        """A plan for a batch outside the training order. Every rank must call it."""
        batch = _Batch(0, ids, lengths)

        def made(_: Waiting) -> PlannedStep:
            plan = self._pure.plan(*batch)
            validate_plan(plan, self.table, self._num_ranks, self._recipe.options.objective)
            return PlannedStep(plan, 0.0, hidden=False)

        return self._share(0, batch, made).plan

    def close(self) -> None:
        """End the producer process."""
        if self._service is not None:
            self._service.close()

    def _share(
        self, step: int, batch: _Batch | None, make: Callable[[Waiting], PlannedStep], telling: Telling | None = None
    ) -> PlannedStep:
        """Hand the plan that rank 0 makes to all ranks; each checks that it plans the sequences that it knows of.

        `batch` is None where only rank 0 knows them. An error of rank 0's is raised on all ranks.
        """
        telling, planned, text, mine = telling or self._channel, None, "", None
        if self._rank == 0:
            try:
                planned = make(self._keeps_waiting(telling))
                text = planned.to_text()
            except Exception as error:
                mine, text = error, _FAILED + as_text(error)
        text = telling.tell(text)
        while text == _WAITING:
            text = telling.tell(None)
        if text.startswith(_FAILED):
            cause = text.removeprefix(_FAILED)
            failed = mine or error_from(cause, f"planning step {step + 1} failed on rank 0")
            raise mark_told(failed, Told(0, cause.replace("\n", ": ", 1), here=mine is not None))
        if self._before and planned is not None and self.first_digest:
            if self._before != self.first_digest:
                logger.info("plans follow from other costs, strategies, options, packages or ranks than those of the "
                            "checkpoint did, so steps may be planned otherwise than they would have been")  # fmt: skip
            self._before = ""
        planned = planned or PlannedStep.of_text(text)
        plan = planned.plan
        # The ranks' samplers must agree, but a rank may have been given other data by its script. Then a plan of rank
        # 0's ids would train on other sequences here, without any error further down.
        if batch is not None and (plan.step, plan.sequence_ids, plan.lengths) != batch:
            raise PlanError(
                f"rank {self._rank} drew other sequences for step {step} than rank 0 planned for: the ranks' "
                "data, seed or config differ; give all ranks the same"
            )
        check_runnable(plan, no_slices=self._recipe.options.no_slices)
        # Rank 0, or its producer, has validated the plan: each rank checks again what costs it no time to speak of.
        check_safe(plan, self.table, self._num_ranks)
        return planned

    def _keeps_waiting(self, telling: Telling) -> Waiting:
        """Tells the other ranks to wait on, long before they would give up: a plan may take longer than a message."""
        every_s, last_s = self._config.timeout_seconds / 4, 0.0

        def waiting(waited_s: float) -> None:
            nonlocal last_s
            if waited_s - last_s >= every_s:
                last_s = waited_s
                telling.tell(_WAITING)

        return waiting
