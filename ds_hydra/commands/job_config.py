"""A job's config, read as the job itself reads it: its types and options, all that it refuses, and its simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ds_hydra.config.checks import read_config
from ds_hydra.config.hosts import TRAINER, filled_in
from ds_hydra.config.hydra_block import BLOCK, OPTIMIZER, HydraConfig, parse_config
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.engine.costs import job_memory
from ds_hydra.engine.plugs import plugged
from ds_hydra.entry import accept
from ds_hydra.host.optimizers import needs_whole, optimizer_of_block, update_bytes
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.simulate.job import HOST_LINK, NO_LIMIT, SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import node_size_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class JobConfig:
    """The parts of a job's config that commands use; `hydra` is None without a config, or without that block."""

    hydra: HydraConfig | None
    dtype: torch.dtype
    make_optimizer: Callable[[list[dict[str, Any]]], Optimizer]  # of parameter groups; AdamW where none is named
    grad_dtype: torch.dtype | None = None  # as data_types.grad_accum_dtype says; None: it does not
    wire_dtype: torch.dtype | None = None  # as communication_data_type says
    optimizer: str = "AdamW"  # its type

    @property
    def states_may_leave(self) -> bool:
        """Whether the host may have FP32 masters and optimizer states, as far as the config tells it."""
        return (self.hydra is None or self.hydra.elastic is None) and not needs_whole(self.optimizer)

    @property
    def states_on_host(self) -> bool:
        """Whether the host has them."""
        return self.hydra is not None and OPTIMIZER in self.hydra.offload and self.states_may_leave

    @property
    def of_memory(self) -> dict[str, Any]:
        """What `job_memory` is told of a config."""
        return {
            "grad_dtype": self.grad_dtype,
            "wire_dtype": self.wire_dtype,
            "expert_imbalance": (self.hydra or HydraConfig()).expert_imbalance,
            "for_update": update_bytes(self.optimizer),
            "states_on_host": self.states_on_host,
        }

    def source(self, path: str, options: StageOptions, shapes: Iterable[StrategyShape]) -> CausalLM:
        """Stages of the model of a config file or checkpoint folder, with its encoder of images where the job trains
        them. ConfigError as `hollow_source`."""
        if self.hydra is None or not self.hydra.images:
            return hollow_source(path, options, shapes)
        found: CausalLM = plugged("images", "hydra.images").hollow(path, options, shapes)
        return found

    @property
    def stage_options(self) -> StageOptions:
        """How stages are to compute; without a "hydra" block as its defaults say."""
        return (self.hydra or HydraConfig()).stage_options


def read_job(path: str | None, default: torch.dtype) -> JobConfig:
    """Read a config file; without one the dtype is `default`. ConfigError if it is refused."""
    return (
        JobConfig(None, default, optimizer_of_block("AdamW", {})) if path is None else job_of(read_config(config=path))
    )


def job_of(raw: Mapping[str, Any]) -> JobConfig:
    """Of a config; where it has "auto" for what transformers' Trainer fills in, as for a job of bf16."""
    parsed = parse_config(raw, TRAINER)
    hydra = parsed.hydra if parsed else None
    filled = filled_in(raw, TRAINER)
    blocks = [(key, filled.get(key)) for key in ("bf16", "fp16")]
    enabled = [key for key, block in blocks if isinstance(block, dict) and block.get("enabled")]
    optimizer = filled.get("optimizer")
    block: dict[str, Any] = optimizer if isinstance(optimizer, dict) else {}
    settings = parsed.deepspeed if parsed else filled
    types = settings.get("data_types")
    asked = str(types.get("grad_accum_dtype")) if isinstance(types, dict) else ""
    return JobConfig(
        hydra,
        DTYPES[enabled[0] if enabled else "fp32"],
        optimizer_of_block(block.get("type", "AdamW"), dict(block.get("params") or {})),
        DTYPES.get(asked),
        DTYPES.get(str(settings.get("communication_data_type"))),
        block.get("type", "AdamW"),
    )


def refuse_all(config: Mapping[str, Any], host: str, ranks: int) -> None:
    """ConfigError with a line for each key that the job refuses; the job itself would stop at the first."""
    try:
        accept(config, ranks, host)
    except ConfigError as error:
        found = list(dict.fromkeys(_each(config, host, ranks))) or [str(error)]
        lines = [one.removeprefix("config: ") for one in found]
        raise ConfigError(
            lines[0] if len(lines) == 1 else f"{len(lines)} settings cannot be had here:\n  " + "\n  ".join(lines)
        ) from error


def _each(config: Mapping[str, Any], host: str, ranks: int) -> Iterator[str]:
    """What is refused of each key by itself, and of each setting of the block."""
    alone = [{key: value, BLOCK: {}} for key, value in config.items() if key != BLOCK]
    block = config.get(BLOCK)
    alone += [{BLOCK: {key: value}} for key, value in block.items()] if isinstance(block, Mapping) else []
    for one in alone:
        try:
            accept(one, ranks, host)
        except ConfigError as error:
            yield str(error)


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
    memory = job_memory(
        source, [ParallelScheme(stage.tp, 1, stage.sp) for stage in stages], num_ranks, NO_LIMIT, dtype,
        node_size=node_size_of(num_ranks, links.node_size), measured=found.activations,
        **read_job(config, dtype).of_memory,
    )  # fmt: skip
    job = SimulatedJob(
        source.plan, source.width(min(1, source.plan.num_layers - 1)), found, links, num_ranks, dtype.itemsize,
        memory, memory.wire_bytes, memory.grad_bytes or max(memory.param_bytes, memory.master_bytes),
        lanes=found.job is None or not found.job.threads,  # a table of CPUs has those of a rank
        host_link=host_link,
    )  # fmt: skip
    return job.with_costs_of(strategies)
