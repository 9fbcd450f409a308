"""Proposals, schemes, lengths and the dry run; wider tables never propose worse; devices of several classes."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from benchmarks.rivals.proposal import propose_by_program
from ds_hydra.commands.preview import after
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.data.lengths import read_length_file, read_lengths, sample_batches
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import placed
from ds_hydra.pipe.schedules.simulate import simulate_loads
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.planner import Planner, PlannerOptions, validate_plan
from ds_hydra.planner.exact import counts_to_strategy
from ds_hydra.planner.fixed_layout import packed_in_turn
from ds_hydra.planner.propose import (
    QUICK,
    ChunkedShapes,
    ProposalEffort,
    Wider,
    greedy_subset,
    propose_strategies,
    usable_schemes,
    wider_shapes,
)
from ds_hydra.rivals.preview import BALANCED, FIXED, ONE, SCHEDULED, ZERO_3, Preview
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.pure.test_strategy import across
from tests.support.planner_cases import TABLES, a800_batch

# --- Proposals, schemes, simulation, lengths, and the dry run.
TABLE = CostTable.load(TABLES / "llama_32b_a800.json")
LENGTHS = a800_batch(0, 5000)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proposed() -> tuple[StrategyShape, ...]:
    return propose_strategies(TABLE, 64, LENGTHS, 200_000, 32768, tp_across_nodes=True, effort=QUICK)


def test_proposals_tile_the_ranks_cover_the_context_and_keep_tp_inside_nodes(proposed: tuple) -> None:
    assert 2 <= len(proposed) <= 20
    assert len(set(proposed)) == len(proposed)
    for strategy in proposed:
        assert strategy.num_ranks == 64
        assert not across(strategy, 8)
    planner = Planner(TABLE, proposed, PlannerOptions(kernels="compiled"))
    assert planner.max_length >= 32768


def test_proposals_are_the_same_every_time_and_better_than_the_paper_s(proposed: tuple) -> None:
    again = propose_strategies(TABLE, 64, LENGTHS, 200_000, 32768, tp_across_nodes=True, effort=QUICK)
    assert again == proposed
    program = propose_by_program(TABLE, 64, LENGTHS, 32768, usable_schemes(TABLE, 64, tp_across_nodes=True))
    batches = [batch.tolist() for batch in sample_batches(LENGTHS, 200_000, 12, 9, 32768)]
    means = []
    for strategies in (proposed, program):
        planner = Planner(TABLE, strategies, PlannerOptions(kernels="compiled"))
        means.append(np.mean([planner.plan(0, range(len(b)), b).predicted_ms for b in batches]))
    assert means[0] < 0.92 * means[1]


def test_pipelines_stand_so_that_tp_groups_stay_inside_nodes() -> None:
    schemes = (ParallelScheme(4), ParallelScheme(8), ParallelScheme(2, 3))
    placed = counts_to_strategy((2, 1, 1), schemes)
    assert placed == StrategyShape.parse("tp8 + 2*tp4 + tp2pp3")
    assert not across(placed, 8)
    assert across(StrategyShape.parse("tp4 + tp8 + tp4"), 8)


def test_the_subset_is_chosen_greedily_by_the_mean_of_each_batch_s_best() -> None:
    times: dict[tuple[int, ...], np.ndarray] = {
        (1, 0): np.array([10.0, 30.0]),
        (0, 1): np.array([30.0, 10.0]),
        (1, 1): np.array([18.0, 18.0]),
    }
    weights = np.array([0.5, 0.5])
    assert greedy_subset(times, weights, 1) == [(1, 1)]
    assert greedy_subset(times, weights, 3) == [(1, 1), (1, 0), (0, 1)]
    assert greedy_subset({(1,): np.array([np.inf, 5.0]), (2,): np.array([9.0, 9.0])}, weights, 1) == [(2,)]


def test_what_cannot_be_proposed_is_refused() -> None:
    with pytest.raises(PlanError, match=r"context_length=32768 tokens: the largest MaxLen is 27951; .*checkpointing"):
        propose_strategies(TABLE, 64, LENGTHS, 200_000, 32768)
    with pytest.raises(PlanError, match="no scheme of the cost table fits 2 ranks"):
        propose_strategies(TABLE, 2, LENGTHS, 200_000, 1024)
    with pytest.raises(PlanError, match=r"has 1\.\.100 tokens"):
        propose_strategies(TABLE, 64, [500], 2000, 100)


def test_flow_shop_time_is_near_the_simulation_and_no_shorter() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        loads = sorted(rng.uniform(1.0, 2.0, size=int(rng.integers(4, 20))).tolist())
        loads = loads[0::2] + loads[1::2][::-1]
        stages = int(rng.integers(2, 5))
        flow_shop = sum(loads) + (stages - 1) * max(loads)
        simulated = simulate_loads(placed("1f1b", Batches.whole(len(loads)), stages), [loads] * stages)
        assert 0.999 * simulated <= flow_shop <= 1.2 * simulated
        # Phases of two pipelines, the second of which runs but the first two micro-batches.
        scheme = ParallelScheme(1, stages)
        lengths = [round(1e6 * load) for load in loads]
        batches = tuple(MicroBatchPlan.of_whole([position], lengths) for position in range(len(lengths)))
        phase = Phase(tuple(PipelinePlan(PipelineShape.of(scheme), held, 0.0) for held in (batches[:2], batches)))
        costs = CostTable((SchemeCost(scheme, 0.0, 1.0, 0.0, 10**9),))
        assert simulated_ms([phase, phase], costs) == pytest.approx(2e6 * simulated, rel=1e-5)


def test_lengths_are_read_from_every_source(tmp_path: Path) -> None:
    lognormal = read_lengths("lognormal:6.22,1.233", 32768, count=50_000)
    assert 0.26 < (lognormal.lengths >= 1024).mean() < 0.30
    histogram = read_lengths(str(TABLES / "pretraining_length_histogram.csv"), 32768, count=50_000)
    assert histogram.lengths.max() <= 32768
    assert 0.68 < (histogram.lengths <= 1024).mean() < 0.74
    wikipedia = read_lengths(str(TABLES / "wikipedia_lengths.txt"), 32768)
    assert len(wikipedia.lengths) + wikipedia.too_long == 200_000
    (tmp_path / "some.txt").write_text("5\n7\n\n9\n")
    some = read_lengths(str(tmp_path / "some.txt"), 8)
    assert (some.too_long, some.longest) == (1, 9)


def test_lengths_are_read_as_pandas_json_and_numpy_write_them(tmp_path: Path) -> None:
    def read(name: str, text: str) -> list[int]:
        (tmp_path / name).write_text(text)
        return [int(one) for one in read_lengths(str(tmp_path / name), 10**6).lengths]

    for name, text in {
        "header.txt": "length\n512\n1024\n",
        "point.txt": "512.0\n1024.0\n",
        "savetxt.txt": "5.120000000000000000e+02\n1.024000000000000000e+03\n",
        "commas.txt": "512, 1024",
        "ends.txt": "512,\n1024,\n",
        "thousands.txt": '512\n"1,024"\n',
        "list.txt": "[512, 1024]",
        "list.json": "[512.0, 1024]",
        "named.json": '{"lengths": [512, 1024]}',
        "series.json": '{"0": 512, "1": 1024}',
        "frame.json": '{"id": {"0": 7, "1": 8}, "length": {"0": 512, "1": 1024}}',
        "records.json": '[{"id": 7, "length": 512}, {"id": 8, "length": 1024}]',
        "lines.jsonl": '{"id": 7, "length": 512}\n{"id": 8, "length": 1024}\n',
        "documents.json": '{"a.txt": 512, "b.txt": 1024}',
        "series.csv": "0\n512\n1024\n",
        "indexed.csv": ",0\n0,512\n1,1024\n",
        "bare.csv": "0,512\n1,1024\n",
        "frame.csv": "id,num_tokens\n7,512\n8,1024\n",
        "both.csv": "text_len,length\n7,512\n8,1024\n",
        "quoted.csv": 'id,length\n"a, b",512\nc,"1,024"\n',
    }.items():
        assert read(name, text) == [512, 1024], name
    for dtype in (np.int32, np.float64):
        np.save(tmp_path / "array.npy", np.array([[512], [1024]], dtype=dtype))
        assert read_lengths(str(tmp_path / "array.npy"), 10**6).lengths.tolist() == [512, 1024]
    for name, text, reason in (
        ("two.csv", "a,b\n1,2\n", "which of 'a', 'b' are lengths"),
        ("thousands.txt", "512\n1,024\n", "line 2: '1,024' may be one number or several"),
        ("gap.csv", "id,length\n7,512\n8,\n", "line 3: ''"),
        ("half.json", "[512, 3.5]", "entry 1: 3.5"),
        ("none.json", "[]", "holds no lengths"),
        ("broken.json", "[512,", "neither JSON nor"),
        ("names.txt", "length\n", "holds no lengths"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read(name, text)
    np.save(tmp_path / "bad.npy", np.array([512.0, np.nan]))
    with pytest.raises(ConfigError, match="entry 1: nan"):
        read_lengths(str(tmp_path / "bad.npy"), 10**6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("5\n0\n", "line 2: '0' is not a whole number"),
        ("5\n6\n-7\n", "line 3: '-7'"),
        ("5\n6.5\n", "line 2: '6.5'"),
        ("5\nlong\n", "line 2: 'long'"),
        ("99999999999999999999999\n", "line 1"),
        ("", "holds no lengths"),
    ],
)
def test_bad_lengths_name_file_and_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as error:
        read_length_file(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("lognormal:6", "give lognormal:MU,SIGMA"),
        ("lognormal:a,b", "give lognormal:MU,SIGMA"),
        ("lognormal:6,-1", "give lognormal:MU,SIGMA"),
        ("lognormal:nan,1", "give lognormal:MU,SIGMA"),
        ("none.txt", "cannot read the lengths file"),
        ("none.csv", "cannot read the lengths file"),
        ("lognormal:30,0.1", "none of its"),
    ],
)
def test_bad_specs_are_refused(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_lengths(spec, 4096, count=100)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('range,number\n"[1, 5]",x\n', "line 2"),
        ('"[5, 1]",3\n', "line 1: the length bin"),
        ('range,number\n"[1, 5]",0\n', "counts no sequence"),
    ],
)
def test_bad_histograms_name_the_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "h.csv").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_lengths(str(tmp_path / "h.csv"), 4096)


def test_a_file_of_ten_million_lengths_takes_seconds(tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("1234\n567\n89\n4321\n12\n" * 2_000_000)
    began = time.process_time()
    assert len(read_length_file(path)) == 10_000_000
    assert time.process_time() - began < 20


def test_full_packing_is_first_fit_decreasing_dealt_out_in_turn() -> None:
    cost = TABLE[ParallelScheme(4)]
    expected = max(cost.load_ms([7000, 800]), cost.load_ms([5000, 2000]))
    plan = packed_in_turn(0, [2000, 5000, 800, 7000], StrategyShape.parse("2*tp4"), TABLE, cost.max_length)
    assert plan.predicted_ms == pytest.approx(expected)
    validate_plan(plan, TABLE, 8)
    with pytest.raises(PlanError, match="has 7000 tokens but a micro-batch 6000"):
        packed_in_turn(0, [7000], StrategyShape.parse("2*tp4"), TABLE, 6000)


def test_preview_prints_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "preview.json"
    command = [
        sys.executable, "-m", "ds_hydra.commands", "preview", "--cost-table", "a800-7b", "--lengths",
        "lognormal:6.220,1.233", "--gpus", "8", "--tokens", "20000", "--context", "8192", "--steps", "2",
        "--strategies", "2*tp4", "tp4 + 2*tp2", "--json", str(out), "--links", "12",
    ]  # fmt: skip
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for word in (
        "max tokens",
        "steps that took it",
        "p50",
        "no other plan of these layouts is faster by more than",
        "\nlittle is to be gained on these lengths",
        FIXED,
        f"{BALANCED}: ",
        SCHEDULED,
        f"{ZERO_3}: sp8 Ulysses",
        f"{ONE}: 2*tp4",
        "GB/s",
        "times as long",
        "####",
    ):
        assert word in text
    found = json.loads(out.read_text())
    assert len(found["step_ms"]) == 2
    means = {name: np.mean(one["step_ms"]) for name, one in found["rivals"].items()}
    one, *others = found["wins"]
    assert ("of several shapes in" if others else f"ds-hydra: {one} in every step") in text
    # The best of all layouts with our assignment is no slower than one of them packed in turn, or ours of one shape.
    assert means[BALANCED] < min(means[FIXED], means[ZERO_3], means[ONE])
    faster = SimpleNamespace(rivals={BALANCED: SimpleNamespace(step_ms=np.array([9.0]))}, step_ms=np.array([6.0]),
                             wins={"tp4": 2, "2*tp2": 5})  # fmt: skip
    assert after(cast(Preview, faster)).startswith("next: ds-hydra init")
    assert after(cast(Preview, faster)).endswith('begin with "2*tp2"')
    command[command.index("lognormal:6.220,1.233")] = str(tmp_path / "none")
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "ds-hydra preview: cannot read the lengths file" in failed.stderr


# --- A wider table of schemes never makes proposals worse: larger spaces begin with what smaller ones have
# found.
RANKS, NODE, CONTEXT, TOKENS, LAYERS = 32, 4, 16_384, 100_000, 24
EFFORT = ProposalEffort(batches=6, milp_batches=2, node_limit=5, rounds=1, moves=20, corrections=1)
DRAWN = np.minimum(np.exp(np.random.default_rng(0).normal(7.4, 1.4, 4000)), CONTEXT).astype(int).tolist()
BATCHES = sample_batches(DRAWN, TOKENS, 6, 7, CONTEXT)


def _table(widest: int) -> CostTable:
    """TP up to a node and SP besides, on stages of up to `widest` ranks; messages between nodes cost a quarter of b."""
    costs = []
    for tp, pp, sp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        ranks = tp * pp * sp
        if (pp > 1 and tp * sp > widest) or ranks > RANKS:
            continue
        dear = 1.0 + 0.06 * (tp - 1) + 0.01 * (sp - 1) + (0.25 if tp * sp > NODE else 0.0)
        limit = 1500 * tp * sp if ranks > 1 else 900
        costs.append(
            SchemeCost(
                ParallelScheme(tp, pp, sp), 6e-6 / ranks, 0.2 * dear / ranks, 8.0 / pp, limit, 64, Shares.usual()
            )
        )
    return CostTable(tuple(costs))


@functools.cache
def _found(widest: int) -> tuple[StrategyShape, ...]:
    return _proposed(_table(widest))


def _proposed(table: CostTable) -> tuple[StrategyShape, ...]:
    wider = Wider(wider_shapes(table, num_layers=LAYERS), layers=LAYERS, plain=False)
    return propose_strategies(table, RANKS, DRAWN, TOKENS, CONTEXT, node_size=NODE, count=6, effort=EFFORT, wider=wider)


@pytest.mark.drawn
def test_a_larger_space_keeps_the_better_half_of_a_smaller_one_and_is_no_worse() -> None:
    means, found = [], []
    for widest in (NODE, 2 * NODE):
        found.append(_found(widest))
        planner = Planner(_table(widest), found[-1], PlannerOptions(kernels="compiled", layers=LAYERS))
        means.append(statistics.fmean(planner.plan(0, range(len(b)), b.tolist()).predicted_ms for b in BATCHES))
    assert set(found[0][:3]) <= set(found[1])
    assert means[1] <= 1.005 * means[0]
    assert _proposed(_table(2 * NODE)) == found[1], "the same proposals again"


def test_a_subset_that_begins_with_some_adds_what_helps_beside_them() -> None:
    times: dict[tuple[int, ...], np.ndarray] = {
        (1, 0, 0): np.array([10.0, 30.0]), (0, 1, 0): np.array([30.0, 10.0]), (0, 0, 1): np.array([18.0, 18.0]),
    }  # fmt: skip
    weights = np.array([0.5, 0.5])
    assert greedy_subset(times, weights, 2) == [(0, 0, 1), (1, 0, 0)]
    assert greedy_subset(times, weights, 2, [(1, 0, 0)]) == [(1, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("widest", [NODE, 2 * NODE])
def test_all_that_is_proposed_has_costs_and_fills_the_ranks(widest: int) -> None:
    table = _table(widest)
    for strategy in _found(widest):
        assert strategy.num_ranks == RANKS
        assert all(table[pipeline] for pipeline in strategy.pipelines)


@pytest.mark.parametrize("text", ["8*pp4/list", "16*pp2/list", "pp4sp4/v + 8*pp2/list"])
def test_what_a_proposal_says_that_a_strategy_takes_is_what_its_plans_take(text: str) -> None:
    """A long sequence beside few others stands alone on a pipeline that has nothing to give away."""
    table, strategy = _table(NODE), StrategyShape.parse(text)
    lengths = np.array([1800, *sorted(one for one in DRAWN[:60] if one < 900)[::-1]])
    shapes = ChunkedShapes(table, list(dict.fromkeys(strategy.pipelines)), slices=True, layers=LAYERS)
    planner = Planner(table, [strategy], PlannerOptions(kernels="compiled", layers=LAYERS, highs="off"))
    planned = planner.plan(0, range(len(lengths)), lengths.tolist()).predicted_ms
    rated = shapes.simulated(strategy, lengths, shapes.arrays([lengths], RANKS))
    assert rated == pytest.approx(planned, rel=0.02)
