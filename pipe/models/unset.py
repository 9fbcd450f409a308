"""A Hugging Face model built on the meta device in; its buffers, and any of its parameters as drawn at random, out.

`with torch.device("meta"): AutoModelForCausalLM.from_config(config)` makes a model of any size in no memory. What such
a model lacks is made here by the model's own `_init_weights`, which sets whatever the constructor would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.zero_hetero.errors import ConfigError


def unset_buffers(model: nn.Module) -> list[str]:
    """Names of the buffers on the meta device."""
    return [name for name, buffer in model.named_buffers() if buffer.is_meta]


def set_buffers(model: Any, stored: Mapping[str, Tensor]) -> None:
    """Give buffers on the meta device their values: the `stored` ones, else what the model's `_init_weights` sets.

    Raises ConfigError with the name of a buffer that neither tells.
    """
    for name in unset_buffers(model):
        owner, leaf = _owner(model, name)
        buffer = owner._buffers[leaf]
        assert buffer is not None
        if name in stored:
            owner._buffers[leaf] = stored[name].to(buffer.dtype)
            continue
        # What is set whatever was there before is what comes out twice alike, from zeros and from ones.
        found = []
        for fill in (torch.zeros_like, torch.ones_like):
            owner._buffers[leaf] = fill(buffer, device="cpu")
            _initialize(model, name, seed=0)
            found.append(owner._buffers[leaf])
        if not _equal(*found):
            owner._buffers[leaf] = buffer
            raise ConfigError(
                f"the buffer {name} of the model is on the meta device, and {type(model).__name__}._init_weights does "
                "not set it: build the model with real buffers (accelerate's init_empty_weights keeps them)"
            )


def drawn_parameter(model: Any, name: str, seed: int) -> Tensor:
    """A parameter on the meta device as the model initialises it, in FP32: the same whoever asks, and in any order.

    Only this parameter takes memory. The numbers follow from `seed` and the name. Raises ConfigError if
    `_init_weights` does not set it.
    """
    owner, leaf = _owner(model, name)
    hollow = owner._parameters[leaf]
    assert hollow is not None
    assert hollow.is_meta, f"{name} has a value"
    value = torch.full(hollow.shape, float("nan"))
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    try:
        _initialize(model, name, seed)
    finally:
        owner._parameters[leaf] = hollow
    if value.sum().isnan():
        raise ConfigError(
            f"{type(model).__name__}._init_weights does not set all of the parameter {name}: give a folder of weights "
            "in hydra.initial_weights, or build the model with real parameters"
        )
    return value


def stand_in_values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; those on the meta device as numbers that take next to no memory, no two rows of them alike.

    For a forward of which only the structure counts, such as how tokens are numbered.
    """
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta and parameter.is_floating_point():
            # Row i of an embedding is the window of one random line that begins at i.
            generator = torch.Generator().manual_seed(_number(0, name))
            line = torch.randn(sum(parameter.shape) + 1, generator=generator)
            # Of matrices as small as usual: of scores of attention that are large each token sees but one other.
            line *= parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            line = line.to(parameter.dtype)
            values[name] = line.as_strided(parameter.shape, (1,) * parameter.dim())
        else:
            values[name] = parameter.detach()
    return values


def _initialize(model: Any, name: str, seed: int) -> None:
    """Let the modules around a tensor set it: its own first, then those that hold it, as a whole model does.

    GPT-2's attention, for one, sets the weight of a linear layer inside of it anew. What stays on the meta device takes
    neither memory nor time.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    holders = list(_holders(model, name.split(".")[:-1]))
    assert holders[-1][1] is owner
    with torch.no_grad(), _random_numbers(_number(seed, name)):
        for at, (path, module) in reversed(list(enumerate(holders))):
            # A model within a model, as of a vision tower, initialises its own modules.
            held_by = (holder for _, holder in reversed(holders[: at + 1]))
            by: Any = next((holder for holder in held_by if hasattr(holder, "_init_weights")), None)
            if by is None:
                raise ConfigError(
                    f"{type(model).__name__} has no _init_weights to draw {name} by: give a folder of weights in "
                    "hydra.initial_weights, or build the model with real parameters"
                )
            try:
                by._init_weights(module)
            except Exception as error:
                raise ConfigError(
                    f"{type(by).__name__}._init_weights cannot initialise {path or 'the model'} on the meta device "
                    f"({type(error).__name__}: {error}): build the model with real parameters"
                ) from error


def _holders(model: nn.Module, path: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules on the way to a path, the whole model first."""
    for depth in range(len(path) + 1):
        name = ".".join(path[:depth])
        yield name, model.get_submodule(name)


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _number(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and not one.is_meta and torch.equal(one, other)
