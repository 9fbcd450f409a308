"""Costs that no device could have measured are repaired or refused, in files and in what follows from them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.peak import Peak, believed, peak_tflops, square_of
from ds_hydra.costs.table_file import load_table, read_table_file, table_file_from_record
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.costs import Recomputed, Way, table_of
from ds_hydra.zero_hetero.errors import ConfigError
from tools.systems.cells import Cell

PUBLISHED = {"7b": ("pp2", 1.37240947e-06), "32b": ("pp4", 9.39192752e-07)}  # what the shipped tables had


def _record(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(shipped(f"a800-{model}")).read_text(encoding="utf-8"))
    return found


def _with_a(record: dict[str, Any], scheme: str, a: float) -> dict[str, Any]:
    rows = [row | ({"a": a} if row["scheme"] == scheme else {}) for row in record["schemes"]]
    return record | {"schemes": rows}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_row_above_the_peak_is_repaired_to_what_is_shipped(model: str) -> None:
    scheme, a = PUBLISHED[model]
    record = _record(model)
    found = table_file_from_record(_with_a(record, scheme, a), "here")
    shipped_table = load_table(shipped(f"a800-{model}"))
    assert [cost.a for cost in found.table.costs] == [cost.a for cost in shipped_table.costs]
    (line,) = found.repairs
    assert scheme in line
    assert "TFLOP/s" in line
    assert "312" in line
    assert "here" in line
    assert not table_file_from_record(record, "here").repairs
    (row,) = [row for row in record["schemes"] if row["scheme"] == scheme]
    assert str(a) in row["derived"], "the file says what was published"


@pytest.mark.parametrize("factor", [0.4, 2.6])
def test_without_a_peak_a_row_is_judged_by_its_siblings(factor: float) -> None:
    record = _record("32b")
    del record["peak"]
    table = load_table(shipped("a800-32b"))
    changed = _with_a(record, "tp4pp4", factor * table[ParallelScheme(4, 4)].a)
    found = table_file_from_record(changed, "here")
    (line,) = found.repairs
    assert "tp4pp4" in line
    assert "as many heads" in line
    assert square_of(found.table[ParallelScheme(4, 4)]) == pytest.approx(square_of(table[ParallelScheme(4, 6)]))
    again = table_file_from_record(found.to_record(), "here")
    assert again.table == found.table
    assert not again.repairs


def test_a_square_that_its_own_points_fix_stays_as_long_as_a_device_could_compute_it() -> None:
    rows = (ParallelScheme(1), ParallelScheme(2), ParallelScheme(2, 2), ParallelScheme(4))
    table = CostTable(tuple(SchemeCost(s, (3 if s.tp == 4 else 1) * 1e-5 / s.num_ranks, 0.01, 1.0, 9000) for s in rows))
    assert believed(table)[1]
    assert believed(table, fixed=[ParallelScheme(4)]) == (table, ())
    impossible = Peak(2e-5 * 1e9, 1e12)
    assert [line.split()[2] for line in believed(table, impossible, rows)[1]] == ["tp1", "tp2", "tp2pp2"]


def test_a_table_of_nothing_but_impossible_rows_is_refused() -> None:
    table = load_table(shipped("a800-7b"))
    slow = Peak(7 * 4096 * 32, 1e13, "a small one")
    with pytest.raises(ConfigError, match=r"no row .* true: pp2: 240 TFLOP/s .* a small one reaches 9 of its 10"):
        believed(table, slow)


def test_attention_without_a_square_is_left_as_it_is() -> None:
    costs = tuple(SchemeCost(ParallelScheme(tp), 1e-9 if tp == 4 else 0.0, 1.0, 1.0, 1000) for tp in (1, 2, 4, 8))
    assert believed(CostTable(costs)) == (CostTable(costs), ())


def test_who_loads_a_table_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(_with_a(_record("7b"), *PUBLISHED["7b"])), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        CostTable.load(path)
    assert "334 TFLOP/s" in caplog.text


@pytest.mark.parametrize("wrong", [{"device_flops": 1e14}, {"attention_flops": 0, "device_flops": 1.0}, 5, {}])
def test_a_peak_that_says_nothing_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match='"peak" must hold'):
        table_file_from_record(_record("7b") | {"peak": wrong}, "here")


@pytest.mark.parametrize("model", PUBLISHED)
def test_no_shipped_or_derived_row_is_above_the_peak_and_each_says_where_it_is_from(model: str) -> None:
    found = read_table_file(shipped(f"a800-{model}"))
    assert found.peak is not None
    degrees, cell = (1, 2, 4, 8, 16), Cell(model, 64, 131072, 800_000, "pretraining")
    ways = [Way(degrees, ulysses=u, again=c, stages=(8, 16)) for u in (False, True) for c in Recomputed]
    for table, of in [(found.table, None), *((table_of(cell, way), way) for way in ways)]:
        for cost in table.costs:
            assert found.peak.tflops(square_of(cost)) <= found.peak.device_flops / 1e12, cost
            is_derived = of is not None and (cost.uniform.sp > 1 or cost.scheme not in found.table.schemes)
            assert not is_derived or "measured" in cost.derived or "a by" in cost.derived, cost


def test_a_table_that_is_written_keeps_peak_and_what_rows_are_derived_from(tmp_path: Path) -> None:
    found = read_table_file(shipped("a800-7b"))
    found.save(tmp_path / "copy.json")
    assert read_table_file(tmp_path / "copy.json") == found
    costs = tuple(replace(cost, derived="") for cost in found.table.costs)
    assert "derived" not in str(replace(found, table=CostTable(costs)).to_record())


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", None)],
)
def test_peaks_are_found_by_the_devices_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops
