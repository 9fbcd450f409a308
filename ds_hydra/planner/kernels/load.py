"""The inner loops of the planner, twice: as plain Python, and compiled by numba on first request. Pure: no torch.

A kernel is an ordinary function over scalars and arrays in this folder, or in a module of `_SHARED`, that calls only
other kernels. `pure()` gives the functions as they stand, at no start-up cost; `compiled()` gives the same functions
through numba's on-disk cache. No kernel uses fast-math, so both give the same bits.

[Note: where compiled kernels are kept]
Numba keeps what it compiled beside the file of a function, and takes it for stale once that file has another path, size
or time. So each clone, installation and container would compile for a minute what is compiled already. Compiled kernels
are therefore functions of copies in a folder of the user's, which bears the digest of their source and numba's release,
and whose time is always the same: whoever has these sources finds these files.

What numba loads is code. So nobody else may be able to write in that folder; where somebody may, numba's usual places
are used, which hold for one checkout alone.

[Note: why kernels are cloned]
Writing `@njit` on each function would be plainer, but three things speak against it:
- Start-up time. The decorator imports numba, which takes as long as all else that the planner imports, in every process
  that only wants to read a plan or a config.
- The cache. Numba keys what it compiled by the file of the function itself and does not see the functions that it
  calls: after a change in `packing.py` it would go on with a `dispatch` that has the old packing inside.
- Both versions are needed: plain Python where one plan is all that is asked for, or where numba cannot compile. A
  decorated function's plain version calls the compiled versions of the others.

So `compiled()` makes a copy of every function. The copies share one dictionary of global names, in which each kernel's
name means its compiled copy. A digest of the source of all kernels is part of the copies' names and with that of the
key of numba's cache: a change anywhere compiles everything anew, into entries of its own.

One dictionary for all modules means that a name may have only one meaning. `_global_names` refuses a second one: it
would be used without a word in the compiled version only.

Kernels call each other as ordinary functions. What is called from outside goes through a `Kernels`, so that the choice
between the two is made in one place (`load.select`) and every call is checked by types all the same. What the arguments
mean stands with the kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import ds_hydra.costs.stage_work as stage_work
import ds_hydra.pipe.schedules.list_walk as list_walk
import ds_hydra.planner.kernels.bound as bound
import ds_hydra.planner.kernels.cut_search as cut_search
import ds_hydra.planner.kernels.dispatch as dispatch
import ds_hydra.planner.kernels.packing as packing
import ds_hydra.planner.kernels.problem as problem
from ds_hydra.pipe.schedules.list_walk import TakeWalk
from ds_hydra.pipe.schedules.registry import SCHEDULES
from ds_hydra.zero_hetero.files import check_private, keep_file, kept_folder

logger = logging.getLogger(__name__)
_TIME_NS = 10**18  # of every copy


@functools.cache
def folder_of_kernels() -> Path | None:
    """Where compiled kernels are kept, made if need be: `NUMBA_CACHE_DIR`, else among the user's kept files; None
    where there can be no folder in which this user alone may write."""
    named, folder = os.environ.get("NUMBA_CACHE_DIR"), None
    try:
        folder = Path(named) if named else kept_folder("kernels")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder, "can have this job run what they like")
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        logger.warning(
            "planner: compiled kernels are kept for this checkout alone, not in %s: %s", folder or "a home", error
        )
        return None
    return folder.resolve()


@contextmanager
def beside_copies() -> Iterator[None]:
    """Here numba takes the place beside a function's file before all others, if there are copies."""
    import numba

    config: Any = numba.config
    before = config.CACHE_DIR
    if folder_of_kernels() is not None:
        config.CACHE_DIR = ""
    try:
        yield
    finally:
        config.CACHE_DIR = before


def as_copied(function: types.FunctionType, digest: str, release: str) -> types.CodeType:
    """A function's code, as if it stood in the copy of its module for this digest and this release of numba; as it is
    where no copy can be kept."""
    copy = _copy(function.__module__, digest, release)
    return function.__code__ if copy is None else function.__code__.replace(co_filename=copy)


