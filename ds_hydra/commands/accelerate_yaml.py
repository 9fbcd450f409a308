"""What `accelerate launch --config_file` reads in; the DeepSpeed config that Accelerate makes of it, out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_hydra.config.checks import AUTO, read_config
from ds_hydra.config.hosts import ACCELERATE
from ds_hydra.zero_hetero.errors import ConfigError

YAML = (".yaml", ".yml")
_FILE = "deepspeed_config_file"


def config_of(path: Path, host: str) -> dict[str, Any]:
    """The DeepSpeed config of a file: its own, or that of Accelerate's YAML. ConfigError where it has none.

    What Accelerate or Trainer fill in is "auto"; `host` is one of `config.hosts.HOSTS`.
    """
    if path.suffix not in YAML:
        return read_config(config=str(path))
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    plugin = given.get("deepspeed_config") if isinstance(given, Mapping) else None
    if not isinstance(plugin, Mapping):
        raise ConfigError(f"{path} has no block deepspeed_config: name a DeepSpeed config, or a YAML with one")
    if isinstance(plugin.get(_FILE), str):
        named = Path(plugin[_FILE])
        return read_config(config=str(named if named.exists() else path.parent / named))
    return _made(plugin, str(given.get("mixed_precision", "no")), host)


def _made(plugin: Mapping[str, Any], precision: str, host: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plugin.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        if (device := plugin.get(f"{name}_device", "none")) != "none":
            zero[name] = {"device": device}
    config: dict[str, Any] = {
        "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "zero_optimization": zero,
        "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", AUTO),
        "gradient_clipping": plugin.get("gradient_clipping", AUTO),
    }  # fmt: skip
    if host == ACCELERATE:
        return config | ({precision: {"enabled": True}} if precision in ("bf16", "fp16") else {})
    # Trainer compares these with its arguments, and gives the numbers itself.
    autos = dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), AUTO)
    return config | autos | {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}
