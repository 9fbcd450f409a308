"""What is composed for a batch, and plans that may cut sequences."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.composing as composing
import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_runnable, validate_plan
from ds_hydra.planner import Planner, PlannerOptions, PlannerService, PlanRecipe
from ds_hydra.planner.chunked import ChunkedSearch, ChunkedSpace, PipelineTimes
from ds_hydra.planner.composing import COMPOSED, WORTH, Composer, PlanBudget, budget_of, typical_batch
from ds_hydra.planner.exact import CountsFound, Solved, counts_at, shares_at, solve_milp
from ds_hydra.planner.kernels.problem import Batch, scheme_arrays
from ds_hydra.planner.propose import ProposalEffort, Wider, propose_strategies, wider_shapes
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.planner_cases import TABLES, a800_batch, planner_of

# --- What HiGHS composes for a batch, against all counts of pipelines, and what plans make of it.
SCHEMES = (ParallelScheme(1), ParallelScheme(2), ParallelScheme(4))
SIZES = np.array([scheme.num_ranks for scheme in SCHEMES])
# One long sequence that tp4 alone holds beside many short ones, which are best off on tp1: no candidate has both.
TABLE = CostTable(
    tuple(
        SchemeCost(scheme, 0.0, b, 1.0, max_length=longest, util_length=10)
        for scheme, b, longest in zip(SCHEMES, (1.0, 0.6, 0.35), (100, 300, 900), strict=True)
    )
)
POOL = tuple(map(StrategyShape.parse, ("8*tp1", "2*tp4")))
LENGTHS = [600, *[60] * 30]


def planner(highs: str = "composes", **changes: object) -> Planner:
    options = PlannerOptions(kernels="compiled", highs=highs)
    return Planner(TABLE, POOL, options, **changes)  # type: ignore[arg-type]


def best_by_enumeration(batch: Batch, table: CostTable, tau: float) -> float:
    """The least time over all counts of pipelines on 8 ranks, each by a linear program without whole numbers."""
    shares = shares_at(batch, scheme_arrays(table), np.arange(3), tau, kernels.compiled())
    best = math.inf
    for counts in itertools.product(*(range(8 // size + 1) for size in SIZES)):
        if np.dot(counts, SIZES) == 8:
            best = min(best, tau / least_rate(shares, batch, counts))
    return best


def least_rate(shares: np.ndarray, batch: Batch, counts: tuple[int, ...]) -> float:
    """The largest u of [Note: u = 1/tau] for these counts, sequences dealt out one by one and in fractions."""
    count = len(batch.merged.tokens)
    pairs = [(k, i) for k in range(3) for i in range(count) if shares[k, i] < 1e9]
    u = len(pairs)
    rows: list[list[tuple[int, float]]] = [[] for _ in range(3)] + [[(u, -1.0)] for _ in range(count)]
    for at, (k, i) in enumerate(pairs):
        rows[k].append((at, float(shares[k, i] * batch.merged.copies[i])))
        rows[3 + i].append((at, 1.0))
    cost = np.zeros(u + 1)
    cost[u] = -1.0
    lower, upper = [-math.inf] * 3 + [0.0] * count, [*map(float, counts)] + [0.0] * count
    found = solve_milp(cost, np.full(u + 1, np.inf), rows, lower, upper, integers=0)
    assert found.status == "optimal"
    assert found.values is not None
    return max(1e-12, float(found.values[u]))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(5, 900), min_size=3, max_size=16), st.floats(0.5, 2.0))
def test_the_counts_are_the_best_of_all_on_8_ranks(lengths: list[int], factor: float) -> None:
    """Up to the gap of HiGHS and the bins of lengths, in which up to 30 different ones stand alone."""
    batch = Batch.of(lengths, TABLE)
    tau = factor * sum(lengths) * 0.15 + 250.0
    shares = shares_at(batch, scheme_arrays(TABLE), np.arange(3), tau, kernels.compiled())
    found = counts_at(tau, batch, shares, SIZES, 8, node_limit=100)
    best = best_by_enumeration(batch, TABLE, tau)
    if not found.counts:
        assert best > 1e6
        return
    assert np.dot(found.counts, SIZES) == 8
    assert best * (1.0 - 1e-6) <= found.ms <= best * 1.003


def test_a_mix_that_nobody_proposed_is_run_where_it_is_clearly_faster() -> None:
    before, made = planner("off").plan(0, range(31), LENGTHS), planner().made(0, range(31), LENGTHS)
    assert made.highs is not None
    assert made.plan.strategy == made.highs.strategy == "tp4 + 4*tp1"
    assert (made.plan.source, made.highs.new_strategy) == (COMPOSED, True)
    assert made.highs.gain == pytest.approx(1.0 - made.plan.predicted_ms / before.predicted_ms)
    assert made.highs.gain > WORTH
    assert made.highs.programs == 3
    assert made.plan.lower_bound_ms <= made.plan.searched_ms
    validate_plan(made.plan, TABLE, 8)


def test_the_step_of_each_plan_is_simulated_once() -> None:
    seen, lengths = list[str](), [290, *[90] * 20]

    def step_ms(plan: StepPlan) -> float:
        seen.append(plan.strategy)
        return plan.predicted_ms

    pool, options = ("tp4 + 2*tp2", "tp4 + tp2 + 2*tp1"), PlannerOptions(kernels="compiled", highs="composes")
    made = Planner(TABLE, [*map(StrategyShape.parse, pool)], options, step_ms=step_ms).made(0, range(21), lengths)
    assert made.plan.source == COMPOSED
    assert len(seen) > 2
    assert sorted(seen) == sorted(set(seen))


@pytest.mark.parametrize(("highs", "room"), [("advises", ""), ("composes", "rank 3 has no room")])
def test_where_it_may_not_run_the_candidates_plan_does_and_the_gain_is_told(highs: str, room: str) -> None:
    made = planner(highs, room=lambda _: room).made(0, range(31), LENGTHS)
    assert made.plan == planner("off").plan(0, range(31), LENGTHS)
    assert made.highs is not None
    assert (made.highs.strategy, made.highs.new_strategy) == ("tp4 + 4*tp1", False)
    assert made.highs.gain > WORTH


def test_highs_never_makes_a_plan_worse() -> None:
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    texts = ("4*tp16", "16*tp4", "8*tp4pp2", "2*tp8 + 12*tp4")
    plain, composing_one = (planner_of(table, texts, highs=highs) for highs in ("off", "composes"))
    used = 0
    for step in range(6):
        lengths = a800_batch(step, 120)
        before, made = plain.plan(step, range(120), lengths), composing_one.made(step, range(120), lengths)
        assert made.highs is not None
        assert made.plan.predicted_ms <= before.predicted_ms
        assert made.plan == before or made.highs.new_strategy
        used += made.highs.new_strategy
        validate_plan(made.plan, table, 64)
    assert used, "no batch had a use for it, so this shows nothing"


def test_chunked_pipelines_are_composed_too() -> None:
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    composing_one = planner_of(table, ("4*tp16", "16*tp4", "8*tp4pp2/v"), highs="composes", effort=1)
    made = composing_one.made(0, range(60), a800_batch(3, 60))
    assert made.highs is not None
    assert made.highs.programs == 3
    validate_plan(made.plan, table, 64)


def test_a_search_of_composed_strategies_goes_on_with_the_candidates_too() -> None:
    """Tries that only the composed ones get may do less than the same tries for what is known."""
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    pool, other = ["4*tp2pp4/v + 8*tp4", "tp16 + 6*tp4pp2/v"], StrategyShape.parse("tp4pp2/v + 12*tp4 + tp2pp4/v")
    space, better = ChunkedSpace(table, list(map(StrategyShape.parse, pool)), slices=True), 0
    for step in range(6):
        batch = space.batch(a800_batch(step, 120))
        search = ChunkedSearch(space, kernels.compiled(), batch, num_ranks=64, tries=400)
        before = {str(one.kinds.strategy): one.ms for one in search.best_of(space.kinds, 2)}
        after = {str(one.kinds.strategy): one.ms for one in search.beside([space.kinds_of(other)], 400)}
        assert set(before) <= set(after) <= {*before, str(other)}
        assert all(after[name] <= ms for name, ms in before.items())
        better += any(after[name] < ms for name, ms in before.items())
    assert better, "no plan of a candidate became better, so this shows nothing"


def test_a_failure_of_highs_is_told_and_the_candidates_plan_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = CountsFound((), math.inf, Solved("failed", why="its status is 'Not Set'"))
    monkeypatch.setattr(composing, "counts_at", lambda *_, **__: failed)
    made = planner().made(0, range(31), LENGTHS)
    assert made.plan == planner("off").plan(0, range(31), LENGTHS)
    assert "HiGHS composed nothing: its status is 'Not Set'" in caplog.text


def test_programs_and_nodes_are_those_of_the_budget() -> None:
    for programs in (1, 2):
        made = planner(budget=PlanBudget(0, programs, 1)).made(0, range(31), LENGTHS)
        assert made.highs is not None
        assert made.highs.programs == programs
        assert made.highs.nodes <= programs


def test_a_budget_is_sized_by_counts_alone() -> None:
    typical = typical_batch([100] * 30 + [0, 900], 400)
    assert typical == [100, 100, 100]
    assert budget_of(TABLE, POOL, 2) == PlanBudget(0, 3, 20)
    assert budget_of(TABLE, POOL, 2, [10]).programs == 1, "a step of some ms has time for no more"
    assert budget_of(TABLE, POOL, 2, [100] * 1000).programs == 3
    chunked = (*POOL, StrategyShape.parse("4*pp2/list"))
    table = CostTable((*TABLE.costs, replace(TABLE.costs[1], scheme=ParallelScheme(1, 2))))
    assert budget_of(table, chunked, 2).tries == 2 * (1800 + 300 * 4)
    assert typical_batch([], 5000) == [1024] * 4


def test_composing_is_the_same_in_another_process_beside_a_users_programs() -> None:
    """The digest of a plan, before and after a user's own HiGHS with another number of threads."""
    code = (
        "import sys, highspy\n"
        "from tests.pure.test_composing import LENGTHS, knapsack, planner\n"
        "def own():\n"
        "    one = highspy.Highs()\n"
        "    for name, value in (('threads', 4), ('parallel', 'on'), ('output_flag', False)):\n"
        "        one.setOptionValue(name, value)\n"
        "    x = one.addVariable(0.0, 1.0); one.maximize(x)\n"
        "    assert one.getModelStatus() == highspy.HighsModelStatus.kOptimal\n"
        "own()\n"
        "assert knapsack(10.0, node_limit=100).point is not None, 'the first program after another number of threads'\n"
        "found = set()\n"
        "for _ in range(2):\n"
        "    own()\n"
        "    found.add(planner().plan(0, range(31), LENGTHS).digest().hex())\n"
        "own()\n"
        "print(*found)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [planner().plan(0, range(31), LENGTHS).digest().hex()]


@pytest.mark.parametrize("ahead", [0, 3])
def test_what_joins_is_a_candidate_from_its_step_on_whoever_plans(ahead: int) -> None:
    """Also for steps that were planned before it was known to join, and with other costs meanwhile."""
    mix = StrategyShape.parse("tp4 + 4*tp1")
    recipe = PlanRecipe(TABLE, POOL, PlannerOptions(kernels="compiled", highs="composes"))
    slower = CostTable(tuple(replace(cost, b=2 * cost.b) for cost in TABLE.costs))
    with PlannerService(recipe, ahead) as service:
        for step in range(5):
            service.submit(step, range(31), LENGTHS)
        made = [service.get(0)]
        service.join(mix, 0.0, 3)
        service.use_table(slower, 2)
        made += [service.get(step) for step in (1, 2, 3, 4)]
    assert [one.plan.strategy for one in made] == [str(mix)] * 5
    assert [one.plan.source for one in made] == [COMPOSED] * 3 + ["search"] * 2
    assert made[2].plan.predicted_ms > 1.5 * made[1].plan.predicted_ms
    assert len({one.recipe for one in made}) == 3
    joined = Planner(slower, (*POOL, mix), recipe.options)
    assert made[4].plan == joined.plan(4, range(31), LENGTHS)


def test_a_composer_knows_only_the_shapes_that_it_is_given() -> None:
    batch = Batch.of(LENGTHS, TABLE)
    shapes = {1: PipelineShape.of(SCHEMES[1]), 2: PipelineShape.of(SCHEMES[2])}
    composer = Composer(8, kernels.compiled(), PlanBudget(0, 3, 20))
    found = composer.compose(batch, scheme_arrays(TABLE), shapes, 300.0, ())
    assert found.asked == 3
    assert {pipeline for one in found.strategies for pipeline in one.pipelines} <= set(shapes.values())


def knapsack(most: float, **limits: float) -> Solved:
    """The most worth of 40 things of at most so much weight."""
    rng = np.random.default_rng(0)
    worth, weight = rng.uniform(0.5, 1.0, 40), rng.uniform(0.5, 1.0, 40)
    row = [(i, float(weight[i])) for i in range(40)]
    return solve_milp(-worth, np.ones(40), [row], [-9.0], [most], integers=40, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "most", "limits", "found"),
    [
        ("optimal", 10.0, {}, True),
        ("infeasible", -1.0, {}, False),
        ("limit", 10.0, {"node_limit": 0}, False),
    ],
)
def test_a_status_says_one_thing(status: str, most: float, limits: dict[str, float], found: bool) -> None:
    solved = knapsack(most, **limits)
    assert solved.status == status
    assert (solved.point is not None) == found


