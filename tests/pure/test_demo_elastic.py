"""What the demonstration of lost ranks judges its job by."""

from __future__ import annotations

from typing import Any

import pytest

from tools.demo_elastic import Course, whole, wrong

COURSE = Course({3: ["tp2 + tp1"], 2: ["tp2"]}, 6, (1,), 1)
STRATEGIES = ["tp2 + tp1"] * 2 + ["tp2"] * 2 + ["tp2 + tp1"] * 2


def records(strategies: list[str] = STRATEGIES, losses: tuple[float, float] = (9.0, 8.0)) -> list[dict[str, Any]]:
    """Of a job that trained its steps by these strategies, from the first loss to the last."""
    first, last = losses
    return [{"step": step, "strategy": strategy, "loss": first if step == 1 else last}
            for step, strategy in enumerate(strategies, start=1)]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "raw", "told"),
    [
        (records(), [1, 2, 3, 4, 5, 6], ""),
        (records(), [1, 2, 4, 5, 6], "no records of the steps [3]"),
        (records(), [1, 2, 3, 3, 4, 5, 6], "steps are recorded twice: [3]"),
        (records(STRATEGIES[:3] + ["tp2"] * 3), [1, 2, 3, 4, 5, 6], "[3, 2] ranks trained, not [3, 2, 3]"),
        (records(losses=(8.0, 9.0)), [1, 2, 3, 4, 5, 6], "the loss went from 8.000 to 9.000"),
    ],
)
def test_what_should_not_have_happened_is_told(found: list[dict[str, Any]], raw: list[int], told: str) -> None:
    assert wrong(COURSE, found, raw) == ([told] if told else [])


def test_steps_that_all_ranks_have_made_since_the_last_loss() -> None:
    assert [whole(records()[:count], COURSE) for count in range(7)] == [0, 1, 2, 0, 0, 1, 2]
