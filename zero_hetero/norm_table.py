"""What all ranks said of their gradients in a step, as one record. Pure."""

from __future__ import annotations

import hashlib
import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass
from functools import cached_property
from itertools import chain


@dataclass(frozen=True)
class NormTable:
    """What all ranks said of their gradients in a step: the vote that the step is complete everywhere.

    A rank's row is the sum of its squares, its word and its share of the loss, as `zero_hetero.grad_norm.norm_table`
    gathers them.
    """

    step: int
    rows: tuple[tuple[float, float, float], ...]  # by rank

    @cached_property
    def text(self) -> str:
        """As it travels: its bits, as a row may hold NaN, which equals nothing, and 0.0 equals -0.0."""
        flat = tuple(chain.from_iterable(self.rows))
        return b64encode(struct.pack(f"<q{len(flat)}d", self.step, *flat)).decode()

    @cached_property
    def name(self) -> str:
        """Equal for equal bits only: reports name tables, which are 24 bytes a rank."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    @classmethod
    def of_text(cls, text: str) -> NormTable:
        """What `text` made; ValueError for anything else."""
        raw = b64decode(text, validate=True)
        if len(raw) % 24 != 8:
            raise ValueError(f"{len(raw)} bytes are no table of rows of three numbers")
        step, *flat = struct.unpack(f"<q{len(raw) // 8 - 1}d", raw)
        return cls(step, tuple(zip(flat[::3], flat[1::3], flat[2::3], strict=True)))
