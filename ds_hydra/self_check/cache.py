"""Verdicts of earlier self-checks, in a folder that users can find: $XDG_CACHE_HOME/ds_hydra/self_check."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.models.whose_code import file_of, is_of_package, own_code, slots_of
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.zero_hetero.files import keep_file, kept_folder, read_file

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "accelerate")
_OWN_KEYS = frozenset(vars(nn.Module()))
_MOST_BYTES = 64 * 2**20  # of a file of verdicts
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), range, slice})
_BY_REPR = (enum.Enum, torch.dtype, torch.device, torch.Size, torch.layout)
_BY_NAME = (type, types.ModuleType, types.BuiltinFunctionType)
_CONTAINERS = (object, dict, list, tuple, set, frozenset, functools.partial)
_HARMLESS = frozenset({"generation_config", "warnings_issued", "hf_device_map", "model_tags", "name_or_path"})


def cache_folder() -> Path:
    """Where verdicts are kept."""
    return kept_folder("self_check")


class _UnreadableError(Exception):
    """The contents of a value cannot be told."""


def fingerprint(model: nn.Module, *settings: Any) -> str | None:
    """A text that changes with anything that a verdict depends on; None for a model that runs code of a script.

    Module tree, shapes, types, modes (`training`), attributes and buffers by value, configs, torch's default type,
    plain variables of installed classes and of their files, versions, our own sources. Values of parameters count for
    nothing: verdicts do not depend on them.
    """
    if own := own_code(model):
        logger.debug("no verdicts are kept: %s is a script's code", own[0])
        return None
    known: dict[int, tuple[str, Any]] = {id(one): (f"module {path}", one) for path, one in model.named_modules()}
    known |= {id(one): (f"parameter {name}", one) for name, one in model.named_parameters()}
    parts: list[Any] = [settings, str(torch.get_default_dtype()), _versions(), _own_sources()]
    for path, module in model.named_modules(remove_duplicate=False):
        held = {key: value for key, value in vars(module).items() if key not in _OWN_KEYS | _HARMLESS}
        tensors = [(n, p if p is None else _kind(p)) for n, p in module._parameters.items()]
        parts.append((path, type(module), module.training, held, module._modules, tensors, module._buffers))
    digest = hashlib.sha256()
    try:
        for text in _texts([*parts, list(_variables(model))], known):
            digest.update(f"{text}\0".encode())
    except (_UnreadableError, RecursionError) as error:
        logger.debug("no verdicts are kept: %s", error)
        return None
    return digest.hexdigest()[:32]


def _kind(parameter: nn.Parameter) -> tuple[Any, ...]:
    return type(parameter).__name__, str(parameter.dtype), tuple(parameter.shape), parameter.requires_grad


def _variables(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Plain variables of the modules' classes and of the files that define their forwards: a script may set them."""
    ours = {base for module in model.modules() for base in type(module).__mro__ if is_of_package(file_of(base))}
    homes: set[Any] = {*ours, *(sys.modules[base.__module__] for base in ours if "forward" in vars(base))}
    for home in sorted(homes, key=str):
        for name, value in sorted(vars(home).items()):
            if isinstance(value, bool | int | float | str) and name[:2] != "__":
                yield home.__name__, name, value


def _texts(value: Any, seen: dict[int, tuple[str, Any]]) -> Iterator[str]:
    """What a value of installed packages' code consists of. `seen` has the name and the value of what is known, by
    identity; values are held there, so that no other gets the identity of one. Raises _UnreadableError."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN or isinstance(value, _BY_REPR):
        yield repr(value)
    elif id(value) in seen:
        yield seen[id(value)][0]
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"
        if value.numel() and not value.is_meta:
            numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            yield hashlib.sha256(numbers.tobytes()).hexdigest()
    elif isinstance(value, _BY_NAME):
        yield f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', value.__name__)}"
    else:
        seen[id(value)] = f"again {len(seen)}", value
        for part in _held(value):
            yield from _texts(part, seen)


def _held(value: Any) -> Iterator[Any]:
    """What a container, a function or an object consists of."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        if not is_of_package(value.__code__.co_filename):
            raise _UnreadableError(f"{value.__qualname__} is a script's")
        yield from (value.__module__, value.__qualname__, value.__defaults__, value.__kwdefaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or ())
        return
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
        return
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, set | frozenset):
        yield from sorted(map(repr, value))
    elif isinstance(value, list | tuple):
        yield from value
    for base in kind.__mro__:
        if base not in _CONTAINERS and not file_of(base).endswith(".py"):
            raise _UnreadableError(f"what a {kind.__qualname__} holds cannot be told")  # it is not written in Python
    yield from ((name, getattr(value, name)) for name in slots_of(kind) if hasattr(value, name))
    yield from sorted(getattr(value, "__dict__", {}).items(), key=lambda item: str(item[0]))


@cache
def _own_sources() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in ("pipe", "self_check", "step"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, ""))
    return tuple(found)


def read_verdicts(name: str | None) -> dict[PipelineShape, Verdict]:
    """What is known under a fingerprint. A file that cannot be read, or that is damaged, counts as none."""
    if name is None:
        return {}
    try:
        raw = json.loads(read_file(cache_folder() / f"{name}.json", _MOST_BYTES))
        return {PipelineShape.parse(scheme): Verdict.from_json(verdict) for scheme, verdict in raw.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, OverflowError):
        return {}


def write_verdicts(name: str | None, verdicts: Mapping[PipelineShape, Verdict]) -> None:
    """Keep what was found, but not what could not be checked; where nothing can be written nothing is kept."""
    if name is None:
        return
    kept = {str(shape): v.to_json() for shape, v in verdicts.items() if v.state != "unchecked"}
    text = json.dumps(kept, indent=1)
    keep_file(cache_folder() / f"{name}.json", lambda file: file.write(text.encode()))
