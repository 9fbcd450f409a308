"""A job's engine and its steps over a fast cable in; what its steps over a slow one take by the simulator, out."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.engine.simulated import simulated_job
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator

if TYPE_CHECKING:
    from tools.hosts.job import Settings

INSIDE = Speed(1e-4, 1e9)  # between processes of one machine
LATENCY_S = 2e-4
_LITTLE = 1e-6


def predicted_seconds(engine: Any, settings: Settings, record: dict[str, Any]) -> dict[str, float]:
    """A step's seconds over the slow cable, by strategy: the median of its steps.

    The ranks of a host share the cable, so each has its part of the rate. What a step takes besides the wire is such
    that the simulated step over the fast cable takes what it took.
    """
    from tools.hosts.job import FAST_MEGABITS

    crew = engine.crew
    job = simulated_job(engine.job, crew.world, crew.prepared.found)
    fast, slow = (_with_rate(job, settings, rate) for rate in (FAST_MEGABITS, settings.megabits))
    found = {}
    for strategy in settings.strategies:
        ours = {key: [s for s in record[key] if s["strategy"] == strategy] for key in ("fast", "slow")}
        plans = {key: [StepPlan.from_json(step["plan"]) for step in steps] for key, steps in ours.items()}
        took = statistics.median(step["seconds"] for step in ours["fast"])
        whole, empty = (
            statistics.median(Simulator(_scaled(fast, scale)).step(plan).step_s for plan in plans["fast"])
            for scale in (1.0, _LITTLE)
        )
        scale = max(_LITTLE, (took - empty) / (whole - empty))
        simulator = Simulator(_scaled(slow, scale))
        found[strategy] = statistics.median(simulator.step(plan).step_s for plan in plans["slow"])
    return found


def _with_rate(job: SimulatedJob, settings: Settings, megabits: float) -> SimulatedJob:
    each = Speed(LATENCY_S, megabits * 1e6 / 8 / settings.ranks)
    return replace(job, links=LinkModel(settings.ranks, INSIDE, each))


def _scaled(job: SimulatedJob, scale: float) -> SimulatedJob:
    costs = [replace(cost, a=cost.a * scale, b=cost.b * scale, c=cost.c * scale) for cost in job.table.costs]
    return replace(job, found=replace(job.found, table=CostTable(tuple(costs))))
