"""Simulates a schedule: when each action runs, and what a stage keeps meanwhile. Pure.

An action starts once its stage is free and what it needs from a neighbour is there. A receiver waits until a message
has gone over. A sender goes on, but for a slot that also receives: that one waits until its own messages have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from ds_hydra.pipe.schedules.actions import Action, Order, Slot
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import Placed, place
from ds_hydra.zero_hetero.errors import PlanError

FORWARD_SHARE = 1.0 / 3.0  # of the time of a forward and a backward; each of the two gradients takes another third

SHARES = {
    "forward": FORWARD_SHARE,
    "backward": 1.0 - FORWARD_SHARE,
    "input_gradient": FORWARD_SHARE,
    "weight_gradient": FORWARD_SHARE,
}
BESIDE = {"forward": FORWARD_SHARE, "backward": 1.0 - FORWARD_SHARE, "input_gradient": 1.0 - FORWARD_SHARE}
"""Of what the first stage takes besides its layers, which puts no gradients off."""
KEPT_FOR_WEIGHTS = 0.9
"""Of a micro-batch's activations, what a stage still keeps between its input gradient and its weight gradient, where
nobody has measured it.

Inputs of linear layers stay, and the gradients of their outputs join them, while all else is freed: of the 36 bytes
that a layer keeps for each token and feature (Hydraulis, appendix C.1), 32 are replaced.
"""


class TimedAction(NamedTuple):
    """An action and when it runs, in the unit of the durations."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The actions of each stage with their times, in the stage's order."""

    stages: tuple[tuple[TimedAction, ...], ...]

    @property
    def total(self) -> float:
        """When the last stage is done; 0 without actions."""
        return max((timed[-1].stop for timed in self.stages if timed), default=0.0)


class Timing(Protocol):
    """What a simulation asks about the time that things take. A stage's calls come in the order of its slots."""

    def compute(self, stage: int, action: Action, ready: float) -> tuple[float, float]:
        """When an action starts that could do so from `ready` on, and when it stops."""

    def send(self, stage: int, message: Action, ready: float) -> tuple[float, float]:
        """When a message that is started at `ready` has left its sender, and when its head is at the receiver."""

    def receive(self, stage: int, message: Action, head: float) -> float:
        """When a message whose head comes at `head` is there as a whole."""


def simulate_slots(
    stages: Sequence[Sequence[Slot]], timing: Timing, start: Sequence[float] | None = None
) -> tuple[Simulation, tuple[float, ...]]:
    """Run slots as the runtime does, each stage from its time `start` on (default: 0).

    Returns the actions' times, and when each stage has done all of its slots and its messages have left. PlanError if
    a stage would wait for ever; `rendezvous.check_slots` tells more of why.
    """
    begins = start or [0.0] * len(stages)
    walks = [_Walk(index, slots, begins[index]) for index, slots in enumerate(stages)]
    heads: dict[tuple[int, Action], float] = {}  # (receiving stage, its message): messages under way
    # Times do not depend on the order in which stages are visited: each knows its own past, and of the others only the
    # heads of messages. So each stage goes on as far as it can before the next is looked at.
    while sum(walk.go_on(timing, heads) for walk in walks):
        pass
    waiting = [walk.stage for walk in walks if walk.at < len(walk.slots)]
    if waiting:
        raise PlanError(
            f"schedule: stages {waiting} wait for messages that nobody sends; check the slots of all stages"
        )
    return Simulation(tuple(tuple(walk.timed) for walk in walks)), tuple(max(w.free, w.left) for w in walks)


class _Parts(NamedTuple):
    """The actions of a slot."""

    sends: list[Action]
    receives: list[Action]
    computes: list[Action]


@lru_cache(maxsize=4096)  # pipelines have the same ones
def _parts_of(slot: Slot) -> _Parts:
    parts = _Parts([], [], [])
    for action in slot:
        (parts.computes if action.computes else parts.sends if action.sends else parts.receives).append(action)
    return parts


class _Walk:
    """One stage on its way through its slots."""

    def __init__(self, stage: int, slots: Sequence[Slot], start: float):
        self.stage = stage
        self.slots = [_parts_of(slot) for slot in slots]
        self.at = 0  # slots that are behind it
        self.begun = False  # whether the messages of the present slot have been started
        self.free = self.left = start  # when it has computed, and when its messages have left
        self.timed: list[TimedAction] = []

    def go_on(self, timing: Timing, heads: dict[tuple[int, Action], float]) -> bool:
        """Run slots up to one whose messages are not on their way yet; whether any was run."""
        before = self.at
        while self.at < len(self.slots) and self._slot(self.slots[self.at], timing, heads):
            self.at, self.begun = self.at + 1, False
        return self.at > before

    def _slot(self, slot: _Parts, timing: Timing, heads: dict[tuple[int, Action], float]) -> bool:
        stage, (sends, receives, computes) = self.stage, slot
        if not self.begun:
            self.begun = True
            for message in sends:
                left, head = timing.send(stage, message, self.free)
                heads[stage + message.side, message.met_by] = head
                self.left = max(self.left, left)
        if any((stage, message) not in heads for message in receives):
            return False
        for message in receives:
            self.free = max(self.free, timing.receive(stage, message, heads.pop((stage, message))))
        if sends and receives:
            self.free = max(self.free, self.left)
        for action in computes:
            began, self.free = timing.compute(stage, action, self.free)
            self.timed.append(TimedAction(action, began, self.free))
        return True


