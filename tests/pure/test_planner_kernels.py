"""The kernels' two ways in: names, types, and both versions side by side."""

import inspect
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds_hydra.pipe.schedules.list_order import fresh_walk
from ds_hydra.pipe.schedules.list_walk import Jobs, TakeWalk, Walk, list_walk
from ds_hydra.planner.kernels import Kernels, compiled, load
from ds_hydra.planner.kernels.list_time import fresh_list_walk
from ds_hydra.planner.kernels.load import _global_names, _kernels

ENTRY_POINTS = [name for name, value in vars(Kernels).items() if inspect.isfunction(value) and name[0] != "_"]


def signature(function: types.FunctionType) -> list[tuple[object, ...]]:
    """Parameters and result, types resolved, without `self`."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    listed = [(x.name, x.kind, x.default, hints[x.name]) for x in parameters if x.name != "self"]
    return [*listed, ("return", hints["return"])]


def test_the_protocol_has_the_entry_points() -> None:
    assert len(ENTRY_POINTS) == 12
    assert set(ENTRY_POINTS) <= set(_kernels())


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_the_protocol_has_the_kernel_s_own_signature(name: str) -> None:
    kernel = _kernels()[name]
    assert isinstance(kernel, types.FunctionType)
    assert signature(getattr(Kernels, name)) == signature(kernel)


def module(name: str, source: str) -> types.ModuleType:
    """A module made of source text."""
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    return made


@pytest.mark.parametrize("again", ["def _helper(x): return -x", "_helper = 3", "from math import floor as _helper"])
def test_a_name_with_two_meanings_is_refused(again: str) -> None:
    first, second = module("first", "import math\ndef _helper(x): return x"), module("second", "import math\n" + again)
    with pytest.raises(AssertionError, match="_helper means one thing in first and another in second"):
        _global_names([first, second])


def test_a_constant_with_two_values_is_refused() -> None:
    with pytest.raises(AssertionError, match="_ROUNDS means one thing in first and another in second"):
        _global_names([module("first", "_ROUNDS = 4"), module("second", "_ROUNDS = 5")])


def test_names_that_agree_are_shared() -> None:
    first = module("first", "import math\n_ROUNDS = 4\ndef one(x): return x")
    second = module("second", "import math\n_ROUNDS = 4")
    second.__dict__["one"] = first.one
    assert set(_global_names([first, second])) == {"math", "_ROUNDS", "one"}


def test_every_kernel_of_the_folder_is_loaded() -> None:
    """A new file of kernels that is missing in the list would have its functions called uncompiled, or not at all."""
    folder = Path(load.__file__).parent
    not_kernels = {"__init__", "arrays", "load", "problem", "protocol"}
    assert {path.stem for path in folder.glob("*.py")} - not_kernels == {
        listed.__name__.rpartition(".")[2] for listed in load._MODULES
    }


def test_a_warm_cache_has_all_that_plans_need() -> None:
    """Else the first job on a machine compiles for many seconds in its first steps. A process of its own tells, since
    other tests here have called more."""
    code = (
        "import ds_hydra.planner.kernels as kernels\n"
        "from ds_hydra.planner import Planner, PlannerOptions\n"
        "from ds_hydra.planner.selection import warm_up\n"
        "from ds_hydra.pipe.shape import StrategyShape\n"
        "from tests.support.planner_cases import a800_batch, a800_planner\n"
        "def compiled():\n"
        "    named = vars(kernels.compiled()).items()\n"
        "    return {name for name, kernel in named if getattr(kernel, 'signatures', None)}\n"
        "warm_up()\n"
        "warm = compiled()\n"
        "whole = a800_planner()\n"
        "every = [StrategyShape.parse(text) for text in ('8*tp8', '4*tp8 + 4*tp4pp2/v')]\n"
        "for planner in (whole, Planner(whole.cost_table, every, PlannerOptions(kernels='compiled'))):\n"
        "    for step, size in enumerate((5, 12, 40, 190)):\n"
        "        planner.plan(step, range(size), a800_batch(step, size))\n"
        "print(len(warm), *sorted(compiled() - warm))"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout
    count, *late = found.split()
    assert int(count) > 6
    assert late == []


def test_a_compiled_walk_counts_no_references() -> None:
    """Each access to an array in a tuple would: then it is seven times as fast as plain Python, now a hundred times."""
    works = np.array([[7 + m % 5, 11 + m % 3, 5, 2, 1, -1, 2] for m in range(60)]).T.copy()
    arrays, lists = Jobs(4, 1, *works, room=12), Jobs(4, 1, *works.tolist(), room=12)  # type: ignore[misc]
    kernel = vars(compiled())["list_walk"]

    def seconds_of(walk: TakeWalk, jobs: Jobs, fresh: Callable[[Jobs], Walk]) -> float:
        walks = [fresh(jobs) for _ in range(6)]
        walk(jobs, walks.pop())  # compiles
        each = []
        for one in walks:
            started = time.thread_time()
            walk(jobs, one)
            each.append(time.thread_time() - started)
        return min(each)

    fast, plain = seconds_of(kernel, arrays, fresh_list_walk), seconds_of(list_walk, lists, fresh_walk)
    assert plain > 12 * fast, f"{1e6 * plain:.0f} us in plain Python, {1e6 * fast:.0f} us compiled"


def _nearest(number: int) -> int:
    return number + 1


def _both(number: int) -> int:
    return _nearest(-1) + _nearest(number)


def test_a_kernel_is_compiled_once_for_constants_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    plain = numba.njit
    monkeypatch.setattr(numba, "njit", lambda *given, **options: plain(*given, **options | {"cache": False}))
    names = dict(globals())
    clones = load._clones({one.__name__: one for one in (_nearest, _both)}, names, "once", load._compiler())
    assert clones["_both"](5) == 6
    assert len(clones["_nearest"].signatures) == 1
