"""Cost tables, links, and costs of pipelines whose stages or layers differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_hydra.costs.analytic import (
    LayerSizes,
    ModelShape,
    analytic_cost_table,
    estimate_activations,
    layer_sizes,
    model_shape,
)
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, read_table, table_file_from_record, table_record
from ds_hydra.costs.shape_costs import price, used_schemes, with_shapes
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.costs.stage_work import stage_costs, stage_work
from ds_hydra.pipe.head_sharing import BoxSize, HeadDegrees
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner.cutting import longest_of
from ds_hydra.profiling.links import Collective, Counted, LinkFigure, Links, exposed_ms
from ds_hydra.report.record import StepWatch
from ds_hydra.simulate.links import BETWEEN, LinkModel, Port, Speed
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import small_llama_job as job

# --- Cost tables: what is read, what is refused, and that the memory model reproduces published limits.
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


def _table(**changes: Any) -> dict[str, Any]:
    row = {"scheme": "tp2", "a": 1e-6, "b": 0.1, "c": 5.0, "max_length": 4096, "util_length": 256}
    return {"format": "ds-hydra cost table", "version": 1, "schemes": [{**row, **changes}]}


_SHARES = {"forward": {"a": 0.3, "b": 0.4, "c": 0.5}, "weight": {"a": 0.0, "b": 0.2, "c": 0.1},
           "until_weight": 0.9, "context": 0.1}  # fmt: skip
_COST_KEYS = ("scheme", "a", "b", "c", "max_length", "util_length")
Wrong = tuple[tuple[dict[str, Any], str], ...]
"""What is wrong, and the words that say so."""
OF_A_ROW: Wrong = (
    ({"a": -1e-6}, "a must not be negative"), ({"c": -3}, "c must not be negative"),
    ({"b": "fast"}, "b must be a finite number"), ({"c": True}, "c must be a finite number"),
    ({"a": 0, "b": 0}, "not monotone"), ({"max_length": 0}, "util_length <= max_length"),
    ({"max_length": 10.5}, "whole number"), ({"util_length": 5000}, "util_length <= max_length"),
    ({"scheme": "tp0"}, "at least 1"), ({"scheme": "2*tp1"}, "names 2 pipelines where one is due"),
    ({"scheme": "tq1"}, "cannot read the term"), ({"speed": 1}, "unknown keys"),
)  # fmt: skip
OF_SHARES: Wrong = (
    ({"forward": {"a": 0.8, "b": 0.4, "c": 0.5}, "weight": {"a": 0.3, "b": 0.2, "c": 0.1}}, "of a: .* at most 1"),
    ({"forward": {"a": 0.8, "b": 0.4}}, "one number for each of a, b and c"),
    ({"until_weight": 1.5}, "until_weight 1.5 .* must be within"),
    ({"recomputed": -0.1}, "recomputed -0.1 must be within"), ({"state": -1.0}, "state -1.0 within 0"),
    ({"context": "much"}, "must be numbers"), ({"context": True}, "must be numbers"),
    ({"speed": 1.0}, "must hold forward, weight, until_weight, context"),
)  # fmt: skip
OF_THE_FILE: Wrong = (
    ({"version": 6}, "'version' is 6 but this release reads 1 to 5"),
    ({"version": True}, "'version' is True but this release reads 1 to 5"),
    ({**_table(floor=1.0), "version": 4}, r"unknown keys \['floor'\]"),
    ({**_table(floor=-1.0), "version": 5}, "floor must not be negative"),
    ({"format": "other"}, "give a table that `ds-hydra profile` wrote"), ({"schemes": []}, "at least one scheme"),
    ({"unit": "s"}, "'unit' must be 'ms'"), ({"colour": "red"}, "unknown keys"),
    *(({"schemes": [dict.fromkeys(set(_COST_KEYS) - {key}, 1)]}, f"missing {key}") for key in _COST_KEYS),
    *(({"activations": wrong}, '"activations" cannot be read')
      for wrong in ([1], {"1": {"layer": 1.0}}, {"1,1": {"layer": 1.0}}, {"1,1": 3})),
    *(({"peak": wrong}, '"peak" must hold')
      for wrong in ({"device_flops": 1e14}, {"attention_flops": 0, "device_flops": 1.0}, 5, {})),
)  # fmt: skip


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        *((_table(**row), rf" schemes\[0\].*{reason}") for row, reason in OF_A_ROW),
        *(({**_table(shares={**_SHARES, **shares}), "version": 2}, rf" schemes\[0\].*{reason}")
          for shares, reason in OF_SHARES),
        *(({**_table(), **change}, reason) for change, reason in OF_THE_FILE),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_with_file_place_and_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"costs.json:.*{reason}"):
        table_file_from_record(record, "costs.json")


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


# --- Costs and memory of pipelines whose stages differ.
def test_a_uniform_pipeline_that_spells_out_its_layers_needs_what_its_scheme_needs() -> None:
    spelled = PipelineShape.parse("(tp2[0:4] > tp2[4:8])")
    for scheme, shape in zip(job().stages(ParallelScheme(2, 2)), job().stages(spelled), strict=True):
        assert replace(shape, scheme=scheme.scheme) == scheme
    table = CostTable((SchemeCost(ParallelScheme(2, 2), 1e-6, 0.1, 2.0, 5000, 30),))
    priced = price(spelled, table, job())
    assert replace(priced, scheme=ParallelScheme(2, 2), derived="") == table.costs[0]
    assert priced.derived == "the slowest of its stages: tp2pp2"


def test_a_pipeline_costs_what_its_slowest_stage_costs() -> None:
    """Of 8 layers stage 0 holds 2, half of an even share, and stage 1 holds 6, 1.5 times one."""
    shape = PipelineShape.parse("(sp2[0:2] > tp2[2:8])")
    table = CostTable(
        (
            SchemeCost(ParallelScheme(1, 2, 2), 4.0, 1.0, 9.0, 900, 7),
            SchemeCost(ParallelScheme(2, 2), 1.0, 2.0, 2.0, 800),
        )
    )
    cost = price(shape, table, job())
    assert (cost.a, cost.b, cost.c) == (0.5 * 4.0, 1.5 * 2.0, 0.5 * 9.0)
    assert (cost.scheme, cost.max_length, cost.util_length) == (shape, 800, 7)
    roomy = CostTable(tuple(replace(row, max_length=10**6) for row in table.costs))
    tight = job(device=20 * 2**20)
    assert price(shape, roomy, tight).max_length == tight.max_length(shape)


def test_tables_get_an_entry_for_each_shape_once_and_keep_it_in_their_json() -> None:
    table = CostTable(
        tuple(SchemeCost(s, 1e-6, 0.1, 2.0, 5000, 30) for s in (ParallelScheme(1, 2), ParallelScheme(2, 2)))
    )
    uniform = [StrategyShape.parse("2*tp2pp2")]
    assert with_shapes(table, uniform, job()) is table
    assert used_schemes(uniform) == (ParallelScheme(2, 2),)
    mixed = [StrategyShape.parse("2*(tp2 > tp1) + pp2"), StrategyShape.parse("tp2pp2 + (tp2 > tp1) + tp1")]
    assert used_schemes(mixed) == (ParallelScheme(1), ParallelScheme(1, 2), ParallelScheme(2, 2))
    priced = with_shapes(table, mixed, job())
    assert [str(cost.scheme) for cost in priced.costs] == ["pp2", "tp2pp2", "(tp2 > tp1)"]
    assert priced.schemes == table.schemes
    assert with_shapes(priced, mixed, job()) is priced
    assert read_table(table_record(priced), "the table") == priced
    with pytest.raises(PlanError, match="no entry for scheme tp4pp2"):
        with_shapes(table, [StrategyShape.parse("(tp4 > tp1)")], job())


# --- What is derived of the cost of recurrent layers and experts, where nothing was measured.
HIDDEN, WORDS = 64, 100
RECURRENT = BoxSize(weights=5 * HIDDEN * HIDDEN, recurrent=True, carried=4096, heads=HeadDegrees((2, 4)))
THREE_OF_FOUR = ((RECURRENT,), (RECURRENT,), (RECURRENT,), ())


def plan(*shapes: tuple[int, ...]) -> ModelPlan:
    """One layer of such parameters, with embeddings and a head."""
    params = tuple(ParamSpec(f"layer.{at}", shape) for at, shape in enumerate(shapes))
    ends = [ParamSpec(name, (WORDS, HIDDEN)) for name in ("embed", "head")]
    return ModelPlan(
        (Bucket("layer", params), Bucket("ends", tuple(ends))), frozenset({"embed"}),
        (frozenset(param.name for param in params),), frozenset({"head"}), num_heads=8, num_kv_heads=2,
    )  # fmt: skip


def test_a_token_is_computed_with_the_experts_that_it_chooses() -> None:
    experts = plan((HIDDEN, HIDDEN), (16, 48, HIDDEN), (16, HIDDEN, 24))
    config = SimpleNamespace(
        num_experts=16, num_experts_per_tok=4, head_dim=16, shared_expert_intermediate_size=10, intermediate_size=999
    )
    assert layer_sizes(experts, HIDDEN, config) == LayerSizes(8 * 16, 4 * 24 + 10, 4 / 16, 16)
    shape = model_shape(experts, HIDDEN, WORDS, config)
    assert shape.params == HIDDEN * HIDDEN + 16 * 72 * HIDDEN + 2 * WORDS * HIDDEN
    assert shape.active == HIDDEN * HIDDEN + 4 * 72 * HIDDEN + WORDS * HIDDEN, "embeddings are looked up"
    (cost,) = analytic_cost_table(shape, [ParallelScheme()], 64, device_flops=1e3).costs
    assert (cost.a, cost.b) == (7 * 128, 6 * shape.active)


@pytest.mark.parametrize(
    ("config", "width"),
    [(None, HIDDEN), (SimpleNamespace(head_dim=None), HIDDEN), (SimpleNamespace(head_dim=32), 256),
     (SimpleNamespace(head_dim=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16), 128)],
)  # fmt: skip
def test_heads_may_be_wider_than_the_hidden_states(config: object, width: int) -> None:
    assert layer_sizes(plan((HIDDEN, HIDDEN)), HIDDEN, config).width == width


def test_recurrent_layers_keep_states_in_place_of_keys_and_values() -> None:
    for sp in (1, 2):
        dense, hybrid = (
            estimate_activations(HIDDEN, 128, 8, 2, 2, 2, sp, boxes=boxes) for boxes in ((), THREE_OF_FOUR)
        )
        assert hybrid.context * hybrid.layer == pytest.approx(dense.context * dense.layer / 4)
        # Five matrices of which a quarter and an eighth of the heads are a rank's.
        assert hybrid.state == 2 * 4096 * 3 / 4 / (2 * sp)
        assert dense.state == 0.0
    whole, halves = (
        estimate_activations(HIDDEN, 128, 8, 2, 2, 2, 2, boxes=((box,),))
        for box in (BoxSize(RECURRENT.weights, recurrent=True), RECURRENT)
    )
    assert whole.layer - halves.layer == pytest.approx(0.75 * 2 * 5 * HIDDEN * 2), "a quarter in place of all"


# --- By how many ranks the heads of a recurrent module are shared, and what is left of its cost.
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


# --- What is told of experts that are chosen less evenly than memory is planned for.
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


# --- The link model: transfers inside and between nodes, ports, collectives as the cost table prices them.
MODEL = LinkModel(4, inside=Speed(1e-6, 1e9), between=Speed(5e-6, 1e8))


def test_a_port_serves_one_transfer_at_a_time() -> None:
    """Two senders with a latency of 1 and wire times of 4, as the note tells it."""
    senders, receiver = [Port(), Port()], Port()
    heads = [port.serve(0.0, 4.0) + 1.0 for port in senders]
    assert [receiver.serve(head, 4.0) + 4.0 for head in heads] == [5.0, 9.0]
    assert [port.free_s for port in senders] == [4.0, 4.0]
    assert receiver.serve(20.0, 1.0) == 20.0


def test_collectives_are_those_of_the_table_or_else_rings() -> None:
    figures = Links((LinkFigure("all_gather", 2, 7.0, 1e9), LinkFigure("p2p", 2, 3.0, 2e9)))
    model = LinkModel.of_table(figures.to_record(), 8)
    assert model.inside == Speed(3e-6, 2e9)
    assert model.between == BETWEEN
    call = Collective("all_gather", 4, 1 << 20)
    assert model.collective_s("all_gather", range(4), 1 << 20) == pytest.approx(figures.ms(call) / 1e3)
    # Nothing is known of all-reduces, nor of anything between nodes: rings of 4 and of 9 ranks.
    assert model.collective_s("all_reduce", range(4), 4000) == pytest.approx(6 * (3e-6 + 1000 / 2e9))
    assert model.collective_s("all_gather", range(9), 9000) == pytest.approx(8 * (20e-6 + 1000 / 2.5e10))
    assert model.collective_s("all_gather", [3], 9000) == 0.0
    # What a user gives wins over what was measured.
    assert LinkModel.of_table(figures.to_record(), 8, inside=Speed(0.0, 5.0)).inside == Speed(0.0, 5.0)


def test_two_classes_send_to_each_other_as_the_slower_one() -> None:
    def record(us: float, rate: float, between: float) -> dict[str, Any]:
        return Links((LinkFigure("p2p", 2, us, rate), LinkFigure("p2p", 2, us, between, inter_node=True))).to_record()

    links = {"classes": {"h20": record(3.0, 7e11, 4e10), "h800": record(5.0, 3e11, 5e10)}}
    model = LinkModel.of_table(links, 2, devices=("h20", "h20", "h800", "h800", "h20", "h800"))
    pairs = {(0, 1): (3.0, 7e11), (2, 3): (5.0, 3e11), (0, 2): (5.0, 4e10), (0, 4): (3.0, 4e10), (4, 5): (5.0, 3e11),
             (3, 5): (5.0, 5e10)}  # fmt: skip
    for (src, dst), (us, rate) in pairs.items():
        assert model.speed(src, dst) == model.speed(dst, src) == Speed(us / 1e6, rate)
    assert model.slowest((0, 2, 3)) == Speed(5e-6, 4e10)
    latency, rates, crosses = model.of_pairs(*np.array(list(pairs)).T)
    assert (latency * 1e6).tolist() == pytest.approx([us for us, _ in pairs.values()])
    assert rates.tolist() == [rate for _, rate in pairs.values()]
    assert crosses.tolist() == [False, False, True, True, False, True]
    # A class whose table has no links has the others'.
    half = LinkModel.of_table({"classes": {"h20": record(3.0, 7e11, 4e10)}}, 2, devices=("h20", "l40", "l40", "l40"))
    assert half.speed(2, 3) == half.inside == Speed(3e-6, 7e11)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinkModel(0), "a node of 0 ranks"),
        (lambda: LinkModel(8, inside=Speed(-1.0, 1.0)), "inside a node"),
        (lambda: LinkModel(8, between=Speed(0.0, 0.0)), "between nodes"),
        (lambda: LinkModel.of_table({"links": []}, 8, place="a.json"), "a.json"),
        (lambda: MODEL.collective_s("gossip", range(4), 1), "gossip"),
    ],
)
def test_bad_links_are_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("moments", "ms", "added"),
    [
        ([("all_gather", 0.0, 0.0)], [3.0], 3.0),
        ([("all_gather", 0.0, 0.002)], [3.0], 1.0),
        ([("all_gather", 0.0, 0.004), ("all_reduce", 0.0, 0.004)], [3.0, 3.0], 2.0),  # one after the other
        ([("all_gather", 0.0, 0.004), ("all_to_all", 0.0, 0.004)], [3.0, 3.0], 0.0),  # over two communicators
        ([("all_gather", 0.0, 0.0), ("all_gather", 0.001, 0.002)], [3.0, 2.0], 4.0),  # the first holds up the second
    ],
)
def test_computing_between_start_and_wait_hides_a_collective(
    moments: list[tuple[str, float, float]], ms: list[float], added: float
) -> None:
    counted = [Counted(Collective(operation, 4, 8), begun, waited) for operation, begun, waited in moments]
    assert exposed_ms(counted, ms) == pytest.approx(added)