@functools.cache
def _copy(module: str, digest: str, release: str) -> str | None:
    """The path of a module's copy, written if it is not there."""
    folder = folder_of_kernels()
    if folder is None:
        return None
    source = Path(str(sys.modules[module].__file__)).read_bytes()
    copy = folder / f"ds_hydra-{digest}-numba-{release}" / f"{module}.py"

    def write(file: IO[bytes]) -> None:
        file.write(source)
        file.flush()
        os.utime(file.fileno(), ns=(_TIME_NS, _TIME_NS))

    def is_there() -> bool:
        return copy.is_file() and copy.stat().st_mtime_ns == _TIME_NS and copy.read_bytes() == source

    if not is_there():
        keep_file(copy, write)
    return str(copy) if is_there() else None


class Kernels:
    """The entry points of the kernels as plain Python; an instance may have compiled ones of these names, which go
    first, and has all others too. `is_compiled` says by which way they run."""

    is_compiled: bool

    share_of_pipeline = staticmethod(bound.share_of_pipeline)  # bounds and proofs
    strategy_bound = staticmethod(bound.strategy_bound)
    refute = staticmethod(bound.refute)
    pack_all = staticmethod(dispatch.pack_all)  # dispatch and packing
    dispatch = staticmethod(dispatch.dispatch)
    pack = staticmethod(packing.pack)
    packing_bound = staticmethod(packing.packing_bound)
    search_profiles = staticmethod(cut_search.search_profiles)  # micro-batches with slices
    search_moves = staticmethod(cut_search.search_moves)
    subset_costs = staticmethod(bound.subset_costs)  # few sequences
    best_split = staticmethod(bound.best_split)
    pack_tiny = staticmethod(bound.pack_tiny)

    def __init__(self, kernels: Mapping[str, Callable[..., Any]], *, is_compiled: bool) -> None:
        vars(self).update(kernels)
        self.is_compiled = is_compiled


_MODULES = (packing, bound, dispatch, cut_search)
# Functions that a plan's check calls as well, so that it comes to the same times.
_SHARED = (list_walk, stage_work)
_ALL = (*_SHARED, *_MODULES)
# What a dispatch spends its time in. None of it makes an array.
_INNERMOST = (
    packing.scheme_at, packing.stage_ms, packing.ideal_ms, dispatch.put, dispatch.fullest_below,
    dispatch.place_greedily,
    dispatch.other_work, dispatch.retime, dispatch.find_longest, dispatch.find_exchange, dispatch.exchange,
    bound.priced_ratio, bound.longest_ms, bound.sharing_ms,
)  # fmt: skip


def _global_names(modules: Sequence[ModuleType], instead: Sequence[ModuleType] = ()) -> dict[str, Any]:
    """What each name stands for in the modules of the kernels, functions that `instead` defines before all others;
    AssertionError where two of them disagree."""
    meaning: dict[str, Any] = {name: value for module in instead for name, value in _own(module)}
    replaced, origin = frozenset(meaning), dict[str, str]()
    for module in (*modules, *instead):
        for name, value in vars(module).items():
            if name.startswith("__") or name in replaced:
                continue
            assert meaning.setdefault(name, value) is value, (
                f"kernels: {name} means one thing in {origin[name]} and another in {module.__name__}; compiled kernels "
                "share one set of names, so rename one of the two"
            )
            origin.setdefault(name, module.__name__)
    return meaning


