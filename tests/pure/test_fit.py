"""The fit of cost coefficients, what is repaired or refused of measurements, and what later steps correct."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import (
    CostTable,
    Peak,
    SchemeCost,
    TableFile,
    believed,
    check_job,
    peak_tflops,
    read_table_file,
    square_of,
    table_file_from_record,
)
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import Activations
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.profiling.fit import (
    NAMES,
    Fit,
    Point,
    SchemeEntry,
    SplitPoint,
    StageEntry,
    beyond_block,
    entry_from_record,
    fit_points,
    fit_split,
    make_ladder,
    nonnegative_least_squares,
    split_evenly,
    split_rungs,
    utilised_length,
    with_shared_squares,
)
from ds_hydra.profiling.links import Collective, LinkFigure, Links, links_from_record, read_links
from ds_hydra.report.calibration import LEAST, LEAST_OF_OTHERS, OTHERS, TRIED, Calibration
from ds_hydra.report.record import StepWatch
from ds_hydra.rivals.costs import Recomputed, Way, table_of
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.files import parse_json
from tools import aims
from tools.systems.cells import Cell

# --- The fit of cost coefficients, the ladder of lengths, link figures, and what a table file keeps.
TABLES = Path(__file__).resolve().parents[2] / "examples" / "cost_tables"
DRAWN, LONG = pytest.mark.drawn, pytest.mark.long
PUBLISHED = [
    (model, cost) for model in ("7b", "32b") for cost in CostTable.load(TABLES / f"llama_{model}_a800.json").costs
]


def points_of(cost: SchemeCost, noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = np.random.default_rng(seed)
    points = []
    for n in np.unique(np.round(np.geomspace(64, 65536, 48)).astype(int)).tolist():
        for lengths in ((n,), (n // 4,) * 4):
            samples = 1.0 + noise * rng.standard_normal(5)
            points.append(Point(lengths, cost.load_ms(lengths) * float(samples.mean())))
    return points


@pytest.mark.parametrize("seeds", [pytest.param(range(n), marks=mark) for n, mark in ((5, DRAWN), (20, LONG))])
@pytest.mark.parametrize(("model", "cost"), PUBLISHED, ids=lambda value: str(getattr(value, "scheme", value)))
def test_noisy_times_give_back_identifiable_coefficients(model: str, cost: SchemeCost, seeds: range) -> None:
    for seed in seeds:
        fit = fit_points(points_of(cost, 0.03, seed))
        for name in set(NAMES) - set(fit.unidentified):
            assert getattr(fit, name) == pytest.approx(getattr(cost, name), rel=aims.COEFFICIENT), (seed, name)
        assert "b" not in fit.unidentified


def test_points_that_were_disturbed_are_weighed_down() -> None:
    cost = SchemeCost(ParallelScheme(), 2e-6, 0.1, 20.0, 10_000)
    points = [replace(p, ms=p.ms * 2.0) if i % 10 == 3 else p for i, p in enumerate(points_of(cost, 0.01))]
    fit = fit_points(points)
    assert fit.b == pytest.approx(0.1, rel=0.03)


def test_what_the_points_cannot_tell_is_named() -> None:
    short = [Point((n,), 20.0 + 0.1 * n + 2e-6 * n * n) for n in (16, 20, 24, 28, 32)]
    noisy = [replace(p, ms=p.ms * (1 + 0.02 * (-1) ** i)) for i, p in enumerate(short)]
    assert "a" in fit_points(noisy).unidentified
    assert fit_points(short[:2]).unidentified == NAMES  # as many coefficients as points, or more


MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_costs.json"


def test_launches_on_a_gpu_are_a_floor() -> None:
    """Times of a 1B Llama on an H100, whose host launches 51 kernels a layer in two milliseconds."""
    entry = json.loads(MEASURED.read_text())["parts"]["costs"]["figures"]["record"]["measured"]["tp1"]
    points = entry_from_record(ParallelScheme(), entry).slowest.points
    line, floor = fit_points(points), fit_points(points, floor=True)
    assert 34.0 < floor.floor < 38.0
    for by_line, by_floor in ((line.held_out_median, floor.held_out_median), (line.held_out_p90, floor.held_out_p90)):
        assert by_line is not None
        assert by_floor is not None
        assert by_floor < 0.6 * by_line
    assert utilised_length(floor, 16_384) < utilised_length(line, 16_384)


@pytest.mark.drawn
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_floor_is_found_where_there_is_one(noise: float) -> None:
    for seed in range(10):
        for least in (0.0, 100.0):
            points = points_of(SchemeCost(ParallelScheme(), 2e-6, 0.1, 20.0, 70_000, floor=least), noise, seed)
            fit = fit_points(points, floor=True)
            assert fit.floor == pytest.approx(least, rel=0.05), (noise, seed)
            assert fit.b == pytest.approx(0.1, rel=0.05), (noise, seed)


def test_falling_times_never_give_a_negative_coefficient() -> None:
    fit = fit_points([Point((n,), 100.0 / n) for n in (1, 2, 4, 8, 16)])
    assert min(fit.a, fit.b, fit.c) >= 0.0


@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_is_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.random((8, 3)), rng.standard_normal(8)
    k = nonnegative_least_squares(matrix, target)
    slope = matrix.T @ (matrix @ k - target)
    assert (k >= 0).all()
    assert (slope >= -1e-8).all()  # no coefficient can grow to advantage
    assert np.abs(slope[k > 0]).max(initial=0.0) < 1e-8


def test_refuses_points_that_cannot_be_fitted() -> None:
    with pytest.raises(PlanError, match="two different lengths"):
        fit_points([Point((5,), 1.0), Point((5,), 1.1)])
    with pytest.raises(PlanError, match="above 0 ms"):
        fit_points([Point((5,), 1.0), Point((6,), 0.0)])


@given(st.integers(1, 300), st.integers(2, 20_000), st.integers(3, 12))
def test_ladder_has_no_length_twice_and_keeps_some_back(shortest: int, room: int, rungs: int) -> None:
    ladder = make_ladder(shortest, shortest + room, rungs)
    singles = [r.lengths[0] for r in ladder if len(r.lengths) == 1]
    assert len(set(singles)) == len(singles)
    assert max(max(r.lengths) for r in ladder) == shortest + room
    assert max(sum(r.lengths) for r in ladder) == 2 * (shortest + room)
    assert not {r.lengths for r in ladder if r.held_out} & {r.lengths for r in ladder if not r.held_out}


def test_ladder_refuses_a_range_without_room() -> None:
    with pytest.raises(ConfigError, match="shortest < longest"):
        make_ladder(64, 64, 5)
    assert split_evenly(10, 4) == (3, 3, 2, 2)


def test_packs_above_one_block_of_logits_are_measured_too() -> None:
    ladder = make_ladder(16, 256, 3)
    assert beyond_block(ladder, None, 4000) == ()
    assert beyond_block(ladder, 400, 4000) == ()  # the ladder goes up to 512
    more = beyond_block(ladder, 600, 4000)
    assert [sum(rung.lengths) for rung in more] == [675, 750, 825]
    assert max(max(rung.lengths) for rung in more) <= 256
    assert beyond_block(ladder, 100_000, 4000) == ()
    assert beyond_block(ladder, 600, 600) == ()  # no step of the job has more


def test_a_step_of_the_time_is_fitted_apart() -> None:
    cost = SchemeCost(ParallelScheme(), 2e-6, 0.1, 20.0, 10_000)
    points = [
        replace(p, ms=p.ms + 0.03 * sum(p.lengths), chunked=True) if sum(p.lengths) > 2048 else p
        for p in points_of(cost)
    ]
    fit = fit_points([*points, *(replace(point, held_out=True) for point in points[5::7])])
    assert (fit.a, fit.b, fit.c, fit.r) == pytest.approx((2e-6, 0.1, 20.0, 0.03), rel=1e-6)
    assert fit.unidentified == ()
    assert fit.held_out_p90 is not None
    assert max(fit.residual_worst, fit.held_out_p90) < 1e-9


def test_links_scale_to_other_group_sizes() -> None:
    links = Links((LinkFigure("all_reduce", 2, 100.0, 1e9), LinkFigure("p2p", 2, 10.0, 1e9)))
    assert links.ms(Collective("all_reduce", 2, 10**6)) == pytest.approx(1.1)
    assert links.ms(Collective("all_reduce", 4, 10**6)) == pytest.approx(0.3 + 1.5)  # a ring: 3 steps, 3/4 over 1/2
    assert links.is_scaled("all_reduce", 4)
    assert not links.is_scaled("all_reduce", 2)
    with pytest.raises(ConfigError, match="all_to_all"):
        links.ms(Collective("all_to_all", 2, 1))
    assert links_from_record(links.to_record(), "here") == links


FIGURE = {"operation": "p2p", "group_size": 2, "latency_us": 1.0, "bytes_per_second": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((json.dumps({"links": [row]}), rf"links\[0\].*{message}") for row, message in [
            ({"operation": "all_reduce", "group_size": 2, "latency_us": 1.0}, "missing bytes_per_second"),
            ({"operation": "allreduce", "group_size": 2, "latency_us": 1.0, "bytes_per_second": 1.0}, "all_reduce"),
            (FIGURE | {"group_size": 1}, "group_size"), (FIGURE | {"latency_us": -1.0}, "latency_us"),
            (FIGURE | {"bytes_per_second": 0}, "bytes_per_second"),
            (FIGURE | {"inter_node": "false"}, "inter_node must be true or false"),
            (FIGURE | {"inter_node": []}, "inter_node"), ("p2p", "must be an object"),
            ({"operation": "p2p", "group_size": 2, "latency_us": 1.0, "bandwidth": 1.0}, "unknown key 'bandwidth'"),
        ]),
        *((json.dumps({"links": [FIGURE], "node_size": size}), "node_size must be a whole number")
          for size in (0, 1.5, True, "8")),
        *((json.dumps({"links": [FIGURE]}).replace('"latency_us": 1.0', f'"latency_us": {beyond}'), "")
          for beyond in ("9" * 400, "NaN", "1e999")),
    ],
)  # fmt: skip
def test_wrong_links_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"links\.json.*{message}"):
        read_links(path)


JOB = JobFingerprint("1234", "cpu", "float32", "per_sequence_sdpa", AS_WRITTEN, 4, 1, (("torch", "2"),))


def table_file(*schemes: ParallelScheme, job: JobFingerprint = JOB, b: float = 0.1) -> TableFile:
    costs = tuple(SchemeCost(scheme, 1e-6, b, 1.0, 1000) for scheme in schemes)
    measured = {str(s): {"how": "ranks"} for s in schemes}
    return TableFile(CostTable(costs, "here"), job, measured, None, {"fixed_ms": 1.0})


def test_tables_of_another_job_are_refused_with_what_differs() -> None:
    other = replace(JOB, dtype="bfloat16", stages=StageOptions(activation_checkpointing=True))
    with pytest.raises(ConfigError, match=r"(?s)dtype: the table has 'float32', the job 'bfloat16'.*checkpointing"):
        check_job(table_file(ParallelScheme()), other, "t.json")
    check_job(table_file(ParallelScheme()), replace(JOB, num_ranks=8, versions=()), "t.json")
    check_job(TableFile(table_file(ParallelScheme()).table), other, "a published table")


def test_merging_keeps_old_schemes_and_takes_new_entries() -> None:
    old, new = table_file(ParallelScheme(), ParallelScheme(2)), table_file(ParallelScheme(2), ParallelScheme(4), b=0.2)
    merged = old.merged(new)
    assert [str(s) for s in merged.table.schemes] == ["tp1", "tp2", "tp4"]
    assert merged.table[ParallelScheme(2)].b == 0.2
    with pytest.raises(ConfigError, match="num_ranks"):
        old.merged(table_file(ParallelScheme(4), job=replace(JOB, num_ranks=8)))


def test_a_full_disk_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    table_file(ParallelScheme()).save(path)
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left.*old file was left"):
        table_file(ParallelScheme(2)).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


# --- Shares of a scheme's costs from micro-batches with the backward split: exact where they can be, usual
# where not.
COST = SchemeCost(ParallelScheme(pp=4), 2e-6, 0.01, 5.0, 32768)
SHARES = Shares(Terms(0.30, 0.36, 0.40), Terms(0.0, 0.25, 0.10), 0.8, 0.1)


def points(cost: SchemeCost, shares: Shares) -> list[SplitPoint]:
    """The ladder's micro-batches and slices, with exactly the times that costs and shares say."""
    found = []
    for rung in split_rungs(make_ladder(128, 32768, 7), None):
        stop = rung.start + rung.lengths[0]
        squares = sum(n * n for n in rung.lengths[1:]) + stop * stop - rung.start * rung.start
        terms = (cost.a * squares, cost.b * sum(rung.lengths), cost.c)
        forward, weight = (
            sum(share * term for share, term in zip(part, terms, strict=True))
            for part in (shares.forward, shares.weight)
        )
        found.append(
            SplitPoint(rung.lengths, rung.start, forward, sum(terms) - forward - weight, weight, rung.held_out)
        )
    return found


