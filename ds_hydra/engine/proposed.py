"""A job's costs, memory and lengths in; the strategies that `strategies: "auto"` stands for, on every rank, out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds_hydra.costs.cost_table import TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.engine.job import Job
from ds_hydra.engine.simulated import exposed_of
from ds_hydra.pipe.schedules.registry import proposed_schedules, weighs
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner.proposal.propose import Wider, propose_strategies, wider_shapes
from ds_hydra.ranks.world import World

logger = logging.getLogger(__name__)


def propose(
    job: Job, found: TableFile, memory: JobMemory, lengths: Sequence[int], world: World
) -> tuple[StrategyShape, ...]:
    """Every rank must call it. Rank 0 proposes them, so that only one process compiles and searches."""
    config, num_layers, table = job.config, job.source.plan.num_layers, found.table
    proposed: str | None = None
    if world.rank == 0 and world.cluster.mixed:
        from ds_hydra.engine.classes import propose_for

        proposed = propose_for(world.cluster, table, memory, lengths, config)
    elif world.rank == 0:
        schedules = proposed_schedules()
        if any(map(weighs, schedules)) and all(cost.shares is None for cost in table.costs):
            logger.info(
                "sequences stay whole and backwards are not split: the costs have no measured shares of forward and "
                "backward. Measure them with `ds-hydra profile`"
            )
        shapes = wider_shapes(table, schedules, num_layers)
        slices = config.chunks == "auto" and not job.source.plan.no_slices
        strategies = propose_strategies(
            table,
            world.num_ranks,
            lengths,
            config.tokens_per_step,
            max(lengths),
            node_size=world.node_size,
            seed=config.planner_options().seed,
            wider=Wider(shapes, slices, num_layers, plain=not all(map(weighs, schedules))),
            exposed=exposed_of(job, world, found),
        )
        proposed = "\n".join(str(strategy) for strategy in strategies)
    if proposed is not None:
        logger.info("strategies proposed for these lengths:\n  %s", proposed.replace("\n", "\n  "))
    return tuple(StrategyShape.parse(line) for line in world.channel.tell(proposed).split("\n"))
