"""A traced model in; which of its layers are alike for certain, so that one of each kind is examined for all, out.

[Note: kinds of layers]
What is found out about a model by running parts of it again is the same for layers of one kind. Two layers are of one
kind where nothing tells them apart but the values of their parameters and their number:

- No code of a script and no hook is anywhere in the model [Note: whose code]: such code may go by anything.
- They are built alike: of the same classes, with equal attributes, equal buffers, and parameters of the same shapes,
  types and use; and nothing in them is part of anything else.
- They ran alike in the trace [Note: the trace]: the same functions, of the same parameters, with the same numbers and
  sizes. So code that goes by a layer's number, which is its own for each, is told apart by what it does.

What cannot be told counts as different: at worst each layer is examined. The self-check's kinds are others: its small
copy may leave out layers that differ in a number.

  24 layers, windows in every other one     kinds 0 and 1 stand for all
  4 dense layers before 57 of experts       kinds 0 and 4
  60 layers, a class of the script in one   each for itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ds_hydra.pipe.models.whose_code import own_code

_PLAIN = (bool, int, float, str, bytes, set, frozenset, torch.dtype, torch.device, torch.Size)
_ITS_NUMBER = "layer_idx"  # what transformers calls the place of a layer in the model
_HELD = frozenset({"_parameters", "_buffers", "_modules"})
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class LayerKinds:
    """The layers at `path`: of each the first one that is like it."""

    path: str
    firsts: tuple[int, ...]

    @property
    def like_others(self) -> tuple[int, ...]:
        """The layers that need not be examined."""
        return tuple(index for index, first in enumerate(self.firsts) if first != index)

    def in_first(self, name: str) -> bool:
        """Whether a module or parameter is in the first layer of a kind, or outside of the layers."""
        return self._first(name) == name

    def spread(self, found: Mapping[str, _Found], names: Iterable[str]) -> dict[str, _Found]:
        """What was found in the first layers and outside, for all of these names."""
        return {name: found[first] for name in names if (first := self._first(name)) in found}

    def spread_groups(self, groups: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        """The same of groups of modules, each of one layer or outside of them."""
        yield from (group for group in groups if self._layer(group[0]) is None)
        for layer, first in enumerate(self.firsts):
            for group in groups:
                if self._layer(group[0]) == first:
                    yield tuple(self._within(name, layer) for name in group)

    def _first(self, name: str) -> str:
        layer = self._layer(name)
        return name if layer is None else self._within(name, self.firsts[layer])

    def _layer(self, name: str) -> int | None:
        """The layer that a name is in; of the list itself and what is outside None."""
        if not name.startswith(f"{self.path}."):
            return None
        return int(name.removeprefix(f"{self.path}.").partition(".")[0])

    def _within(self, name: str, layer: int) -> str:
        """The same place in another layer."""
        _, dot, rest = name.removeprefix(f"{self.path}.").partition(".")
        return f"{self.path}.{layer}{dot}{rest}"


class Ran:
    """What each layer ran in a trace, function by function."""

    def __init__(self, layers_path: str, names: Mapping[int, str]):
        """`names` are those of the parameters, by identity."""
        self._prefix, self._names = layers_path, names
        self._calls: dict[int, list[Hashable]] = {}

    def note(self, layer: int, module: str, func: Any, given: Sequence[Any], result: Any) -> None:
        """Take a function's call within a layer, by the innermost module that runs."""
        prefix = f"{self._prefix}.{layer}"
        of = [self._described(value, prefix) for value in given]
        out = [self._described(value, prefix) for value in (result if isinstance(result, tuple | list) else [result])]
        self._calls.setdefault(layer, []).append((func, module.removeprefix(prefix), tuple(of), tuple(out)))

    def _described(self, value: Any, prefix: str) -> Hashable:
        if isinstance(value, Tensor):
            name = self._names.get(id(value), "").removeprefix(prefix)
            return name, tuple(value.shape), value.dtype, value.requires_grad
        if value is None or isinstance(value, _PLAIN):
            return type(value), repr(value)
        return f"{type(value).__module__}.{type(value).__qualname__}"

    def firsts(self, num_layers: int) -> tuple[int, ...]:
        """Of each layer the first one that ran the same."""
        calls = [self._calls.get(index) for index in range(num_layers)]
        return tuple(calls.index(own) if own else index for index, own in enumerate(calls))


def find_kinds(model: nn.Module, template: nn.Module, path: str, ran: Sequence[int]) -> LayerKinds:
    """The kinds of a model's layers; `template` is its copy, and `ran` tells of each layer the first one that ran the
    same in the trace."""
    layers: Any = template.get_submodule(path)
    alone = LayerKinds(path, tuple(range(len(layers))))
    if len(layers) != len(ran) or own_code(model):
        return alone
    uses = Counter(id(module) for _, module in template.named_modules(remove_duplicate=False))
    uses += Counter(id(parameter) for _, parameter in template.named_parameters(remove_duplicate=False))
    firsts: list[int] = []
    kinds: list[int] = []  # the first layers, but those that share something
    for index, layer in enumerate(layers):
        apart = all(uses[id(each)] == 1 for each in (*layer.modules(), *layer.parameters()))
        like = (
            kind for kind in kinds
            if apart and ran[kind] == ran[index]
            and _Likeness((f"{path}.{kind}.", f"{path}.{index}.")).alike(layers[kind], layer)
        )  # fmt: skip
        firsts.append(next(like, index))
        if apart and firsts[index] == index:
            kinds.append(index)
    return LayerKinds(path, tuple(firsts))


@dataclass(frozen=True)
class _Likeness:
    """Compares what two layers hold; each calls itself by a path of its own."""

    paths: tuple[str, str]

    def alike(self, one: nn.Module, other: nn.Module) -> bool:
        """Whether two modules are built alike, with all that is in them."""
        mine, others = vars(one), vars(other)
        return (
            type(one) is type(other)
            and mine.keys() == others.keys()
            and all(self.equal(mine[key], others[key]) for key in mine.keys() - _HELD - {_ITS_NUMBER})
            and self._pairs(one._parameters, other._parameters, _same_use)
            and self._pairs(one._buffers, other._buffers, self.equal)
            and self._pairs(one._modules, other._modules, self.equal)
        )

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two values are the same, as far as that can be told."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, nn.Module):
            return self.alike(one, other)
        if isinstance(one, Tensor):
            told = not one.is_meta and (one.dtype, one.device) == (other.dtype, other.device)
            return told and one.requires_grad == other.requires_grad and torch.equal(one, other)
        if isinstance(one, dict):
            return self._pairs(one, other, self.equal)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self.equal, one, other))
        if isinstance(one, partial):
            return self.equal((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        if isinstance(one, float):
            return repr(one) == repr(other)  # 0.0 and -0.0 are two
        if isinstance(one, str):  # PEFT's layers keep their names
            return one.replace(self.paths[0], "") == other.replace(self.paths[1], "")
        return isinstance(one, _PLAIN) and bool(one == other)

    @staticmethod
    def _pairs(one: Mapping[Any, Any], other: Mapping[Any, Any], same: Callable[[Any, Any], bool]) -> bool:
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)


def _same_use(one: nn.Parameter | None, other: nn.Parameter | None) -> bool:
    """Whether parameters differ in their values at most."""
    if one is None or other is None:
        return one is other
    same_type = type(one) is type(other) and one.dtype == other.dtype
    return same_type and one.shape == other.shape and one.requires_grad == other.requires_grad
