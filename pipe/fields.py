"""Which numbers travel with the tokens of a step, and in which columns. Pure: no torch.

[Note: fields]
A field is a named number of each token, or k of them, or one number of a whole sequence, which each of its tokens then
has. It stands at the place of the token that it is about, as labels do: the log-probability of token i is made from the
tokens before it, and meets what the fields hold at i. Within a step all fields are the columns of one matrix, (tokens,
columns) in FP64, which is shifted as labels are, and packed, sliced and shared by ranks as they are. With advantages
(0, .2, .3) and a temperature of 2 a sequence of three tokens travels as

  advantages   .2  .3   0
  temperature   2   2   0

Choices of experts are about the token whose hidden states are routed, and are not shifted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TEMPERATURE = "temperature"  # by which the logits are divided
NUM_TARGETS = "num_targets"  # of the token's sequence; every step of log-probabilities has it
SEQUENCE = "sequence"  # its number among those that a rank has handed in; losses that mix tokens have it
ROUTED_EXPERTS = "routed_experts"  # of each router, at the place of the token that is routed; no loss has it
CANDIDATE_LOG_PROBS = "candidate_log_probs"  # of the words of the field that a loss names
RESERVED = frozenset((NUM_TARGETS, SEQUENCE, CANDIDATE_LOG_PROBS))


class Routing(NamedTuple):
    """The routers of a model, in the order of its layers, each of which chooses as many experts for a token."""

    paths: tuple[str, ...]
    experts: tuple[int, ...]  # of which each chooses
    chosen: int  # experts of a token


class Field(NamedTuple):
    """What all sequences of a step have for their tokens under one name."""

    name: str
    width: int  # numbers of a token; 0: one, and no axis for it
    whole: bool  # whole numbers, which reach a loss as int64

    @property
    def columns(self) -> int:
        return max(1, self.width)


class FieldLayout(NamedTuple):
    """The fields of a step, in the order of their columns."""

    fields: tuple[Field, ...] = ()

    @property
    def num_columns(self) -> int:
        return sum(field.columns for field in self.fields)

    def places(self) -> Iterator[tuple[Field, slice]]:
        """Each field with its columns."""
        start = 0
        for field in self.fields:
            yield field, slice(start, start + field.columns)
            start += field.columns

    def find(self, name: str) -> tuple[Field, slice] | None:
        """A field and its columns; None if there is none of that name."""
        return next(((field, columns) for field, columns in self.places() if field.name == name), None)

    def and_also(self, *fields: Field) -> FieldLayout:
        """These fields behind its own."""
        return FieldLayout((*self.fields, *fields))
