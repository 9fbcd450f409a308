"""The words of a schedule: actions, slots and orders, and the text that shows them. Pure: no torch.

[Note: schedules as text]
`slots_as_text` prints the slots of one stage and `slots_from_text` reads them back:

  slots  = [slot {" | " slot}]
  slot   = action {" " action}
  action = sign micro-batch [part]       the micro-batch in decimal digits, without leading zeros
  part   = "'"                           in the second of the stage's two ranges of layers [Note: virtual stages]
  sign   = "F" forward                   "B" backward, which is I and W in one
         | "I" gradient of the input     "W" gradient of the weights
         | ">" sends an activation to the next stage        "->" receives one from the stage before
         | "<" receives a gradient from the next stage      "<-" sends one to the stage before

Arrows point the way that the message goes, with the next stage on the right; the two with a dash concern the stage
before. Three micro-batches on the first and on the last of two stages:

  F0 | >0 | F1 | <0 >1 B0 | F2 | <1 >2 B1 | <2 B2
  ->0 F0 | B0 | <-0 ->1 F1 | B1 | <-1 ->2 F2 | B2 | <-2

In the second part of a V "next" and "before" mean virtual stages, so its messages go the other way between the ranks:
>0' sends to the stage before. One micro-batch on two stages of two ranges each:

  F0 | >0 | ->0' F0' | I0' | <-0' | W0' | <0 I0 | W0
  ->0 F0 | F0' | >0' | <0' I0' | I0 | <-0 | W0' | W0

[Note: the first push]
A push of gradients ends when every rank has come to it, for every rank owns a part of every gradient. Until then it
may hold up the host that has started it: to load a kernel, or to find memory, a device first ends what it is doing.
So a stage may not start a push while a neighbour still waits for a message of it, or it for one of a neighbour: the
neighbour would never come to its own push. In the example the last stage's gradients are final in B2, but the first
stage pushes only after it has got gradient 2. So the last stage pushes after <-2, and only the first stage, which has
nothing to send or receive any more, starts in its last backward and pushes while that runs. Pipelines exchange no such
messages with each other: where one waits in a push for another, that one goes on to its own.

Where backwards are split, pushes start with the first of the weight gradients that close a schedule, once the last
gradient of an input has left: "I2 | <-2 | W1 | W2" pushes a layer when both weight gradients have passed it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ds_hydra.zero_hetero.errors import PlanError

Compute = Literal["forward", "backward", "input_gradient", "weight_gradient"]
Message = Literal["send_activation", "recv_activation", "send_gradient", "recv_gradient"]

_SIGNS: dict[Compute | Message, str] = {
    "forward": "F",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
    "send_gradient": "<-",
    "recv_gradient": "<",
    "recv_activation": "->",
    "send_activation": ">",
}
_PRIME = "'"
_KINDS = {sign: kind for kind, sign in _SIGNS.items()}
_ACTION = re.compile(r"(F|B|I|W|<-|->|<|>)(0|[1-9][0-9]*)('?)")

_COMPUTES = ("forward", "backward", "input_gradient", "weight_gradient")
_MET_BY: dict[Compute | Message, tuple[Message, int]] = {
    # the message at the other end, and on which side that end is among the virtual stages
    "send_activation": ("recv_activation", 1),
    "recv_activation": ("send_activation", -1),
    "send_gradient": ("recv_gradient", -1),
    "recv_gradient": ("send_gradient", 1),
}


class Action(NamedTuple):
    """One thing that a stage does with a micro-batch, which counts from 0 within the pipeline's step.

    `part` is the range of layers that does it, for a stage that holds two [Note: virtual stages].
    """

    kind: Compute | Message
    microbatch: int
    part: int = 0

    @property
    def sends(self) -> bool:
        """Whether it is a message that leaves the stage."""
        return self.kind in ("send_activation", "send_gradient")

    @property
    def side(self) -> int:
        """Of a message: which neighbour it is exchanged with; -1 is the stage before, 1 the next one."""
        side = _MET_BY[self.kind][1]
        return -side if self.part else side

    @property
    def met_by(self) -> Action:
        """Of a message: the one at its other end."""
        return Action(_MET_BY[self.kind][0], self.microbatch, self.part)

    @property
    def computes(self) -> bool:
        """Whether it computes; otherwise it sends or receives."""
        return self.kind in _COMPUTES

    def __str__(self) -> str:
        return f"{_SIGNS[self.kind]}{self.microbatch}{_PRIME * self.part}"


def receive_for(action: Action) -> Action:
    """The message that brings a forward or a backward what it needs of a neighbour."""
    kind: Message = "recv_activation" if action.kind == "forward" else "recv_gradient"
    return Action(kind, action.microbatch, action.part)


Order = tuple[Action, ...]
"""The actions that one stage computes, from first to last, without messages."""

Slot = tuple[Action, ...]
"""One turn of a stage: all its messages start together, and once those that it receives are there, it computes."""


def slots_as_text(slots: Sequence[Slot]) -> str:
    """Slots of one stage, or an order as a single slot, in; text out. [Note: schedules as text]"""
    return " | ".join(" ".join(map(str, slot)) for slot in slots)


def slots_from_text(text: str) -> tuple[Slot, ...]:
    """Inverse of `slots_as_text`. PlanError names what is no action, or a slot that has none."""
    if not text.strip():
        return ()
    return tuple(_slot(part, text) for part in text.split("|"))


def _slot(part: str, text: str) -> Slot:
    words = part.split() or [""]
    matches = [_ACTION.fullmatch(word) for word in words]
    if None in matches:
        raise PlanError(
            f"schedule: {words[matches.index(None)]!r} in {text!r} is no action; an action is one of "
            f"{' '.join(_KINDS)} and a micro-batch, such as F0"
        )
    return tuple(
        Action(_KINDS[match[1]], int(match[2]), int(match[3] == _PRIME)) for match in matches if match is not None
    )


def last_weight_gradient(slots: Sequence[Slot]) -> Action | None:
    """The action after which the gradients of a stage's weights are final; None if it computes none."""
    found = [action for slot in slots for action in slot if action.kind in ("backward", "weight_gradient")]
    return found[-1] if found else None


