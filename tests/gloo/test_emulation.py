"""The emulated cluster: times worked out by hand, steps whose sums are right, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest

from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.emulate.cluster import EmulatedStep, emulate
from ds_hydra.pipe.model_plan import ParamSpec, ShardRule
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, save_plans
from ds_hydra.simulate.links import Speed
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.emulated_job import BUCKET_BYTES, emulated_job, square_model
from tests.support.planner_cases import room_for_pushes

MIXED = ("tp2 + pp2", "2*pp2", "pp4", "4*tp1", "2*sp2", "tp2sp2", "tp2pp2", "pp4/zb-h1", "pp4/list", "tp2pp2/v")
WIDE = 10**9  # features, beside which no parameter counts
QUARTER_A_MS = BUCKET_BYTES / 4 / 1e-3  # bytes/s: a rank's part of a bucket takes 1 ms
# A rank's norm and its word on the model are 16 bytes, which go round in three hops.
NORM_MS = 3 * 16 / (QUARTER_A_MS / 1e3)


def first_step_ms(*args: object, **kwargs: object) -> float:
    (step,) = emulate(emulated_job(*args, **kwargs), 1)[0]  # type: ignore[arg-type]
    return 1e3 * step.step_s


def test_two_stages_and_two_micro_batches() -> None:
    """Stage 0 runs F0 0..1, F1 1..2, B0 4..6, B1 7..9; stage 1 runs F0 1..2, B0 2..4, F1 4..5, B1 5..7."""
    assert first_step_ms("2*pp2") == pytest.approx(9.0)


def test_a_split_backward_fills_the_wait_with_weight_gradients() -> None:
    """Stage 1 runs F0 1..2, I0 2..3, F1 3..4, I1 4..5, W0 and W1 until 7; stage 0 I0 3..4, W0, I1 5..6, W1 6..7."""
    assert first_step_ms("2*pp2/zb-h1") == pytest.approx(7.0)


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["pp4/list", "2*pp2/list", "2*pp2/v"])
def test_orders_made_from_costs_take_what_was_simulated(strategy: str) -> None:
    job = emulated_job(strategy)
    (step,) = emulate(job, 1)[0]
    assert not step.fault
    assert Simulator(job.cluster).step(step.plan).step_s == pytest.approx(step.step_s, rel=1e-3)  # whole microseconds
    assert step.plan.predicted_ms == pytest.approx(1e3 * step.step_s, rel=1e-3), "messages leave in time"


def test_a_measured_table_gives_each_stage_its_own_time_and_the_update_its() -> None:
    """Stage 1 is twice as slow as stage 0, which waits for it: F0 0..1, F1 1..2, B0 7..9, B1 13..15.

    Stage 1 runs F0 1..3, B0 3..7, F1 7..9, B1 9..13. A step begins with 5 ms, and each rank updates 6,144 elements.
    """
    stages = [{"index": index, "num_layers": 2, "fit": {"b": 1.0 + index}} for index in range(2)]
    job = emulated_job("2*pp2")
    step_costs = {"fixed_ms": 5.0, "update_ms_per_element": 1e-3}
    found = replace(job.cluster.found, measured={"pp2": {"stages": stages}}, step=step_costs)
    job = replace(job, cluster=replace(job.cluster, found=found))
    (step,) = emulate(job, 1)[0]
    assert 1e3 * step.step_s == pytest.approx(5.0 + 15.0 + 6.144)
    assert Simulator(job.cluster).step(step.plan).step_s == pytest.approx(step.step_s)


def test_messages_take_their_wire_time() -> None:
    """Stage 1 has activation 0 at 1.5 and computes until 4.5. Then it sends gradient 0 while it receives activation 1.

    Activation 1 has long been there, but the messages of a slot are waited for together: so it goes on at 5, and
    computes until 8. Stage 0 has gradient 1 at 8.5 and computes until 10.5.
    """
    wire_ms = 0.5
    speed = Speed(0.0, 3 * WIDE * 2 / (wire_ms / 1e3))
    assert first_step_ms("2*pp2", hidden=WIDE, inside=speed) == pytest.approx(9.0 + 3 * wire_ms)


def test_every_hop_takes_the_latency() -> None:
    """Pulls of two steps, two messages, the last push of two, whose trade is begun when that of the layer before has
    come, and a norm that goes round in three hops."""
    latency_ms = 0.25
    assert first_step_ms("2*pp2", inside=Speed(latency_ms / 1e3, 1e30)) == pytest.approx(9.0 + 10 * latency_ms)


def test_one_slow_link() -> None:
    """Four stages on two nodes: one micro-batch computes 12 ms, and crosses to the other node and back."""
    wire_ms = 2.0
    slow = Speed(0.0, 3 * WIDE * 2 / (wire_ms / 1e3))
    crossing = first_step_ms("pp4", hidden=WIDE, between=slow, node_size=2, tokens=3)
    assert crossing == pytest.approx(12.0 + 2 * wire_ms, rel=1e-4)


def test_pulls_and_pushes_queue_at_ports() -> None:
    """Four replicas: a quarter of each bucket comes from each of three peers, 1 ms each, so a bucket takes 3 ms.

    The six buckets are there at 3, 6, 9, 12, 15 and 18. A layer computes 0.25 ms forward and 0.5 backward; the last
    bucket, the head, decides: backward begins at 18, and six pushes of 3 ms each leave one after the other.
    """
    speed = Speed(0.0, QUARTER_A_MS)
    assert first_step_ms("4*tp1", inside=speed) == pytest.approx(18.0 + 18.0 + NORM_MS)


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["4*tp1", "2*pp2", "2*tp2", "tp2pp2/v"])
def test_pushes_that_wait_for_memory_take_what_was_simulated(strategy: str) -> None:
    """Room for one push, and for all, of which the first takes longer."""
    seconds = []
    for room in (1, 1 << 30):
        job = emulated_job(strategy, inside=Speed(2e-4, QUARTER_A_MS), token_ms=2.0)
        with room_for_pushes(room):
            (step,) = emulate(job, 1)[0]
            assert not step.fault
            assert Simulator(job.cluster).step(step.plan).step_s == pytest.approx(step.step_s, rel=1e-3)
        seconds.append(step.step_s)
    assert seconds[0] >= seconds[1]
    assert seconds[0] > 1.01 * seconds[1] or strategy == "4*tp1", "masters of 4*tp1 get nothing but what twins trade"


def test_computing_hides_pulls() -> None:
    """Layers of 4 ms forward: the first begins at 6, when its bucket has followed the embedding's, and none waits."""
    speed = Speed(0.0, QUARTER_A_MS)
    # Backwards of 8 ms a layer hide all pushes but the last layer's and the embedding's.
    assert first_step_ms("4*tp1", inside=speed, token_ms=16.0) == pytest.approx(6.0 + 16.0 + 32.0 + 6.0 + NORM_MS)


