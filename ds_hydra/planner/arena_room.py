"""A job's model, its arena and its candidates' memory in; which other strategies fit beside them, out. Pure: no torch.

[Note: room for composed strategies]
A strategy that HiGHS puts together of the candidates' pipelines has each of them on other ranks, where the arena was
made for other stages, and other contributors to its shards, who need other scratch memory. So it is run only if on
every rank its parameters and gradients fit into the arena, and these with its scratch memory leave as much for
activations as the MaxLen of each pipeline was counted with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import ElementBytes, JobMemory, Needs, gibibytes, held_elements, rank_bytes
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.layouts import crossings
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize

_PLAN, _CLUSTER = TypeAdapter(ModelPlan), TypeAdapter(Cluster)
_NO_LIMIT = 2.0**62  # bytes
Elements = tuple[int, int]
"""Of parameters and of gradients, on one rank."""


@dataclass(frozen=True)
class ArenaRoom:
    """What a job's ranks have room for [Note: room for composed strategies]."""

    plan: ModelPlan
    node_size: NodeSize
    element: ElementBytes
    arena: tuple[Elements, ...]  # of each rank
    most: Mapping[str, tuple[int, ...]]  # of each pipeline, by its text: bytes of all that is no activation, by stage
    cluster: Cluster | None = None  # where devices are of several classes: which rank has which
    _known: dict[StrategyShape, str] = field(default_factory=dict, compare=False, repr=False)

    def refusal(self, strategy: StrategyShape) -> str:
        """Why a strategy cannot be run; "" if it can."""
        if strategy not in self._known:
            try:
                placed = place_strategy(strategy, len(self.arena), self.plan.num_layers, self.cluster)
                self.plan.check(placed)
                self._known[strategy] = self._missing(strategy, placed)
            except PlanError as error:
                self._known[strategy] = str(error)
        return self._known[strategy]

    def refusal_of_composed(self, strategy: StrategyShape) -> str:
        """The same of a strategy that nobody asked for: its tensor parallel groups stay inside nodes."""
        across = next(crossings(strategy, self.node_size), None)
        return self.refusal(strategy) if across is None else f"{across} lie on two nodes"

    def _missing(self, strategy: StrategyShape, placed: Strategy) -> str:
        for shape in strategy.pipelines:
            if str(shape) not in self.most:
                return f"no candidate has the pipeline {shape}"
        every = held_elements(self.plan, placed, self.element, node_size=self.node_size)
        for rank, (needed, held) in enumerate(zip(every, self.arena, strict=True)):
            for what, more, has in zip(("parameters", "gradients"), needed, held, strict=True):
                if more > has:
                    return f"rank {rank} has room for {has} elements of {what} but would hold {more}"
        taken = rank_bytes(self.plan, placed, self.element, node_size=self.node_size)
        for shape, pipeline in zip(strategy.pipelines, placed.pipelines, strict=True):
            for most, stage in zip(self.most[str(shape)], pipeline.stages, strict=True):
                for rank in stage.ranks:
                    params, grads = self.arena[rank]
                    total = params * self.element.param + grads * self.element.grad + taken[rank].scratch
                    if total > most:
                        return f"rank {rank} would need {gibibytes(total - most)} more, of which activations have need"
        return ""

    def to_record(self) -> dict[str, Any]:
        """As JSON holds it; `of_record` is the inverse."""
        return {
            "plan": _PLAN.dump_python(self.plan, mode="json"),
            "node_size": self.node_size,
            "element": self.element,
            "arena": self.arena,
            "most": dict(self.most),
            **({"cluster": _CLUSTER.dump_python(self.cluster, mode="json")} if self.cluster else {}),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ArenaRoom:
        """KeyError or ValueError for what `to_record` does not give."""
        return cls(
            _PLAN.validate_python(record["plan"]),
            size if isinstance(size := record["node_size"], int) else tuple(size),
            ElementBytes(*record["element"]),
            tuple((params, grads) for params, grads in record["arena"]),
            {shape: tuple(most) for shape, most in record["most"].items()},
            _CLUSTER.validate_python(record["cluster"]) if "cluster" in record else None,
        )


def largest_of(each: Iterable[Sequence[Elements]]) -> tuple[Elements, ...]:
    """The most of each rank."""
    return tuple((max(p for p, _ in held), max(g for _, g in held)) for held in zip(*each, strict=True))


def room_beside(memory: JobMemory, table: CostTable, *, composing: bool) -> ArenaRoom:
    """The arena of a job with these candidates, and what fits beside them.

    When `composing` it holds any of their stages on any rank, if that costs no candidate a token of its MaxLen; else it
    is what the candidates themselves need.
    """
    shapes = sorted({pipeline for strategy in memory.strategies for pipeline in strategy.pipelines}, key=str)
    node_size = memory.node_size or memory.num_ranks
    arena = largest_of(
        held_elements(memory.plan, placed, memory.element, node_size=node_size) for placed in memory.strategies.values()
    )
    limits = {shape: _limit(memory, table, shape) for shape in shapes}
    if composing:
        larger = replace(memory, arena=_anywhere(memory, shapes, arena), _cache={})
        if all(_limit(larger, table, shape) >= limits[shape] for shape in shapes):
            memory, arena = larger, larger.arena
    most = {
        # A table that was measured elsewhere may know better than the memory model, which then says nothing of it.
        str(shape): tuple(
            needs.params + needs.grads + needs.scratch + max(0, _capacity(memory, needs) - needs.total(limits[shape]))
            for needs in memory.stages(shape)
        )
        for shape in shapes
    }
    return ArenaRoom(memory.plan, node_size, memory.element, arena, most, memory.cluster)


def _capacity(memory: JobMemory, needs: Needs) -> int:
    return int(min(memory.capacity_of(needs.scheme, needs.stage), _NO_LIMIT))


def _anywhere(memory: JobMemory, shapes: Sequence[PipelineShape], own: tuple[Elements, ...]) -> tuple[Elements, ...]:
    """An arena that holds any stage of these pipelines on any rank, and at least `own`."""
    ranks, plan = memory.num_ranks, memory.plan
    params = grads = 0
    for shape in shapes:
        copies = max(1, ranks // shape.num_ranks)
        placed = place_strategy(StrategyShape((shape.anywhere,) * copies), copies * shape.num_ranks, plan.num_layers)
        for held, trained in held_elements(plan, placed, memory.element, node_size=memory.node_size or ranks):
            params, grads = max(params, held), max(grads, trained)
    # Parts of twins are equal and begin aligned: of up to as many twins as ranks, each may have a gap in each bucket.
    more = ranks * len(plan.buckets) * plan.alignment
    # Beside other pipelines pushes have another order, in which one more sum may find no place among the gradients.
    shard = max(bucket.numel for bucket in plan.buckets) * memory.element.master // (ranks * memory.element.grad)
    return tuple((max(params + more, p), max(grads + more + shard, g)) for p, g in own)


def _limit(memory: JobMemory, table: CostTable, shape: PipelineShape) -> int:
    """MaxLen of a pipeline, at least 1."""
    limit = int(table[shape].max_length)
    return max(1, limit if math.isinf(memory.capacity) else min(limit, memory.max_length(shape)))
