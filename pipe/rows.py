"""

[Note: packs]
Whole sequences stand one after the other in one row of T tokens. Sequence parallel ranks hold consecutive intervals of
the row, which need not be equal. Sequences A (3 tokens), B (5) and C (2) over sp = 3:

  token        0  1  2  3  4  5  6  7  8  9
  sequence     A  A  A  B  B  B  B  B  C  C
  position     0  1  2  0  1  2  3  4  0  1
  sp rank      0  0  0  1  1  1  2  2  2  2

A slice of a longer sequence may stand first in a row, and only there [Note: contexts]. With the slice 4..6 of a
sequence L in front of the sequences B (3 tokens) and C (2):

  token        0  1  2  3  4  5  6
  sequence     L  L  B  B  B  C  C
  position     4  5  0  1  2  0  1

The record travels to the attention as one opaque keyword argument. So no layer derives boundaries from tensors, which
would make the host wait for the device, and a recomputed forward finds the same pack as the first one.

[Note: fields]
A field is a named number of each token, or k of them, or one number of a whole sequence, which each of its tokens then
has. It stands at the place of the token that it is about, as labels do: the log-probability of token i is made from the
tokens before it, and meets what the fields hold at i. Within a step all fields are the columns of one matrix, (tokens,
columns) in FP64, which is shifted as labels are, and packed, sliced and shared by ranks as they are. With advantages
(0, .2, .3) and a temperature of 2 a sequence of three tokens travels as

  advantages   .2  .3   0
  temperature   2   2   0

Choices of experts are about the token whose hidden states are routed, and are not shifted.

[Note: edges]
Shapes, peers and orders follow from the plan, so nothing is asked over the wire. The two stages of an edge may have
different tensor and sequence parallel degrees: a receiver takes its tokens from every sequence parallel rank that holds
some of them, each time from its share of the tensor parallel ranks, which all hold the same: of four that send to two
the first gets half of its rows from each of two. With token sharding no two ranks of a stage hold the same token, so
every rank sends each of its own rows to the one that goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.pipe.placement import Stage

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from ds_hydra.pipe.contexts import Contexts
    from ds_hydra.pipe.loss import Predictions, Scored


class Reach(NamedTuple):
    """Which tokens before it a token sees: all; with a window, which counts the token itself, those in it; with chunks
    of so many tokens, counted from the sequence's first, those of its own [Note: reach]. Or all tokens of the row."""

    window: int | None = None
    chunk: int | None = None
    both_ways: bool = False

    def first(self, start: int) -> int:
        """The first token that one at `start` sees."""
        if self.chunk is not None:
            return start // self.chunk * self.chunk
        return 0 if self.window is None else max(0, start - self.window + 1)

    @property
    def most(self) -> int | None:
        """Tokens before it that a token sees at most; None: any number."""
        size = self.chunk or self.window
        return None if size is None else size - 1


ALL = Reach()
BOTH = Reach(both_ways=True)


class Seen(NamedTuple):
    """Tokens that see each other in both directions, as those of an image may [Note: spans]."""

    spans: tuple[tuple[int, int], ...]  # [start, stop) of each, in the whole row
    layers: frozenset[str] = frozenset()  # the layer types in which they do; "": of layers that have none
    whole: bool = False  # whether they do so beyond a layer's window

    def within(self, start: int, stop: int) -> Seen | None:
        """Those that begin among some tokens, counted from the first of these; None: there are none."""
        spans = tuple((a - start, b - start) for a, b in self.spans if start <= a < stop and b > a + 1)
        return self._replace(spans=spans) if spans else None


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
        return sum(one.columns for one in self.fields)

    def places(self) -> Iterator[tuple[Field, slice]]:
        """Each field with its columns."""
        start = 0
        for one in self.fields:
            yield one, slice(start, start + one.columns)
            start += one.columns

    def find(self, name: str) -> tuple[Field, slice] | None:
        """A field and its columns; None if there is none of that name."""
        return next(((field, columns) for field, columns in self.places() if field.name == name), None)

    def and_also(self, *fields: Field) -> FieldLayout:
        """These fields behind its own."""
        return FieldLayout((*self.fields, *fields))


Positions = NDArray[np.int64]
_GROWTH = 2.5  # from a group of heads that is waited for to those behind it, at most


