"""Pipeline schedules as instruction streams: micro-batches and stages in, steps of actions out.

A schedule is data: the runtime interprets it, so a new schedule needs no new runtime. Communication actions of
one step go out together; they pair up with those of the neighbour's step, so no order of arrival can deadlock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "send_activation", "recv_activation", "send_gradient", "recv_gradient"]


class Action(NamedTuple):
    """One instruction of one stage; `microbatch` counts from 0 within the pipeline's step."""

    kind: Kind
    microbatch: int


Step = tuple[Action, ...]

_KINDS: dict[str, Kind] = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "send_activation",
    "RecvActivation": "recv_activation",
    "SendGrad": "send_gradient",
    "RecvGrad": "recv_gradient",
}


@lru_cache(maxsize=4096)
def one_f_one_b(num_microbatches: int, num_stages: int, stage: int) -> tuple[Step, ...]:
    """1F1B of one stage, lowered from DeepSpeed's `TrainSchedule`. No micro-batch: no step.

    DeepSpeed names pipeline buffers; here every action names its micro-batch, which is the same thing counted:
    the k-th action of a kind belongs to micro-batch k.
    """
    if num_microbatches == 0:
        return ()
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    seen = dict.fromkeys(_KINDS.values(), 0)
    steps: list[Step] = []
    for instructions in TrainSchedule(num_microbatches, num_stages, stage).steps():
        actions: list[Action] = []
        for instruction in instructions:
            kind = _KINDS.get(type(instruction).__name__)
            if kind is not None:  # the rest is the optimizer's, or buffer bookkeeping
                actions.append(Action(kind, seen[kind]))
                seen[kind] += 1
        if actions:
            steps.append(tuple(actions))
    return tuple(steps)


def forward_only(num_microbatches: int, num_stages: int, stage: int) -> tuple[Step, ...]:
    """Evaluation: every micro-batch passes through once."""
    steps: list[Step] = []
    for microbatch in range(num_microbatches):
        if stage > 0:
            steps.append((Action("recv_activation", microbatch),))
        steps.append((Action("forward", microbatch),))
        if stage < num_stages - 1:
            steps.append((Action("send_activation", microbatch),))
    return tuple(steps)