def _own(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that a module defines, by name."""
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            yield name, value


def _kernels(*instead: ModuleType) -> dict[str, Callable[..., Any]]:
    """Every kernel by name, functions of `instead` in the place of those of the same name."""
    return {name: function for module in (*_ALL, *instead) for name, function in _own(module)}


@functools.cache
def source_digest(*instead: ModuleType) -> str:
    """Changes whenever any kernel does, or the arrays they take [Note: why kernels are cloned]."""
    text = "".join(inspect.getsource(module) for module in (*_ALL, problem, *instead)) + inspect.getsource(_compiler)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def pure() -> Kernels:
    """The kernels as plain Python functions."""
    return Kernels(_kernels(), is_compiled=False)


@functools.cache
def compiled(*instead: ModuleType) -> Kernels:
    """The kernels as numba dispatchers; the first call of each compiles it unless the cache on disk holds it.

    Functions of the modules `instead` are kernels too, and where one has the name of another, all call it instead.
    """
    names, digest = _global_names(_ALL, instead), source_digest(*instead)
    return Kernels(_clones(_kernels(*instead), names, digest, _compiler(digest)), is_compiled=True)


def _compiler(digest: str) -> Callable[[Any], Any]:
    """What compiles a clone, for a digest of all that is compiled [Note: why kernels are cloned]."""
    import numba
    from numba.core.types import unliteral

    shared = {module.__name__ for module in _SHARED}
    uncounted = {function.__name__ for function in _INNERMOST}

    def compiled_clone(clone: types.FunctionType) -> Any:
        # Each access to an array in a tuple counts references, which takes a walk ten times what it does with the
        # number that it reads, and a dispatch a sixth of its time. Functions that make no arrays need no counting.
        walks = clone.__module__ in shared
        options: dict[str, Any] = {"_nrt": False} if walks or clone.__name__ in uncounted else {}
        if walks and clone.__name__ != list_walk.list_walk.__name__:
            options["inline"] = "always"  # called in the loops of a walk
        clone.__code__ = as_copied(clone, digest, numba.__version__)
        with beside_copies():
            kernel = numba.njit(cache=True, nogil=True, **options)(clone)
        template = kernel.get_call_template

        def of_types(given: Sequence[Any], named: Mapping[str, Any]) -> Any:
            # A kernel that is called with -1 here and with a variable there would be compiled twice, and all that it
            # calls with it: a tenth of the time that all kernels take.
            return template(tuple(map(unliteral, given)), {name: unliteral(one) for name, one in named.items()})

        kernel.get_call_template = of_types
        return kernel

    return compiled_clone


def _clones(
    functions: Mapping[str, Any], names: dict[str, Any], digest: str, wrap: Callable[[Any], Any]
) -> dict[str, Any]:
    """Copies of functions, wrapped, that see each other in `names`, which is changed."""
    clones: dict[str, Any] = {}
    for name, function in functions.items():
        clone = types.FunctionType(function.__code__, names, name, function.__defaults__)
        clone.__module__ = function.__module__
        clone.__qualname__ = f"{name}_{digest}"
        clones[name] = wrap(clone)
    names.update(clones)  # looked up when a kernel is compiled, at its first call
    return clones


def timing(kernels: Kernels, schedule: str) -> Kernels:
    """The same kernels, whose searches time micro-batches by a schedule's own walk."""
    walk = SCHEDULES[schedule].walk
    return kernels if walk in (None, list_walk.list_walk) else _timing(walk, kernels.is_compiled)


@functools.cache
def _timing(walk: TakeWalk, is_compiled: bool) -> Kernels:
    """Copies of all kernels, in which the name of the usual walk means another one, whose functions are copied too."""
    module = sys.modules[walk.__module__]
    text = source_digest() + inspect.getsource(module)
    digest = hashlib.sha256(f"{walk.__name__} {text}".encode()).hexdigest()[:12]
    wrap = _compiler(digest) if is_compiled else (lambda function: function)
    names, own, usual = _global_names(_ALL), dict(vars(module)), _kernels()
    kernels = _clones(usual, names, digest, wrap)
    own |= {name: kernels[name] for name, value in own.items() if name in usual and value is usual[name]}
    names["list_walk"] = _clones(dict(_own(module)), own, digest, wrap)[walk.__name__]
    return Kernels(kernels, is_compiled=is_compiled)


def select(which: str) -> Kernels:
    """The kernels that `PlannerOptions.kernels` asks for: "compiled", "pure", or "auto", compiled wherever numba is."""
    # Whether the cache on disk holds them must decide nothing: the two search with different effort.
    can = importlib.util.find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
    compile_them = which == "compiled" or (which == "auto" and can)
    return compiled() if compile_them else pure()
