"""Strategies that HiGHS composes for one batch, and how much each step's planning may try, in counts. Pure: no torch.

[Note: composed strategies]
Candidates are proposed before training, for typical batches. A step's own batch may suit another mix of their
pipelines: where its one long sequence wants a tp8 and no candidate has just one of them, or where lengths have shifted
away from those that were proposed for. So in each step HiGHS solves a few small programs [Note: u = 1/tau], whole
counts of pipelines with sequences dealt out in fractions, at times near that of the best plan so far. What it names and
no candidate is, is searched like a candidate. It runs only where it makes the step clearly sooner done, and then the
training side connects it at its first use. HiGHS never makes a plan worse: the candidates' plan is there already.

Programs, nodes and tries are counted and no time is measured, so all of it is within the one function that plans are;
see [Note: the same plans]. A strategy that was composed and used at step s is a candidate from step s + JOINS_AFTER on,
however far ahead steps are planned, and checkpoints hold it (`engine.plans`).

[Note: room for composed strategies]
A strategy that HiGHS puts together of the candidates' pipelines has each of them on other ranks, where the arena was
made for other stages, and other contributors to its shards, who need other scratch memory. So it is run only if on
every rank its parameters and gradients fit into the arena, and these with its scratch memory leave as much for
activations as the MaxLen of each pipeline was counted with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import ElementBytes, JobMemory, Needs, gibibytes, held_elements, rank_bytes
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.layouts import crossings
from ds_hydra.planner.exact import CountsFound, counts_at, counts_to_strategy, shares_at
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.problem import Batch, Ints, Schemes
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize

_TRIES = 1800  # of a step's chunked search for each unit of effort, and
_TRIES_EACH = 300  # as many more for each pipeline of
_COUNTED = 96  # at most: more of them differ little
_PROGRAMS = 3  # at most, and one always
_NODES = 20
_SHORT = 1024  # tokens
_SHARE = 0.1  # of the shortest step that typical batches have: what its programs may take
# CPU ms of one program of so many rows and 30 bins with its 20 nodes: rough figures, of trials on a busy machine. They
# are part of the planner, not of a machine: budgets are the same everywhere.
_PROGRAM_MS = ((3, 8.0), (6, 20.0), (12, 45.0), (20, 75.0), (40, 150.0))


def is_chunked(strategy: StrategyShape) -> bool:
    """Whether some pipeline of a strategy is."""
    return any(weighs(pipeline.schedule) for pipeline in strategy.pipelines)


class PlanBudget(NamedTuple):
    """Counts that bound the planning of one step, whatever the machine."""

    tries: int  # simulations of the chunked search; 0: it dispatches and cuts once
    programs: int  # that HiGHS solves to compose strategies
    nodes: int  # of each program


def budget_of(
    table: CostTable, strategies: Sequence[StrategyShape], effort: int, typical: Sequence[int] = ()
) -> PlanBudget:
    """The budget of a job's steps; `typical` are the lengths in tokens of a batch, none: the step's time is not looked
    at.

    It is sized once, before step 0, by what is the same on every machine, and a checkpoint keeps it: so a restart with
    other costs plans by it too.
    """
    chunked = [len(strategy.pipelines) for strategy in strategies if is_chunked(strategy)]
    tries = effort * (_TRIES + _TRIES_EACH * min(max(chunked), _COUNTED)) if chunked else 0
    programs = _PROGRAMS
    if len(typical):
        shapes = {pipeline for strategy in strategies for pipeline in strategy.pipelines}
        program_ms = next((ms for rows, ms in _PROGRAM_MS if len(shapes) <= rows), _PROGRAM_MS[-1][1])
        programs = int(_SHARE * _shortest_ms(table, strategies, typical) / program_ms)
    return PlanBudget(tries, min(max(programs, 1), _PROGRAMS), _NODES)


def typical_batch(lengths: Sequence[int] | Ints, tokens_per_step: int) -> list[int]:
    """Lengths at even ranks, as many as a step has of them; of unknown ones, some short ones."""
    known = np.sort(np.asarray(lengths, dtype=np.int64))
    known = known[known > 0]
    if not len(known):
        return [min(_SHORT, tokens_per_step)] * max(1, tokens_per_step // _SHORT)
    count = max(1, round(tokens_per_step / float(known.mean())))
    return [int(known[int((rank + 0.5) * len(known) / count)]) for rank in range(count)]


def _shortest_ms(table: CostTable, strategies: Sequence[StrategyShape], typical: Sequence[int]) -> float:
    """A step in which each sequence takes least of the ranks, and none of them waits (ms)."""
    costs = [table[key] for key in dict.fromkeys(p.cost_key for one in strategies for p in one.pipelines)]
    tokens = np.array(typical, dtype=np.int64)
    ranks_ms = [
        np.where(tokens <= cost.max_length, cost.scheme.num_ranks * cost.sequence_ms(tokens), np.inf) for cost in costs
    ]
    least = np.min(ranks_ms, axis=0)
    return float(least[np.isfinite(least)].sum()) / strategies[0].num_ranks


JOINS_AFTER = 64  # steps
MOST_JOINED = 32  # strategies in a job: each keeps connections and some memory of the host
WORTH = 0.005  # share of a step that a composed strategy must save
COMPOSED = "composed"  # `StepPlan.source` of a plan whose strategy is no candidate
_TIMES = (0.98, 0.92, 1.05)  # of the best plan so far, at which shares are taken, in the order of their use


class HighsShare(NamedTuple):
    """What HiGHS did in one step.

    `gain` is the share of the step that is saved by the strategy that it composed, `strategy`, or would be if that were
    allowed (`new_strategy`); 0 and "" where the candidates' plan is as good.
    """

    programs: int
    nodes: int
    cpu_ms: float
    gain: float = 0.0
    new_strategy: bool = False
    strategy: str = ""


class Composed(NamedTuple):
    """Strategies that are no candidates, the most promising first, and what they took."""

    strategies: tuple[StrategyShape, ...]
    asked: int  # programs
    nodes: int
    bound_ms: float  # the least time that a program promises, sequences dealt out in fractions
    failed: str  # why HiGHS failed, if it did


class Composer:
    """Composes strategies of `num_ranks` ranks from the pipelines of some candidates [Note: composed strategies]."""

    def __init__(self, num_ranks: int, kernel: Kernels, budget: PlanBudget) -> None:
        self._num_ranks, self._kernel, self._budget = num_ranks, kernel, budget

    def compose(
        self, batch: Batch, arrays: Schemes, shapes: Mapping[int, PipelineShape], best_ms: float, known: Collection[str]
    ) -> Composed:
        """What suits a batch where the best plan's slowest pipeline takes `best_ms`; `known` are the candidates' texts.

        `arrays` tell what dispatch counts for a pipeline of each row: measured costs, or work and an overhead. Those
        that may be used are `shapes`, by their rows.
        """
        rows = np.array(list(shapes), dtype=np.int64)
        sizes = np.array([shape.num_ranks for shape in shapes.values()], dtype=np.int64)
        found: list[CountsFound] = []
        for factor in _TIMES[: self._budget.programs]:
            shares = shares_at(batch, arrays, rows, factor * best_ms, self._kernel)
            nodes = self._budget.nodes
            found.append(counts_at(factor * best_ms, batch, shares, sizes, self._num_ranks, node_limit=nodes))
        promising = sorted((one for one in found if one.counts), key=lambda one: one.ms)
        named = dict.fromkeys(counts_to_strategy(one.counts, tuple(shapes.values())) for one in promising)
        return Composed(
            tuple(strategy for strategy in named if str(strategy) not in known),
            len(found),
            sum(one.solved.nodes for one in found),
            min((one.ms for one in promising), default=math.inf),
            next((one.solved.why for one in found if one.solved.status == "failed"), ""),
        )


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
