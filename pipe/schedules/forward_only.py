"""Micro-batches and a number of stages in, the order of an evaluation out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.schedules.actions import Action, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.virtual import virtual_stage


def forward_only(batches: Batches, num_stages: int) -> tuple[Order, ...]:
    """Evaluation: every micro-batch passes through once, in the same order on all stages.

    In a V the two parts of a stage take turns. The first of 2 stages, 4 micro-batches: F0 F1 F2 F0' F3 F1' F2' F3'.
    """
    # Micro-batch m would come to virtual stage x at tick m + x if each had a device to itself. No action needs one of
    # its own tick or of a later one, so an order by these ticks stands still nowhere. At the same tick the part nearer
    # to the loss comes first.
    forwards = []
    for stage in range(num_stages):
        visits = [
            (microbatch + virtual_stage(stage, part, num_stages), -part, microbatch)
            for part in range(batches.parts) for microbatch in range(len(batches))
        ]  # fmt: skip
        forwards.append(tuple(Action("forward", microbatch, -later) for _, later, microbatch in sorted(visits)))
    return tuple(forwards)
