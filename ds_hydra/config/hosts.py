"""What the host that a config is written for fills in, in place of "auto", before the engine reads the config. Pure.

A host is what goes through the batches: a script by DeepSpeed's three calls or by `train_batch`, or a library.
transformers' Trainer takes the values from its TrainingArguments, and TRL's trainers are such Trainers; Accelerate
takes them from its DataLoader, its `mixed_precision` and its dummy optimizer and scheduler. For scripts that call
DeepSpeed themselves nobody fills in anything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ds_hydra.config.checks import AUTO, AUTO_REMEDY, nearest
from ds_hydra.zero_hetero.errors import ConfigError

CALLS, STEPS, TRAINER, ACCELERATE = "three calls", "train_batch", "Trainer", "Accelerate"
TRAINERS = (TRAINER, "SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer")
HOSTS = (CALLS, STEPS, *TRAINERS, ACCELERATE)

_BOTH: dict[str, Any] = {  # by place in the config: a value that the host may fill in
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 1000,
    "bf16.enabled": True,
    "fp16.enabled": False,
}
_BY_TRAINER = {**_BOTH, "optimizer.params.betas": (0.9, 0.999), "optimizer.params.eps": 1e-8}
FILLED: dict[str, dict[str, Any]] = {ACCELERATE: _BOTH, **dict.fromkeys(TRAINERS, _BY_TRAINER)}
_ONE_OF_TWO = ("bf16.enabled", "fp16.enabled")


def filled_in(config: Mapping[str, Any], host: str | None) -> dict[str, Any]:
    """A copy of a config with a value for each "auto" that the host fills in. They stand in for checks alone: the host
    has its own. ConfigError for a host that is not known; with None nothing is filled in."""
    if host is not None and host not in HOSTS:
        raise ConfigError(f"there is no host {host!r}; {nearest(host, HOSTS)}")
    filled = copy.deepcopy(dict(config))
    for place, value in FILLED.get(host or "", {}).items():
        *outer, key = place.split(".")
        block = value_at(filled, *outer)
        if isinstance(block, dict) and block.get(key) == AUTO:
            block[key] = value
    _only_one_type(config, filled)
    return filled


def _only_one_type(config: Mapping[str, Any], filled: dict[str, Any]) -> None:
    """Of "bf16" and "fp16" one is on at most, and one of them is where a host says so of it alone."""
    bf16, fp16 = (value_at(config, *place.split(".")) for place in _ONE_OF_TWO)
    if (bf16, fp16) == (AUTO, True):
        filled["bf16"]["enabled"] = False
    elif fp16 == AUTO and not bf16 and value_at(filled, "fp16", "enabled") is False:
        filled["fp16"]["enabled"] = True


def value_at(config: Mapping[str, Any], *path: str) -> Any:
    """What stands there, a key in each block; None where there is nothing."""
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def refuse_auto(settings: Mapping[str, Any], host: str | None) -> None:
    """Raise ConfigError, naming each place, where a value is "auto" that nobody fills in."""
    places = sorted(autos(settings, ""))
    if places:
        raise ConfigError(
            f'config: {", ".join(places)} {"are" if len(places) > 1 else "is"} "{AUTO}": {_remedy(host)}, or leave the '
            "key out for DeepSpeed's default"
        )


def _remedy(host: str | None) -> str:
    return f"{host} does not fill that in; write the value" if host in FILLED else AUTO_REMEDY


def autos(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The places of settings that are "auto", blocks within blocks, each behind `prefix`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from autos(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield f"{prefix}{key}"
