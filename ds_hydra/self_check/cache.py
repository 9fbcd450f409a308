"""Verdicts of earlier self-checks, in a folder that users can find: $XDG_CACHE_HOME/ds_hydra/self_check."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hydra.pipe.models.whose_code import (
    GLOBAL_HOOKS,
    HOOKS,
    called_by,
    file_of,
    function_of,
    holds_own,
    is_of_package,
)
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.contents import Contents, UnreadableError
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.zero_hetero.files import keep_file, kept_folder, read_file

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "accelerate")
_OWN_KEYS = frozenset(vars(nn.Module()))
_MOST_BYTES = 64 * 2**20  # of a file of verdicts
_HARMLESS = frozenset({"generation_config", "warnings_issued", "hf_device_map", "model_tags", "name_or_path"})


def cache_folder() -> Path:
    """Where verdicts are kept."""
    return kept_folder("self_check")


def fingerprint(model: nn.Module, *settings: Any) -> str | None:
    """A text that changes with anything that a verdict depends on; None for a model whose code cannot be told.

    Module tree, shapes, types, modes (`training`), attributes and buffers by value, configs, torch's default type,
    classes that are not installed packages' with all that their methods name, what was put into those that are,
    versions, our own sources. Values of parameters count for nothing: verdicts do not depend on them.
    """
    hooks = [getattr(module, key) for module in model.modules() for key in HOOKS]
    hooks += [vars(nn.modules.module)[name] for name in GLOBAL_HOOKS]
    hooks += [parameter._backward_hooks for parameter in model.parameters()]
    if any(hooks):
        return None
    names = {id(module): f"module {path}" for path, module in model.named_modules()}
    names |= {id(p): f"parameter {name}" for name, p in model.named_parameters()}
    contents = Contents(names)
    try:
        parts = [contents.text((settings, str(torch.get_default_dtype()), _versions(), _own_sources()))]
        for path, module in model.named_modules(remove_duplicate=False):
            held = {key: value for key, value in vars(module).items() if key not in _OWN_KEYS | _HARMLESS}
            tensors = [(n, p if p is None else _kind(p)) for n, p in module._parameters.items()]
            of_module = (path, type(module), module.training, held, module._modules, tensors, module._buffers)
            parts.append(contents.text(of_module))
        parts += [contents.text(each) for each in _code(model)]
    except UnreadableError as error:
        logger.debug("no verdicts are kept: %s", error)
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _kind(parameter: nn.Parameter) -> tuple[Any, ...]:
    return type(parameter).__name__, str(parameter.dtype), tuple(parameter.shape), parameter.requires_grad


def _code(model: nn.Module) -> Iterator[Any]:
    """The classes of the modules, and what is not theirs, or plain, where installed packages define them.

    `LlamaMLP.forward = mine` changes what a model computes, and neither a version nor a class's name tells.
    """
    kinds = sorted({type(module): module for module in model.modules()}.items(), key=lambda item: str(item[0]))
    yield from (kind for kind, _ in kinds)
    for _, module in kinds:
        yield [one for one in called_by(module) if not is_of_package(one.__code__.co_filename)]
    ours = {base for kind, _ in kinds for base in kind.__mro__ if is_of_package(file_of(base))}
    computing = {sys.modules[base.__module__] for base in ours if "forward" in vars(base)}
    homes: set[Any] = {*ours, *(sys.modules[base.__module__] for base in ours)}
    for home in sorted(homes, key=str):
        for name, value in sorted(vars(home).items()):
            if isinstance(value, bool | int | float | str) and name[:2] != "__" and (home in ours or home in computing):
                yield home.__name__, name, value
            elif (function := function_of(value)) is not None and holds_own(function):
                yield home.__name__, name, function


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
