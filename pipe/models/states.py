"""A box called on one slice of a sequence: its convolution's tail and its state go in and out [Note: carried states].

Recurrent modules of transformers keep a state for generation: they ask an object that they are handed for the last
inputs of their convolution and for their state, and hand it both back. In a slice they are handed a `State`, which
writes nothing in place, so that gradients flow through it.

A slice of one token is no step of generation, whose code has no backward in kernels. It is computed with a copy of
itself behind it, and is carried to the next slice in place of a state after it:

  slice 0..4                x x x x                  carries the state after 4 tokens
  slice 4..5                x x'                     the second output is dropped; carries the state after 4, and x
  slice 5..9                x y y y y                with the state after 4; the first output is dropped
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.carried import Carried
from ds_hydra.pipe.rows import Chunk

Leaves = list[Any]
Dims = tuple[int, ...]
_ALONE, _KEY = "token", "key"  # what is carried of a slice of one token


class State:
    """What recurrent modules ask for and hand back: those calls of transformers' `Cache` that they make."""

    def __init__(self, before: Mapping[Hashable, Tensor]):
        self._before = before
        self.after: dict[Hashable, Tensor] = {}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self._before)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """The inputs (..., tokens) of a convolution with those before them in front; the last ones are carried on."""
        before = self._before.get(("conv", state_idx))
        joined = conv_states if before is None else torch.cat((before, conv_states), -1)
        self.after["conv", state_idx] = joined[..., max(0, joined.shape[-1] - conv_kernel_size + 1) :]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states


class Slice:
    """One call of a box on a slice of a sequence."""

    def __init__(self, carried: Carried, chunk: Chunk, dim: int):
        """`dim` counts the tokens of what the box is handed."""
        self._carried, self._chunk, self._dim = carried, chunk, dim
        self._before = carried.take(chunk.start)
        self._waiting, self._key = self._before.pop(_ALONE, None), self._before.pop(_KEY, None)
        self._is_copied = chunk.start > 0 and chunk.stop - chunk.start == 1 and self._waiting is None

    def around(self, own: Tensor, waiting: Tensor | None, dim: int) -> Tensor:
        """What the slice has of something for each token, with that of the other tokens of the call."""
        if self._is_copied:
            return torch.cat((own, own.detach()), dim)
        return own if waiting is None else torch.cat((waiting, own), dim)

    def keys(self, own: Tensor | None) -> Tensor | None:
        """What random numbers are drawn from, (tokens,) of the call."""
        return None if own is None else self.around(own, self._key, 0)

    def call(
        self, forward: Callable[[Tensor, State], list[tuple[Any, Dims]]], own: Tensor, keys: Tensor | None
    ) -> Leaves:
        """What a box returns of the tokens of a slice, of all that `forward` returns with its dimensions of tokens."""
        state = State(self._before)
        tokens = self.around(own, self._waiting, self._dim)
        returned = forward(tokens, state)
        after = state.after
        if self._is_copied:
            after = {**self._before, _ALONE: own} | ({} if keys is None else {_KEY: keys})
        here, all_here = own.shape[self._dim], tokens.shape[self._dim]
        in_front = 0 if self._waiting is None else all_here - here
        found = [
            value.narrow(dims[0], in_front, here)
            if isinstance(value, Tensor) and len(dims) == 1 and value.shape[dims[0]] == all_here
            else value
            for value, dims in returned
        ]
        found[0] = self._carried.hand_on(found[0], after, self._chunk.start, self._chunk.stop)
        return found
