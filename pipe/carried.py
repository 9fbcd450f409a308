"""What a recurrent module carries from one slice of a sequence to the next; and its gradients back.

[Note: carried states]
Of the tokens before a slice a recurrence needs a state of one size, however many they were, and a convolution its last
few inputs. Both are what the slice before has ended with, so each module keeps them in a `Carried` where attention
keeps keys and values [Note: contexts]. With the slices 0..4, 4..6 and 6..9 of a sequence of 9 tokens:

  forward of 0..4    begins with nothing                      keeps what it ends with, for 4
  forward of 4..6    begins with what is kept for 4           keeps what it ends with, for 6
  forward of 6..9    begins with what is kept for 6           ends the sequence: nothing is kept

  backward of 6..9   leaves the gradient of what it began with, at 6
  backward of 4..6   begins with the gradients of its outputs and with what is left at 6; leaves a gradient at 4
  backward of 0..4   begins with those of its outputs and with what is left at 4

What a slice begins with is a leaf of its graph, so autograd knows of no other slice, and the backwards must run in the
reverse order. A layer that is computed again begins with the same: what is kept for a slice stays until the slice
before has had its backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_hydra.zero_hetero.errors import PlanError

States = Mapping[Hashable, Tensor]


class Carried:
    """The states of a sequence in one module, and their gradients [Note: carried states].

    Sequence parallel ranks all compute the slice, and each has the gradients that come from its own tokens.
    """

    def __init__(self, total: int):
        self.total = total
        self._kept: dict[int, dict[Hashable, Tensor]] = {}  # by the token at which a slice begins
        self._gradients: dict[int, dict[Hashable, Tensor]] = {}
        self._open = total  # the next backward is that of the slice that stops here

    def take(self, start: int) -> dict[Hashable, Tensor]:
        """What a slice that begins at `start` begins with, leaves of its graph; empty for the first.

        Raises PlanError where the slice before has not run.
        """
        if not start:
            return {}
        if start not in self._kept:
            raise PlanError(
                f"a slice of a sequence of {self.total} tokens begins at token {start}, where no slice that has run "
                f"ends; states are kept for {sorted(self._kept) or 'none'}: a schedule must run slices in order"
            )
        return {key: self._leaf(start, key, value) for key, value in self._kept[start].items()}

    def _leaf(self, start: int, key: Hashable, value: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and value.is_floating_point()):
            return value.clone()  # code without gradients may write where it reads
        leaf = value.detach().requires_grad_()
        leaf.register_hook(partial(self._left, start, key))
        return leaf

    def _left(self, start: int, key: Hashable, gradient: Tensor) -> None:
        self._gradients.setdefault(start, {})[key] = gradient

    def hand_on(self, out: Tensor, states: States, start: int, stop: int) -> Tensor:
        """Keep what the slice `start` to `stop` ends with; `out`, of which everything that follows is computed, back.

        The backward of what is returned adds the gradients that the next slice has left. It raises PlanError where
        that slice's backward has not run.
        """
        if stop == self.total:
            states = {}
        if stop < self._open:  # a layer that is computed again in its backward comes too late for the next slice
            self._kept[stop] = {key: value.detach().clone() for key, value in states.items()}
        handed: Tensor = _HandOn.apply(out, self, start, stop, tuple(states), *states.values())
        return handed

    def bytes_at(self, start: int) -> int:
        """Bytes of what a slice that begins at `start` begins with."""
        return sum(value.nbytes for value in self._kept.get(start, {}).values())

    def left_at(self, start: int, stop: int) -> dict[Hashable, Tensor]:
        """The gradients of what the slice `start` to `stop` ended with, in its backward."""
        if stop != self._open:
            raise PlanError(
                f"the backward of the tokens {start} to {stop} of a sequence of {self.total} runs when that of the "
                f"slice up to {self._open} is due: the gradients of its states would be wrong. A schedule must run the "
                "backwards of the slices of a sequence in reverse order"
            )
        self._open = start
        self._kept.pop(stop, None)
        return self._gradients.pop(stop, {})


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, carried: Carried, start: int, stop: int, keys: tuple[Hashable, ...], *states: Tensor
    ) -> Tensor:
        ctx.carried, ctx.start, ctx.stop, ctx.keys = carried, start, stop, keys
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        left = ctx.carried.left_at(ctx.start, ctx.stop)
        return gradient, None, None, None, None, *(left.get(key) for key in ctx.keys)
