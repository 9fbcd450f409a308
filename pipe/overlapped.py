"""Differentiable all-to-alls that are started and waited for apart, in an order that is the same on all ranks.

[Note: order of started messages]
The ranks of a group must start its collectives in one order. In the forward that is the order of the program. In the
backward autograd runs whatever has its gradients, and of two branches that do not depend on each other either may come
first. So branches are made to depend on each other, by tokens without elements. Of two groups of heads, with `start`
and `wait` for what comes in (i) and what goes out (o):

  start i0 i1 ── wait i0 ── attention 0 ── start o0 ┬─────────────────────────────────── wait o0 o1
              │                                     └ token ┐                                 │
              └───────────────────────────────────────── wait i1 ── attention 1 ── start o1 ──┘

The backward of a wait starts the message back, and the backward of a start waits for it. Read from right to left: the
gradients of o1 and o0 are started, that of o1 is waited for, attention 1 is differentiated, its message i1 is started.
The token has `start o0` wait for that. Only then is the gradient of o0 waited for, and so on, down to `start i0 i1`,
which waits for both messages back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll:
    """One all-to-all of a flat tensor: `send[i]` elements go to rank i, `receive[i]` come from it; and the way back."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None):
        self._send, self._receive, self._group = list(send), list(receive), group
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None  # with the memory that must live until its end

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Begin to send `x`; what is returned may be read after `wait`. `back` takes gradients where they belong."""
        # Every element went to exactly one place, so its gradient goes back the same way: the sizes change roles.
        send, receive = (self._receive, self._send) if back else (self._send, self._receive)
        x = x.contiguous()
        out = x.new_empty(sum(receive))
        work = dist.all_to_all_single(out, x, receive, send, group=self._group, async_op=True)
        self._under_way = work, x, out
        return out

    def wait(self) -> Tensor:
        """What has come, there for all that is computed from now on."""
        assert self._under_way is not None, "an all-to-all is started before it is waited for"
        work, _, out = self._under_way
        work.wait()
        self._under_way = None
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Sequence[AllToAll], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.messages = messages
        started = [message.start(x) for message, x in zip(messages, xs, strict=True)]
        return *started, xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # What `_Wait` hands on has the shape that autograd asks for; what it has sent comes in this rank's own.
        return None, *(message.wait() for message in ctx.messages)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Sequence[AllToAll], after: Tensor, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.messages = messages
        for message in messages:
            message.wait()
        return tuple(x.view_as(x) for x in started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The last one first: its backward is the first that can go on.
        for message, grad, needed in reversed(list(zip(ctx.messages, grads, ctx.needs_input_grad[2:], strict=True))):
            if needed:
                message.start(grad, back=True)
        return None, None, *grads


def start(messages: Sequence[AllToAll], xs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Begin all-to-alls of flat tensors; what `wait` is to be given, and the token of what must wait for later.

    The backward waits for the gradients' messages back.
    """
    *started, token = _Start.apply(tuple(messages), *xs)
    return started, token


def wait(messages: Sequence[AllToAll], started: Sequence[Tensor], after: Tensor) -> tuple[Tensor, ...]:
    """What has come of all-to-alls that were started. The backward starts the gradients' messages back, last one first.

    `after` is the token of the `start` that came before, whose backward is then behind this one's
    [Note: order of started messages].
    """
    received: tuple[Tensor, ...] = _Wait.apply(tuple(messages), after, *started)
    return received
