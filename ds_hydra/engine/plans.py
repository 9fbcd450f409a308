"""Each step's plan, the same on every rank: rank 0 makes it ahead of training, every rank checks it.

[Note: the pre-step callback]
Rank 0 calls one object before each step, with the number of the step (from 0), the ids of its sequences and their
lengths in tokens, and trains the plan that it returns; the other ranks are told. `PreStepCallback` is what jobs have:
it takes the plan off the queue of a process that plans some steps ahead, by a fast search first, then by HiGHS; see
[Note: composed strategies]. A script may pass any other callable of these three to `initialize(pre_step_callback=...)`.
Whatever it returns is checked as every plan is, before any rank begins the step. Where `hydra.planner.ahead` is not 0
and the data are map-style, it is called in a thread, while the step before still runs.

A strategy that HiGHS composed for step 10 is a candidate from step 74 on, however far ahead steps are planned, and a
checkpoint of step 11 says so [Note: composed strategies].

[Note: corrections at fixed steps]
With `cost_correction: "apply"` plans follow from the times of earlier steps. A correction that is found after step 16
holds from step 18 on: where steps are made ready step 17 is planned by then, and where they are not its plan is to be
the same. A checkpoint of step 16 or 17 has both tables, with the step that each holds from, and the times that the next
correction will be made of. So until it measures times of its own, a restart plans what the job would have planned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable, read_table, table_record
from ds_hydra.data.sampler import Order
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.validate import check_runnable, check_safe, validate_plan
from ds_hydra.planner import PlannedStep, Planner, PlannerService, PlanRecipe, StepPlan
from ds_hydra.planner.composing import COMPOSED, JOINS_AFTER, MOST_JOINED, ArenaRoom, PlanBudget
from ds_hydra.planner.service import BEAT_S, ProducerProcess, Waiting, producer_command
from ds_hydra.ranks.channel import Channel, Telling, as_text, error_from
from ds_hydra.report.calibration import Calibration, Stragglers
from ds_hydra.report.record import StepWatch
from ds_hydra.simulate.producer import step_ms_of
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.errors import CheckpointError, PlanError
from ds_hydra.zero_hetero.told import Told, mark_told

logger = logging.getLogger(__name__)


class Joined(NamedTuple):
    """A composed strategy that joins the candidates [Note: composed strategies]."""

    first: int  # step from which on it is one
    strategy: StrategyShape


_FAILED = "failed\n"  # before rank 0's error, in place of a plan
_WAITING = "waiting\n"  # in place of a plan that rank 0 is still waiting for


def tell_plan(
    step: int, make: Callable[[Waiting], PlannedStep], telling: Telling | Channel, *, rank: int, timeout_s: float
) -> PlannedStep:
    """What `make` returns on rank 0, on all ranks; an error of rank 0's is raised on all of them.

    While it waits, the others are told to wait on, long before they would give up after `timeout_s`: a plan may take
    longer than a message.
    """
    planned, text, mine = None, "", None
    if rank == 0:
        try:
            planned = make(_keeps_waiting(telling, timeout_s / 4))
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
    return planned or PlannedStep.of_text(text)


def _keeps_waiting(telling: Telling | Channel, every_s: float) -> Waiting:
    last_s = 0.0

    def waiting(waited_s: float) -> None:
        nonlocal last_s
        if waited_s - last_s >= every_s:
            last_s = waited_s
            telling.tell(_WAITING)

    return waiting


STEPS = 50
SHORT = 8  # times the longest sequence is no more than the context


class ShortData:
    """What a job's first steps hold. A script may hand in one step in several parts."""

    def __init__(self, context_length: int | None):
        self._context, self._begin = context_length or 0, -1  # no context: nothing to tell
        self._count = self._longest = 0

    def see(self, step: int, lengths: tuple[int, ...]) -> None:
        """Sequences of a step, before it runs. The line comes with the first one that is too late to count."""
        if not self._context:
            return
        if self._begin < 0:
            self._begin = step
        if step < self._begin + STEPS:
            self._count, self._longest = self._count + len(lengths), max((self._longest, *lengths))
            return
        if SHORT * self._longest <= self._context:
            logger.warning(
                "the longest of the %d sequences of the first %d steps has %d tokens, and hydra.context_length is %d: "
                "strategies and memory are kept for sequences that do not come, and without long ones there is little "
                "to gain. If something cuts them, such as max_length of TRL (1024 unless set) or a tokenizer's "
                "truncation, raise that; else set hydra.context_length to what comes",
                self._count, STEPS, self._longest, self._context,
            )  # fmt: skip
        self._context = 0


Callback = Callable[[int, tuple[int, ...], tuple[int, ...]], StepPlan]
"""A user's own: step, ids, lengths."""


