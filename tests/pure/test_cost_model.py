"""Cost tables: what is read, what is refused, and that the memory model reproduces published limits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.costs.stage_work import stage_costs, stage_work
from ds_hydra.costs.table_file import TableFile, read_table
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner.cutting import longest_of
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

TABLES = Path(__file__).parents[2] / "examples" / "cost_tables"
SHAPE = ModelShape(hidden=256, layers=8, heads=8, kv_heads=4, intermediate=688, vocab=8192, params=10_000_000)


def test_times_follow_the_quadratic() -> None:
    cost = SchemeCost(ParallelScheme(2, 3), a=0.5, b=2.0, c=10.0, max_length=100)
    assert cost.sequence_ms([2, 4]).tolist() == [6.0, 16.0]
    assert cost.load_ms([2, 4]) == 32.0
    assert cost.pipeline_ms([32.0, 20.0]) == 32.0 + 20.0 + 2 * 32.0
    assert cost.pipeline_ms([]) == 0.0
    launched = replace(cost, floor=20.0)
    assert [launched.load_ms(lengths) for lengths in ([2], [2, 4])] == [20.0, 32.0]


def test_parts_of_a_micro_batch_take_their_shares_of_the_floor() -> None:
    cost = SchemeCost(ParallelScheme(), a=0.0, b=0.01, c=1.0, max_length=10_000, floor=50.0)
    for parts in (1, 2):
        costs = stage_costs(cost, SHARES, parts)
        forward, backward, weight, *_ = stage_work(costs, 0, 100, False, 0.0)
        assert (forward, backward, weight) == (25_000 // parts, 20_000 // parts, 5_000 // parts)
        forward, backward, weight, *_ = stage_work(costs, 0, 100, False, 1.0)
        assert (forward, backward, weight) == (25_000 // parts, 50_000 // parts, 0)
        assert sum(stage_work(costs, 0, 10_000, False, 0.0)[:3]) == pytest.approx(101_000 / parts, abs=2)


def test_slices_of_a_sequence_add_up_to_the_whole() -> None:
    cost = SchemeCost(ParallelScheme(2, 3), a=0.5, b=2.0, c=10.0, max_length=100)
    assert cost.slices_ms([(0, 4), (0, 3), (3, 4)]).tolist() == [16.0, 10.5, 5.5]
    before, tokens = 7, 5
    assert cost.slices_ms([(before, before + tokens)])[0] == 0.5 * (2 * before * tokens + tokens**2) + 2.0 * tokens
    assert cost.slices_ms([]).tolist() == []
    assert [cost.tokens_in(ms) for ms in (0.0, 10.5, 16.0)] == [0.0, 3.0, 4.0]
    assert SchemeCost(ParallelScheme(), 0.0, 2.0, 0.0, 9).tokens_in(5.0) == 2.5


SHARES = Shares(Terms(0.3, 0.4, 0.5), Terms(0.0, 0.25, 0.1), 0.8, 0.05, state=30.0)


def test_a_slice_that_others_follow_keeps_states_whatever_its_length() -> None:
    cost = SchemeCost(ParallelScheme(), 0.0, 1.0, 0.0, 100)
    some, none = (stage_costs(cost, replace(SHARES, state=state), 1) for state in (30.0, 0.0))
    for tokens in (1, 50):
        followed, before = (stage_work(costs, tokens**2, tokens, True, 0.5) for costs in (some, none))
        assert [after - without for after, without in zip(followed, before, strict=True)] == [0, 0, 0, 30_000, 24_000]
        assert stage_work(some, tokens**2, tokens, False, 0.5) == stage_work(none, tokens**2, tokens, False, 0.5)
    assert longest_of(cost, SHARES) == int(100 / 1.35), "a token of slices of 100 counts 0.05 and 0.3 more"


def test_shares_are_measured_or_follow_from_the_messages_in_b() -> None:
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    w = {str(scheme): round(table.shares(scheme).weight.b, 2) for scheme in table.schemes}
    assert w["pp4"] == w["tp2pp4"] == 0.3
    assert (w["tp4pp2"], w["tp8"], w["tp16"]) == (0.27, 0.23, 0.16)
    for scheme in table.schemes:
        shares = table.shares(scheme)
        assert shares.forward.b == pytest.approx((1 - shares.weight.b) / 2)
        assert shares.weight.a == 0.0
    own = SchemeCost(ParallelScheme(2), 1e-6, 0.1, 5.0, 4096, shares=SHARES)
    assert CostTable((*table.costs, own)).shares(ParallelScheme(2)) == SHARES


def test_measured_shares_are_kept_and_older_tables_read(tmp_path: Path) -> None:
    table = CostTable((SchemeCost(ParallelScheme(2), 1e-6, 0.1, 5.0, 4096, 256, SHARES, floor=7.5),), "made up")
    TableFile(table).save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json") == table
    record = json.loads((tmp_path / "table.json").read_text())
    assert record["version"] == 5
    record["version"] = 1
    with pytest.raises(ConfigError, match=r"unknown keys \['floor', 'shares'\]"):
        read_table(record, "table.json")
    del record["schemes"][0]["shares"], record["schemes"][0]["floor"]
    assert read_table(record, "table.json").costs[0].shares is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"forward": {"a": 0.8, "b": 0.4, "c": 0.5}, "weight": {"a": 0.3, "b": 0.2, "c": 0.1}},
            "shares of a: .* at most 1",
        ),
        ({"forward": {"a": 0.8, "b": 0.4}}, "one number for each of a, b and c"),
        ({"until_weight": 1.5}, "until_weight 1.5 .* must be within"),
        ({"recomputed": -0.1}, "recomputed -0.1 must be within"),
        ({"context": "much"}, "must be numbers"),
        ({"state": -1.0}, "state -1.0 within 0"),
        ({"context": True}, "must be numbers"),
        ({"speed": 1.0}, "must hold forward, weight, until_weight, context"),
    ],
)
def test_bad_shares_are_refused(change: dict[str, object], reason: str) -> None:
    shares = {"forward": {"a": 0.3, "b": 0.4, "c": 0.5}, "weight": {"a": 0.0, "b": 0.2, "c": 0.1}}
    record = {**_table(shares={**shares, "until_weight": 0.9, "context": 0.1, **change}), "version": 2}
    with pytest.raises(ConfigError, match=reason) as error:
        read_table(record, "costs.json")
    assert "costs.json: schemes[0]" in str(error.value)


def test_save_and_load_give_back_the_table(tmp_path: Path) -> None:
    table = analytic_cost_table(SHAPE, [ParallelScheme(), ParallelScheme(2, 2), ParallelScheme(1, 1, 2)], 700)
    TableFile(table).save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json") == table


BAD_FIELDS = [
    ({"a": -1e-6}, "a must not be negative"),
    ({"c": -3}, "c must not be negative"),
    ({"b": "fast"}, "b must be a finite number"),
    ({"c": True}, "c must be a finite number"),
    ({"a": 0, "b": 0}, "not monotone"),
    ({"max_length": 0}, "util_length <= max_length"),
    ({"max_length": 10.5}, "whole number"),
    ({"util_length": 5000}, "util_length <= max_length"),
    ({"scheme": "tp0"}, "at least 1"),
    ({"scheme": "2*tp1"}, "names 2 pipelines where one is due"),
    ({"scheme": "tq1"}, "cannot read the term"),
    ({"speed": 1}, "unknown keys"),
]


def _table(**changes: object) -> dict[str, object]:
    row = {"scheme": "tp2", "a": 1e-6, "b": 0.1, "c": 5.0, "max_length": 4096, "util_length": 256}
    return {"format": "ds-hydra cost table", "version": 1, "schemes": [{**row, **changes}]}


@pytest.mark.parametrize(("changes", "reason"), BAD_FIELDS)
def test_bad_entries_name_file_key_and_reason(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(_table(**changes)))
    with pytest.raises(ConfigError, match=reason) as error:
        CostTable.load(path)
    assert str(path) in str(error.value)
    assert "schemes[0]" in str(error.value)


@pytest.mark.parametrize("key", ["scheme", "a", "b", "c", "max_length", "util_length"])
def test_missing_entries_are_named(tmp_path: Path, key: str) -> None:
    record = _table()
    del record["schemes"][0][key]  # type: ignore[index]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=f"missing {key}"):
        CostTable.load(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 6}, "'version' is 6 but this release reads 1 to 5"),
        ({"version": True}, "'version' is True but this release reads 1 to 5"),
        ({**_table(floor=1.0), "version": 4}, r"unknown keys \['floor'\]"),
        ({**_table(floor=-1.0), "version": 5}, "floor must not be negative"),
        ({"format": "other"}, "give a table that `ds-hydra profile` wrote"),
        ({"schemes": []}, "at least one scheme"),
        ({"unit": "s"}, "'unit' must be 'ms'"),
        ({"colour": "red"}, "unknown keys"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**_table(), **change}))
    with pytest.raises(ConfigError, match=reason):
        CostTable.load(path)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the cost table"):
        CostTable.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        CostTable.load(tmp_path / "bad.json")
    cost = SchemeCost(ParallelScheme(), 0.0, 1.0, 0.0, 10)
    with pytest.raises(ConfigError, match="twice"):
        CostTable((cost, cost))


def test_unknown_scheme_is_named_with_those_known() -> None:
    table = analytic_cost_table(SHAPE, [ParallelScheme()], 700)
    with pytest.raises(PlanError, match=r"no entry for scheme tp4.*it has tp1"):
        table[ParallelScheme(4)]


def test_analytic_costs_fall_with_ranks_and_rise_with_length() -> None:
    schemes = [ParallelScheme(), ParallelScheme(2), ParallelScheme(4), ParallelScheme(1, 2), ParallelScheme(1, 1, 2)]
    table = analytic_cost_table(SHAPE, schemes, 4096)
    times = {cost.scheme: cost.sequence_ms([100, 4096]) for cost in table.costs}
    assert all(short < long for short, long in times.values())
    for scheme in schemes[1:]:
        assert (times[scheme] < times[ParallelScheme()]).all()
    assert all(cost.max_length == 4096 for cost in table.costs)


def test_what_ulysses_sends_between_nodes_is_priced_at_their_links() -> None:
    schemes = [ParallelScheme(sp=8), ParallelScheme(2, sp=8), ParallelScheme(pp=4, sp=16), ParallelScheme(16)]
    rates, shape = (1.5e11, 1.5e10), replace(SHAPE, heads=32, kv_heads=32)
    inside, slow = (
        analytic_cost_table(shape, schemes, 4096, between_bytes_per_second=rate, node_size=8) for rate in rates
    )
    dearer = [after.b - before.b for before, after in zip(inside.costs, slow.costs, strict=True)]
    assert dearer[0] == dearer[3] == 0.0, "what fills no more than a node, and TP, which is asked for"
    # Two nodes compute 0.71 and 0.29 of a row: queries and outputs of 0.21 leave a node, keys and values of 0.21 to the
    # one and of 0.5 to the other.
    sent = 8.0 * (2 * 0.5**0.5 - 0.5) * SHAPE.hidden * SHAPE.layers * (1 / 1.5e10 - 1 / 1.5e11) * 1e3
    assert dearer[1] == pytest.approx(sent / 2 / 8)
    assert dearer[2] == pytest.approx(sent / (2 * 0.5**0.5 - 0.5) / 16 / 4), (
        "half of all; slices send no less otherwise"
    )
    # Over four nodes queries, keys and values would go to too many: three quarters of all leave a node.
    far = [analytic_cost_table(shape, [ParallelScheme(4, sp=8)], 4096, between_bytes_per_second=rate, node_size=8)
           for rate in rates]  # fmt: skip
    assert far[1].costs[0].b - far[0].costs[0].b == pytest.approx(
        16.0 * 3 / 4 * SHAPE.hidden / 4 * SHAPE.layers * (1 / 1.5e10 - 1 / 1.5e11) * 1e3 / 8
    )
    # Of two heads four ranks each have the same one, so its keys and values go to all four of them.
    (few,) = analytic_cost_table(replace(shape, heads=8, kv_heads=8), [ParallelScheme(sp=8)], 4096).costs
    (fewer,) = analytic_cost_table(replace(shape, heads=2, kv_heads=2), [ParallelScheme(sp=8)], 4096).costs
    more = 8.0 * (1 / 2 + 4 - 1 / 2) - 16.0 * 7 / 8  # bytes over those of a hidden unit, a token and a layer
    assert fewer.b - few.b == pytest.approx(more * SHAPE.hidden * SHAPE.layers / 1.5e11 / 8 * 1e3)
