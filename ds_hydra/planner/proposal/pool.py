"""Strategies and their times on sampled batches: a pool that grows by proposals and exchanges. Pure: no torch.

What a pipeline costs is given as arrays: measured costs, or estimates where only a simulation could tell.

A strategy is counted here, not listed: with the schemes TP1, TP2 and TP4, (2, 1, 1) is 2*tp1 + tp2 + tp4. Counts make
neighbours easy to write down: (0, 2, 1) has the two TP1 exchanged for one more TP2, on the same eight ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.rank_order import fillings, most_used, ordered, stays_inside
from ds_hydra.planner.exact.counts import counts_by_milp, counts_to_strategy
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds, Prospect, Schemes
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import StrategySearch
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, node_ranks

Counts = tuple[int, ...]  # pipelines of each usable scheme
_NOT_HELD = 1e12  # ms on a batch that a strategy cannot hold: finite, so that means can still be compared


class Pool:
    """Strategies and their times on every sampled batch. `weights` (batches,) say how much each batch counts."""

    def __init__(
        self,
        shapes: Sequence[PipelineShape],
        costs: Sequence[SchemeCost],
        arrays: Schemes,
        *,
        num_ranks: int,
        batches: Sequence[Batch],
        weights: np.ndarray,
        exposed_ms: Sequence[float] = (),
        node_size: NodeSize = 8,
    ) -> None:
        self._shapes, self._costs, self._arrays = tuple(shapes), tuple(costs), arrays
        self._sizes = np.array([shape.num_ranks for shape in shapes], dtype=np.int64)
        self._row = {shape: k for k, shape in enumerate(self._shapes)}
        self._num_ranks, self._node_size = num_ranks, node_size
        self._inside = stays_inside(self._shapes, node_size)
        self._orders: dict[Counts, StrategyShape | None] = {}
        self._exposed = tuple(exposed_ms) or (0.0,) * len(self._shapes)
        self._weights = weights / weights.sum()
        self._batches = tuple(batches)
        options = PlannerOptions(effort=1, kernels="compiled")
        self._searches = [StrategySearch(arrays, options, batch) for batch in self._batches]
        self.times: dict[Counts, np.ndarray] = {}  # ms on each batch
        self._best = np.full(len(batches), math.inf)
        self._moves = self._exchanges()

    def kinds(self, counts: Counts) -> PipelineKinds:
        strategy = self.strategy(counts)
        rows = [self._row[shape] for shape in strategy.pipelines]
        return PipelineKinds.by_rows(strategy, rows, self._costs, self.exposed_ms(counts))

    def exposed_ms(self, counts: Counts) -> float:
        """What a strategy's messages add to a step: as much as those of its worst shape alone, about."""
        return max(ms for ms, count in zip(self._exposed, counts, strict=True) if count)

    def strategy(self, counts: Counts) -> StrategyShape:
        """So many pipelines of each shape, in rank order."""
        if self._inside:
            return counts_to_strategy(counts, self._shapes)
        found = self._ordered(counts)
        assert found is not None, "no strategy whose tensor parallel groups cross nodes gets into the pool"
        return found

    def _ordered(self, counts: Counts) -> StrategyShape | None:
        if counts not in self._orders:
            self._orders[counts] = ordered(counts_to_strategy(counts, self._shapes), self._node_size)
        return self._orders[counts]

    def _stands(self, counts: Counts) -> bool:
        """Whether the pipelines can stand so that tensor parallel groups stay inside nodes."""
        return self._inside or self._ordered(counts) is not None

    def time(self, counts: Counts, batch: int, worth: float) -> float:
        """Planned time on a batch in ms where the bound allows less than `worth`, else the bound.

        Most strategies are far off on most batches. There the bound says enough, for far less work.
        """
        kinds = self.kinds(counts)
        price, worth = kinds.num_ranks.copy(), worth - kinds.exposed_ms
        bound = self._searches[batch].bound(kinds, price, 6, 8)
        if bound >= worth:
            return bound + kinds.exposed_ms
        found = self._searches[batch].assign(kinds, Prospect(bound, price, worth))
        return found.step_ms if found else math.inf

    def counts(self, strategy: StrategyShape) -> Counts:
        """The counts of a strategy of this pool's shapes."""
        rows = [self._row[shape] for shape in strategy.pipelines]
        return tuple(np.bincount(rows, minlength=len(self._shapes)).tolist())

    def known(self) -> list[StrategyShape]:
        """All strategies that it has."""
        return [self.strategy(counts) for counts in self.times]

    def add(self, strategies: Iterable[Counts]) -> int:
        """Time strategies that are new to the pool on every batch; how many were."""
        fresh = [counts for counts in dict.fromkeys(strategies) if counts not in self.times]
        fresh = [counts for counts in fresh if self._stands(counts)]
        for counts in fresh:
            # Exact times matter near the best plan of a batch only: further off the bound will do.
            times = [self.time(counts, b, 1.02 * self._best[b]) for b in range(len(self._batches))]
            self.times[counts] = np.array(times)
            self._best = np.minimum(self._best, self.times[counts])
        return len(fresh)

    def homogeneous(self) -> list[Counts]:
        """Strategies of one scheme only, where it divides the ranks."""
        found = []
        for k, size in enumerate(self._sizes.tolist()):
            if self._num_ranks % size == 0:
                found.append(tuple(self._num_ranks // size if j == k else 0 for j in range(len(self._sizes))))
        return found

    def begin(self) -> list[Counts]:
        """What to begin with: homogeneous strategies, and some more where nodes are odd or there are none of these.

        PlanError where no pipelines use all ranks.
        """
        found = self.homogeneous()
        if self._inside and found:
            return found
        sizes, nodes = self._sizes.tolist(), [len(node) for node in node_ranks(self._num_ranks, self._node_size)]
        found += fillings(sizes, self._num_ranks, self._node_size, nodes)
        if not any(map(self._stands, found)):
            used, on = most_used(sizes, self._num_ranks), " and ".join(map(str, dict.fromkeys(nodes)))
            spare = self._num_ranks - used
            why = f"{spare} of them would be spare" if spare else "tensor parallel groups would lie on two nodes"
            raise PlanError(
                f"no strategy uses all {self._num_ranks} ranks on nodes of {on}: "
                f"{why}, as pipelines of the cost table have {', '.join(map(str, sorted(set(sizes))))} ranks; measure "
                f"schemes of other sizes, such as tp1 or pp3, or start {used or sizes[0]} ranks"
            )
        return found

    def whole_numbers(self, batch: int, node_limit: int) -> list[Counts]:
        """HiGHS's strategies for one batch, at a few target times around the continuous optimum.

        The optimum of whole pipelines is some way above it, nobody knows how far.
        """
        found = []
        for slack in (1.02, 1.15, 1.4):
            counts = counts_by_milp(self._batches[batch], self._arrays, self._sizes, self._num_ranks, slack, node_limit)
            if counts is not None:
                found.append(counts)
        return found

    def _exchanges(self) -> list[Counts]:
        """Changes of the counts that keep the number of ranks: some pipelines of one scheme for some of others.

        Of two schemes as few as have the same ranks: three of 2 ranks for two of 3. Of three schemes one for one each
        of two others, where their ranks add up: one of 4 for one of 3 and one of 1.
        """
        n, sizes = len(self._sizes), self._sizes.tolist()
        found: dict[Counts, None] = {}

        def note(change: dict[int, int]) -> None:
            found[tuple(change.get(k, 0) for k in range(n))] = None

        for a in range(n):
            for b in range(n):
                if a == b:
                    continue
                shared = math.lcm(sizes[a], sizes[b])
                note({a: -shared // sizes[a], b: shared // sizes[b]})
                for c in range(b + 1, n):
                    if c != a and sizes[b] + sizes[c] == sizes[a]:
                        note({a: -1, b: 1, c: 1})
                        note({a: 1, b: -1, c: -1})
        return list(found)

    def neighbours(self, counts: Counts, rng: np.random.Generator, most: int) -> list[Counts]:
        """Strategies one exchange away, once or a power of two times; a random choice of `most` of them."""
        found: dict[Counts, None] = {}
        for change in self._moves:
            times = 1  # 1, 2, 4, ...: a few long strides reach what single steps would need many rounds for
            while True:
                after = tuple(x + times * y for x, y in zip(counts, change, strict=True))
                if min(after) < 0:
                    break
                found[after] = None
                times *= 2
        listed = [after for after in found if after not in self.times and self._stands(after)]
        if len(listed) > most:
            listed = [listed[i] for i in sorted(rng.choice(len(listed), size=most, replace=False))]
        return listed

    def climb(self, moves: int, seed: int) -> bool:
        """One round: the two best neighbours of every batch's best strategy join the pool. False if none is better."""
        rng = np.random.default_rng(seed)
        better: dict[Counts, None] = {}
        for b in range(len(self._batches)):
            best = min(self.times, key=lambda counts: float(self.times[counts][b]))
            ranked = []
            for counts in self.neighbours(best, rng, moves):
                ms = self.time(counts, b, float(self._best[b]))
                if ms < self._best[b] * (1.0 - 1e-4):
                    ranked.append((ms, counts))
            better.update((counts, None) for _, counts in sorted(ranked)[:2])
        return self.add(better) > 0

    def winners(self) -> list[StrategyShape]:
        """The best strategy of every batch."""
        best = [min(self.times, key=lambda counts: float(self.times[counts][b])) for b in range(len(self._batches))]
        return [self.strategy(counts) for counts in best]

    def promising(self, some: Sequence[Counts], within: float) -> list[Counts]:
        """Those whose mean time is within so many times the least of all."""
        means = {counts: float(np.minimum(ms, _NOT_HELD) @ self._weights) for counts, ms in self.times.items()}
        return [counts for counts in some if means[counts] <= within * min(means.values())]

    def settle(self, times: Mapping[Counts, np.ndarray]) -> None:
        """Keep only these strategies, with these times, (batches,) ms each."""
        self.times = dict(times)
        self._best = np.minimum.reduce(list(self.times.values()))

    def best_subset(self, count: int, kinds: int | None = None, begin: Sequence[Counts] = ()) -> list[Counts]:
        """Greedy choice of the strategies with the least mean time, each batch run by its best; of those with at most
        so many `kinds` of pipelines, and beside those that it shall `begin` with."""
        times = {c: ms for c, ms in self.times.items() if kinds is None or np.count_nonzero(c) <= kinds}
        return greedy_subset(times, self._weights, count, begin)

    def cover(self, chosen: list[Counts], context_length: int, count: int) -> list[Counts]:
        """Make sure that some strategy holds the context length, at the price of the least useful one."""
        limits = self._arrays.longest.tolist()

        def holds(counts: Counts) -> bool:
            return any(x and limit >= context_length for x, limit in zip(counts, limits, strict=True))

        if any(holds(counts) for counts in chosen):
            return chosen
        able = [counts for counts in self.times if holds(counts)]
        if not able:
            raise PlanError(
                f"no strategy over {self._num_ranks} ranks holds a sequence of context_length={context_length} tokens; "
                "measure schemes whose ranks divide the job's"
            )
        fallback = min(able, key=lambda counts: float(self.times[counts].mean()))
        return [*chosen[: count - 1], fallback]


def greedy_subset(
    times: dict[Counts, np.ndarray], weights: np.ndarray, count: int, begin: Sequence[Counts] = ()
) -> list[Counts]:
    """Repeatedly the strategy that lowers the weighted mean of the batchwise minimum most, after those of `begin`.

    When none lowers it, the next layer begins as if nothing were chosen yet: strategies to fall back on for
    batches unlike the sampled ones.

    Example: three strategies take (10, 30), (30, 10) and (18, 18) ms on two batches that count alike. The third has the
    least mean, 18. Beside it either of the others lowers the mean to (10 + 18) / 2 = 14. All three give 10.
    """
    names = list(times)
    table = np.minimum(np.stack([times[name] for name in names]), _NOT_HELD)
    chosen = [index for index, name in enumerate(names) if name in set(begin)]
    current = np.min([np.full(table.shape[1], _NOT_HELD), *table[chosen]], axis=0)
    layer = len(chosen)
    while len(chosen) < min(count, len(names)):
        means = np.minimum(table, current) @ weights
        means[chosen] = math.inf
        best = int(means.argmin())
        if layer and means[best] >= current @ weights * (1.0 - 1e-6):
            current, layer = np.full(table.shape[1], _NOT_HELD), 0
            continue
        chosen.append(best)
        layer += 1
        current = np.minimum(current, table[best])
    return [names[index] for index in chosen]
