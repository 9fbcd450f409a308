"""Costs and memory of a job before step 0: a measured table or an estimated one, its MaxLen within the memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.analytic import ASSUMED, ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable, TableFile, check_job, read_table_file, told
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import JobMemory, gibibytes
from ds_hydra.costs.shape_costs import of_one_kind, spreading_rows, used_schemes, with_shapes
from ds_hydra.engine.fingerprint import describe_job
from ds_hydra.engine.fits import job_memory, rank_memory, within_memory
from ds_hydra.engine.job import Job
from ds_hydra.pipe.shape import ParallelScheme, StageShape
from ds_hydra.plan.schemes import feasible_schemes
from ds_hydra.ranks.world import World
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster, largest_node

logger = logging.getLogger(__name__)

# Bytes of buffers of communicators and pairs, which connect when the candidates are known: 6 to 13 of the ones and 42
# to 128 of the others, with 4 to 10 MiB for a channel and peer.
_COMMUNICATORS = 3 << 30


def least_memory(world: World) -> tuple[float, dict[str, float]]:
    """Bytes that every rank may use; and those that every one of a class may, where devices are of several."""
    # Devices of one kind may differ by some MiB, and by what others use. MaxLen must not: schedules are made from it,
    # the same on every rank.
    mine = rank_memory(world.device, world.cluster.ranks_beside(world.rank))
    every = world.channel.rows(torch.tensor([mine], dtype=torch.float64)).flatten()
    least, classes = float(every.min()), world.cluster.classes if world.cluster.mixed else {}
    by_class = {device: float(every[list(ranks)].min()) for device, ranks in classes.items()}
    if world.device.type != "cuda":
        return least, by_class
    later = _COMMUNICATORS if world.num_ranks > 1 else 0
    if world.rank == 0:
        _, whole = torch.cuda.mem_get_info(world.device)
        logger.info(
            "of a device's %s rank 0 has %s, the rank that has least %s; %s of it are left to communicators",
            *map(gibibytes, (whole, mine, least, later)),
        )
    return least - later, {device: held - later for device, held in by_class.items()}


def costs_and_memory(
    job: Job, world: World, shape: ModelShape, longest: int, device_bytes: float, class_bytes: Mapping[str, float]
) -> tuple[TableFile, JobMemory]:
    """The cost table, its MaxLen within memory, and the memory model; `class_bytes` as `least_memory`."""
    config, cluster = job.config, world.cluster
    classes = cluster.mixed or isinstance(config.cost_table, Mapping) or any("@" in one for one in config.strategies)
    if classes:
        from ds_hydra.engine.classes import check_classes, check_rows, of_cluster

        check_classes(config, cluster, job.source.plan.num_layers)
    schemes = used_schemes(config.shapes) or feasible_schemes(job.source.plan, world.num_ranks, world.node_size)
    fingerprint = describe_job(job.source, world.device, job.types.compute, world.num_ranks)
    own = cluster.devices[world.rank] if cluster.devices else ""
    found = job_cost_table(config, shape, schemes, longest, fingerprint, own, cluster)
    if world.rank == 0:
        told(found)
    memory = _memory(job, world, found, device_bytes)
    if classes:
        check_rows(found.table, cluster, repr(config.cost_table))
        memory = of_cluster(memory, cluster, class_bytes)
    found = replace(found, table=with_shapes(found.table, config.shapes, memory))
    return limited(job, world, found, memory), memory


def job_cost_table(
    config: HydraConfig,
    shape: ModelShape,
    schemes: Sequence[ParallelScheme],
    longest: int,
    job: JobFingerprint,
    own: str = "",
    cluster: Cluster | None = None,
) -> TableFile:
    """The measured table of the config, or an analytic one for sequences of up to `longest` tokens; `own` is the class
    of this rank's device.

    Raises ConfigError when the measured table was made for another job, or lacks a scheme that a strategy of the
    config uses.
    """
    if config.cost_table is None:
        assumed = ASSUMED["cpu" if job.threads else "cuda"]
        context = max(longest, config.tokens_per_step)
        table = analytic_cost_table(
            shape, schemes, context, device_flops=assumed.flops, link_bytes_per_second=assumed.inside,
            between_bytes_per_second=assumed.between,
            node_size=None if cluster is None else largest_node(cluster.node_size),
        )  # fmt: skip
        return TableFile(table)
    if isinstance(config.cost_table, Mapping):
        from ds_hydra.engine.classes import class_tables

        assert cluster is not None, "the engine knows it"
        return class_tables(config.cost_table, job, own, cluster)
    found = read_table_file(config.cost_table)
    check_job(found, job, repr(config.cost_table))
    listed = used_schemes(config.shapes)
    table = spreading_rows(found.table, listed) if listed else of_one_kind(found.table, schemes)
    missing = sorted(set(used_schemes(config.shapes)) - set(table.schemes))
    if missing:
        raise ConfigError(
            f"cost table {config.cost_table!r} has no entry for {', '.join(map(str, missing))}, which "
            f"hydra.strategies use; it has {', '.join(str(cost.scheme) for cost in table.costs)}. Measure them, or "
            "leave them out"
        )
    return replace(found, table=table)


def _memory(job: Job, world: World, found: TableFile, device_bytes: float) -> JobMemory:
    elastic = job.config.elastic
    # A CPU rank's device memory is the host's.
    on_host = elastic is not None and elastic.redundancy == "host" and world.device.type != "cpu"
    return job_memory(
        job.source,
        _degrees(found.table),
        world.num_ranks,
        device_bytes,
        job.types.compute,
        grad_dtype=job.types.grads,
        wire_dtype=job.types.wire,
        node_size=world.node_size,
        measured=found.activations,
        serial=world.edges.serial,
        phases=job.config.replay is not None or job.pre_step is not None,
        copies=elastic is not None and elastic.redundancy != "off" and world.num_ranks > 1,
        copies_on_host=on_host,
        expert_imbalance=job.config.expert_imbalance,
    )


def _degrees(table: CostTable) -> list[ParallelScheme | StageShape]:
    """What has each <TP, SP> of a table's stages."""
    shapes = (cost.scheme for cost in table.costs)
    each = ((one,) if isinstance(one, ParallelScheme) else one.stages for one in shapes)
    return [one for stages in each for one in stages]


