"""Accelerate over the engine: an `Accelerator` whose loop runs planned steps, and what Accelerate and transformers see
of a config with the block "hydra".

[Note: configs of hosts]
Both hosts go through a config before an engine is made: they fill in each "auto", refuse one that they have no value
for, write over "steps_per_print", and where the ZeRO stage is 3 cut a model while it is loaded. What is the engine's in
the config is none of their business, so they see something else there:

    the config                                       a host sees                      the engine gets
    "hydra": {"strategies": "auto"}                  the same, and goes not into it   the block as written
    "zero_optimization": {"stage": 3, ...} or none   "zero_optimization": {"stage": 1}   the block as written
    "steps_per_print": 5                             infinity, as Accelerate has it   5
    what the engine does its own way, such as        nothing                             the block as written
    "tensor_parallel" (`deepspeed_keys.TOLD`)
    everything else                                  the same, each "auto" filled in  what the host made of it

Masters are sharded as by stage 1 whatever the stage is, so no host has to act as for another one. A config without the
block "hydra" is none of this module's business.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import parse_flag_from_env
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.config.checks import AUTO
from ds_hydra.config.deepspeed_settings import TOLD
from ds_hydra.config.hydra_block import BLOCK
from ds_hydra.engine.engine import HydraEngine
from ds_hydra.entry import initialize
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.zero_hetero.errors import ConfigError

_GIVEN = "hydra_given"  # key of a host's config: what stood there for the engine
_FOR_ENGINE = ("zero_optimization", "steps_per_print", *TOLD)


@functools.cache
def teach_hosts() -> None:
    """From now on hosts see configs with the block as [Note: configs of hosts] says; calling it again does nothing."""
    read_stage, fill_in = HfDeepSpeedConfig.set_stage_and_offload, DeepSpeedPlugin.deepspeed_config_process

    # The one method that every form of a config goes through, before a stage is asked for: a path, a dict, base64 text,
    # an object that holds it, and a file that `accelerate launch` names.
    def read_stage_of_hosts(self: Any) -> None:
        if BLOCK in self.config and _GIVEN not in self.config:
            self.config[_GIVEN] = {key: self.config.pop(key) for key in _FOR_ENGINE if key in self.config}
            self.config["zero_optimization"] = {"stage": 1}
        read_stage(self)

    def fill_in_others(self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
        if prefix not in (f"{BLOCK}.", f"{_GIVEN}."):  # it calls itself for each block
            fill_in(self, prefix, *args, **kwargs)

    HfDeepSpeedConfig.set_stage_and_offload = read_stage_of_hosts
    DeepSpeedPlugin.deepspeed_config_process = fill_in_others


def for_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """A host's config as the engine gets it: what hosts see something else of is as it was written."""
    given = config.get(_GIVEN)
    if given is None:
        return dict(config)
    others = {key: value for key, value in config.items() if key not in (_GIVEN, *_FOR_ENGINE)}
    return others | {key: _decided(value) for key, value in given.items()}


def _decided(value: Any) -> Any:
    """A block of ZeRO without each "auto": a host would fill it in, and the engine leaves it at its own way."""
    if not isinstance(value, Mapping):
        return value
    return {key: _decided(one) for key, one in value.items() if one != AUTO}


_USE_CPU = "ACCELERATE_USE_CPU"  # what `accelerate launch --cpu` sets


@contextmanager
def in_place_of_deepspeed(loss_fn: TokenLoss | None = None) -> Iterator[None]:
    """Within it `deepspeed.initialize`, by which Accelerate makes its engine, is `ds_hydra.initialize`."""
    # Accelerate names the function in the midst of 300 lines that read its own settings, and has no hook there. So the
    # name is lent for the length of one call, which makes one engine. ds_hydra.initialize calls DeepSpeed's own for a
    # config without a block: it gets the name back first.
    plain = deepspeed.initialize

    def lent(**arguments: Any) -> Any:
        deepspeed.initialize = plain
        return initialize(**arguments | {"config_params": for_engine(arguments["config_params"])}, loss_fn=loss_fn)

    with _lent(lent):
        yield


