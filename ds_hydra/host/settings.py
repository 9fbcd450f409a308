"""DeepSpeed's half of a config in; the settings as DeepSpeed itself reads them, or ConfigError, out."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from ds_hydra.config.checks import nearest
from ds_hydra.config.hydra_block import HydraConfig, ParsedConfig
from ds_hydra.zero_hetero.errors import ConfigError

NO_MONITORS = DeepSpeedMonitorConfig()
_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def deepspeed_config(parsed: ParsedConfig) -> DeepSpeedConfig:
    """DeepSpeed's half of the config as DeepSpeed itself reads it. ConfigError carries the text of its own errors."""
    try:
        config = DeepSpeedConfig(dict(parsed.deepspeed))
    except (AssertionError, DeepSpeedConfigError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"config: DeepSpeed refuses its settings: {error}. Correct or remove that one") from error
    _check_scheduler(config)
    for block, package in _MONITOR_PACKAGES.items():
        if getattr(config.monitor_config, block).enabled and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f'config: the monitor "{block}" is enabled but the package {package!r} is not installed: '
                f"pip install {package}, or disable it"
            )
    return config


def deepspeed_defaults(parsed: ParsedConfig, config: DeepSpeedConfig) -> tuple[str, ...]:
    """One line for the log for each thing that DeepSpeed does although the config does not mention it."""
    if parsed.source.get("gradient_clipping") is not None or not config.gradient_clipping:
        return ()
    norm = f"a norm of {config.gradient_clipping:g}"
    return (f'"gradient_clipping" is not set: gradients are clipped to {norm}, as DeepSpeed does; 0.0 never clips',)


def with_model_settings(config: HydraConfig, model: Any) -> HydraConfig:
    """The block "hydra", with checkpointing on if the script called the model's gradient_checkpointing_enable()."""
    # The newer releases' name first: they warn about the other one.
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    asked = next((bool(getattr(model, name)) for name in names if hasattr(model, name)), False)
    return replace(config, activation_checkpointing=config.activation_checkpointing or asked)


def _scheduler_class(name: str) -> Callable[..., Any] | None:
    """The class behind scheduler.type: DeepSpeed's own first, then torch's."""
    if name in lr_schedules.VALID_LR_SCHEDULES:
        return getattr(lr_schedules, name)
    found = getattr(torch.optim.lr_scheduler, name, None)
    return found if inspect.isclass(found) else None


def _check_scheduler(config: DeepSpeedConfig) -> None:
    """Check name and arguments of the scheduler block, before there is an optimizer to build it on."""
    name = config.scheduler_name
    if name is None:
        return
    scheduler = _scheduler_class(name)
    if scheduler is None:
        torch_names = [n for n, kind in vars(torch.optim.lr_scheduler).items() if inspect.isclass(kind)]
        hint = nearest(name, [*lr_schedules.VALID_LR_SCHEDULES, *torch_names])
        raise ConfigError(f'config: scheduler.type "{name}" is not known; {hint}')
    config.scheduler_params = dict(config.scheduler_params or {})
    try:
        inspect.signature(scheduler).bind(None, **config.scheduler_params)
    except TypeError as error:
        accepted = ", ".join(list(inspect.signature(scheduler).parameters)[1:])
        raise ConfigError(f"config: scheduler.params of {name}: {error}; it takes {accepted}") from None
