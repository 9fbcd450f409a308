"""Do simulator and emulated cluster agree? The same random plans on both, and by how much their times differ."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import Simulator
from tests.support.planner_cases import random_job, random_lengths, random_plan
from tools import aims
from tools.simulated.part import Part

RANKS = (8, 16, 24, 32)
PLANS_A_CLUSTER = 9


class Compared(NamedTuple):
    """One plan on both."""

    plan: StepPlan
    emulated_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.emulated_s - 1.0


def compare(cluster: SimulatedJob, rng: random.Random, plans: int, *, timeout_s: float) -> list[Compared]:
    """Random plans of one cluster, emulated and simulated."""
    lengths, tokens = random_lengths(rng, 4000), 400 * cluster.num_ranks
    sampler = TokenBudgetSampler(lengths, tokens)
    made = []
    for step in range(plans):
        batch = sampler.batch_lengths(step)
        plan = random_plan(rng, cluster.table, cluster.num_ranks, step=step, lengths=batch)
        made.append(replace(plan, sequence_ids=sampler.batch(step)))
    steps = emulate_plans(cluster, made, lengths, tokens, timeout_s=timeout_s)
    simulator = Simulator(cluster)
    return [Compared(step.plan, step.step_s, simulator.step(step.plan).step_s) for step in steps]


def against_simulator(num_plans: int, *, timeout_s: float) -> Part:
    """The table by cluster, and the worst plans."""
    rng = random.Random(32)
    rows: list[tuple[object, ...]] = []
    every: list[Compared] = []
    while len(every) < num_plans:
        cluster, began = random_job(rng, RANKS[len(rows) % len(RANKS)]), time.perf_counter()
        compared = compare(cluster, rng, min(PLANS_A_CLUSTER, num_plans - len(every)), timeout_s=timeout_s)
        every += compared
        links = cluster.links
        speeds = f"{links.inside.bytes_per_s / 1e9:.2g} / {links.between.bytes_per_s / 1e9:.2g}"
        rows.append((cluster.num_ranks, links.node_size, speeds, len(compared), *_shown(compared)))
        done = f"{len(every)} of {num_plans} plans, {cluster.num_ranks} ranks, {time.perf_counter() - began:.0f} s"
        print(done, file=sys.stderr, flush=True)
    rows.append(("all", "", "", len(every), *_shown(every)))
    median, p90 = _quantiles(every)
    missed = []
    for what, error, aim in (("median", median, aims.EMULATED_MEDIAN), ("p90", p90, aims.EMULATED_P90)):
        if error > aim:
            missed.append(f"{what} difference of simulator and emulated cluster is {error:.2%}, above {aim:.0%}")
    worst = sorted(every, key=lambda one: -abs(one.error))[:3]
    figures = {
        "median": median,
        "p90": p90,
        "errors": [one.error for one in every],
        "worst": [(one.plan.strategy, one.error) for one in worst],
    }
    phases = sum(len(one.plan.phases) > 1 for one in every)
    summary = f"{median:.2%} / {p90:.2%} apart over {len(every)} random plans, {phases} of two phases"
    headers = ("ranks", "of a node", "GB/s", "plans", "emulated ms", "median", "p90", "worst")
    return Part("Simulator against emulated cluster", headers, rows, summary, figures, missed)


def _quantiles(compared: Sequence[Compared]) -> tuple[float, float]:
    errors = [abs(one.error) for one in compared]
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


def _shown(compared: Sequence[Compared]) -> tuple[str, ...]:
    median, p90 = _quantiles(compared)
    worst = max((one.error for one in compared), key=abs)
    ms = 1e3 * float(np.median([one.emulated_s for one in compared]))
    return f"{ms:.0f}", f"{median:.2%}", f"{p90:.2%}", f"{worst:+.2%}"
