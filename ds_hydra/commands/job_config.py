"""A job's config file in; the "hydra" block and the dtypes, for the commands, out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ds_hydra.config.checks import read_config
from ds_hydra.config.hosts import TRAINER, filled_in
from ds_hydra.config.hydra_block import OPTIMIZER, HydraConfig, parse_config
from ds_hydra.engine.plugs import plugged
from ds_hydra.host.optimizers import needs_whole, optimizer_of_block
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_timer import hollow_source

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
