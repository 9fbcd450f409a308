"""A batch to plan and a producer's answer in; the step's plan, checked, and how it came about, out. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from ds_hydra.plan.step_plan import StepPlan, joined
from ds_hydra.plan.validate import check_safe
from ds_hydra.planner.composing import HighsShare
from ds_hydra.planner.recipe import PlanRecipe
from ds_hydra.zero_hetero.errors import PlanError

MadeBy = Literal["producer", "restarted", "here", "callback"]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and how it came about, on which it does not depend.

    `planning_ms` is the planner's wall time, `waited_ms` that of who asked for the plan. `hidden` says whether it was
    ready then. `made_by`: "restarted" is a producer that took another's place meanwhile, "here" the training process,
    "callback" one of the user's. `recipe` is the digest of what it follows from; `highs` says what HiGHS did for it.
    """

    plan: StepPlan
    planning_ms: float
    hidden: bool
    waited_ms: float = 0.0
    made_by: MadeBy = "here"
    recipe: str = ""
    highs: HighsShare | None = None

    def to_text(self) -> str:
        """For other ranks; `of_text` is the inverse."""
        told = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "plan"}
        return f"{json.dumps(told)}\n{self.plan.to_json()}"

    @classmethod
    def of_text(cls, text: str) -> PlannedStep:
        told, plan = text.split("\n", 1)
        fields_told = json.loads(told)
        highs = fields_told.pop("highs")
        return cls(
            StepPlan.from_json(plan, "rank 0's plan"),
            **fields_told,
            highs=None if highs is None else HighsShare(*highs),
        )


def joined_steps(parts: Sequence[PlannedStep]) -> PlannedStep:
    """The plan of a step in parts, and how it came about: its times are those of all, the rest is the last one's."""
    return replace(
        parts[-1],
        plan=joined([part.plan for part in parts]),
        planning_ms=sum(part.planning_ms for part in parts),
        waited_ms=sum(part.waited_ms for part in parts),
        hidden=all(part.hidden for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Request:
    """A batch to plan, with lengths in tokens."""

    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


class InvalidAnswerError(ValueError):
    """What a producer said cannot be used."""


class Answer(NamedTuple):
    """What a producer made of a request."""

    plan: StepPlan
    planning_ms: float
    highs: HighsShare | None


def read_answer(line: str, request: Request, recipe: PlanRecipe) -> Answer:
    """The plan of an answer, its planning time, and what HiGHS did for it.

    Raises InvalidAnswerError for one that is wrong, and PlanError where the producer could not plan these sequences.
    """
    answer = json.loads(line)
    if "error" in answer:
        raise PlanError(str(answer["error"]))
    try:
        if "invalid" in answer:
            raise PlanError(answer["invalid"])
        plan, planning_ms = StepPlan.from_json(answer["plan"], "the producer's answer"), float(answer["planning_ms"])
        told = answer.get("highs")
        highs = None if told is None else HighsShare(*told)
        # The producer has run the plan's schedules to check its times and its memory. What costs little is checked
        # again: a producer whose memory went bad may answer in valid JSON and still lose a sequence.
        if (plan.step, plan.sequence_ids, plan.lengths) != (request.step, request.ids, request.lengths):
            raise PlanError(f"the producer answered for other sequences than those of step {request.step}")
        check_safe(plan, recipe.table, recipe.strategies[0].num_ranks)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidAnswerError(str(error)) from error
    return Answer(plan, planning_ms, highs)