def limited(job: Job, world: World, found: TableFile, memory: JobMemory) -> TableFile:
    """The table with MaxLen within memory. ConfigError when no scheme is left."""
    # A measured MaxLen holds for the number of ranks that shared the masters when it was measured. Masters and Adam's
    # states take 12 bytes per parameter over all ranks: of 1e9 parameters a rank keeps 1.5 GB with 8 ranks but 3 GB
    # with 4, and has that much less for activations. Nor does it know the job's other strategies, for which each rank
    # keeps room. Only a table that comes without figures of activations, such as a published one, knows better than
    # the memory model, which could but estimate them.
    same_ranks = found.job is None or found.job.num_ranks in (0, world.num_ranks)
    if job.config.cost_table and same_ranks and not found.activations:
        return found
    return replace(found, table=within_memory(found.table, memory))


def without_the_largest(memory: JobMemory, table: CostTable, longest: int) -> JobMemory:
    """Leaves out the proposed strategy that needs the most memory until the others fit together.

    A rank keeps room for the most demanding of them in every step. So a strategy that fits by itself may leave the
    others too little, or none of them enough for the longest sequence.
    """
    while len(memory.strategies) > 1:
        schemes = {pipeline.cost_key for shape in memory.strategies for pipeline in shape.pipelines}
        alone = memory.together({})
        limits = [memory.max_length(scheme) for scheme in schemes]
        wanted = min(longest, max(min(table[scheme].max_length, alone.max_length(scheme)) for scheme in schemes))
        if min(limits) >= 1 and max(limits) >= wanted:
            break
        largest = max(memory.strategies, key=memory.demand)
        logger.info("%s is left out: beside the others it needs more memory than there is", largest)
        memory = memory.together({one: at for one, at in memory.strategies.items() if one != largest})
    return memory


def planned_whole(table: CostTable) -> str:
    """Why the planner cuts no sequence though it may; empty: it does."""
    if any(cost.shares is not None for cost in table.costs):
        return ""
    return "the cost table has no measured shares of forward and backward; `ds-hydra profile` measures them"
