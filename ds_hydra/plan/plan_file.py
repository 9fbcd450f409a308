"""Plans in, a file of them out, and back, for hydra.replay. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import PlanError


def save_plans(plans: Iterable[StepPlan], path: str | Path) -> None:
    """Write plans for hydra.replay: one JSON object a line."""
    Path(path).write_text("".join(plan.to_json() + "\n" for plan in plans), encoding="utf-8")


def load_plans(path: str | Path) -> dict[int, StepPlan]:
    """Plans by step, as `save_plans` wrote them; PlanError names file and line of what cannot be read."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise PlanError(f"cannot read the plans to replay, {path}: {error.strerror}") from error
    plans: dict[int, StepPlan] = {}
    for number, line in enumerate(lines, start=1):
        plan = StepPlan.from_json(line, f"{path}, line {number}")
        if plan.step in plans:
            raise PlanError(f"{path}, line {number}: a second plan for step {plan.step}; keep one")
        plans[plan.step] = plan
    return plans
