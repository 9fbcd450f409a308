"""A running job as the step simulator wants it: sizes, costs and links."""

from __future__ import annotations

from collections.abc import Callable

from ds_hydra.costs.cost_table import TableFile
from ds_hydra.engine.job import Job
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.ranks.world import World
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import exposed_ms


def simulated_job(job: Job, world: World, found: TableFile) -> SimulatedJob:
    """The job as simulations see it, by these costs and the links that the table file holds."""
    links, types = LinkModel.of_table(found.links, world.node_size, devices=world.cluster.devices), job.types
    return SimulatedJob(
        job.source.plan,
        job.source.width(min(1, job.source.plan.num_layers - 1)),
        found,
        links,
        world.num_ranks,
        element_bytes=types.compute.itemsize,
        gradient_bytes=types.wire.itemsize,
        sum_bytes=types.grads.itemsize,
        lanes=world.lane.early,
        cluster=world.cluster if world.cluster.devices else None,
    )


def exposed_of(job: Job, world: World, found: TableFile) -> Callable[[StrategyShape], float] | None:
    """What the messages of a strategy add to a step, in ms; None where no links were measured."""
    if found.links is None:
        return None
    cluster, tokens = simulated_job(job, world, found), job.config.tokens_per_step
    return lambda strategy: exposed_ms(cluster, strategy, tokens)
