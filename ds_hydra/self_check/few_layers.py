"""Shrinks a model that no config makes to a few layers and a part of its vocabulary, in its own widths.

For what a user made of a model in ways that cannot be repeated in small: adapters, parametrizations, classes with
arguments of their own, patched methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_hydra.pipe.adapters import head_of
from ds_hydra.pipe.models.meta_copy import copy_to_meta, in_place_of, parameter_hooks, replace_parameters
from ds_hydra.pipe.models.refusals import find_layers, known_tokens
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.layer_kinds import kept_layers
from ds_hydra.self_check.schemes import copies_at_once
from ds_hydra.self_check.shrink import FEW_POSITIONS

_ROWS = 512  # of the vocabulary, at least


def copy_in_few_layers(
    model: Any, schemes: Sequence[PipelineShape], memory_bytes: float, vocabulary: int = 0
) -> tuple[Any, int]:
    """The copy, in FP64 with values drawn anew, and its number of layers. Raises MemoryError where it is too large.

    It knows the first tokens of the model's: `vocabulary` or some more.
    """
    path = find_layers(model)
    layers: Any = model.get_submodule(path)
    kept, kinds = kept_layers(model, layers, max(2, *(scheme.parts * scheme.pp for scheme in schemes)))
    small = with_layers(model, path, kept)
    rows = _cut_vocabulary(small, max(_ROWS, vocabulary))
    for config in _configs(small):
        _shorten(config, rows)
    bytes_needed = 8 * copies_at_once(schemes) * sum(parameter.numel() for parameter in small.parameters())
    if bytes_needed > memory_bytes:
        raise MemoryError(
            f"{len(kept)} layers of {kinds} kinds take {bytes_needed / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB"
        )
    _draw(small)
    return small.to("cpu", torch.float64), len(kept)  # buffers of a model on a GPU are still there


def with_layers(model: Any, path: str, kept: Sequence[int]) -> Any:
    """A copy on the meta device with the layers `kept` of those at `path`, and the gradient hooks of parameters."""
    small, layers = copy_to_meta(model), model.get_submodule(path)
    for name, hooks in parameter_hooks(model).items():
        for hook in hooks:
            small.get_parameter(name).register_hook(hook)
    few: Any = small.get_submodule(path)
    for index in sorted(set(range(len(layers))) - set(kept), reverse=True):
        del few[index]
    for index, layer in enumerate(few):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                module.layer_idx = index
    for config in _configs(small):
        values = vars(config)
        for key, value in list(values.items()):
            if isinstance(value, list | tuple) and len(value) == len(layers):
                values[key] = type(value)(value[index] for index in kept)
            elif isinstance(value, int) and value == len(layers) and "layer" in key:
                values[key] = len(kept)
    return small


def _configs(model: Any) -> list[Any]:
    return list({id(c): c for c in (model.config, model.config.get_text_config())}.values())


def _cut_vocabulary(model: Any, rows: int) -> int:
    """Leave the first `rows` of the embeddings and of the head, which stay tied if they are; the number of rows."""
    vocabulary, ends = known_tokens(model), (model.get_input_embeddings(), head_of(model))
    if not all("weight" in module._parameters for module in ends):  # wrapped: what their rows are is not known
        return vocabulary
    rows = min(vocabulary, rows)
    cut: dict[int, nn.Parameter] = {}
    for module in ends:
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.shape[:1] != (vocabulary,):
                continue
            if id(parameter) not in cut:
                cut[id(parameter)] = in_place_of(parameter, parameter.data[:rows])
            module._parameters[name] = cut[id(parameter)]
        for key in ("num_embeddings", "out_features"):
            if vars(module).get(key) == vocabulary:
                setattr(module, key, rows)
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = min(module.padding_idx, rows - 1)
    return rows


def _shorten(config: Any, rows: int) -> None:
    values = vars(config)
    for key, value in list(values.items()):
        if isinstance(value, dict) and "original_max_position_embeddings" in value:
            values[key] = value | {"original_max_position_embeddings": FEW_POSITIONS}
    if "vocab_size" in values:
        values["vocab_size"] = rows
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"


def _draw(model: nn.Module) -> None:
    """Random FP64 values in place of what is on the meta device; tied parameters stay tied."""
    generator = torch.Generator().manual_seed(1)

    def drawn(name: str, parameter: nn.Parameter) -> nn.Parameter:
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        value *= 0.1 if value.dim() < 2 else value.shape[-1] ** -0.5
        if value.dim() < 2 and name == "weight":  # of a norm
            value += 1.0
        return in_place_of(parameter, value)

    replace_parameters(model, drawn)
