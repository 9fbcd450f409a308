"""A job and a strategy in, what its messages add to a step out. Pure: no torch.

The planner's costs are those of computing. What a step takes besides depends on the strategy: whoever holds more
parameters pulls and pushes longer, deep pipelines start while their last layers are still on their way, and gradients
that are complete only in the last backward leave late. It hardly depends on which sequences a step has, so a made-up
step tells it once for all.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator

_NO_TIME = Speed(0.0, 1e18)
_EACH_STAGE = 3  # micro-batches of a made-up pipeline of several stages, at least


def exposed_ms(job: SimulatedJob, strategy: StrategyShape, tokens_per_step: int) -> float:
    """What pulls, pushes and messages between stages add to a step of so many tokens, in ms: the simulated step less
    the same with links that take no time. PlanError for a pipeline without costs.

    With transfers of 300 ms of which computing hides 240, it is 60. A strategy of fewer ranks than the job's has its
    share of the tokens.
    """
    plan = _made_up(strategy, job.table, tokens_per_step * strategy.num_ranks / job.num_ranks)
    links = job.links, LinkModel(job.links.node_size, _NO_TIME, _NO_TIME)
    taken, computing = (
        Simulator(replace(job, links=one, num_ranks=strategy.num_ranks)).step(plan).norm_s for one in links
    )
    return 1e3 * (taken - computing)


def _made_up(strategy: StrategyShape, table: CostTable, tokens: float) -> StepPlan:
    """A step of equal micro-batches, one sequence each, with as many tokens for a pipeline as it is fast."""
    rates = [1.0 / (cost.b or cost.a) for cost in (table[shape] for shape in strategy.pipelines)]
    lengths: list[int] = []
    pipelines = []
    for shape, rate in zip(strategy.pipelines, rates, strict=True):
        own = max(1, round(tokens * rate / sum(rates)))
        # One stage runs as few micro-batches as hold the tokens: more would leave less computing to hide pulls behind.
        count = max(_EACH_STAGE * shape.pp if shape.pp > 1 else 1, math.ceil(own / table[shape].max_length))
        positions = range(len(lengths), len(lengths) + count)
        lengths += [max(1, own // count)] * count
        pipelines.append((shape, [MicroBatchPlan.of_whole([position], lengths) for position in positions]))
    phase = Phase(tuple(PipelinePlan(shape, tuple(batches), 0.0) for shape, batches in pipelines))
    return StepPlan(0, tuple(range(len(lengths))), tuple(lengths), (phase,), 0.0)
