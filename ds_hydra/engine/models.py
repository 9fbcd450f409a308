"""The user's model in, its source of stages out."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.options import StageOptions
from ds_hydra.pipe.models.refusals import known_tokens
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.zero_hetero.errors import ConfigError


def model_source(
    model: Any, options: StageOptions, *, loss_fn: TokenLoss | None = None, device: torch.device | None = None
) -> ModelSource:
    """The source of stages for the kind of model that was given, trained on `loss_fn` in place of the cross entropy.

    `device` is where it will train. ConfigError if its layers cannot be found, or for a loss that cannot be computed
    token by token.
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
        return LayerList(model, sp_overlap=options.sp_overlap)
    if isinstance(model, PreTrainedModel):
        if loss_fn is not None:
            check_token_loss(loss_fn, known_tokens(model) or 2, device)
        return CausalLM(model, **options._asdict(), token_loss=loss_fn)
    kind = type(model).__name__
    what = "a module whose layers ds_hydra cannot find" if isinstance(model, nn.Module) else "not a module"
    raise ConfigError(
        f"the model is a {kind}, {what}: give a Hugging Face causal language model or a DeepSpeed PipelineModule"
    )


def check_token_loss(loss_fn: TokenLoss, vocabulary: int, device: torch.device | None = None) -> None:
    """ConfigError unless a loss gives one number for each token, which depends on the logits of that token alone."""
    # Tokens of one sequence may stand on several ranks, and on one rank in several blocks of logits. So three tokens
    # are tried, and then two of them with other logits for the first: the second one's loss must stay what it was.
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocabulary, generator=random, dtype=torch.float64).to(device).requires_grad_()
    labels = torch.tensor([vocabulary - 1, 0, vocabulary // 2], device=device)
    form = "loss_fn must be a function of logits (T, V) and labels (T,) that returns the loss of each token, (T,)"
    try:
        with torch.enable_grad():
            losses = loss_fn(logits, labels)
            others = loss_fn(torch.cat((logits[:1].detach() * 2 + 1, logits[1:2].detach())), labels[:2])
    except Exception as error:
        raise ConfigError(f"{form}; for 3 tokens it raised {type(error).__name__}: {error}") from error
    if not isinstance(losses, Tensor) or losses.shape != (3,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(f"{form}, but for 3 tokens it returned {shape}: take its mean or sum out (reduction='none')")
    if not losses.requires_grad:
        raise ConfigError(f"{form}, but what it returned has no gradient: compute it from the logits by torch")
    beside_two, beside_one = losses[1].item(), others[1].item()
    if not math.isclose(beside_two, beside_one, rel_tol=1e-6, abs_tol=1e-9):
        raise ConfigError(
            f"{form}, but the loss of one token depends on other tokens ({beside_two:.6g} beside two, "
            f"{beside_one:.6g} beside one): blocks of tokens are computed apart, so leave means over tokens out"
        )
