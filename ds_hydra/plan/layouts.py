"""Which schemes a model can be cut by, and an order of pipelines that keeps tensor parallel groups in nodes. Pure.

Pipelines stand on consecutive ranks [Note: rank order], so their order alone decides which groups lie within a node.
Widest first does on nodes of 2, 4, 8 ... ranks. On two nodes of 7, 2*tp4 + 2*tp2 + 2*tp1 in that order would put the
second tp4 on ranks 4 to 7, of which the last is on the other node; tp4 + tp2 + tp1 + tp4 + tp2 + tp1 keeps all inside.

Where there is a choice, nodes hold pipelines of one kind: a kind that is alone on a node brings all that it holds into
it for itself [Note: twins]. On nodes of 7 and 8, tp4 + 2*tp2 + 7*tp1 stand as 7*tp1 + tp4 + 2*tp2, and not as tp4 + tp2
+ tp1 + tp2 + 6*tp1, where each node has to pull all parameters for two kinds or three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_hydra.pipe.head_sharing import head_parts, near_ranks
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node, node_of, node_ranks

_MOST_PLACES = 20_000  # of pipelines that are looked at for one order


class CrossingGroup(NamedTuple):
    """A tensor parallel group on more nodes than its ranks need."""

    pipeline: int
    ranks: range

    def __str__(self) -> str:
        return f"the ranks {self.ranks[0]}..{self.ranks[-1]} of a tensor parallel group of pipeline {self.pipeline}"


def crossings(strategy: StrategyShape, node_size: NodeSize) -> Iterator[CrossingGroup]:
    """The tensor parallel groups that lie on more nodes than they must."""
    first = 0
    for index, pipeline in enumerate(strategy.pipelines):
        yield from (CrossingGroup(index, ranks) for ranks in _groups(pipeline, first) if _crosses(ranks, node_size))
        first += pipeline.num_ranks


def ordered(strategy: StrategyShape, node_size: NodeSize) -> StrategyShape | None:
    """The same pipelines, in the first order found in which no group crosses; as they are, if none does; None if no
    order is found."""
    if next(crossings(strategy, node_size), None) is None:
        return strategy
    kinds = Counter(strategy.pipelines)
    shapes = list(kinds)
    nodes = {ranks.start: len(ranks) for ranks in node_ranks(strategy.num_ranks, node_size)}
    left, chosen, at = [kinds[shape] for shape in shapes], list[int](), 0

    def candidates() -> list[int]:
        """Kinds in the order in which they are tried next, the first one last."""
        if at not in nodes:
            return sorted(range(len(shapes)), key=lambda kind: (kind == chosen[-1], -kind))
        filling = [
            nodes[at] <= left[kind] * shape.num_ranks and nodes[at] % min(nodes[at], shape.num_ranks) == 0
            for kind, shape in enumerate(shapes)
        ]
        return sorted(range(len(shapes)), key=lambda kind: (filling[kind], -kind))

    # Depth first. How many of each kind are left says where the next one stands, so what led nowhere once leads nowhere
    # again.
    turn, dead, looked = [candidates()], set[tuple[int, ...]](), 0
    while turn:
        if len(chosen) == len(strategy.pipelines):
            return StrategyShape(tuple(shapes[kind] for kind in chosen))
        looked += 1
        if not turn[-1] or tuple(left) in dead or looked > _MOST_PLACES:
            dead.add(tuple(left))
            turn.pop()
            if chosen:
                back = chosen.pop()
                left[back] += 1
                at -= shapes[back].num_ranks
            continue
        kind = turn[-1].pop()
        if left[kind] and not any(_crosses(ranks, node_size) for ranks in _groups(shapes[kind], at)):
            left[kind] -= 1
            at += shapes[kind].num_ranks
            chosen.append(kind)
            turn.append(candidates())
    return None


def stays_inside(shapes: Sequence[PipelineShape], node_size: NodeSize) -> bool:
    """Whether widest first keeps the groups of any of these pipelines inside nodes: where all widths are powers of two.

    The last node may have any number of ranks: what is left for it is as wide as what stands before it, or narrower.
    """
    widths = {stage.tp for shape in shapes for stage in shape.stages}
    return isinstance(node_size, int) and all(width & (width - 1) == 0 for width in (*widths, node_size))


def fillings(sizes: Sequence[int], num_ranks: int, node_size: NodeSize, nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """Some numbers of pipelines with these ranks each that use all ranks: as many of one kind as can be, beside as few
    others as can be; and as few as can be on each of the `nodes`, which have so many ranks. None if nothing does."""
    fewest = _fewest(sizes, max(num_ranks, largest_node(node_size)))
    found: dict[tuple[int, ...], None] = {}
    for kind, size in enumerate(sizes):
        for count in range(num_ranks // size, 0, -1):
            rest = fewest[num_ranks - count * size]
            if rest is not None:
                found[tuple(more + count * (k == kind) for k, more in enumerate(rest))] = None
                break
    each = [fewest[node] for node in nodes]
    if all(counts is not None for counts in each):
        found[tuple(map(sum, zip(*(counts for counts in each if counts is not None), strict=True)))] = None
    return list(found)


def most_used(sizes: Sequence[int], num_ranks: int) -> int:
    """The most ranks, of so many, that pipelines with these ranks each can use."""
    fewest = _fewest(sizes, num_ranks)
    return next(used for used in range(num_ranks, -1, -1) if fewest[used] is not None)


def _fewest(sizes: Sequence[int], most: int) -> list[tuple[int, ...] | None]:
    """For 0, 1, ... `most` ranks the fewest pipelines that use just these, as counts; None where none do."""
    found: list[tuple[int, ...] | None] = [(0,) * len(sizes)]
    for ranks in range(1, most + 1):
        before = [(k, counts) for k, size in enumerate(sizes)
                  if size <= ranks and (counts := found[ranks - size]) is not None]  # fmt: skip
        more = [tuple(count + (j == k) for j, count in enumerate(counts)) for k, counts in before]
        found.append(min(more, key=sum, default=None))
    return found


def _groups(pipeline: PipelineShape, first: int) -> Iterator[range]:
    """The tensor parallel groups of a pipeline that begins with this rank."""
    for stage in pipeline.stages:
        for _ in range(stage.sp):
            yield range(first, first + stage.tp)
            first += stage.tp


def _crosses(ranks: range, node_size: NodeSize) -> bool:
    needed = -(-len(ranks) // largest_node(node_size))
    return node_of(ranks[-1], node_size) - node_of(ranks[0], node_size) >= needed


MOST_SHARING = 16
"""TP * SP at most where several nodes share heads: all-to-alls over more ranks are dearer than what they save."""
MOST_NODES = 4
"""Nodes of a stage at most where they share queries alone, and of the one stage of a pipeline."""


def feasible_schemes(plan: ModelPlan, num_ranks: int, node_size: NodeSize) -> tuple[ParallelScheme, ...]:
    """Every scheme of up to `num_ranks` ranks that the model can be cut by.

    TP stays inside a node, and so does TP * SP, or it fills two nodes of up to 16 ranks together: a long sequence on a
    stage of two nodes needs half of the memory on each rank, and attention hides much of the messages between them.
    Where nodes share queries and not heads, a pipeline of one stage may fill up to four.
    """
    node = min(largest_node(node_size), num_ranks)
    schemes: list[ParallelScheme] = []
    for tp in range(1, node + 1):
        for sp in _sequence_degrees(tp, node, num_ranks):
            for pp in range(1, min(num_ranks // (tp * sp), plan.num_layers) + 1):
                # Experts are cut by width, or spread as whole ones: a plan is for one of the two.
                each = (ParallelScheme(tp, pp, sp, ep) for ep in sorted({1, tp, tp * sp}))
                schemes += [scheme for scheme in each if _fits(plan, scheme, node)]
    return tuple(schemes)


def _fits(plan: ModelPlan, scheme: ParallelScheme, node: int) -> bool:
    try:
        plan.check(place_strategy(StrategyShape.of([scheme]), scheme.num_ranks, plan.num_layers))
    except PlanError:
        return False
    sharing, sp, near = scheme.tp * scheme.sp, scheme.sp, near_ranks(scheme.sp, scheme.tp, node)
    heads = plan.num_heads, plan.num_kv_heads, scheme.tp if plan.heads_cut else 1
    if sharing <= max(node, MOST_SHARING) and (not plan.num_heads or head_parts(sp, *heads) == sp):
        return True
    # Keys and values of a token then go to a rank of each node; to several of a node they go only where asked.
    return scheme.pp == 1 and plan.num_heads > 0 and 0 < near == head_parts(sp, *heads, near=near)


def _sequence_degrees(tp: int, node: int, num_ranks: int) -> list[int]:
    """Those inside a node, and those that fill several whole nodes."""
    several = (nodes * node for nodes in range(2, MOST_NODES + 1) if nodes * node <= num_ranks)
    return [*range(1, node // tp + 1), *(ranks // tp for ranks in several if ranks % tp == 0)]
