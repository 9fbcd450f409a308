"""What modules that run once for each sequence cost the ranks of a stage, and which of these share one's heads. Pure.

[Note: who shares heads]
Tensor parallel ranks hold the parameters of their own heads. Sequence parallel ranks hold the same ones, gather the
tokens of the row, and each of them computes some of these heads for all tokens. So rank (i, j) of tp * sp has part
i * sp + j of the heads, where so many parts are possible. Where they are not, ranks that stand next to each other in
the row share the heads as far as they can, for the sequences that overlap their tokens. Two heads over sp = 4:

  sp rank           0      1      2      3
  tokens            0..3   4..7   8..11  12..15
  computes of       0..7   0..7   8..15  8..15
  head              0      1      0      1
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadDegrees:
    """In how many parts the heads of a module can be computed, each by another rank."""

    parts: tuple[int, ...] = ()  # none: every rank computes the whole
    groups: int = 0  # of its norm: of more parts than that, several add up the squares of a group; 0: of no number

    def shared_by(self, tp: int, sp: int) -> tuple[int, int]:
        """How many tensor parallel ranks share the heads, and how many sequence parallel ones what each of these has;
        1: every rank computes the whole."""
        by_tp = tp if tp in self.parts else 1
        fits = (n for n in range(sp, 1, -1) if sp % n == 0 and by_tp * n in self.parts)
        # Squares are added up over all sequence parallel ranks, which must run the same sequences for that.
        alone = (n for n in fits if n == sp or not self.groups or by_tp * n <= self.groups)
        return by_tp, next(alone, 1)


@dataclass(frozen=True, slots=True)
class BoxSize:
    """What planning needs to know of a module that runs once for each sequence [Note: boxes]."""

    weights: int  # elements of its matrices
    recurrent: bool = False  # its time grows with the length alone
    carried: int = 0  # bytes of what a slice of a sequence hands on
    heads: HeadDegrees = HeadDegrees()

    def share(self, tp: int, sp: int) -> float:
        """What one rank computes of it, for the tokens of a long sequence, and keeps of what it hands on."""
        by_tp, by_sp = self.heads.shared_by(tp, sp)
        return 1.0 / (by_tp * by_sp)


Boxes = tuple[tuple[BoxSize, ...], ...]
"""Of each layer of a model; empty where all tokens meet by the attention interface."""


def state_bytes(boxes: Boxes, tp: int = 1, sp: int = 1) -> float:
    """What a rank keeps, in some layers together, for a slice that others follow: the states that it hands on, and
    their gradients."""
    return 2.0 * sum(box.carried * box.share(tp, sp) for of in boxes for box in of)
