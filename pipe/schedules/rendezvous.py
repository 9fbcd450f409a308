"""Slots of all stages in; PlanError if some stage would wait for ever, or if a message is not met. Pure: no torch.

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

from collections.abc import Sequence
from itertools import product

from ds_hydra.pipe.schedules.actions import Action, Compute, Slot, receive_for, slots_as_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import place, wanted_from
from ds_hydra.zero_hetero.errors import PlanError

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
