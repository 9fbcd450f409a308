"""What tests on forked ranks share."""

from __future__ import annotations

import pytest

from ds_hydra.planner.selection import warm_up


@pytest.fixture(autouse=True, scope="session")
def _compiled_kernels() -> None:
    """The planner's kernels are loaded before ranks are forked: each rank of each test would load them again."""
    warm_up()
