"""Orders of all stages and durations in; when each action runs, and what each stage keeps meanwhile, out. Pure.

An action starts once its stage is free and what it needs from a neighbour is there. Messages take no time of the
stages themselves: a receiver waits until one has gone over, a sender does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hydra.pipe.schedules.actions import Action, Order
from ds_hydra.pipe.schedules.check import place

FORWARD_SHARE = 1.0 / 3.0  # of the time of a forward and a backward; each of the two gradients takes another third

_SHARES = {
    "forward": FORWARD_SHARE,
    "backward": 1.0 - FORWARD_SHARE,
    "input_gradient": FORWARD_SHARE,
    "weight_gradient": FORWARD_SHARE,
}


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

    def alive(self, stage: int) -> tuple[tuple[float, int], ...]:
        """Micro-batches that a stage keeps from each time on: (start of an action, number while it runs)."""
        timed = self.stages[stage]
        counts = alive_counts(tuple(action for action, _, _ in timed))
        return tuple((start, count) for (_, start, _), count in zip(timed, counts, strict=True))


def simulate(orders: Sequence[Order], duration: Callable[[int, Action], float], *, transfer: float = 0.0) -> Simulation:
    """Run orders with `duration(stage, action)` and `transfer`, the time a message takes. PlanError as `place`."""
    stages: list[list[TimedAction]] = [[] for _ in orders]
    stops: list[float] = []
    for stage, action, _, source in place(tuple(orders)):
        free = stages[stage][-1].stop if stages[stage] else 0.0
        start = free if source < 0 else max(free, stops[source] + transfer)
        stops.append(start + duration(stage, action))
        stages[stage].append(TimedAction(action, start, stops[-1]))
    return Simulation(tuple(map(tuple, stages)))


def simulate_loads(orders: Sequence[Order], loads: Sequence[Sequence[float]]) -> float:
    """Total time when micro-batch m takes stage s `loads[s][m]` for forward and backward, in any unit such as ms.

    A forward takes a third of it and a backward two thirds, because it computes two gradients.
    """
    # Two stages, two micro-batches of 3 ms each, by 1F1B: stage 0 runs F0 0..1, F1 1..2, B0 4..6, B1 7..9; stage 1 runs
    # F0 1..2, B0 2..4, F1 4..5, B1 5..7. In all 9 ms, of which stage 0 computes 6 and waits 3.
    return simulate(orders, lambda stage, action: _SHARES[action.kind] * loads[stage][action.microbatch]).total


def alive_counts(order: Order) -> tuple[int, ...]:
    """Micro-batches whose activations a stage keeps while each action of its order runs.

    They are kept from the forward on until all gradients are computed; without any, only while the forward runs.
    """
    # F0 F1 B0 F2 B1 B2 keeps 1 2 2 2 2 1: a micro-batch still counts while its own backward runs.
    last_use = {action.microbatch: position for position, action in enumerate(order)}
    counts, alive = [], 0
    for position, action in enumerate(order):
        alive += action.kind == "forward"
        counts.append(alive)
        alive -= last_use[action.microbatch] == position
    return tuple(counts)


def peak_alive(orders: Sequence[Order]) -> tuple[int, ...]:
    """The most micro-batches that each stage keeps at once."""
    return tuple(max(alive_counts(order), default=0) for order in orders)