@contextmanager
def without_engine() -> Iterator[None]:
    """Within it `deepspeed.initialize`, by which TRL makes an engine for a reference's scores, only places the model on
    this rank's device, which holds it whole, where the config has the block "hydra"."""

    plain = deepspeed.initialize

    def placed(model: Any, config: Any, **arguments: Any) -> Any:
        if "hydra" not in config:
            return plain(model=model, config=config, **arguments)
        return model.to(get_accelerator().current_device_name()), None, None, None

    with _lent(placed):
        yield


@contextmanager
def _lent(function: Callable[..., Any]) -> Iterator[None]:
    plain = deepspeed.initialize
    deepspeed.initialize = function
    try:
        yield
    finally:
        deepspeed.initialize = plain


class HydraAccelerator(Accelerator):
    """An `Accelerator` whose DeepSpeed engine is the one of the config's block "hydra".

    A loop of `accelerator.accumulate(model)`, `model(**batch).loss`, `accelerator.backward(loss)` and
    `optimizer.step()` runs as it is [Note: three calls]. Batches are collected until gradients would be synchronised,
    and run in that `backward` as one planned step. A loss can be read after it, and before at some cost. Takes the
    arguments of `Accelerator`, and the `loss_fn` of `ds_hydra.initialize`. Without the block it is the plain one.
    """

    def __init__(self, *args: Any, loss_fn: TokenLoss | None = None, **kwargs: Any):
        self._loss_fn = loss_fn
        cpu = bool(kwargs.get("cpu")) or parse_flag_from_env(_USE_CPU)
        launched = "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()
        if (cpu or launched) and _names_the_block(kwargs):
            if cpu and torch.accelerator.is_available():
                raise ConfigError(
                    f"Accelerator(cpu=True), or {_USE_CPU}: Accelerate then trains without DeepSpeed, and the config's "
                    'block "hydra" would have no effect; remove it, or the block'
                )
            kwargs.pop("cpu", None)  # there is nothing but CPUs
            os.environ.pop(_USE_CPU, None)
            if launched:
                PartialState(cpu=True)  # else Accelerate takes launched ranks without a GPU for processes alone
        super().__init__(*args, **kwargs)

    def _prepare_deepspeed(self, *args: Any) -> Any:
        with in_place_of_deepspeed(self._loss_fn):
            return super()._prepare_deepspeed(*args)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Where gradients are synchronised, run the step; the script sees that gradients are not its own."""
        super().backward(loss, **kwargs)
        engine = self._engine()
        if engine is not None and self.sync_gradients:
            engine.three_calls.shows_gradients = True

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """The norm of the update's gradient. ConfigError unless the update was clipped so, by gradient_clipping."""
        engine = self._engine()
        if engine is not None and (float(max_norm), float(norm_type)) != (engine.gradient_clipping() or math.inf, 2.0):
            raise ConfigError(
                f"accelerator.clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) comes when the update is "
                f"made, by the config's gradient_clipping, {engine.gradient_clipping()}: give that number there"
            )
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def _engine(self) -> HydraEngine | None:
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)
        engine = getattr(wrapped, "engine", None)
        return engine if isinstance(engine, HydraEngine) else None

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """The model's parameters on CPU in the type that it is computed in. Every rank must call it."""
        if not isinstance(model, HydraEngine):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return {name: value.to(model.types.compute) for name, value in model.fp32_state_dict().items()}


def _names_the_block(arguments: Mapping[str, Any]) -> bool:
    """Whether a config that an `Accelerator` is given, or that its launcher names, has the block "hydra"."""
    given = arguments.get("deepspeed_plugin") or arguments.get("deepspeed_plugins")
    if given is None and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        given = DeepSpeedPlugin()
    plugins = given.values() if isinstance(given, Mapping) else [given]
    return any(plugin is not None and BLOCK in plugin.deepspeed_config for plugin in plugins)
