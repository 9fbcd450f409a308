"""The search over strategies whose pipelines may cut sequences, timed by simulation. Pure: no torch.

[Note: chunked pipelines]
A pipeline under the list order, a V or not, is chunked: it takes whatever micro-batches fit its memory, so a long
sequence may be cut for it, and what it takes is known by simulation only. Its time is the work of its sequences and
some overhead: c of each micro-batch, and the fill and drain of its stages. The overhead hardly depends on which
sequences they are, but for long ones [Note: surcharges], so that dispatch needs no more of it than a number. With 2900
ms of work and an overhead of 440 ms, two sequences of 60 and 80 ms that change places with one of 150 make 2890 + 440
ms, in whatever micro-batches.

Other pipelines of the same strategy run whole sequences. They are packed as ever, and dispatched in the same way: their
overhead is c of each micro-batch, and a bubble.

[Note: chunked search]
Five steps, see [Note: chunked pipelines] for what an overhead is:

1. One typical pipeline of each row is searched. That tells its overhead, and which profiles suit it.
2. Every strategy is dispatched with these overheads, which is cheap, and strategies are ranked by the times.
3. The pipelines of the first ones, of most strategies that are worth it, are searched and simulated. The mean over a
   strategy's pipelines tells how good it will be: what the slowest one takes more is mostly gone in the end.
4. By what each pipeline of the most promising strategies really takes, sequences are dispatched again, a few times.
5. The two best plans are refined where they are slowest: other micro-batches, and exchanges of sequences, simulated.

With estimates alone, strategies of many kinds of pipelines look best, by 1 % (32B on 64 GPUs, web lengths): the
estimate is a mean over their kinds, and less wrong for equal pipelines, which win in three batches of four.

A try is one cut and its simulation, and a step has a budget of tries: a third of it for step 3, a fifth for step 4, the
rest for step 5. So the same batch gives the same plan on every machine.

Where HiGHS composes strategies that promise more, the search goes on with these: steps 3 and 4 for the new ones, step 5
for the two best of all. Else tries that only the new ones have would often have made more of the candidates' own plan.

Only the slowest pipeline counts. Its micro-batches are changed a little while that helps; then it gives a sequence to
another pipeline, or changes one with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.loads import Counted
from ds_hydra.costs.shares import Paces
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.composing import Composed, Composer
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
from ds_hydra.planner.kernels.dispatch import empty_placement
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.problem import (
    LEAN,
    Batch,
    Floats,
    Ints,
    Items,
    Pipe,
    PipelineKinds,
    Problem,
    Profile,
    Prospect,
    Schemes,
    SearchEffort,
    Shape,
    scheme_row,
)

_ANY_NUMBER = 1 << 40  # of tokens in a micro-batch, where only the overhead counts


class ShapeRow(NamedTuple):
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


def _row(shape: PipelineShape, paces: Paces, table: CostTable, slices: bool, layers: int) -> ShapeRow:
    cost, shares = table.paced(shape, paces), table.shares(shape)
    if not weighs(shape.schedule):
        return ShapeRow(shape, cost, None, int(cost.max_length), None)
    slices = slices and cost.shares is not None
    # A job that computes all layers again has none left for that: its shares say that they keep as much as ever.
    may = slices and layers > 0 and shares.recomputed < 1.0
    of_range = max(1, layers // (shape.pp * shape.parts)) if may else 0
    pipe = pipe_of(cost, shares, parts=shape.parts, slices=slices, layers=of_range)
    longest = longest_of(cost, shares, slices=slices, layers=shape.parts * of_range)
    return ShapeRow(shape, cost, pipe, longest, surcharges(pipe, longest))


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


_UNEVEN = 0.3  # of what the slowest pipeline takes more than the mean stays when a plan is refined
_EARLIER = 2  # plans before the best one that are told
_EXCHANGES = 6  # that are simulated for the slowest pipeline at a time


class Chunked(NamedTuple):
    """Sequences of a batch (longest first) on a strategy's pipelines (kind by kind), with what each takes."""

    kinds: PipelineKinds
    owner: Ints
    timed: tuple[Timed, ...]

    @property
    def ms(self) -> float:
        """Of the step: its slowest pipeline, and what the strategy's messages add."""
        return max(one.ms for one in self.timed) + self.kinds.exposed_ms

    @property
    def promise(self) -> float:
        """What it may come near to when sequences change places: between the mean and the slowest pipeline (ms)."""
        mean = sum(one.ms for one in self.timed) / len(self.timed) + self.kinds.exposed_ms
        return _UNEVEN * self.ms + (1.0 - _UNEVEN) * mean

    @property
    def alone(self) -> float:
        """What the slowest pipeline takes that has but one sequence and so can give none away, and messages (ms)."""
        ms = np.array([one.ms for one in self.timed])
        return float(ms[np.bincount(self.owner, minlength=len(ms)) == 1].max(initial=0.0)) + self.kinds.exposed_ms