class PreStepCallback:
    """Plans the steps of a job, on rank 0 [Note: the pre-step callback].

    `sampler` tells the coming steps, which are planned meanwhile; None where each is known only when it is asked for.
    `producer` is the planner's process, if it has been started.
    """

    def __init__(
        self, recipe: PlanRecipe, config: HydraConfig, sampler: Order | None, producer: ProducerProcess | None = None
    ) -> None:
        self._sampler, self._ahead = sampler, config.planner.ahead
        self.service = PlannerService(
            recipe, self._ahead, simulation=step_ms_of, frozen_s=config.faults.silent_seconds,
            command=command_of(config), producer=producer,
        )  # fmt: skip
        self._submitted: int | None = None

    def __call__(
        self, step: int, sequence_ids: tuple[int, ...], lengths: tuple[int, ...], waiting: Waiting | None = None
    ) -> PlannedStep:
        """The plan of a step; `waiting` as `PlannerService.get`."""
        if self._sampler is not None:
            self._submit_coming(self._sampler, step)
        if not self.service.waits(step):  # handed in, or its plan was taken but the step not trained
            self.service.submit(step, sequence_ids, lengths)
        return self.service.get(step, waiting)

    def _submit_coming(self, sampler: Order, step: int) -> None:
        # With ahead = 2, step 0 submits the batches of steps 0, 1 and 2 and waits for plan 0; step 1 submits step 3 and
        # finds plan 1, which was made while step 0 was trained. A stream may not have come that far.
        first = step if self._submitted is None else self._submitted + 1
        for coming in range(first, step + self._ahead + 1):
            if coming > step and not sampler.ready(coming):
                break
            self.service.submit(coming, sampler.batch(coming), sampler.batch_lengths(coming))
            self._submitted = coming

    @property
    def has_planned(self) -> bool:
        """Whether coming steps were submitted."""
        return self._submitted is not None


def plan_of(
    own: Callback, step: int, ids: tuple[int, ...], lengths: tuple[int, ...], recipe: PlanRecipe, room: ArenaRoom | None
) -> PlannedStep:
    """The plan of a user's own callback. PlanError for one that cannot be run, or is of another step."""
    began = time.perf_counter()
    plan = own(step, ids, lengths)
    planning_ms = 1e3 * (time.perf_counter() - began)
    if not isinstance(plan, StepPlan):
        raise PlanError(
            f"pre_step_callback returned a {type(plan).__name__} for step {step}; return a ds_hydra.planner.StepPlan"
        )
    if (plan.step, plan.sequence_ids, plan.lengths) != (step, ids, lengths):
        raise PlanError(
            f"pre_step_callback was asked for step {step} of {len(ids)} sequences of {sum(lengths)} tokens but planned "
            f"step {plan.step} of {len(plan.sequence_ids)} sequences of {plan.num_tokens}, or others; plan what it is "
            "given, in this order"
        )
    check_runnable(plan, no_slices=recipe.options.no_slices)
    validate_plan(plan, recipe.table, recipe.strategies[0].num_ranks)
    for phase in plan.phases:
        why = room.refusal(phase.shape) if room is not None and phase.shape not in recipe.strategies else ""
        if why:
            raise PlanError(
                f"pre_step_callback: step {step} cannot run {phase.shape}: {why}. Add that strategy to hydra.strategies"
            )
    return PlannedStep(plan, planning_ms, hidden=False, waited_ms=planning_ms, made_by="callback")


def command_of(config: HydraConfig) -> tuple[str, ...]:
    """How the process is started. It tells that it is alive well within the time after which it is frozen."""
    return producer_command("ds_hydra.simulate.producer", min(BEAT_S, config.faults.silent_seconds / 4))


def start_producer(config: HydraConfig, rank: int, *, own: bool) -> ProducerProcess | None:
    """On rank 0: the process, which compiles its kernels from now on; None where there is to be none, since the script
    plans on its `own` for one."""
    if rank != 0 or own or config.planner.ahead == 0 or config.replay is not None:
        return None
    try:
        producer = ProducerProcess(command_of(config))
    except OSError:  # the service tries once more, and says so
        return None
    producer.send({"kernels": "auto"})
    return producer


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
        self.tables = (*self.tables[-2:], (first, cost_table))
        self._set_planner()
        if self._pre_step is not None:
            self._pre_step.service.use_table(cost_table, first)

    def trained(self, plan: StepPlan) -> None:
        """After a step: a strategy that was composed for it joins the candidates, some steps later.

        Every rank must call it, with the same plans.
        """
        if plan.source != COMPOSED or len(self.joined) >= MOST_JOINED:
            return
        (phase,) = plan.phases
        if phase.shape not in {*self.strategies, *(one.strategy for one in self.joined)}:
            self._join(Joined(plan.step + JOINS_AFTER, phase.shape))

    def able_to_join(self, joined: Sequence[Joined]) -> tuple[Joined, ...]:
        """Those of another start of the job that this one can run; every rank finds the same."""
        room = self._room if self._recipe.options.highs == "composes" else None
        able = tuple(
            one for one in joined
            if room is not None and one.strategy not in self.strategies and not room.refusal(one.strategy)
        )  # fmt: skip
        if len(able) < len(joined):
            logger.info("%d strategies that were composed before are none of this job's", len(joined) - len(able))
        return able

    def _join(self, joined: Joined) -> None:
        self.joined = (*self.joined, joined)
        if self._pre_step is not None:
            self._pre_step.service.join(joined.strategy, self._exposed(joined.strategy), joined.first)

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
        if self._pre_step is None or self._pre_step.service.kernels == "auto":
            return ""
        options = replace(self._recipe.options, kernels=self._pre_step.service.kernels)
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

    def plan_once(self, ids: tuple[int, ...], lengths: tuple[int, ...]) -> PlannedStep:
        """A plan for a batch outside the training order. Every rank must call it."""
        batch = _Batch(0, ids, lengths)

        def made(_: Waiting) -> PlannedStep:
            plan = self._pure.plan(*batch)
            validate_plan(plan, self.table, self.num_ranks)
            return PlannedStep(plan, 0.0, hidden=False)

        return self._share(0, batch, made)

    def close(self) -> None:
        """End the producer process."""
        if self._pre_step is not None:
            self._pre_step.service.close()

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


