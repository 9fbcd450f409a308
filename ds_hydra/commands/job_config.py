"""A job's config file in, what commands need of it out: the "hydra" block, the dtype, checkpointed activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_hydra.config.hydra_block import HydraConfig, parse_config
from ds_hydra.config.read import read_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class JobConfig:
    """What the config of a job says; `hydra` is None where there is no config, or no such block."""

    hydra: HydraConfig | None
    dtype: torch.dtype
    activation_checkpointing: bool


def read_job(path: str | None, default: torch.dtype) -> JobConfig:
    """Read a config file; without one the dtype is `default`. ConfigError for what cannot be."""
    if path is None:
        return JobConfig(None, default, False)
    raw = read_config(config=path)
    parsed = parse_config(raw)
    hydra = parsed.hydra if parsed else None
    blocks = [(key, raw.get(key)) for key in ("bf16", "fp16")]
    enabled = [key for key, block in blocks if isinstance(block, dict) and block.get("enabled")]
    return JobConfig(hydra, DTYPES[enabled[0] if enabled else "fp32"], bool(hydra and hydra.activation_checkpointing))
