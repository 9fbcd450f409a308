"""A step's plan in; PlanError if some rank would wait for ever. Pure: no torch.

[Note: why a step ends]
Take messages as the strictest network does: each holds up both ends until they have come to it. Then a step ends if
every pipeline's slots do by themselves (`rendezvous.check_slots`), and if no stage has messages with a neighbour left
when it comes to its first push. For all ranks start the pulls of a phase before anything else, in one order, so these
are met. Pipelines exchange nothing with each other in their slots, so each comes to its pushes, which all ranks start
in one order too. Who waits there holds up nobody's slots, so in the end all are there. The next phase begins anew.
"""

from __future__ import annotations

from functools import lru_cache

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.schedules.actions import backward_of_first_push
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.schedules.rendezvous import check_slots
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.works import schedule_batches
from ds_hydra.zero_hetero.errors import PlanError


def check_order(plan: StepPlan, table: CostTable) -> None:
    """PlanError, with the pipeline's slots, unless every rank comes to the end of the step. [Note: why a step ends]"""
    for phase in plan.phases:
        for pipeline in phase.pipelines:
            _check_pipeline(pipeline.schedule, schedule_batches(pipeline, table), pipeline.shape.pp)


@lru_cache(maxsize=4096)
def _check_pipeline(schedule: str, batches: Batches, num_stages: int) -> None:
    stages = [training_slots(schedule, batches, num_stages, stage) for stage in range(num_stages)]
    check_slots(stages, batches)
    for index, slots in enumerate(stages):
        first_push = backward_of_first_push(slots)
        if first_push is None:
            continue  # pushes start after the last slot
        at = next(number for number, slot in enumerate(slots) if first_push in slot)
        late = [str(action) for slot in slots[at + 1 :] for action in slot if not action.computes]
        if late:
            raise PlanError(f"schedule {schedule}: stage {index} pushes in {first_push}, but {' '.join(late)} follow")
