"""Jobs whose devices are of several classes, before step 0: what they must say, their cost tables, their memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable, TableFile, check_job, read_table_file
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shape_costs import class_rows, of_class
from ds_hydra.mixed.proposals import propose_mixed
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.nodes import Cluster, listed


def check_classes(config: HydraConfig, cluster: Cluster, num_layers: int) -> None:
    """ConfigError for devices of several classes without costs of each, and for strategies that the cluster has not the
    devices for."""
    if cluster.mixed and config.cost_table is None:
        alike = sorted(set.intersection(*(set(re.split("[-_]", name)) for name in cluster.classes)))
        raise ConfigError(
            f"the job has devices of {len(cluster.classes)} classes: {listed(cluster)}. Plans without costs of each "
            "would give them equal shares, and the faster ones would wait: measure a table on a device of each class "
            f"and name both, 'hydra.cost_table': {{{', '.join(f'{name!r}: ...' for name in cluster.classes)}}}; start "
            "ranks of one class only; or, to let them train at the pace of the slowest, call them alike in "
            "hydra.cluster" + (f" (such as {alike[0]!r})" if alike else ", by a word that all their names have")
        )
    for index, shape in enumerate(config.shapes):
        try:
            place_strategy(shape, cluster.num_ranks, num_layers, cluster)
        except PlanError as error:
            raise ConfigError(f"config: hydra.strategies[{index}]: {error}") from None


def check_rows(table: CostTable, cluster: Cluster, place: str) -> None:
    """ConfigError where a table has no costs of a class that the job has."""
    known = {stage.device for stage in class_rows(table)}
    if missing := [name for name in cluster.classes if name not in known]:
        has = "those of " + ", ".join(map(repr, sorted(known))) if known else "rows without a class"
        raise ConfigError(
            f"the cost table {place} has no costs of devices of class {', '.join(map(repr, missing))}, which the job "
            f"has; it has {has}. Name a table of each class in hydra.cost_table, or rows by their class, as 'tp4@h20'"
        )


def class_tables(files: Mapping[str, str], job: JobFingerprint, own: str, cluster: Cluster) -> TableFile:
    """The tables that were measured on each class as one, whose rows name it. ConfigError for a class that the job has
    not, and where this rank's class was measured for another job."""
    if unknown := [name for name in files if name not in cluster.classes]:
        raise ConfigError(
            f"config: hydra.cost_table names the class {unknown[0]!r}, but the job "
            + (f"has {listed(cluster)}" if cluster.mixed else "has devices of one class: name its one file")
        )
    found = {name: read_table_file(path) for name, path in files.items()}
    if own in found:
        check_job(found[own], job, repr(files[own]))
    try:
        tables = [of_class(one.table, name) for name, one in found.items()]
    except PlanError as error:
        raise ConfigError(f"config: hydra.cost_table: {error}") from None
    links = {name: one.links for name, one in found.items() if one.links}
    return TableFile(
        CostTable(tuple(cost for table in tables for cost in table.costs), ", ".join(files.values())),
        links={"classes": links} if links else None,
        step=_most([one.step for one in found.values() if one.step]),
        activations=_largest([one.activations for one in found.values() if one.activations]),
        repairs=tuple(line for one in found.values() for line in one.repairs),
    )


def of_cluster(memory: JobMemory, cluster: Cluster, class_bytes: Mapping[str, float]) -> JobMemory:
    """The memory model of a job whose devices hold so much each."""
    return replace(memory, cluster=cluster, class_bytes=class_bytes)


def propose_for(
    cluster: Cluster, table: CostTable, memory: JobMemory, lengths: Sequence[int], config: HydraConfig
) -> str:
    """Strategies for "strategies": "auto" on such a cluster, a line each. PlanError as `propose_mixed`."""
    seed = config.planner_options().seed
    slices = config.chunks == "auto" and not memory.plan.no_slices
    found = propose_mixed(
        cluster, table, memory, lengths, config.tokens_per_step, max(lengths), seed=seed, slices=slices
    )
    return "\n".join(map(str, found))


def _most(steps: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    # The update waits for the slowest rank.
    return {name: max(one.get(name, 0.0) for one in steps) for step in steps for name in step} or None


def _largest(figures: Sequence[Mapping[tuple[int, int], Activations]]) -> Mapping[tuple[int, int], Activations] | None:
    found: dict[tuple[int, int], Activations] = {}
    for one in figures:
        for degrees, kept in one.items():
            found[degrees] = max(found.get(degrees, kept), kept, key=lambda each: each.layer)
    return found or None
