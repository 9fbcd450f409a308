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

Which modules are boxes, and which of their arguments are what, is found by trying: `mixers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.models.draws import Keys
from ds_hydra.pipe.rows import Pack

Leaves = list[Any]  # all that a call is handed, or returns, without its nesting
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
