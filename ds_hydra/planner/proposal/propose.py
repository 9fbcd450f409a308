"""The candidate strategies of a training run, proposed from the lengths of its data. Pure: no torch.

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
simulated on all batches, and then to the subset. Both subsets are candidates, so the
wider space takes nothing away.

Chunked pipelines whose sequence parallelism reaches into a second node are a space of their own, around that without
them: with half as many shapes again a search of as many moves misses good layouts that it found before. So the larger
space begins with what the smaller one found, and keeps the better half of it.

Which schemes a model can be cut by at all, `plan.schemes.feasible_schemes` says: those get into a cost table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.lengths import sample_batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, proposed_schedules
from ds_hydra.pipe.shape import LayerRange, ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner.chunked import ChunkedSearch, Overheads
from ds_hydra.planner.chunked_space import ChunkedSpace
from ds_hydra.planner.exact.counts import scheme_of
from ds_hydra.planner.kernels.problem import Batch, Schemes, scheme_arrays
from ds_hydra.planner.proposal.pool import Counts, Pool
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node


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
) -> Pool:  # fmt: skip
    """A pool of strategies for these batches: steps 2 and 3 of [Note: proposal], from those that are known before."""
    batches = space.batches(sampled, job.num_ranks)
    pool = Pool(
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
    space: ChunkedShapes, job: _Job, pool: Pool, sampled: Sequence[np.ndarray], arrays: Schemes,
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
