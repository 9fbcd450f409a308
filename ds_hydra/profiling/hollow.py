"""A model's config in; a source of stages without parameter values out, so that a model of any size can be measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import for_strategies
from ds_hydra.pipe.models.unset import stand_in_values
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.zero_hetero.errors import ConfigError


def hollow_source(
    path: str | Path, options: StageOptions = AS_WRITTEN, strategies: Iterable[StrategyShape] = ()
) -> CausalLM:
    """Stages of the Hugging Face causal language model of a config file or checkpoint folder, for these strategies.

    Fit for timing and counting, not for training. ConfigError for what is no such model or cannot be cut into stages.
    """
    return for_strategies(CausalLM(hollow_model(path), options), strategies)


def hollow_model(path: str | Path) -> Any:
    """The Hugging Face causal language model of a config file or checkpoint folder, without its values.

    Parameters have shapes but next to no memory of their own, buffers are zeros. ConfigError for what is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path(path).exists():
        raise ConfigError(f"the model {str(path)!r} does not exist: give a config JSON or a checkpoint folder")
    try:
        config = AutoConfig.from_pretrained(str(path))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} is not the config of a causal language model ({error}): give its config.json"
        ) from error
    _fill(model)
    return model


def _fill(model: Any) -> None:
    """Replace what is on the meta device: parameters by few numbers, of which no two rows are alike, since what mixes
    tokens is found by trying; buffers by zeros."""
    values = stand_in_values(model)
    # Tied weights are one parameter in two modules and stay that.
    replaced = {
        id(parameter): nn.Parameter(values[name], requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replaced[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, name, torch.zeros(value.shape, dtype=value.dtype))