def whole_fit(cost: SchemeCost) -> Fit:
    return fit_points([point.point for point in points(cost, SHARES) if not point.start])


def test_shares_come_back_and_slices_cost_what_the_whole_does() -> None:
    found = fit_split(points(COST, SHARES), whole_fit(COST))
    assert found is not None
    assert found.forward == pytest.approx(SHARES.forward, abs=5e-3)
    assert found.weight == pytest.approx(SHARES.weight, abs=5e-3)
    for error in (found.held_out, found.slices, found.slice_parts):
        assert error is not None
        assert error < 0.01
    slow = [replace(p, forward=1.5 * p.forward) if p.start else p for p in points(COST, SHARES)]
    worse = fit_split(slow, whole_fit(COST))
    assert worse is not None
    assert (worse.forward, worse.held_out) == (found.forward, found.held_out), "no slice is fitted"
    assert worse.slices == pytest.approx(1 - 1 / (1 + 0.5 * 0.33), abs=0.03)


def test_a_share_that_nothing_tells_is_the_usual_one() -> None:
    cost = replace(COST, a=0.0)
    found = fit_split(points(cost, SHARES), whole_fit(cost))
    assert found is not None
    assert found.forward == pytest.approx((Shares.usual().forward.a, 0.36, 0.40), abs=5e-3)
    assert fit_split([replace(point, held_out=True) for point in points(COST, SHARES)], whole_fit(COST)) is None


