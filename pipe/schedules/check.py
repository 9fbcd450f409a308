"""Orders of all stages in, every action at its earliest tick out; PlanError shows the grid with the error in it. Pure.

[Note: ticks]
A grid of stages and ticks shows a schedule best. Every action takes one tick, and starts at the first one at which its
stage is free and what it needs from a neighbour is there. Two stages and three micro-batches by 1F1B:

  tick      0   1   2   3   4   5   6   7
  stage 0   F0  F1  .   B0  F2  B1  .   B2
  stage 1   .   F0  B0  F1  B1  F2  B2  .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.pipe.schedules.actions import Action, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.zero_hetero.errors import PlanError

_GIVES: dict[str, tuple[str, ...]] = {
    "forward": ("output",),
    "backward": ("input gradient", "weight gradient"),
    "input_gradient": ("input gradient",),
    "weight_gradient": ("weight gradient",),
}
_NEEDS_HERE = {"backward": "output", "input_gradient": "output", "weight_gradient": "input gradient"}
_TICKS_SHOWN = 16  # a schedule of 64 micro-batches has some 130: the last ones before the error say what led to it


class Placed(NamedTuple):
    """An action on the grid. `source` is the index of the neighbour's action whose result it needs, -1 for none."""

    stage: int
    action: Action
    tick: int
    source: int


class _Fault(NamedTuple):
    stage: int
    position: int  # in the stage's order
    text: str


@lru_cache(maxsize=128)
def place(orders: tuple[Order, ...], batches: Batches) -> tuple[Placed, ...]:
    """Every action of all stages, each after what it needs, with its tick [Note: ticks].

    PlanError if a stage computes something twice, not at all or too early, also for a chain [Note: chains], or if
    stages wait for each other.
    """
    kinds = {action.kind for order in orders for action in order}
    # An evaluation has forwards only and owes no gradient. As soon as one backward is there, all of them are due: a
    # schedule that forgets one weight gradient would train, with a wrong sum.
    due = ("output",) if kinds <= {"forward"} else ("output", "input gradient", "weight gradient")
    faults = (fault for stage, order in enumerate(orders) for fault in _faults(stage, order, batches, due))
    fault = next(faults, None)
    placed, at = _walk(orders, fault)
    if fault is None:
        fault = next((_standstill(stage, at[stage], orders) for stage in _unfinished(orders, at)), None)
    if fault is not None:
        raise PlanError(f"schedule: stage {fault.stage} {fault.text}\n{_grid(placed, orders, fault)}")
    return tuple(placed)


def _faults(stage: int, order: Order, batches: Batches, due: Sequence[str]) -> Iterator[_Fault]:
    """The faults of one stage's order, whatever the others do; it has to compute all results `due`."""
    done: set[tuple[str, int]] = set()
    after = batches.after
    for position, action in enumerate(order):
        kind, microbatch = action
        if not action.computes:
            yield _Fault(stage, position, f"lists {action}; an order holds what is computed, messages are added to it")
            return
        if microbatch >= len(batches):
            yield _Fault(stage, position, f"runs {action} but there are {len(batches)} micro-batches, from 0 on")
            return
        for need, of, whose in _needs_here(action, batches.before[microbatch], after[microbatch]):
            if (need, of) not in done:
                yield _Fault(stage, position, f"runs {action} before it has the {need} of micro-batch {of}{whose}")
        for result in _GIVES[kind]:
            if (result, microbatch) in done:
                yield _Fault(
                    stage, position, f"runs {action}, but already has the {result} of micro-batch {microbatch}"
                )
            done.add((result, microbatch))
    for microbatch in range(len(batches)):
        for result in due:
            if (result, microbatch) not in done:
                yield _Fault(stage, len(order), f"ends without the {result} of micro-batch {microbatch}")


