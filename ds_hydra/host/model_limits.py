"""A user's model in; what it takes of the data, and the limits that it sets to token ids and positions, out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.data.columns import ModelInput
from ds_hydra.data.tokens import Limits


def limits_of(config: HydraConfig, model: nn.Module) -> Limits:
    """What a job can train on. ConfigError for a context that is longer than the model's positions."""
    # Models of BERT's kind take tokens without types for tokens of type 0; GPT-2 takes a type for one more token.
    has_types = hasattr(_text_config(model), "type_vocab_size")
    inputs = ModelInput(arguments_of(model), has_types)
    return Limits(config.context_length, config.too_long, vocab_size(model), max_positions(model), inputs)


def vocab_size(model: nn.Module) -> int | None:
    """Rows of the model's input embedding; None when the model does not say which module that is."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", None)


def max_positions(model: nn.Module) -> int | None:
    """The number of positions that the model's config allows; None when it names none."""
    positions = getattr(_text_config(model), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Names that a Hugging Face model's forward takes, also where it hands on what it does not name itself.

    Of other models, whose forward takes one thing, there are none.
    """
    if not hasattr(model, "config") or not isinstance(model, nn.Module):
        return frozenset()
    names, hands_on = _named_by(_forwards(model))
    if hands_on:
        inner = [module for module in model.modules() if not type(module).__module__.startswith("torch.")]
        names |= _named_by({forward: None for module in inner for forward in _forwards(module)})[0]
    return frozenset(names)


def _named_by(forwards: Iterable[Callable[..., Any]]) -> tuple[set[str], bool]:
    """The arguments of these functions, and whether one hands others on."""
    names, hands_on = set[str](), False
    for forward in forwards:
        for parameter in inspect.signature(forward).parameters.values():
            if parameter.kind == inspect.Parameter.VAR_KEYWORD:
                hands_on = True
                # kwargs["langs"] and kwargs.get("langs") have the name among their constants.
                code = getattr(inspect.unwrap(forward), "__code__", None)
                names |= {text for text in getattr(code, "co_consts", ()) if isinstance(text, str)}
            elif parameter.kind != inspect.Parameter.VAR_POSITIONAL:
                names.add(parameter.name)
    return names - {"self"}, hands_on


def _forwards(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """A module's forward and those of its classes, which it may call."""
    if "forward" in vars(module):
        yield module.forward
    for kind in type(module).__mro__:
        if "forward" in vars(kind) and not kind.__module__.startswith("torch."):
            yield vars(kind)["forward"]
