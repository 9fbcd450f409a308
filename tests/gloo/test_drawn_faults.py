"""A few faults drawn at random, of those that `tools.check_faults` tries: in time, with the codes, with one cause."""

from __future__ import annotations

import pytest

import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
from tests.support.drawn_faults import ACTIVITIES, KINDS, MODES, Case, drawn, wrong


@pytest.mark.drawn
@pytest.mark.parametrize(
    "case",
    [
        *drawn(9)[2:4],
        Case("SIGKILL", "backward", "V", 0),
        Case("memory", "planning", "ahead", 1),
        Case("bug", "planning", "ahead", 0),
    ],
    ids=str,
)
def test_a_drawn_fault_ends_as_promised(case: Case) -> None:
    assert wrong(case)[0] == []


def test_cases_are_of_every_kind() -> None:
    cases = drawn(200)
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.activity for case in cases} == set(ACTIVITIES)
    assert {case.mode for case in cases} == set(MODES)
    assert cases == drawn(200)