def test_forward_and_weight_never_take_more_than_all() -> None:
    most = [replace(p, forward=0.7 * p.ms, weight=0.3 * p.ms, backward=1e-9 * p.ms) for p in points(COST, SHARES)]
    found = fit_split(most, whole_fit(COST))
    assert found is not None
    assert Shares(found.forward, found.weight)


def test_noise_in_columns_that_are_alike_leaves_shares_that_a_kernel_could_have() -> None:
    """Of micro-batches of one length a and b cannot be told apart, and the least squares put all into one of them."""
    alike = [point for point in points(COST, SHARES) if not point.start and sum(point.lengths) > 4000]
    noisy = [replace(p, forward=p.forward * (1.4 if n % 2 else 0.7)) for n, p in enumerate(alike)]
    found = fit_split(noisy, whole_fit(COST))
    assert found is not None
    assert 0.15 <= min(found.forward) <= max(found.forward) <= 0.6
    assert 0.0 < found.weight.b < 0.5


def test_split_rungs_stop_where_the_head_is_computed_twice() -> None:
    ladder = make_ladder(128, 32768, 7)
    every = split_rungs(ladder, None)
    assert {rung.held_out for rung in every if not rung.start} == {False, True}
    assert {(rung.start, sum(rung.lengths)) for rung in every if rung.start} == {
        (28672, 4096), (24576, 8192), (8192, 8192)
    }  # fmt: skip
    once = split_rungs(ladder, 10_000)
    assert max(sum(rung.lengths) for rung in once if not rung.start) <= 10_000
    assert split_rungs(ladder, 64) == every, "where all compute it twice"


