"""Jobs whose ranks have devices of two classes, made up by hydra.cluster; the cases called "mixed" are such jobs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.cases import CASES
from tests.support.equivalence import MIXED_COSTS, compare
from tests.support.small_job import small_engine
from tests.support.strict import Rules

CLUSTER = [{"ranks": 2, "device": "slow"}, {"ranks": 2, "device": "fast"}]
STRATEGIES = ["(tp2[0:1]@slow > tp2[1:4]@fast)", "2*(tp1[0:1]@slow > tp1[1:4]@fast)", "tp2@slow + 2*tp1@fast"]


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["mixed", "mixed, two pipelines"])
def test_stages_of_two_classes_break_no_rule_of_nccl(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    case = replace(case, steps=2, tokens_per_step=250, lengths=tuple(-(-length // 4) for length in case.lengths))
    assert compare(case, strict=Rules(blocking=True)).missed(case.aims, case.name) == []


@pytest.mark.drawn
def test_each_class_is_given_work_by_its_own_speed() -> None:
    """Two ranks of tp2 on the slow class have less than one of tp1 on the fast one. A digest knows the cluster."""

    def train(rank: int, cluster: list[Any]) -> tuple[str, float, list[tuple[str, int]]]:
        engine = small_engine(rank, strategies=STRATEGIES[2:], cluster=cluster, cost_table=str(MIXED_COSTS))
        for _ in range(2):
            engine.train_batch()
        last = engine.last_step
        assert last is not None
        plan = StepPlan.from_json(last.plan, "the step's plan")
        tokens = [
            (str(one.shape), sum(batch.num_tokens for batch in one.microbatches)) for one in plan.phases[0].pipelines
        ]
        found = last.plan_digest, last.loss, tokens
        engine.destroy()
        return found

    (digest, loss, tokens), *others = run_ranks(train, 4, CLUSTER)
    assert all(other[:2] == (digest, loss) for other in others)
    slow, *fast = (count for _, count in tokens)
    assert min(fast) > slow, tokens
    (other, same, _), *_ = run_ranks(train, 4, CLUSTER[::-1])
    assert other != digest
    assert same == pytest.approx(loss, rel=1e-5)


@pytest.mark.drawn
def test_strategies_are_proposed_for_the_classes() -> None:
    def train(rank: int) -> tuple[tuple[str, ...], list[float], str]:
        engine = small_engine(rank, strategies="auto", choose="best", cluster=CLUSTER, cost_table=str(MIXED_COSTS))
        losses = [engine.train_batch().item() for _ in range(2)]
        found = tuple(map(str, engine.crew.prepared.strategies)), losses, engine.last_step.plan_digest
        engine.destroy()
        return found

    first, *others = run_ranks(train, 4)
    assert others == [first] * 3
    strategies, losses, _ = first
    assert len(strategies) > 2
    assert all("@slow" in one and "@fast" in one for one in strategies)

    def alike(rank: int) -> list[float]:
        engine = small_engine(rank, strategies=["2*tp2"], choose="best")
        losses = [engine.train_batch().item() for _ in range(2)]
        engine.destroy()
        return losses

    assert losses == pytest.approx(run_ranks(alike, 4)[0], rel=1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("hydra", "words"),
    [
        ({"cluster": CLUSTER, "strategies": STRATEGIES}, "devices of 2 classes.*measure a table on a device of each"),
        ({"cluster": CLUSTER, "strategies": ["tp2@slow + tp2@quick"], "cost_table": ...}, "class 'quick', but the job"),
        ({"cluster": CLUSTER, "strategies": ["2*tp2"], "cost_table": ...}, "stage 0 of pipeline tp2 names no class"),
        ({"cluster": CLUSTER, "strategies": ["tp2@slow + tp1@slow + tp1@fast"], "cost_table": ...}, "3 of slow, of "
         "which the job has 2; 1 of fast"),
        ({"cluster": CLUSTER, "strategies": STRATEGIES, "cost_table": "slow"}, "no costs of devices of class 'fast'"),
        ({"cluster": CLUSTER, "strategies": ["sp2@slow + (tp1@fast > tp1@fast)"], "cost_table": {"slow": ...}},
         "class 'slow' and not of|of the class 'fast' and not of 'slow'"),
        ({"cluster": [{"ranks": 4}], "strategies": STRATEGIES[:1]}, "all devices of the job are alike"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_cluster_is_refused_on_all_ranks(
    hydra: dict[str, Any], words: str, tmp_path: Path
) -> None:
    own = json.loads(MIXED_COSTS.read_text())
    own["schemes"] = [row for row in own["schemes"] if row["scheme"].endswith("@slow")]
    (tmp_path / "slow.json").write_text(json.dumps(own))
    table = hydra.get("cost_table")
    if table is ...:
        hydra = hydra | {"cost_table": str(MIXED_COSTS)}
    elif table == "slow":
        hydra = hydra | {"cost_table": str(tmp_path / "slow.json")}
    elif table is not None:
        hydra = hydra | {"cost_table": {"slow": str(MIXED_COSTS)}}

    def start(rank: int) -> str:
        with pytest.raises((ConfigError, PlanError)) as refused:
            small_engine(rank, choose="best", **hydra)
        return str(refused.value)

    for refusal in run_ranks(start, 4):
        assert re.search(words, refusal, re.DOTALL), refusal
