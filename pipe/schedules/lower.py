"""Orders of all stages in, slots with the sends and receives that they need out. Pure: no torch.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ds_hydra.pipe.schedules.actions import Action, Order, Slot, receive_for
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import place


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
