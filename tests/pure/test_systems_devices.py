"""What cells change beside the measured tables: devices, links, and heads that share keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.peak import believed
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.costs import BETWEEN, Way, cluster_of, measured, table_of
from tools import aims
from tools.systems.cells import LONG_CELLS, NEWER_CELLS, Cell
from tools.systems.devices import DEVICES, MODELS, found_of, impossible, split
from tools.systems.published_rates import median_off, rate_rows, reached

CELL = LONG_CELLS[0]
RING, ULYSSES = Way((1, 2, 8)), Way((1, 2, 8), ulysses=True)


@pytest.mark.parametrize("model", [f"{model} {device}" for model in MODELS for device in DEVICES])
def test_tables_can_be_true_and_say_what_is_derived(model: str) -> None:
    """Each rate is what the device's is, no row is above what kernels reach, and a newer device is not slower."""
    found, (sizes, device) = found_of(model), split(model)
    assert found.peak is not None
    assert believed(found.table, found.peak)[1] == ()
    alone = min((cost for cost in found.table.costs if cost.uniform.tp == 1), key=lambda cost: cost.scheme.pp)
    ranks = alone.scheme.num_ranks
    if device.attention:
        assert 6e-9 * sizes.square / (alone.a * ranks) == pytest.approx(device.attention)
        assert 6e-9 * sizes.active / (alone.b * ranks) == pytest.approx(device.rest)
        assert all(device.name in cost.derived for cost in found.table.costs)


def test_tables_that_cannot_be_true_are_refused() -> None:
    table = found_of("32b H100").table

    def changed(scheme: str, name: str, times: float) -> list[str]:
        costs = (replace(c, **{name: times * getattr(c, name)}) if str(c.scheme) == scheme else c for c in table.costs)
        return impossible("32b H100", CostTable(tuple(costs)))

    assert impossible("32b H100", table) == []
    assert changed("pp4", "a", 0.5) == ["pp4 has 894 TFLOP/s of causal attention, above 0.75 of 989"]
    assert any("tp2pp4" in line and "times apart" in line for line in changed("tp2pp4", "a", 1.5))
    (slow,) = changed("pp4", "b", 2.0)
    assert slow.startswith("b of pp4 is")
    assert "on an A800" in slow


def test_tables_are_within_a_tenth_of_public_runs_that_they_were_not_fitted_to() -> None:
    rows = rate_rows()
    assert {row["row"] for row in rows} >= {"1", "2", "3", "4", "5", "6", "7", "16", "19", "20", "21"}
    assert all(abs(float(str(row["off"]).rstrip("%"))) < 0.2 for row in rows if row["fitted"])
    assert median_off() <= aims.RATES_OFF
    assert 0.7 < reached("A800") < 1 <= reached("H200") < 1.1


def test_links_between_nodes_and_inside_them_are_those_of_the_cell() -> None:
    slow = replace(CELL, between=12.0)
    for cell, between, inside in ((CELL, 25e9, 1.0), (slow, 12e9, 1.0), (NEWER_CELLS[0], 50e9, 900 / 400)):
        links = cluster_of(cell, measured(cell)).links
        assert links.between == BETWEEN._replace(bytes_per_s=between)
        assert links.inside.bytes_per_s == pytest.approx(inside * 1.5e11)
    here, there = ParallelScheme(2, 4, 2), ParallelScheme(8, 1, 2)  # inside a node, and over two
    for way, scheme, times in (
        (RING, here, 1.0),
        (RING, there, 25 / 12),
        (ULYSSES, here, 1.0),
        (ULYSSES, there, 25 / 12),
    ):
        assert _messages(slow, way, scheme) == pytest.approx(times * _messages(CELL, way, scheme), rel=1e-3)


def _messages(cell: Cell, way: Way, scheme: ParallelScheme) -> float:
    """ms of a token beside b, by a sequence of one token: its attention is next to nothing."""
    table = table_of(cell, way)
    alone = table[ParallelScheme(scheme.tp, scheme.pp)]
    return float(table[scheme].sequence_ms([1])[0]) - alone.b / scheme.sp


def test_shared_keys_make_rings_and_context_gradients_small_but_not_what_goes_with_queries() -> None:
    shared, scheme = replace(CELL, keys=1 / 8), ParallelScheme(2, 4, 2)
    assert _messages(shared, RING, scheme) == pytest.approx(_messages(CELL, RING, scheme) / 8, rel=1e-3)
    assert _messages(shared, ULYSSES, scheme) == pytest.approx(
        _messages(CELL, ULYSSES, scheme) * (1 + 1 / 8) / 2, rel=1e-2
    )
    # 64 heads of queries and 8 of keys: sixteen ranks hold each head of keys twice.
    wide = ParallelScheme(2, 4, 8)
    assert _messages(shared, ULYSSES, wide) == pytest.approx(_messages(CELL, ULYSSES, wide) * (1 + 2 / 8) / 2, rel=1e-2)
    of_keys, of_queries = (table_of(cell, ULYSSES)[scheme].shares for cell in (shared, CELL))
    assert of_keys is not None
    assert of_queries is not None
    assert of_keys.context == of_queries.context / 8
