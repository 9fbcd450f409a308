"""ds-hydra: heterogeneous, per-step pipelines for DeepSpeed jobs on sequences of very different lengths.

Imported as `import ds_hydra as deepspeed`, it has all of DeepSpeed's names [Note: names of DeepSpeed].
"""

from __future__ import annotations

from typing import Any

from ds_hydra.zero_hetero.deepspeed_names import handed_on, install
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

__version__ = "0.1.0"
__all__ = [
    "CheckpointError", "ConfigError", "PlanError", "__version__", "add_config_arguments", "check_config",
    "init_distributed", "initialize",
]  # fmt: skip

install()
_of_deepspeed = handed_on(__name__)


def __getattr__(name: str) -> Any:
    """Load the runtime on first use: planning must not pay for importing torch and DeepSpeed."""
    if name in ("initialize", "check_config"):
        from ds_hydra import entry

        return getattr(entry, name)
    if name == "init_distributed":
        from ds_hydra.host.launch import init_as_deepspeed

        return init_as_deepspeed
    if name == "dist":  # DeepSpeed sets its own in its own initialize()
        name = "comm"
    return _of_deepspeed(name)