def test_programs_have_a_time_limit_only_where_seconds_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    set_option = highspy.Highs.setOptionValue

    def told(solver: highspy.Highs, name: str, value: Any) -> object:
        asked.append(name)
        return set_option(solver, name, value)

    monkeypatch.setattr(highspy.Highs, "setOptionValue", told)
    assert knapsack(10.0, node_limit=100).point is not None
    assert "time_limit" not in asked
    assert {"threads", "random_seed", "mip_max_nodes"} < set(asked)
    knapsack(10.0, seconds=10.0)
    assert "time_limit" in asked


def test_a_failure_is_never_nothing_found() -> None:
    with pytest.raises(RuntimeError, match="Not Set"):
        _ = Solved("failed", why="its status is 'Not Set'").point


# --- Plans over pipelines that may cut sequences: complete, within memory, never worse, never below their
# bound.
CUT_SCHEMES = (ParallelScheme(tp=4), ParallelScheme(tp=2), ParallelScheme(pp=2), ParallelScheme(tp=2, pp=2))
LIMITS = (400, 180, 120, 300)
CUT_TABLE = CostTable(
    tuple(
        SchemeCost(scheme, 2e-4 / scheme.num_ranks, 0.9 / scheme.num_ranks, 4.0, limit, 20, Shares.usual())
        for scheme, limit in zip(CUT_SCHEMES, LIMITS, strict=True)
    )
)
LAUNCHED = CostTable(tuple(replace(cost, floor=60.0 / cost.scheme.pp) for cost in CUT_TABLE.costs))
WHOLE = ("tp4 + 2*tp2", "4*pp2")
CHUNKED = ("4*pp2/v", "tp2pp2/list + tp2 + pp2/v", "2*tp2pp2/v")
CUT_LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=16)


