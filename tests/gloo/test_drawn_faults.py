"""Faults drawn at random, in jobs of every kind: each ends in time, with the promised codes, with one cause."""

from __future__ import annotations

import pytest

import ds_hydra.engine.engine  # noqa: F401  so that forked ranks need not import it
from tests.support.drawn_faults import ACTIVITIES, KINDS, MODES, Case, drawn, wrong

CASES = drawn(200)
CHOSEN = [
    Case("SIGKILL", "backward", "V", 0),
    Case("memory", "planning", "ahead", 1),
    Case("bug", "planning", "ahead", 0),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.drawn, id=str(case)) for case in (*CASES[2:4], *CHOSEN)]
    + [pytest.param(case, marks=pytest.mark.long, id=f"{n} {case}") for n, case in enumerate(CASES) if n not in (2, 3)],
)
def test_a_drawn_fault_ends_as_promised(case: Case) -> None:
    assert wrong(case)[0] == []


def test_cases_are_of_every_kind() -> None:
    assert {case.kind for case in CASES} == set(KINDS)
    assert {case.activity for case in CASES} == set(ACTIVITIES)
    assert {case.mode for case in CASES} == set(MODES)
    assert drawn(200) == CASES
