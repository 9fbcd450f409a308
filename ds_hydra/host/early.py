"""A number of a batch before its step has run, as a tensor: what a script makes of it, its gradient says.

[Note: losses read early]
A script that reads its loss before the step that its batch belongs to (`total += loss.item()` behind `engine(batch)`)
needs the loss of one batch, which all ranks compute together. Batches that nobody looks at are collected until the
step, and calls exchange nothing [Note: three calls]. So which of the two a script does must be found out:

  first step    each `engine(batch)` begins with a round, in which the batches of all ranks run forward: a read finds
                its number there. Who is at another call serves rounds until all ranks are
  then          where no rank has read a loss before its step: as ever, without a message more. Else rounds go on, and
                each batch runs at its call
  later         who reads a loss for the first time waits for the next call of all others, and the rounds begin there

What is read is a plain tensor in torch's own graph, `counted`. So any function of it works, such as its square, a
clamp, or a skip by its size, and the gradient that arrives is the factor by which its batch counts in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Counted(torch.autograd.Function):
    """The value itself; its gradient goes to a function."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, count: Callable[[Tensor], None]) -> Tensor:
        ctx.count = count
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.count(grad)
        return None, None, None


def counted(value: Tensor, count: Callable[[Tensor], None]) -> Tensor:
    """A tensor of this value, with a gradient that `count` is called with in each backward that comes to it."""
    with torch.enable_grad():
        found: Tensor = _Counted.apply(torch.zeros((), requires_grad=True), value, count)
    return found
