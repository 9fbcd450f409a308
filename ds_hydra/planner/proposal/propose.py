"""Lengths of the data in, the candidate strategies of a training run out (Hydraulis, section 7). Pure: no torch.

[Note: proposal]
Sampled batches stand for the data, so a batch whose longest sequence is L contains one, and bubbles count. For
each: whole numbers of pipelines by HiGHS on the continuous problem (with u = 1/tau it is linear), then hill
climbing on the certified bound. The pool of all of these is reduced greedily to the subset with the least mean
time over all sampled batches, each batch run by its best strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.length_sources import sample_batches
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner.kernels.arrays import Prospect
from ds_hydra.planner.kernels.problem import Batch, Groups, scheme_arrays
from ds_hydra.planner.one_strategy import StrategySearch
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.proposal.by_milp import counts_by_milp
from ds_hydra.planner.proposal.candidates import counts_to_schemes, usable_schemes
from ds_hydra.zero_hetero.errors import PlanError

Counts = tuple[int, ...]  # pipelines of each usable scheme


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a proposal may do; all are counts, so that the result does not depend on the machine."""

    batches: int  # sampled
    milp_batches: int  # of these, solved by HiGHS
    node_limit: int  # of each HiGHS solution
    rounds: int  # of hill climbing over all batches
    moves: int  # neighbours looked at per batch and round


_USUAL_BATCH = 200  # sequences; where batches are larger, fewer are sampled, as each costs more and differs less
_FEWEST_BATCHES = 4
_BATCHES_PER_STRATUM = 4  # drawn for each typical batch that is kept
_RARE_WEIGHT = 0.01  # of a batch with a longer sequence than any typical one, against all typical ones
QUICK = Effort(batches=12, milp_batches=6, node_limit=20, rounds=2, moves=60)
THOROUGH = Effort(batches=192, milp_batches=24, node_limit=100, rounds=10, moves=200)


