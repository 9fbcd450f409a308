"""What cells change beside the measured tables: devices, links, and heads that share keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hydra.costs.peak import believed
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.costs import BETWEEN, Way, cluster_of, measured, table_of
from tools.systems.cells import LONG_CELLS, WIDE_CELLS, Cell
from tools.systems.devices import FIT, H100, NVLINK, found_of, of_h100
from tools.systems.rates import peak_tflops

CELL = LONG_CELLS[0]
RING, ULYSSES = Way((1, 2, 8)), Way((1, 2, 8), ulysses=True)


def test_the_h100_table_keeps_to_what_was_published_and_says_what_is_derived() -> None:
    """Tokens a second of MPT 7B and 13B within 1 %, no row above the peak, all rows marked."""
    assert max(fit.off for fit in FIT.values()) < 0.01
    a, b = of_h100("7b")
    assert 1e3 / (b + a * 2048) == pytest.approx(10_643, rel=1e-3), "the one figure without checkpointing"
    for model in ("7b", "32b"):
        found, before = found_of(model + H100), found_of(model)
        assert found.peak is not None
        assert believed(found.table, found.peak)[1] == ()
        assert all("of H100s" in cost.derived for cost in found.table.costs)
        for cost, old in zip(found.table.costs, before.table.costs, strict=True):
            assert cost.scheme == old.scheme
            assert cost.b < old.b
            assert (cost.max_length, cost.shares) == (old.max_length, old.shares)
    assert peak_tflops("32b" + H100) == 989.0


def test_links_between_nodes_and_inside_them_are_those_of_the_cell() -> None:
    slow = replace(CELL, between=12.0)
    for cell, between, inside in ((CELL, 25e9, 1.0), (slow, 12e9, 1.0), (WIDE_CELLS[5], 50e9, NVLINK)):
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
