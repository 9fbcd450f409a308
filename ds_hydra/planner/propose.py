"""The candidate strategies of a training run, proposed from the lengths of its data. Pure: no torch.

A strategy is counted here, not listed: with the schemes TP1, TP2 and TP4, (2, 1, 1) is 2*tp1 + tp2 + tp4. Counts make
neighbours easy to write down: (0, 2, 1) has the two TP1 exchanged for one more TP2, on the same eight ranks. What a
pipeline costs is given as arrays: measured costs, or estimates where only a simulation could tell.

[Note: proposal]
Strategies are judged by sampled batches, not by the distribution of lengths as in the paper: a real batch has a
longest sequence, which must be on some pipeline as a whole, and its bubble counts. Four steps:

1. Batches are drawn, and those at even ranks of their longest sequence are kept: of 48 drawn, the 3rd, 7th, 11th,
   ... by longest sequence stand for all of them. Rare batches with longer sequences are added.
2. A pool of strategies begins with the homogeneous ones and, for some batches, whole numbers of pipelines by HiGHS.
3. Hill climbing adds neighbours of the best strategies: a few pipelines exchanged for others of the same ranks.
4. The pool is reduced greedily to the subset with the least mean time over all sampled batches, each batch run by its
   best strategy.

That is done twice where pipelines may be chunked: for whole sequences under 1F1B, and for chunked pipelines. Times of
the latter are estimates [Note: chunked pipelines]. So the pool is reduced twice: to a short list, whose strategies are
simulated on all batches, and then to the subset. Both subsets are candidates, so the wider space takes nothing away.

Chunked pipelines whose sequence parallelism reaches into a second node are a space of their own, around that without
them: with half as many shapes again a search of as many moves misses good layouts that it found before. So the larger
space begins with what the smaller one found, and keeps the better half of it.

Which schemes a model can be cut by at all, `plan.layouts.feasible_schemes` says: those get into a cost table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.lengths import sample_batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, proposed_schedules
from ds_hydra.pipe.shape import LayerRange, ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.layouts import fillings, most_used, ordered, stays_inside
from ds_hydra.planner.chunked import ChunkedSearch, ChunkedSpace, Overheads
from ds_hydra.planner.exact import counts_by_milp, counts_to_strategy, scheme_of
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds, Prospect, Schemes, scheme_arrays
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import StrategySearch
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node, node_ranks

Counts = tuple[int, ...]  # pipelines of each usable scheme
_NOT_HELD = 1e12  # ms on a batch that a strategy cannot hold: finite, so that means can still be compared


class StrategyPool:
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


def usable_schemes(
    cost_table: CostTable, num_ranks: int, node_size: NodeSize = 8, tp_across_nodes: bool = False
) -> tuple[ParallelScheme, ...]:
    """The cost table's schemes that fit the ranks and the placement rule, in the table's order."""
    usable = tuple(
        scheme
        for scheme in cost_table.schemes
        if scheme.num_ranks <= num_ranks and (tp_across_nodes or scheme.tp <= largest_node(node_size))
    )
    if not usable:
        raise PlanError(
            f"no scheme of the cost table fits {num_ranks} ranks in nodes of {node_size}: it has "
            f"{', '.join(map(str, cost_table.schemes))}; measure smaller schemes, or allow tp across nodes"
        )
    return usable


def by_list(pipeline: PipelineShape) -> PipelineShape:
    """The same stages under the list order."""
    return PipelineShape(pipeline.stages, "list")


def by_v(pipeline: PipelineShape) -> PipelineShape:
    """As many layers in each stage, half of them from each end of the model; by the list order alone where a stage has
    no layer for that."""
    held = [stage.layers[0].last - stage.layers[0].first for stage in pipeline.stages]
    if min(held) < 2:
        return by_list(pipeline)
    lower = [number // 2 for number in held]
    upper = [number - half for number, half in zip(held, lower, strict=True)]
    ends = list(itertools.pairwise(itertools.accumulate([*lower, *reversed(upper)], initial=0)))
    return PipelineShape(tuple(
        replace(stage, layers=(LayerRange(*ends[at]), LayerRange(*ends[-1 - at])))
        for at, stage in enumerate(pipeline.stages)
    ), "list")  # fmt: skip


_PROBED = 6  # batches from which overheads are estimated
_NO_LIMIT = 1 << 40  # tries


class Space(Protocol):
    """Shapes of pipelines with their costs, and the arrays of what dispatch counts for them."""

    shapes: tuple[PipelineShape, ...]
    costs: tuple[SchemeCost, ...]
    limits: tuple[int, ...]  # tokens of the longest sequence that each holds

    def batches(self, sampled: Sequence[np.ndarray], num_ranks: int) -> list[Batch]:
        """Batches with what dispatch counts for their sequences."""

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int) -> Schemes:
        """For these batches."""


class WholeSpace:
    """Whole sequences under 1F1B."""

    def __init__(self, table: CostTable, shapes: Sequence[PipelineShape]) -> None:
        self.shapes = tuple(shapes)
        self.costs = tuple(table[shape] for shape in shapes)
        self.limits = tuple(int(cost.max_length) for cost in self.costs)

    def batches(self, sampled: Sequence[np.ndarray], num_ranks: int) -> list[Batch]:
        return [Batch.by_rows(lengths.tolist(), self.costs) for lengths in sampled]

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int) -> Schemes:
        """What the cost table says."""
        return scheme_arrays(CostTable(self.costs))


class ChunkedShapes:
    """Shapes of which some are chunked [Note: chunked pipelines]; schemes of one stage may be among them.

    Their overheads are means over sampled batches, those of typical pipelines. A strategy takes longer by some percent,
    since its sequences do not divide evenly, and its slowest pipeline counts: the more pipelines, the longer.
    """

    def __init__(self, table: CostTable, shapes: Sequence[PipelineShape], *, slices: bool, layers: int = 0) -> None:
        self._space = ChunkedSpace(table, [StrategyShape((shape,)) for shape in shapes], slices=slices, layers=layers)
        self.shapes, self.costs = tuple(shapes), self._space.costs
        self.limits = tuple(row.longest for row in self._space.rows)

    def batches(self, sampled: Sequence[np.ndarray], num_ranks: int) -> list[Batch]:
        given = [self._space.batch(lengths.tolist()) for lengths in sampled]
        return [self._space.dealt(kernels.compiled(), batch, num_ranks) for batch in given]

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int) -> Schemes:
        space, count = self._space, min(_PROBED, len(sampled))
        known = Overheads.none(len(space.rows))
        for at in np.linspace(0, len(sampled) - 1, count):
            known.add(self._search(sampled[round(at)], num_ranks).probes(space.kinds))
        return space.by_overhead(known.ms)

    def corrected(self, arrays: Schemes, sampled: Sequence[np.ndarray], winners: Sequence[StrategyShape]) -> Schemes:
        """Better arrays, by a good strategy for each batch: half of what is known, half of what its pipelines take."""
        seen = Overheads.none(len(self.shapes))
        for lengths, strategy in zip(sampled, winners, strict=True):
            kinds = self._space.kinds_of(strategy)
            seen.add(self._search(lengths, strategy.num_ranks).observe(kinds, arrays.c))
        return self._space.by_overhead(np.where(seen.count > 0.0, 0.5 * (arrays.c + seen.ms), arrays.c))

    def simulated(self, strategy: StrategyShape, lengths: np.ndarray, arrays: Schemes) -> float:
        """What a strategy takes for a batch by a dispatch and simulations, a little refined; ms."""
        return self._search(lengths, strategy.num_ranks).rated(self._space.kinds_of(strategy), arrays.c)

    def _search(self, lengths: np.ndarray, num_ranks: int) -> ChunkedSearch:
        batch = self._space.batch(lengths.tolist())
        return ChunkedSearch(self._space, kernels.compiled(), batch, num_ranks=num_ranks, tries=_NO_LIMIT)


def wider_shapes(
    table: CostTable, schedules: Sequence[str] | None = None, num_layers: int | None = None
) -> tuple[PipelineShape, ...]:
    """The chunked pipelines that a proposal may use: each scheme with measured shares and more than one stage under
    those of the `schedules` (None: all that may be proposed) that weigh times.

    Of two schedules that differ in nothing but the ranges of layers in a stage it is the V where the model has layers
    for it: that has half of the fill of the plain one and the same work, so it is never worse.
    """
    weighing = [one for name in schedules or proposed_schedules() if (one := SCHEDULES[name]).weighs]
    found = []
    for scheme in table.schemes:
        if scheme.pp == 1 or table[scheme].shares is None:
            continue
        held = [one for one in weighing if num_layers is None or one.ranges * scheme.pp <= num_layers]
        best = {one.walk: one.name for one in sorted(held, key=lambda one: one.ranges)}
        found += [PipelineShape(PipelineShape.of(scheme).stages, name) for name in best.values()]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ProposalEffort:
    """How much work a proposal may do; all are counts, so that the result does not depend on the machine."""

    batches: int  # sampled
    milp_batches: int  # of these, solved by HiGHS
    node_limit: int  # of each HiGHS solution
    rounds: int  # of hill climbing over all batches
    moves: int  # neighbours looked at per batch and round
    corrections: int = 0  # of what chunked pipelines are estimated to take


@dataclass(frozen=True, slots=True)
class Wider:
    """What may be proposed besides whole sequences under 1F1B; `spaces.wider_shapes` makes the shapes."""

    shapes: tuple[PipelineShape, ...] = ()  # chunked pipelines
    slices: bool = True  # whether they may cut sequences
    layers: int = 32  # of the model, of which they may compute some again; 0: none
    plain: bool = True  # False: these only


_USUAL_BATCH = 200  # sequences; where batches are larger, fewer are sampled, as each costs more and differs less
_FEWEST_BATCHES = 4
_BATCHES_PER_STRATUM = 4  # drawn for each typical batch that is kept
_CORRECTING = 6  # batches by which estimates are corrected
_PROMISING = 1.15  # times the best mean: strategies of one kind that are simulated
_FEW_KINDS = 2  # of pipelines
_EXPOSED_RANKS = 64  # on which messages are simulated
_USUAL_RANKS = 128  # on more of them batches are larger and strategies more, and the quick effort takes seconds
_RARE_WEIGHT = 0.01  # of a batch with a longer sequence than any typical one, against all typical ones
QUICK = ProposalEffort(batches=12, milp_batches=6, node_limit=20, rounds=2, moves=60, corrections=3)
USUAL = ProposalEffort(batches=24, milp_batches=6, node_limit=20, rounds=4, moves=60)  # for whole sequences
THOROUGH = ProposalEffort(batches=192, milp_batches=24, node_limit=100, rounds=10, moves=200, corrections=3)


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
    node_size: NodeSize = 8,
    tp_across_nodes: bool = False,
    count: int = 20,
    effort: ProposalEffort | None = None,
    seed: int = 0,
    wider: Wider | None = None,
    exposed: Callable[[StrategyShape], float] | None = None,
) -> tuple[StrategyShape, ...]:
    """Up to `count` strategies for data with these lengths [Note: proposal], the most useful first.

    One of them holds a sequence of `context_length` tokens; PlanError when no usable scheme does. Pipelines
    stand in rank order; TP groups stay inside nodes of `node_size` unless `tp_across_nodes`. Up to as many more
    follow that have the chunked pipelines of `wider`. `exposed` tells what the messages of a strategy of one shape add
    to a step, in ms (`simulate.exposed`); None: nothing. `effort` None: what pays for so many ranks, more of it for
    whole sequences, which are planned in a hundredth of the time.
    """
    schemes = usable_schemes(cost_table, num_ranks, node_size, tp_across_nodes)
    holding = _holding(cost_table, schemes, wider or Wider(), context_length, node_size)
    usual = USUAL if num_ranks <= _USUAL_RANKS else QUICK
    added = _by_shape(holding, num_ranks, exposed)
    job = _Job(num_ranks, lengths, tokens_per_step, context_length, seed, count, added, node_size)
    found: list[StrategyShape] = []
    chunked: tuple[StrategyShape, ...] = ()
    for space in holding:
        if isinstance(space, ChunkedShapes):
            chunked = _chosen(space, job, effort or QUICK, chunked)
        else:
            found += _chosen(space, job, effort or usual, ())
    return tuple(dict.fromkeys([*found, *chunked]))


class _Job(NamedTuple):
    """What strategies are proposed for; `added` is what messages add to a step, in ms, by shape."""

    num_ranks: int
    lengths: Sequence[int]
    tokens_per_step: int
    context_length: int
    seed: int
    most: int  # strategies
    added: Mapping[PipelineShape, float]
    node_size: NodeSize


def _chosen(
    space: Space, job: _Job, effort: ProposalEffort, before: Sequence[StrategyShape]
) -> tuple[StrategyShape, ...]:
    """The strategies of one space, best first; of those that a smaller one has chosen `before` the first half stays."""
    # 1. batches, and what each of them counts
    common = _typical_batches(job.lengths, job.tokens_per_step, effort.batches, job.seed, job.context_length)
    rare = _rare_batches(common, sorted({min(limit, job.context_length) for limit in space.limits}))
    sampled = [*common, *rare]
    weights = np.array([1.0] * len(common) + [_RARE_WEIGHT * len(common)] * len(rare))
    arrays, begin = space.arrays(sampled, job.num_ranks), list(before)
    if isinstance(space, ChunkedShapes):
        few = [sampled[round(at)] for at in np.linspace(0, len(sampled) - 1, min(_CORRECTING, len(sampled)))]
        for turn in range(1 if before else effort.corrections):
            # Later turns know what HiGHS has found, and a smaller space has had it, too.
            programs = 0 if begin else effort.milp_batches
            tried = _searched(space, job, effort, few, np.ones(len(few)), arrays, begin=begin, programs=programs)
            begin = list(dict.fromkeys([*begin, *tried.winners(), *(tried.known() if turn == 0 else ())]))
            arrays = space.corrected(arrays, few, tried.winners())
    pool = _searched(space, job, effort, sampled, weights, arrays, begin=begin, programs=effort.milp_batches)
    kept = [pool.counts(strategy) for strategy in before]
    if isinstance(space, ChunkedShapes):
        _simulate(space, job, pool, sampled, arrays, kept)
    # 4. the subset, in which some strategy must hold the context
    chosen = pool.best_subset(job.most, begin=kept[: job.most // 2])
    return tuple(pool.strategy(counts) for counts in pool.cover(chosen, job.context_length, job.most))


def _holding(
    table: CostTable, schemes: Sequence[ParallelScheme], wider: Wider, context_length: int, node_size: NodeSize
) -> list[Space]:
    """The spaces in which something holds the context, a smaller one before that around it; PlanError for none."""
    spaces: list[Space] = []
    if wider.plain:
        spaces.append(WholeSpace(table, [PipelineShape.of(scheme) for scheme in schemes]))
    chunked = [shape for shape in wider.shapes if scheme_of(shape) in schemes]
    if chunked:
        chunked = [*(PipelineShape.of(scheme) for scheme in schemes if scheme.pp == 1), *chunked]
        inside = [shape for shape in chunked if shape.pp == 1 or _width(shape) <= largest_node(node_size)]
        nested = [inside, chunked] if any(shape.pp > 1 for shape in inside) and inside != chunked else [chunked]
        spaces += [ChunkedShapes(table, shapes, slices=wider.slices, layers=wider.layers) for shapes in nested]
    if not spaces:
        raise PlanError(
            "no pipeline may be proposed: without 1f1b the cost table needs schemes of several stages with measured "
            "shares; allow 1f1b, or measure them with `ds-hydra profile`"
        )
    holding = [space for space in spaces if max(space.limits) >= context_length]
    if not holding:
        less = min(table.shares(scheme).recomputed for scheme in schemes) < 1.0
        again = 'have all layers computed again ("activation_checkpointing": true), ' if less else ""
        raise PlanError(
            f"no usable scheme holds a sequence of context_length={context_length} tokens: the largest MaxLen is "
            f"{max(max(space.limits) for space in spaces)}; measure schemes with more tp or sp, allow tp across nodes, "
            f"{again}or lower context_length"
        )
    return holding


def _width(shape: PipelineShape) -> int:
    """Ranks of a stage."""
    scheme = scheme_of(shape)
    return scheme.tp * scheme.sp


def _by_shape(
    spaces: Sequence[Space], num_ranks: int, exposed: Callable[[StrategyShape], float] | None
) -> dict[PipelineShape, float]:
    """What messages add where all pipelines have one shape, on some of the ranks: that differs little from all."""
    shapes = dict.fromkeys(shape for space in spaces for shape in space.shapes)
    if exposed is None:
        return dict.fromkeys(shapes, 0.0)
    ranks = min(num_ranks, _EXPOSED_RANKS)
    return {shape: exposed(StrategyShape((shape,) * max(1, ranks // shape.num_ranks))) for shape in shapes}


def _searched(
    space: Space, job: _Job, effort: ProposalEffort,
    sampled: Sequence[np.ndarray], weights: np.ndarray, arrays: Schemes, *,
    begin: Sequence[StrategyShape], programs: int,
) -> StrategyPool:  # fmt: skip
    """A pool of strategies for these batches: steps 2 and 3 of [Note: proposal], from those that are known before."""
    batches = space.batches(sampled, job.num_ranks)
    pool = StrategyPool(
        space.shapes, space.costs, arrays, num_ranks=job.num_ranks, batches=batches, weights=weights,
        exposed_ms=[job.added[shape] for shape in space.shapes], node_size=job.node_size,
    )  # fmt: skip
    # 2. the pool to begin with: HiGHS solves batches at even ranks of their longest sequence
    pool.add([*pool.begin(), *map(pool.counts, begin)])
    by_longest = sorted(range(len(sampled)), key=lambda b: int(sampled[b].max()))
    for turn in np.linspace(0, len(sampled) - 1, min(programs, len(sampled))):
        index = by_longest[round(turn)]
        pool.add(pool.whole_numbers(index, effort.node_limit))
    # 3. hill climbing
    for round_number in range(effort.rounds):
        if not pool.climb(effort.moves, job.seed + round_number):
            break
    return pool


def _simulate(
    space: ChunkedShapes, job: _Job, pool: StrategyPool, sampled: Sequence[np.ndarray], arrays: Schemes,
    kept: Sequence[Counts],
) -> None:  # fmt: skip
    """Leave a short list in the pool, and the `kept` ones, with what simulations say that they take for each batch.

    An estimate may be off by more than what good strategies differ by, and so the winner of few batches by chance.
    """
    # Estimates are too low by 1 % or 2 % more for pipelines of many kinds: those of few would not come so far, least of
    # all those of one, of which there are not many.
    most = job.most * 5 // 4
    listed = pool.cover(pool.best_subset(most), job.context_length, most)
    of_few = pool.best_subset(most // 3, kinds=_FEW_KINDS)
    simulated = {
        counts: np.array([space.simulated(pool.strategy(counts), batch, arrays) for batch in sampled])
        + pool.exposed_ms(counts)
        for counts in dict.fromkeys([*listed, *of_few, *pool.promising(pool.homogeneous(), _PROMISING), *kept])
    }
    pool.settle(simulated)
