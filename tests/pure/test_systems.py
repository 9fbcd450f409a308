"""Other systems as plans: each is valid and within memory, and does what its authors say."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import CostTable, SchemeCost, believed
from ds_hydra.pipe.rows import Overlap, cut_heads
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PhasedPlanner
from ds_hydra.planner.fixed_layout import in_turn, packed
from ds_hydra.rivals.costs import BETWEEN, Recomputed, Way, cluster_of, measured, table_of
from ds_hydra.rivals.dynamic_cp import AS_MADE, Group, Turn, Units, as_made, balanced_turns, packed_turns
from ds_hydra.rivals.systems import OPTIONS, Configuration, balanced, by_load, chunks, hindsight, mesh_of
from ds_hydra.rivals.waits import TwoHopCost, WaitingCost, crossing, two_hops_ms, waits_of
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tools import aims
from tools.bench_systems import (
    FACTORS,
    NOBODYS,
    Point,
    Result,
    cause_row,
    draw_curves,
    draw_systems,
    figures,
    kept_cells,
    markdown,
    missed_aims,
    notes,
    page,
    pays_rows,
    published_rows,
    read_results,
    run_cells,
    system_rows,
)
from tools.systems.cells import (
    DEVICES,
    FLAGSHIP,
    LONG_CELLS,
    MODELS,
    NEWER_CELLS,
    WIDE_CELLS,
    Cell,
    all_cells,
    found_of,
    impossible,
    median_off,
    rate_rows,
    reached,
    split,
)
from tools.systems.measure import (
    COMPOSED,
    FIXED,
    NAMES,
    ONE_CHUNKED,
    ONE_MIX,
    ONE_WHOLE,
    OURS,
    RIVALS,
    STATIC,
    Measured,
    Simulators,
    all_schemes,
    measure,
)
from tools.systems.rivals import layouts, mixes_of_groups

# --- Other systems as plans: each is valid and within memory, and does what its authors say.
ROOT = Path(__file__).parents[2]
CELL = Cell("7b", 8, 16384, 40_000, "CommonCrawl")
BATCHES = CELL.batches(2)
COST = SchemeCost(ParallelScheme(1, 4), a=1.0, b=0.0, c=0.0, max_length=1000)


def test_measured_schemes_hold_what_was_published() -> None:
    for model, gpus in (("7b", 16), ("32b", 64)):
        found = measured(Cell(model, gpus, 32768, 200_000, "CommonCrawl"))
        assert found.costs == CostTable.load(shipped(f"a800-{model}")).costs


def test_derived_costs_favour_the_rival_by_no_more_than_what_is_said() -> None:
    base, degree = measured(Cell("32b", 64, 32768, 200_000, "CommonCrawl"))[ParallelScheme(8)], 2
    ring = table_of(FLAGSHIP, Way((1, degree)))[ParallelScheme(8, 1, degree)]
    assert (ring.a, ring.b, ring.c) == (base.a / 2, base.b / 2, base.c)
    assert ring.max_length // degree == pytest.approx(base.max_length, abs=1)
    # Keys, values and their gradients, 832 features of them in BF16, 60 layers, half of them sent, at 25 GB/s.
    wait = 1e3 * 6 * 2 * 832 * 60 / 2 / 25e9
    short, long = ring.sequence_ms([1000, 32768]) - ring.b * np.array([1000, 32768])
    assert short == pytest.approx(1000 * wait)
    assert long == pytest.approx(ring.a * 32768**2), "attention hides it"
    dynamic = table_of(FLAGSHIP, Way((1, degree), by_length=True))[ParallelScheme(8, 1, degree)]
    assert dynamic.sequence_ms([1000])[0] == pytest.approx(ring.a * 1e6 + ring.b * 1e3), "one unit holds it"
    ulysses = table_of(FLAGSHIP, Way((1, degree), ulysses=True))[ParallelScheme(8, 1, degree)]
    # Four tensors forward and four backward of 6656 features in BF16, 60 layers, shared by 16 GPUs at 20.01 GB/s.
    messages = 1e3 * 8 * 2 * 6656 * 60 / 16 / 20.01e9
    assert ulysses.b - ring.b == pytest.approx(messages)
    # 64 heads over TP 8 and SP 2 are four for a rank: a quarter of the messages is exposed whatever the length.
    both = table_of(FLAGSHIP, Way((1, degree), ulysses=True, overlapped=True))[ParallelScheme(8, 1, degree)]
    assert isinstance(both, TwoHopCost)
    # One rank of a node has all eight heads. A sequence's second half goes to the node that computes 0.71 of it.
    moved = (0.5**0.5 - 0.5) + max(1.0, 3 * (0.5**0.5 - 0.5))
    of_queries = 1e3 * 2 * 2 * 832 * 60 / 25e9
    assert both.sequence_ms([32768])[0] - both.without_waits.sequence_ms([32768])[0] == pytest.approx(
        moved * of_queries * 32768 / 8, rel=1e-3
    )
    # Where all ranks share the heads, a rank has four, and half of each node's goes to the other.
    full = both.over_all
    assert full is not None
    assert full.row_waits_ms([32768]) == pytest.approx(of_queries * 32768 / 4)
    four_nodes = table_of(FLAGSHIP, Way((1, 4), ulysses=True, overlapped=True))[ParallelScheme(8, 1, 4)]
    assert type(four_nodes) is WaitingCost, "an all-to-all as it was measured"
    # Inside a node a quarter is exposed of eight heads' messages too.
    messages = 1e3 * 8 * 2 * 6656 * 60 / 8 / 119.54e9
    ours = table_of(FLAGSHIP, Way((1, degree), ulysses=True, overlapped=True))[ParallelScheme(4, 1, degree)]
    assert type(ours) is WaitingCost
    short, long = ours.sequence_ms([1000, 32768]) - ours.b * np.array([1000, 32768])
    assert short == pytest.approx(max(ours.a * 1e6, messages * 1000 * 7 / 8) + 1000 * messages / 8)
    assert long == pytest.approx(max(ours.a * 32768**2, 7 / 8 * 32768 * messages) + 32768 * messages / 8)
    # Its ranks have 500 tokens of this row, too few for more than one group: nothing overlaps.
    alone = ours.in_rows.load_ms([1000]) - ours.without_waits.load_ms([1000])
    assert alone == pytest.approx(1000 * messages)
    again = table_of(FLAGSHIP, Way((1,), again=Recomputed.ALL))[ParallelScheme(8)]
    assert again.a == pytest.approx(base.a * 4 / 3)
    assert 5 < again.max_length / base.max_length < 6
    some = table_of(FLAGSHIP, Way((1,), again=Recomputed.SOME))[ParallelScheme(8)]
    assert (some.a, some.b / base.b, some.c) == pytest.approx((base.a, 1.04, base.c))
    assert some.max_length / base.max_length == pytest.approx(32 / 22.7, rel=1e-3)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(400, 8, 8), (2048, 8, 8), (2600, 8, 8), (9000, 16, 16),
                                                           (9000, 16, 4), (9000, 4, 1), (9000, 1, 1)])  # fmt: skip
def test_messages_wait_as_groups_of_heads_one_after_the_other(tokens: int, heads: int, kv_heads: int) -> None:
    groups = cut_heads(Overlap().groups_of(tokens), heads, kv_heads)
    for attention in (0.0, 0.3, 0.8, 1.0, 1.4, 2.0, 10.0):  # in units of all messages
        come = list(itertools.accumulate(0.75 * n / heads for n in groups))
        done, sent = 0.0, come[-1]
        for n, arrived in zip(groups, come, strict=True):
            done = max(done, arrived) + attention * n / heads
            sent = max(sent, done) + 0.25 * n / heads
        waits = waits_of(tokens, heads, kv_heads)
        assert max(moved - computed * attention for moved, computed in waits) == pytest.approx(sent - attention)


@pytest.mark.drawn
@pytest.mark.parametrize("name", [*RIVALS, *AS_MADE])
def test_every_rival_makes_valid_plans_within_memory(name: str) -> None:
    found = measure(CELL, 2, name)
    assert name in found
    assert all(ms > 0 for ms in found[name].step_ms)
    assert sum(found[name].strategies.values()) == 2


def test_packing_is_first_fit_decreasing_and_dealing_is_even() -> None:
    lengths = [30, 70, 40, 60]
    assert packed(range(4), lengths, 100) == [[1, 0], [3, 2]]
    assert in_turn([[0], [1], [2], [3], [4]], 2) == [[[0], [2], [4]], [[1], [3]]]


def test_dealing_by_load_is_within_a_third_of_the_best_there_is() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 1000, size=7).tolist()
        work = COST.sequence_ms(lengths)
        dealt = by_load(lengths, COST, 2)
        assert sorted(itertools.chain(*dealt)) == list(range(7))
        longest = max(float(sum(work[i] for i in own)) for own in dealt)
        sides = itertools.product((0, 1), repeat=7)
        best = min(max(sum(w for w, s in zip(work, side, strict=True) if s == k) for k in (0, 1)) for side in sides)
        assert best <= longest <= 4 / 3 * best


def test_a_mesh_cuts_into_slices_of_equal_time() -> None:
    assert mesh_of(100, 2, COST) == [71, 29]
    mesh = mesh_of(1000, 8, COST)
    ends = list(itertools.accumulate(mesh))
    taken = COST.slices_ms(list(zip([0, *ends], ends, strict=False)))
    assert ends[-1] == 1000
    assert taken.max() / taken.min() < 1.02  # lengths are whole tokens


def test_chunks_hold_every_token_once_and_keep_to_the_bound_on_tokens() -> None:
    lengths = [100, 90, 40, 30, 30, 20, 20, 20, 10]
    mesh = mesh_of(100, 4, COST)
    made = chunks(range(len(lengths)), lengths, mesh, COST)
    spans = sorted(span for batch in made for span in batch.spans)
    for position, length in enumerate(lengths):
        own = [(start, stop) for at, start, stop in spans if at == position]
        assert [0, *(stop for _, stop in own)] == [*(start for start, _ in own), length]
    assert all(batch.num_tokens <= mesh[0] for batch in made)
    # Two tails never share a chunk, and short sequences do join tails.
    assert all(sum(span.start > 0 for span in batch.spans) <= 1 for batch in made)
    assert any(batch.spans[0].start > 0 and len(batch.spans) > 1 for batch in made)


def test_mixes_of_groups_are_all_that_there_are_of_few_units() -> None:
    unit = ParallelScheme(1, 2)
    found = {str(one) for one in mixes_of_groups(4, unit, (1, 2, 4))}
    assert found == {"4*pp2", "2*pp2sp2", "pp2sp4", "pp2sp2 + 2*pp2"}


def test_hindsight_takes_the_fastest_and_refuses_what_cannot_hold_the_batches() -> None:
    configurations = list(RIVALS["Megatron-LM"](CELL, BATCHES))
    chosen = hindsight(configurations, BATCHES, lambda plan, _: plan.predicted_ms)
    means = [sum(one.plan(step, batch).predicted_ms for step, batch in enumerate(BATCHES)) for one in configurations]
    assert sum(plan.predicted_ms for plan in chosen.plans) == pytest.approx(min(means))

    def refuse(step: int, lengths: object) -> StepPlan:
        raise PlanError("too long")

    with pytest.raises(PlanError, match="no configuration holds these batches: too long"):
        hindsight([Configuration("none", measured(CELL), refuse)], BATCHES, lambda *_: 0.0)


def test_hotspa_has_the_best_layouts_and_borders_of_two_phases() -> None:
    table = measured(CELL)
    found = next(one for one in RIVALS["HotSPa"](CELL, BATCHES) if one.text.count(" then ") == 1)
    seen = sum(found.plan(step, batch).predicted_ms for step, batch in enumerate(BATCHES))
    every = []
    for border, short, long in itertools.product((4096, 8192), layouts(CELL, table), layouts(CELL, table)):
        if table[short.pipelines[0]].max_length < border or table[long.pipelines[0]].max_length < CELL.context:
            continue
        planner = PhasedPlanner(table, (short, long), OPTIONS, longest=(border, CELL.context))
        plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(BATCHES)]
        every.append(sum(plan.predicted_ms for plan in plans))
    assert len(every) > 10
    assert seen == pytest.approx(min(every))


def measured_as(name: str, ms: float, *, gap: float = 0.05) -> Measured:
    return Measured(name, "tp1", (ms, ms), 0.9 * ms, gap, 0.1, {"tp1": 2}, 1.0)


def result(gap: float = 0.05, **rivals: float) -> Result:
    systems = {OURS: measured_as(OURS, 1000.0, gap=gap)}
    return Result(FLAGSHIP, systems | {name: measured_as(name, ms) for name, ms in rivals.items()}, 800.0, 90)


def test_aims_that_are_missed_are_named() -> None:
    good = result(**{"Megatron-LM": 1600.0, "Hydraulis": 1100.0, "InfiniPipe": 1300.0})
    assert missed_aims([good]) == []
    assert not notes([good])
    lost = result(FlexSP=980.0)
    (missed,) = missed_aims([lost])
    assert "the best that is shipped takes 0.980 of our time in the mean" in missed
    assert "FlexSP takes 0.980 of our time" in notes([lost])[0]
    assert missed_aims([lost, good]) == [], "the mean of the group has the aim"
    assert missed_aims([result(**dict.fromkeys(NOBODYS, 900.0))]) == [], "ideal systems have none"
    assert "gap is 0.090" in missed_aims([result(gap=0.09, FlexSP=1200.0)])[0]


def test_gains_by_cause_multiply_to_the_whole_gain() -> None:
    steps = {STATIC: 1600.0, FIXED: 1300.0, ONE_WHOLE: 1100.0, ONE_CHUNKED: 1040.0, ONE_MIX: 1020.0, COMPOSED: 990.0}
    row = cause_row(result(**steps))
    assert row["balancing"] == "1.231"
    factors = [float(str(row[cause])) for cause in list(row)[1:7]]
    assert math.prod(factors) == pytest.approx(1600 / 990, rel=2e-3)
    assert row["over one layout"] == "1.040"
    assert cause_row(result(**{STATIC: 1600.0}))["balancing"] == "-"
    (pays,) = pays_rows([result(**steps), result(**{ONE_WHOLE: 1010.0})])
    assert pays["over one layout"] == "1.040"
    assert "in every step takes 0.990" in notes([result(**{ONE_CHUNKED: 990.0})])[0]


def test_a_comparison_that_was_stopped_goes_on_with_the_cells_of_its_file(tmp_path: Path) -> None:
    path, systems = tmp_path / "cells.json", [OURS, "FlexSP"]
    assert kept_cells(path, [FLAGSHIP], 2, systems) == {}
    done = result(FlexSP=1200.0)
    path.write_text(json.dumps({"steps": 2, "systems": systems, "cells": figures([done])}))
    kept = kept_cells(path, [FLAGSHIP], 2, systems)
    assert kept == {FLAGSHIP: done}
    assert list(run_cells([FLAGSHIP], 2, systems, 1, kept)) == [done]
    assert kept_cells(path, [FLAGSHIP], 3, systems) == kept_cells(path, [CELL], 2, systems) == {}
    of_ours = kept_cells(path, [FLAGSHIP], 2, [OURS])
    assert list(of_ours[FLAGSHIP].systems) == [OURS]
    (again,) = run_cells([FLAGSHIP], 2, [OURS, "Hydraulis"], 1, of_ours)
    assert again.ours == done.ours
    assert again.systems["Hydraulis"].mean_ms > 1000.0
    for text in ("no figures", json.dumps({"steps": 2, "systems": systems, "cells": [{"cell": {}}]})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"cells.json: not figures of this tool"):
            kept_cells(path, [FLAGSHIP], 2, systems)


@pytest.mark.drawn
def test_all_systems_and_cells_are_drawn(tmp_path: Path) -> None:
    rivals = {name: 1100.0 for name in NAMES if name != OURS}
    drawn = draw_systems([replace(result(**rivals), cell=cell) for cell in all_cells()], tmp_path)
    points = [
        Point(factor, value, dict(result(**rivals).systems)) for factor, values in FACTORS.items() for value in values
    ]
    drawn.append(draw_curves(points, tmp_path))
    assert {path.name for path in drawn} == {path.name for path in (ROOT / "benchmarks").glob("systems_*.png")}


def test_published_figures_stand_beside_ours() -> None:
    rows = published_rows([result(Hydraulis=4766.67)])
    assert ("Hydraulis", "run", "4.29", "4.29", "+0%") in {tuple(row.values())[1:6] for row in rows}
    assert len(system_rows(result(Hydraulis=1100.0))) == 2


def test_pages_are_what_the_file_of_cells_gives() -> None:
    """`--plots` writes the page of all cells; that on mixes has one of its tables."""
    results = read_results(ROOT / "benchmarks" / "systems.json")
    assert [result.cell for result in results] == list(all_cells())
    assert (ROOT / "benchmarks" / "systems.md").read_text() == page(results, 10)
    assert markdown(pays_rows(results)) in (ROOT / "docs" / "notes" / "where-a-mix-pays.md").read_text()
    assert missed_aims(results) == []


def test_times_are_those_of_the_simulator_with_pulls_and_pushes() -> None:
    configuration = next(RIVALS["Megatron-LM"](CELL, BATCHES))
    plan = configuration.plan(0, BATCHES[0])
    assert Simulators(CELL).ms(plan, configuration.table) > plan.predicted_ms


def test_fixed_layouts_have_rings_and_all_to_alls_once_each_with_any_recomputation() -> None:
    texts = [one.text for one in balanced(CELL)]
    assert len(texts) == len(set(texts))
    assert {"4*tp2", "pp4sp2 ring", "pp4sp2 Ulysses selective AC", "pp4sp2 Ulysses AC"} <= set(texts), texts


# --- What cells change beside the measured tables: devices, links, and heads that share keys.
FAST = LONG_CELLS[0]
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
    slow = replace(FAST, between=12.0)
    for cell, between, inside in ((FAST, 25e9, 1.0), (slow, 12e9, 1.0), (NEWER_CELLS[0], 50e9, 900 / 400)):
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
        assert _messages(slow, way, scheme) == pytest.approx(times * _messages(FAST, way, scheme), rel=1e-3)


def _messages(cell: Cell, way: Way, scheme: ParallelScheme) -> float:
    """ms of a token beside b, by a sequence of one token: its attention is next to nothing."""
    table = table_of(cell, way)
    alone = table[ParallelScheme(scheme.tp, scheme.pp)]
    return float(table[scheme].sequence_ms([1])[0]) - alone.b / scheme.sp


def test_shared_keys_make_rings_and_context_gradients_small_but_not_what_goes_with_queries() -> None:
    shared, scheme = replace(FAST, keys=1 / 8), ParallelScheme(2, 4, 2)
    assert _messages(shared, RING, scheme) == pytest.approx(_messages(FAST, RING, scheme) / 8, rel=1e-3)
    assert _messages(shared, ULYSSES, scheme) == pytest.approx(
        _messages(FAST, ULYSSES, scheme) * (1 + 1 / 8) / 2, rel=1e-2
    )
    # 64 heads of queries and 8 of keys: sixteen ranks hold each head of keys twice.
    wide = ParallelScheme(2, 4, 8)
    assert _messages(shared, ULYSSES, wide) == pytest.approx(_messages(FAST, ULYSSES, wide) * (1 + 2 / 8) / 2, rel=1e-2)
    of_keys, of_queries = (table_of(cell, ULYSSES)[scheme].shares for cell in (shared, FAST))
    assert of_keys is not None
    assert of_queries is not None
    assert of_keys.context == of_queries.context / 8


# --- What stages over several nodes wait for in the comparison of systems, and how many tokens they hold.
def test_of_a_row_over_two_nodes_crosses_what_one_holds_and_the_other_needs() -> None:
    assert crossing((4096,) * 4, 2, 1.0) == (0.0, 0.0), "each node computes the two sequences that it holds"
    first = round(16384 * 0.5**0.5) - 8192  # tokens of the second node that the first one computes
    assert crossing((16384,), 2, 1.0) == (pytest.approx(2 * 8192), pytest.approx(first, abs=1))
    assert crossing((16384,), 2, 1 / 8)[0] == pytest.approx(max(first * 1.25, 2048), abs=2)
    assert crossing((100, 16384), 2, 1.0).coming > crossing((16384,), 2, 1.0).coming / 2


def test_two_hops_wait_for_what_comes_first_and_goes_last() -> None:
    """With four equal groups and long attention: two groups of the first hop, one of the second, and so back."""
    groups, inside, coming, going = (2, 2, 2, 2), 4.0, 12.0, 2.0
    waits = two_hops_ms(groups, 1000.0, inside, coming, going)
    assert waits == pytest.approx((2 * 0.75 * inside + coming + going + 2 * 0.25 * inside) / 4)
    assert two_hops_ms(groups, 0.0, inside, coming, going) == pytest.approx(inside + coming + going)
    assert two_hops_ms((8,), 5.0, inside, coming, going) == pytest.approx(inside + coming + going)


def test_ours_has_ulysses_on_stages_of_up_to_two_nodes_with_its_waits_in_b() -> None:
    table = all_schemes(LONG_CELLS[0])
    pipelines = [cost for cost in table.costs if cost.uniform.sp > 1 and cost.scheme.pp > 1]
    assert {cost.uniform.tp * cost.uniform.sp for cost in pipelines} >= {8, 16}
    assert all(cost.uniform.tp * cost.uniform.sp <= 16 and type(cost) is SchemeCost for cost in pipelines)
    base = table[ParallelScheme(4, 2)]
    inside, across = (table[ParallelScheme(4, 2, degree)].b * degree / base.b - 1.0 for degree in (2, 4))
    assert 0.0 <= inside < across, "messages between nodes are dearer"
    assert "waits for messages in b" in table[ParallelScheme(4, 2, 4)].derived


def test_three_nodes_share_queries_with_memory_for_the_keys_of_all() -> None:
    table = all_schemes(next(cell for cell in WIDE_CELLS if cell.context == 524_288))
    two, three = table[ParallelScheme(4, 1, 4)], table[ParallelScheme(4, 1, 6)]
    assert two.max_length < three.max_length < 0.8 * 1.5 * two.max_length
    assert {cost.uniform.tp * cost.uniform.sp for cost in table.costs if cost.uniform.sp % 3 == 0} == {24}
    assert {cost.scheme.pp for cost in table.costs if cost.uniform.sp % 3 == 0} == {1}


def test_a_sequence_takes_as_long_beside_others() -> None:
    """Also a long one, whose waits are its own."""
    lengths = [100, 16_384, 17_000, 20_481, 30_000, 32_768]
    for cost in all_schemes(WIDE_CELLS[-1]).costs:
        alone = [float(cost.sequence_ms([length])[0]) for length in lengths]
        assert cost.sequence_ms(lengths) == pytest.approx(alone, rel=1e-12), cost.scheme


# --- Megatron-Core's schedulers of dynamic context parallelism: every sequence once, on units that hold it.
Scheduler = Callable[[list[int], int, int], list[Turn]]
SCHEDULERS: list[Scheduler] = [balanced_turns, packed_turns]


def test_a_turn_is_filled_longest_first_where_the_busiest_unit_gets_least() -> None:
    # 8 tokens need two units with 4 on each, the others one; two more tokens fit nowhere, and have all units later.
    first, second = packed_turns([8, 4, 4, 2], 4, 4)
    assert first == (Group(2, (0,)), Group(1, (1,)), Group(1, (2,)))
    assert second == (Group(4, (3,)),)


def test_a_group_packs_what_it_holds_and_no_unit_gets_more_than_a_full_one_of_the_longest_kind() -> None:
    # Rank by rank at most 1.05 * 6 * 8: so three of 6 tokens do not share a unit, but 6 and 2 do.
    (turn,) = packed_turns([6, 6, 2, 2], 2, 8)
    assert turn == (Group(1, (0, 2)), Group(1, (1, 3)))


@pytest.mark.parametrize("schedule", SCHEDULERS)
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40), units=st.sampled_from([1, 2, 4, 8, 16]))
def test_every_sequence_is_computed_once_on_units_that_hold_it(
    schedule: Scheduler, lengths: list[int], units: int
) -> None:
    most = -(-max(lengths) // units) + 20
    turns = schedule(lengths, units, most)
    assert sorted(at for turn in turns for group in turn for at in group.positions) == list(range(len(lengths)))
    for turn in turns:
        assert sum(group.units for group in turn) == units
        assert all(group.positions for group in turn), "no unit is without work"
        longest = [(group.units, lengths[at]) for group in turn for at in group.positions]
        assert all(length <= most * units for units, length in longest)


def test_units_of_any_number_are_filled_by_the_successor() -> None:
    for count, lengths in itertools.product((3, 5, 7), ([100, 50, 20, 10], [90] * 6, [100])):
        turns = packed_turns(lengths, count, 40)
        assert sorted(at for turn in turns for group in turn for at in group.positions) == list(range(len(lengths)))
        assert all(sum(group.units for group in turn) == count for turn in turns)


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_what_no_group_holds_is_refused(schedule: Scheduler) -> None:
    with pytest.raises(PlanError, match="a sequence of 500 tokens does not fit 4 units with 100 tokens on each"):
        schedule([500, 10], 4, 100)


def _units(count: int) -> Units:
    """Of one rank, for which a token takes 1 ms divided by the units of a group, and a micro-batch 10 ms."""
    table = CostTable(
        tuple(SchemeCost(ParallelScheme(sp=n), a=0.0, b=1.0 / n, c=10.0, max_length=1000 * n) for n in (1, 2, 4))
    )
    return Units(ParallelScheme(), count, 100, Recomputed.NOTHING, table)


def test_all_units_wait_after_a_turn_of_the_first_and_only_groups_for_their_members_under_the_second() -> None:
    units, lengths = _units(2), [100, 60, 40, 30]
    ran = units.balanced(lengths)
    turns = balanced_turns(lengths, 2, 100)
    assert ran.ms == sum(max(sum(10.0 + lengths[at] / g.units for at in g.positions) for g in turn) for turn in turns)
    # One turn of 100 and of 60 + 40 tokens, and one of 30 shared by two.
    assert packed_turns(lengths, 2, 100) == [(Group(1, (0,)), Group(1, (1, 2))), (Group(2, (3,)),)]
    ran = units.packed(lengths)
    assert ran.ms == 110.0 + 25.0
    assert ran.busy == (135.0, 135.0)


@pytest.mark.parametrize("name", AS_MADE)
def test_a_cell_is_run_by_either_scheduler(name: str) -> None:
    batches = CELL.batches(2)
    made = as_made(CELL, batches, name)
    assert len(made.ran) == 2
    assert all(max(one.busy) <= one.ms for one in made.ran)
    assert 0.0 <= made.idle < 1.0
    assert 0.0 <= made.gap < 1.0
    assert made.exposed_ms >= 0.0
    with pytest.raises(PlanError, match="no units of"):
        as_made(CELL, [[10_000_000]], name)
