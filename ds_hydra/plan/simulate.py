"""A plan in, the time it takes under an event simulation out (ms). Pure: no torch."""

from __future__ import annotations

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.schedules.registry import orders
from ds_hydra.pipe.schedules.simulate import simulate_loads
from ds_hydra.plan.step_plan import StepPlan


def simulate_plan(plan: StepPlan, cost_table: CostTable) -> tuple[float, ...]:
    """Simulated time of every pipeline of a plan, in ms; `StepPlan.total_ms` makes that of the step of them."""
    times = []
    for pipeline in plan.pipelines:
        cost = cost_table[pipeline.shape]
        loads = [cost.load_ms(batch.lengths) for batch in pipeline.microbatches]
        num_stages = pipeline.shape.pp
        times.append(simulate_loads(orders("1f1b", len(loads), num_stages), [loads] * num_stages))
    return tuple(times)
