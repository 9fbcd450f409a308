"""Modules in which tokens meet, each called as it is once for each sequence of a pack.

[Note: boxes]
Between its mixers a model treats every token alone, so a packed row may run through it as if it were one sequence. A
mixer that does not go by Hugging Face's attention interface knows nothing of packs: a recurrence would carry its state
from one sequence into the next, a convolution would look over the boundary. Such a module is a box. It is given what
the model would give it if each sequence ran alone, one after the other, and its outputs are put back into a row:

  row           A A A B B B B B C C      hidden states, whatever stands between the boxes computes them
  box           A A A                    with the masks, positions and rotary tables of a sequence of 3 tokens
                      B B B B B          of 5
                                C C      of 2

What a layer is handed beside the hidden states comes from captures: the model's own forward runs for one sequence with
layers that do nothing but note what they are called with. Of sequences of one length it is the same, as a rule.
Of a slice of a sequence a box is handed, and hands on, what it carries [Note: carried states].
Sequence parallel ranks gather the row, and each computes the sequences that overlap its own tokens. Tensor parallel
ranks all compute the whole of a box. Or both share its heads [Note: recurrent heads].

Which modules are boxes, and which of their arguments are what, is found by trying: `find_boxes.py`.

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

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.contexts import Carried
from ds_hydra.pipe.models.draws import Keys
from ds_hydra.pipe.rows import Chunk, Pack

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


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class Box:
    """A mixer of a layer. Leaves are counted in the order in which nested arguments are taken apart."""

    path: str  # within the layer; empty: the layer itself
    handed: tuple[tuple[int, ...], ...]  # of each leaf of its arguments the dimensions that count tokens
    sources: tuple[int | None, ...]  # of each: which leaf of its layer's arguments it is; None: computed in the layer
    returned: tuple[tuple[int, ...], ...]  # of each leaf of what it returns the dimensions that count tokens
    batched: bool = False  # whether sequences of one length may be rows of one call
    state: int | None = None  # which leaf of its arguments is its cache, if it passes what it carries on in slices
    carries: int = 0  # bytes that it does, of a sequence
    by_heads: bool = False  # whether ranks share it [Note: recurrent heads]

    @property
    def rows(self) -> int | None:
        """Which leaf of its arguments is the tokens, if there is one alone that was computed in the layer."""
        found = [place for place, (dims, source) in enumerate(zip(self.handed, self.sources, strict=True))
                 if dims and source is None]  # fmt: skip
        return found[0] if len(found) == 1 and len(self.handed[found[0]]) == 1 else None


@dataclass(frozen=True)
class Boxes:
    """What was found of a model's mixers: the boxes of each layer; nothing where all attend by the interface."""

    of: tuple[tuple[Box, ...], ...] = ()
    packed: bool = True  # whether what comes before the layers is computed for the row, with the sequences' positions
    by_length: bool = True  # whether what layers are handed beside the hidden states follows from the length alone
    heads: frozenset[tuple[int, int]] = frozenset()  # of queries, and of keys and values, where layers attend by it

    attention: str = ""  # what Hugging Face calls the attention of boxes
    whole: str = ""  # why no sequence may be cut into slices

    def __bool__(self) -> bool:
        return any(self.of)

    def paths(self, layers_path: str) -> tuple[str, ...]:
        """The modules that are boxes, by their paths in the model."""
        return tuple(
            f"{layers_path}.{index}.{box.path}".rstrip(".") for index, boxes in enumerate(self.of) for box in boxes
        )

    def told(self, layers_path: str) -> str:
        """What is run once for each sequence, in a sentence."""
        paths = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in self.paths(layers_path)})
        slices = f"sequences are not cut into slices: {self.whole}" if self.whole else "also on slices of sequences"
        return f"run once for each sequence of a pack, as it is: {', '.join(paths)}; {slices}"


class Reached(BaseException):
    """Ends a capture. Not an `Exception`: a model's own handlers must not swallow it."""


@dataclass
class Capture:
    """What layers are called with when one sequence runs alone."""

    entered: Tensor | None = None  # the first layer's hidden states
    layers: dict[int, Leaves] = field(default_factory=dict)


@dataclass
class Run:
    """One micro-batch on its way through the boxes."""

    pack: Pack
    captures: Sequence[Capture]  # by sequence
    keys: Keys | None = None  # what random calls of its tokens draw from
    # Stand-ins for what a box returns of each sequence that no row can hold, by identity: what they stand for.
    apart: dict[int, tuple[Tensor, Mapping[int, Any]]] = field(default_factory=dict)


def is_plain(value: Any) -> bool:
    """Whether a value is one of Python's, of which there is no telling one from another."""
    return isinstance(value, _PLAIN)
