"""What holds for every test: one thread a process, a share of those marked drawn, and `gpu`
tests only where a device is."""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks share the cores

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from ds_hydra.zero_hetero.files import kept_folder
from tests.support import drawn_tests

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before Triton, if it is there, is imported by anything
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The same examples in every run, and no time limit on one: the machine's cores may be shared.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs of tests, also those in processes of their own, leave the user's cache alone, but for compiled kernels."""
    kernels = os.environ.get("NUMBA_CACHE_DIR", str(kept_folder("kernels")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", kernels)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_visited() -> None:
    """What imports and the files before have made stays to the end: a collection of garbage, which much of the code
    under test asks for, takes up to a second if it visits all of that."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """What Accelerate keeps of a process, once asked, and hands over in the environment: else ranks that a later test
    forks take themselves for the only one, as this process is."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    before = _names_of_accelerate()
    yield
    for name in _names_of_accelerate():
        del os.environ[name]
    os.environ.update(before)


def _names_of_accelerate() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


def pytest_addoption(parser: pytest.Parser) -> None:
    drawn_tests.add_option(parser)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    drawn_tests.draw(config, items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