def refined(found: Chunked, times: PipelineTimes, spare: int = 0, turn: int = 0) -> list[Chunked]:
    """Better micro-batches for the slowest pipeline, or an exchange of sequences, while more than `spare` tries are
    left: the last few plans on the way, the best one last. What is drawn at random is another from another `turn` on.
    """
    owner, timed, rows = found.owner.copy(), list(found.timed), found.kinds.shape.pipeline_scheme
    stuck, latest = False, [found]
    while times.left > spare and not stuck:
        turn += 1
        slow = max(range(len(timed)), key=lambda p: timed[p].ms)
        better = times.recut(int(rows[slow]), timed[slow], times.seed + turn)
        if better is not None:
            timed[slow] = better
        elif not _exchange(times, rows, slow, owner, timed, spare):
            # Where no other pipeline has room, better micro-batches of theirs make some.
            stuck = not _recut_others(times, rows, slow, timed)
        if not stuck:
            latest = [*latest[-_EARLIER:], Chunked(found.kinds, owner.copy(), tuple(timed))]
    return latest


def _recut_others(times: PipelineTimes, rows: Ints, slow: int, timed: list[Timed]) -> bool:
    """Better micro-batches for pipelines that are not the slowest; whether any were found."""
    found = False
    for p in range(len(timed)):
        better = None if p == slow else times.recut(int(rows[p]), timed[p], times.seed + times.left)
        if better is not None:
            timed[p], found = better, True
    return found


def _exchange(times: PipelineTimes, rows: Ints, slow: int, owner: Ints, timed: list[Timed], spare: int) -> bool:
    """Move or swap a sequence of the slowest pipeline, if that makes a plan sooner done; whether it did."""
    for i, q, j in _promising(times, rows, slow, owner, timed):
        after = owner.copy()
        after[i] = q
        if j >= 0:
            after[j] = slow
        both = [times.timed(int(rows[p]), np.flatnonzero(after == p), AGAIN) for p in (slow, q)]
        if max(one.ms for one in both) < timed[slow].ms * (1.0 - 1e-6):
            owner[:] = after
            timed[slow], timed[q] = both
            return True
        if times.left <= spare:
            break
    return False


