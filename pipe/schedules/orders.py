"""The orders that ship: forward only, 1F1B, 1F1B with split backwards (ZB-H1), and list order. Pure: no torch.

What a stage does whenever it is free a walk says: the usual one is in [Note: the list order].
"""

from __future__ import annotations

from ds_hydra.pipe.schedules.actions import Action, Compute, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.list_walk import (
    BACKWARD,
    FORWARD,
    NEVER,
    WEIGHT,
    Jobs,
    TakeWalk,
    Walk,
    list_walk,
    virtual_stage,
)
from ds_hydra.zero_hetero.errors import PlanError


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


def zb_h1(batches: Batches, num_stages: int) -> tuple[Order, ...]:
    """1F1B with backwards split: input gradients at the places of the backwards, weight gradients some places later.

    ZB-H1 of Qi et al. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2). Stage s begins the weight
    gradient of a micro-batch when it has s more input gradients. So a gradient reaches the stages before it sooner, and
    the weight gradients that a later stage has saved up fill the time in which it would wait. The last of 3 stages,
    4 micro-batches: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3. Every stage keeps what the first one keeps under 1F1B: PP - s
    micro-batches before their input gradient, and s before their weight gradient. It is made of numbers alone; "list"
    is made of times. PlanError for a V.
    """
    if batches.parts != 1:
        raise PlanError("schedule zb-h1: it is for stages of one range of layers; a V runs by the schedule list")
    # With F, I and W of 1 ms each, 3 stages and 4 micro-batches take 12 + 2 * 3 = 18 ms by 1F1B and 12 + 2 = 14 here:
    # the first forward still has to come down the pipeline, but the last gradient comes up beside weight gradients.
    return tuple(_delayed(order, stage) for stage, order in enumerate(one_f_one_b(batches, num_stages)))


def _delayed(order: Order, delay: int) -> Order:
    """An order whose backwards are split, each weight gradient `delay` backwards behind its input gradient."""
    delayed: list[Action] = []
    backwards = [action.microbatch for action in order if action.kind == "backward"]
    done = 0
    for action in order:
        if action.kind != "backward":
            delayed.append(action)
            continue
        delayed.append(Action("input_gradient", action.microbatch))
        if done >= delay:
            delayed.append(Action("weight_gradient", backwards[done - delay]))
        done += 1
    left = backwards[max(0, done - delay) :]
    return (*delayed, *(Action("weight_gradient", microbatch) for microbatch in left))


def list_order(batches: Batches, num_stages: int, walk: TakeWalk = list_walk) -> tuple[Order, ...]:
    """Each stage takes, whenever it is free, what a walk says: the first thing that it can do [Note: the list order].

    The order follows from `works` and `room` alone, so it is the same on every rank. PlanError if these are missing, or
    a run of micro-batches does not fit the room by itself.

    At a stage's end the weights' gradients of several micro-batches stand together. The runtime computes such a row of
    W layer by layer, last layer first, and not micro-batch by micro-batch: then the gradients of a layer are final
    early, and their push overlaps with the rest. That takes as long and needs the same memory.
    """
    return _orders(_jobs(batches, num_stages), batches, walk)


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
