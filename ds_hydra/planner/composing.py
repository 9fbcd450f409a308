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
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.exact import CountsFound, counts_at, counts_to_strategy, shares_at
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.problem import Batch, Ints, Schemes

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
