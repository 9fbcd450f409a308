"""Verdicts of earlier self-checks, in a folder that users can find: $XDG_CACHE_HOME/ds_hydra/self_check."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.zero_hetero.kept_files import keep_file, kept_folder

_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "accelerate")
_INSTALLED = ("torch", "transformers", "deepspeed", "peft")  # their sources are known by their versions
_OWN_KEYS = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


def cache_folder() -> Path:
    """Where verdicts are kept."""
    return kept_folder("self_check")


def fingerprint(model: nn.Module, *settings: Any) -> str | None:
    """A text that changes with anything that a verdict depends on; None for a model whose code cannot be told.

    Module tree, shapes, plain attributes, config, sources of classes that are not installed packages', what was put
    into those that are, versions, our own sources. Values of parameters count for nothing: verdicts do not depend on
    them.
    """
    digest = hashlib.sha256(repr((settings, _versions(), _own_sources())).encode())
    classes: set[type] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        attributes = {key: value for key, value in vars(module).items() if key not in _OWN_KEYS}
        if any(getattr(module, key) for key in _OWN_KEYS if key.startswith(("_forward_", "_backward_"))):
            return None
        if any(inspect.isroutine(value) for value in attributes.values()):
            return None
        plain = sorted((key, repr(value)) for key, value in attributes.items() if _is_plain(value))
        tensors = [(name, tuple(p.shape), p.requires_grad) for name, p in module._parameters.items() if p is not None]
        digest.update(repr((path, type(module).__qualname__, plain, tensors)).encode())
        classes.add(type(module))
    if any(parameter._backward_hooks for parameter in model.parameters()):
        return None
    sources = [*_sources(classes), *_patched(classes)]
    if None in sources:
        return None
    config: Any = getattr(model, "config", None)
    described = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config)
    digest.update(repr((sorted(map(str, sources)), described)).encode())
    return digest.hexdigest()[:32]


def _sources(classes: set[type]) -> Iterator[str | None]:
    """Digests of the files that define classes which no installed package does; None where there is no file."""
    for kind in {base for cls in classes for base in cls.__mro__}:
        if kind.__module__.partition(".")[0] in (*_INSTALLED, "builtins", "typing", "abc"):
            continue
        try:
            yield hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
        except (OSError, TypeError):
            yield None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN)


def _patched(classes: set[type]) -> Iterator[str]:
    """Functions that come from elsewhere, in installed packages' classes and the modules that define them.

    `LlamaMLP.forward = mine` changes what a model computes, and neither a version nor a class's source tells.
    """
    ours = {kind for cls in classes for kind in cls.__mro__ if kind.__module__.partition(".")[0] in _INSTALLED}
    homes: list[Any] = [*ours, *(sys.modules[name] for name in {kind.__module__ for kind in ours})]
    packages = tuple(str(Path(inspect.getfile(sys.modules[name])).parent) for name in _INSTALLED if name in sys.modules)
    files: set[str] = set()
    for home in homes:
        for name, value in vars(home).items():
            code = value.__code__ if inspect.isfunction(value) else None
            if code is None or code.co_filename.startswith(packages):
                continue
            yield repr((home.__name__, name, code.co_filename, code.co_firstlineno))
            files.add(code.co_filename)
    for file in sorted(files):
        with suppress(OSError):
            yield hashlib.sha256(Path(file).read_bytes()).hexdigest()


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
        raw = json.loads((cache_folder() / f"{name}.json").read_text(encoding="utf-8"))
        return {PipelineShape.parse(scheme): Verdict.from_json(verdict) for scheme, verdict in raw.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def write_verdicts(name: str | None, verdicts: Mapping[PipelineShape, Verdict]) -> None:
    """Keep what was found, but not what could not be checked; where nothing can be written nothing is kept."""
    if name is None:
        return
    kept = {str(shape): v.to_json() for shape, v in verdicts.items() if v.state != "unchecked"}
    text = json.dumps(kept, indent=1)
    keep_file(cache_folder() / f"{name}.json", lambda file: file.write(text.encode()))
