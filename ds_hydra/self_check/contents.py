"""Any value in, a text that changes with whatever it would compute out; none for what cannot be read.

Numbers, texts, tensors, arrays and enumerations count by value, containers and objects by what they hold. A function
counts by its code, its defaults, what it closes over and the globals that it names; a class by all of these of its
methods. What an installed package defines counts by its name, since its version is known [Note: whose code].
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.pipe.models.whose_code import file_of, globals_of, is_of_package, own_functions, slots_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice)
_BY_REPR = (torch.dtype, torch.device, torch.Size, torch.layout, np.dtype, re.Pattern, PurePath, re.RegexFlag)
_OF_C = (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType,
         types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)  # fmt: skip
_CONTAINERS = (object, types.MappingProxyType, dict, list, tuple, set, frozenset, int, float, str, bytes)
_MOST = 200_000  # values
_DEEPEST = 60  # in each other
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl",
                         "__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__firstlineno__",
                         "__static_attributes__"})  # fmt: skip


class UnreadableError(Exception):
    """The contents of a value cannot be told."""


class Contents:
    """Reads values of one model."""

    def __init__(self, names: Mapping[int, str]):
        """`names`: what is known by its name, by identity: modules and parameters of the model."""
        self._names = dict(names)
        self._seen: dict[int, tuple[int, Any]] = {}  # the value is held, so that no other gets its identity

    def text(self, value: Any) -> str:
        """A digest. Raises UnreadableError."""
        digest = hashlib.sha256()
        for part in self._parts(value, 0):
            digest.update(part.encode())
            digest.update(b"\0")
        return digest.hexdigest()

    def _parts(self, value: Any, depth: int) -> Iterator[str]:
        if type(value) in _PLAIN:
            yield repr((type(value).__name__, value))
            return
        if id(value) in self._names:
            yield f"name {self._names[id(value)]}"
            return
        if id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
            return
        if depth > _DEEPEST or len(self._seen) > _MOST:
            raise UnreadableError("it holds too much")
        self._seen[id(value)] = len(self._seen), value
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        for part in self._held(value):
            yield from self._parts(part, depth + 1)

    def _held(self, value: Any) -> Iterator[Any]:
        """What a value consists of."""
        if isinstance(value, _BY_REPR):
            yield repr(value)
        elif isinstance(value, enum.Enum):
            yield from (value.name, type(value), value.value)
        elif isinstance(value, Tensor | np.ndarray | np.generic):
            yield from _of_array(value)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, types.ModuleType | logging.Logger):
            yield getattr(value, "__name__", None) or value.name
        elif isinstance(value, _OF_C):
            owner = getattr(value, "__self__", None)
            of_library = isinstance(owner, types.ModuleType) or type(owner).__name__.startswith(
                ("PyCapsule", "pybind11")
            )
            yield from (value.__qualname__, None if of_library else owner)
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords, vars(value))
        elif isinstance(value, types.CodeType):
            yield from (value.co_code.hex(), value.co_names, value.co_varnames, value.co_freevars, value.co_flags,
                        value.co_consts)  # fmt: skip
        else:
            yield from self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from (function.__module__, function.__qualname__)
        if is_of_package(function.__code__.co_filename):
            yield from own_functions(function)
            return
        yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
        yield from (_of_cell(cell) for cell in function.__closure__ or ())
        if _is_in_packages(function.__code__.co_filename):
            yield _of_file(function.__code__.co_filename)
        else:
            yield from vars(function).items()
            yield from globals_of(function)

    def _of_class(self, kind: type) -> Iterator[Any]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        if _is_in_packages(file_of(kind)):
            yield _of_file(file_of(kind))
        elif not is_of_package(file_of(kind)):
            yield from kind.__bases__
            yield from (
                item for item in sorted(vars(kind).items(), key=lambda item: item[0]) if item[0] not in _OF_CLASSES
            )

    def _of_object(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        yield kind
        if isinstance(value, Mapping):
            yield from value.items()
        elif isinstance(value, Set):
            yield sorted(Contents(self._names).text(item) for item in value)
        elif isinstance(value, str | bytes):
            yield str.__str__(value) if isinstance(value, str) else bytes(value)
        elif isinstance(value, Sequence):
            yield from value
        elif isinstance(value, int | float):
            yield float(value)
        for base in kind.__mro__:
            if base not in _CONTAINERS and not file_of(base).endswith(".py"):
                raise UnreadableError(f"what a {kind.__qualname__} holds cannot be told")  # it is not written in Python
        yield from ((name, getattr(value, name)) for name in slots_of(kind) if hasattr(value, name))
        yield from sorted(getattr(value, "__dict__", {}).items(), key=lambda item: str(item[0]))


def _is_in_packages(file: str) -> bool:
    """Whether it is a file of one of the packages whose version is not asked for."""
    return bool({"site-packages", "dist-packages"} & set(PurePath(file).parts)) and not is_of_package(file)


@functools.cache
def _of_file(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError as error:
        raise UnreadableError(f"{name} cannot be read") from error


def _of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return "empty"


def _of_array(value: Any) -> Iterator[Any]:
    """Shape, kind and numbers."""
    if isinstance(value, Tensor):
        yield from (str(value.dtype), tuple(value.shape), value.requires_grad)
        if value.is_meta:
            return
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0)
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise UnreadableError("an array of objects")
    yield from (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())
