"""Which pipelines are run for those of candidate strategies, fewer and smaller ones, and by which ranks. Pure.

What can go wrong in a stage depends on its kind: whether it is the first, one in the middle or the last, and its tensor
and sequence parallel degrees. Two middle stages alike are one kind, so tp2pp8 is checked as tp2pp3; a stage of
32 ranks is checked with fewer that divide the same heads, so tp4sp8 is checked as tp4sp2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import NamedTuple, TypeVar

from ds_hydra.pipe.placement import Pipeline, place_pipeline
from ds_hydra.pipe.schedules.list_walk import virtual_stage
from ds_hydra.pipe.schedules.registry import ranges_of, splits_backward
from ds_hydra.pipe.shape import (
    DEFAULT_SCHEDULE,
    V_SCHEDULE,
    LayerRange,
    ParallelScheme,
    PipelineShape,
    StageShape,
    StrategyShape,
)
from ds_hydra.zero_hetero.nodes import NodeSize, node_of, node_ranks

_RANKS_OF_STAGE = 8
_AT_A_TIME = 4  # runs that a rank does before another helps: they take as long as making a small model

Run = TypeVar("Run")

BASE = PipelineShape.of(ParallelScheme())


def stand_in(shape: PipelineShape) -> PipelineShape:
    """The pipeline that is run to check `shape`; its own stand-in. It says nothing of layers and devices."""
    stages = [_fewer_ranks(stage) for stage in shape.stages]
    middle = [stage for stage, _ in groupby(stages[1:-1])]
    return PipelineShape((*stages[:1], *middle, *stages[1:][-1:]), _schedule(shape))


def bare(shape: PipelineShape) -> PipelineShape:
    """All stages with their degrees, and nothing of layers and devices."""
    stages = (StageShape(stage.tp, stage.sp, ep=stage.ep) for stage in shape.stages)
    return PipelineShape(tuple(stages), _schedule(shape))


def _schedule(shape: PipelineShape) -> str:
    """The shape's schedule if it changes stages: a split backward does, and a V; any other only orders what they do."""
    if shape.parts > ranges_of(shape.schedule):
        return V_SCHEDULE
    return shape.schedule if splits_backward(shape.schedule) else DEFAULT_SCHEDULE


