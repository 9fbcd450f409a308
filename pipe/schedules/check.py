"""Orders of all stages checked: every action at its earliest tick, and messages that all meet. Pure: no torch.

[Note: ticks]
A grid of stages and ticks shows a schedule best. Every action takes one tick, and starts at the first one at which its
stage is free and what it needs from a neighbour is there. Two stages and three micro-batches by 1F1B:

  tick      0   1   2   3   4   5   6   7
  stage 0   F0  F1  .   B0  F2  B1  .   B2
  stage 1   .   F0  B0  F1  B1  F2  B2  .

[Note: lowering]
Every action is given a time, by the works of the micro-batches, or 1 for each where these are not known. A message goes
over at the time at which its receiver needs it, at both ends; a stage that computes at that time sends it before. So
every exchange of a stage meets one of the same time at its neighbour, and none waits for a later one: however long the
actions really take, stages never wait for each other in a circle, even if a send lasts until it is received and a stage
starts no exchange before its last has ended. Two stages, three micro-batches, 1F1B, each action of time 1:

  time      0    1         2    3            4
  stage 0   F0   >0 | F1   .    <0 >1 B0     F2
  stage 1   .    ->0 F0    B0   <-0 ->1 F1   B1

At time 3 stage 1 needs the activation of micro-batch 1 and stage 0 the gradient of micro-batch 0, so both go in one
exchange. If outputs were sent as soon as they are there, a schedule whose stages run further ahead would stand still:
with F0 F1 F2 F3 B0 on stage 0, it would send activation 2 while stage 1 sends gradient 0, and neither receives. With
times that are not the actions' own, messages would leave late: if F1 of stage 0 takes 10 and its message is needed at
time 12, it has to go before what stage 0 does then, and not after as many actions as stage 1 has done.

A slot has messages with one neighbour only: a stage that waits for one neighbour should not have to wait for the other
too. If both are due at one time, the send comes first, in a slot of its own, since this stage does not wait for its
arrival. That closes no circle either: two stages share one edge of the pipeline, and edges in a row can wait only one
way.

Messages are taken as the strictest network takes them: each lasts until both ends have come to it, those that go one
way between two stages meet in the order in which they are started, and a stage goes on when all messages of its slot
are done. Slots that come to their end here do so on every transport.

[Note: a circle of messages]
Two stages, each of them right by itself:

  stage 0   F0 | >0 | F1 | >1 | <0 B0 | <1 B1
  stage 1   ->0 F0 B0 | <-0 | ->1 F1 B1 | <-1

They meet at >0. Then stage 0 offers activation 1 (>1) while stage 1 offers gradient 0 (<-0): both send, neither
receives, and both would wait for ever. Small messages on gloo hide that, since they leave before the other end asks for
them; large ones on NCCL stand still. With ">1 <0 B0" in one slot of stage 0, both its messages are open and <-0 is met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ds_hydra.pipe.schedules.actions import Action, Compute, Order, Slot, receive_for, slots_as_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.list_walk import place_of, virtual_stage
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


class ActionResult(NamedTuple):
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
    done: set[ActionResult] = set()
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
        if (result := ActionResult(name, stage, part, microbatch)) not in done:
            yield _Fault(stage, len(orders[stage]), f"ends without the {result}")


def _results(stage: int, action: Action) -> Iterator[ActionResult]:
    return (ActionResult(name, stage, action.part, action.microbatch) for name in _GIVES[action.kind])


def _needs_here(
    stage: int, action: Action, num_stages: int, batches: Batches, after: Sequence[int]
) -> Iterator[tuple[ActionResult, str]]:
    """What an action needs that its own stage computes, each with the reason if that is not plain; `after` as that of
    the batches."""
    kind, microbatch, part = action
    if kind in _NEEDS_HERE:
        yield ActionResult(_NEEDS_HERE[kind], stage, part, microbatch), ""
    wanted = wanted_from(stage, action, num_stages, batches.parts)
    if wanted is not None and wanted.stage == stage:  # where a V turns round
        yield wanted, ""
    earlier, later = batches.before[microbatch], after[microbatch]
    if kind == "forward" and earlier >= 0:
        yield ActionResult("output", stage, part, earlier), ", which holds the slice before its own"
    if kind in ("backward", "input_gradient") and later >= 0:
        yield ActionResult("input gradient", stage, part, later), ", which holds the slice after its own"


def _walk(orders: Sequence[Order], parts: int, fault: _Fault | None) -> tuple[list[Placed], list[int]]:
    """Run all stages as far as they come, up to the fault; return what ran, and how many actions of each stage."""
    # Each stage in turn runs until it needs a result that is not there yet; then the next stage goes on. When a whole
    # round moves nobody, all are done or wait for each other. Ticks do not depend on the order of these visits: an
    # action's tick follows from its stage's last action and from its source alone.
    placed: list[Placed] = []
    given: dict[ActionResult, int] = {}  # place in `placed`
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


def wanted_from(stage: int, action: Action, num_stages: int, parts: int) -> ActionResult | None:
    """What an action needs of the range of layers before or after its own; None if it needs none.

    It is another stage's, but where a V turns round it is of the same stage [Note: virtual stages].
    """
    # A weight gradient needs no neighbour: what it is computed from came for the input gradient. That is why schedules
    # may delay it to fill a gap.
    kind, microbatch, part = action
    here = virtual_stage(stage, part, num_stages)
    if kind == "forward" and here > 0:
        return ActionResult("output", *place_of(here - 1, num_stages), microbatch)
    if kind in ("backward", "input_gradient") and here < parts * num_stages - 1:
        return ActionResult("input gradient", *place_of(here + 1, num_stages), microbatch)
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


@lru_cache(maxsize=128)
def lower(orders: tuple[Order, ...], batches: Batches) -> tuple[tuple[Slot, ...], ...]:
    """Each stage's order with the messages that its actions need [Note: lowering]. PlanError as `place`."""
    messages: list[dict[int, list[Action]]] = [{} for _ in orders]  # by time
    computed: list[list[tuple[Action, int]]] = [[] for _ in orders]  # with the time at which each is done
    stops: list[int] = []
    for stage, action, _, source in place(orders, batches):
        start = computed[stage][-1][1] if computed[stage] else 0
        if source >= 0:
            start = max(start, stops[source])
            receive = receive_for(action)
            messages[stage].setdefault(start, []).append(receive)
            messages[stage + receive.side].setdefault(start, []).append(receive.met_by)
        takes = batches.works[action.microbatch].takes(action.kind) if batches.works else 1
        stops.append(start + max(1, takes))
        computed[stage].append((action, stops[-1]))
    return tuple(_slots(*row) for row in zip(computed, messages, strict=True))


