"""The config of a Hugging Face model in, the job that a simulation is of out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_hydra.commands.job_config import read_job
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.engine.costs import job_memory
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.simulate.job import HOST_LINK, NO_LIMIT, SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.nodes import node_size_of


def job_of_config(
    path: str,
    found: TableFile,
    links: LinkModel,
    num_ranks: int,
    strategies: Sequence[StrategyShape],
    *,
    config: str | None = None,
    host_link: float = HOST_LINK,
) -> SimulatedJob:
    """The job of training the model of a config file or checkpoint folder; in the dtype that the table was made for.

    `config` is the file that says in which types gradients add up and travel, and whether the host has states, which
    come over a `host_link` of so many bytes a second.
    ConfigError for what is no such model, PlanError for strategies that the table has no costs for.
    """
    source = hollow_source(path, AS_WRITTEN if found.job is None else found.job.stages, strategies)
    dtype = torch.float32 if found.job is not None and found.job.dtype.endswith("float32") else torch.bfloat16
    stages = (stage for strategy in strategies for pipeline in strategy.pipelines for stage in pipeline.stages)
    types = read_job(config, dtype)
    memory = job_memory(
        source, [ParallelScheme(stage.tp, 1, stage.sp) for stage in stages], num_ranks, NO_LIMIT, dtype,
        grad_dtype=types.grad_dtype, wire_dtype=types.wire_dtype, node_size=node_size_of(num_ranks, links.node_size),
        measured=found.activations, states_on_host=types.states_on_host,
    )  # fmt: skip
    job = SimulatedJob(
        source.plan, source.width(min(1, source.plan.num_layers - 1)), found, links, num_ranks, dtype.itemsize,
        memory, memory.wire_bytes, memory.grad_bytes or max(memory.param_bytes, memory.master_bytes),
        lanes=found.job is None or not found.job.threads,  # a table of CPUs has those of a rank
        host_link=host_link,
    )  # fmt: skip
    return job.with_costs_of(strategies)
