"""The search over pipelines that run sequences in slices, timed by simulation. Pure: no torch.

[Note: chunked search]
Four steps, see [Note: chunked pipelines] for what an overhead is:

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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.loads import Counted
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner.chunked_space import AGAIN, ChunkedSpace, PipelineTimes, Timed
from ds_hydra.planner.composing import Composed, Composer
from ds_hydra.planner.kernels.dispatch import empty_placement
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.problem import (
    LEAN,
    Batch,
    Floats,
    Ints,
    Items,
    PipelineKinds,
    Problem,
    Prospect,
    SearchEffort,
    Shape,
)

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