def _slots(computed: Sequence[tuple[Action, int]], messages: Mapping[int, list[Action]]) -> tuple[Slot, ...]:
    """One stage's actions, each after the messages that are due before it is done."""
    slots: list[Slot] = []
    due = sorted(messages)
    for action, stop in computed:
        while due and due[0] < stop:
            slots += _exchanges(messages[due.pop(0)])
        if slots and not slots[-1][-1].computes and receive_for(action) in slots[-1]:
            slots[-1] = (*slots[-1], action)
        else:
            slots.append((action,))
    return (*slots, *(slot for time in due for slot in _exchanges(messages[time])))


def _exchanges(due: Sequence[Action]) -> list[Slot]:
    """The messages of a stage at one time: at most one that it receives, and one to each neighbour."""
    # A send to the same neighbour joins the receive: as two exchanges, the pair would wait twice for each other. A send
    # to the other neighbour is a slot before it: stage 1 of 3 may have ">4 | ->5 F5", but never ">4 ->5 F5".
    sides = {message.side for message in due if not message.sends}
    alone = sorted((message for message in due if message.side not in sides), key=lambda message: message.side)
    joined = sorted((message for message in due if message.side in sides), key=_to_the_next_stage)
    return [*((message,) for message in alone), *([tuple(joined)] if joined else [])]


def _to_the_next_stage(message: Action) -> bool:
    # Both ends list first what goes to the stage before, so a transport that matches by order finds the same pairs.
    return message.sends == (message.side > 0)


_MADE_BY: dict[str, tuple[Compute, ...]] = {
    "send_activation": ("forward",),
    "send_gradient": ("backward", "input_gradient"),
}
_SLOTS_SHOWN = 8


