"""What `tools.check_devices` counts of large models: their memory beside its aims, where their matrices begin."""

from __future__ import annotations

from tools.devices.aligned import aligned
from tools.devices.count import by_count


def test_a_rank_holds_little_more_than_under_zero_1() -> None:
    table = by_count(quick=True)
    aims = [row[-1] for row in table.rows]
    assert sum(isinstance(aim, float) for aim in aims) == 8, "four strategies, with gradients of two types"
    assert not table.missed, table.missed


def test_no_matrix_begins_askew() -> None:
    table = aligned(quick=True)
    assert not table.missed, table.missed
    assert any(row[-1] != "0%" for row in table.rows), "side by side some would"
