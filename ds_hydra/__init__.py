"""ds-hydra: heterogeneous, per-step pipelines for DeepSpeed jobs on sequences of very different lengths."""

from __future__ import annotations

from typing import Any

from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

__version__ = "0.1.0"
__all__ = [
    "CheckpointError", "ConfigError", "PlanError", "__version__", "add_config_arguments", "check_config",
    "init_distributed", "initialize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load the runtime on first use: planning must not pay for importing torch and DeepSpeed."""
    if name in ("initialize", "check_config"):
        from ds_hydra import entry

        return getattr(entry, name)
    if name == "init_distributed":
        from ds_hydra.host.launch import init_as_deepspeed

        return init_as_deepspeed
    if name == "add_config_arguments":
        from deepspeed import add_config_arguments

        return add_config_arguments
    raise AttributeError(f"module 'ds_hydra' has no attribute {name!r}")
