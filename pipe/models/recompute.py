"""Layers of a stage in; the same layers out, of which a micro-batch's backward computes the first few again.

[Note: recomputed layers]
A layer that the backward computes again keeps its input from forward to backward, and no more. How many do so is up to
each micro-batch: a plan gives it a share, which every stage rounds up to whole layers of its own. Of 7 layers a share
of 0.5 takes the first 4:

  forward    0 1 2 3 keep their input    4 5 6 keep all
  backward   6 5 4                       3 2 1 0, each computed again just before

The first ones and not the last: when their backward comes, what the layers above them kept is free already, and gives
the room for what one layer keeps while it is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ds_hydra.pipe.contexts import computed_again
from ds_hydra.pipe.placement import whole_layers
from ds_hydra.pipe.wrappers import wrap

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What a forward, and the same forward once more, run in: `context_fn` of torch's `checkpoint`."""


class Recomputing:
    """Of the layers of a stage, the first few are computed again in the backward [Note: recomputed layers]."""

    def __init__(self, layers: int, contexts: Contexts = noop_context_fn):
        self._layers, self._first, self._contexts = layers, 0, contexts

    def take(self, share: float) -> None:
        """From now on, this share of the layers is computed again; none to begin with."""
        self._first = whole_layers(share, self._layers)

    def run(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the forward of the layer at a place returns."""
        if place >= self._first or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._passes, **kwargs)

    def _passes(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = self._contexts()
        return _within(first), _within(again)

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Let all layers of the stage, in order, run so."""
        for place, layer in enumerate(layers):
            # The forward, and not the call: hooks of the layer itself run once, as whoever set them expects, and one
            # of them ends the whole forward [Note: cutting by the forward].
            wrap(layer, partial(self.run, place, layer.forward), "recomputed")


@contextmanager
def _within(given: AbstractContextManager[Any]) -> Iterator[None]:
    with computed_again(), given:
        yield
