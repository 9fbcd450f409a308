"""Batches of the sampler in; each step's plan, the same on every rank, out. Rank 0 plans, every rank checks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.sampler import Order
from ds_hydra.engine.joined import Joined, able_to_join, joins_by
from ds_hydra.engine.plan_telling import tell_plan
from ds_hydra.engine.pre_step import Callback, PreStepCallback, plan_of
from ds_hydra.engine.short_data import ShortData
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.validate import check_runnable, check_safe, validate_plan
from ds_hydra.planner import PlannedStep, Planner, PlanRecipe, StepPlan
from ds_hydra.planner.arena_room import ArenaRoom
from ds_hydra.planner.composing import PlanBudget
from ds_hydra.planner.producer_process import ProducerProcess
from ds_hydra.planner.service import Waiting
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.telling import Telling
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.errors import PlanError

logger = logging.getLogger(__name__)


class _Batch(NamedTuple):
    """What is to be planned."""

    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class PlanSource:
    """Hands out the plan of each step, just before the step.

    Rank 0 has the plans made and tells them to the others: so only one process compiles and searches. Every rank
    validates a plan against the sequences that its own sampler drew. `recipe` is the job's, of which only rank 0 needs
    `exposed_ms` and `job`; `producer` is rank 0's, if it has been started. `room` says which strategies fit beside the
    candidates; `own` is a pre-step callback of the user's [Note: the pre-step callback]; `exposed` tells rank 0 what
    the messages of a strategy add to a step.
    """

    def __init__(
        self,
        recipe: PlanRecipe,
        config: HydraConfig,
        sampler: Order | None,
        channel: Channel,
        activity: Activity,
        producer: ProducerProcess | None = None,
        *,
        room: ArenaRoom | None = None,
        own: Callback | None = None,
        exposed: Callable[[StrategyShape], float] | None = None,
    ):
        self._recipe, self._config, self._sampler, self._channel = recipe, config, sampler, channel
        self._activity, self._own, self._exposed = activity, own, exposed or (lambda _: 0.0)
        self._rank, self.num_ranks, self._ahead = channel.rank, channel.num_ranks, config.planner.ahead
        self._room, self.first_table = room, recipe.table
        self.tables: tuple[tuple[int, CostTable], ...] = ((0, recipe.table),)  # with the step that each holds from
        self.joined: tuple[Joined, ...] = ()
        self._before = ""  # digest of the recipe by which the job planned that this one goes on from
        self._short_data = ShortData(config.context_length if channel.rank == 0 else None)
        self._set_planner()
        self._pre_step = self._start(producer)

    def _set_planner(self) -> None:
        recipe = replace(self._recipe, job=None, room=None)
        recipe.planner()  # refuses on every rank what cannot be planned or replayed
        # One plan is not worth compiling for.
        once = replace(recipe.options, kernels="pure", choose="best", replay_file=None, highs="off")
        self._pure = Planner(recipe.table, recipe.strategies, once, exposed_ms=recipe.exposed_ms)

    def use_table(self, cost_table: CostTable, first: int = 0) -> None:
        """Plan by this cost table from step `first` on. Every rank must call it, with the same arguments."""
        self._recipe = replace(self._recipe, table=cost_table)
        self.tables = (*self.tables[-1:], (first, cost_table))
        self._set_planner()
        if self._pre_step is not None:
            self._pre_step.use_table(cost_table, first)

    def trained(self, plan: StepPlan) -> None:
        """After a step: a strategy that was composed for it joins the candidates, some steps later.

        Every rank must call it, with the same plans.
        """
        joined = joins_by(plan, self._recipe.strategies, self.joined)
        if joined is not None:
            self._join(joined)

    def able_to_join(self, joined: Sequence[Joined]) -> tuple[Joined, ...]:
        """Those of another start of the job that this one can run; every rank finds the same."""
        composes = self._recipe.options.highs == "composes"
        return able_to_join(joined, self._recipe.strategies, self._room if composes else None)

    def _join(self, joined: Joined) -> None:
        self.joined = (*self.joined, joined)
        if self._pre_step is not None:
            self._pre_step.join(joined.strategy, self._exposed(joined.strategy), joined.first)

    @property
    def table(self) -> CostTable:
        """The cost table of the latest plans, and of those outside the training order."""
        return self._recipe.table

    def table_of(self, step: int) -> CostTable:
        """The cost table that the plan of a step is made by, and the schedules that weigh times."""
        return next(table for first, table in reversed(self.tables) if first <= step)

    def _start(self, producer: ProducerProcess | None = None) -> PreStepCallback | None:
        if self._rank != 0 or self._own is not None:
            return None
        return PreStepCallback(self._recipe, self._config, self._sampler, producer)

    @property
    def pre_step_callback(self) -> PreStepCallback | Callback | None:
        """What is called before each step, on rank 0; None on other ranks."""
        return self._own if self._own is not None and self._rank == 0 else self._pre_step

    @property
    def budget(self) -> PlanBudget | None:
        """Of the recipe."""
        return self._recipe.budget

    def restart(
        self, tables: Sequence[tuple[int, CostTable]], joined: Sequence[Joined], budget: PlanBudget | None, before: str
    ) -> None:
        """Go on at another place of the data, by these tables and strategies with the step that each holds from, and
        this budget.

        `before` is the `first_digest` of the job that is gone on from.
        """
        self._before = before
        anew = self._pre_step is not None and self._pre_step.has_planned
        if anew or budget != self.budget or tuple(joined)[: len(self.joined)] != self.joined:
            self.close()
            self._recipe, self.joined = replace(self._recipe, table=tables[0][1], budget=budget), ()
            self._pre_step, self.tables = self._start(), ((0, tables[0][1]),)
            self._set_planner()
        if tuple(tables) != self.tables:
            (_, table), *later = tables
            if (0, table) != self.tables[-1]:
                self.use_table(table)
            self.tables = ((0, table),)
            for first, table in later:
                self.use_table(table, first)
        for one in joined[len(self.joined) :]:
            self._join(one)

    @property
    def first_digest(self) -> str:
        """Of the recipe without corrections, on rank 0 once a plan was made; else empty."""
        if self._pre_step is None or self._pre_step.kernels == "auto":
            return ""
        options = replace(self._recipe.options, kernels=self._pre_step.kernels)
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
            return self._share(step, batch, lambda waiting: self._planned(self._drawn(step), waiting), telling)

    def _drawn(self, step: int) -> _Batch:
        assert self._sampler is not None, "plans of steps need a sampler"
        return _Batch(step, self._sampler.batch(step), self._sampler.batch_lengths(step))

    def given(self, step: int, lengths: tuple[int, ...], first: int = 0) -> PlannedStep:
        """A plan for sequences of these lengths, which are known only now; `first` were given for the step before, so
        their ids are first, first + 1, ... Every rank must call it.

        PlanError is raised on all ranks where no strategy holds the longest sequence.
        """
        batch = _Batch(step, tuple(range(first, first + len(lengths))), lengths)
        self._short_data.see(step, lengths)
        with self._activity(f"waiting for plan {step + 1}"):
            return self._share(step, batch, lambda waiting: self._planned(batch, waiting))

    def _planned(self, batch: _Batch, waiting: Waiting) -> PlannedStep:
        """On rank 0: what the pre-step callback plans."""
        if self._own is not None:
            return plan_of(self._own, *batch, replace(self._recipe, table=self.table_of(batch.step)), self._room)
        assert self._pre_step is not None, "rank 0 has a callback"
        return self._pre_step(*batch, waiting)

    def plan_once(self, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
        """A plan for a batch outside the training order. Every rank must call it."""
        batch = _Batch(0, ids, lengths)

        def made(_: Waiting) -> PlannedStep:
            plan = self._pure.plan(*batch)
            validate_plan(plan, self.table, self.num_ranks)
            return PlannedStep(plan, 0.0, hidden=False)

        return self._share(0, batch, made).plan

    def close(self) -> None:
        """End the producer process."""
        if self._pre_step is not None:
            self._pre_step.close()

    def _share(
        self, step: int, batch: _Batch | None, make: Callable[[Waiting], PlannedStep], telling: Telling | None = None
    ) -> PlannedStep:
        """Hand the plan that rank 0 makes to all ranks; each checks that it plans the sequences that it knows of.

        `batch` is None where only rank 0 knows them. An error of rank 0's is raised on all ranks.
        """
        planned = tell_plan(
            step, make, telling or self._channel, rank=self._rank, timeout_s=self._config.timeout_seconds
        )
        if self._before and self.first_digest:  # on rank 0
            if self._before != self.first_digest:
                logger.info("plans follow from other costs, strategies, options, packages or ranks than those of the "
                            "checkpoint did, so steps may be planned otherwise than they would have been")  # fmt: skip
            self._before = ""
        plan = planned.plan
        # The ranks' samplers must agree, but a rank may have been given other data by its script. Then a plan of rank
        # 0's ids would train on other sequences here, without any error further down.
        if batch is not None and (plan.step, plan.sequence_ids, plan.lengths) != batch:
            raise PlanError(
                f"rank {self._rank} drew other sequences for step {step} than rank 0 planned for: the ranks' "
                "data, seed or config differ; give all ranks the same"
            )
        check_runnable(plan, no_slices=self._recipe.options.no_slices)
        # Rank 0 has validated the plan: each other checks again what costs it no time to speak of.
        if self._rank != 0:
            check_safe(plan, self.table, self.num_ranks)
        return planned
