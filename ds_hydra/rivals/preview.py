"""A dry run: steps planned by costs, strategies and lengths, beside what other systems would do with them. Pure.

`ds-hydra preview` prints these figures; nothing here prints. Where the model is known, all steps are simulated with
their pulls, pushes and messages between stages, and strategies are chosen by that.

[Note: rivals of a preview]
Other systems are set up in hindsight, on the very batches that are previewed; costs are [Note: costs of other systems].
Of fixed layouts, in which all pipelines have one shape of TP, PP and context parallelism by rings or Ulysses, the best
is shown twice: with sequences packed and dealt out in turn, as trainers do it, and with sequences balanced by our
costs. Of our own layouts of one shape, in which pipelines may run slices and two ranges of layers, the best is shown
too, so that what several shapes bring stands by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.loads import Lengths, loads_of
from ds_hydra.data.lengths import sample_batches
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan, parse_phases
from ds_hydra.planner.fixed_layout import PhasedPlanner
from ds_hydra.planner.kernels.problem import Floats, Ints
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner
from ds_hydra.rivals.costs import Setting
from ds_hydra.rivals.dynamic_cp import as_made
from ds_hydra.rivals.systems import (
    Configuration,
    RowSimulator,
    balanced,
    deepspeed,
    hindsight,
    infinipipe,
    megatron,
    planned_by,
)
from ds_hydra.simulate.hosts import HostWay, hosts_ways
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError

FIXED = "best fixed layout, packed in turn"
BALANCED = "best fixed layout, balanced by our costs"
SCHEDULED = "Megatron-Core's dynamic CP, as it schedules"
ZERO_3 = "DeepSpeed ZeRO-3, Ulysses, packed in turn"
INFINIPIPE = "InfiniPipe, as published"
ONE = "ds-hydra, one layout in every step"


class Beside(NamedTuple):
    """How another system runs the steps: as what it is set up, and their times in ms."""

    layout: str
    step_ms: Floats


@dataclass(frozen=True)
class Preview:
    """Figures of the previewed steps; times in ms, one entry per step."""

    wins: dict[str, int]  # strategy: in how many steps it was planned
    step_ms: Floats  # simulated
    gaps: Floats  # how far above its lower bound each step is: 0.02 is 2 %
    balance: Floats  # slowest over mean pipeline
    rivals: dict[str, Beside]  # those that hold the context [Note: rivals of a preview]
    phased_ms: dict[str, Floats]  # rivals of several phases, such as "4*tp1 then tp4"
    plans: tuple[StepPlan, ...]  # ours, one of each step
    hosts: dict[str, HostWay]  # what hosts of reinforcement learning do, if it was asked for


def preview_steps(
    cost_table: CostTable,
    strategies: Sequence[StrategyShape],
    lengths: Sequence[int],
    setting: Setting,
    steps: int,
    options: PlannerOptions,
    phased: Sequence[str] = (),
    cluster: SimulatedJob | None = None,
    *,
    hosts: bool = False,
) -> Preview:
    """Plan `steps` random batches of the data with these strategies, by what other systems do, and with the phases that
    `phased` names; with `hosts` by what hosts of reinforcement learning do, too. `cluster` is the job whose messages
    count; None: none do."""
    # Batches are drawn by another seed than the one that strategies were proposed with. Measured on the batches that
    # they were chosen for, they would look better than they are.
    messages = Messages(cluster, setting.tokens)
    batches = drawn_batches(lengths, setting, steps, options.seed)
    planner = _planner(cost_table, strategies, options, messages)
    plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]
    own = [_planned_alone(cost_table, one, options, messages) for one in strategies if len(set(one.pipelines)) == 1]
    gpus = planner.num_ranks
    return Preview(
        dict(Counter(plan.strategy for plan in plans).most_common()),
        np.array([messages.ms(plan, cost_table) for plan in plans]),
        np.array([plan.gap for plan in plans]),
        np.array([plan.balance for plan in plans]),
        dict(other_systems(setting, batches, messages, own if len(strategies) > 1 else ())),
        {text: _phased(cost_table, text, gpus, batches, options, messages) for text in phased},
        tuple(plans),
        hosts_ways(cost_table, gpus, batches, setting.context, options, messages.ms) if hosts else {},
    )


def drawn_batches(lengths: Sequence[int], setting: Setting, steps: int, seed: int) -> list[Sequence[int]]:
    """The batches that are previewed, with what their sequences take besides."""
    if loads := loads_of(lengths):
        drawn, batches, within = np.random.default_rng(seed + 1), list[Sequence[int]](), np.asarray(lengths)
        for _ in range(steps):
            order = drawn.choice(np.flatnonzero(within <= setting.context), 2 + setting.tokens // int(within.min()))
            of_step = order[: int(np.searchsorted(np.cumsum(within[order]), setting.tokens)) + 1]
            batches.append(Lengths.of(within[of_step].tolist(), [loads[at] for at in of_step]))
        return batches
    return [batch.tolist() for batch in sample_batches(lengths, setting.tokens, steps, seed + 1, setting.context)]


class Messages:
    """What a job's messages add to its steps: simulated, where there is a job to simulate."""

    def __init__(self, cluster: SimulatedJob | None, tokens_per_step: int) -> None:
        self._cluster, self._tokens, self.known = cluster, tokens_per_step, cluster is not None
        # The costs too, so that no others get the id of some.
        self._simulators: dict[int, tuple[CostTable, RowSimulator]] = {}

    def exposed_ms(self, strategy: StrategyShape) -> float:
        """Of any step under a strategy, about."""
        return 0.0 if self._cluster is None else exposed_ms(self._cluster, strategy, self._tokens)

    def ms(self, plan: StepPlan, table: CostTable) -> float:
        """One step with its computing, by the costs that it was planned with."""
        return plan.predicted_ms if self._cluster is None else self.of(table).step_ms(plan)

    def of(self, table: CostTable) -> RowSimulator:
        """The simulator of the job with these costs."""
        assert self._cluster is not None, "there is a job to simulate"
        if id(table) not in self._simulators:
            found = replace(self._cluster.found, table=table)
            self._simulators[id(table)] = table, RowSimulator(replace(self._cluster, found=found))
        return self._simulators[id(table)][1]


