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
from itertools import product
from typing import NamedTuple

from ds_hydra.pipe.schedules.actions import Action, Order
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.virtual import place_of, virtual_stage
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


class Result(NamedTuple):
    """What an action gives: an output, an input gradient or a weight gradient of one range of layers."""

    name: str
    stage: int
    part: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name} of micro-batch {self.microbatch}" + " in the second part" * self.part


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
    faults = (fault for stage in range(len(orders)) for fault in _faults(stage, orders, batches, due))
    fault = next(faults, None)
    placed, at = _walk(orders, batches.parts, fault)
    if fault is None:
        fault = next((_standstill(stage, at[stage], orders, batches.parts) for stage in _unfinished(orders, at)), None)
    if fault is not None:
        raise PlanError(f"schedule: stage {fault.stage} {fault.text}\n{_grid(placed, orders, fault)}")
    return tuple(placed)


def _faults(stage: int, orders: Sequence[Order], batches: Batches, due: Sequence[str]) -> Iterator[_Fault]:
    """The faults of one stage's order, whatever the others do; it has to compute all results `due`."""
    done: set[Result] = set()
    after = batches.after
    for position, action in enumerate(orders[stage]):
        if not action.computes:
            yield _Fault(stage, position, f"lists {action}; an order holds what is computed, messages are added to it")
            return
        if action.microbatch >= len(batches):
            yield _Fault(stage, position, f"runs {action} but there are {len(batches)} micro-batches, from 0 on")
            return
        if action.part >= batches.parts:
            yield _Fault(stage, position, f"runs {action} but its stages hold one range of layers each")
            return
        for need, why in _needs_here(stage, action, len(orders), batches, after):
            if need not in done:
                yield _Fault(stage, position, f"runs {action} before it has the {need}{why}")
        for result in _results(stage, action):
            if result in done:
                yield _Fault(stage, position, f"runs {action}, but already has the {result}")
            done.add(result)
    for microbatch, part, name in product(range(len(batches)), range(batches.parts), due):
        if (result := Result(name, stage, part, microbatch)) not in done:
            yield _Fault(stage, len(orders[stage]), f"ends without the {result}")


def _results(stage: int, action: Action) -> Iterator[Result]:
    return (Result(name, stage, action.part, action.microbatch) for name in _GIVES[action.kind])


def _needs_here(
    stage: int, action: Action, num_stages: int, batches: Batches, after: Sequence[int]
) -> Iterator[tuple[Result, str]]:
    """What an action needs that its own stage computes, each with the reason if that is not plain; `after` as that of
    the batches."""
    kind, microbatch, part = action
    if kind in _NEEDS_HERE:
        yield Result(_NEEDS_HERE[kind], stage, part, microbatch), ""
    wanted = wanted_from(stage, action, num_stages, batches.parts)
    if wanted is not None and wanted.stage == stage:  # where a V turns round
        yield wanted, ""
    earlier, later = batches.before[microbatch], after[microbatch]
    if kind == "forward" and earlier >= 0:
        yield Result("output", stage, part, earlier), ", which holds the slice before its own"
    if kind in ("backward", "input_gradient") and later >= 0:
        yield Result("input gradient", stage, part, later), ", which holds the slice after its own"


def _walk(orders: Sequence[Order], parts: int, fault: _Fault | None) -> tuple[list[Placed], list[int]]:
    """Run all stages as far as they come, up to the fault; return what ran, and how many actions of each stage."""
    # Each stage in turn runs until it needs a result that is not there yet; then the next stage goes on. When a whole
    # round moves nobody, all are done or wait for each other. Ticks do not depend on the order of these visits: an
    # action's tick follows from its stage's last action and from its source alone.
    placed: list[Placed] = []
    given: dict[Result, int] = {}  # place in `placed`
    at, free = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            stop = fault.position if fault is not None and fault.stage == stage else len(order)
            while at[stage] < stop:
                action = order[at[stage]]
                wanted = wanted_from(stage, action, len(orders), parts)
                source = -1
                if wanted is not None and wanted.stage != stage:
                    if wanted not in given:
                        break
                    source = given[wanted]
                tick = free[stage] if source < 0 else max(free[stage], placed[source].tick + 1)
                given.update((result, len(placed)) for result in _results(stage, action))
                placed.append(Placed(stage, action, tick, source))
                at[stage], free[stage], moved = at[stage] + 1, tick + 1, True
    return placed, at


def wanted_from(stage: int, action: Action, num_stages: int, parts: int) -> Result | None:
    """What an action needs of the range of layers before or after its own; None if it needs none.

    It is another stage's, but where a V turns round it is of the same stage [Note: virtual stages].
    """
    # A weight gradient needs no neighbour: what it is computed from came for the input gradient. That is why schedules
    # may delay it to fill a gap.
    kind, microbatch, part = action
    here = virtual_stage(stage, part, num_stages)
    if kind == "forward" and here > 0:
        return Result("output", *place_of(here - 1, num_stages), microbatch)
    if kind in ("backward", "input_gradient") and here < parts * num_stages - 1:
        return Result("input gradient", *place_of(here + 1, num_stages), microbatch)
    return None


def _unfinished(orders: Sequence[Order], at: Sequence[int]) -> list[int]:
    return [stage for stage, order in enumerate(orders) if at[stage] < len(order)]


def _standstill(stage: int, position: int, orders: Sequence[Order], parts: int) -> _Fault:
    action = orders[stage][position]
    wanted = wanted_from(stage, action, len(orders), parts)
    assert wanted is not None, "what needs no neighbour does not wait"
    return _Fault(
        stage,
        position,
        f"waits at {action} for the {wanted.name} of stage {wanted.stage}, which itself waits: none can go on",
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
