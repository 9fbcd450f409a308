"""Dispatch and packing: HiGHS and our search, kernels with and without numba, rows of slices, groups that deal out."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.kernels as kernels
from ds_hydra.commands.__main__ import main
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.list_walk import NEVER, Jobs, TakeWalk, Walk, list_walk
from ds_hydra.pipe.schedules.orders import fresh_walk
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import batches_of, simulate_pipeline
from ds_hydra.plan.step_plan import MicroBatchPlan, PipelinePlan, Span
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.cutting import (
    Effort,
    cut_best,
    longest_of,
    microbatches_of,
    pipe_of,
    profiles_of,
)
from ds_hydra.planner.exact import pack_exactly, relabel, solve_milp
from ds_hydra.planner.kernels import compiled, load
from ds_hydra.planner.kernels.cut_search import fresh_list_walk, list_time, move
from ds_hydra.planner.kernels.dispatch import empty_placement
from ds_hydra.planner.kernels.load import _global_names
from ds_hydra.planner.kernels.packing import cut, empty_pieces, most_slots, set_targets
from ds_hydra.planner.kernels.problem import Batch, Bins, Pieces, PipelineKinds, Problem, Profile, Prospect, Scheme
from ds_hydra.planner.pipelines import order_microbatches, whole_pipeline
from ds_hydra.planner.recipe import warm_up
from ds_hydra.planner.selection import StrategySearch
from ds_hydra.rivals.waits import WaitingCost
from tests.support.planner_cases import TABLES, a800_batch, a800_planner, random_instance
from tools.systems.cells import Cell
from tools.systems.measure import DEALT, measure
from tools.systems.rivals import busiest_ms, dealt

ROOT = Path(__file__).resolve().parents[2]


# --- Dispatch and packing: HiGHS and our search; kernels alike with and without numba.
def test_equal_pipelines_are_named_by_their_longest_sequence() -> None:
    owner = np.array([2, 1, 2, 0, 4, 3])
    assert relabel(owner, np.array([0, 3]), np.array([3, 2])).tolist() == [0, 1, 0, 2, 3, 4]


@pytest.mark.drawn
@pytest.mark.parametrize("pp", [1, 3])
def test_packing_is_between_its_bound_and_highs(pp: int) -> None:
    rng = np.random.default_rng(pp)
    for _ in range(12):
        tokens = np.sort(rng.integers(20, 900, size=10))[::-1].copy()
        work = tokens * 0.5 + tokens**2 * 1e-4
        scheme = Scheme(30.0, 1500, 100, pp, 0.0)
        bins = np.zeros(10, dtype=np.int64)
        v, ms, _, _ = kernels.compiled().pack(scheme, work, tokens, 40, bins)
        held = np.bincount(bins, weights=tokens, minlength=v)
        assert len(held) == v
        assert held.max() <= 1500
        bound = kernels.compiled().packing_bound(scheme, work, tokens, v, ms)
        exact = pack_exactly(work, tokens, v, 1500, bins)
        assert exact is not None
        peak = exact.ms + 30.0
        best = work.sum() + v * 30.0 + (pp - 1) * peak
        assert bound <= ms * (1 + 1e-9)
        assert best <= ms * (1 + 1e-9)
        if pp > 1:
            assert ms <= best * 1.03


def test_packing_fills_micro_batches_to_the_last_token() -> None:
    tokens = np.array([600, 500, 400, 300, 250, 250, 250, 150, 150, 150], dtype=np.int64)  # two of 1500 each
    bins = np.zeros(10, dtype=np.int64)
    v, *_ = kernels.compiled().pack(Scheme(30.0, 1500, 1, 1, 0.0), tokens.astype(np.float64), tokens, 40, bins)
    assert v == 2


def test_pure_and_compiled_kernels_give_the_same_bits() -> None:
    planner = a800_planner(effort=1)
    for seed in range(3):
        batch = Batch.of(a800_batch(seed, 24), planner.cost_table)
        results = []
        for kernel in (kernels.pure(), kernels.compiled()):
            search = StrategySearch(planner._schemes, planner.options, batch)
            search._kernels = kernel
            kinds = PipelineKinds.of(StrategyShape.parse("tp16 + tp8 + 8*tp4 + tp2pp4"), planner.cost_table)
            price = kinds.num_ranks.copy()
            bound = search.bound(kinds, price, 6, 8)
            found = search.assign(kinds, Prospect(bound, price, math.inf))
            assert found is not None
            results.append((bound, price.tolist(), found.owner.tolist(), found.bin_of.tolist(), found.ms))
        assert results[0] == results[1]


def test_tiny_steps_are_solved_alike_with_and_without_numba() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        instance = random_instance(rng)
        plans = []
        for name in ("pure", "compiled"):
            planner = Planner(instance.table, instance.strategies, PlannerOptions(kernels=name))
            plan = planner.plan(0, range(len(instance.lengths)), instance.lengths)
            plans.append((plan.phases, plan.predicted_ms))
        assert plans[0] == plans[1]


def test_heavy_micro_batches_run_in_the_middle() -> None:
    loaded: list[tuple[float, tuple[int, ...]]] = [(float(x), (x,)) for x in (3, 1, 5, 2, 4)]
    assert [load for load, _ in order_microbatches(loaded)] == [1.0, 3.0, 5.0, 4.0, 2.0]


def test_rows_that_ranks_share_have_their_longest_sequences_in_the_middle() -> None:
    tokens = [50, 10, 40, 20, 30]
    for text, lengths in (("sp2", (10, 30, 50, 40, 20)), ("tp2", tuple(tokens))):
        cost = SchemeCost(ParallelScheme.parse(text), a=0.0, b=1.0, c=1.0, max_length=200)
        made = whole_pipeline(
            PipelineShape.parse(text), cost, [range(5)], work=[float(n) for n in tokens], tokens=tokens
        ).plan
        assert made.microbatches[0].lengths == lengths


def most_bins(sizes: list[int], capacity: int) -> int:
    """The bound of Martello and Toth as it is defined: over every size that is left out below."""
    best = math.ceil(sum(sizes) / capacity)
    for small in [size for size in sizes if 2 * size <= capacity]:
        large = sum(size > capacity - small for size in sizes)
        middle = [size for size in sizes if size <= capacity - small and 2 * size > capacity]
        rest = sum(size for size in sizes if small <= size and 2 * size <= capacity)
        room = sum(capacity - size for size in middle)
        best = max(best, large + len(middle) + math.ceil(max(0, rest - room) / capacity))
    return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=24), v=st.integers(1, 8), by_room=st.booleans())
def test_bins_are_bounded_filled_and_levelled_as_when_all_are_looked_at(
    sizes: list[int], v: int, by_room: bool
) -> None:
    tokens = np.array(sorted(sizes, reverse=True), dtype=np.int64)
    work, n, kernel = tokens * 1.0 + tokens**2 / 64, len(sizes), kernels.pure()
    assert kernel.bins_needed(tokens, 40, 0.0) == most_bins(tokens.tolist(), 40)  # type: ignore[attr-defined]
    bins = Bins(np.zeros(n, dtype=np.int64), np.zeros(v), np.zeros(v, dtype=np.int64), np.zeros(1, dtype=np.int64))
    fits = kernel.fill_bins(work, tokens, v, 40, by_room, bins)  # type: ignore[attr-defined]
    owner: list[int] = []
    load, used = [0.0] * v, [0] * v
    for size, ms in zip(tokens.tolist(), work.tolist(), strict=True):
        roomy = [j for j in range(v) if used[j] + size <= 40]
        if not roomy:
            break
        owner.append(min(roomy, key=lambda j: (-used[j] if by_room else load[j], j)))
        load[owner[-1]] += ms
        used[owner[-1]] += size
    assert fits == (len(owner) == n)
    assert bins.bin_of[: len(owner)].tolist() == owner
    if not fits:
        return
    top = int(bins.load.argmax())
    exchanges = [
        max(bins.load[top] - work[i] + less, bins.load[j] + work[i] - less)
        for i in np.flatnonzero(bins.bin_of == top)
        for j in range(v)
        for less, back in [(0.0, 0), *((work[k], tokens[k]) for k in np.flatnonzero(bins.bin_of == j))]
        if j != top and used[j] + tokens[i] - back <= 40
    ]
    rest = np.delete(bins.load, top).max(initial=0.0)
    best = max(rest, min([bins.load[top], *exchanges]))
    assert kernel.level_bins(work, tokens, v, 40, 0.0, 1, bins) == pytest.approx(best)  # type: ignore[attr-defined]
    assert np.bincount(bins.bin_of, weights=tokens, minlength=v).max() <= 40


def test_repairs_do_no_more_than_the_dispatch_and_pack_nothing_in_vain() -> None:
    planner, kernel = a800_planner(), kernels.compiled()
    kinds = PipelineKinds.of(StrategyShape.parse("8*tp4pp2"), planner.cost_table)
    lengths = [min(length, 6000) for length in a800_batch(1, 1500)]
    items = Batch.of(lengths, planner.cost_table).items
    problem = Problem(planner._schemes, items, kinds.shape)
    place = empty_placement(len(lengths), len(kinds.rank_order))
    assert kernel.place_greedily(problem, place)  # type: ignore[attr-defined]
    before = kernel.pack_all(problem, 40, place)
    after = kernel.repair(problem, 40, 0.0, 400, place)  # type: ignore[attr-defined]
    work, repairs = place.spent.tolist()
    assert after < before
    assert 0 < repairs < 1.2 * work, "one exchange may begin before the work is spent"
    # Equal sequences, one more on one of the pipelines: whatever is exchanged, by the sums one stays as late.
    equal = Batch.of([1000] * 17, planner.cost_table).items
    kinds = PipelineKinds.of(StrategyShape.parse("16*tp4"), planner.cost_table)
    place = empty_placement(17, 16)
    place.spent[0] = 10**9
    problem = Problem(planner._schemes, equal, kinds.shape)
    kernel.place_greedily(problem, place)  # type: ignore[attr-defined]
    kernel.pack_all(problem, 40, place)
    assert kernel.relieve(problem, 40, 400, place) == -1  # type: ignore[attr-defined]
    assert place.spent[1] <= 3 * 17 + 2 * (17 + 16), "looks only"


def test_many_sequences_cost_what_more_looking_may_gain() -> None:
    kernel = kernels.compiled()
    # Two of 334 tokens fit a micro-batch of 1,000, but by their sum a third less would do: 499 numbers fail.
    tokens, bins = np.full(3000, 334), np.zeros(3000, dtype=np.int64)
    v, _, _, spent = kernel.pack(Scheme(1e-4, 1000, 1000, 1.0, 0.0), tokens.astype(float), tokens, 40, bins)
    assert 1500 <= v <= 1515
    assert spent < 100 * 2 * 4 * len(tokens), "in less than a hundred tries"
    # Where a micro-batch costs next to nothing, packings that miss the ideal by one are not repaired.
    planner = a800_planner()
    kinds = PipelineKinds.of(StrategyShape.parse("8*tp4pp2"), planner.cost_table)
    items = Batch.of([min(length, 6000) for length in a800_batch(1, 1500)], planner.cost_table).items
    repaired = []
    for scale in (1.0, 1e-3):
        schemes = planner._schemes._replace(c=scale * planner._schemes.c)
        problem, place = Problem(schemes, items, kinds.shape), empty_placement(1500, len(kinds.rank_order))
        kernel.place_greedily(problem, place)  # type: ignore[attr-defined]
        kernel.pack_all(problem, 40, place)
        kernel.repair(problem, 40, 0.0, 400, place)  # type: ignore[attr-defined]
        repaired.append(int(place.spent[1]))
    assert repaired[0] > 0 == repaired[1]


# --- The kernels' two ways in: names, types, and both versions side by side.
def module(name: str, source: str) -> types.ModuleType:
    """A module made of source text."""
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    return made


@pytest.mark.parametrize(
    "again", ["def _helper(x): return -x", "_helper = 3", "from math import floor as _helper", "_ROUNDS = 5"]
)
def test_a_name_with_two_meanings_is_refused(again: str) -> None:
    first = module("first", "import math\n_ROUNDS = 4\ndef _helper(x): return x")
    second = module("second", "import math\n_ROUNDS = 4")
    assert set(_global_names([first, second])) == {"math", "_ROUNDS", "_helper"}
    exec(again, second.__dict__)
    with pytest.raises(AssertionError, match=r"(_helper|_ROUNDS) means one thing in first and another in second"):
        _global_names([first, second])


def test_every_kernel_of_the_folder_is_loaded() -> None:
    """A new file of kernels that is missing in the list would have its functions called uncompiled, or not at all."""
    folder = Path(load.__file__).parent
    not_kernels = {"__init__", "load", "problem"}
    assert {path.stem for path in folder.glob("*.py")} - not_kernels == {
        listed.__name__.rpartition(".")[2] for listed in load._MODULES
    }


def test_a_warm_cache_has_all_that_plans_need() -> None:
    """Else the first job on a machine compiles for many seconds in its first steps. A process of its own tells, since
    other tests here have called more."""
    code = (
        "import ds_hydra.planner.kernels as kernels\n"
        "from ds_hydra.planner import Planner, PlannerOptions\n"
        "from ds_hydra.planner.recipe import warm_up\n"
        "from ds_hydra.pipe.shape import StrategyShape\n"
        "from tests.support.planner_cases import a800_batch, a800_planner\n"
        "def compiled():\n"
        "    named = vars(kernels.compiled()).items()\n"
        "    return {name for name, kernel in named if getattr(kernel, 'signatures', None)}\n"
        "warm_up()\n"
        "warm = compiled()\n"
        "whole = a800_planner()\n"
        "every = [StrategyShape.parse(text) for text in ('8*tp8', '4*tp8 + 4*tp4pp2/v')]\n"
        "for planner in (whole, Planner(whole.cost_table, every, PlannerOptions(kernels='compiled'))):\n"
        "    for step, size in enumerate((5, 12, 40, 190)):\n"
        "        planner.plan(step, range(size), a800_batch(step, size))\n"
        "print(len(warm), *sorted(compiled() - warm))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    count, *late = found.split()
    assert int(count) > 6
    assert late == []


def test_a_compiled_walk_counts_no_references() -> None:
    """Each access to an array in a tuple would: then it is seven times as fast as plain Python, now a hundred times."""
    works = np.array([[7 + m % 5, 11 + m % 3, 5, 2, 1, -1, 2] for m in range(60)]).T.copy()
    arrays, lists = Jobs(4, 1, *works, room=12), Jobs(4, 1, *works.tolist(), room=12)  # type: ignore[misc]
    kernel = vars(compiled())["list_walk"]

    def seconds_of(walk: TakeWalk, jobs: Jobs, fresh: Callable[[Jobs], Walk]) -> float:
        walks = [fresh(jobs) for _ in range(6)]
        walk(jobs, walks.pop())  # compiles
        each = []
        for one in walks:
            started = time.thread_time()
            walk(jobs, one)
            each.append(time.thread_time() - started)
        return min(each)

    fast, plain = seconds_of(kernel, arrays, fresh_list_walk), seconds_of(list_walk, lists, fresh_walk)
    assert plain > 12 * fast, f"{1e6 * plain:.0f} us in plain Python, {1e6 * fast:.0f} us compiled"


def _nearest(number: int) -> int:
    return number + 1


def _both(number: int) -> int:
    return _nearest(-1) + _nearest(number)


def test_a_kernel_is_compiled_once_for_constants_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    plain = numba.njit
    monkeypatch.setattr(numba, "njit", lambda *given, **options: plain(*given, **options | {"cache": False}))
    names = dict(globals())
    clones = load._clones({one.__name__: one for one in (_nearest, _both)}, names, "once", load._compiler("once"))
    assert clones["_both"](5) == 6
    assert len(clones["_nearest"].signatures) == 1


# --- Compiled kernels lie where every checkout with the same sources finds them, and nobody else can write.
COUNTED = """
import numba.core.event as event
import ds_hydra
from ds_hydra.planner.recipe import warm_up
with event.install_recorder("numba:compile") as recorded:
    warm_up()
