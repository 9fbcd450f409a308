"""Micro-batches with their times and memory in, orders that split the backward and leave few bubbles out. Pure.

What a stage does whenever it is free a walk says: the usual one is in [Note: the list order].
"""

from __future__ import annotations

from ds_hydra.pipe.schedules.actions import Action, Compute, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.list_walk import BACKWARD, FORWARD, NEVER, WEIGHT, Jobs, TakeWalk, Walk, list_walk
from ds_hydra.zero_hetero.errors import PlanError


def list_order(batches: Batches, num_stages: int, walk: TakeWalk = list_walk) -> tuple[Order, ...]:
    """Each stage takes, whenever it is free, what a walk says: the first thing that it can do [Note: the list order].

    The order follows from `works` and `room` alone, so it is the same on every rank. PlanError if these are missing, or
    a run of micro-batches does not fit the room by itself.

    At a stage's end the weights' gradients of several micro-batches stand together. The runtime computes such a row of
    W layer by layer, last layer first, and not micro-batch by micro-batch: then the gradients of a layer are final
    early, and their push overlaps with the rest. That takes as long and needs the same memory.
    """
    return _orders(_jobs(batches, num_stages), batches, walk)


def list_us(batches: Batches, num_stages: int) -> int:
    """Microseconds that the list order takes, for a search that wants no more. PlanError as `list_order`."""
    jobs = _jobs(batches, num_stages)
    return list_walk(jobs, fresh_walk(jobs))


def _jobs(batches: Batches, num_stages: int) -> Jobs:
    if len(batches.works) != len(batches):
        raise PlanError(
            f"the schedule orders {len(batches)} micro-batches by their times but knows {len(batches.works)}; give it "
            "their works, which follow from a cost table"
        )
    reserved = [0] * len(batches)
    for run in batches.runs:
        reserved[run[0]] = batches.parts * sum(batches.works[m].kept for m in run)
        if reserved[run[0]] > batches.room:
            raise PlanError(
                f"micro-batches {run[0]} to {run[-1]} live together and need {reserved[run[0]]} units of memory on a "
                f"stage, which has {batches.room}; cut their sequences for a pipeline with more ranks"
            )
    return Jobs(
        num_stages,
        batches.parts,
        forward=[work.forward for work in batches.works],
        backward=[work.backward for work in batches.works],
        weight=[work.weight for work in batches.works],
        kept=[work.kept for work in batches.works],
        until_weight=[work.until_weight for work in batches.works],
        after=batches.after,
        reserved=reserved,
        room=batches.room,
    )


def _orders(jobs: Jobs, batches: Batches, take: TakeWalk) -> tuple[Order, ...]:
    walk = fresh_walk(jobs)
    took = take(jobs, walk)
    if took < 0:
        raise PlanError(f"the order that {take.__name__} makes stands still with {batches} on {jobs.num_stages} stages")
    most = len(walk.actions) // jobs.num_stages
    return tuple(
        tuple(_action(walk.actions[stage * most + number], jobs) for number in range(walk.num_actions[stage]))
        for stage in range(jobs.num_stages)
    )


def _action(code: int, jobs: Jobs) -> Action:
    number, m = divmod(code, len(jobs.forward))
    sign, virtual = divmod(number, jobs.parts * jobs.num_stages)
    kinds: dict[int, Compute] = {
        FORWARD: "forward",
        BACKWARD: "input_gradient" if jobs.weight[m] else "backward",
        WEIGHT: "weight_gradient",
    }
    return Action(kinds[sign], m, int(virtual >= jobs.num_stages))


def fresh_walk(jobs: Jobs) -> Walk:
    """Nothing has begun yet."""
    n, stages = len(jobs.forward), jobs.num_stages
    virtual = jobs.parts * stages
    free, used, num_actions, num_owing, num_paid = ([0] * stages for _ in range(5))
    return Walk(
        forward_stop=[NEVER] * (virtual * n),
        backward_stop=[NEVER] * (virtual * n),
        next_forward=[0] * virtual,
        coming=[0] * (virtual * n),
        num_coming=[0] * virtual,
        first_open=[0] * virtual,
        free=free,
        used=used,
        actions=[0] * (3 * virtual * n),
        num_actions=num_actions,
        owing=[0] * (virtual * n),
        num_owing=num_owing,
        num_paid=num_paid,
    )
