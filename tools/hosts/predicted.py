"""A job's engine and its steps over a fast cable in; what its steps over a slow one take by the simulator, out.

Computing is as long as the stages' own stopwatches say of the steps over the fast cable. What such a step takes besides
computing, and waiting for pulls and pushes, is no stage's: planning, the update, small messages between steps. No
transfer hides it, so it is added to what the simulator says of the slow cable.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.engine.prepare import simulated_job
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator

if TYPE_CHECKING:
    from tools.hosts.job import Settings

INSIDE = Speed(1e-4, 1e9)  # between processes of one machine
LATENCY_S = 2e-4
Scales = Mapping[ParallelScheme | PipelineShape, float]


def predicted_seconds(engine: Any, settings: Settings, record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each strategy, medians over its steps: a step's seconds over the slow cable, its seconds of computing on the
    slowest stage, and what is added.
    """
    crew = engine.crew
    job = simulated_job(engine.job, crew.world, crew.prepared.found)
    cable = Speed(LATENCY_S, settings.megabits * 1e6 / 8)
    slow = replace(job, links=LinkModel(settings.ranks, INSIDE, cable, node_cable=True))
    found = {}
    for strategy in settings.strategies:
        measured, plans = ([step for step in record[key] if step["strategy"] == strategy] for key in ("fast", "slow"))
        scales = _scales(job.table, measured)
        simulator = Simulator(_scaled(job, scales))
        added = statistics.median(
            step["seconds"] - simulator.computing_s(_plan(step)) - (step["pull_ms"] + step["push_ms"]) / 1e3
            for step in measured
        )
        simulator = Simulator(_scaled(slow, scales))
        on_wire = statistics.median(simulator.step(_plan(step)).step_s for step in plans)
        computing = statistics.median(max(max(stages) for stages in step["stage_ms"]) for step in measured) / 1e3
        found[strategy] = {"seconds": on_wire + max(0.0, added), "computing": computing, "added": max(0.0, added)}
    return found


def _plan(step: Mapping[str, Any]) -> StepPlan:
    return StepPlan.from_json(step["plan"])


def _scales(table: CostTable, steps: Sequence[Mapping[str, Any]]) -> Scales:
    """How many times as long as the table says each scheme has computed: the median of its pipelines in all steps."""
    ratios: dict[ParallelScheme | PipelineShape, list[float]] = defaultdict(list)
    for step in steps:
        for pipeline, stages in zip(_plan(step).pipelines, step["stage_ms"], strict=True):
            if pipeline.microbatches:
                cost = table[pipeline.shape]
                said = sum(cost.load_ms(batch.lengths) for batch in pipeline.microbatches)
                ratios[cost.scheme].append(statistics.mean(stages) / said)
    return {scheme: statistics.median(each) for scheme, each in ratios.items()}


def _scaled(job: SimulatedJob, scales: Scales) -> SimulatedJob:
    costs = [
        replace(cost, a=cost.a * scale, b=cost.b * scale, c=cost.c * scale)
        for cost in job.table.costs for scale in [scales.get(cost.scheme, 1.0)]
    ]  # fmt: skip
    return replace(job, found=replace(job.found, table=CostTable(tuple(costs))))