class Restored(NamedTuple):
    """What `Learned.read` made of a checkpoint, and `restore` assigns."""

    recipe: str  # digest, without corrections; empty where it was not known
    tables: tuple[tuple[int, CostTable], ...]  # with the step that each holds from, counted from 0
    joined: tuple[Joined, ...]
    budget: PlanBudget | None
    calibration: Calibration
    stragglers: Stragglers


class Learned:
    """Adds to the candidates, corrects the costs that plans are made by, and keeps both in checkpoints.

    Every rank makes the same calls.
    """

    def __init__(self, watch: StepWatch, plans: PlanSource):
        self._watch, self._plans = watch, plans

    def learn(self, step: int, plan: StepPlan) -> list[Any]:
        """After `step`, counted from 1: its strategy may join the candidates, and plans are made by corrected costs, if
        the config asks for that and there are new ones. What is new of costs is returned, for the step's record."""
        self._plans.trained(plan)
        new = self._watch.corrections(step)
        for one in new:
            self._plans.use_table(self._watch.apply(one), one.first)
        return [one.record() for one in new]

    def saved(self) -> dict[str, Any]:
        """For a checkpoint, as JSON holds it."""
        record: dict[str, Any] = {
            "recipe": self._plans.first_digest,
            "joined": [[first, str(strategy)] for first, strategy in self._plans.joined],
            "budget": self._plans.budget,
        }
        if self._watch.applies:
            record["tables"] = [[first, table_record(table)] for first, table in self._plans.tables]
            record["first_table"] = table_record(self._plans.first_table)
            record["calibration"] = self._watch.calibration.state()
            record["slow"] = {"ranks": self._plans.num_ranks, **self._watch.stragglers.state()}
        return record

    def read(self, saved: Mapping[str, Any] | None) -> Restored:
        """What to go on with. Nothing is changed; CheckpointError for what `saved` has not written."""
        plans = self._plans
        watch = self._watch
        fresh = Restored("", ((0, plans.first_table),), (), plans.budget, watch.fresh(), watch.fresh_stragglers())
        if saved is None:
            return fresh
        try:
            fresh = fresh._replace(recipe=str(saved["recipe"]))
            if saved.get("budget") is not None:  # checkpoints of earlier releases have none
                fresh = fresh._replace(budget=PlanBudget(*map(int, saved["budget"])))
            joined = [Joined(int(first), StrategyShape.parse(text)) for first, text in saved.get("joined", ())]
            fresh = fresh._replace(joined=plans.able_to_join(joined))
            if not watch.applies or "tables" not in saved:
                return fresh
            slow = saved.get("slow")  # checkpoints of earlier releases have none
            others = slow is not None and int(slow["ranks"]) != plans.num_ranks
            if others or read_table(saved["first_table"], "the cost table") != plans.first_table:
                logger.info(
                    "corrections of costs begin anew: the checkpoint's are of another cost table or other ranks"
                )
                return fresh
            tables = tuple((int(first), read_table(table, "the cost table")) for first, table in saved["tables"])
            if not tables or any(table.schemes != plans.first_table.schemes for _, table in tables):
                raise ValueError("its tables have other schemes than the job's")
            return fresh._replace(tables=tables, calibration=watch.fresh(saved["calibration"]),
                                  stragglers=watch.fresh_stragglers(slow))  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"what its job has learnt for plans cannot be read ({type(error).__name__}: {error})"
            ) from None

    def restore(self, restored: Restored) -> None:
        """Go on with what was read, at another step: what was planned ahead is forgotten."""
        self._watch.calibration, self._watch.stragglers = restored.calibration, restored.stragglers
        self._watch.table = restored.tables[-1][1]
        self._plans.restart(restored.tables, restored.joined, restored.budget, restored.recipe)