def cutting_planner(texts: tuple[str, ...], table: CostTable = CUT_TABLE, **options: Any) -> Planner:
    return planner_of(table, texts, **options)


def plan(made: Planner, lengths: list[int]) -> StepPlan:
    """A plan that is complete, within memory, states what it is simulated to take, and is not below its bound."""
    found = made.plan(3, range(len(lengths)), lengths)
    validate_plan(found, made.cost_table, made.num_ranks)
    check_runnable(found, no_slices=made.options.no_slices)
    assert 0.0 < found.lower_bound_ms <= found.searched_ms
    return found


@settings(max_examples=40)
@given(CUT_LENGTHS, st.integers(0, 3), st.sampled_from((CUT_TABLE, LAUNCHED)))
def test_a_plan_is_right_and_never_worse_than_that_of_whole_sequences(
    lengths: list[int], seed: int, table: CostTable
) -> None:
    both, whole = cutting_planner(WHOLE + CHUNKED, table, seed=seed), cutting_planner(WHOLE, table, seed=seed)
    found = plan(both, lengths)
    assert found.predicted_ms <= plan(whole, lengths).predicted_ms
    again = cutting_planner(WHOLE + CHUNKED, table, seed=seed)
    assert again.plan(3, range(len(lengths)), lengths) == found, "the same plan again"


