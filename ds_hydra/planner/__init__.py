"""Plans steps by their lengths: dispatch, packing, bounds, selection, proposal, and the service that plans ahead.

Pure: nothing here imports torch or DeepSpeed, or knows a process group. Start reading at `selection`.
"""

from ds_hydra.plan.step_plan import (
    MicroBatchPlan,
    Phase,
    PipelinePlan,
    Span,
    StepPlan,
    load_plans,
    parse_phases,
    save_plans,
)
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner.fixed_layout import PhasedPlanner
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.recipe import PlannedStep, PlanRecipe
from ds_hydra.planner.selection import Planner
from ds_hydra.planner.service import PlannerService

__all__ = [
    "MicroBatchPlan",
    "Phase",
    "PhasedPlanner",
    "PipelinePlan",
    "PlanRecipe",
    "PlannedStep",
    "Planner",
    "PlannerOptions",
    "PlannerService",
    "Span",
    "StepPlan",
    "load_plans",
    "parse_phases",
    "save_plans",
    "validate_plan",
]
