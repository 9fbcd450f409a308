"""Plans of pipelines whose stages differ, on the emulated cluster and by the simulator."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.costs.shape_costs import priced
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import Simulator
from tests.support.planner_cases import MODEL, dealt_phase, random_job, random_lengths, unequal_shapes
from tools import aims

_RANKS = (8, 12, 16)
_PLANS_A_CLUSTER = 5
_TIMEOUT_S = 1200.0


class _Compared(NamedTuple):
    plan: StepPlan
    error: float  # of the simulator's time, by the emulated cluster's


def unequal(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Differences by cluster, and of all plans."""
    rng, wanted = random.Random(36), aims.EMULATED_UNEQUAL_PLANS // (8 if quick else 1)
    rows: list[dict[str, Any]] = []
    every: list[_Compared] = []
    while len(every) < wanted:
        cluster = random_job(rng, _RANKS[len(rows) % len(_RANKS)])
        found = list(_compared(rng, cluster, min(_PLANS_A_CLUSTER, wanted - len(every))))
        every += found
        rows.append({"ranks": str(cluster.num_ranks), **_shown(found)})
        print(f"{len(every)} of {wanted} plans", file=sys.stderr, flush=True)
    rows.append({"ranks": "all", **_shown(every)})
    worst = max(every, key=lambda one: abs(one.error))
    if abs(worst.error) > aims.EMULATED_UNEQUAL:
        missed.append(f"simulator and emulated cluster differ by {worst.error:.2%} on {worst.plan.strategy}, above "
                      f"{aims.EMULATED_UNEQUAL:.0%}")  # fmt: skip
    return rows


def _compared(rng: random.Random, cluster: SimulatedJob, plans: int) -> Iterator[_Compared]:
    lengths, tokens = random_lengths(rng, 2000), 400 * cluster.num_ranks
    sampler, made = TokenBudgetSampler(lengths, tokens), list[StepPlan]()
    for step in range(plans):
        shapes, batch = unequal_shapes(rng, cluster.num_ranks), sampler.batch_lengths(step)
        cluster = _with_costs(cluster, shapes)
        phase = dealt_phase(rng, cluster.table, shapes, range(len(batch)), batch)
        made.append(StepPlan(step, sampler.batch(step), batch, (phase,), phase.predicted_ms))
    simulator = Simulator(cluster)
    for done in emulate_plans(cluster, made, lengths, tokens, timeout_s=_TIMEOUT_S):
        yield _Compared(done.plan, simulator.step(done.plan).step_s / done.step_s - 1.0)


def _with_costs(cluster: SimulatedJob, shapes: list[PipelineShape]) -> SimulatedJob:
    """With costs of these pipelines, priced from those of their stages' schemes."""
    table = cluster.table
    known = {cost.scheme for cost in table.costs}
    new = dict.fromkeys(shape.cost_key for shape in shapes if shape.cost_key not in known)
    costs = tuple(priced(key, table, MODEL.layers, 1 << 20) for key in new if isinstance(key, PipelineShape))
    return replace(cluster, found=replace(cluster.found, table=replace(table, costs=(*table.costs, *costs))))


def _shown(found: list[_Compared]) -> dict[str, Any]:
    errors = [abs(one.error) for one in found]
    worst = max(found, key=lambda one: abs(one.error))
    return {"plans": len(found), "median of |error|": float(np.median(errors)),
            "90th percentile": float(np.quantile(errors, 0.9)), "worst": worst.error,
            "of": worst.plan.strategy[:90]}  # fmt: skip
