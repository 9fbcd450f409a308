"""A step's number, ids and lengths in, its plan out, before each step: the job's pre-step callback, or the user's own.

[Note: the pre-step callback]
Rank 0 calls one object before each step, with the number of the step (from 0), the ids of its sequences and their
lengths in tokens, and trains the plan that it returns; the other ranks are told. `PreStepCallback` is what jobs have:
it takes the plan off the queue of a process that plans some steps ahead, by a fast search first, then by HiGHS; see
[Note: composed strategies]. A script may pass any other callable of these three to `initialize(pre_step_callback=...)`.
Whatever it returns is checked as every plan is, before any rank begins the step. Where `hydra.planner.ahead` is not 0
and the data are map-style, it is called in a thread, while the step before still runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.sampler import Order
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.validate import check_runnable, validate_plan
from ds_hydra.planner import PlannedStep, PlannerService, PlanRecipe, StepPlan
from ds_hydra.planner.arena_room import ArenaRoom
from ds_hydra.planner.producer_process import BEAT_S, ProducerProcess, producer_command
from ds_hydra.planner.service import Waiting
from ds_hydra.simulate.producer import step_ms_of
from ds_hydra.zero_hetero.errors import PlanError

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

    @property
    def kernels(self) -> str:
        """ "auto" until they are settled."""
        return self.service.kernels

    def use_table(self, cost_table: CostTable, first: int) -> None:
        """See `PlannerService`."""
        self.service.use_table(cost_table, first)

    def join(self, strategy: StrategyShape, exposed_ms: float, first: int) -> None:
        """See `PlannerService`."""
        self.service.join(strategy, exposed_ms, first)

    def close(self) -> None:
        """End the producer process."""
        self.service.close()


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