print(ds_hydra.__file__, len(recorded.buffer))
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    load.folder_of_kernels.cache_clear()
    yield
    load.folder_of_kernels.cache_clear()


def test_another_clone_compiles_nothing(tmp_path: Path) -> None:
    warm_up()
    for name in ("zero_hetero", "pipe", "ds_hydra"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tmp_path / "ds_hydra/__init__.py"), "0"], done.stderr


@pytest.mark.usefixtures("fresh")
def test_a_folder_in_which_others_may_write_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    folder = load.folder_of_kernels()
    assert folder == tmp_path / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    caplog.set_level(logging.WARNING)
    folder.chmod(0o770)
    load.folder_of_kernels.cache_clear()
    assert load.folder_of_kernels() is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    load.folder_of_kernels.cache_clear()
    assert load.folder_of_kernels() is None
    assert caplog.text.count("can have this job run what they like") == 1
    assert "it is a link and no folder" in caplog.text
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folder.unlink()
    load.folder_of_kernels.cache_clear()
    assert load.folder_of_kernels() is None, "another user's"


@pytest.mark.usefixtures("fresh")
def test_without_a_folder_of_the_user_kernels_stay_where_numba_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    code = warm_up.__code__
    assert load.folder_of_kernels() is None
    assert load.as_copied(warm_up, "none", "0") is code  # type: ignore[arg-type]