@settings(max_examples=10)
@given(CUT_LENGTHS)
def test_plain_python_plans_what_no_whole_sequence_fits(lengths: list[int]) -> None:
    """Where it must it cuts, once; where whole sequences do it plans these."""
    longest = cutting_planner(CHUNKED[:1]).max_length
    assert longest > max(cost.max_length for cost in CUT_TABLE.costs if cost.scheme == ParallelScheme(pp=2))
    lengths = [min(length, longest) for length in lengths]
    lean = plan(cutting_planner(CHUNKED[:1], kernels="pure"), lengths)
    assert lean.source == "fast"
    searched = plan(cutting_planner(CHUNKED[:1]), lengths)
    assert searched.lower_bound_ms <= lean.searched_ms
    assert cutting_planner(WHOLE + CHUNKED, kernels="pure").plan(0, range(1), lengths[:1]).strategy in WHOLE


def test_sequences_stay_whole_where_they_must() -> None:
    """No measured shares, or a model that cannot be cut: then MaxLen is the longest sequence."""
    bare = CostTable(tuple(SchemeCost(c.scheme, c.a, c.b, c.c, c.max_length, c.util_length) for c in CUT_TABLE.costs))
    for made in (
        cutting_planner(CHUNKED[:1], bare),
        cutting_planner(CHUNKED[:1], no_slices="the model has recurrent layers"),
    ):
        assert made.max_length == CUT_TABLE[ParallelScheme(pp=2)].max_length
        assert not any(pipeline.in_slices for pipeline in plan(made, [120, 110, 60, 30, 20, 10]).pipelines)
        with pytest.raises(PlanError, match="no strategy can hold sequence 0 of 130 tokens"):
            made.plan(0, [0], [130])
    assert wider_shapes(bare) == ()


