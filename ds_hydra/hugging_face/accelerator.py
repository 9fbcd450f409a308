"""Accelerate's loop in, as a script has it; the engine's planned steps out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import parse_flag_from_env
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.config.hydra_block import BLOCK
from ds_hydra.engine.engine import HydraEngine
from ds_hydra.entry import initialize
from ds_hydra.hugging_face.host_configs import for_engine
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.zero_hetero.errors import ConfigError

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