def _needs_here(action: Action, before: int, after: int) -> Iterator[tuple[str, int, str]]:
    """What an action needs of its own stage: the result, of which micro-batch, and why if that is another one.

    `before` and `after` hold the neighbouring slices of its sequence; -1 for none [Note: chains].
    """
    need = _NEEDS_HERE.get(action.kind)
    if need is not None:
        yield need, action.microbatch, ""
    if action.kind == "forward" and before >= 0:
        yield "output", before, ", which holds the slice before its own"
    if action.kind in ("backward", "input_gradient") and after >= 0:
        yield "input gradient", after, ", which holds the slice after its own"


def _walk(orders: Sequence[Order], fault: _Fault | None) -> tuple[list[Placed], list[int]]:
    """Run all stages as far as they come, up to the fault; return what ran, and how many actions of each stage."""
    # Each stage in turn runs until it needs a result that is not there yet; then the next stage goes on. When a whole
    # round moves nobody, all are done or wait for each other. Ticks do not depend on the order of these visits: an
    # action's tick follows from its stage's last action and from its source alone.
    placed: list[Placed] = []
    given: dict[tuple[int, str, int], int] = {}  # (stage, result, micro-batch): place in `placed`
    at, free = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            stop = fault.position if fault is not None and fault.stage == stage else len(order)
            while at[stage] < stop:
                action = order[at[stage]]
                wanted = wanted_from(stage, action, len(orders))
                source = -1 if wanted is None else given.get((*wanted, action.microbatch))
                if source is None:
                    break
                tick = free[stage] if source < 0 else max(free[stage], placed[source].tick + 1)
                for result in _GIVES.get(action.kind, ()):
                    given[stage, result, action.microbatch] = len(placed)
                placed.append(Placed(stage, action, tick, source))
                at[stage], free[stage], moved = at[stage] + 1, tick + 1, True
    return placed, at


def wanted_from(stage: int, action: Action, num_stages: int) -> tuple[int, str] | None:
    """The neighbour, and its result, that an action needs; None if it needs none."""
    # A weight gradient needs no neighbour: what it is computed from came for the input gradient. That is why schedules
    # may delay it to fill a gap.
    if action.kind == "forward" and stage > 0:
        return stage - 1, "output"
    if action.kind in ("backward", "input_gradient") and stage < num_stages - 1:
        return stage + 1, "input gradient"
    return None


def _unfinished(orders: Sequence[Order], at: Sequence[int]) -> list[int]:
    return [stage for stage, order in enumerate(orders) if at[stage] < len(order)]


def _standstill(stage: int, position: int, orders: Sequence[Order]) -> _Fault:
    action = orders[stage][position]
    wanted = wanted_from(stage, action, len(orders))
    assert wanted is not None, "what needs no neighbour does not wait"
    source, result = wanted
    return _Fault(
        stage, position, f"waits at {action} for the {result} of stage {source}, which itself waits: none can go on"
    )


def _grid(placed: Sequence[Placed], orders: Sequence[Order], fault: _Fault) -> str:
    """The last ticks before the error, a row for each stage."""
    rows: list[dict[int, str]] = [{} for _ in orders]
    for stage, action, tick, _ in placed:
        rows[stage][tick] = str(action)
    free = max(rows[fault.stage], default=-1) + 1
    order = orders[fault.stage]
    rows[fault.stage][free] = str(order[fault.position]) if fault.position < len(order) else "end"
    begin = max(0, free + 1 - _TICKS_SHOWN)
    stop = max(free + 1, min(begin + _TICKS_SHOWN, max((max(row, default=0) + 1 for row in rows), default=0)))
    width = max(len(text) for row in rows for text in row.values()) + 1
    lines = ["tick".ljust(10) + "".join(str(tick).ljust(max(width, 4)) for tick in range(begin, stop))]
    for stage, row in enumerate(rows):
        last = free + 1 if stage == fault.stage else stop
        cells = "".join(row.get(tick, ".").ljust(max(width, 4)) for tick in range(begin, last))
        lines.append(f"stage {stage}".ljust(10) + cells + ("<-- here" if stage == fault.stage else ""))
    return "\n".join(line.rstrip() for line in lines)