def test_each_strategy_has_a_turn_in_a_cycle() -> None:
    made = cutting_planner((WHOLE[0], CHUNKED[0]), choose="cycle")
    assert [made.plan(step, range(3), [90, 40, 10]).strategy for step in range(3)] == [
        *made_texts(WHOLE[0], CHUNKED[0], WHOLE[0])
    ]


def made_texts(*texts: str) -> list[str]:
    return [str(StrategyShape.parse(text)) for text in texts]


def test_the_shapes_of_the_wider_space() -> None:
    assert [str(shape) for shape in wider_shapes(CUT_TABLE)] == ["pp2/v", "tp2pp2/v"]
    assert [str(shape) for shape in wider_shapes(CUT_TABLE, num_layers=3)] == ["pp2/list", "tp2pp2/list"]
    assert [str(shape) for shape in wider_shapes(CUT_TABLE, ("1f1b", "list"))] == ["pp2/list", "tp2pp2/list"]
    assert wider_shapes(CUT_TABLE, ("1f1b",)) == ()


def test_contexts_that_no_scheme_holds_whole_are_proposed_for_and_planned() -> None:
    """64K and 128K tokens of a 32B model, where the longest whole sequence has 43,614."""
    table = CostTable.load(Path(TABLES) / "llama_32b_a800.json")
    wider, effort = Wider(wider_shapes(table)), ProposalEffort(4, 2, 5, 1, 20)
    space = ChunkedSpace(table, [StrategyShape((shape,)) for shape in wider.shapes], slices=True)
    assert max(row.longest for row in space.rows) > 90_000
    lengths = [*a800_batch(5), 65_536]
    with pytest.raises(PlanError, match="context_length=65536"):
        propose_strategies(table, 64, lengths, 200_000, 65_536, tp_across_nodes=True, effort=effort)
    found = propose_strategies(
        table, 64, lengths, 200_000, 65_536, tp_across_nodes=True, effort=effort, count=4, wider=wider
    )
    made = Planner(table, found, PlannerOptions(kernels="compiled", effort=1))
    planned = plan(made, lengths)
    assert any(pipeline.in_slices for pipeline in planned.pipelines)


@settings(max_examples=8)
@given(CUT_LENGTHS, st.integers(0, 3), st.sampled_from(["compiled", "pure"]))
def test_what_no_strategy_holds_is_planned_with_layers_computed_again(lengths: list[int], seed: int, way: str) -> None:
    """Within the room of every stage and not below the bound; a batch that fits else is planned as ever."""
    made, none = (cutting_planner(CHUNKED[1:], seed=seed, layers=layers, kernels=way) for layers in (12, 0))
    assert made.max_length > 1.5 * none.max_length
    least = int(1.25 * none.max_length)  # the last slice has no context, so a little more than the longest may fit
    longest = least + sum(lengths) % (made.max_length - least)
    found = plan(made, [longest, *lengths])
    again = [batch for pipeline in found.pipelines for batch in pipeline.microbatches if batch.recompute]
    assert again
    assert all((12 * batch.recompute) % 1 == 0 for batch in again), "whole layers of a stage"
    assert 0.0 < found.recomputed < 1.0
    with pytest.raises(PlanError, match=f"no strategy can hold sequence 0 of {longest} tokens"):
        none.plan(0, range(1), [longest])


