"""What pipelines can run with sequences in slices: times by simulation, and a bound on any plan. Pure: no torch.

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
from ds_hydra.costs.shares import Paces
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.cutting import (
    Cutting,
    Effort,
    Surcharges,
    again_ms,
    cut_best,
    improved,
    longest_of,
    pipe_of,
    profiles_of,
    surcharges,
)
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.problem import Batch, Floats, Ints, Pipe, PipelineKinds, Profile, Schemes, scheme_row

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


FIRST = Effort(variations=3, moves=0)  # of a pipeline in a strategy that may be no good
AGAIN = Effort(variations=6, moves=24)  # of one in the best plan
_PROBE = Effort(variations=6, moves=0)
_NEAR_PROFILES = 5  # that are tried for a row after its probe
_MOST = 0.5  # of a pipeline's work
_LEVEL_ROUNDS = 40
_MOVES = 60  # small changes of a pipeline's micro-batches at a time


class Timed(NamedTuple):
    """What a pipeline takes with some sequences, and how: its cutting, or the micro-batch of each whole sequence."""

    ms: float
    cutting: Cutting | None = None
    bins: Ints | None = None


class PipelineTimes:
    """What pipelines of a space's rows take with sequences of one batch, which are longest first.

    `left` is how many tries are left of those given; nothing here stops at 0. `more` (rows, sequences) ms is what each
    sequence takes besides, in whatever micro-batches [Note: loads].
    """

    def __init__(
        self, space: ChunkedSpace, kernel: Kernels, batch: Batch, *, tries: int, seed: int, more: Floats | None = None
    ) -> None:
        self.space, self.batch, self.left, self.seed, self._more = space, batch, tries, seed, more
        self._kernel = kernel
        self._known: dict[tuple[int, bytes], Timed] = {}
        self._profiles: dict[int, tuple[Profile, ...]] = {}

    def probe(self, k: int, share: float, counted: Floats) -> float:
        """The overhead of a pipeline of row k with `share` ms of work: every so many of the sequences that it holds.

        counted (sequences,) is what dispatch counts for each sequence, in ms.
        """
        row, items = self.space.rows[k], self.batch.items
        if row.pipe is not None and not self._kernel.is_compiled:
            return self._estimate(k, share)
        held = np.flatnonzero(items.tokens <= row.longest)
        stride = max(1.0, float(items.work[k][held].sum()) / share)
        at = ((np.arange(math.ceil(len(held) / stride)) + 0.5) * stride).astype(np.int64)
        own = held[at[at < len(held)]]
        if not len(own):
            own = held[-1:]
        if row.pipe is None:
            return self._search(k, own, _PROBE).ms - float(counted[own].sum())
        profiles = profiles_of(row.pipe, items.tokens[own])
        cutting = self._cut(k, own, profiles, _PROBE) if len(own) else None
        if cutting is None:
            return float(row.cost.c * row.shape.pp)
        by_time = sorted(zip(cutting.profiles_us, range(len(profiles)), strict=True))
        self._profiles[k] = (cutting.profile, *(profiles[index] for _, index in by_time[:_NEAR_PROFILES]))
        return cutting.us / 1e3 + self._besides(k, own) - float(counted[own].sum())

    def _besides(self, k: int, own: Ints) -> float:
        return 0.0 if self._more is None else float(self._more[k][own].sum())

    def _estimate(self, k: int, share: float) -> float:
        """An overhead without a simulation: c of some equal micro-batches, and forwards of the first one as fill."""
        row = self.space.rows[k]
        fill = (row.shape.pp - 1) / row.shape.parts / 3
        return min(v * row.cost.c + fill * (share / v + row.cost.c) for v in range(1, 33))

    def _cut(self, k: int, own: Ints, profiles: Sequence[Profile], effort: Effort) -> Cutting | None:
        pipe, items = self.space.rows[k].pipe, self.batch.items
        assert pipe is not None, "only chunked pipelines are cut"
        self.left -= len(profiles) + effort.variations + effort.moves
        work, tokens = items.work[k][own], items.tokens[own]
        kernel = kernels.timing(self._kernel, self.space.rows[k].shape.schedule)
        return cut_best(kernel, pipe, work, tokens, profiles=profiles, effort=effort, seed=self.seed)

    def timed(self, k: int, own: Ints, effort: Effort = FIRST) -> Timed:
        """What a pipeline of row k takes with these sequences; infinite where they do not fit."""
        if not len(own):
            return Timed(0.0)
        key = (k, own.tobytes())
        before = self._known.get(key)
        if before is None or effort is not FIRST:
            found = self._search(k, own, effort)
            self._known[key] = found if before is None or found.ms < before.ms else before
        return self._known[key]

    def _search(self, k: int, own: Ints, effort: Effort) -> Timed:
        if (pipe := self.space.rows[k].pipe) is not None:
            tokens, lean = self.batch.items.tokens[own], not self._kernel.is_compiled
            profiles = profiles_of(pipe, tokens, lean=True) if lean else self._near_profiles(k, own)
            cutting = self._cut(k, own, profiles or profiles_of(pipe, tokens), Effort(0, 0) if lean else effort)
            if cutting is None and lean:
                cutting = self._cut(k, own, profiles_of(pipe, tokens), Effort(0, 0))
            return Timed(math.inf) if cutting is None else Timed(cutting.us / 1e3 + self._besides(k, own), cutting)
        items, bins = self.batch.items, np.zeros(len(own), dtype=np.int64)
        scheme = scheme_row(self.space.bounding, k)
        _, ms, _, _ = self._kernel.pack(scheme, items.work[k][own], items.tokens[own], _LEVEL_ROUNDS, bins)
        return Timed(float(ms) + self._besides(k, own), None, bins)

    def _near_profiles(self, k: int, own: Ints) -> tuple[Profile, ...] | None:
        """What suited a typical pipeline of row k; None, for all, where it is not known or one sequence is most of the
        work: that takes up to a tenth longer by those that suit many."""
        work = self.batch.items.work[k][own]
        return None if work[0] > _MOST * work.sum() else self._profiles.get(k)

    def recut(self, k: int, timed: Timed, seed: int) -> Timed | None:
        """The same sequences in better micro-batches; None where none were found."""
        shape, pipe = self.space.rows[k].shape, self.space.rows[k].pipe
        if pipe is None or timed.cutting is None:
            return None
        self.left -= _MOVES
        cutting = improved(kernels.timing(self._kernel, shape.schedule), pipe, timed.cutting, moves=_MOVES, seed=seed)
        ms = cutting.us / 1e3 + (timed.ms - timed.cutting.us / 1e3)
        return Timed(ms, cutting) if cutting.us < 0.9995 * timed.cutting.us else None
