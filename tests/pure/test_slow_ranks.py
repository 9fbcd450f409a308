"""Plans count with slow ranks: their pipelines get less, and each plan says what it counted with."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.costs.slow_ranks import NONE, SlowRanks
from ds_hydra.costs.table_file import TableFile, read_table, read_table_file, table_record
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions, PlanRecipe
from ds_hydra.report.stragglers import StageTime, Stragglers
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster

CLASSES = ("tp1@slow", "tp1@fast")
COSTS = tuple(
    SchemeCost(PipelineShape.parse(text).cost_key, 1e-6, 0.1, 2.0, 4000, 30, Shares.usual())
    for text in ("tp1", "tp2", "pp2", "tp2pp2", "pp4", *CLASSES)
)
_DRAWN = random.Random(1)
LENGTHS = [_DRAWN.randrange(20, 900) for _ in range(120)]


def table(**slow: float) -> CostTable:
    """Ranks as "r3", with their paces."""
    return CostTable(COSTS, "made up", SlowRanks(tuple((int(rank[1:]), pace) for rank, pace in slow.items())))


def plan_of(text: str, costs: CostTable, **options: object) -> StepPlan:
    planner = Planner(costs, [StrategyShape.parse(text)], PlannerOptions(kernels="compiled", **options))  # type: ignore[arg-type]
    plan = planner.plan(0, range(len(LENGTHS)), LENGTHS)
    validate_plan(plan, CostTable(COSTS), planner.num_ranks)  # it states all that its times follow from
    return plan


@pytest.mark.parametrize(
    ("text", "paces"),
    [
        ("8*tp1", [(), (), (), (1.5,), (), (2.0,), (), ()]),
        ("2*tp2 + pp4", [(), (1.5,), (1.0, 2.0, 1.0, 1.0)]),
        ("tp2pp2 + 2*pp2/list", [(1.0, 1.5), (1.0, 2.0), ()]),
        ("(tp2[0:3] > tp2[3:7]) + 4*tp1", [(1.0, 1.5), (), (2.0,), (), ()]),
    ],
)
def test_a_stage_is_as_slow_as_its_slowest_rank(text: str, paces: list[tuple[float, ...]]) -> None:
    slow = SlowRanks(((3, 1.5), (5, 2.0)))
    assert list(slow.of(StrategyShape.parse(text))) == paces
    assert NONE.of(StrategyShape.parse(text)) == ((),) * len(paces)


def test_where_devices_differ_the_cluster_says_which_ranks_a_stage_stands_on() -> None:
    slow = SlowRanks(((2, 1.5),), Cluster((2, 2), ("slow", "fast", "fast", "slow")))
    assert slow.of(StrategyShape.parse("2*tp1@slow + 2*tp1@fast")) == ((), (), (), (1.5,))
    assert SlowRanks.of_record(json.loads(json.dumps(slow.to_record()))) == slow


@pytest.mark.parametrize("text", ["4*tp1", "2*tp2", "2*pp2", "2*pp2/list", "2*pp2/v", "tp2 + 2*tp1"])
@pytest.mark.parametrize("pace", [1.2, 2.0])
def test_the_pipeline_of_a_slow_rank_gets_less(text: str, pace: float) -> None:
    even, uneven = plan_of(text, table()), plan_of(text, table(r1=pace))
    tokens = [[sum(b.num_tokens for b in one.microbatches) for one in plan.pipelines] for plan in (even, uneven)]
    share = 1.0 / len(even.pipelines)  # all cost the same
    (at,) = [index for index, one in enumerate(uneven.pipelines) if one.paces]
    assert tokens[1][at] < tokens[0][at]
    assert uneven.predicted_ms == pytest.approx(even.predicted_ms / (1.0 - share + share / pace), rel=0.04)
    assert uneven.gap < 0.05
    if "/" not in text:
        known = plan_of(text, table())
        unknown = max(
            simulate_pipeline(replace(one, paces=paces), CostTable(COSTS))
            for one, paces in zip(known.pipelines, table(r1=pace).slow.of(known.phases[0].shape), strict=True)
        )
        won = (unknown - uneven.predicted_ms) / (unknown - even.predicted_ms)
        assert won > 0.9 * (1 - share)


def test_a_plan_states_its_paces_and_is_read_back() -> None:
    plan = plan_of("2*pp2", table(r2=1.25))
    assert [one.paces for one in plan.pipelines] == [(), (1.25, 1.0)]
    assert StepPlan.from_json(plan.to_json()) == plan
    without = plan_of("2*pp2", table())
    assert "paces" not in without.to_json()
    assert plan.digest() != without.digest()
    for wrong in ([1.25], [0.5, 1.0], "2", [True, 1.0], [1e9, 1.0]):
        record = json.loads(plan.to_json())
        record["phases"][0][1]["paces"] = wrong
        with pytest.raises(ValueError, match=r"pace|times as long"):
            StepPlan.from_json(json.dumps(record))


def test_costs_are_read_back_with_slow_ranks_and_a_users_table_names_none(tmp_path: object) -> None:
    costs = table(r1=1.25)
    assert read_table(table_record(costs), "a recipe") == costs
    assert "slow" not in table_record(table())
    recipe = PlanRecipe(costs, (StrategyShape.parse("2*tp1"),), PlannerOptions(kernels="compiled"))
    assert PlanRecipe.of_text(recipe.text) == recipe
    assert recipe.digest != replace(recipe, table=table()).digest
    path = f"{tmp_path}/costs.json"
    TableFile(costs).save(path)
    with pytest.raises(ConfigError, match='which ranks are "slow" is what a job finds out'):
        read_table_file(path)
    record = table_record(costs) | {"slow": {"paces": [[1, 0.5]]}}
    with pytest.raises(ConfigError, match="how many times as long"):
        read_table(record, "a recipe")


def test_paced_costs_of_stages_that_differ_drain_by_their_own_times() -> None:
    cost = SchemeCost(ParallelScheme(1, 2), 0.0, 1.0, 0.0, 100, stages=(0.5, 1.0))
    assert cost.paced(()) is cost
    assert (cost.paced((2.0, 1.0)).b, cost.paced((2.0, 1.0)).stages) == (1.0, ())
    assert (cost.paced((4.0, 1.0)).b, cost.paced((4.0, 1.0)).stages) == (2.0, (1.0, 0.5))


def step(pace: float) -> list[StageTime]:
    return [StageTime("a", (rank,), 10.0, 10.0 * (pace if rank == 1 else 1.0)) for rank in range(4)]


def test_a_pace_follows_the_rank_and_goes_on_from_a_checkpoint() -> None:
    watch = Stragglers()
    seen = []
    for pace in [1.0] * 12 + [1.2] * 20 + [2.0] * 20 + [1.0] * 20:
        watch.observe(step(pace))
        seen.append(dict(watch.paces).get(1, 1.0))
        watch = Stragglers(state=json.loads(json.dumps(watch.state())))
    assert seen[:12] == [1.0] * 12
    assert list(dict.fromkeys(seen)) == [1.0, 1.2, 2.0]
    assert seen.index(1.2) < 12 + 12
    assert seen.index(2.0) < 32 + 12
    assert seen[52 + 8 :] == [1.0] * 12
    bad: list[dict[str, Any]] = [
        {"ratios": [], "paces": [[1, "2"]]}, {"ratios": [[0, ["x"]]], "paces": []}, {"ratios": []},
    ]  # fmt: skip
    for wrong in bad:
        with pytest.raises((KeyError, ValueError, TypeError)):
            Stragglers(state=wrong)