def check_slots(stages: Sequence[Sequence[Slot]], batches: Batches) -> None:
    """PlanError, with all stages' slots up to where they stand, unless every stage comes to its end."""
    place(tuple(tuple(action for slot in slots for action in slot if action.computes) for slots in stages), batches)
    meeting = _Meeting(stages, batches.parts)
    while meeting.go_on():
        pass
    waiting = [stage for stage, slots in enumerate(stages) if meeting.at[stage] < len(slots)]
    if waiting:
        message = meeting.open[waiting[0]][0]
        meeting.refuse(waiting[0], f"waits for ever for stage {waiting[0] + message.side} at {message}")


class _Meeting:
    """Where every stage is, and which of its messages are not done [Note: a circle of messages]."""

    def __init__(self, stages: Sequence[Sequence[Slot]], parts: int):
        self.stages, self.parts = stages, parts
        self.at = [0] * len(stages)  # slots that are behind each stage
        self.open: list[list[Action]] = [[] for _ in stages]  # messages of the slot that it is at
        self.done: list[set[Action]] = [set() for _ in stages]
        for stage in range(len(stages)):
            self._begin(stage)

    def go_on(self) -> bool:
        """Let every stage do what it can; False if none could do anything."""
        # Whatever order the stages are visited in, the end is the same: a message that both ends have come to stays so
        # until it is done, and nothing that a stage does takes another stage's possibilities away.
        moved = False
        for stage, slots in enumerate(self.stages):
            while self.at[stage] < len(slots):
                moved |= self._meet(stage)
                if self.open[stage]:
                    break
                self._compute(stage)
                self.at[stage] += 1
                self._begin(stage)
                moved = True
        return moved

    def _begin(self, stage: int) -> None:
        """Start the messages of a stage's slot."""
        if self.at[stage] == len(self.stages[stage]):
            return
        for action in self.stages[stage][self.at[stage]]:
            if action.computes:
                continue
            made_by = _MADE_BY.get(action.kind)
            if made_by and not any(action._replace(kind=kind) in self.done[stage] for kind in made_by):
                self.refuse(stage, f"has not computed what it sends by {action}")
            if not 0 <= stage + action.side < len(self.stages):
                self.refuse(stage, f"has no neighbour for {action}")
            if action in self.done[stage]:
                self.refuse(stage, f"lists {action} twice")
            self.done[stage].add(action)
            self.open[stage].append(action)

    def _meet(self, stage: int) -> bool:
        """Finish messages that both ends have come to."""
        # Messages carry no number on the wire: the first sent one way is the first received, whatever it was meant to
        # be. So two ends that meet at different micro-batches are an error, and not a pair to look for further on.
        met = False
        for side, sends in product((-1, 1), (False, True)):
            if not 0 <= stage + side < len(self.stages):
                continue
            here, there = self.open[stage], self.open[stage + side]
            while mine := next((action for action in here if (action.side, action.sends) == (side, sends)), None):
                theirs = next((action for action in there if (action.side, action.sends) == (-side, not sends)), None)
                if theirs is None:
                    break
                if mine.met_by != theirs:
                    self.refuse(stage, f"is at {mine} while stage {stage + side} is at {theirs}")
                here.remove(mine)
                there.remove(theirs)
                met = True
        return met

    def _compute(self, stage: int) -> None:
        """Run what a stage's slot computes."""
        for action in self.stages[stage][self.at[stage]]:
            if not action.computes:
                continue
            wanted = wanted_from(stage, action, len(self.stages), self.parts)
            if wanted is not None and wanted.stage != stage and receive_for(action) not in self.done[stage]:
                self.refuse(stage, f"runs {action} before it has {receive_for(action)}")
            self.done[stage].add(action)

    def refuse(self, fault_stage: int, text: str) -> None:
        """Raise PlanError with the slots of every stage up to the one that it is at."""
        lines = []
        for stage, slots in enumerate(self.stages):
            shown = slots[max(0, self.at[stage] + 1 - _SLOTS_SHOWN) : self.at[stage] + 1]
            here = "  <-- here" if stage == fault_stage else ""
            lines.append(f"stage {stage}   {slots_as_text(shown)}{here}")
        raise PlanError("\n".join([f"schedule: stage {fault_stage} {text}", *lines]))
