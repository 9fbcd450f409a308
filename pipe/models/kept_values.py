"""A function or object of a script's in; the plain values that it can keep from call to call, by where they are."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from io import IOBase
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.pipe.models.whose_code import is_own_class, slots_of

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