def _planner(
    table: CostTable, strategies: Sequence[StrategyShape], options: PlannerOptions, messages: Messages
) -> Planner:
    return Planner(
        table, strategies, options, exposed_ms=[messages.exposed_ms(one) for one in strategies],
        step_ms=(lambda plan: messages.ms(plan, table)) if messages.known else None,
    )  # fmt: skip


def _planned_alone(
    table: CostTable, strategy: StrategyShape, options: PlannerOptions, messages: Messages
) -> Configuration:
    return planned_by(str(strategy), table, _planner(table, [strategy], options, messages))


def other_systems(
    setting: Setting, batches: Sequence[Sequence[int]], messages: Messages, own: Sequence[Configuration] = ()
) -> Iterator[tuple[str, Beside]]:
    """Each that holds the context [Note: rivals of a preview]; `own` are our layouts of one shape."""
    named = {FIXED: megatron(setting), BALANCED: balanced(setting), ZERO_3: deepspeed(setting)}
    if any(map(loads_of, batches)):  # which others have no price for
        named = {}
    elif setting.of_model.transfers:
        named[INFINIPIPE] = infinipipe(setting)
    named[ONE] = iter(own)
    for name, configurations in named.items():
        with suppress(PlanError):
            chosen = hindsight(configurations, batches, messages.ms)
            table = chosen.configuration.table
            taken = np.array([messages.ms(plan, table) for plan in chosen.plans])
            yield name, Beside(chosen.configuration.text, taken)
        if name == BALANCED:
            with suppress(PlanError):
                made = as_made(setting, batches, "packing-aware CP")
                yield SCHEDULED, Beside(str(made.units), np.array([one.ms + made.exposed_ms for one in made.ran]))


def _phased(
    table: CostTable,
    text: str,
    num_ranks: int,
    batches: Sequence[Sequence[int]],
    options: PlannerOptions,
    messages: Messages,
) -> Floats:
    """Step times of the batches in the phases that a text names."""
    phases = parse_phases(text)
    used = {shape.num_ranks for shape in phases}
    if used != {num_ranks}:
        raise PlanError(f"the phases of {text!r} use {used.pop()} ranks but the strategies {num_ranks}; use as many")
    planner = PhasedPlanner(table, phases, options)
    return np.array([messages.ms(planner.plan(0, range(len(batch)), batch), table) for batch in batches])


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