def simulate(
    orders: Sequence[Order], batches: Batches, duration: Callable[[int, Action], float], *, transfer: float = 0.0
) -> Simulation:
    """Run orders with `duration(stage, action)` and `transfer`, the time a message takes. PlanError as `place`.

    Every result is sent as soon as it is there, which is at best what slots do.
    """
    stages: list[list[TimedAction]] = [[] for _ in orders]
    stops: list[float] = []
    for stage, action, _, source in place(tuple(orders), batches):
        free = stages[stage][-1].stop if stages[stage] else 0.0
        start = free if source < 0 else max(free, stops[source] + transfer)
        stops.append(start + duration(stage, action))
        stages[stage].append(TimedAction(action, start, stops[-1]))
    return Simulation(tuple(map(tuple, stages)))


def simulate_loads(placed: Sequence[Placed], loads: Sequence[Sequence[float]]) -> float:
    """Total time when micro-batch m takes stage s `loads[s][m]` for forward and backward, in any unit such as ms.

    A forward takes a third of it and a backward two thirds, because it computes two gradients.
    """
    # Two stages, two micro-batches of 3 ms each, by 1F1B: stage 0 runs F0 0..1, F1 1..2, B0 4..6, B1 7..9; stage 1 runs
    # F0 1..2, B0 2..4, F1 4..5, B1 5..7. In all 9 ms, of which stage 0 computes 6 and waits 3.
    free = [0.0] * len(loads)
    stops: list[float] = []
    for stage, action, _, source in placed:
        start = free[stage] if source < 0 else max(free[stage], stops[source])
        free[stage] = start + SHARES[action.kind] * loads[stage][action.microbatch]
        stops.append(free[stage])
    return max(free)


def simulate_works(orders: Sequence[Order], batches: Batches, beside: Sequence[float] = ()) -> int:
    """Total time in microseconds when every action takes what the micro-batches' works say, and the first stage
    `beside` more for its first layers' part of each micro-batch."""
    works = batches.works

    def takes(stage: int, action: Action) -> float:
        more = beside_of(action, beside) if beside and stage == 0 else 0.0
        return works[action.microbatch].takes(action.kind) + more

    return round(simulate(orders, batches, takes).total)


def beside_of(action: Action, beside: Sequence[float]) -> float:
    """What an action of the first stage takes besides its layers; `beside` of each micro-batch."""
    return 0.0 if action.part else BESIDE.get(action.kind, 0.0) * beside[action.microbatch]


def alive_counts(order: Order, until_weight: float = KEPT_FOR_WEIGHTS) -> tuple[float, ...]:
    """Micro-batches whose activations a stage keeps while each action of its order runs.

    They are kept from the forward on until all gradients are computed; without any, only while the forward runs. From
    its input gradient on `until_weight` of a micro-batch is kept.
    """
    # F0 F1 B0 F2 B1 B2 keeps 1 2 2 2 2 1: a micro-batch still counts while its own backward runs. F0 I0 F1 W0 I1 W1
    # keeps 1 1 1.9 1.9 1 0.9. The parts of a V count apart.
    last_use = {(action.microbatch, action.part): position for position, action in enumerate(order)}
    counts: list[float] = []
    whole = waiting = 0  # as whole numbers, so that equal stages have equal counts to the bit
    for position, action in enumerate(order):
        whole += action.kind == "forward"
        counts.append(whole + until_weight * waiting)
        if action.kind == "input_gradient":
            whole, waiting = whole - 1, waiting + 1
        elif action.kind == "weight_gradient":
            waiting -= 1
        elif last_use[action.microbatch, action.part] == position:
            whole -= 1
    return tuple(counts)


def peak_alive(orders: Sequence[Order], until_weight: float = KEPT_FOR_WEIGHTS) -> tuple[float, ...]:
    """The most micro-batches that each stage keeps at once."""
    return tuple(max(alive_counts(order, until_weight), default=0) for order in orders)


def peak_units(order: Order, batches: Batches) -> int:
    """The most units of memory that a stage holds at once, each from a forward's begin to the end of their last use."""
    held = peak = 0
    for kind, microbatch, _ in order:
        work = batches.works[microbatch]
        if kind == "forward":
            held += work.kept
            peak = max(peak, held)
        elif kind == "input_gradient":
            held -= work.kept - work.until_weight
        else:
            held -= work.kept if kind == "backward" else work.until_weight
    return peak
