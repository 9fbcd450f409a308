"""The order in which all ranks start their pushes follows from the strategy: stages push side by side."""

from __future__ import annotations

import pytest

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.transfers import push_order
from tests.support.emulated_job import square_model


def order_of(text: str, plan: ModelPlan) -> tuple[int, ...]:
    shape = StrategyShape.parse(text)
    return push_order(plan, place_strategy(shape, shape.num_ranks, plan.num_layers))


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("2*tp1", (5, 4, 3, 2, 1, 0)),
        # Embedding and layers 0 and 1 are buckets 0 to 2 of the first stage, layers 2 and 3 and the head 3 to 5.
        ("2*pp2", (5, 2, 4, 1, 3, 0)),
        # Two stages are done before the first, with buckets 0 and 1, begins its last backward; the second is done then.
        ("pp4", (5, 4, 3, 1, 2, 0)),
        # Where weights' gradients are put off, all four stages end together.
        ("pp4/list", (5, 1, 4, 3, 2, 0)),
        # Both stages of one hold a third of what the other pipeline holds: whoever comes last to a bucket decides.
        ("tp2 + pp2", (5, 4, 2, 1, 3, 0)),
        # The parts of a V: buckets 0, 1, 4 and 5 of the first rank, 2 and 3 of the other.
        ("2*pp2/v", (5, 4, 3, 1, 2, 0)),
    ],
)
def test_stages_push_side_by_side(strategy: str, order: tuple[int, ...]) -> None:
    assert order_of(strategy, square_model(4)) == order


@pytest.mark.parametrize("strategy", ["tp4 + 2*pp2 + pp4/v", "3*tp1 + pp5", "sp2pp3 + tp2"])
def test_every_bucket_leaves_once_and_those_of_a_stage_from_last_to_first(strategy: str) -> None:
    plan = square_model(8)
    shape = StrategyShape.parse(strategy)
    placed = place_strategy(shape, shape.num_ranks, plan.num_layers)
    order = push_order(plan, placed)
    assert sorted(order) == list(range(len(plan.buckets)))
    if all(stage.num_layers == 8 for pipeline in placed.pipelines for stage in pipeline.stages):
        assert list(order) == sorted(order, reverse=True)
