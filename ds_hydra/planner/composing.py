"""One batch and the pipelines of the candidates in, strategies that HiGHS puts together of them out. Pure: no torch.

[Note: composed strategies]
Candidates are proposed before training, for typical batches. A step's own batch may suit another mix of their
pipelines: where its one long sequence wants a tp8 and no candidate has just one of them, or where lengths have shifted
away from those that were proposed for. So in each step HiGHS solves a few small programs [Note: u = 1/tau], whole
counts of pipelines with sequences dealt out in fractions, at times near that of the best plan so far. What it names and
no candidate is, is searched like a candidate. It runs only where it makes the step clearly sooner done, and then the
training side connects it at its first use. HiGHS never makes a plan worse: the candidates' plan is there already.

Programs, nodes and tries are counted and no time is measured, so all of it is within the one function that plans are;
see [Note: the same plans]. A strategy that was composed and used at step s is a candidate from step s + JOINS_AFTER on,
however far ahead steps are planned, and checkpoints hold it (`engine.learned`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.budget import PlanBudget
from ds_hydra.planner.exact.counts import CountsFound, counts_at, counts_to_strategy, shares_at
from ds_hydra.planner.kernels.arrays import Schemes
from ds_hydra.planner.kernels.problem import Batch
from ds_hydra.planner.kernels.protocol import Kernels

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
