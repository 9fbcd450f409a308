"""A cost table and strategies in; what each of their pipelines can run, and a bound on any plan, out. Pure: no torch.

[Note: chunked pipelines]
A pipeline under the list order, a V or not, is chunked: it takes whatever micro-batches fit its memory, so a long
sequence may be cut for it, and what it takes is known by simulation only. Its time is the work of its sequences and
some overhead: c of each micro-batch, and the fill and drain of its stages. The overhead hardly depends on which
sequences they are, but for long ones [Note: surcharges], so that dispatch needs no more of it than a number. With 2900
ms of work and an overhead of 440 ms, two sequences of 60 and 80 ms that change places with one of 150 make 2890 + 440
ms, in whatever micro-batches.

Other pipelines of the same strategy run whole sequences. They are packed as ever, and dispatched in the same way: their
overhead is c of each micro-batch, and a bubble.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.slow_ranks import Paces
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.cutting import longest_of, pipe_of
from ds_hydra.planner.kernels.arrays import Floats, Ints, Pipe, Schemes
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds
from ds_hydra.planner.kernels.protocol import Kernels
from ds_hydra.planner.long_sequences import Surcharges, again_ms, surcharges

_ANY_NUMBER = 1 << 40  # of tokens in a micro-batch, where only the overhead counts


def is_chunked(strategy: StrategyShape) -> bool:
    """Whether some pipeline of a strategy is."""
    return any(weighs(pipeline.schedule) for pipeline in strategy.pipelines)


class Row(NamedTuple):
    """One shape of pipelines."""

    shape: PipelineShape
    cost: SchemeCost
    pipe: Pipe | None  # None: it runs whole sequences by its own schedule
    longest: int  # tokens of the longest sequence that it holds
    long: Surcharges | None  # what long sequences cost besides; None: nothing


class ChunkedSpace:
    """The distinct pipelines of strategies as rows, and what searches want to know of all of them.

    Sequences are cut only where `slices` allows it and the shares of costs were measured. `layers`: of the model, which
    may be computed again where what lives at one time does not fit else; 0: none are. `exposed_ms`: what the messages
    of each strategy add to a step; none: nothing. PlanError as `CostTable`.
    """

    def __init__(
        self,
        table: CostTable,
        strategies: Sequence[StrategyShape],
        *,
        slices: bool,
        layers: int = 0,
        exposed_ms: Sequence[float] = (),
    ) -> None:
        self.strategies = tuple(strategies)
        self._slow = table.slow
        keys = dict.fromkeys(key for strategy in strategies for key in self._keys(strategy))
        self.rows = tuple(_row(shape, paces, table, slices, layers) for shape, paces in keys)
        self.costs = tuple(row.cost for row in self.rows)
        self._number = {(row.shape, row.cost.paces): k for k, row in enumerate(self.rows)}
        exposed = exposed_ms or [0.0] * len(self.strategies)
        self.kinds = tuple(self.kinds_of(one, ms) for one, ms in zip(self.strategies, exposed, strict=True))
        self._longest = np.array([row.longest for row in self.rows], dtype=np.int64)
        self.bounding = self._bounding()

    def kinds_of(self, strategy: StrategyShape, exposed_ms: float = 0.0) -> PipelineKinds:
        """A strategy of pipelines that are among the rows."""
        rows = [self._number[key] for key in self._keys(strategy)]
        return PipelineKinds.by_rows(strategy, rows, self.costs, exposed_ms)

    def _keys(self, strategy: StrategyShape) -> Iterator[tuple[PipelineShape, Paces]]:
        return zip(strategy.pipelines, self._slow.of(strategy), strict=True)

    def longest(self, kinds: PipelineKinds) -> int:
        """The longest sequence that a strategy holds, in tokens."""
        return int(self._longest[kinds.shape.scheme].max())

    def batch(self, lengths: Sequence[int]) -> Batch:
        """Sequences with the work of each row."""
        return Batch.by_rows(lengths, self.costs, self._again_ms)

    def share(self, batch: Batch, num_ranks: int) -> float:
        """A pipeline's share, in ms, of a batch's work on so many ranks, each sequence where it takes least of them."""
        work, ranks = batch.items.work, np.array([row.shape.num_ranks for row in self.rows])
        cheapest = np.where(batch.items.tokens <= self._longest[:, None], work * ranks[:, None], math.inf).min(axis=0)
        return float(cheapest[np.isfinite(cheapest)].sum()) / num_ranks

    def dealt(self, kernel: Kernels, batch: Batch, num_ranks: int) -> Batch:
        """A batch with the work that dispatch counts: that of long sequences with surcharges."""
        if not kernel.is_compiled:
            return batch
        share, work = self.share(batch, num_ranks), batch.items.work.copy()
        for k, row in enumerate(self.rows):
            if row.long is not None:
                work[k] += row.long.of(kernels.timing(kernel, row.shape.schedule), share, batch.items.tokens)
        return batch.with_work(work)

    def _again_ms(self, tokens: Ints) -> Floats:
        """The least that layers computed again take, for sequences of so many tokens: (rows, sequences) ms."""
        found = np.zeros((len(self.rows), len(tokens)))
        for k, row in enumerate(self.rows):
            if row.pipe is not None:
                found[k] = again_ms(row.pipe, tokens)
        return found

    def by_overhead(self, overhead: Floats) -> Schemes:
        """Costs for dispatch: a pipeline takes its work and its row's overhead, (rows,) ms."""
        return self.of_pipelines(np.arange(len(self.rows)), overhead)

    def of_pipelines(self, rows: Ints, overhead: Floats) -> Schemes:
        """The same for pipelines of these rows, each with an overhead of its own, (pipelines,) ms."""
        ones, longest = np.ones(len(rows), dtype=np.int64), self._longest[rows]
        return Schemes(overhead.copy(), _ANY_NUMBER * ones, ones, np.ones(len(rows)), longest, np.zeros(len(rows)))

    def _bounding(self) -> Schemes:
        """Costs for bounds and for packing."""
        # A stage computes all work of its sequences, and c for as many micro-batches as their tokens need at least.
        # That is the time of a single stage, so the bound on it holds for a chunked pipeline, whatever it cuts.
        return Schemes(
            np.array([cost.c for cost in self.costs], dtype=np.float64),
            np.array([cost.max_length for cost in self.costs], dtype=np.int64),
            np.array([cost.util_length for cost in self.costs], dtype=np.int64),
            np.array([row.cost.fills if row.pipe is None else 1.0 for row in self.rows], dtype=np.float64),
            self._longest,
            np.array([cost.floor for cost in self.costs], dtype=np.float64),
        )


def _row(shape: PipelineShape, paces: Paces, table: CostTable, slices: bool, layers: int) -> Row:
    cost, shares = table.paced(shape, paces), table.shares(shape)
    if not weighs(shape.schedule):
        return Row(shape, cost, None, int(cost.max_length), None)
    slices = slices and cost.shares is not None
    # A job that computes all layers again has none left for that: its shares say that they keep as much as ever.
    may = slices and layers > 0 and shares.recomputed < 1.0
    of_range = max(1, layers // (shape.pp * shape.parts)) if may else 0
    pipe = pipe_of(cost, shares, parts=shape.parts, slices=slices, layers=of_range)
    longest = longest_of(cost, shares, slices=slices, layers=shape.parts * of_range)
    return Row(shape, cost, pipe, longest, surcharges(pipe, longest))
