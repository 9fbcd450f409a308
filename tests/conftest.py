"""What holds for every test: one thread a process, and `gpu` tests only where a device is."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks share the cores

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# The same examples in every run, and no time limit on one: the machine's cores may be shared.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
