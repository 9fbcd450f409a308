"""Orders of all stages in, slots with the sends and receives that they need out. Pure: no torch.

[Note: lowering]
A message goes over in the tick in which its receiver needs it [Note: ticks], at both ends. So every exchange of a
stage meets one of the same tick at its neighbour and none waits for a later tick: whatever order the stages compute
in, they never wait for each other in a circle, even if a send lasts until it is received and a stage starts no
exchange before its last has ended. Two stages, three micro-batches, 1F1B:

  tick      0    1         2    3            4
  stage 0   F0   >0 | F1   .    <0 >1 B0     F2
  stage 1   .    ->0 F0    B0   <-0 ->1 F1   B1

In tick 3 stage 1 needs the activation of micro-batch 1 and stage 0 the gradient of micro-batch 0, so both go in one
exchange. If outputs were sent as soon as they are there, a schedule whose stages run further ahead would stand still:
with F0 F1 F2 F3 B0 on stage 0, it would send activation 2 while stage 1 sends gradient 0, and neither receives.

A slot has messages with one neighbour only: a stage that waits for one neighbour should not have to wait for the other
too. If a tick has both, the send comes first, in a slot of its own, since this stage does not wait for its arrival.
That closes no circle either: two stages share one edge of the pipeline, and edges in a row can wait only one way.
"""

from __future__ import annotations

from functools import lru_cache

from ds_hydra.pipe.schedules.actions import Action, Order, Slot, receive_for
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import place


class _Tick:
    """One stage's messages and computing in one tick; neighbour -1 is the stage before, 1 is the next one."""

    def __init__(self) -> None:
        self.sends: dict[int, Action] = {}
        self.receive: tuple[int, Action] | None = None
        self.compute: Action | None = None

    def slots(self) -> list[Slot]:
        # The messages that this tick's action waits for, and the action itself, are the last slot. A send to the same
        # neighbour joins the receive: as two exchanges, the pair would wait twice for each other. A send to the other
        # neighbour is a slot before it: stage 1 of 3 may have ">4 | ->5 F5", but never ">4 ->5 F5".
        sends = dict(self.sends)
        last: list[Action] = []
        if self.receive is not None:
            side, receive = self.receive
            sent = sends.pop(side, None)
            last = [receive] if sent is None else sorted([receive, sent], key=_to_the_next_stage)
        if self.compute is not None:
            last.append(self.compute)
        alone: list[Slot] = [(sends[side],) for side in sorted(sends)]
        return [*alone, tuple(last)] if last else alone


@lru_cache(maxsize=128)
def lower(orders: tuple[Order, ...], batches: Batches) -> tuple[tuple[Slot, ...], ...]:
    """Each stage's order with the messages that its actions need [Note: lowering]. PlanError as `place`."""
    placed = place(orders, batches)
    grid: list[dict[int, _Tick]] = [{} for _ in orders]
    for stage, action, tick, source in placed:
        here = grid[stage].setdefault(tick, _Tick())
        here.compute = action
        if source < 0:
            continue
        # Both ends in the tick of the receiver: the sender made the result in an earlier tick and has kept it.
        receive = receive_for(action)
        here.receive = (receive.side, receive)
        grid[stage + receive.side].setdefault(tick, _Tick()).sends[-receive.side] = receive.met_by
    return tuple(tuple(slot for tick in sorted(row) for slot in row[tick].slots()) for row in grid)


def _to_the_next_stage(message: Action) -> bool:
    # Both ends list first what goes to the stage before, so a transport that matches by order finds the same pairs.
    return message.sends == (message.side > 0)
