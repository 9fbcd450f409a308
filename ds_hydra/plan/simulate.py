"""The time of a plan, by an event simulation of its schedules (ms). Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.costs.stage_work import UNITS, stage_costs, stage_work
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.registry import orders, placed, weighs
from ds_hydra.pipe.schedules.simulate import simulate_loads, simulate_works
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan


def has_formula(pipeline: PipelinePlan) -> bool:
    """Whether the flow-shop formula is near its time: for whole sequences under 1F1B that recompute nothing, and for
    nothing else."""
    return not weighs(pipeline.schedule) and not pipeline.in_slices and not pipeline.recomputes


def schedule_batches(pipeline: PipelinePlan, table: CostTable) -> Batches:
    """What a pipeline's schedule is asked for, with all that it weighs. PlanError for slices that make no chain,
    or ranges of layers that make no V."""
    if has_formula(pipeline):
        return Batches.whole(len(pipeline.microbatches))
    shape, shares = pipeline.shape, table.shares(pipeline.shape)
    cost = table.paced(shape, pipeline.paces)
    return batches_of(pipeline.microbatches, pipeline.chain, cost, shares, parts=shape.parts)


def batches_of(
    microbatches: Sequence[MicroBatchPlan], before: tuple[int, ...], cost: SchemeCost, shares: Shares, *, parts: int
) -> Batches:
    """Chains, times, memory and room of micro-batches, each with the one that it follows. PlanError for no chain."""
    followed = set(before)
    works = tuple(
        work_of(batch, cost, shares, parts=parts, followed=number in followed)
        for number, batch in enumerate(microbatches)
    )
    return Batches(before, parts, works, UNITS * cost.room)


def work_of(batch: MicroBatchPlan, cost: SchemeCost, shares: Shares, *, parts: int, followed: bool) -> Work:
    """What a micro-batch takes on one virtual stage; `followed`: a later one goes on with one of its sequences."""
    squares = sum(stop * stop - start * start for _, start, stop in batch.spans)
    costs = stage_costs(cost, shares, parts)
    work = Work(*stage_work(costs, squares, batch.num_tokens, followed, float(batch.recompute)))
    beside = UNITS * cost.tokens_beside(batch.beside_us) // parts
    return work._replace(kept=work.kept + beside) if beside else work


def stretch(batch: MicroBatchPlan, cost: SchemeCost, shares: Shares) -> float:
    """How many times as long a micro-batch takes with the layers that it computes again as without; 1 for none."""
    if not batch.recompute:
        return 1.0
    both = (work_of(one, cost, shares, parts=1, followed=False) for one in (batch, replace(batch, recompute=0.0)))
    some, none = (work.forward + work.takes("backward") for work in both)
    return some / none


# The flow-shop formula is a bound on the simulated time, but for a few times 0.01 % in rare orders of micro-batches.
_NO_LONGER_THAN_FORMULA = 1.002


def simulate_plan(plan: StepPlan, cost_table: CostTable) -> tuple[float, ...]:
    """Simulated time of every pipeline of a plan, in ms; `StepPlan.total_ms` makes that of the step of them."""
    return tuple(simulate_pipeline(pipeline, cost_table) for pipeline in plan.pipelines)


def simulated_ms(phases: Iterable[Phase], cost_table: CostTable) -> float:
    """Simulated time of phases one after the other, each as long as its slowest pipeline; what a plan predicts."""
    return sum(_slowest_ms(phase, cost_table) for phase in phases)


def simulate_pipeline(pipeline: PipelinePlan, cost_table: CostTable) -> float:
    """Simulated time of one pipeline, in ms."""
    cost, num_stages = cost_table.paced(pipeline.shape, pipeline.paces), pipeline.shape.pp
    if has_formula(pipeline):
        loads = [cost.load_ms(batch.lengths) for batch in pipeline.microbatches]
        return _simulated(pipeline.shape, loads, cost, pipeline.beside_ms)
    beside_us = tuple(1e3 * ms for ms in pipeline.beside_ms)
    return _simulated_us(pipeline.schedule, schedule_batches(pipeline, cost_table), num_stages, beside_us) / 1e3


# A plan's check asks for each pipeline's time, and for the step's: the same simulations.
@lru_cache(maxsize=256)
def _simulated_us(schedule: str, batches: Batches, num_stages: int, beside_us: tuple[float, ...]) -> int:
    return simulate_works(orders(schedule, batches, num_stages), batches, beside_us)


def _simulated(shape: PipelineShape, loads: list[float], cost: SchemeCost, beside: Sequence[float] = ()) -> float:
    batches = Batches.whole(len(loads))
    of_stages = [loads if share == 1.0 else [share * load for load in loads] for share in cost.stage_shares]
    of_stages[0] = with_beside(of_stages[0], beside)
    return simulate_loads(placed(shape.schedule, batches, shape.pp), of_stages)


def with_beside(loads: list[float], beside: Sequence[float]) -> list[float]:
    """The loads of a first stage with what it does besides its layers, if that is anything [Note: loads]."""
    return [load + more for load, more in zip(loads, beside, strict=True)] if beside else loads


def _slowest_ms(phase: Phase, cost_table: CostTable) -> float:
    whole = []
    slowest = 0.0
    for pipeline in phase.pipelines:
        if has_formula(pipeline) and not pipeline.beside_ms:
            cost = cost_table.paced(pipeline.shape, pipeline.paces)
            loads = [cost.load_ms(batch.lengths) for batch in pipeline.microbatches]
            whole.append((cost.pipeline_ms(loads), pipeline.shape, loads, cost))
        else:
            slowest = max(slowest, simulate_pipeline(pipeline, cost_table))
    return max(slowest, slowest_of_whole(whole))


def slowest_of_whole(pipelines: Iterable[tuple[float, PipelineShape, list[float], SchemeCost]]) -> float:
    """Simulated ms of the slowest of pipelines that have a formula, each as (its time by the formula, shape, loads,
    costs)."""
    # The formula is near the simulation and hardly ever below it. So pipelines are simulated in the order of their
    # formulas, until the rest cannot be slower: of 40 pipelines a few.
    slowest = 0.0
    for formula, shape, loads, cost in sorted(pipelines, key=lambda row: -row[0]):
        if formula * _NO_LONGER_THAN_FORMULA < slowest:
            break
        # One stage runs its loads one after the other: there is nothing to simulate.
        slowest = max(slowest, _simulated(shape, loads, cost) if shape.pp > 1 else formula)
    return slowest