@settings(max_examples=10)
@given(CUT_LENGTHS, st.integers(0, 3))
def test_what_fits_without_is_hardly_planned_worse_where_layers_may_be_computed_again(
    lengths: list[int], seed: int
) -> None:
    made, none = (cutting_planner(CHUNKED, seed=seed, layers=layers) for layers in (12, 0))
    fitting = [min(length, none.max_length) for length in lengths]
    assert plan(made, fitting).predicted_ms <= 1.02 * plan(none, fitting).predicted_ms


def test_a_strategy_that_holds_a_sequence_by_computing_layers_again_is_a_candidate_beside_others() -> None:
    def changed(cost: SchemeCost) -> SchemeCost:
        if cost.scheme == ParallelScheme(2):
            return replace(cost, b=3.0 * cost.b)
        return replace(cost, max_length=64) if cost.scheme == ParallelScheme(2, 2) else cost

    made = cutting_planner(("4*tp2", "2*tp2pp2/v"), CostTable(tuple(map(changed, CUT_TABLE.costs))), layers=12)
    found = plan(made, [180, 180, 40, 30])
    assert found.strategy == "2*tp2pp2/v"
    assert found.recomputed > 0.0


def test_a_job_that_computes_all_layers_again_has_none_left_for_that() -> None:
    shares = Shares(Shares.usual().forward, Shares.usual().weight, recomputed=1.0)
    table = CostTable(tuple(replace(cost, shares=shares) for cost in CUT_TABLE.costs))
    assert cutting_planner(CHUNKED, table, layers=12).max_length == cutting_planner(CHUNKED, table, layers=0).max_length


def test_a_sequence_that_is_most_of_a_pipelines_work_is_cut_as_if_it_were_the_first() -> None:
    """What suits a typical pipeline of the batch does not suit it."""
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    space = ChunkedSpace(table, [StrategyShape.parse("2*tp8pp4/v")], slices=True, layers=60)
    kernel, batch, lone = kernels.compiled(), space.batch([120_000, *[700] * 100]), np.array([0])
    fresh, probed = (PipelineTimes(space, kernel, batch, tries=1 << 20, seed=0) for _ in range(2))
    probed.probe(0, space.share(batch, 64), batch.items.work[0])
    assert probed.timed(0, lone).ms == fresh.timed(0, lone).ms


@pytest.mark.parametrize("chunked", [False, True])
def test_of_plans_that_are_as_good_the_one_with_fewest_shapes_is_taken(chunked: bool) -> None:
    """Within the share that `simplest` allows, and no further; what more shapes save is told."""
    pool = ["4*tp4/v", "2*tp4/v + 4*tp2/v"] if chunked else ["4*tp4", "2*tp4 + 4*tp2"]
    lengths = [380, *[60] * 60]
    usual = Shares.usual() if chunked else None
    costs = [
        SchemeCost(ParallelScheme(tp), 0.0, 0.4 / tp * (1.0 + 0.04 * tp), 2.0, 400, 10, shares=usual) for tp in (2, 4)
    ]
    table = CostTable(tuple(costs))
    made = {
        share: planner_of(table, pool, simplest=share).made(0, range(len(lengths)), lengths) for share in (0.0, 0.1)
    }
    mix, simple = made[0.0].plan, made[0.1].plan
    assert (mix.strategy, simple.strategy) == (pool[1], pool[0])
    assert mix.step_ms < simple.step_ms <= 1.1 * mix.step_ms
    assert made[0.1].simpler_ms is None
    barely = 0.9 * (simple.step_ms / mix.step_ms - 1.0)
    found = planner_of(table, pool, simplest=barely).made(0, range(len(lengths)), lengths)
    assert found.plan.strategy == mix.strategy
    if not chunked:
        assert found.simpler_ms is not None
        assert mix.step_ms < found.simpler_ms <= simple.step_ms
