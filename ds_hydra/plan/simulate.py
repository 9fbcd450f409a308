"""A plan in, the time it takes under an event simulation out (ms). Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import orders
from ds_hydra.pipe.schedules.simulate import simulate_loads
from ds_hydra.plan.phase import Phase
from ds_hydra.plan.step_plan import StepPlan

# The flow-shop formula is a bound on the simulated time, but for a few times 0.01 % in rare orders of micro-batches.
_NO_LONGER_THAN_FORMULA = 1.01


def simulate_plan(plan: StepPlan, cost_table: CostTable) -> tuple[float, ...]:
    """Simulated time of every pipeline of a plan, in ms; `StepPlan.total_ms` makes that of the step of them."""
    times = []
    for pipeline in plan.pipelines:
        cost = cost_table[pipeline.shape]
        loads = [cost.load_ms(batch.lengths) for batch in pipeline.microbatches]
        batches, num_stages = Batches(pipeline.chain), pipeline.shape.pp
        times.append(simulate_loads(orders("1f1b", batches, num_stages), batches, [loads] * num_stages))
    return tuple(times)


def simulated_ms(phases: Iterable[Phase], cost_table: CostTable) -> float:
    """Simulated time of phases one after the other, each as long as its slowest pipeline; what a plan predicts."""
    return sum(_slowest_ms(phase, cost_table) for phase in phases)


def _slowest_ms(phase: Phase, cost_table: CostTable) -> float:
    # The formula is near the simulation and hardly ever below it. So pipelines are simulated in the order of their
    # formulas, until the rest cannot be slower: of 40 pipelines a few.
    by_formula = []
    for pipeline in phase.pipelines:
        cost = cost_table[pipeline.shape]
        loads = [cost.load_ms(batch.lengths) for batch in pipeline.microbatches]
        by_formula.append((cost.pipeline_ms(loads), pipeline, loads))
    slowest = 0.0
    for formula, pipeline, loads in sorted(by_formula, key=lambda row: -row[0]):
        if formula * _NO_LONGER_THAN_FORMULA < slowest:
            break
        num_stages = pipeline.shape.pp
        if num_stages == 1:
            slowest = max(slowest, formula)  # one load after the other: there is nothing to simulate
            continue
        batches = Batches(pipeline.chain)
        made = orders(pipeline.schedule, batches, num_stages)
        slowest = max(slowest, simulate_loads(made, batches, [loads] * num_stages))
    return slowest
