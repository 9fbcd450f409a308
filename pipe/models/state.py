"""A model's forward in; ConfigError where it changes what the model keeps, or draws outside of torch, out.

Each stage is a copy that sees the tokens of its own ranks. A running mean, the vectors of a spectral norm, or a coin of
Python's generator would be another one on each of them, and none of it would be saved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import Tensor, nn

from ds_hydra.zero_hetero.errors import ConfigError


@contextmanager
def refuse_state(model: nn.Module) -> Iterator[None]:
    """A block that runs the model's forward in training; ConfigError at its end where that left a trace."""
    before, generators = _versions(model), _generators()
    yield
    after = _versions(model)
    changed = next((name for name, version in before.items() if after.get(name) != version), None)
    if changed is not None:
        raise ConfigError(
            f"the forward of {type(model).__name__} changes {changed}, which each stage would do for itself, on the "
            "tokens that its ranks see: keep such a state out of the model, or freeze it (module.eval() in forward())"
        )
    for name, state in _generators().items():
        if state != generators[name]:
            raise ConfigError(
                f"the forward of {type(model).__name__} draws random numbers from {name}, where every rank would draw "
                "others: use torch.nn.functional.dropout, or switch it off"
            )


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of parameters and of buffers that are saved: which tensor it is, and how often it was written to."""
    kept: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                kept[f"{path}.{name}" if path else name] = buffer
    return {name: (id(tensor), tensor._version) for name, tensor in kept.items()}


def _generators() -> dict[str, object]:
    return {"Python's generator": random.getstate(), "NumPy's generator": repr(np.random.get_state(legacy=False))}
