"""Configurations of a system and batches in, the best of them with its plans out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PhasedPlanner, Planner
from ds_hydra.zero_hetero.errors import PlanError

Lengths = Sequence[int]
PlanStep = Callable[[int, Lengths], StepPlan]
StepMs = Callable[[StepPlan, CostTable], float]
"""A plan and the costs that it was made with in, what the step takes out."""


class Configuration(NamedTuple):
    """One way to set a system up: a text for readers, its costs, and how it plans a step of these lengths."""

    text: str
    table: CostTable
    plan: PlanStep


def planned_by(text: str, table: CostTable, planner: Planner | PhasedPlanner) -> Configuration:
    """A configuration whose steps one of our planners plans."""
    return Configuration(text, table, lambda step, lengths: planner.plan(step, range(len(lengths)), lengths))


class Chosen(NamedTuple):
    """A system's configuration and what it made of each batch."""

    configuration: Configuration
    plans: tuple[StepPlan, ...]


_SCREENED = 5  # batches on which configurations are compared first, at even ranks of their longest sequence
_FINALISTS = 4


def hindsight(configurations: Iterable[Configuration], batches: Sequence[Lengths], ms: StepMs) -> Chosen:
    """The configuration whose steps take the least `ms` in the mean. PlanError when none holds all batches.

    All are compared on a few of the batches by what plans predict, that with the longest sequence among them, and the
    best few on all batches.
    """
    # The longest sequences come first: what cannot hold them is left at once.
    order = sorted(range(len(batches)), key=lambda step: (-max(batches[step]), step))
    last = len(order) - 1
    few = list(dict.fromkeys(order[round(last * part / (_SCREENED - 1))] for part in range(_SCREENED)))
    ranked: list[tuple[float, int, Configuration, dict[int, StepPlan]]] = []
    refused: PlanError | None = None
    for number, configuration in enumerate(configurations):
        try:
            plans = {step: configuration.plan(step, batches[step]) for step in few}
        except PlanError as error:
            refused = error
            continue
        ranked.append((sum(plan.predicted_ms for plan in plans.values()), number, configuration, plans))
    finalists = []
    for _, _, configuration, plans in sorted(ranked, key=lambda row: row[:2])[:_FINALISTS]:
        try:
            plans |= {step: configuration.plan(step, batches[step]) for step in order if step not in plans}
        except PlanError as error:
            refused = error
            continue
        finalists.append(Chosen(configuration, tuple(plans[step] for step in range(len(batches)))))
    if not finalists:
        raise PlanError(f"no configuration holds these batches: {refused}")
    return min(finalists, key=lambda one: sum(ms(plan, one.configuration.table) for plan in one.plans))