def first_backward(slots: Sequence[Slot]) -> Action | None:
    """The first action that computes gradients; None if there is none."""
    return next((action for slot in slots for action in slot if action.computes and action.kind != "forward"), None)


def forward_of_last_layers(slots: Sequence[Slot]) -> Action | None:
    """The action with which every part of a stage has run a forward; None if there is none."""
    first: dict[int, Action] = {}
    for action in (action for slot in slots for action in slot if action.kind == "forward"):
        first.setdefault(action.part, action)
    return list(first.values())[-1] if first else None


def backward_of_first_push(slots: Sequence[Slot]) -> Action | None:
    """The action in which a stage may start to push gradients; None: after its last slot. [Note: the first push]

    It is the last backward or, where weight gradients follow the last input gradient, the first of them, if no message
    comes after it.
    """
    first: Action | None = None
    for slot in reversed(slots):
        for action in reversed(slot):
            if action.kind == "weight_gradient":
                first = action
            elif action.kind in ("backward", "input_gradient"):
                return action if first is None and action.kind == "backward" else first
        if any(not action.computes for action in slot):
            break  # a slot's own messages are done when it computes, but not before
    return first


class Turn(NamedTuple):
    """Messages that start together, and what is computed once those that are received are there."""

    messages: tuple[Action, ...]
    actions: tuple[Action, ...]  # none, one, or several weight gradients


def turns(slots: Sequence[Slot]) -> tuple[Turn, ...]:
    """What a stage does, in order; weight gradients that follow each other without a message between are one turn.

    Run together they take one product for all micro-batches, and layers can be finished one after the other.
    "I2 | <-2 W0 | W1 | F3 W2" has the turns (I2), (<-2; W0 W1), (F3) and (W2).
    """
    made: list[Turn] = []
    for slot in slots:
        messages = tuple(action for action in slot if not action.computes)
        for action in slot:
            if not action.computes:
                continue
            before = made[-1].actions if made and not messages else ()
            if before and before[-1].kind == action.kind == "weight_gradient":
                made[-1] = made[-1]._replace(actions=(*before, action))
            else:
                made.append(Turn(messages, (action,)))
            messages = ()
        if messages:
            made.append(Turn(messages, ()))
    return tuple(made)
