"""Decides whether a function or module runs an installed package's own code.

[Note: whose code]
What a model computes is known where torch, transformers or PEFT have written it: such code is recognised, and replaced
by something faster that has been proven equal. Code of anybody else's is taken as it is written. It may do something
else for long rows, for some tokens, or once a variable of its script has changed, which no trial on a few rows shows.

Whose code a function is, its file says, not its name: a patched `LlamaMLP.forward` is a script's. So is the forward of
transformers' own attention once a function that it calls by a global name was replaced.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PACKAGES = ("torch", "transformers", "peft", "ds_hydra", "tensordict")  # the last replaces functions of torch's own
TORCHS = frozenset(vars(nn.Module()))
# Where torch keeps the hooks of a module, and those of all modules.
HOOKS = tuple(key for key in TORCHS if key.startswith(("_forward_", "_backward_")) and key.endswith("_hooks"))
GLOBAL_HOOKS = tuple(key for key in vars(nn.modules.module) if key.startswith("_global_") and key.endswith("_hooks"))
_DEPTH = 4  # functions called by functions that are looked into
_NO_FUNCTIONS = frozenset({type(None), bool, int, float, str, bytes, dict, list, tuple, set, frozenset, type,
                           torch.dtype, types.ModuleType, types.BuiltinFunctionType})  # fmt: skip


@functools.cache
def _folders() -> tuple[str, ...]:
    found = (importlib.util.find_spec(name) for name in _PACKAGES)
    return tuple(f"{Path(spec.origin).parent}/" for spec in found if spec is not None and spec.origin is not None)


@functools.cache
def _library() -> str:
    """Where Python's own modules are; packages may be installed below it."""
    return sysconfig.get_path("stdlib") + "/"


@functools.cache
def is_of_package(file: str) -> bool:
    """Whether a file is one of Python's own or of an installed package whose code is known."""
    of_python = file.startswith(_library()) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
    return of_python or file.startswith(("<frozen ", *_folders()))


def is_installed(function: Any) -> bool:
    """Whether a function, method or partial, with what it closes over and calls by name, is an installed package's.

    What is not written in Python, such as torch's own operators, is.
    """
    return not own_functions(function)


def runs_installed_code(module: nn.Module) -> bool:
    """The same of a module's forward, with its own methods and functions that this calls; not of its children."""

    def attribute(name: str) -> Any:
        return vars(module).get(name, getattr(type(module), name, None))

    return all(is_of_package(one.__code__.co_filename) for one in _reached(module.forward, attribute, set(), 0))


def own_code(model: nn.Module) -> tuple[str, ...]:
    """What of a model runs code that no installed package has: hooks of all modules, modules by path, and hooks
    of parameters by name."""
    known: dict[type, bool] = {}

    def installed(module: nn.Module) -> bool:
        kind = type(module)
        if any(getattr(module, key) for key in HOOKS) or not all(
            _holds_installed(value, 0) for key, value in vars(module).items() if key not in TORCHS
        ):
            return False
        if "forward" in vars(module) or kind not in known:
            of_packages = all(is_of_package(file_of(one)) for one in kind.__mro__)
            known[kind] = of_packages and runs_installed_code(module)
        return known[kind]

    found = [f"torch's {key.strip('_').replace('_', ' ')}" for key in GLOBAL_HOOKS if vars(nn.modules.module)[key]]
    found += [path or type(module).__name__ for path, module in model.named_modules() if not installed(module)]
    return (*found, *(name for name, parameter in model.named_parameters() if parameter._backward_hooks))


def _holds_installed(value: Any, depth: int) -> bool:
    """Whether the functions and objects that an attribute holds are installed packages'."""
    if value is None or isinstance(value, bool | int | float | str | nn.Module | types.ModuleType) or depth > _DEPTH:
        return True
    if function_of(value) is not None:
        return is_installed(value)
    if isinstance(value, type):
        return is_of_package(file_of(value))
    if isinstance(value, dict | list | tuple | set | frozenset):
        items = [*value.values()] if isinstance(value, dict) else value
        return all(_holds_installed(item, depth + 1) for item in items)
    return is_of_package(file_of(type(value)))


def file_of(kind: type) -> str:
    """The file that defines a class; empty where there is none, as in a notebook."""
    if kind.__module__ in sys.builtin_module_names:
        return _library()
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def is_own_class(value: Any) -> bool:
    """Whether it is a class that a script defines."""
    return isinstance(value, type) and not is_of_package(file_of(value))


def own_functions(value: Any) -> tuple[types.FunctionType, ...]:
    """The functions of scripts' that run when a function, method, property or partial does."""
    run = _reached(value, _no_attribute, set(), 0)  # itself, and what it calls by name
    return tuple(one for one in run if not is_of_package(one.__code__.co_filename))


def called_by(module: nn.Module) -> tuple[types.FunctionType, ...]:
    """The functions that run as a module's class computes: its forward, and what this calls by name."""
    kind = type(module)
    return tuple(_reached(kind.forward, lambda name: getattr(kind, name, None), set(), 0))


def _no_attribute(name: str) -> None:
    """Of a function that is no method."""


def function_of(value: Any) -> Any:
    """The function that a method, property, partial or object that can be called runs; None for what is none of these.

    Modules count as none: they are looked at one by one.
    """
    while True:
        if isinstance(value, types.MethodType) and _is_autograd(value.__self__):
            value = inspect.getattr_static(value.__self__, "forward", None)  # `apply` itself is torch's
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.FunctionType):
            return value
        elif isinstance(value, type | nn.Module):
            return None
        elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # by a cache of functools
            value = wrapped
        else:
            called = next((vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None)
            return called if isinstance(called, types.FunctionType) else None


def _is_autograd(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def slots_of(kind: type) -> Iterator[str]:
    """The attributes that objects of a class have without a dictionary."""
    for owner in kind.__mro__:
        names = vars(owner).get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _reached(value: Any, attribute: Callable[[str], Any], seen: set[int], depth: int) -> Iterator[types.FunctionType]:
    """The functions that run when this one does: itself, what it wraps and closes over, what it calls by global names,
    and by names of its object's attributes."""
    function = function_of(value)
    if function is None or id(function) in seen or depth > _DEPTH:
        return
    seen.add(id(function))
    yield function
    held = [*(_contents(cell) for cell in function.__closure__ or ()), *(function.__defaults__ or ())]
    held += [*(function.__kwdefaults__ or {}).values(), getattr(function, "__wrapped__", None)]
    held += (value for _, value in globals_of(function))
    held += map(attribute, function.__code__.co_names)
    for one in held:
        if type(one) not in _NO_FUNCTIONS:  # as four of five
            yield from _reached(one, attribute, seen, depth + 1)


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function's code names, by name, and what it names of those that are modules."""
    names = sorted(set(names_of(function.__code__)))
    waiting = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        yield name, value
        if isinstance(value, types.ModuleType) and id(value) not in seen:
            seen.add(id(value))
            waiting += [(f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value)]


def names_of(code: types.CodeType) -> Iterator[str]:
    """The global names and attributes that a function's code has, with those of functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant)


def names_read(code: types.CodeType) -> Iterator[str]:
    """The names and texts that a function's code uses, and not those that it only gives a value to."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD") and
                isinstance(one.argval, str))  # fmt: skip
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_read(constant)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
