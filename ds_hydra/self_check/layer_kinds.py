"""Chooses the layers of a model that stand for all of them in a small copy.

Layers are of one kind where they have modules of the same types with the same code and shapes, and where whatever may
switch something on is the same: flags, words, and numbers that several layers share. One of each kind is kept. Numbers
of which each layer has one of its own (0.97 ** i) make no kind; of layers that only these tell apart a few are kept.

  eight layers, each with a scale of its own, the last two with a convolution     0 and 6, then 7, 1, ...
  eight layers, lag = 0 in seven of them and 4 in the last                        0 and 7, then ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ds_hydra.pipe.models.whose_code import called_by, is_installed, own_code

_SPREAD = 4  # layers that are kept at least, where there are so many that something tells apart
_OWN_KEYS = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "layer_idx", "config"}
_HOOKS = tuple(
    key for key in vars(nn.Module()) if key.startswith(("_forward_", "_backward_")) and key.endswith("hooks")
)
_PLAIN = (bool, int, float, str, type(None))

Settings = Mapping[Any, Any]  # plain values by where they stand


def kept_layers(model: nn.Module, layers: nn.ModuleList, count: int) -> tuple[list[int], int]:
    """Indices of one layer of each kind and then of others until there are `count`, and how many kinds there are.

    All of them where code of a script may go by a layer's index.
    """
    if _goes_by_index(model, layers):
        return list(range(len(layers))), len(layers)
    return choose([_structure(layer, shapes=True) for layer in layers], [dict(_settings(layer)) for layer in layers],
                  count)  # fmt: skip


def enough_layers(model: nn.Module, layers: nn.ModuleList, count: int) -> tuple[int, ...]:
    """How many of the first layers to try: `count`, or as many as have all kinds among them, whatever their widths."""
    if _goes_by_index(model, layers):
        return (max(count, len(layers)),)
    kinds = _kinds_of_any_width(layers)
    return tuple(dict.fromkeys((count, max(count, 1 + max(kinds.index(kind) for kind in kinds)))))


def has_all_kinds(layers: nn.ModuleList, of: nn.ModuleList) -> bool:
    """Whether `layers`, of a model of other widths, are of as many kinds as those `of` another, or more."""
    return len(set(_kinds_of_any_width(layers))) >= len(set(_kinds_of_any_width(of)))


def _kinds_of_any_width(layers: nn.ModuleList) -> list[str]:
    """Types, code, flags and words of each layer, and what only code of a script reads: which numbers are the same."""
    structures = [_structure(layer, shapes=False) for layer in layers]
    own = frozenset(own_code(layers))
    settings = [
        {
            place: value
            for place, value in _settings(layer)
            if not isinstance(value, int | float) or value is True or f"{number}.{place[0]}".rstrip(".") in own
        }
        for number, layer in enumerate(layers)
    ]
    unlike = _numbers_of_their_own(structures, settings)
    seen: dict[Any, list[Any]] = {}
    kinds: list[str] = []
    for structure, held in zip(structures, settings, strict=True):
        ranks = []
        for place, value in sorted(held.items(), key=lambda item: str(item[0])):
            if place in unlike:
                continue
            known = seen.setdefault(place, [])
            if value not in known:
                known.append(value)
            ranks.append((place, known.index(value)))
        kinds.append(repr((structure, ranks)))
    return kinds


def _goes_by_index(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether code of a script runs the layers one by one, or names a layer's index."""
    if not own_code(model):
        return False
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        own = [function for function in called_by(module) if not is_installed(function)]
        above = id(module) not in inside and any(id(one) in inside for one in module.modules())
        if own and (above or any("layer_idx" in function.__code__.co_names for function in own)):
            return True
    return False


def choose(structures: Sequence[str], settings: Sequence[Settings], count: int) -> tuple[list[int], int]:
    """The same of layers that are described by their structure and by plain values that they have."""
    own = _numbers_of_their_own(structures, settings)
    kinds = [
        repr((structure, sorted((str(key), repr(value)) for key, value in held.items() if key not in own)))
        for structure, held in zip(structures, settings, strict=True)
    ]
    kept = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    num_kinds = len(kept)
    whole = [repr((kind, sorted(map(repr, held.items())))) for kind, held in zip(kinds, settings, strict=True)]
    told_apart = [index for index, one in enumerate(whole) if one not in whole[:index]]
    # The last ones first: what a schedule of numbers leads to is farthest from what it begins with.
    kept += [i for i in reversed(told_apart) if i not in kept][: max(0, max(count, _SPREAD) - len(kept))]
    kept += [i for i in range(len(kinds)) if i not in kept][: max(0, count - len(kept))]
    return sorted(kept), num_kinds


def _numbers_of_their_own(structures: Sequence[str], settings: Sequence[Settings]) -> frozenset[Any]:
    """Where every layer of a structure has a number that no other has."""
    found: set[Any] = set()
    shared: set[Any] = set()
    for structure in dict.fromkeys(structures):
        alike = [held for one, held in zip(structures, settings, strict=True) if one == structure]
        for key in {key for held in alike for key in held} if len(alike) > 2 else ():
            values = [held.get(key) for held in alike]
            numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
            (found if numbers and len(set(values)) == len(values) else shared).add(key)
    return frozenset(found - shared)


def _structure(layer: nn.Module, *, shapes: bool) -> str:
    """Types, code and, if asked for, shapes."""
    parts: list[Any] = []
    for path, module in layer.named_modules():
        kind = type(module)
        tensors = [
            (name, tuple(tensor.shape) if shapes else tensor.dim(), tensor.requires_grad)
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        hooks = [(key, *map(_code, (getattr(module, key) or {}).values())) for key in _HOOKS]
        others = [
            (key, _code(value))
            for key, value in sorted(vars(module).items())
            if key not in _OWN_KEYS and not isinstance(value, _PLAIN)
        ]
        parts.append((path, kind.__module__, kind.__qualname__, _code(kind.forward), tensors, hooks, others))
    return repr(parts)


def _code(value: Any) -> str:
    """What distinguishes a function or an object whatever plain values it holds."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _settings(layer: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Plain values of modules, and those that their functions and objects hold, by where they stand."""
    for path, module in layer.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN_KEYS:
                yield from _within((path, key), value, 0)
        for key in _HOOKS:
            for number, hook in enumerate((getattr(module, key) or {}).values()):
                yield from _within((path, key, number), hook, 0)


def _within(place: tuple[Any, ...], value: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, _PLAIN):
        yield place, value
        return
    if depth > 3 or isinstance(value, nn.Module):
        return
    function: Any = getattr(value, "__func__", value)
    held: Any = ()
    if isinstance(value, Mapping):
        held = value.items()
    elif isinstance(value, list | tuple):
        held = enumerate(value)
    elif hasattr(function, "__code__"):
        held = [*enumerate(function.__defaults__ or ()), *_cells(function)]
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        held = vars(value).items()
    for key, item in held:
        yield from _within((*place, key), item, depth + 1)


def _cells(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    names: Sequence[str] = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
