"""One step's sequences and the candidate strategies as arrays for the kernels. Pure: no torch.

Numba compiles no dictionary of objects and no class of ours, but it knows named tuples of arrays and numbers: a
kernel reads `problem.items.work` in the compiled version as in plain Python. They also keep argument lists short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.stage_work import StageCosts
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Scheme(NamedTuple):
    """Constants of one scheme: scalars, as the innermost loops want them."""

    c: float
    max_length: int
    util_length: int
    pp: float  # of stages that differ less than their number: `SchemeCost.fills`
    floor: float


class Schemes(NamedTuple):
    """Constants of the schemes of a cost table, (schemes,) each."""

    c: Floats  # ms per micro-batch
    max_length: Ints  # tokens that a micro-batch holds
    util_length: Ints  # tokens per micro-batch from which on the device is well used
    pp: Floats  # as `Scheme.pp`
    longest: Ints  # tokens of the longest sequence; more than a micro-batch holds where sequences may be cut
    floor: Floats  # ms that any micro-batch takes


class Items(NamedTuple):
    """Sequences, longest first. In bounds an item may stand for `copies` sequences at least as long."""

    work: Floats  # (schemes, items) ms, without c
    tokens: Ints  # (items,)
    copies: Ints  # (items,)
    rates: Floats  # (schemes,) least ms per token


class Shape(NamedTuple):
    """A strategy: kind x is `pipelines[x]` equal pipelines of scheme `scheme[x]`; pipelines stand kind by kind."""

    scheme: Ints  # (kinds,) rows of the cost table
    pipelines: Ints  # (kinds,)
    pipeline_scheme: Ints  # (pipelines,)


class Problem(NamedTuple):
    """What a search has to solve: these sequences, on the pipelines of one strategy, at these costs."""

    schemes: Schemes
    items: Items
    shape: Shape


class Prospect(NamedTuple):
    """What is known of a strategy before it is searched."""

    bound: float  # ms; no plan is sooner done, so a plan that reaches it ends the search
    price: Floats  # (kinds,) the prices that proved the bound
    ceiling: float  # ms; a plan that takes longer is of no use, infinite where any plan is


class Placement(NamedTuple):
    """Sequences on pipelines and in their micro-batches, changed in place."""

    owner: Ints  # (items,) pipeline
    bin_of: Ints  # (items,) micro-batch of that pipeline
    total: Floats  # (pipelines,) ms of work, without c
    held: Ints  # (pipelines,) tokens
    widest: Floats  # (pipelines,) ms of the longest sequence
    ms: Floats  # (pipelines,) time of the pipeline
    spent: Ints  # (2,) elementary work, such as a look at a candidate: of placing and packing so far, and of repairs


class Bins(NamedTuple):
    """The micro-batches of one pipeline while they are being packed, changed in place."""

    bin_of: Ints  # (items,)
    load: Floats  # (at least v,) ms of each micro-batch, without c
    used: Ints  # (at least v,) tokens of each micro-batch
    spent: Ints  # (1,) elementary work so far, such as a look at a sequence


class Pipe(NamedTuple):
    """A pipeline whose micro-batches are to be made: plain numbers."""

    costs: StageCosts
    num_stages: int
    room: int  # units of memory of a stage
    max_length: int  # tokens that a micro-batch holds
    util_length: int  # tokens of the shortest slice
    slices: bool  # whether sequences may be cut
    layers: int  # of each range of layers, that may be computed again; 0: none may


class Profile(NamedTuple):
    """Target loads of slots [Note: slots]."""

    slots: int
    first: float
    growth: float
    last: float
    begin: int


class Pieces(NamedTuple):
    """The micro-batches of a pipeline, with all that they hold; changed in place. Arrays may be longer than needed."""

    item: Ints  # (pieces,) which of the pipeline's sequences, longest first
    start: Ints  # (pieces,) its first token
    stop: Ints  # (pieces,) the one after its last
    slot: Ints  # (pieces,) its micro-batch
    before: Ints  # (slots,) the micro-batch with the slice before the one here; -1 for none
    held: Ints  # (slots,) tokens
    again: Floats  # (slots,) share of the layers that are computed again
    counts: Ints  # (2,) pieces, slots


class SearchEffort(NamedTuple):
    """How much a dispatch may try, in counts, so that the result does not depend on the machine's speed."""

    restarts: int  # priced multifits with bisection
    moves: int  # candidates that one local search looks at
    levels: int  # moves and swaps that level one pipeline's micro-batches
    repackings: int  # packings that one repair makes
    packs: bool  # whether placements are packed and compared by packed time


