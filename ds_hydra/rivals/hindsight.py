"""Configurations of a system and batches in, the best of them with its plans out. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import PlanError

Lengths = Sequence[int]
PlanStep = Callable[[int, Lengths], StepPlan]


class StepMs(Protocol):
    """What a step takes by a plan and the costs that it was made with."""

    def __call__(self, plan: StepPlan, table: CostTable) -> float: ...


class PlansSteps(Protocol):
    """Plans steps, as `Planner` does."""

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan: ...


class Configuration(NamedTuple):
    """One way to set a system up: a text for readers, its costs, and how it plans a step of these lengths."""

    text: str
    table: CostTable
    plan: PlanStep


def planned_by(text: str, table: CostTable, planner: PlansSteps) -> Configuration:
    """A configuration whose steps such a planner plans."""
    return Configuration(text, table, lambda step, lengths: planner.plan(step, range(len(lengths)), lengths))


class Chosen(NamedTuple):
    """A system's configuration and what it made of each batch."""

    configuration: Configuration
    plans: tuple[StepPlan, ...]


_SCREENED = 5  # batches on which configurations are compared first, at even ranks of their longest sequence
_FINALISTS = 4
_CLOSE = 1.1  # finalists take at most so many times the least, on the few batches


def hindsight(
    configurations: Iterable[Configuration], batches: Sequence[Lengths], ms: StepMs, *, finalists: int = _FINALISTS
) -> Chosen:
    """The configuration whose steps take the least `ms` in the mean. PlanError when none holds all batches.

    All are compared on a few of the batches, that with the longest sequence among them, and `finalists` on all. One
    is left when its plans alone, without transfers, take clearly more on most of the few than the best so far in all.
    """
    # The longest sequences come first: what cannot hold them is left at once.
    order = sorted(range(len(batches)), key=lambda step: (-max(batches[step]), step))
    last = len(order) - 1
    few = list(dict.fromkeys(order[round(last * part / (_SCREENED - 1))] for part in range(_SCREENED)))
    ranked: list[tuple[float, int, Configuration, dict[int, StepPlan]]] = []
    best: dict[int, float] = {}  # what the best so far takes for each of the few
    refused: PlanError | None = None
    for number, configuration in enumerate(configurations):
        plans: dict[int, StepPlan] = {}
        try:
            for step in few:
                plans[step] = configuration.plan(step, batches[step])
                known = sum(best.get(one, math.inf) for one in plans)
                alone = sum(plan.predicted_ms for plan in plans.values())
                if 2 * len(plans) > len(few) and alone > _CLOSE * known:
                    break
            else:
                taken = {step: ms(plan, configuration.table) for step, plan in plans.items()}
                ranked.append((sum(taken.values()), number, configuration, plans))
                if not best or sum(taken.values()) < sum(best.values()):
                    best = taken
        except PlanError as error:
            refused = error
    last_ones: list[Chosen] = []
    for of_few, _, configuration, plans in sorted(ranked, key=lambda row: row[:2])[:finalists]:
        if last_ones and of_few > _CLOSE * sum(best.values()):
            break
        try:
            plans |= {step: configuration.plan(step, batches[step]) for step in order if step not in plans}
        except PlanError as error:
            refused = error
            continue
        last_ones.append(Chosen(configuration, tuple(plans[step] for step in range(len(batches)))))
    if not last_ones:
        raise PlanError(f"no configuration holds these batches: {refused}")
    if len(last_ones) == 1:
        return last_ones[0]
    return min(last_ones, key=lambda one: sum(ms(plan, one.configuration.table) for plan in one.plans))
