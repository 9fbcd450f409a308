"""Lengths in, step plans out: dispatch, packing, bounds, selection, proposal, and the service that plans ahead.

Pure: nothing here imports torch or DeepSpeed, or knows a process group. Start reading at `selection`.
"""

from ds_hydra.plan.step_plan import PipelinePlan, StepPlan, load_plans, save_plans
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner
from ds_hydra.planner.service import PlannedStep, PlannerService

__all__ = [
    "PipelinePlan",
    "PlannedStep",
    "Planner",
    "PlannerOptions",
    "PlannerService",
    "StepPlan",
    "load_plans",
    "save_plans",
    "validate_plan",
]
