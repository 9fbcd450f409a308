"""A model's forward in; ConfigError where it changes what the model keeps, or draws outside of torch, or reads what
stages are copies of, out.

Each stage is a copy that sees the tokens of its own ranks. A running mean, the vectors of a spectral norm, a count of
calls or a coin of Python's generator would be another one on each of them, and none of it would be saved. And a forward
that gets at the model which was copied, by a global name, a class's closure or a weak reference, would train nothing
there, and read old values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from ds_hydra.pipe.models.kept_values import leaves_of, state_of
from ds_hydra.pipe.models.whose_code import (
    HOOKS,
    TORCHS,
    function_of,
    globals_of,
    is_own_class,
    names_read,
    own_code,
    own_functions,
)
from ds_hydra.zero_hetero.errors import ConfigError

_LAST = re.compile(r"(?:^|[. ])([A-Za-z_]\w*)(?: of \S+)?$")  # the name of a variable, in words that end in it


@contextmanager
def refuse_state(model: nn.Module) -> Iterator[None]:
    """A block that runs the model's forward in training; ConfigError at its end where that left a trace."""
    before, generators = _versions(model), _generators()
    with refuse_counting(model, "the forward"):
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


@contextmanager
def refuse_counting(model: nn.Module, what: str) -> Iterator[None]:
    """A block that runs `what` of the model; ConfigError at its end where a script's code counted in it."""
    own = bool(own_code(model))
    numbers = _numbers(model) if own else {}
    yield
    counted = next((n for n, number in (_numbers(model) if own else {}).items() if numbers.get(n, n) != number), None)
    if counted is not None:
        raise ConfigError(
            f"{what} of {type(model).__name__} changes {counted}, which would follow how often each stage is called, "
            "and that is the plan's: leave it out, or let the script set it before each step"
        )


@contextmanager
def refuse_reading(names: Mapping[int, str]) -> Iterator[None]:
    """A block that runs a copy's forward; ConfigError where that is handed a tensor of these, which are the original's
    by identity."""
    with _Reading(names):
        yield


class _Reading(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str]):
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if (name := self._names.get(id(value))) is not None:
                raise ConfigError(
                    f"the model's code reads {name} by a global name, a class's closure or a reference: a stage that "
                    "is copied from the model would read old values there, and train nothing. Let it reach the module "
                    "by an attribute, or by the closure of a function that is set on a module"
                )
        return func(*args, **(kwargs or {}))


def held_by(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules hold beside parameters, buffers and modules, and the scripts' functions that they run, by where."""
    for path, module in model.named_modules():
        where = f" of {path}" if path else ""
        yield from ((f"the attribute {key}{where}", one) for key, one in vars(module).items() if key not in TORCHS)
        yield from ((f"a hook's{where}", hook) for key in HOOKS for hook in (getattr(module, key) or {}).values())
    found = {type(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)}
    kinds = sorted(found, key=lambda kind: kind.__qualname__)
    yield from ((f"the class {kind.__qualname__}", kind) for kind in kinds if is_own_class(kind))
    for forward in dict.fromkeys(kind.forward for kind in kinds):
        yield from ((one.__qualname__, one) for one in own_functions(forward))


def held_beside(model: nn.Module) -> str:
    """What holds a parameter beside the module that it is registered in, as a clause; empty if nothing does."""
    own = {id(parameter) for parameter in model.parameters()}
    leaves = (leaf for name, held in held_by(model) for leaf in leaves_of(held, name))
    where = next((at for at, value in leaves if id(value) in own), "")
    return where and f"; {where} holds a parameter, which has no value there in a stage: read it by its module"


def _numbers(model: nn.Module) -> dict[str, Any]:
    """The plain values that the forward's own code could count calls in, and reads, by where they are."""
    found: dict[str, Any] = {}
    read: set[str] = set()
    for name, value in held_by(model):
        own = own_functions(value)
        # A backward is called by torch alone, and not by a name in the code that runs.
        classes = (kind for one in own for _, kind in globals_of(one) if is_own_class(kind))
        more = (one for kind in classes for part in vars(kind).values() for one in own_functions(part))
        read |= {used for one in (*own, *more) for used in names_read(one.__code__)}
        if not isinstance(value, nn.Module | PretrainedConfig) and (own or function_of(value) is None):
            found |= {n: one for n, one in state_of(value, name).items() if isinstance(one, bool | int | float | str)}
    return {name: one for name, one in found.items() if (last := _LAST.search(name)) is None or last[1] in read}


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
