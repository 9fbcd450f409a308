"""What is told of experts that are chosen less evenly than memory is planned for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.report.prediction import StepWatch


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([[], []], []),  # none are spread
        ([[1.2, 1.7], [1.5, 1.5]], []),  # in the mean of layers as planned
        ([[1.0, 2.2], [1.9, 1.9], [2.1, 2.1]], ["1.6 times", "2.1 times"]),  # again once it is a quarter worse
    ],
)
def test_more_than_planned_is_told(steps: Sequence[Sequence[float]], told: Sequence[str]) -> None:
    shape = ModelShape(64, 4, 8, 8, 128, 100, 1000)
    table = TableFile(analytic_cost_table(shape, [ParallelScheme()], 64))
    watch = StepWatch("off", table, 4, 100, measured=False, expert_imbalance=1.5)
    lines = [line for step in steps for line in watch.uneven_experts(step)]
    assert len(lines) == len(told)
    assert all(each in line and "memory is planned for" in line for each, line in zip(told, lines, strict=True))
