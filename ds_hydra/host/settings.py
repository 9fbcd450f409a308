"""DeepSpeed's half of a config in; the settings as DeepSpeed itself reads them, or ConfigError, out."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger as deepspeed_logger
from torch import nn

from ds_hydra.config.checks import AUTO, nearest
from ds_hydra.config.deepspeed_settings import stage_of
from ds_hydra.config.hydra_block import HydraConfig, ParsedConfig
from ds_hydra.host import refusals
from ds_hydra.host.optimizers import optimizer_of_block
from ds_hydra.zero_hetero.errors import ConfigError

_OFFLOADS = frozenset(("offload_optimizer", "offload_param"))
NO_MONITORS = DeepSpeedMonitorConfig()
_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def deepspeed_config(parsed: ParsedConfig) -> DeepSpeedConfig:
    """DeepSpeed's half of the config as DeepSpeed itself reads it. ConfigError carries the text of its own errors."""
    try:
        config = DeepSpeedConfig(dict(parsed.deepspeed))
        _answer_as_written(config, parsed.source.get("zero_optimization"))
    except (AssertionError, DeepSpeedConfigError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"config: DeepSpeed refuses its settings: {error}. Correct or remove that one") from error
    if config.scheduler_name is not None:
        config.scheduler_params = dict(config.scheduler_params or {})
    for block, package in _MONITOR_PACKAGES.items():
        if getattr(config.monitor_config, block).enabled and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f'config: the monitor "{block}" is enabled but the package {package!r} is not installed: '
                f"pip install {package}, or disable it"
            )
    return config


def _answer_as_written(config: DeepSpeedConfig, zero: Any) -> None:
    """Let the engine's getters answer from the user's block "zero_optimization", which has no other effect, as far as
    that is true: masters are shared out as in stage 1, and nothing is offloaded."""
    if not isinstance(zero, Mapping):
        return
    stage = min(stage_of(zero.get("stage")), 1)
    known = {name for key, field in DeepSpeedZeroConfig.model_fields.items() for name in (key, field.alias)}
    true = {key: value for key, value in zero.items() if key in known - _OFFLOADS and value != AUTO}
    config.zero_config = DeepSpeedZeroConfig(**{**true, "stage": stage})
    config.zero_optimization_stage, config.zero_enabled = stage, stage > 0


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


def check_updates(parsed: ParsedConfig, config: DeepSpeedConfig) -> None:
    """Make the blocks "optimizer" and "scheduler" once, over parameters of one element, and throw them away.

    So a wrong one is refused now, and not once the masters are made, minutes into the start of a large job.
    """
    block = parsed.deepspeed.get("optimizer") or {"type": "SGD", "params": {"lr": 1e-3}}
    make = optimizer_of_block(block["type"], dict(block.get("params") or {}))
    name = config.scheduler_name
    if name is None:
        return
    scheduler = _scheduler_class(name)
    if scheduler is None:
        torch_names = [n for n, kind in vars(torch.optim.lr_scheduler).items() if inspect.isclass(kind)]
        hint = nearest(name, [*lr_schedules.VALID_LR_SCHEDULES, *torch_names])
        raise ConfigError(f'config: scheduler.type "{name}" is not known; {hint}')
    params = config.scheduler_params
    groups = max((len(rates) for rates in params.values() if isinstance(rates, list)), default=1)  # a rate for each
    optimizer = make([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(max(1, groups))])
    with quietly():
        try:
            refusals.scheduler_of_metrics(scheduler(optimizer, **params))
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            accepted = ", ".join(list(inspect.signature(scheduler).parameters)[1:])
            raise ConfigError(f"config: scheduler.params of {name}: {error}; it takes {accepted}") from None


@contextmanager
def quietly() -> Iterator[None]:
    """Within it DeepSpeed's schedules do not warn, on every rank, of their own first call."""
    level = deepspeed_logger.level
    deepspeed_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        deepspeed_logger.setLevel(level)
