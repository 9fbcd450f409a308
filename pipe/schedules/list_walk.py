"""The list order: what each stage of a pipeline does next, whenever it is free; and its virtual stages. Pure.

[Note: virtual stages]
A stage that holds two ranges of layers is visited twice by each micro-batch. The ranges are virtual stages, numbered as
the model goes. In a V the first half of them goes down the pipeline and the second half comes up again, so stage r of S
holds the virtual stages r and 2S - 1 - r, its parts 0 and 1. Three stages:

  stage 0   0           5        a micro-batch enters, and its loss is computed
  stage 1     1       4
  stage 2       2   3            from one part to the other without a message

A forward passes half as many layers in each of them, so the last stage begins in half of the time.

[Note: the list order]
Whenever a stage is free it takes the first thing of this list that it can do:

  B   of the backwards whose gradient is there, the one whose gradient came first
  F   the next micro-batch in order; of the two ranges of a V the second first, since that brings its loss nearer
  W   the weights' gradients of the oldest backward that still owes them

So backwards never wait for a forward, and the weights' gradients, for which nobody waits, fill what would be bubbles
(zero bubble pipelines, Qi et al., arXiv 2401.10241, make such orders by hand for equal micro-batches). Times decide
what is there first. Two stages of two micro-batches, where each of F, B and W takes 1:

  time      0   1   2   3   4   5   6   7
  stage 0   F0  F1  .   B0  W0  B1  W1
  stage 1   .   F0  B0  F1  B1  W0  W1

The memory of a run [Note: chains] is reserved at its first forward: all of its micro-batches, in all ranges of the
stage. If each slice asked for its own, two sequences of which half is forwarded could fill a stage and wait for each
other's end. As it is, every stage gives out its room in the same order of runs. The oldest run that is not done finds
it free, or is in it, so nothing stands still.

The functions are plain Python over numbers and indexed sequences, so that numba can compile them for a search; lists
are the fastest without it. An index `at` is virtual stage * n + micro-batch, n being their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """One range of layers: a stage, and which of its ranges; 0 is the only one, or the first of a V."""

    stage: int
    part: int


def virtual_stage(stage: int, part: int, num_stages: int) -> int:
    """The number of a range of layers, from 0 at the model's beginning [Note: virtual stages]."""
    return 2 * num_stages - 1 - stage if part else stage


def place_of(virtual: int, num_stages: int) -> Place:
    """Inverse of `virtual_stage`."""
    return Place(virtual, 0) if virtual < num_stages else Place(2 * num_stages - 1 - virtual, 1)