def test_a_copy_is_the_source_at_a_time_of_its_own() -> None:
    copy = Path(load.as_copied(warm_up, "test", "0").co_filename)  # type: ignore[arg-type]
    try:
        assert copy.read_bytes() == (ROOT / "ds_hydra/planner/recipe.py").read_bytes()
        assert copy.stat().st_mtime_ns == load._TIME_NS
    finally:
        shutil.rmtree(copy.parent)


def test_an_image_can_be_built_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-up"]) == 0
    assert f"kept in {load.folder_of_kernels()}" in capsys.readouterr().out


# --- Micro-batches made to profiles of loads: every token once, slices in order, nothing above its limits.
COST = SchemeCost(ParallelScheme(pp=3), 1e-4, 0.1, 4.0, 400, 50)
SHARES = Shares.usual()
PIPE = pipe_of(COST, SHARES)
LONGEST = longest_of(COST, SHARES)
LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=12)
PROFILES = st.builds(
    Profile, st.integers(2, 8), st.floats(0.1, 1), st.floats(1, 2), st.floats(0.2, 1), st.integers(0, 3)
)


def longest_first(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()
    return COST.sequence_ms(tokens), tokens


def pieces_of(profile: Profile, lengths: list[int]) -> Pieces:
    work, tokens = longest_first(lengths)
    most = most_slots(PIPE, tokens, profile.slots)
    made = empty_pieces(most + len(tokens), most)
    assert cut(PIPE, profile, work, tokens, made), "whatever is too long is cut"
    return made


def check(made: Pieces, lengths: list[int]) -> tuple[MicroBatchPlan, ...]:
    """Every token once, slices of a sequence in order, and within MaxLen and UtilLen."""
    tokens = sorted(lengths, reverse=True)
    batches = microbatches_of(made, range(len(tokens)))
    plan = PipelinePlan(PipelineShape.parse("pp3"), batches, 1.0)
    before = tuple(made.before[: len(batches)].tolist())
    assert plan.chain == before
    found: dict[int, list[Span]] = {}
    for number, batch in enumerate(batches):
        assert batch.spans
        assert batch.num_tokens == made.held[number] <= COST.max_length
        if number in before:
            assert len(batch.spans) == 1, "nothing stands beside a slice that another follows"
        for span in batch.spans:
            found.setdefault(span.sequence, []).append(span)
    assert sorted(found) == list(range(len(tokens)))
    for item, spans in found.items():
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == tokens[item]
        if len(spans) > 1:
            # A rest that is too short for a slice of its own joins the one before only where that has room for it.
            assert all(span.stop - span.start >= COST.util_length for span in spans[:-1])
    return batches


@given(LENGTHS, PROFILES)
def test_every_token_is_in_one_slice(lengths: list[int], profile: Profile) -> None:
    check(pieces_of(profile, lengths), lengths)


@given(LENGTHS, PROFILES, st.integers(0, 99))
def test_small_changes_keep_what_is_right(lengths: list[int], profile: Profile, seed: int) -> None:
    made, state = pieces_of(profile, lengths), np.array([seed], dtype=np.int64)
    for _ in range(30):
        move(PIPE, made, state)
        check(made, lengths)


@settings(max_examples=15)
@given(LENGTHS, st.sampled_from([1, 2]), st.integers(0, 9))
def test_the_best_is_what_its_plan_is_simulated_to_take(lengths: list[int], parts: int, seed: int) -> None:
    """The same with numba and without; and a plan's check comes to the same microsecond."""
    work, tokens = longest_first(lengths)
    pipe = pipe_of(COST, SHARES, parts=parts)
    found = [
        cut_best(kernel, pipe, work, tokens, effort=Effort(6, 12), seed=seed)
        for kernel in (kernels.compiled(), kernels.pure())
    ]
    best, pure = found
    if best is None or pure is None:
        assert best is pure
        assert max(lengths) > LONGEST, "the list order holds what its memory holds"
        return
    batches = check(best.pieces, lengths)
    assert batches == microbatches_of(pure.pieces, range(len(lengths)))
    assert best._replace(pieces=pure.pieces) == pure
    shape = PipelineShape.parse("pp3/list" if parts == 1 else "(tp1[0:1,5:6] > tp1[1:2,4:5] > tp1[2:3,3:4])/list")
    table = CostTable((SchemeCost(shape.cost_key, COST.a, COST.b, COST.c, COST.max_length, COST.util_length),))
    assert best.us / 1e3 == simulate_pipeline(PipelinePlan(shape, batches, 1.0), table)


def again_problem(
    batches: tuple[MicroBatchPlan, ...], before: tuple[int, ...], layers: int, parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[Note: layers computed again]: what a layer costs and saves, (micro-batches,) and (windows, micro-batches), and
    what the runs with too much have to save, with room for a layer that keeps all while it is computed again."""
    none, every = (
        batches_of([replace(batch, recompute=share) for batch in batches], before, COST, SHARES, parts=parts)
        for share in (0.0, 1.0)
    )
    saves = [parts * (a.kept - b.kept) / layers for a, b in zip(none.works, every.works, strict=True)]
    runs = [(run, parts * sum(none.works[m].kept for m in run) - none.room) for run in none.runs]
    full = [run for run, missing in runs if missing > 0]
    saved = np.array([[saves[m] * (m in run) for m in range(len(batches))] for run in full]).reshape(-1, len(batches))
    missing = np.array([missing for _, missing in runs if missing > 0]) + saved.max(axis=1, initial=0.0) / parts
    return np.array([work.forward / layers for work in none.works]), saved, missing


@pytest.mark.drawn
@settings(max_examples=15)
@given(st.integers(0, 40), st.integers(0, 9), st.sampled_from([1, 2]))
def test_layers_are_computed_again_until_all_fits(more: int, seed: int, parts: int) -> None:
    """With numba and without; hardly more than the least that HiGHS finds, and to the microsecond of a plan's check."""
    longest = longest_of(COST, SHARES, layers=6)
    length = LONGEST + 1 + more * (longest - LONGEST - 1) // 40
    work, tokens = longest_first([length, 60, 30, 200])
    pipe = pipe_of(COST, SHARES, parts=parts, layers=6 // parts)
    best, pure = (
        cut_best(kernel, pipe, work, tokens, effort=Effort(6, 12), seed=seed)
        for kernel in (kernels.compiled(), kernels.pure())
    )
    assert best is not None
    assert pure is not None
    batches = microbatches_of(best.pieces, range(4))
    assert batches == microbatches_of(pure.pieces, range(4))
    shape = PipelineShape.parse("pp3/list" if parts == 1 else "(tp1[0:1,5:6] > tp1[1:2,4:5] > tp1[2:3,3:4])/list")
    table = CostTable((SchemeCost(shape.cost_key, COST.a, COST.b, COST.c, COST.max_length, COST.util_length),))
    assert best.us / 1e3 == simulate_pipeline(PipelinePlan(shape, batches, 1.0), table)
    before = tuple(best.pieces.before[: len(batches)].tolist())
    layers = np.rint([batch.recompute * (6 // parts) for batch in batches])
    cost, saved, missing = again_problem(batches, before, 6 // parts, parts)
    assert (saved @ layers >= missing * (1 - 1e-9)).all()
    rows = [list(enumerate((row / miss).tolist())) for row, miss in zip(saved, missing, strict=True)]
    few, scale = [1.0] * len(rows), float(cost.mean())
    exact = solve_milp(
        cost / scale, np.full(len(cost), 6.0 // parts), rows, few, [math.inf] * len(rows), integers=len(cost)
    )
    assert exact.status == "optimal"
    assert cost @ layers <= 1.3 * scale * exact.bound + cost.max()


@given(LENGTHS, PROFILES)
def test_a_ceiling_hides_no_better_time(lengths: list[int], profile: Profile) -> None:
    made = pieces_of(profile, lengths)
    took = list_time(PIPE, made, NEVER)
    assert list_time(PIPE, made, took) == NEVER
    if took < NEVER:
        assert list_time(PIPE, made, took + 1) == took


def test_slots_of_the_note() -> None:
    target = np.zeros(6)
    assert set_targets(Profile(6, 0.3, 1.5, 0.7, 0), 280.0, target) == max(target)
    assert [round(ms) for ms in target] == [21, 32, 48, 70, 60, 49]
    assert sum(target) == pytest.approx(280.0)


def test_whole_sequences_stay_whole_and_too_long_ones_are_refused() -> None:
    kernel, whole = kernels.pure(), pipe_of(COST, SHARES, slices=False)
    best = cut_best(kernel, whole, *longest_first([390, 300, 20, 10]))
    assert best is not None
    assert (best.pieces.before[: best.pieces.counts[1]] == -1).all()
    assert cut_best(kernel, whole, *longest_first([401])) is None
    assert cut_best(kernel, PIPE, *longest_first([LONGEST + 100])) is None
    held = cut_best(kernel, PIPE, *longest_first([LONGEST]))
    assert held is not None
    assert held.pieces.counts[1] > 1


def test_the_more_full_micro_batches_a_pipeline_has_work_for_the_more_slots_are_tried() -> None:
    few, many = ({one.slots for one in profiles_of(PIPE, np.array([tokens]))} for tokens in (800, 16 * COST.max_length))
    assert few == {3, 4, 5, 6, 8, 10, 13, 17}
    assert len(many) == len(few), "no more tries"
    assert min(many) <= 16
    assert max(many) >= 5 * 16
    lean = profiles_of(PIPE, np.array([16 * COST.max_length]), lean=True)
    assert set(lean) < set(profiles_of(PIPE, np.array([16 * COST.max_length])))


def test_a_pipeline_with_much_work_is_done_sooner_with_small_micro_batches() -> None:
    """tp2pp4 of a 32B model as a V, with work for 16 full micro-batches and two sequences of a fifth of it each."""
    cost = CostTable.load(TABLES / "llama_32b_a800.json")[ParallelScheme(2, 4)]
    assert cost.shares is not None
    pipe = pipe_of(cost, cost.shares, parts=2, layers=7)
    tokens = np.array([20_000, 18_000, *[1_500] * 44], dtype=np.int64)
    work = cost.sequence_ms(tokens)
    kernel, effort = kernels.compiled(), Effort(6, 0)
    coarse = [one for one in profiles_of(pipe, tokens[:1]) if one.slots <= 17]
    before, found = (cut_best(kernel, pipe, work, tokens, profiles=some, effort=effort) for some in (coarse, None))
    assert before is not None
    assert found is not None
    assert found.pieces.counts[1] > 17
    assert found.us < 0.95 * before.us


# --- Groups that deal out what they do not share: never sooner done than what is shared without a remainder.
def _group(units: int, *, message: float = 0.0, a: float = 0.0) -> SchemeCost:
    """A token takes a unit 1 ms, and a * l more; a micro-batch 5 ms. Ideal where it stands, dealt out by `dealt`."""
    return WaitingCost(
        ParallelScheme(sp=units), a / units, 1.0 / units, 5.0, 1000 * units, 1, message=message, alone=10**6
    )


def _dealt(cost: SchemeCost) -> SchemeCost:
    return dealt(CostTable((cost,))).costs[0]


def test_what_is_not_shared_is_computed_whole_by_one_unit() -> None:
    cost = _group(2)
    assert cost.load_ms([40, 30, 20]) == 5 + 45
    assert _dealt(cost).load_ms([40, 30, 20]) == 5 + 45, "all are shared, as messages take nothing"
    # A ring of 3/4 ms a token adds 22.5 ms where all are shared; with none of them one unit has 40, the other 30 + 20.
    dear = _dealt(_group(2, message=0.75))
    assert dear.load_ms([40, 30, 20]) == 5 + 50
    assert dear.load_ms([40, 40]) == 5 + 40
    # Attention of a long sequence hides what goes round for a short one beside it: 0.1 * 100 * 100 / 2 ms.
    hidden = _dealt(_group(2, message=0.5, a=0.1))
    assert hidden.load_ms([100, 9]) == pytest.approx(5 + 109 / 2 + 0.1 * (100**2 + 9**2) / 2)


def test_works_go_to_the_unit_with_the_least_so_far() -> None:
    assert busiest_ms([5, 4, 3, 3], 2) == 8
    assert busiest_ms([], 3) == 0
    assert busiest_ms([7, 1], 4) == 7


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=9), st.sampled_from([2, 3, 4, 8]), st.floats(0, 2),
    st.floats(0, 0.1),
)  # fmt: skip
def test_it_is_the_best_number_of_shared_sequences_and_never_less_than_the_ideal(
    lengths: list[int], units: int, message: float, a: float
) -> None:
    cost = _group(units, message=message, a=a)
    found, order = _dealt(cost).load_ms(lengths), sorted(lengths, reverse=True)
    tried = []
    for shared in range(len(lengths) + 1):
        ring, square = message * sum(order[:shared]), a / units * sum(x * x for x in order[:shared])
        rest = busiest_ms([x + a * x * x for x in order[shared:]], units)
        tried.append(5 + sum(order[:shared]) / units + max(square, ring) + rest)
    assert found == pytest.approx(min(tried))
    assert found >= cost.load_ms(lengths) - 1e-6
    assert found <= _dealt(_group(units, message=1e9, a=a)).load_ms(lengths) + 1e-6, "sharing is a choice"


def test_a_group_of_one_and_costs_of_other_systems_stay_as_they_are() -> None:
    alone = SchemeCost(ParallelScheme(), 0.1, 1.0, 5.0, 1000, 1)
    assert _dealt(alone) is alone


def test_a_comparison_has_both_and_the_gap_that_dealing_out_leaves() -> None:
    cell = Cell("7b", 8, 16384, 40_000, "CommonCrawl")
    for name, other in DEALT.items():
        assert measure(cell, 2, other) == {}, "it comes with the ideal one"
        found = measure(cell, 2, name)
        ideal, made = found[name], found[other]
        assert made.strategies == ideal.strategies
        assert made.gap >= 0.0
        # Both have the same transfers; nothing waits for a ring there, so the remainder alone differs.
        for one, more in itertools.zip_longest(ideal.step_ms, made.step_ms):
            assert more >= one - 1e-6