LEAN = SearchEffort(restarts=0, moves=0, levels=0, repackings=0, packs=True)  # what plain Python has time for


_EXACT_BOUND_ITEMS = 400  # more sequences than this are merged by length in the bound
_MERGE_WIDTH = 1.003  # lengths within this ratio count as the shortest of them, in the bound only


def scheme_arrays(table: CostTable) -> Schemes:
    """The constants of every scheme of a cost table."""
    costs = table.costs
    return Schemes(
        np.array([k.c for k in costs], dtype=np.float64),
        np.array([k.max_length for k in costs], dtype=np.int64),
        np.array([k.util_length for k in costs], dtype=np.int64),
        np.array([k.fills for k in costs], dtype=np.float64),
        np.array([k.max_length for k in costs], dtype=np.int64),
        np.array([k.floor for k in costs], dtype=np.float64),
    )


def scheme_row(schemes: Schemes, k: int) -> Scheme:
    """The constants of scheme k as Python scalars."""
    c, max_length, util_length, pp, _, floor = schemes
    return Scheme(float(c[k]), int(max_length[k]), int(util_length[k]), float(pp[k]), float(floor[k]))


@dataclass(frozen=True)
class PipelineKinds:
    """A strategy as kinds of equal pipelines, largest MaxLen first.

    `rank_order[x]` is where pipeline x (kind by kind) stands among the strategy's pipelines in rank order.
    `num_ranks` (kinds,) is one pipeline's ranks: the prices to begin with. `exposed_ms` is what the strategy's messages
    add to a step, whatever its sequences: strategies are compared by the sum.

    Example: 2*tp1 + tp2 + tp1 in rank order, where tp2 holds more tokens, are the kinds tp2 (one pipeline) and tp1
    (three); rank_order is (2, 0, 1, 3).
    """

    strategy: StrategyShape
    shape: Shape
    rank_order: tuple[int, ...]
    num_ranks: Floats
    exposed_ms: float = 0.0

    @classmethod
    def of(cls, strategy: StrategyShape, table: CostTable, exposed_ms: float = 0.0) -> PipelineKinds:
        """With costs of `CostTable.for_strategies`. PlanError when the table has none for a pipeline."""
        row = {(cost.scheme, cost.paces): index for index, cost in enumerate(table.costs)}
        keys = list(zip((one.cost_key for one in strategy.pipelines), table.slow.of(strategy), strict=True))
        for key in dict.fromkeys(keys):
            if key not in row:
                raise PlanError(f"strategy {str(strategy)!r}: {_unknown(table, key[0])}")
        return cls.by_rows(strategy, [row[key] for key in keys], table.costs, exposed_ms)

    @classmethod
    def by_rows(
        cls, strategy: StrategyShape, rows: Sequence[int], costs: Sequence[SchemeCost], exposed_ms: float = 0.0
    ) -> PipelineKinds:
        """`rows` says for each pipeline which of the costs are its own: pipelines of one row are of one kind."""
        # Largest MaxLen first, as Algorithm 1 wants it; equal ones in the table's order, so that plans do not vary.
        counts = Counter(rows)
        order = sorted(counts, key=lambda k: (-costs[k].max_length, k))
        scheme_of = np.array(order, dtype=np.int64)
        count = np.array([counts[k] for k in order], dtype=np.int64)
        ranks = np.array([costs[k].scheme.num_ranks for k in order], dtype=np.float64)
        rank_order = tuple(p for k in order for p, at in enumerate(rows) if at == k)
        return cls(strategy, Shape(scheme_of, count, np.repeat(scheme_of, count)), rank_order, ranks, exposed_ms)

    def __str__(self) -> str:
        return str(self.strategy)


def _unknown(table: CostTable, scheme: ParallelScheme | PipelineShape) -> str:
    try:
        table[scheme]
    except PlanError as error:
        return str(error)
    raise AssertionError(f"{scheme} is in the table")


