"""Linear layers that read the same rows in, one product with all their weights, which lie side by side, out.

[Note: packed weights]
Queries, keys and values read the same rows, and so do the gate of an MLP and what it lets through. Their weights follow
each other in their bucket's buffer, so one weight covers them all, a view as each of them is, and one product makes
what they make:

  buffer      | q (8, 4)     | k (2, 4)      | v (2, 4)      |      elements 0..31, 32..39, 40..47
  packed      | (12, 4)                                      |
  x (T, 4)    -> (T, 12): q's are the columns 0..7, k's 8 and 9, v's 10 and 11

To autograd the packed weight is the leaf in place of the others. Its gradient, one product as well, adds up in the view
that covers theirs, so whatever pushes gradients finds them where they always are.

A weight is packed where those of a bucket happen to lie so, and where a trace has seen that one input enters all of its
layers. A layer that is handed something else in spite of that uses its rows of the packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.model_plan import Slot
from ds_hydra.pipe.weight_gradients import Linear
from ds_hydra.pipe.wrappers import wrap


class Leaf(NamedTuple):
    """What autograd accumulates a gradient in: one parameter of a bucket, or a packed weight that covers several."""

    parameter: nn.Parameter
    slots: tuple[Slot, ...]
    view: Callable[[Tensor], Tensor]  # of a buffer in the bucket's order: the part that is this leaf's


class PackedLinears(nn.Module):
    """Children of a module, linear layers without biases that read the same rows, as one [Note: packed weights]."""

    weight: nn.Parameter | None

    def __init__(self, parent: nn.Module, layers: Mapping[str, nn.Module], linear: Linear):
        """`layers` by the master names of their weights; `linear` computes. Replaces the forwards of them all, and lets
        the parent's forget what they have made."""
        super().__init__()
        self.layers, self._linear = dict(layers), linear
        self.register_parameter("weight", None)  # until the weights are found side by side
        self.bias = None
        self._starts: list[int] = []
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []
        for index, layer in enumerate(self.layers.values()):
            wrap(layer, self._forward_of(index, layer.forward), "packed", "one of several")
        wrap(parent, self._forgetting(parent.forward), "packed", "forgets")

    def install(self, slots: Mapping[str, Slot], buffer: Tensor) -> Leaf | None:
        """Cover the weights in their bucket's buffer, if they lie one after the other there."""
        found = tuple(slots[name] for name in self.layers if name in slots)
        if len(found) < len(self.layers) or not _side_by_side(found):
            return None
        self._starts = [0, *accumulate(slot.shape[0] for slot in found)]
        first, shape = found[0].offset, (self._starts[-1], found[0].shape[1])

        def view(buffer: Tensor) -> Tensor:
            return buffer[first : first + shape[0] * shape[1]].view(shape)

        if self.weight is None:
            self.weight = nn.Parameter(view(buffer).data)
        else:
            self.weight.data = view(buffer).data
        return Leaf(self.weight, found, view)

    def parts(self, out: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes, of what all of them make (..., features), which nobody else reads."""
        # Not by `split`: torch lets no view of several be changed in place, as models may do with what a layer made.
        return torch.unsafe_split_with_sizes(out, [stop - start for start, stop in pairwise(self._starts)], -1)

    def _forward_of(self, index: int, alone: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:  # the name that callers of nn.Linear may use
            if self.weight is None:
                return alone(input)
            if input is not self._input:
                self._input, self._outputs = input, list(self.parts(self._linear(self, input, None)))
            out, self._outputs[index] = self._outputs[index], None
            if out is None:  # it runs twice
                return F.linear(input, self.weight[self._starts[index] : self._starts[index + 1]])
            return out

        return forward

    def _forgetting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def forget(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                self._input, self._outputs = None, []  # they hold activations

        return forget


def _side_by_side(slots: Sequence[Slot]) -> bool:
    """Whether weights (out, in), none of them transposed or frozen, follow each other without a gap."""
    plain = all(slot.param.rule.dim in (None, 0) and slot.param.rule.parts == 1 for slot in slots)
    trained = all(slot.param.trainable and slot.shape[1:] == slots[0].shape[1:] for slot in slots)
    return plain and trained and all(one.offset + one.numel == other.offset for one, other in pairwise(slots))
