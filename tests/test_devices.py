"""The aims for memory of large models by count, as `tools.check_devices` prints them."""

from __future__ import annotations

from tools.devices.count import by_count


def test_a_rank_holds_little_more_than_under_zero_1() -> None:
    table = by_count(quick=True)
    aims = [row[-1] for row in table.rows]
    assert sum(isinstance(aim, float) for aim in aims) == 8, "four strategies, with gradients of two types"
    assert not table.missed, table.missed