def _typical_batches(
    lengths: Sequence[int], tokens_per_step: int, count: int, seed: int, context_length: int
) -> list[np.ndarray]:
    """Batches that stand for many more: those at even ranks of the longest sequence."""
    drawn = sample_batches(lengths, tokens_per_step, _BATCHES_PER_STRATUM * count, seed, context_length)
    count = min(count, max(_FEWEST_BATCHES, count * _USUAL_BATCH // max(len(batch) for batch in drawn)))
    drawn.sort(key=lambda batch: int(batch.max()))
    return [drawn[int((rank + 0.5) * len(drawn) / count)] for rank in range(count)]


def _rare_batches(common: Sequence[np.ndarray], limits: Sequence[int]) -> list[np.ndarray]:
    """A median batch with its longest sequence as long as some scheme can hold, where no typical batch is as long.

    They make sure that every length up to the context has a strategy that was chosen for it.
    """
    median, longest = common[len(common) // 2], int(common[-1].max())
    rare = []
    for limit in limits:
        if limit > longest:
            batch = median.copy()
            batch[int(batch.argmax())] = limit
            rare.append(batch)
    return rare


def propose_strategies(
    cost_table: CostTable,
    num_ranks: int,
    lengths: Sequence[int],
    tokens_per_step: int,
    context_length: int,
    *,
    node_size: int = 8,
    tp_across_nodes: bool = False,
    count: int = 20,
    effort: Effort = QUICK,
    seed: int = 0,
) -> tuple[tuple[ParallelScheme, ...], ...]:
    """Up to `count` strategies for data with these lengths [Note: proposal], the most useful first.

    One of them holds a sequence of `context_length` tokens; PlanError when no usable scheme does. Pipelines
    stand in rank order; TP groups stay inside nodes of `node_size` ranks unless `tp_across_nodes`.
    """
    schemes = usable_schemes(cost_table, num_ranks, node_size, tp_across_nodes)
    longest = max(cost_table[scheme].max_length for scheme in schemes)
    if longest < context_length:
        raise PlanError(
            f"no usable scheme holds a sequence of context_length={context_length} tokens: the largest MaxLen is "
            f"{longest}; measure schemes with more tp or sp, allow tp across nodes, or lower context_length"
        )
    common = _typical_batches(lengths, tokens_per_step, effort.batches, seed, context_length)
    limits = {cost_table[scheme].max_length for scheme in schemes}
    rare = _rare_batches(common, sorted({min(limit, context_length) for limit in limits}))
    sampled = [*common, *rare]
    weights = np.array([1.0] * len(common) + [_RARE_WEIGHT * len(common)] * len(rare))
    pool = _Pool(cost_table, schemes, num_ranks, sampled, weights)
    pool.add(pool.homogeneous())
    by_longest = sorted(range(len(sampled)), key=lambda b: int(sampled[b].max()))
    for turn in np.linspace(0, len(sampled) - 1, min(effort.milp_batches, len(sampled))):
        index = by_longest[round(turn)]
        pool.add(pool.whole_numbers(index, effort.node_limit))
    for round_number in range(effort.rounds):
        if not pool.climb(effort.moves, seed + round_number):
            break
    chosen = pool.best_subset(count)
    chosen = pool.cover(chosen, context_length, count)
    return tuple(counts_to_schemes(counts, schemes) for counts in chosen)


class _Pool:
    """Strategies and their times on every sampled batch."""

    def __init__(
        self,
        cost_table: CostTable,
        schemes: tuple[ParallelScheme, ...],
        num_ranks: int,
        sampled: Sequence[np.ndarray],
        weights: np.ndarray,
    ) -> None:
        self._table = CostTable(tuple(cost_table[scheme] for scheme in schemes))
        self._schemes = schemes
        self._sizes = np.array([scheme.num_ranks for scheme in schemes], dtype=np.int64)
        self._num_ranks = num_ranks
        self._weights = weights / weights.sum()
        self._batches = [Batch.of(batch.tolist(), self._table) for batch in sampled]
        arrays, options = scheme_arrays(self._table), PlannerOptions(effort=1, kernels="compiled")
        self._searches = [StrategySearch(arrays, options, batch) for batch in self._batches]
        self.times: dict[Counts, np.ndarray] = {}  # ms on each batch
        self._best = np.full(len(sampled), math.inf)
        self._moves = self._exchanges()

    def groups(self, counts: Counts) -> Groups:
        return Groups.of(counts_to_schemes(counts, self._schemes), self._table)

    def time(self, counts: Counts, batch: int, worth: float) -> float:
        """Planned time on a batch in ms where the bound allows less than `worth`, else the bound."""
        groups = self.groups(counts)
        price = groups.num_ranks.copy()
        bound = self._searches[batch].bound(groups, price, 6, 8)
        if bound >= worth:
            return bound
        found = self._searches[batch].assign(groups, Prospect(bound, price, worth))
        return found.ms if found else math.inf

    def add(self, strategies: Iterable[Counts]) -> int:
        """Time strategies that are new to the pool on every batch; how many were."""
        fresh = [counts for counts in dict.fromkeys(strategies) if counts not in self.times]
        for counts in fresh:
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

    def whole_numbers(self, batch: int, node_limit: int) -> list[Counts]:
        """HiGHS's strategies for one batch, at a few target times around the continuous optimum."""
        found = []
        for slack in (1.02, 1.15, 1.4):
            counts = counts_by_milp(self._batches[batch], self._table, self._sizes, self._num_ranks, slack, node_limit)
            if counts is not None:
                found.append(counts)
        return found

    def _exchanges(self) -> list[Counts]:
        """Changes of the counts that keep the number of ranks: some pipelines of one kind for some of others."""
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
            times = 1
            while True:
                after = tuple(x + times * y for x, y in zip(counts, change, strict=True))
                if min(after) < 0:
                    break
                found[after] = None
                times *= 2
        listed = [after for after in found if after not in self.times]
        if len(listed) > most:
            listed = [listed[i] for i in sorted(rng.choice(len(listed), size=most, replace=False))]
        return listed

    def climb(self, moves: int, seed: int) -> bool:
        """One round: the best neighbours of every batch's best strategy join the pool. False if none is better."""
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

    def best_subset(self, count: int) -> list[Counts]:
        """Greedy choice of the strategies with the least mean time, each batch run by its best."""
        return _greedy(self.times, self._weights, count)

    def cover(self, chosen: list[Counts], context_length: int, count: int) -> list[Counts]:
        """Make sure that some strategy holds the context length, at the price of the least useful one."""
        limits = [cost.max_length for cost in self._table.costs]

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


def _greedy(times: dict[Counts, np.ndarray], weights: np.ndarray, count: int) -> list[Counts]:
    """Repeatedly the strategy that lowers the weighted mean of the batchwise minimum most.

    When none lowers it, the next layer begins as if nothing were chosen yet: strategies to fall back on for
    batches unlike the sampled ones.
    """
    names = list(times)
    table = np.minimum(np.stack([times[name] for name in names]), 1e12)
    chosen: list[int] = []
    current = np.full(table.shape[1], 1e12)
    layer = 0
    while len(chosen) < min(count, len(names)):
        means = np.minimum(table, current) @ weights
        means[chosen] = math.inf
        best = int(means.argmin())
        if layer and means[best] >= current @ weights * (1.0 - 1e-6):
            current, layer = np.full(table.shape[1], 1e12), 0
            continue
        chosen.append(best)
        layer += 1
        current = np.minimum(current, table[best])
    return [names[index] for index in chosen]
