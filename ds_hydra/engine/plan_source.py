"""Batches of the sampler in; each step's plan, the same on every rank, out. Rank 0 plans, every rank checks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.order import Order
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.runnable import check_runnable
from ds_hydra.plan.validate import check_safe
from ds_hydra.planner import PlannedStep, Planner, PlannerOptions, PlannerService, StepPlan, validate_plan
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.telling import Telling
from ds_hydra.ranks.together import as_text, error_from
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.job_record import job_record
from ds_hydra.zero_hetero.errors import PlanError

_FAILED = "failed\n"  # before rank 0's error, in place of a plan


class _Batch(NamedTuple):
    """What is to be planned."""

    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class PlanSource:
    """Hands out the plan of each step, just before the step.

    Rank 0 decides the plans and tells them to the others: they depend on whether its producer answered in time. Every
    rank validates a plan against the sequences that its own sampler drew. On rank 0 `exposed_ms` is as `Planner`'s, and
    `cluster` what the best plans are simulated by, with their messages; None: they are not.
    """

    def __init__(
        self,
        cost_table: CostTable,
        strategies: tuple[StrategyShape, ...],
        options: PlannerOptions,
        sampler: Order | None,
        ahead: int,
        channel: Channel,
        exposed_ms: Sequence[float] = (),
        cluster: SimulatedJob | None = None,
    ):
        self._exposed_ms, self._cluster = exposed_ms, cluster
        self._table, self._options, self._sampler, self._channel = cost_table, options, sampler, channel
        self._rank, self._num_ranks = channel.rank, channel.num_ranks
        self._ahead = ahead
        self._set_planners(strategies)
        self._service = self._start_service()
        self._submitted: int | None = None

    def _set_planners(self, strategies: tuple[StrategyShape, ...]) -> None:
        self._planner = Planner(self._table, strategies, self._options, exposed_ms=self._exposed_ms)
        # One plan is not worth compiling for.
        once = replace(self._options, kernels="pure", choose="best", replay_file=None)
        self._pure = Planner(self._table, strategies, once, exposed_ms=self._exposed_ms)

    def use_table(self, cost_table: CostTable) -> None:
        """Plan by this cost table from the next step on. Every rank must call it, with the same table."""
        self._table = cost_table
        self._set_planners(self._planner.strategies)
        if self._service is not None:
            self._service.use_table(cost_table)

    @property
    def table(self) -> CostTable:
        """The cost table that plans are made by."""
        return self._table

    def _start_service(self) -> PlannerService | None:
        if self._rank != 0 or self._ahead == 0:
            return None
        return PlannerService(
            self._table, self._planner.strategies, self._options, self._ahead, exposed_ms=self._exposed_ms,
            job=None if self._cluster is None else job_record(self._cluster),
            command=(sys.executable, "-m", "ds_hydra.simulate.producer"),
        )  # fmt: skip

    def restart(self) -> None:
        """Forget which steps were planned ahead: the sampler has moved to another place."""
        if self._submitted is not None:
            self.close()
            self._service = self._start_service()
            self._submitted = None

    @property
    def strategies(self) -> tuple[StrategyShape, ...]:
        """Candidates, in the order of the config."""
        return self._planner.strategies

    @property
    def makes_ready(self) -> bool:
        """Whether a step may be planned while the one before it runs [Note: between two steps]."""
        return self._ahead > 0 and self._sampler is not None and self._sampler.known_to_all

    def next(self, step: int, telling: Telling | None = None) -> PlannedStep:
        """The plan of `step`, equal on all ranks, told by `telling` or the channel. Every rank must call it."""
        assert self._sampler is not None, "plans of steps need a sampler"
        batch = self._drawn(step) if self._sampler.known_to_all else None
        return self._share(step, batch, lambda: self._ahead_of(step), telling)

    def _ahead_of(self, step: int) -> PlannedStep:
        """On rank 0: the plan of `step`, after the coming steps were submitted."""
        assert self._sampler is not None, "plans of steps need a sampler"
        batch = self._drawn(step)
        # With ahead = 2, next(0) submits the batches of steps 0, 1 and 2 and waits for plan 0; next(1) submits step 3
        # and finds plan 1, which was made while step 0 was trained. A stream may not have come that far.
        if self._service is not None:
            first = step if self._submitted is None else self._submitted + 1
            for coming in range(first, step + self._ahead + 1):
                if coming > step and not self._sampler.ready(coming):
                    break
                self._service.submit(*self._drawn(coming))
                self._submitted = coming
            if not self._service.waits(step):  # its plan was taken, but the step not trained
                self._service.submit(*batch)
        return self._planned(batch)

    def _drawn(self, step: int) -> _Batch:
        assert self._sampler is not None, "plans of steps need a sampler"
        return _Batch(step, self._sampler.batch(step), self._sampler.batch_lengths(step))

    def given(self, step: int, lengths: tuple[int, ...]) -> PlannedStep:
        """A plan for sequences 0, 1, 2, ... of these lengths, which are known only now. Every rank must call it.

        PlanError is raised on all ranks where no strategy holds the longest sequence.
        """
        batch = _Batch(step, tuple(range(len(lengths))), lengths)
        return self._share(step, batch, lambda: self._at_once(batch))

    def _at_once(self, batch: _Batch) -> PlannedStep:
        """On rank 0: the plan of a batch that was not known before."""
        if self._service is not None:
            # It has compiled kernels, or gets them without stopping training: worth a message there and back.
            self._service.submit(*batch)
        return self._planned(batch)

    def plan_once(self, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
        """A plan for a batch outside the training order. Every rank must call it."""
        batch = _Batch(0, ids, lengths)
        return self._share(0, batch, lambda: self._plan_here(self._pure, batch)).plan

    def close(self) -> None:
        """End the producer process."""
        if self._service is not None:
            self._service.close()

    def _planned(self, batch: _Batch) -> PlannedStep:
        return self._service.get(batch.step) if self._service else self._plan_here(self._planner, batch)

    def _plan_here(self, planner: Planner, batch: _Batch) -> PlannedStep:
        began = time.perf_counter()
        plan = planner.plan(*batch)
        planning_ms = (time.perf_counter() - began) * 1e3
        validate_plan(plan, self._table, self._num_ranks, self._options.objective)
        return PlannedStep(plan, planning_ms, hidden=False)

    def _share(
        self, step: int, batch: _Batch | None, make: Callable[[], PlannedStep], telling: Telling | None = None
    ) -> PlannedStep:
        """Hand the plan that rank 0 makes to all ranks; each checks that it plans the sequences that it knows of.

        `batch` is None where only rank 0 knows them. An error of rank 0's is raised on all ranks.
        """
        planned, text, mine = None, "", None
        if self._rank == 0:
            try:
                planned = make()
                text = _encode(planned)
            except Exception as error:
                mine, text = error, _FAILED + as_text(error)
        text = (telling or self._channel).tell(text)
        if text.startswith(_FAILED):
            raise mine or error_from(text.removeprefix(_FAILED), f"planning step {step + 1} failed on rank 0")
        planned = planned or _decode(text)
        plan = planned.plan
        # The ranks' samplers must agree, but a rank may have been given other data by its script. Then a plan of rank
        # 0's ids would train on other sequences here, without any error further down.
        if batch is not None and (plan.step, plan.sequence_ids, plan.lengths) != batch:
            raise PlanError(
                f"rank {self._rank} drew other sequences for step {step} than rank 0 planned for: the ranks' "
                "data, seed or config differ; give all ranks the same"
            )
        check_runnable(plan, no_slices=self._options.no_slices)
        # Rank 0, or its producer, has validated the plan: each rank checks again what costs it no time to speak of.
        check_safe(plan, self._table, self._num_ranks)
        return planned


def _encode(planned: PlannedStep) -> str:
    return f"{planned.planning_ms!r} {int(planned.hidden)} {planned.fallback or '-'}\n{planned.plan.to_json()}"


def _decode(text: str) -> PlannedStep:
    head, plan = text.split("\n", 1)
    planning_ms, hidden, fallback = head.split(" ")
    return PlannedStep(
        StepPlan.from_json(plan, "rank 0's plan"),
        float(planning_ms),
        hidden == "1",
        None if fallback == "-" else fallback,
    )