def split_tokens(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Tokens of each sequence parallel rank: the row is cut at floor(T * rank / sp), so shares differ by at most 1."""
    cuts = [num_tokens * rank // num_ranks for rank in range(num_ranks + 1)]
    return tuple(stop - start for start, stop in pairwise(cuts))


@dataclass(frozen=True)
class Chunk:
    """A slice of a sequence, and what its attention needs of the slices before it."""

    start: int  # position of its first token
    stop: int
    contexts: Contexts  # the same object for all slices of the sequence

    @property
    def is_last(self) -> bool:
        return self.stop == self.contexts.total


class Overlap(NamedTuple):
    """How sequence parallel ranks hide the messages of attention [Note: exchange in groups]."""

    groups: int = 8  # of heads, at most
    least_tokens: int = 512  # of a rank for each group: more and smaller messages would cost more than they hide

    def groups_of(self, tokens: int) -> int:
        """At most so many groups for a row of which a rank holds so many tokens."""
        return max(1, min(self.groups, tokens // self.least_tokens)) if self.least_tokens else self.groups


AT_ONCE = Overlap(groups=1)


def cut_heads(at_most: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """A rank's query heads in groups, at most so many: how many heads each of them has [Note: exchange in groups].

    Each has whole key/value heads with their queries, of which the first and the last have one if the others need no
    more than two and a half then: a group's messages must have come while the one before it is computed. Of fewer
    key/value heads than groups, several groups share one, and each has equally many of its queries.
    """
    of_each = heads // kv_heads  # query heads of a key/value head
    fits = (n for n in range(1, at_most + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))
    whole, shared = min(at_most, kv_heads), max(fits, default=1)
    if shared > whole:
        return (heads // shared,) * shared
    between = whole - 2
    if between > 0 and kv_heads - 2 <= _GROWTH * between:
        groups = [1, *sorted(split_tokens(kv_heads - 2, between)), 1]
    else:
        groups = sorted(split_tokens(kv_heads, whole))
    return tuple(of_each * n for n in groups)


@dataclass(frozen=True)
class Pack:
    """Boundaries of the packed sequences and the sequence parallel group that shares the row."""

    lengths: tuple[int, ...]  # tokens of each sequence, or of the slice of one, of the whole row
    sp_rank: int = 0
    sp: int = 1
    sp_group: dist.ProcessGroup | None = None
    # what the random numbers of each sequence follow from [Note: draws by place]; none: they are 0, 1, ...
    keys: tuple[int, ...] = ()
    chunk: Chunk | None = None  # the first of `lengths`, if it is not a whole sequence
    overlap: Overlap = AT_ONCE
    near: int = 0  # sequence parallel ranks of each node, where nodes have as many [Note: heads inside a node]
    frugal: bool = False  # whether the memory for it was planned without keys of other nodes, or for slices
    seen: Seen | None = None  # of a row that has images, whole
    tokens: tuple[int, ...] = field(init=False)  # tokens per sequence parallel rank

    def __post_init__(self) -> None:
        if (chunk := self.chunk) is not None:
            assert chunk.stop - chunk.start == self.lengths[0], f"tokens {chunk.start}..{chunk.stop} of {self.lengths}"
        # Derived once: every layer of every micro-batch asks for it.
        object.__setattr__(self, "tokens", split_tokens(sum(self.lengths), self.sp))
        if self.seen is not None:  # ranks that share the queries of a head do not have the keys behind them
            object.__setattr__(self, "near", 0)

    @property
    def past(self) -> int:
        """Position of the row's first token: tokens of its sequence that ran in slices before."""
        return 0 if self.chunk is None else self.chunk.start

    @property
    def whole_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, where of the first only a slice may be in the row."""
        return self.lengths if self.chunk is None else (self.chunk.contexts.total, *self.lengths[1:])

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return sum(self.lengths)

    @property
    def head_groups(self) -> int:
        """Into how many groups attention may cut a rank's heads."""
        # Slices of a sequence keep keys and values by group, so all of them have as many, whatever stands beside them.
        tokens = self.num_tokens if self.chunk is None else self.chunk.contexts.total
        return self.overlap.groups_of(tokens // self.sp)

    @property
    def offsets(self) -> list[int]:
        """Start of each sequence in the row, and the end of the last: len(lengths) + 1 entries."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def local(self) -> tuple[int, int]:
        """Interval [start, stop) of the row that this rank holds."""
        start = sum(self.tokens[: self.sp_rank])
        return start, start + self.tokens[self.sp_rank]


class Balance(NamedTuple):
    """What the routers of a stage must know of the tokens that they route [Note: the routers' loss]."""

    sequence: Tensor  # (T_local,) which of the pack's sequences each token is of
    weights: Tensor  # (sequences,) what all tokens of each count in the step's loss, over the square of its length


@dataclass(frozen=True)
class Routes:
    """Experts of the tokens that this rank holds, of all routers: (T_local, routers, chosen) int64."""

    routing: Routing
    given: Tensor | None = None  # used in place of the routers' own choices
    found: Tensor | None = None  # where a stage's routers write what they choose
    wanted: bool = False  # whether they are to


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as a stage's rank sees it. Tensors cover its own T_local tokens only."""

    pack: Pack
    position_ids: Tensor  # (1, T_local), restarting at each sequence; those of a slice go on where the last one ended
    input_ids: Tensor | None = None  # (1, T_local)
    labels: Tensor | None = None  # (T_local,) next tokens, -100 where there is none; last stage only
    weights: Tensor | None = None  # (T_local,) what each token's loss counts in the step's loss; last stage only
    token_losses: Tensor | None = None  # (T_local,) where the last stage writes each token's loss, if they are wanted
    balance: Balance | None = None  # of a model whose routers are to use all experts alike, in training
    predictions: Predictions | None = None  # takes the logits on the last stage, if something of them is wanted
    scored: Scored | None = None  # what takes the place of the cross entropy; last stage only
    routes: Routes | None = None  # what routers choose, if it is given or wanted
    recompute: float = 0.0  # share of each stage's layers that the backward computes again [Note: recomputed layers]
    beside_us: int = 0  # what the first stage is expected to take besides its layers [Note: loads]


def position_ids(lengths: Sequence[int], start: int, stop: int, *, past: int = 0) -> Positions:
    """Positions of tokens [start, stop) of a packed row; they restart at each sequence, the first begins at `past`."""
    # Token t of a sequence that begins at b has the position t - b; the first one began `past` tokens before the row.
    counts = np.asarray(lengths, dtype=np.int64)
    begins = np.cumsum(counts) - counts
    begins[:1] -= past
    return np.arange(start, stop) - np.repeat(begins, counts)[start:stop]


class Rows(NamedTuple):
    """Rows [start, stop) of a rank's local hidden states, sent to or received from `peer` (a global rank)."""

    peer: int
    start: int
    stop: int


@lru_cache(maxsize=256)  # a step's: lengths of micro-batches hardly come again, and an entry takes kilobytes
def edge(
    src: Stage, dst: Stage, num_tokens: int, *, token_sharding: bool = False
) -> tuple[dict[int, list[Rows]], dict[int, list[Rows]]]:
    """Sends by source rank, receives by destination rank of a micro-batch of `num_tokens` tokens [Note: edges].

    With token sharding (tokens that tp * sp of each stage with a tp divides) the i-th rank of a stage holds the i-th of
    its tp * sp parts.
    """
    # 12 tokens, from a stage with tp 2, sp 2 (ranks 0..3) to one with sp 3 (ranks 4..6):
    #
    #   token          0  1  2  3  4  5  6  7  8  9  10 11
    #   source         |-- ranks 0, 1 -| |-- ranks 2, 3 -|
    #   destination    |- rank 4 | |- rank 5 | |- rank 6 |
    #
    # Rank 5 needs the tokens 4..7: 4 and 5 from ranks 0 and 1, which hold the same, 6 and 7 from ranks 2 and 3. It gets
    # its row 0 from rank 0, which is row 4 there, row 1 from rank 1, row 2 from rank 2, where it is row 0, and row 3
    # from rank 3. On the way back gradients go by edge(destination, source): ranks 0 and 1 both receive them from rank
    # 5, since each tensor parallel rank needs the gradient of the whole hidden state. With equal tp, each tensor
    # parallel rank sends to the one with its own number.
    sends: dict[int, list[Rows]] = {rank: [] for rank in src.ranks}
    receives: dict[int, list[Rows]] = {rank: [] for rank in dst.ranks}
    src_parts, dst_parts = (parts_of(stage, token_sharding=token_sharding) for stage in (src, dst))
    src_rows, dst_rows = _intervals(num_tokens, src_parts), _intervals(num_tokens, dst_parts)
    src_alike, dst_alike = len(src.ranks) // src_parts, len(dst.ranks) // dst_parts  # ranks that hold the same
    for index, receiver in enumerate(dst.ranks):
        part, copy = divmod(index, dst_alike)
        lo, hi = dst_rows[part]
        for src_part, (start, stop) in enumerate(src_rows):
            first, last = max(lo, start), min(hi, stop)
            if first >= last:
                continue
            own = copy * src_alike // dst_alike, (copy + 1) * src_alike // dst_alike
            senders = src.ranks[src_part * src_alike :][own[0] : max(own[0] + 1, own[1])]
            for sender, (begin, end) in zip(senders, _intervals(last - first, len(senders)), strict=True):
                if begin < end:
                    sends[sender].append(Rows(receiver, first + begin - start, first + end - start))
                    receives[receiver].append(Rows(sender, first + begin - lo, first + end - lo))
    return sends, receives


def parts_of(stage: Stage, *, token_sharding: bool) -> int:
    """Into how many parts a stage cuts a row."""
    return stage.sp * stage.tp if token_sharding else stage.sp


def _intervals(num_tokens: int, parts: int) -> list[tuple[int, int]]:
    intervals: list[tuple[int, int]] = []
    start = 0
    for tokens in split_tokens(num_tokens, parts):
        intervals.append((start, start + tokens))
        start += tokens
    return intervals
