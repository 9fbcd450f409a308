"""Refuses forwards that keep a state, draw numbers outside of torch, or read the model that stages are copies of.

Each stage is a copy that sees the tokens of its own ranks. A running mean, the vectors of a spectral norm, a count of
calls or a coin of Python's generator would be another one on each of them, and none of it would be saved. And a forward
that gets at the model which was copied, by a global name, a class's closure or a weak reference, would train nothing
there, and read old values.
"""

from __future__ import annotations

import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from io import IOBase
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from ds_hydra.pipe.models.whose_code import (
    HOOKS,
    TORCHS,
    function_of,
    globals_of,
    is_own_class,
    names_read,
    own_code,
    own_functions,
    slots_of,
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


# ---- The plain values that a function or an object of a script's can keep from call to call, by where they are. ----

_MOST = 4096  # values
_DEPTH = 6  # in each other
_GENERATORS = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_PLAIN = bool | int | float | complex | str | bytes | memoryview | Tensor | np.ndarray | _GENERATORS


def state_of(held: Any, name: str) -> dict[str, Any]:
    """The plain values and tensors that it holds; tensors by how often they were written to."""
    return {at: _version(value) for at, value in leaves_of(held, name)}


def leaves_of(held: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The plain values, tensors and iterators that it holds, and the numbers of entries of what holds them."""
    count = 0
    seen: set[int] = set()
    left: list[tuple[str, Any, int]] = [(name, held, 0)]
    while left and count < _MOST:
        name, value, depth = left.pop()
        plain = value is None or isinstance(value, _PLAIN)
        if plain or (hasattr(type(value), "__next__") and not isinstance(value, IOBase)):
            count += 1
            yield name, value
        elif depth < _DEPTH and id(value) not in seen:
            seen.add(id(value))
            parts = list(inside(value, name))
            count += 1
            yield f"the number of entries of {name}", len(parts)
            left += [(path, part, depth + 1) for path, part in parts]


def _version(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= 1 << 20 else float(value.ravel()[0])
    if isinstance(value, _GENERATORS):
        return _state_in_words(value)
    # An iterator is there to be called, and what it gives next cannot be told.
    return object() if hasattr(type(value), "__next__") else value


def _state_in_words(generator: Any) -> str:
    """Where a generator of random numbers stands."""
    if isinstance(generator, torch.Generator):
        return repr(bytes(generator.get_state().numpy()))
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def inside(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a container, an object or a function of the user's holds."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
        return
    if isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(value))
        return
    code = getattr(value, "__code__", None)
    if code is not None:
        for cell, variable in zip(value.__closure__ or (), code.co_freevars, strict=False):
            try:
                yield f"{name}'s {variable}", cell.cell_contents
            except ValueError:  # not set yet
                continue
        for variable in code.co_names:
            if _own_code(value) and variable in value.__globals__:
                yield f"the global {variable}", value.__globals__[variable]
    if isinstance(value, ContextVar):
        yield f"the value of {name}", value.get(None)
        return
    if isinstance(value, type):
        held = vars(value).items() if is_own_class(value) else ()
        yield from ((f"{name}.{key}", part) for key, part in held
                    if not key.startswith("__") and not hasattr(part, "__get__"))  # fmt: skip
        return
    for part in ("__self__", "__wrapped__", "func", "args", "keywords", "__defaults__"):
        if (inner := getattr(value, part, None)) is not None:
            yield (f"{name}.{part}", inner)
    if _own_code(value):
        for method in ("__call__", "forward"):
            if code is None and hasattr(getattr(type(value), method, None), "__code__"):
                yield f"{name}.{method}", getattr(type(value), method)
        own = {**(getattr(value, "__dict__", None) or {})}
        own |= {key: getattr(value, key) for key in slots_of(type(value)) if hasattr(value, key)}
        yield from ((f"{name}.{key}", part) for key, part in own.items())


def _own_code(value: Any) -> bool:
    """Whether this is no part of torch, NumPy or Python, whose insides say nothing of what a script computes."""
    if isinstance(value, SimpleNamespace):
        return True
    kind: Callable[..., Any] | type = value if hasattr(value, "__code__") else type(value)
    where = str(getattr(kind, "__module__", "") or "").partition(".")[0]
    return where not in ("torch", "numpy", "transformers", "peft") and where not in sys.stdlib_module_names - {
        "__main__"
    }