@pytest.mark.drawn
def test_every_token_counts_once_whatever_the_strategy() -> None:
    job = emulated_job(*MIXED, inside=Speed(1e-5, 1e9), between=Speed(1e-4, 1e8), node_size=2)
    runs = emulate(job, len(MIXED))
    assert [step.plan.strategy for step in runs[0]] == list(MIXED)
    assert [step.fault for step in runs[0]] == [""] * len(MIXED)
    assert {step.counted_norm for step in runs[0]} == {math.sqrt(6 * 48 * 85)}  # six weights of 48 x 85 ones
    # Ranks agree on every figure, and a second run on every bit.
    assert all(figures(run) == figures(runs[0]) for run in [*runs, *emulate(job, len(MIXED))])


def test_experts_of_all_ranks_of_a_stage_count_once() -> None:
    job = emulated_job("sp4ep4", "tp2ep2 + sp2ep2", "tp2sp2ep4", "4*tp1", "sp2ep2pp2/zb-h1")
    plan = square_model(4)
    stacks = [ParamSpec(f"layers.{i}.experts", (8, 16, 32), ShardRule(0, by_width=(1, 1))) for i in range(4)]
    names = [frozenset((*plan.layers[i], stacks[i].name)) for i in range(4)]
    buckets = [replace(b, params=(*b.params, stacks[i])) for i, b in enumerate(plan.buckets[1:-1])]
    plan = replace(
        plan, buckets=(plan.buckets[0], *buckets, plan.buckets[-1]), layers=tuple(names), experts=(8,), no_ep=""
    )
    row = job.cluster.table.costs[0]
    schemes = [ParallelScheme.parse(text) for text in ("sp4ep4", "tp2ep2", "sp2ep2", "tp2sp2ep4", "tp1", "sp2ep2pp2")]
    found = TableFile(CostTable(tuple(replace(row, scheme=scheme) for scheme in schemes)))
    job = replace(job, cluster=replace(job.cluster, plan=plan, found=found))
    assert [step.fault for step in emulate(job, 5)[0]] == [""] * 5


def figures(run: list[EmulatedStep]) -> list[tuple[float, ...]]:
    return [(*step.ended_s, step.loss, step.grad_norm) for step in run]


def test_a_table_without_a_needed_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="no entry for tp4, which the strategies use"):
        emulate(emulated_job("tp4"), 1)


def test_a_strategy_for_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="uses 2 ranks but the job has 4"):
        emulate(emulated_job("pp2"), 1)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="a job of 0 GPUs"):
        emulate(emulated_job("tp2 + pp2", num_ranks=0), 1)


def test_a_plan_that_does_not_fit_is_refused_by_all_ranks(tmp_path: Path) -> None:
    """Two sequences in one micro-batch hold 6 tokens, and MaxLen is 3."""
    job = emulated_job("4*tp1")
    (step,) = emulate(job, 1)[0]
    (phase,) = step.plan.phases
    first, second, *rest = phase.pipelines
    both = MicroBatchPlan((*first.microbatches[0].spans, *second.microbatches[0].spans))
    wrong = Phase((PipelinePlan(first.shape, (both,), 6.0), PipelinePlan(second.shape, (), 0.0), *rest))
    save_plans([replace(step.plan, phases=(wrong,), predicted_ms=6.0, lower_bound_ms=0.0)], tmp_path / "plans.jsonl")
    replayed = replace(job, choose="best", replay=str(tmp_path / "plans.jsonl"))
    with pytest.raises(PlanError, match="holds 6 tokens but MaxLen is 3"):
        emulate(replayed, 1)
