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
_EACH_STAGE = 2  # micro-batches of a made-up pipeline of several stages, at least
_FIRST = 0.4  # of the largest micro-batch: the first; half of them are smaller than it
_SHORT = 1024  # tokens of a sequence, about


def exposed_ms(job: SimulatedJob, strategy: StrategyShape, tokens_per_step: int) -> float:
    """What pulls, pushes and messages between stages add to a step of so many tokens, in ms: the simulated step less
    the same with links that take no time. PlanError for a pipeline without costs.

    With transfers of 300 ms of which computing hides 240, it is 60. A strategy of fewer ranks than the job's has its
    share of the tokens.
    """
    plan = _made_up(strategy, job.table, tokens_per_step * strategy.num_ranks / job.num_ranks)
    job = replace(job, num_ranks=strategy.num_ranks)
    links = LinkModel(job.links.node_size, _NO_TIME, _NO_TIME)
    taken, computing = Simulator(job).step(plan).norm_s, Simulator(replace(job, links=links)).computing_s(plan)
    return 1e3 * (taken - computing)


def _made_up(strategy: StrategyShape, table: CostTable, tokens: float) -> StepPlan:
    """A step of short sequences, with as many tokens for a pipeline as it is fast."""
    rates = [1.0 / (cost.b or cost.a) for cost in (table[shape] for shape in strategy.pipelines)]
    lengths: list[int] = []
    pipelines = []
    for shape, rate in zip(strategy.pipelines, rates, strict=True):
        batches = []
        for size in _sizes(shape.pp, tokens * rate / sum(rates), table[shape].max_length):
            spread = max(1, round(size / _SHORT))
            positions = range(len(lengths), len(lengths) + spread)
            lengths += [max(1, round(size / spread))] * spread
            batches.append(MicroBatchPlan.of_whole(positions, lengths))
        pipelines.append(PipelinePlan(shape, tuple(batches), 0.0))
    return StepPlan(0, tuple(range(len(lengths))), tuple(lengths), (Phase(tuple(pipelines)),), 0.0)


def _sizes(num_stages: int, tokens: float, max_length: int) -> list[float]:
    """Tokens of the micro-batches of a pipeline. One stage has as few as hold them. More stages begin with small ones,
    as the planner's orders do, so that the last stage begins soon; there is little to hide its pulls behind."""
    fewest = max(1, math.ceil(tokens / max_length))
    if num_stages == 1:
        return [tokens / fewest] * fewest
    count = max(_EACH_STAGE * num_stages, fewest)
    shares = [min(1.0, _FIRST + (1.0 - _FIRST) * index / (count / 2)) for index in range(count)]
    return [tokens * share / sum(shares) for share in shares]