def _promising(
    times: PipelineTimes, rows: Ints, slow: int, owner: Ints, timed: list[Timed]
) -> list[tuple[int, int, int]]:
    """Moves of i from the slowest pipeline to q (j = -1), and swaps with j of q, the most promising first.

    A pipeline's overhead is taken to stay as it is.
    """
    items, ms = times.batch.items, np.array([one.ms for one in timed])
    longest = np.array([row.longest for row in times.space.rows])
    own, others = np.flatnonzero(owner == slow), np.flatnonzero(owner != slow)
    here = items.work[rows[slow]]
    found: list[tuple[float, int, int, int]] = []
    for i in own.tolist():
        fits = items.tokens[i] <= longest[rows]
        after = np.maximum(ms[slow] - here[i], ms + items.work[rows, i])
        after[~fits] = math.inf
        after[slow] = math.inf
        q = int(after.argmin())
        found.append((float(after[q]), i, q, -1))
        if not len(others):
            continue
        there = owner[others]
        swapped = np.maximum(
            ms[slow] - here[i] + here[others],
            ms[there] + items.work[rows[there], i] - items.work[rows[there], others],
        )
        swapped[~fits[there] | (items.tokens[others] > longest[rows[slow]])] = math.inf
        at = int(swapped.argmin())
        found.append((float(swapped[at]), i, int(there[at]), int(others[at])))
    promising = sorted(row for row in found if row[0] < ms[slow])
    return [(i, q, j) for _, i, q, j in promising[:_EXCHANGES]]


_LOOKS = 0.7  # of the tries are left when no more strategies are simulated as they are dispatched first
_SETTLING = 0.5  # of the tries are left when no more of them are dispatched again, in
_ROUNDS = 2  # rounds of dispatch and simulation
_REFINED = 2  # strategies
_RATING = 120  # tries for each pipeline of a strategy that is rated: with none, one of few looks 2 % too slow
_HOPELESS = 1.06  # a strategy whose dispatch takes so much longer than the best plan is not simulated
_OTHER_NUMBERS = 1 << 16  # from one search's seeds to those of the next
_LEARNT = 0.7  # of an overhead comes from the last simulation
_FEW_PIPELINES = 40  # up to here each pipeline has an overhead of its own
_RANKING = SearchEffort(restarts=2, moves=20_000, levels=0, repackings=0, packs=False)
_DISPATCH = SearchEffort(restarts=2, moves=50_000, levels=0, repackings=0, packs=False)


@dataclass
class Overheads:
    """What pipelines of each row take besides their work: means over what was seen, (rows,) each."""

    total: Floats  # ms
    count: Floats

    @classmethod
    def none(cls, rows: int) -> Overheads:
        return cls(np.zeros(rows), np.zeros(rows))

    @property
    def ms(self) -> Floats:
        """(rows,) ms; 0 for a row that was never seen."""
        return self.total / np.maximum(self.count, 1.0)

    def add(self, other: Overheads) -> None:
        self.total += other.total
        self.count += other.count


