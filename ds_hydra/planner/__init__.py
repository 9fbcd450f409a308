"""Lengths in, step plans out: dispatch, packing, bounds, selection, proposal, and the service that plans ahead.

Pure: nothing here imports torch or DeepSpeed, or knows a process group. Start reading at `selection`.
"""

from ds_hydra.planner.candidates import candidate_schemes
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.proposal import propose_strategies
from ds_hydra.planner.selection import Planner
from ds_hydra.planner.service import PlannedStep, PlannerService
from ds_hydra.planner.step_plan import PipelinePlan, StepPlan, load_plans, save_plans
from ds_hydra.planner.validate import validate_plan

__all__ = [
    "PipelinePlan",
    "PlannedStep",
    "Planner",
    "PlannerOptions",
    "PlannerService",
    "StepPlan",
    "candidate_schemes",
    "load_plans",
    "propose_strategies",
    "save_plans",
    "validate_plan",
]
