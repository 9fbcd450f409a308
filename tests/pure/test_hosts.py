"""What hosts of reinforcement learning do with rollouts, as `ds-hydra preview --rollouts` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds_hydra.commands import preview
from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.length_sources import read_lengths
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import PlannerOptions
from ds_hydra.simulate.hosts import (
    DEALT,
    EQUAL_COUNTS,
    EQUAL_TOKENS,
    SHARED,
    hosts_ways,
    in_equal_counts,
    in_equal_tokens,
)

LENGTHS = [9, 1, 1, 8, 2, 7, 3]


def test_ranks_get_equal_counts_in_the_order_drawn_or_equal_tokens() -> None:
    assert in_equal_counts(LENGTHS, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    dealt = in_equal_tokens(LENGTHS, 3)
    assert sorted(at for own in dealt for at in own) == list(range(len(LENGTHS)))
    assert sorted(sum(LENGTHS[at] for at in own) for own in dealt) == [10, 10, 11]


def test_every_way_runs_each_rollout_once_in_a_plan_that_is_valid() -> None:
    table, seen = CostTable.load(shipped("a800-7b")), set[str]()

    def step_ms(plan: StepPlan, costs: CostTable) -> float:
        validate_plan(plan, costs, 16)
        assert sorted(plan.sequence_ids) == list(range(len(plan.lengths)))
        seen.add(plan.strategy)
        return plan.predicted_ms

    batches = [[16_384, *[300] * 40, 9_000, 2_000], [500] * 60]
    ways = hosts_ways(table, 16, batches, 16_384, PlannerOptions(kernels="compiled"), step_ms)
    assert tuple(ways) == (EQUAL_COUNTS, EQUAL_TOKENS, SHARED)
    assert any("sp" in strategy for strategy in seen)
    means = [float(ways[name].step_ms.mean()) for name in ways]
    assert means == sorted(means, reverse=True), "each knows more of the step than the one before it"


def test_the_shipped_rollouts_have_the_quantiles_that_they_are_fitted_to() -> None:
    lengths = read_lengths(shipped("rollouts"), 32_768).lengths
    assert np.percentile(lengths, 75) == pytest.approx(8_192, rel=0.02)
    assert np.median(lengths) == pytest.approx(4_202, rel=0.03)
    assert (lengths == 32_768).mean() == pytest.approx(0.019, abs=0.002), "what is longer ends at the limit"


def test_preview_shows_what_hosts_do_with_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--cost-table a800-7b --rollouts --gpus 16 --tokens 150000 --context 32768 --steps 2 --tp-across-nodes"
    found = tmp_path / "found.json"
    assert preview.main([*command.split(), "--strategies", "2*tp8", "4*tp4", "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert all(f"rollouts dealt out in {name}" in shown for name in DEALT)
    assert SHARED in shown
    assert {name: len(times) for name, times in json.loads(found.read_text())["hosts_ms"].items()} == dict.fromkeys(
        (*DEALT, SHARED), 2
    )
