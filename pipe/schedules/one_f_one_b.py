"""Numbers of micro-batches and stages, and a stage, in; the order of the stage's actions out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.schedules.actions import Action, Order


def one_f_one_b(num_microbatches: int, num_stages: int, stage: int) -> Order:
    """1F1B: forwards until the last stage could begin, then one forward and one backward in turn, then backwards.

    Stage s of PP keeps at most PP - s micro-batches, so memory does not grow with their number (PipeDream-Flush,
    Narayanan et al., 2021). Equal to DeepSpeed's `TrainSchedule`. The first of 3 stages, 4 micro-batches:
    F0 F1 F2 B0 F3 B1 B2 B3.
    """
    # Micro-batch 0 needs PP - 1 - s more forwards until the last stage can begin its backward. A stage fills that time
    # with forwards; every backward after that frees one micro-batch before the next forward takes its place.
    ahead = min(num_stages - 1 - stage, num_microbatches)
    order = [Action("forward", microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        if ahead + microbatch < num_microbatches:
            order.append(Action("forward", ahead + microbatch))
        order.append(Action("backward", microbatch))
    return tuple(order)


def forward_only(num_microbatches: int, num_stages: int, stage: int) -> Order:
    """Evaluation: every micro-batch passes through once, in the same order on all stages."""
    return tuple(Action("forward", microbatch) for microbatch in range(num_microbatches))
