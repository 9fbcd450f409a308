"""Costs, strategies and lengths in; the plans that a training run would make, in figures, out. Pure.

`ds-hydra preview` prints these figures; nothing here prints. Where the model is known, all steps are simulated with
their pulls, pushes and messages between stages, and strategies are chosen by that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.table_file import TableFile
from ds_hydra.data.length_sources import sample_batches
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.phase import parse_phases
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.fixed_layout import packed_in_turn
from ds_hydra.planner.kernels.arrays import Floats, Ints
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.phased import PhasedPlanner
from ds_hydra.planner.selection import Planner
from ds_hydra.simulate.exposed import exposed_ms
from ds_hydra.simulate.hosts import HostWay, hosts_ways
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True)
class Preview:
    """Figures of the previewed steps; times in ms, one entry per step."""

    wins: dict[str, int]  # strategy: in how many steps it was planned
    step_ms: Floats  # simulated
    gaps: Floats  # how far above its lower bound each step is: 0.02 is 2 %
    balance: Floats  # slowest over mean pipeline
    fixed: str | None  # the best layout of one scheme that holds the context
    assigned_ms: Floats  # with our assignment of sequences to its pipelines
    packed_full_ms: Floats  # as other systems run it: batches packed full and dealt out in turn
    phased_ms: dict[str, Floats]  # rivals of several phases, such as "4*tp1 then tp4"
    plans: tuple[StepPlan, ...]  # ours, one of each step
    hosts: dict[str, HostWay]  # what hosts of reinforcement learning do, if it was asked for


def preview_steps(
    cost_table: CostTable,
    strategies: Sequence[StrategyShape],
    lengths: Sequence[int],
    tokens_per_step: int,
    context_length: int,
    steps: int,
    options: PlannerOptions,
    phased: Sequence[str] = (),
    cluster: SimulatedJob | None = None,
    *,
    hosts: bool = False,
) -> Preview:
    """Plan `steps` random batches of the data with these strategies, on the best fixed layout, and with the phases that
    `phased` names; with `hosts` by what hosts of reinforcement learning do, too. `cluster` is the job whose messages
    count; None: none do."""
    # Batches are drawn by another seed than the one that strategies were proposed with. Measured on the batches that
    # they were chosen for, they would look better than they are.
    messages = Messages(cluster, tokens_per_step)
    planner = Planner(
        cost_table, strategies, options, exposed_ms=[messages.exposed_ms(one) for one in strategies],
        step_ms=None if cluster is None else messages.step_ms,
    )  # fmt: skip
    batches = [
        batch.tolist() for batch in sample_batches(lengths, tokens_per_step, steps, options.seed + 1, context_length)
    ]
    plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]
    fixed, full = _fixed_layout(cost_table, planner.num_ranks, batches, context_length, messages)
    assigned: list[float] = []
    if fixed is not None:
        # Dispatched and packed as well as the planner can, so that what mixing layouts gains stands by itself.
        same = Planner(cost_table, [fixed], options)
        assigned = [messages.step_ms(same.plan(step, range(len(batch)), batch)) for step, batch in enumerate(batches)]
    return Preview(
        dict(Counter(plan.strategy for plan in plans).most_common()),
        np.array([messages.step_ms(plan) for plan in plans]),
        np.array([plan.gap for plan in plans]),
        np.array([plan.balance for plan in plans]),
        None if fixed is None else str(fixed),
        np.array(assigned),
        full,
        {text: _phased(cost_table, text, planner.num_ranks, batches, options, messages) for text in phased},
        tuple(plans),
        hosts_ways(cost_table, planner.num_ranks, batches, context_length, options, messages.of_costs) if hosts else {},
    )


class Messages:
    """What a job's messages add to its steps: simulated, where there is a job to simulate."""

    def __init__(self, cluster: SimulatedJob | None, tokens_per_step: int) -> None:
        self._cluster, self._tokens = cluster, tokens_per_step
        self._simulator = None if cluster is None else Simulator(cluster)
        self._others: dict[int, tuple[CostTable, Simulator]] = {}  # the costs too, so that no other gets the id of one

    def exposed_ms(self, strategy: StrategyShape) -> float:
        """Of any step under a strategy, about."""
        return 0.0 if self._cluster is None else exposed_ms(self._cluster, strategy, self._tokens)

    def step_ms(self, plan: StepPlan) -> float:
        """Of one step, with its computing."""
        return plan.predicted_ms if self._simulator is None else self._simulator.step_ms(plan)

    def of_costs(self, plan: StepPlan, table: CostTable) -> float:
        """The same by other costs than the job's."""
        if self._cluster is None or table is self._cluster.table:
            return self.step_ms(plan)
        if id(table) not in self._others:
            self._others[id(table)] = table, Simulator(replace(self._cluster, found=TableFile(table)))
        return self._others[id(table)][1].step_ms(plan)


def _phased(
    table: CostTable,
    text: str,
    num_ranks: int,
    batches: Sequence[list[int]],
    options: PlannerOptions,
    messages: Messages,
) -> Floats:
    """Step times of the batches in the phases that a text names."""
    phases = parse_phases(text)
    used = {shape.num_ranks for shape in phases}
    if used != {num_ranks}:
        raise PlanError(f"the phases of {text!r} use {used.pop()} ranks but the strategies {num_ranks}; use as many")
    planner = PhasedPlanner(table, phases, options)
    return np.array([messages.step_ms(planner.plan(0, range(len(batch)), batch)) for batch in batches])


def _fixed_layout(
    table: CostTable, num_ranks: int, batches: Sequence[list[int]], context_length: int, messages: Messages
) -> tuple[StrategyShape | None, Floats]:
    """The fastest layout of one scheme for all that holds the context, as other systems run it, and its step times.

    A job with a fixed layout is set up before its data is seen, so it must hold whatever may come: not only what these
    few batches happen to have. None if no such layout does.
    """
    best: StrategyShape | None = None
    least, chosen = math.inf, list[StepPlan]()
    for scheme in table.schemes:
        most = int(table[scheme].max_length)
        if num_ranks % scheme.num_ranks or most < context_length:
            continue
        strategy = StrategyShape.of([scheme] * (num_ranks // scheme.num_ranks))
        added = messages.exposed_ms(strategy)
        for capacity in sorted({context_length, most}):
            plans = [packed_in_turn(step, batch, strategy, table, capacity) for step, batch in enumerate(batches)]
            taken = fmean(plan.predicted_ms for plan in plans) + added
            if taken < least:
                best, least, chosen = strategy, taken, plans
    return best, np.array([messages.step_ms(plan) for plan in chosen])


def length_histogram(lengths: Ints, context_length: int) -> list[tuple[int, int, int]]:
    """(longest length, sequences, tokens) of length bins that double in length, up to the context."""
    rows = []
    low, high = 0, 64
    while low < context_length:
        high = min(high, context_length)
        inside = lengths[(lengths > low) & (lengths <= high)]
        rows.append((high, len(inside), int(inside.sum())))
        low, high = high, high * 2
    return rows