def test_a_scheme_keeps_its_shares_in_the_table() -> None:
    in_parts, fit = tuple(points(COST, SHARES)), whole_fit(COST)
    whole = tuple(point.point for point in in_parts if not point.start)
    stage = StageEntry(0, 4, "ranks", whole, fit, None, None, in_parts, fit_split(in_parts, fit))
    entry = SchemeEntry(COST.uniform, (stage,), "wall", False)
    kept = Activations(1.0, 1.0, 1.0, 1.0, until_weight=0.8, context=0.1)
    shares = entry.cost(32768, kept).shares
    assert shares is not None
    assert (shares.until_weight, shares.context) == (0.8, 0.1)
    assert entry_from_record(COST.uniform, json.loads(json.dumps(entry.record()))) == entry
    old = replace(stage, split_points=(), split=None)
    before = json.loads(json.dumps(SchemeEntry(COST.uniform, (old,), "wall", False).record()))
    assert "split" not in before["stages"][0]
    assert entry_from_record(COST.uniform, before).cost(32768, kept).shares is None


# --- A square that a scheme's points hardly show is fitted together with that of schemes with as many heads on
# a rank.
OF_LAYER, LAYERS = 2.5e-7, 60  # ms a token^2, of one rank


def _entry(scheme: ParallelScheme, longest: int, seed: int, noise: float = 0.02) -> SchemeEntry:
    """Points of noisy times of one stage, up to so many tokens."""
    rng, layers, points = np.random.default_rng(seed), LAYERS // scheme.pp, []
    for n in np.geomspace(64, longest, 9).astype(int).tolist():
        for lengths in ((n,), (n // 4,) * 4):
            squares, tokens = sum(x * x for x in lengths), sum(lengths)
            ms = layers / (scheme.tp * scheme.sp) * (OF_LAYER * squares + 0.0142 * tokens) + 30.0
            points.append(Point(lengths, ms * float(1.0 + noise * rng.standard_normal())))
    return SchemeEntry(scheme, (StageEntry(0, layers, "ranks", tuple(points), fit_points(points)),), "wall", False)


def test_a_square_of_one_percent_of_the_time_is_that_of_its_siblings() -> None:
    short, long = _entry(ParallelScheme(1, 4), 1_994, 0), _entry(ParallelScheme(1, 6), 65_536, 1)
    other = _entry(ParallelScheme(2, 2), 2_000, 2)
    fitted, same, alone = with_shared_squares([short, long, other])
    true = OF_LAYER * LAYERS / 4
    assert abs(short.slowest.fit.a / true - 1.0) > 0.2, "its own points say nothing"
    assert fitted.slowest.fit.a == pytest.approx(true, rel=0.05)
    assert fitted.slowest.fit.b == pytest.approx(0.0142 * LAYERS / 4, rel=0.05)
    assert "a" in fitted.slowest.fit.unidentified
    assert (same, alone) == (long, other), "what is seen well, or has no siblings, is left"
    assert "as many heads" in fitted.cost(1_994).derived
    assert not same.cost(65_536).derived
    # As a table's file is read: it may not hold infinity, where the error of what others fixed is not known.
    assert entry_from_record(fitted.scheme, parse_json(json.dumps(fitted.record()))) == fitted


def test_siblings_that_all_show_little_have_one_square_together() -> None:
    true = OF_LAYER * LAYERS
    entries = [_entry(ParallelScheme(1, pp), 6_000, seed) for seed, pp in enumerate((1, 2, 3, 4, 5, 6))]
    found = [entry.slowest.fit.a * entry.scheme.pp for entry in with_shared_squares(entries)]
    assert found == pytest.approx([found[0]] * len(found))
    assert found[0] == pytest.approx(true, rel=0.25)
    apart = [abs(entry.slowest.fit.a * entry.scheme.pp / true - 1.0) for entry in entries]
    assert abs(found[0] / true - 1.0) < np.mean(apart)


# --- Costs that no device could have measured are repaired or refused, in files and in what follows from them.
PUBLISHED_TABLE = {"7b": ("pp2", 1.37240947e-06), "32b": ("pp4", 9.39192752e-07)}  # what the shipped tables had


def _record(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(shipped(f"a800-{model}")).read_text(encoding="utf-8"))
    return found


def _with_a(record: dict[str, Any], scheme: str, a: float) -> dict[str, Any]:
    rows = [row | ({"a": a} if row["scheme"] == scheme else {}) for row in record["schemes"]]
    return record | {"schemes": rows}


@pytest.mark.parametrize("model", PUBLISHED_TABLE)
def test_a_published_row_above_the_peak_is_repaired_to_what_is_shipped(model: str) -> None:
    scheme, a = PUBLISHED_TABLE[model]
    record = _record(model)
    found = table_file_from_record(_with_a(record, scheme, a), "here")
    shipped_table = CostTable.load(shipped(f"a800-{model}"))
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
    table = CostTable.load(shipped("a800-32b"))
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
    table = CostTable.load(shipped("a800-7b"))
    slow = Peak(7 * 4096 * 32, 1e13, "a small one")
    with pytest.raises(ConfigError, match=r"no row .* true: pp2: 240 TFLOP/s .* a small one reaches 9 of its 10"):
        believed(table, slow)


def test_attention_without_a_square_is_left_as_it_is() -> None:
    costs = tuple(SchemeCost(ParallelScheme(tp), 1e-9 if tp == 4 else 0.0, 1.0, 1.0, 1000) for tp in (1, 2, 4, 8))
    assert believed(CostTable(costs)) == (CostTable(costs), ())


@pytest.mark.parametrize("model", PUBLISHED_TABLE)
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


def test_a_table_that_is_written_keeps_all_and_who_loads_it_is_told_of_repairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, path = replace(read_table_file(shipped("a800-7b")), job=JOB, step={"fixed_ms": 1.0}), tmp_path / "copy.json"
    found.save(path)
    assert read_table_file(path) == found
    assert CostTable.load(path) == found.table
    assert not caplog.text
    path.write_text(json.dumps(_with_a(found.to_record(), *PUBLISHED_TABLE["7b"])), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        CostTable.load(path)
    assert "334 TFLOP/s" in caplog.text
    costs = tuple(replace(cost, derived="") for cost in found.table.costs)
    assert "derived" not in str(replace(found, table=CostTable(costs)).to_record())


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", None)],
)
def test_peaks_are_found_by_the_devices_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops


# --- Predicted times corrected by what earlier steps have shown.
TABLE = CostTable(
    (SchemeCost(ParallelScheme(1, 2), 0.0, 1.0, 0.0, 1000), SchemeCost(ParallelScheme(2), 0.0, 1.0, 5.0, 1000))
)

BATCHES = tuple(MicroBatchPlan.of_whole((position,), (10, 20)) for position in (0, 1))
PLAN = StepPlan(0, (0, 1), (10, 20), (Phase((PipelinePlan(PipelineShape.parse("pp2"), BATCHES, 50.0),)),), 50.0)


def stage_table() -> TableFile:
    stages = [
        {"index": 0, "num_layers": 2, "fit": {"a": 0.0, "b": 0.5, "c": 0.0}},
        {"index": 1, "num_layers": 2, "fit": {"a": 0.0, "b": 1.0, "c": 0.0}},
    ]
    return TableFile(TABLE, None, {"pp2": {"stages": stages}}, None, {"fixed_ms": 2.0, "update_ms_per_element": 0.1})


def test_stages_of_their_own_predict_less_than_the_slowest_for_all() -> None:
    plain = Calibration(TABLE, 4).predict(PLAN)
    finer = Calibration(TABLE, 4, stage_table()).predict(PLAN, num_elements=10)
    assert plain.stage_ms == ((30.0, 30.0),)
    assert finer.stage_ms == ((15.0, 30.0),)
    assert finer.pipeline_ms[0] < plain.pipeline_ms[0]
    (pipeline,) = PLAN.pipelines
    in_v = replace(PLAN, phases=(Phase((replace(pipeline, shape=PipelineShape.parse("pp2/v")),)),))
    # The first stage of a V computes the loss, too.
    assert Calibration(TABLE, 4, stage_table()).predict(in_v).stage_ms == ((30.0, 15.0),)
    assert finer.overhead_ms == pytest.approx(3.0)
    assert finer.step_ms == pytest.approx(finer.pipeline_ms[0] + 3.0)
    launched = CostTable(tuple(replace(cost, floor=25.0) for cost in TABLE.costs))
    assert Calibration(launched, 4).predict(PLAN).stage_ms == ((50.0, 50.0),)
    # A plan that was chosen with its messages knows better.
    chosen = Calibration(TABLE, 4, stage_table()).predict(replace(PLAN, messages_ms=9.0), num_elements=10)
    assert chosen.step_ms == PLAN.predicted_ms + 9.0
    assert chosen.overhead_ms == pytest.approx(chosen.step_ms - chosen.pipeline_ms[0])


def test_factors_follow_what_was_measured() -> None:
    calibration = Calibration(TABLE, 4)
    for step in range(LEAST + 1):  # of which the first connects, and is not learnt from
        prediction = calibration.predict(PLAN)
        assert calibration.factors == {}, step
        ms, overhead = (1.5 if step else 9.0) * prediction.pipeline_ms[0], 7.0 if step else 0.0
        assert step or calibration.correct(PLAN, prediction) == pytest.approx(prediction.step_ms), "nothing is known"
        calibration.observe(PLAN, prediction, [ms], ms + overhead)
    prediction = calibration.predict(PLAN)
    assert calibration.factors == {ParallelScheme(1, 2): pytest.approx(1.5)}
    assert calibration.correct(PLAN, prediction) == pytest.approx(1.5 * prediction.pipeline_ms[0] + 7.0)
    # A scheme that was never seen has the factor of those that were, and a new strategy their overhead.
    other = replace(PLAN, phases=(Phase((replace(PLAN.pipelines[0], shape=PipelineShape.parse("tp2")),)),))
    unseen = calibration.predict(other)
    assert calibration.correct(other, unseen) == pytest.approx(1.5 * unseen.pipeline_ms[0] + 7.0)
    assert calibration.corrected(5) is calibration.tried(4) is None
    corrected, tried = calibration.corrected(4), calibration.tried(8)
    assert corrected == pytest.approx({ParallelScheme(1, 2): 1.5, ParallelScheme(2): 1.5})
    # What never ran counts less for some steps; by the latest factors, those that are in force.
    assert tried == pytest.approx({ParallelScheme(1, 2): 1.5, ParallelScheme(2): max(OTHERS, 1.5 * LEAST_OF_OTHERS)})
    assert [calibration.corrected(step) for step in (8, 16, 32)] == [None] * 3  # nothing has moved since
    # It ran now, as the table has it: that differs from the factor that it had.
    for _ in range(LEAST + 1):
        calibration.observe(other, unseen, [unseen.pipeline_ms[0]], unseen.step_ms)
    assert calibration.tried(16) is None, "all have run"
    assert calibration.corrected(16) == pytest.approx({ParallelScheme(1, 2): 1.5, ParallelScheme(2): 1.0})


def test_what_never_ran_is_tried_less_dear_and_again_where_costs_were_wrong() -> None:
    table = CostTable((*TABLE.costs, replace(TABLE.costs[0], scheme=ParallelScheme(1, 4))))
    calibration = Calibration(table, 4)
    for _ in range(LEAST + 1):
        calibration.observe(PLAN, (now := calibration.predict(PLAN)), [now.pipeline_ms[0]], now.step_ms)
    assert calibration.corrected(8) is calibration.tried(16) is None
    right = calibration.tried(8)
    assert right == pytest.approx({ParallelScheme(1, 2): 1.0, ParallelScheme(1, 4): TRIED, ParallelScheme(2): OTHERS})
    for _ in range(8 * LEAST):
        calibration.observe(PLAN, now, [1.1 * now.pipeline_ms[0]], now.step_ms)
    assert calibration.corrected(16) is not None
    wrong = calibration.tried(16)
    assert wrong == pytest.approx({
        ParallelScheme(1, 2): 1.1, ParallelScheme(1, 4): 1.1 * TRIED, ParallelScheme(2): OTHERS,
    })  # fmt: skip


def test_a_factor_counts_once_it_is_more_than_scatter() -> None:
    """Of the observations of the only shape: 5.2 % are scatter of three, not of four."""
    calibration = Calibration(TABLE, 4)
    for seen in range(LEAST + 1):
        assert (calibration.corrected(4) is not None) == (seen == LEAST)
        calibration.observe(PLAN, (now := calibration.predict(PLAN)), [1.052 * now.pipeline_ms[0]], 100.0)
        calibration.observe(PLAN, now, [1.052 * now.pipeline_ms[0]], 100.0) if not seen else None


def test_corrections_are_read_back_from_a_steps_file(tmp_path: Path) -> None:
    watch = StepWatch("apply", TableFile(TABLE), 4, 0, measured=True)
    path, found = tmp_path / "steps.jsonl", {}
    for step in range(1, 10):
        now = watch.calibration.predict(PLAN)
        ms = (1.0 + step / 7) * now.pipeline_ms[0]
        watch.fields(PLAN, pipeline_ms=[ms], stage_ms=[], step_ms=ms, moved_bytes=0)
        found[step] = watch.corrections(step)
        with path.open("a") as lines:
            lines.write(json.dumps({"step": step, "new_costs": [one.record() for one in found[step]]}) + "\n")
    assert {step: [one.first for one in ones] for step, ones in found.items() if ones} == {4: [5], 8: [9, 11]}
    again = StepWatch(str(path), TableFile(TABLE), 4, 0, measured=True)
    assert again.applies
    for step, ones in found.items():
        assert [again.apply(one) for one in again.corrections(step)] == [watch.apply(one) for one in ones]
    for wrong in ("{", '{"step": 1}', '{"step": 1, "new_costs": [[5, {"tp7": 1.0}, []]]}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="name the steps_file of a run of this job"):
            StepWatch(str(path), TableFile(TABLE), 4, 0, measured=True)


def test_what_was_learnt_goes_on_from_a_checkpoint() -> None:
    """The next correction is that of the job that was stopped: same times, same factors that count as applied."""
    one, ratio = Calibration(TABLE, 4), 1.5
    for _ in range(2):
        for _ in range(LEAST):
            one.observe(PLAN, (now := one.predict(PLAN)), [ratio * now.pipeline_ms[0]], 2 * now.pipeline_ms[0])
            ratio += 0.125
        assert one.corrected(16) is not None
        other = Calibration(TABLE, 4, state=json.loads(json.dumps(one.state())))
        assert other.state() == one.state()
        assert other.corrected(16) is None
    for calibration in (one, other):
        for _ in range(LEAST):
            calibration.observe(PLAN, now, [3 * now.pipeline_ms[0]], 4 * now.pipeline_ms[0])
    found = one.corrected(32)
    assert found is not None
    assert found == other.corrected(32)
    for wrong in ({}, {**one.state(), "applied": {"tp7": 1.0}}, {**one.state(), "ratios": {"pp2": ["1"]}},
                  {**one.state(), "overheads": {"pp2": [float("inf")]}}):  # fmt: skip
        with pytest.raises((ValueError, TypeError, KeyError)):
            Calibration(TABLE, 4, state=wrong)
