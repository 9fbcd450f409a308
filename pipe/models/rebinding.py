"""Makes functions that a user attached to a model, and that were copied with it, refer to the copy.

`copy.deepcopy` copies a bound method or a `functools.partial` together with its module, but a plain function by
reference. A hook such as `lambda m, a, out: out + layer.bias.sum()` then keeps reading the original's `layer`: the copy
would train on old values for ever, without an error. So closures and defaults are made anew around the copies, and a
function that reaches the original by a global name is refused: its globals are its script's, and cannot be copied.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ds_hydra.pipe.models.whose_code import names_of, slots_of
from ds_hydra.zero_hetero.errors import ConfigError

_DEPTH = 12  # what functions and objects hold, within each other, that is looked into
_TORCHS = frozenset(vars(nn.Module()))
_HOOKS = tuple(key for key in vars(nn.Module()) if key.endswith("_hooks") and not key.startswith("_is"))


def rebind_functions(original: nn.Module, copied: nn.Module) -> None:
    """Make every hook and every function attribute of the copy mean the copy's own modules and tensors.

    Raises ConfigError where one still reaches the original.
    """
    twins = _twins(original, copied)
    for module in copied.modules():
        for hooks in (getattr(module, key) for key in _HOOKS):
            for handle, function in (hooks or {}).items():
                hooks[handle] = _rebound(function, twins)
        for key, value in _own_attributes(module):
            if (new := _rebound(value, twins)) is not value:
                object.__setattr__(module, key, new)
    _refuse_leftovers(original, copied)


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What was set on a module, but for plain values and what torch keeps there."""
    return [(key, value) for key, value in vars(module).items() if key not in _TORCHS and not _is_plain(value)]


def _is_plain(value: Any) -> bool:
    """Whether it can hold nothing of a model: a number, a text, a tensor, a class, a config."""
    return value is None or isinstance(
        value, bool | int | float | str | bytes | Tensor | type | types.ModuleType | torch.dtype | PretrainedConfig
    )


def _twins(original: nn.Module, copied: nn.Module) -> dict[int, Any]:
    """Identity of each module, parameter and buffer of the original -> its copy."""
    twins: dict[int, Any] = {}
    for old, new in zip(original.modules(), copied.modules(), strict=True):
        twins[id(old)] = new
        for key in ("_parameters", "_buffers"):
            mine, its = getattr(old, key), getattr(new, key)
            twins |= {id(mine[name]): its[name] for name in mine if mine[name] is not None}
    return twins


def _rebound(value: Any, twins: dict[int, Any], depth: int = 0, *, copied: bool = True) -> Any:
    """`value` with everything of the original that it holds replaced; itself where it holds nothing.

    Objects that were `copied` with the model are changed in place. What a function holds was not: objects there are
    the script's own, and stay what they are.
    """
    if id(value) in twins:
        return twins[id(value)]
    if _is_plain(value) or depth > _DEPTH:
        return value
    again = functools.partial(_rebound, twins=twins, depth=depth + 1, copied=copied)
    if isinstance(value, types.MethodType):
        return types.MethodType(again(value.__func__), again(value.__self__))
    if isinstance(value, functools.partial):
        keywords = {key: again(item) for key, item in value.keywords.items()}
        return functools.partial(again(value.func), *map(again, value.args), **keywords)
    if type(value) in (list, tuple, set):
        new = [again(item) for item in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, functools.partial(again, copied=False), twins)
    return _rebound_within(value, again, twins) if copied else value


def _rebound_within(value: Any, again: Callable[[Any], Any], twins: dict[int, Any]) -> Any:
    """A dictionary or an object of a script's, with what it holds replaced in place."""
    twins[id(value)] = value  # it may hold itself
    held = value if isinstance(value, MutableMapping) else getattr(value, "__dict__", {})
    for key, item in list(held.items()):
        if (new := again(item)) is not item:
            if held is value:
                held[key] = new
            else:
                object.__setattr__(value, key, new)
    for key in slots_of(type(value)):
        item = getattr(value, key, None)
        if (new := again(item)) is not item:
            object.__setattr__(value, key, new)
    return value


def _rebound_function(value: types.FunctionType, again: Callable[[Any], Any], twins: dict[int, Any]) -> Any:
    twins[id(value)] = value  # a function may hold itself
    cells = tuple(_cell(cell, again) for cell in value.__closure__ or ())
    defaults = None if value.__defaults__ is None else tuple(again(item) for item in value.__defaults__)
    keywords = {key: again(item) for key, item in (value.__kwdefaults__ or {}).items()}
    held = [*cells, *(defaults or ()), *keywords.values()]
    before = [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if all(a is b for a, b in zip(held, before, strict=True)):
        return value
    new = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    new.__kwdefaults__ = keywords or None
    new.__dict__.update(value.__dict__)
    twins[id(value)] = new
    return new


def _cell(cell: types.CellType, again: Callable[[Any], Any]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    new = again(held)
    return cell if new is held else types.CellType(new)


def _refuse_leftovers(original: nn.Module, copied: nn.Module) -> None:
    names: dict[int, str] = {id(tensor): name for name, tensor in original.named_parameters()}
    names |= {id(module): name or type(original).__name__ for name, module in original.named_modules()}
    for path, module in copied.named_modules():
        for kind, function in _functions(module):
            found = next((names[id(held)] for held in _held(function, set()) if id(held) in names), None)
            if found is not None:
                what = getattr(function, "__qualname__", type(function).__name__)
                raise ConfigError(
                    f"the {kind} {what!r} of {path or type(original).__name__} refers to {found} of the model by a "
                    "global name, which a stage that is copied from the model cannot follow: use the module that the "
                    "hook is given, or bind it as a default argument or in a closure"
                )


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key in _HOOKS:
        for function in (getattr(module, key) or {}).values():
            yield key.strip("_").removesuffix("s").replace("_", " "), function
    yield from (("attribute", value) for _, value in _own_attributes(module))


def _held(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Modules and tensors that a callable can reach: by closure, defaults, arguments, or the globals that it names."""
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | Tensor):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        cells = (_contents(cell) for cell in value.__closure__ or ())
        parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts += [value.__globals__[name] for name in names_of(value.__code__) if name in value.__globals__]
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif not _is_plain(value):
        parts = [
            *getattr(value, "__dict__", {}).values(),
            *(getattr(value, key, None) for key in slots_of(type(value))),
        ]
    for part in parts:
        yield from _held(part, seen, depth + 1)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
