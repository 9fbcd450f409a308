"""Plans in, a file of them out, and back, for `choose: "replay"`. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import PlanError


def save_plans(plans: Iterable[StepPlan], path: str | Path) -> None:
    """Write plans for `choose: "replay"`: one JSON object a line."""
    Path(path).write_text("".join(plan.to_json() + "\n" for plan in plans))


def load_plans(path: str | Path) -> dict[int, StepPlan]:
    """Plans by step, as `save_plans` wrote them; PlanError names file and line of what cannot be read."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise PlanError(f"cannot read the plans to replay, {path}: {error.strerror}") from error
    plans: dict[int, StepPlan] = {}
    for number, line in enumerate(lines, start=1):
        plan = StepPlan.from_json(line, f"{path}, line {number}")
        if plan.step in plans:
            raise PlanError(f"{path}, line {number}: a second plan for step {plan.step}; keep one")
        plans[plan.step] = plan
    return plans


def recorded_plans(path: str | Path) -> dict[int, StepPlan]:
    """Plans by step, of a file of plans or of a run's step records; of a step that is there twice the last counts.

    PlanError for a file that holds neither.
    """
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        first = json.loads(lines[0]) if lines else {}
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read plans from {path}: {error}") from error
    if not isinstance(first, dict) or "strategy" not in first:  # a plan has its phases, a step's record its strategy
        return load_plans(path)
    plans: dict[int, StepPlan] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step, text = int(record["step"]), str(record["plan"])
        except (ValueError, KeyError, TypeError) as error:
            # A run that was killed may have left half a line at the end, and its other steps are still good.
            if number == len(lines) and plans:
                continue
            raise PlanError(f"{path}, line {number}: no step record with its plan ({error!r})") from error
        plans[step] = StepPlan.from_json(text, f"{path}, line {number}")
    return plans
