"""Micro-batches and a number of stages in, what each stage computes and in which order out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.schedules.actions import Action, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.zero_hetero.errors import PlanError


def one_f_one_b(batches: Batches, num_stages: int) -> tuple[Order, ...]:
    """1F1B: forwards until the last stage could begin, then one forward and one backward in turn, then backwards.

    Stage s of PP keeps at most PP - s micro-batches, so memory does not grow with their number (PipeDream-Flush,
    Narayanan et al., 2021). Equal to DeepSpeed's `TrainSchedule`. The first of 3 stages, 4 micro-batches:
    F0 F1 F2 B0 F3 B1 B2 B3.

    With sequences in slices it is Seq1F1B (arXiv 2406.03488): a stage keeps as many more as the longest chain has
    further slices, and the next chain that is there as a whole runs backward, its last slice first. The last of 3
    stages, two sequences of 2 slices each: F0 F1 B1 F2 B0 F3 B3 B2. PlanError for a V.
    """
    if batches.parts != 1:
        raise PlanError("schedule 1f1b: it is for stages of one range of layers; a V runs by the schedule list")
    chains = batches.chains
    backwards = [(microbatch, chain[-1]) for chain in chains for microbatch in reversed(chain)]
    further_slices = max((len(chain) for chain in chains), default=1) - 1
    return tuple(_stage(backwards, num_stages - 1 - stage + further_slices) for stage in range(num_stages))


def _stage(backwards: list[tuple[int, int]], ahead: int) -> Order:
    """One stage's order from the backwards, each with the last slice of its chain."""
    # Micro-batch 0 needs `ahead` more forwards until the last stage can begin its backward. A stage fills that time
    # with forwards; every backward after that frees one micro-batch before the next forward takes its place.
    #
    # No stage waits for ever, because all have the same order of forwards and the same of backwards: when the next
    # stage owes a backward, it needs no more forwards for it than this stage, which runs further ahead, has done.
    # Only where other micro-batches stand between a chain's slices is its last slice further off than `ahead`.
    order: list[Action] = []
    forwarded = 0
    for number, (microbatch, last_slice) in enumerate(backwards):
        due = min(max(number + ahead, last_slice) + 1, len(backwards))
        order += [Action("forward", m) for m in range(forwarded, due)]
        forwarded = max(forwarded, due)
        order.append(Action("backward", microbatch))
    return tuple(order)