class ChunkedSearch:
    """One step's search over strategies with chunked pipelines [Note: chunked search]."""

    def __init__(
        self, space: ChunkedSpace, kernel: Kernels, batch: Batch, *, num_ranks: int, tries: int, seed: int = 0,
        simplest: float = 0.0, loads: Counted | None = None,
    ) -> None:  # fmt: skip
        """`loads` are what sequences take besides their tokens, by their places in the step's batch."""
        self._space, self._kernel, self._batch, self._seed = space, kernel, batch, seed
        self._dealt, self._share = space.dealt(kernel, batch, num_ranks), space.share(batch, num_ranks)
        self._bounding, self._bounded, more = space.bounding, batch.merged, None
        if loads is not None:
            self._dealt, more = self._dealt.with_more(loads.usual), loads.usual[:, batch.position]
            # Without drains, in which a first stage does what it has to do besides.
            self._bounding = self._bounding._replace(pp=np.ones(len(space.rows)))
            self._bounded = batch.with_more(loads.least).items
        self._times = PipelineTimes(space, kernel, batch, tries=tries, seed=seed, more=more)
        self._tries, self._simplest = tries, simplest
        self._turns = 0  # searches before this one, which draw other numbers
        self._best: list[Chunked] = []  # of all strategies that were refined
        self._earlier: dict[StrategyShape, list[Chunked]] = {}  # of these, the last plans before the best one
        self.known: Overheads | None = None  # once `best_of` has seen some

    def best_of(self, kinds: Sequence[PipelineKinds], count: int = 1) -> list[Chunked]:
        """The best plans found over these strategies: up to so many, each of another strategy, best first; none where
        no strategy holds all sequences. Where several are wanted, the best strategy's last plans before its best one
        follow: they take hardly longer, but their messages may add less."""
        self.known = self.probes(kinds)
        ranked = self._searched(kinds)
        found = ranked[:count]
        near = [one for one in ranked if one.ms <= (1.0 + self._simplest) * ranked[0].ms]
        found += [one for one in near[count:] if _num_shapes(one) < min(map(_num_shapes, found))][:1]
        return [*found, *self._earlier.get(found[0].kinds.strategy, [])] if found and count > 1 else found

    def beside(self, kinds: Sequence[PipelineKinds], tries: int) -> list[Chunked]:
        """The search goes on with so many tries for further strategies of rows that `best_of` has seen, and for the
        best ones that it found: better plans of either, each of another strategy, best first."""
        self._tries = self._times.left = tries
        self._turns += 1
        return self._searched(kinds)

    def _searched(self, kinds: Sequence[PipelineKinds]) -> list[Chunked]:
        assert self.known is not None, "overheads are known before strategies are ranked"
        looked, found = self._looked_at(kinds, self.known), list(self._best)
        for one in _most_promising(looked):
            if found and self._times.left < _SETTLING * self._tries:
                break
            found.append(self._settled(one, self.known.ms))
        best = self._to_refine(_most_promising(found))
        for number, one in enumerate(best):
            spare = self._times.left * (len(best) - number - 1) // (len(best) - number)
            *self._earlier[one.kinds.strategy], last = refined(one, self._times, spare, self._turns * _OTHER_NUMBERS)
            found.append(last)
        of_strategy = {one.kinds.strategy: one for one in sorted(found, key=lambda one: -one.ms)}
        by_ms = list(reversed(of_strategy.values()))
        self._best = by_ms[:_REFINED]
        return by_ms

    def _to_refine(self, ranked: Sequence[Chunked]) -> list[Chunked]:
        """The most promising plans, the simplest of those that may become as good among them."""
        near = [one for one in ranked if one.promise <= (1.0 + 2.0 * self._simplest) * ranked[0].promise]
        simple = min(near, key=lambda one: _num_shapes(one), default=None)
        if simple is None or not self._simplest or _num_shapes(simple) >= min(map(_num_shapes, ranked[:_REFINED])):
            return list(ranked[:_REFINED])
        return [*ranked[: _REFINED - 1], simple]

    def observe(self, kinds: PipelineKinds, overhead: Floats) -> Overheads:
        """The overheads that a strategy's pipelines really have when it is dispatched by these ones, (rows,)."""
        found = self._dispatched_first(kinds, overhead)
        return self._seen(found) if found else Overheads.none(len(overhead))

    def rated(self, kinds: PipelineKinds, overhead: Floats) -> float:
        """What a strategy promises to take when it is dispatched by these overheads, (rows,), and refined a little;
        ms."""
        found = self._dispatched_first(kinds, overhead)
        if found is None:
            return math.inf
        found = refined(found, self._times, self._times.left - _RATING * len(found.timed))[-1]
        return max(found.promise, found.alone)

    def _dispatched_first(self, kinds: PipelineKinds, overhead: Floats) -> Chunked | None:
        """A strategy as it is dispatched by these overheads, simulated; None where it does not hold all sequences."""
        ranked = self._ranked([kinds], overhead)
        found = self._simulated(kinds, ranked[0][2]) if ranked else None
        return found if found and math.isfinite(found.ms) else None

    def _seen(self, found: Chunked) -> Overheads:
        """One observation for each row of a plan: the mean over its pipelines."""
        seen, rows = Overheads.none(len(self._space.rows)), found.kinds.shape.pipeline_scheme
        taken = np.array([one.ms for one in found.timed]) - self._work(rows, found.owner)
        for k in np.unique(rows):
            seen.total[k], seen.count[k] = taken[rows == k].mean(), 1.0
        return seen

    def _work(self, rows: Ints, owner: Ints) -> Floats:
        """(pipelines,) ms that dispatch counts for the sequences of each pipeline, whose rows are `rows`."""
        return np.array([self._dealt.items.work[k][owner == p].sum() for p, k in enumerate(rows)])

    def bound(self, strategies: Sequence[PipelineKinds]) -> float:
        """No step under any of these strategies is sooner done (ms)."""
        least = math.inf
        for kinds in strategies:
            problem = Problem(self._bounding, self._bounded, kinds.shape)
            bound = self._kernel.strategy_bound(problem, 4, 8, kinds.num_ranks.copy())
            least = min(least, bound + kinds.exposed_ms)
        return least

    def composed(self, composer: Composer, best_ms: float, known: Collection[str]) -> Composed:
        """What HiGHS composes of the rows whose overheads `best_of` has seen; arguments as `Composer.compose`."""
        assert self.known is not None, "overheads are known once candidates were searched"
        shapes = {k: self._space.rows[k].shape for k in np.flatnonzero(self.known.count).tolist()}
        return composer.compose(self._dealt, self._space.by_overhead(self.known.ms), shapes, best_ms, known)

    def promising(self, kinds: Sequence[PipelineKinds], best: PipelineKinds, share: float) -> list[PipelineKinds]:
        """Strategies that are dispatched in less than this share of the time of the best one, by what was seen."""
        assert self.known is not None, "overheads are known once candidates were searched"
        ranked = {number: ms for ms, number, _ in self._ranked([best, *kinds], self.known.ms)}
        most = share * ranked.get(0, math.inf)
        return [one for number, one in enumerate(kinds, 1) if ranked.get(number, math.inf) < most]

    # 1. what each row's pipelines cost besides their work

    def probes(self, kinds: Sequence[PipelineKinds]) -> Overheads:
        """Overheads of the rows that these strategies have, one typical pipeline each."""
        found = Overheads.none(len(self._space.rows))
        for k in sorted({int(k) for one in kinds for k in one.shape.scheme}):
            found.total[k], found.count[k] = self._times.probe(k, self._share, self._dealt.items.work[k]), 1.0
        return found

    # 2. ranking

    def _ranked(self, kinds: Sequence[PipelineKinds], overhead: Floats) -> list[tuple[float, int, Ints]]:
        """(ms, number of the strategy, owner of each sequence), the soonest done first."""
        schemes = self._space.by_overhead(overhead)
        found: list[tuple[float, int, Ints]] = []
        for number, one in enumerate(kinds):
            price = one.num_ranks.copy()
            bound = self._kernel.strategy_bound(Problem(schemes, self._dealt.merged, one.shape), 2, 6, price)
            if math.isinf(bound) or (found and bound + one.exposed_ms > _HOPELESS * min(found)[0]):
                continue
            place = empty_placement(self._batch.size, len(one.rank_order))
            problem, prospect = Problem(schemes, self._dealt.items, one.shape), Prospect(bound, price, math.inf)
            effort = _RANKING if self._kernel.is_compiled else LEAN._replace(packs=False)
            ms = float(self._kernel.dispatch(problem, prospect, effort, self._seed, place))
            if math.isfinite(ms):
                found.append((ms + one.exposed_ms, number, place.owner))
        return sorted(found, key=lambda row: row[:2])

    @staticmethod
    def _ranked_again(
        ranked: list[tuple[float, int, Ints]], kinds: Sequence[PipelineKinds], more: Floats
    ) -> list[tuple[float, int, Ints]]:
        """The same strategies when each row's overhead is so much more, (rows,) ms.

        Dispatch would spread the change over all ranks, so a strategy takes longer by its mean over them.
        """
        found = []
        for ms, number, owner in ranked:
            one = kinds[number]
            ranks = one.num_ranks * one.shape.pipelines
            found.append((ms + float(ranks @ more[one.shape.scheme]) / float(ranks.sum()), number, owner))
        return sorted(found, key=lambda row: row[:2])

    # 3. a first simulation

    def _looked_at(self, kinds: Sequence[PipelineKinds], known: Overheads) -> list[Chunked]:
        """Strategies as they are dispatched at first, simulated; what is seen is added to `known`."""
        found: list[Chunked] = []
        ranked = self._ranked(kinds, known.ms)
        while ranked and (not found or self._times.left > _LOOKS * self._tries):
            ms, number, owner = ranked.pop(0)
            if found and ms > _HOPELESS * min(one.promise for one in found):
                break
            before = known.ms
            found.append(self._simulated(kinds[number], owner))
            if math.isfinite(found[-1].ms):
                known.add(self._seen(found[-1]))
                ranked = self._ranked_again(ranked, kinds, known.ms - before)
        return found

    def _simulated(self, kinds: PipelineKinds, owner: Ints) -> Chunked:
        rows = kinds.shape.pipeline_scheme
        timed = tuple(self._times.timed(int(k), np.flatnonzero(owner == p)) for p, k in enumerate(rows))
        return Chunked(kinds, owner, timed)

    # 4. dispatch and simulation in turn

    def _settled(self, first: Chunked, overhead: Floats) -> Chunked:
        """The most promising of a few rounds of dispatch, by what was simulated before, and simulation."""
        kinds, rows = first.kinds, first.kinds.shape.pipeline_scheme
        own_overhead, best, found = overhead[rows], first, first
        for _ in range(_ROUNDS):
            if 4 * self._times.left < self._tries:
                break
            work, ms = self._work(rows, found.owner), np.array([one.ms for one in found.timed])
            seen = (work > 0.0) & np.isfinite(ms)
            own_overhead = np.where(seen, (1 - _LEARNT) * own_overhead + _LEARNT * (ms - work), own_overhead)
            owner = self._dispatched(kinds, own_overhead, found.ms - kinds.exposed_ms)
            if owner is None:
                break
            found = self._simulated(kinds, owner)
            best = min(best, found, key=lambda one: one.promise)
        return best

    def _dispatched(self, kinds: PipelineKinds, overhead: Floats, before: float) -> Ints | None:
        """Owners by the overhead of each pipeline, (pipelines,) ms; None where a sequence finds no place."""
        rows, items = kinds.shape.pipeline_scheme, self._dealt.items
        place = empty_placement(self._batch.size, len(rows))
        if len(rows) > _FEW_PIPELINES:
            means = np.zeros(len(self._space.rows))
            for k in kinds.shape.scheme:
                means[k] = overhead[rows == k].mean()
            schemes, shape, price = self._space.by_overhead(means), kinds.shape, kinds.num_ranks.copy()
        else:
            # Each pipeline is a kind of its own.
            each, ones = np.arange(len(rows)), np.ones(len(rows), dtype=np.int64)
            schemes = self._space.of_pipelines(rows, overhead)
            items = Items(items.work[rows], items.tokens, items.copies, items.rates[rows])
            shape, price = Shape(each, ones, each), np.repeat(kinds.num_ranks, kinds.shape.pipelines)
        # No bound is known for these overheads; dispatch only wants to know from where on to look.
        prospect = Prospect(0.8 * before if math.isfinite(before) else 0.0, price, math.inf)
        ms = self._kernel.dispatch(Problem(schemes, items, shape), prospect, _DISPATCH, self._seed, place)
        return place.owner if math.isfinite(ms) else None


def _num_shapes(found: Chunked) -> int:
    return len(set(found.kinds.strategy.pipelines))


def _most_promising(found: list[Chunked]) -> list[Chunked]:
    """Those that hold all sequences, the most promising first."""
    return sorted((one for one in found if math.isfinite(one.ms)), key=lambda one: one.promise)
