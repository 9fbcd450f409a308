"""The user's model in, a copy of it in FP64 that is small enough to run in a second out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_hydra.pipe.models.adapted import adapt_alike
from ds_hydra.pipe.models.refusals import find_layers
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.changes import changes_since
from ds_hydra.self_check.few_layers import copy_in_few_layers
from ds_hydra.self_check.layer_kinds import enough_layers, has_all_kinds
from ds_hydra.self_check.schemes import head_divisor, num_layers, spread_over
from ds_hydra.self_check.shrink import POSITIONS, VOCABULARY, shrunk_config


class NoCopyError(Exception):
    """There is no small copy of a model; the text says why."""


@dataclass(frozen=True)
class SmallCopy:
    """A model to compare with: no user's value is in it, and its parameters are drawn so that errors show."""

    model: Any
    num_layers: int


def small_copy(
    model: Any,
    schemes: Iterable[PipelineShape],
    memory_bytes: float,
    *,
    positions: int = POSITIONS,
    vocabulary: int = VOCABULARY,
) -> SmallCopy:
    """A copy of a Hugging Face model on which `schemes` can be run; only the model's structure is read.

    Small widths, four layers or more, and what the user changed since the config made it. Where that cannot be, its own
    widths in few layers, if that can be trained in `memory_bytes`. It knows sequences of `positions` tokens if the
    model does, and the first tokens of the vocabulary: `vocabulary` of them or some more. Raises NoCopyError.
    """
    schemes = list(schemes)
    try:
        return _small_widths(model, schemes, positions, vocabulary)
    except NoCopyError as error:
        try:
            return SmallCopy(*copy_in_few_layers(model, schemes, memory_bytes, vocabulary))
        except Exception as other:
            raise NoCopyError(f"{error}; nor in few layers: {other}") from other


def _small_widths(model: Any, schemes: Sequence[PipelineShape], positions: int, vocabulary: int) -> SmallCopy:
    text = model.config.get_text_config()
    try:
        heads = int(text.num_attention_heads)
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        fewer = head_divisor(heads, kv_heads, schemes)
        changes = changes_since(model, _made_by(model, model.config, torch.device("meta")))
        if changes is None:
            raise NoCopyError("it is not made in small: its parameters or methods are not those that its config makes")
        path = find_layers(model)
        whole: Any = model.get_submodule(path)
        for layers in enough_layers(model, whole, num_layers(schemes)):
            config = shrunk_config(
                model.config, layers, fewer, positions, vocabulary, spread_experts=spread_over(schemes)
            )
            small = _made_by(model, config, torch.device("cpu"))
            changes.apply(small, partial(_in_few_layers, layers_path=path, layers=layers))
            if has_all_kinds(small.get_submodule(path), whole):
                _draw_parameters(small)
                return SmallCopy(small, layers)
        raise NoCopyError("it is not made in small: its layers are of more kinds than its config makes")
    except NoCopyError:
        raise
    except Exception as error:
        raise NoCopyError(f"it cannot be made in small ({type(error).__name__}: {error})") from error


def _made_by(model: Any, config: Any, device: torch.device) -> Any:
    """A model of the class of `model` and a config, in FP64, with the attention that defines what it computes, and with
    the same kind of adapters."""
    config = copy.deepcopy(config)
    extra = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    with device:
        made = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float64, **extra)
        adapt_alike(made, model)
        return made.double()


def _in_few_layers(name: str, layers_path: str, layers: int) -> str:
    """The path in a copy with `layers` layers for one in the whole model: of layer i there, layer i % layers here."""
    prefix = f"{layers_path}."
    if not name.startswith(prefix):
        return name
    index, dot, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(index) % layers}{dot}{rest}"


def _draw_parameters(model: nn.Module) -> None:
    """Random values whose gradients are all felt: norms are not 1, biases not 0, attention looks somewhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            scale = 0.1 if parameter.dim() < 2 else 0.7 * parameter.shape[-1] ** -0.5
            parameter.add_(noise, alpha=scale)