def _fewer_ranks(stage: StageShape) -> StageShape:
    tp = _divisor(stage.tp, _RANKS_OF_STAGE if stage.sp == 1 else _RANKS_OF_STAGE // 2)
    sp = _divisor(stage.sp, _RANKS_OF_STAGE // tp)
    return StageShape(tp, sp, ep={1: 1, stage.tp: tp}.get(stage.ep, tp * sp))


def _divisor(degree: int, limit: int) -> int:
    """The largest divisor within the limit; but a degree above 1 stays above 1."""
    divisors = [n for n in range(2, degree + 1) if degree % n == 0] or [1]
    return max((n for n in divisors if n <= limit), default=divisors[0])


def shapes_to_run(strategies: Iterable[StrategyShape], *, whole: bool = False) -> list[PipelineShape]:
    """Stand-ins of all pipelines, each once, cheapest first; first one rank alone, which shows what packing does.

    `whole` keeps all stages and ranks.
    """
    pipelines = {pipeline for strategy in strategies for pipeline in strategy.pipelines}
    chosen = {bare(pipeline) if whole else stand_in(pipeline) for pipeline in pipelines}
    return sorted(chosen | {BASE}, key=lambda shape: (shape.num_ranks, str(shape) != str(BASE), str(shape)))


def parts(shape: PipelineShape) -> dict[str, PipelineShape]:
    """Each degree of a pipeline alone, and a split backward, by name, to find out which a model cannot take."""
    widest = {name: max(getattr(stage, name) for stage in shape.stages) for name in ("tp", "sp", "ep")}
    # Experts that are spread somewhere are never cut by width.
    alone = {
        "tp": ParallelScheme(tp=widest["tp"], ep=widest["tp"] if widest["ep"] > 1 else 1),
        "pp": ParallelScheme(pp=shape.pp),
        "sp": ParallelScheme(sp=widest["sp"], ep=widest["sp"] if widest["ep"] > widest["tp"] else 1),
    }
    found = {name: PipelineShape.of(scheme) for name, scheme in alone.items() if scheme != BASE.scheme}
    split = PipelineShape(BASE.stages, _schedule(shape))
    return found if split == BASE else {**found, "schedule": split}


def num_layers(shapes: Iterable[PipelineShape]) -> int:
    """Layers of a copy on which all `shapes` can be run with stages of unequal depth: 4 or more."""
    return max(4, *(shape.parts * shape.pp + 1 for shape in shapes))


def copies_at_once(shapes: Iterable[PipelineShape]) -> int:
    """How often the parameters of a small model stand in memory while one of `shapes` is run.

    The model's values and gradients, the values and the sum of gradients in flat order, the values that ranks share,
    and the gradients of each rank: of tensor parallel ranks they are one copy, of sequence parallel ones each has its
    own.
    """
    return 5 + max((stage.sp for shape in shapes for stage in shape.stages), default=1)


def uneven_pipeline(shape: PipelineShape, layers: int) -> Pipeline:
    """A pipeline on ranks 0.. whose middle range of layers (the first of two) has the layers that are left over."""
    count = shape.parts * shape.pp
    depths = [1] * count
    depths[(count - 1) // 2] += layers - count
    ranges = [LayerRange(*ends) for ends in pairwise(accumulate(depths, initial=0))]
    held = [[ranges[virtual_stage(i, part, shape.pp)] for part in range(shape.parts)] for i in range(shape.pp)]
    stages = [replace(stage, layers=tuple(own)) for stage, own in zip(shape.stages, held, strict=True)]
    return place_pipeline(PipelineShape(tuple(stages), shape.schedule), 0, layers)


def spread_over(shapes: Iterable[PipelineShape]) -> int:
    """A number of experts that every `ep` divides."""
    return math.lcm(*(stage.ep for shape in shapes for stage in shape.stages))


def head_divisor(heads: int, kv_heads: int, shapes: Iterable[PipelineShape]) -> int:
    """By how much attention heads can be fewer in a copy, so that every degree divides them as before: a power of two.

    For each degree n: n divides the heads or not, is divided by the key/value heads or not, as with the model's own.
    """
    stages = {stage for shape in shapes for stage in shape.stages}
    degrees = {n for stage in stages for n in (stage.tp, stage.sp, stage.num_ranks)}

    def manner(factor: int) -> list[tuple[bool, bool, bool]]:
        return [
            (heads // factor % n == 0, kv_heads // factor % n == 0, n % (kv_heads // factor) == 0)
            for n in sorted(degrees)
        ]

    factor = 1
    while math.gcd(heads, kv_heads) % (2 * factor) == 0 and heads // factor > 8 and manner(2 * factor) == manner(1):
        factor *= 2
    return factor


class Team(NamedTuple):
    """Ranks that share the runs out among them, one run in turn to each."""

    ranks: tuple[int, ...]
    of_node: int  # at most so many on one node

    def share(self, rank: int, runs: Sequence[Run]) -> Sequence[Run]:
        """The runs of a rank."""
        return runs[self.ranks.index(rank) :: len(self.ranks)] if rank in self.ranks else []


def teams(num_ranks: int, node_size: NodeSize, num_runs: int) -> Iterator[Team]:
    """Who does the runs; then, for those that this team could not do, one rank of each node.

    The first team has as many ranks as there is work for, taken from the nodes in turn. Its ranks divide what a node
    may give, so that a model may be too large for them; alone on its node, a rank has all of it. With 6 ranks on nodes
    of 4 and 10 runs: ranks 0, 4 and 1, of which 0 and 1 share a node; then ranks 0 and 4.
    """
    nodes = list(node_ranks(num_ranks, node_size))
    in_turn = [rank for turn in zip_longest(*nodes) for rank in turn if rank is not None]
    helpful = max(1, min(num_ranks, -(-num_runs // _AT_A_TIME)))
    for size in dict.fromkeys((helpful, min(helpful, len(nodes)))):
        ranks = tuple(in_turn[:size])
        yield Team(ranks, max(Counter(node_of(rank, node_size) for rank in ranks).values()))