NEVER = 1 << 62
FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class Row(Protocol):
    """A list, a tuple or an array of whole numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...


class Numbers(Row, Protocol):
    """One that can be written to."""

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Jobs(NamedTuple):
    """What is to be done. Lists go by micro-batch where nothing else is said; times are microseconds."""

    num_stages: int
    parts: int
    forward: Row
    backward: Row
    weight: Row  # 0: the backward does it too
    kept: Row  # units of memory
    until_weight: Row
    after: Row  # `Batches.after`
    reserved: Row  # units that its first forward on a stage takes; 0 if an earlier one of its run has
    room: int  # units of a stage


class Walk(NamedTuple):
    """How far the stages are; changed in place."""

    forward_stop: Numbers  # by `at`: when it is done, NEVER before it has begun
    backward_stop: Numbers
    next_forward: Numbers  # by virtual stage
    coming: Numbers  # by virtual stage * n + number: micro-batches in the order in which their gradients come
    num_coming: Numbers  # by virtual stage
    first_open: Numbers  # by virtual stage: of those that come, all before have begun their backward
    free: Numbers  # by stage: when it can do something else
    used: Numbers  # by stage: units
    actions: Numbers  # by stage * 3 * parts * n + number: kind * virtual stages * n + at
    num_actions: Numbers  # by stage
    owing: Numbers  # by stage * parts * n + number: `at` of a backward, in their order
    num_owing: Numbers  # by stage: backwards that have ever owed weights' gradients
    num_paid: Numbers  # by stage: those that owe none any more


TakeWalk = Callable[[Jobs, Walk], int]
"""Runs all micro-batches from a fresh walk, into which it writes each stage's actions: when all is done, in
microseconds, or -1 if none can go on."""


def list_walk(jobs: Jobs, walk: Walk) -> int:
    """Run all micro-batches from a fresh walk [Note: the list order]: when all is done, or -1 if none can go on."""
    n, stop, now = len(jobs.forward), 0, 0
    left = jobs.num_stages * jobs.parts * n * 2
    for m in range(n):
        if jobs.weight[m] > 0:
            left += jobs.num_stages * jobs.parts
    while True:
        for stage in range(jobs.num_stages):
            if walk.free[stage] <= now and begin_next(jobs, walk, stage, now):
                stop = max(stop, walk.free[stage])
                left -= 1
        if left == 0:
            return stop
        # Whatever can be done has begun; nothing changes before some stage is done with what it does.
        later = NEVER
        for stage in range(jobs.num_stages):
            if now < walk.free[stage] < later:
                later = walk.free[stage]
        if later == NEVER:
            return -1
        now = later


def begin_next(jobs: Jobs, walk: Walk, stage: int, now: int) -> bool:
    """Begin the first thing of the list that a free stage can do now; False if there is none."""
    kind, at = BACKWARD, first_gradient(jobs, walk, stage, now)
    if at < 0:
        kind, at = FORWARD, next_forward(jobs, walk, stage, now)
    if at < 0 and walk.num_paid[stage] < walk.num_owing[stage]:
        kind, at = WEIGHT, walk.owing[stage * jobs.parts * len(jobs.forward) + walk.num_paid[stage]]
    if at < 0:
        return False
    begin(jobs, walk, stage, now, kind, at)
    return True


def begin(jobs: Jobs, walk: Walk, stage: int, now: int, kind: int, at: int) -> None:
    """Write down that a stage begins one of its actions now."""
    n = len(jobs.forward)
    virtual = at // n
    m = at - virtual * n
    # What an action gives back is free when it is done, and before that this stage does not look for room.
    if kind == FORWARD:
        walk.free[stage] = walk.forward_stop[at] = now + jobs.forward[m]
        walk.next_forward[virtual] += 1
        walk.used[stage] += jobs.reserved[m] if virtual == stage else 0
        if virtual == jobs.parts * jobs.num_stages - 1:
            will_come(walk, virtual, n, m)
    elif kind == BACKWARD:
        walk.free[stage] = walk.backward_stop[at] = now + jobs.backward[m]
        if jobs.weight[m] > 0:
            walk.used[stage] -= jobs.kept[m] - jobs.until_weight[m]
            walk.owing[stage * jobs.parts * n + walk.num_owing[stage]] = at
            walk.num_owing[stage] += 1
        else:
            walk.used[stage] -= jobs.kept[m]
        if virtual > 0:
            will_come(walk, virtual - 1, n, m)
    else:
        walk.free[stage] = now + jobs.weight[m]
        walk.used[stage] -= jobs.until_weight[m]
        walk.num_paid[stage] += 1
    walk.actions[stage * 3 * jobs.parts * n + walk.num_actions[stage]] = kind * jobs.parts * jobs.num_stages * n + at
    walk.num_actions[stage] += 1


def will_come(walk: Walk, virtual: int, n: int, m: int) -> None:
    """The gradient of a micro-batch, or its loss, is the next that comes to a virtual stage."""
    walk.coming[virtual * n + walk.num_coming[virtual]] = m
    walk.num_coming[virtual] += 1


def first_gradient(jobs: Jobs, walk: Walk, stage: int, now: int) -> int:
    """`at` of the backward that a stage can run whose gradient came first; -1 for none."""
    n, last = len(jobs.forward), jobs.parts * jobs.num_stages - 1
    found, came = -1, NEVER
    for part in range(jobs.parts):
        virtual = virtual_stage(stage, part, jobs.num_stages)
        first, stop = virtual * n, walk.num_coming[virtual]
        number = walk.first_open[virtual]
        while number < stop and walk.backward_stop[first + walk.coming[first + number]] < NEVER:
            number += 1
        walk.first_open[virtual] = number
        # One stage computes all gradients that come here, so they come in the order in which it began them.
        while number < stop:
            m = walk.coming[first + number]
            arrival = walk.forward_stop[first + m] if virtual == last else walk.backward_stop[first + n + m]
            if arrival > now or arrival >= came:
                break
            begun = walk.backward_stop[first + m] < NEVER
            if not begun and (jobs.after[m] < 0 or walk.backward_stop[first + jobs.after[m]] <= now):
                found, came = first + m, arrival
                break
            number += 1
    return found


def next_forward(jobs: Jobs, walk: Walk, stage: int, now: int) -> int:
    """`at` of the forward that a stage runs next; -1 if its input is not there, or no room for it."""
    n = len(jobs.forward)
    for part in range(jobs.parts - 1, -1, -1):
        virtual = virtual_stage(stage, part, jobs.num_stages)
        m = walk.next_forward[virtual]
        if m == n or (virtual > 0 and walk.forward_stop[(virtual - 1) * n + m] > now):
            continue
        # Its first visit to the stage: where there is no room now, there is when a backward or a weight is done.
        if part == 0 and walk.used[stage] + jobs.reserved[m] > jobs.room:
            continue
        return virtual * n + m
    return -1
