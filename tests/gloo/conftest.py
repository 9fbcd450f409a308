"""What tests on forked ranks share."""

from __future__ import annotations

import pytest

from tests.support.small_job import find_before_forks


@pytest.fixture(autouse=True, scope="session")
def _shared_by_ranks() -> None:
    find_before_forks()