@dataclass(frozen=True)
class Batch:
    """A step's sequences, longest first; position[i] is where sequence i stands in the step's batch.

    `merged` is for bounds only: runs of nearly equal lengths as copies of the shortest; few are as they are.
    """

    position: Ints
    items: Items
    merged: Items

    @property
    def size(self) -> int:
        return len(self.items.tokens)

    @classmethod
    def of(cls, lengths: Sequence[int], table: CostTable) -> Batch:
        return cls.by_rows(lengths, table.costs)

    @classmethod
    def by_rows(
        cls, lengths: Sequence[int], costs: Sequence[SchemeCost], more: Callable[[Ints], Floats] | None = None
    ) -> Batch:
        """Sequences of these lengths, with a row of work for each of the costs.

        `more` gives what else each row has to do for sequences of so many tokens, (rows, sequences) ms.
        """
        given = np.array(lengths, dtype=np.int64)
        position = np.argsort(-given, kind="stable").astype(np.int64)
        tokens = given[position]
        work = np.stack([cost.sequence_ms(tokens) for cost in costs])
        return cls._of_work(position, tokens, work if more is None else work + more(tokens))

    def with_work(self, work: Floats) -> Batch:
        """The same sequences with other work, (rows, sequences) ms."""
        return Batch._of_work(self.position, self.items.tokens, work)

    def with_more(self, more: Floats) -> Batch:
        """The same sequences with so much more to do, (rows, sequences) ms by their places in the step's batch."""
        # None are merged: one that is as long may have other loads.
        return Batch._of_work(self.position, self.items.tokens, self.items.work + more[:, self.position], merges=False)

    @classmethod
    def _of_work(cls, position: Ints, tokens: Ints, work: Floats, *, merges: bool = True) -> Batch:
        rates = (work / tokens).min(axis=1)
        items = merged = Items(work, tokens, np.ones_like(tokens), rates)
        if merges and len(tokens) > _EXACT_BOUND_ITEMS:
            last, count = _merge(tokens)
            merged = Items(np.ascontiguousarray(work[:, last]), tokens[last], count, rates)
        return cls(position, items, merged)


def _merge(tokens: Ints) -> tuple[Ints, Ints]:
    """Runs of lengths within _MERGE_WIDTH of each other: index of each run's shortest, and its size."""
    # The shortest of a run stands for all of it, so merged batches are never longer than real ones: bounds stay bounds.
    last: list[int] = []
    count: list[int] = []
    longest = 0.0
    for index, length in enumerate(tokens.tolist()):
        if last and longest <= length * _MERGE_WIDTH:
            last[-1] = index
            count[-1] += 1
        else:
            last.append(index)
            count.append(1)
            longest = length
    return np.array(last, dtype=np.int64), np.array(count, dtype=np.int64)


@dataclass(frozen=True)
class Assignment:
    """Sequences of a batch (longest first) on a strategy's pipelines (kind by kind), packed.

    owner[i] is sequence i's pipeline, bin_of[i] its micro-batch there; `ms` is the slowest pipeline's time.
    """

    kinds: PipelineKinds
    owner: Ints
    bin_of: Ints
    ms: float

    @property
    def step_ms(self) -> float:
        """With what the strategy's messages add."""
        return self.ms + self.kinds.exposed_ms


def check_sequences(sequence_ids: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both as tuples of ints; PlanError for a length that is no whole number of at least 1 token."""
    if len(sequence_ids) != len(lengths):
        raise PlanError(f"{len(sequence_ids)} sequence ids but {len(lengths)} lengths; give one length for each id")
    if not len(lengths):
        raise PlanError("the step has no sequence; check that tokens_per_step is at least one sequence long")
    ids: list[int] = []
    tokens: list[int] = []
    for index, (sequence, length) in enumerate(zip(sequence_ids, lengths, strict=True)):
        if isinstance(length, bool | np.bool_) or not isinstance(length, int | np.integer):
            raise PlanError(
                f"sequence {sequence} (position {index}): its length {length!r} is not a whole number of tokens"
            )
        if length < 1:
            raise PlanError(
                f"sequence {sequence} (position {index}) has length {length}: at least 1 token is needed; "
                "drop empty samples from the data"
            )
        ids.append(int(sequence))
        tokens.append(int(length))
    return tuple(ids), tuple(tokens)
