"""The user's model in, its source of stages out."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.zero_hetero.errors import ConfigError


def model_source(model: Any, options: StageOptions, *, loss_fn: TokenLoss | None = None) -> ModelSource:
    """The source of stages for the kind of model that was given, trained on `loss_fn` in place of the cross entropy.

    ConfigError if its layers cannot be found.
    """
    from transformers import PreTrainedModel

    model = base_of(model)
    if isinstance(model, PipelineModule):
        if loss_fn is not None:
            raise ConfigError("a PipelineModule has a loss_fn of its own: give it there, and not to initialize()")
        if options.activation_checkpointing:
            raise ConfigError(
                "hydra.activation_checkpointing works with Hugging Face models only; wrap the layers' own"
            )
        return LayerList(model, options)
    if isinstance(model, PreTrainedModel):
        return CausalLM(model, options, token_loss=loss_fn)
    kind = type(model).__name__
    what = "a module whose layers ds_hydra cannot find" if isinstance(model, nn.Module) else "not a module"
    raise ConfigError(
        f"the model is a {kind}, {what}: give a Hugging Face causal language model or a DeepSpeed PipelineModule"
    )
