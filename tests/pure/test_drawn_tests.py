"""Which of the tests that are marked drawn a run takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support.drawn_tests import commit, drawn, taken

ROWS = [f"test_a.py::test_rows[{number}]" for number in range(8)]
FEW = ["test_a.py::test_few[0]", "test_a.py::test_few[1]"]
ALONE = [f"test_b.py::test_{number}" for number in range(12)]


def test_a_sixth_of_each_tests_rows_is_drawn() -> None:
    found = taken([*ROWS, *ALONE, *FEW], "a commit")
    assert [len(found & set(some)) <= most for some, most in ((ROWS, 2), (FEW, 1), (ALONE, 2))] == [True] * 3
    counts = [len(set(ROWS) & taken(ROWS, f"commit {number}")) for number in range(300)]
    assert set(counts) == {1, 2}, "8 / 6 is no whole number"
    assert abs(sum(counts) / 300 - 8 / 6) < 0.1
    assert found == taken([*FEW, *ALONE, *ROWS], "a commit"), "each run of a commit takes the same"


def test_over_the_commits_all_are_drawn_alike() -> None:
    times = Counter(name for number in range(400) for name in taken([*ROWS, *ALONE], f"commit {number}"))
    assert set(times) == {*ROWS, *ALONE}
    assert all(25 <= count <= 110 for count in times.values()), times


def test_a_share_of_all_may_be_none() -> None:
    assert not drawn(ROWS, 0.01, "")
    assert drawn(ROWS, 1.0, "") == set(ROWS)


def test_the_commit_draws(tmp_path: Path) -> None:
    assert len(commit(Path(__file__).parent)) in (0, 40), "what was packed without its history has none"
    assert commit(tmp_path) == ""
