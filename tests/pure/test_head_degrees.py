"""By how many ranks the heads of a recurrent module are shared, and what is left of its cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.pipe.head_degrees import BoxSize, HeadDegrees, state_bytes
from ds_hydra.pipe.shape import ParallelScheme

KEYS_2_VALUES_4 = HeadDegrees((2, 4))
FUSED = HeadDegrees((2,))
ONE_GROUP = HeadDegrees((2, 4, 8, 16), groups=1)


@pytest.mark.parametrize(
    ("heads", "tp", "sp", "shared"),
    [
        (KEYS_2_VALUES_4, 1, 4, (1, 4)),
        (KEYS_2_VALUES_4, 2, 2, (2, 2)),
        (KEYS_2_VALUES_4, 4, 2, (4, 1)),
        (KEYS_2_VALUES_4, 3, 2, (1, 2)),  # ranks of a tp that divides nothing hold the whole
        (FUSED, 1, 4, (1, 2)),  # two by two
        (FUSED, 1, 6, (1, 2)),
        (FUSED, 2, 4, (2, 1)),
        (ONE_GROUP, 2, 8, (2, 8)),
        (ONE_GROUP, 1, 3, (1, 1)),
        (ONE_GROUP, 1, 6, (1, 1)),  # two of six would wait for squares of other sequences
        (HeadDegrees(), 4, 4, (1, 1)),
    ],
)
def test_ranks_share_heads_as_far_as_these_can_be_cut(
    heads: HeadDegrees, tp: int, sp: int, shared: tuple[int, int]
) -> None:
    assert heads.shared_by(tp, sp) == shared


def test_each_rank_keeps_the_states_of_its_heads() -> None:
    boxes = ((BoxSize(100, True, 64, FUSED),), (), (BoxSize(100, True, 8),))
    assert state_bytes(boxes) == 2 * (64 + 8)
    assert state_bytes(boxes, 1, 4) == state_bytes(boxes, 2, 1) == 2 * (32 + 8)


def test_ranks_that_share_heads_take_less_time() -> None:
    """Without links that take time: four layers, of which two are recurrent."""
    schemes = [ParallelScheme(), ParallelScheme(1, 1, 2), ParallelScheme(1, 1, 4)]

    def times(boxes: tuple[tuple[BoxSize, ...], ...]) -> list[tuple[float, float]]:
        shape = ModelShape(64, 4, 8, 8, 128, 100, params=1000, boxes=boxes)
        table = analytic_cost_table(shape, schemes, 4096, device_flops=6e3, link_bytes_per_second=1e30)
        return [(cost.a, cost.b) for cost in table.costs]

    one = BoxSize(100, recurrent=True)
    dense, whole, shared = (
        times(boxes) for boxes in ((), ((one,), ()) * 2, ((replace(one, heads=FUSED),), ()) * 2)
    )  # fmt: skip
    assert [a for a, _ in whole] == pytest.approx([a / 2 for a, _ in dense]), "half of the layers attend"
    assert [b for _, b in dense] == pytest.approx([1000, 500, 250])
    assert [b for _, b in whole] == pytest.approx([1000, 400 + 200, 200 + 200])
    assert [b for _, b in shared] == pytest.approx([1000, 500, 200 + 100])


def test_what_enters_a_box_and_leaves_it_is_priced() -> None:
    scheme = ParallelScheme(1, 1, 4)
    of_heads, of_boxes, of_shared = (
        analytic_cost_table(
            ModelShape(64, 2, 8, 8, 128, 100, params=1, boxes=boxes), [scheme], 64, link_bytes_per_second=1e3,
            device_flops=1e30,
        )[scheme].b
        for boxes in ((), ((BoxSize(1),),) * 2, ((BoxSize(1, heads=KEYS_2_VALUES_4),),) * 2)
    )  # fmt: skip
    assert of_shared == pytest.approx(2 * of_boxes)
    assert of_boxes == pytest.approx(of_heads), "by four ranks as much as heads there and back"
