"""DeepSpeed's own objects under names of packages here, where scripts ask for them. Pure.

[Note: names of DeepSpeed]
A script changes one line, `import ds_hydra as deepspeed`, and goes on asking this module for all of DeepSpeed's names:
`deepspeed.comm.get_rank()`, `from deepspeed.ops.adam import DeepSpeedCPUAdam`. So a name that a package here lacks is
that of DeepSpeed's package of the same path, and a module that is not here is DeepSpeed's, the same object under both
names: `ds_hydra.comm` is `deepspeed.comm`. DeepSpeed, and torch with it, are imported when the first of them is asked
for. What means something else here (`initialize`, `zero.Init`) is defined here, and so comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_OURS, _THEIRS = "ds_hydra", "deepspeed"
BOTH = frozenset(("checkpoint", "pipe", "profiling", "zero"))
"""Modules that both have; each of these hands DeepSpeed's names on."""


def theirs_of(name: str) -> str:
    """The name that a module has in DeepSpeed."""
    return _THEIRS + name.removeprefix(_OURS)


def handed_on(package: str, theirs: str = "") -> Callable[[str], Any]:
    """A `__getattr__` for a module here: it hands on the names of DeepSpeed's of the same path, or of `theirs`."""
    source = theirs or theirs_of(package)

    def named(name: str) -> Any:
        missing = f"module {package!r} has no attribute {name!r}"
        if name.startswith("__") and not name.startswith(("__git_", "__version_")):
            raise AttributeError(missing)
        path = getattr(sys.modules[package], "__path__", None)
        if path is not None and PathFinder.find_spec(f"{package}.{name}", path) is not None:
            # A module here that nobody has imported yet. DeepSpeed imports those of its own that scripts ask for so.
            if name in BOTH:
                return import_module(f"{package}.{name}")
            raise AttributeError(f"{missing}: import {package}.{name} first")
        module = import_module(source)
        if hasattr(module, name):
            return getattr(module, name)
        try:
            return import_module(f"{source}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{source}.{name}":
                raise
        raise AttributeError(f"{missing}, and neither has {source} of DeepSpeed {import_module(_THEIRS).__version__}")

    return named


class _Modules(MetaPathFinder, Loader):
    """Finds modules of DeepSpeed by names of this package.

    Python looks for a module below a package in the package's own folder. Below one of DeepSpeed's it would find the
    file and load it a second time, so the finder for these comes before all others; the one for modules that are not
    here comes after them.
    """

    def __init__(self, *, below_theirs: bool):
        self._below_theirs = below_theirs
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a module of DeepSpeed; None for one that is not DeepSpeed's."""
        parent = fullname.rpartition(".")[0]
        if parent != _OURS and not parent.startswith(f"{_OURS}."):
            return None
        below_theirs = parent in sys.modules and sys.modules[parent].__name__ != parent
        if below_theirs != self._below_theirs:
            return None
        try:
            found = find_spec(theirs_of(fullname))
        except ModuleNotFoundError:  # not even the package is there
            return None
        return None if found is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """DeepSpeed's own module."""
        module = import_module(theirs_of(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is whole; only its spec, which Python has just replaced, is DeepSpeed's again."""
        assert module.__spec__ is not None, "Python has set the spec of an alias"
        module.__spec__ = self._specs.pop(module.__spec__.name)


FINDERS = (_Modules(below_theirs=True), _Modules(below_theirs=False))


def install() -> None:
    """From now on `import ds_hydra.comm` imports DeepSpeed's module of that name."""
    if FINDERS[0] not in sys.meta_path:
        sys.meta_path.insert(0, FINDERS[0])
        sys.meta_path.append(FINDERS[1])
