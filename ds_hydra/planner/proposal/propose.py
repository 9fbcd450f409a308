"""Lengths of the data in, the candidate strategies of a training run out. Pure: no torch.

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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.length_sources import sample_batches
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner.exact.counts import scheme_of
from ds_hydra.planner.kernels.arrays import Schemes
from ds_hydra.planner.proposal.candidates import usable_schemes
from ds_hydra.planner.proposal.pool import Counts, Pool
from ds_hydra.planner.proposal.spaces import ChunkedShapes, Space, WholeSpace
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node


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
