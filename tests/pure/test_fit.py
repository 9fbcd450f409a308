"""The fit of cost coefficients, the ladder of lengths, link figures, and what a table file keeps."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.table_file import TableFile, check_job, read_table_file
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.profiling.entry import entry_from_record, utilised_length
from ds_hydra.profiling.fit import NAMES, Point, fit_points, nonnegative_least_squares
from ds_hydra.profiling.ladder import beyond_block, make_ladder, split_evenly
from ds_hydra.profiling.links import Collective, LinkFigure, Links, links_from_record, read_links
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

TABLES = Path(__file__).resolve().parents[2] / "examples" / "cost_tables"
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


@pytest.mark.drawn
@pytest.mark.parametrize(("model", "cost"), PUBLISHED, ids=lambda value: str(getattr(value, "scheme", value)))
def test_noisy_times_give_back_identifiable_coefficients(model: str, cost: SchemeCost) -> None:
    for seed in range(5):
        fit = fit_points(points_of(cost, 0.03, seed))
        for name in set(NAMES) - set(fit.unidentified):
            assert getattr(fit, name) == pytest.approx(getattr(cost, name), rel=0.05), (seed, name)
        assert "b" not in fit.unidentified


def test_clean_times_give_back_everything_and_no_error() -> None:
    cost = SchemeCost(ParallelScheme(), 2e-6, 0.1, 20.0, 10_000)
    points = points_of(cost)
    held = [replace(p, held_out=True) for p in points[5::7]]
    fit = fit_points([*points, *held])
    assert (fit.a, fit.b, fit.c) == pytest.approx((2e-6, 0.1, 20.0), rel=1e-6)
    assert fit.unidentified == ()
    assert fit.held_out_p90 is not None
    assert fit.held_out_p90 < 1e-9


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
    fit = fit_points(points)
    assert (fit.a, fit.b, fit.c, fit.r) == pytest.approx((2e-6, 0.1, 20.0, 0.03), rel=1e-6)
    assert fit.residual_worst < 1e-9


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


@pytest.mark.parametrize("latency", ["9" * 400, "NaN", "1e999"])
def test_a_links_file_with_numbers_beyond_any_is_named(tmp_path: Path, latency: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": [FIGURE]}).replace('"latency_us": 1.0', f'"latency_us": {latency}'))
    with pytest.raises(ConfigError, match=r"links\.json"):
        read_links(path)


@pytest.mark.parametrize("node_size", [0, 1.5, True, "8"])
def test_links_of_an_impossible_node_are_refused(node_size: object) -> None:
    with pytest.raises(ConfigError, match="here: node_size must be a whole number"):
        links_from_record({"links": [FIGURE], "node_size": node_size}, "here")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"operation": "all_reduce", "group_size": 2, "latency_us": 1.0}, "missing bytes_per_second"),
        ({"operation": "allreduce", "group_size": 2, "latency_us": 1.0, "bytes_per_second": 1.0}, "all_reduce"),
        (FIGURE | {"group_size": 1}, "group_size"),
        (FIGURE | {"latency_us": -1.0}, "latency_us"),
        (FIGURE | {"bytes_per_second": 0}, "bytes_per_second"),
        (FIGURE | {"inter_node": "false"}, "inter_node must be true or false"),
        (FIGURE | {"inter_node": []}, "inter_node"),
        ({"operation": "p2p", "group_size": 2, "latency_us": 1.0, "bandwidth": 1.0}, "unknown key 'bandwidth'"),
        ("p2p", "must be an object"),
    ],
)
def test_wrong_links_files_say_what_is_wrong(tmp_path: Path, row: object, message: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": [row]}))
    with pytest.raises(ConfigError, match=message) as error:
        read_links(path)
    assert "links[0]" in str(error.value)


JOB = JobFingerprint("1234", "cpu", "float32", "per_sequence_sdpa", AS_WRITTEN, 4, 1, (("torch", "2"),))


def table_file(*schemes: ParallelScheme, job: JobFingerprint = JOB, b: float = 0.1) -> TableFile:
    costs = tuple(SchemeCost(scheme, 1e-6, b, 1.0, 1000) for scheme in schemes)
    measured = {str(s): {"how": "ranks"} for s in schemes}
    return TableFile(CostTable(costs, "here"), job, measured, None, {"fixed_ms": 1.0})


def test_table_files_come_back_and_are_cost_tables(tmp_path: Path) -> None:
    found = table_file(ParallelScheme(), ParallelScheme(2))
    found.save(tmp_path / "t.json")
    assert read_table_file(tmp_path / "t.json") == found
    assert CostTable.load(tmp_path / "t.json") == found.table


def test_tables_of_another_job_are_refused_with_what_differs() -> None:
    other = replace(JOB, dtype="bfloat16", stages=StageOptions(activation_checkpointing=True))
    with pytest.raises(ConfigError, match=r"(?s)dtype: the table has 'float32', the job 'bfloat16'.*checkpointing"):
        check_job(table_file(ParallelScheme()), other, "t.json")
    check_job(table_file(ParallelScheme()), replace(JOB, num_ranks=8, versions=()), "t.json")
    check_job(TableFile(table_file(ParallelScheme()).table), other, "a published table")


@pytest.mark.parametrize("activations", [[1], {"1": {"layer": 1.0}}, {"1,1": {"layer": 1.0}}, {"1,1": 3}])
def test_activations_that_cannot_be_read_are_told(tmp_path: Path, activations: object) -> None:
    record = table_file(ParallelScheme()).to_record() | {"activations": activations}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"table\.json: .activations. cannot be read"):
        read_table_file(path)


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
