"""Plans over pipelines that may cut sequences: complete, within memory, never worse, never below their bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.runnable import check_runnable
from ds_hydra.planner import Planner, PlannerOptions, StepPlan, validate_plan
from ds_hydra.planner.chunked_space import ChunkedSpace
from ds_hydra.planner.chunked_times import PipelineTimes
from ds_hydra.planner.proposal.propose import ProposalEffort, Wider, propose_strategies
from ds_hydra.planner.proposal.spaces import wider_shapes
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.planner_cases import TABLES, a800_batch

SCHEMES = (ParallelScheme(tp=4), ParallelScheme(tp=2), ParallelScheme(pp=2), ParallelScheme(tp=2, pp=2))
LIMITS = (400, 180, 120, 300)
TABLE = CostTable(
    tuple(
        SchemeCost(scheme, 2e-4 / scheme.num_ranks, 0.9 / scheme.num_ranks, 4.0, limit, 20, Shares.usual())
        for scheme, limit in zip(SCHEMES, LIMITS, strict=True)
    )
)
LAUNCHED = CostTable(tuple(replace(cost, floor=60.0 / cost.scheme.pp) for cost in TABLE.costs))
WHOLE = ("tp4 + 2*tp2", "4*pp2")
CHUNKED = ("4*pp2/v", "tp2pp2/list + tp2 + pp2/v", "2*tp2pp2/v")
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=16)


def planner(texts: tuple[str, ...], table: CostTable = TABLE, **options: object) -> Planner:
    options = {"kernels": "compiled", **options}
    return Planner(table, [StrategyShape.parse(text) for text in texts], PlannerOptions(**options))  # type: ignore[arg-type]


def plan(made: Planner, lengths: list[int]) -> StepPlan:
    """A plan that is complete, within memory, states what it is simulated to take, and is not below its bound."""
    found = made.plan(3, range(len(lengths)), lengths)
    validate_plan(found, made.cost_table, made.num_ranks)
    check_runnable(found, no_slices=made.options.no_slices)
    assert 0.0 < found.lower_bound_ms <= found.searched_ms
    return found


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 3), st.sampled_from((TABLE, LAUNCHED)))
def test_a_plan_is_right_and_never_worse_than_that_of_whole_sequences(
    lengths: list[int], seed: int, table: CostTable
) -> None:
    both, whole = planner(WHOLE + CHUNKED, table, seed=seed), planner(WHOLE, table, seed=seed)
    found = plan(both, lengths)
    assert found.predicted_ms <= plan(whole, lengths).predicted_ms
    again = planner(WHOLE + CHUNKED, table, seed=seed)
    assert again.plan(3, range(len(lengths)), lengths) == found, "the same plan again"


@settings(max_examples=10)
@given(LENGTHS)
def test_plain_python_plans_what_no_whole_sequence_fits(lengths: list[int]) -> None:
    """Where it must it cuts, once; where whole sequences do it plans these."""
    longest = planner(CHUNKED[:1]).max_length
    assert longest > max(cost.max_length for cost in TABLE.costs if cost.scheme == ParallelScheme(pp=2))
    lengths = [min(length, longest) for length in lengths]
    lean = plan(planner(CHUNKED[:1], kernels="pure"), lengths)
    assert lean.source == "fast"
    searched = plan(planner(CHUNKED[:1]), lengths)
    assert searched.lower_bound_ms <= lean.searched_ms
    assert planner(WHOLE + CHUNKED, kernels="pure").plan(0, range(1), lengths[:1]).strategy in WHOLE


def test_sequences_stay_whole_where_they_must() -> None:
    """No measured shares, or a model that cannot be cut: then MaxLen is the longest sequence."""
    bare = CostTable(tuple(SchemeCost(c.scheme, c.a, c.b, c.c, c.max_length, c.util_length) for c in TABLE.costs))
    for made in (planner(CHUNKED[:1], bare), planner(CHUNKED[:1], no_slices="the model has recurrent layers")):
        assert made.max_length == TABLE[ParallelScheme(pp=2)].max_length
        assert not any(pipeline.in_slices for pipeline in plan(made, [120, 110, 60, 30, 20, 10]).pipelines)
        with pytest.raises(PlanError, match="no strategy can hold sequence 0 of 130 tokens"):
            made.plan(0, [0], [130])
    assert wider_shapes(bare) == ()


def test_each_strategy_has_a_turn_in_a_cycle() -> None:
    made = planner((WHOLE[0], CHUNKED[0]), choose="cycle")
    assert [made.plan(step, range(3), [90, 40, 10]).strategy for step in range(3)] == [
        *made_texts(WHOLE[0], CHUNKED[0], WHOLE[0])
    ]


def made_texts(*texts: str) -> list[str]:
    return [str(StrategyShape.parse(text)) for text in texts]


def test_the_shapes_of_the_wider_space() -> None:
    assert [str(shape) for shape in wider_shapes(TABLE)] == ["pp2/v", "tp2pp2/v"]
    assert [str(shape) for shape in wider_shapes(TABLE, num_layers=3)] == ["pp2/list", "tp2pp2/list"]
    assert [str(shape) for shape in wider_shapes(TABLE, ("1f1b", "list"))] == ["pp2/list", "tp2pp2/list"]
    assert wider_shapes(TABLE, ("1f1b",)) == ()


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
@given(LENGTHS, st.integers(0, 3), st.sampled_from(["compiled", "pure"]))
def test_what_no_strategy_holds_is_planned_with_layers_computed_again(lengths: list[int], seed: int, way: str) -> None:
    """Within the room of every stage and not below the bound; a batch that fits else is planned as ever."""
    made, none = (planner(CHUNKED[1:], seed=seed, layers=layers, kernels=way) for layers in (12, 0))
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
@given(LENGTHS, st.integers(0, 3))
def test_what_fits_without_is_hardly_planned_worse_where_layers_may_be_computed_again(
    lengths: list[int], seed: int
) -> None:
    made, none = (planner(CHUNKED, seed=seed, layers=layers) for layers in (12, 0))
    fitting = [min(length, none.max_length) for length in lengths]
    assert plan(made, fitting).predicted_ms <= 1.02 * plan(none, fitting).predicted_ms


def test_a_strategy_that_holds_a_sequence_by_computing_layers_again_is_a_candidate_beside_others() -> None:
    def changed(cost: SchemeCost) -> SchemeCost:
        if cost.scheme == ParallelScheme(2):
            return replace(cost, b=3.0 * cost.b)
        return replace(cost, max_length=64) if cost.scheme == ParallelScheme(2, 2) else cost

    made = planner(("4*tp2", "2*tp2pp2/v"), CostTable(tuple(map(changed, TABLE.costs))), layers=12)
    found = plan(made, [180, 180, 40, 30])
    assert found.strategy == "2*tp2pp2/v"
    assert found.recomputed > 0.0


def test_a_job_that_computes_all_layers_again_has_none_left_for_that() -> None:
    shares = Shares(Shares.usual().forward, Shares.usual().weight, recomputed=1.0)
    table = CostTable(tuple(replace(cost, shares=shares) for cost in TABLE.costs))
    assert planner(CHUNKED, table, layers=12).max_length == planner(CHUNKED, table, layers=0).max_length


def test_a_sequence_that_is_most_of_a_pipelines_work_is_cut_as_if_it_were_the_first() -> None:
    """What suits a typical pipeline of the batch does not suit it."""
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    space = ChunkedSpace(table, [StrategyShape.parse("2*tp8pp4/v")], slices=True, layers=60)
    kernel, batch, lone = kernels.compiled(), space.batch([120_000, *[700] * 100]), np.array([0])
    fresh, probed = (PipelineTimes(space, kernel, batch, tries=1 << 20, seed=0) for _ in range(2))
    probed.probe(0, space.share(batch, 64), batch.items.work[0])
    assert probed.timed(0, lone).ms == fresh.timed(0, lone).ms
