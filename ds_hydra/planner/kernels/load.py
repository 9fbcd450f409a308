"""The inner loops of the planner, twice: as plain Python, and compiled by numba on first request.

A kernel is an ordinary function over scalars and arrays in this folder that calls only other kernels.
`pure()` gives the functions as they stand, at no start-up cost; `compiled()` gives the same functions through
numba's on-disk cache. No kernel uses fast-math, so both give the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ds_hydra.planner.kernels import bound, dispatch, greedy, packing, program, proof, repair, tiny

_MODULES = (packing, bound, proof, repair, dispatch, tiny, greedy, program)  # callees first


def _kernels() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for module in _MODULES:
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                found[name] = function
    return found


@functools.cache
def source_digest() -> str:
    """Changes whenever any kernel does; part of the cache key, since numba only looks at the caller's file."""
    text = "".join(inspect.getsource(module) for module in _MODULES)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def pure() -> SimpleNamespace:
    """The kernels as plain Python functions."""
    return SimpleNamespace(**_kernels(), is_compiled=False)


@functools.cache
def compiled() -> SimpleNamespace:
    """The kernels as numba dispatchers; the first call of each compiles it unless the cache on disk holds it."""
    import numba

    digest = source_digest()
    namespace: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    for name, function in _kernels().items():
        namespace.update({k: v for k, v in function.__globals__.items() if k not in kernels})
        clone = types.FunctionType(function.__code__, namespace, name, function.__defaults__)
        clone.__module__ = function.__module__
        clone.__qualname__ = f"{name}_{digest}"
        kernels[name] = numba.njit(cache=True, nogil=True)(clone)
        namespace.update(kernels)
    return SimpleNamespace(**kernels, is_compiled=True)


def select(which: str) -> SimpleNamespace:
    """The kernels that `PlannerOptions.kernels` asks for: "compiled", "pure", or "auto"."""
    return compiled() if which == "compiled" or (which == "auto" and is_warm()) else pure()


@functools.cache
def _marker() -> Path:
    folder = os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent / "__pycache__"
    return Path(folder) / f"planner-{source_digest()}-numba-{metadata.version('numba')}.warm"


def is_warm() -> bool:
    """Whether numba's cache is known to hold these kernels, so that `compiled()` takes well under a second."""
    return _marker().exists()


def mark_warm() -> None:
    """Note that every kernel has been compiled here; silently not where the folder cannot be written."""
    try:
        _marker().parent.mkdir(parents=True, exist_ok=True)
        _marker().touch()
    except OSError:
        pass  # a cold cache is only slower
