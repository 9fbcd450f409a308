"""The emulated cluster, devices of two classes, slow ranks, and times on a device with a queue."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shape_costs import used_schemes
from ds_hydra.costs.shares import Shares
from ds_hydra.emulate.cluster import EmulatedJob, EmulatedStep, emulate
from ds_hydra.pipe.model_plan import ParamSpec, ShardRule
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan, save_plans
from ds_hydra.report import calibration
from ds_hydra.simulate.job import SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator
from ds_hydra.step.strategy_runtime import PeakMemory
from ds_hydra.testing import float64_throughout, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.cases import CASES
from tests.support.device_steps import (
    EACH_S,
    EXPECTED_STAGE_S,
    FakeDevice,
    FakeDeviceClock,
    Step,
    engine_steps,
    stage_times,
)
from tests.support.emulated_job import BUCKET_BYTES, emulated_job, square_model
from tests.support.equivalence import MIXED_COSTS, compare
from tests.support.planner_cases import room_for_pushes
from tests.support.small_job import same, small_engine, small_model, whole_state
from tests.support.strict import Rules

# --- The emulated cluster: times worked out by hand, steps whose sums are right, and what it refuses.
MIXED = ("tp2 + pp2", "2*pp2", "pp4", "4*tp1", "2*sp2", "tp2sp2", "tp2pp2", "pp4/zb-h1", "pp4/list", "tp2pp2/v")
WIDE = 10**9  # features, beside which no parameter counts
QUARTER_A_MS = BUCKET_BYTES / 4 / 1e-3  # bytes/s: a rank's part of a bucket takes 1 ms
# A rank's norm and its word on the model are 16 bytes, which go round in three hops.
NORM_MS = 3 * 16 / (QUARTER_A_MS / 1e3)


HALF_MS, TWO_MS = (Speed(0.0, 3 * WIDE * 2 / (ms / 1e3)) for ms in (0.5, 2.0))  # a micro-batch's hidden states take it
QUARTERS = Speed(0.0, QUARTER_A_MS)


@pytest.mark.parametrize(
    ("strategy", "job", "ms"),
    [
        # Stage 0 runs F0 0..1, F1 1..2, B0 4..6, B1 7..9; stage 1 runs F0 1..2, B0 2..4, F1 4..5, B1 5..7.
        ("2*pp2", {}, 9.0),
        # Stage 1 runs F0 1..2, I0 2..3, F1 3..4, I1 4..5, W0 and W1 until 7; stage 0 I0 3..4, W0, I1 5..6, W1 6..7.
        ("2*pp2/zb-h1", {}, 7.0),
        # Stage 1 has activation 0 at 1.5 and computes until 4.5. Then it sends gradient 0 while it receives activation
        # 1. That has long been there, but the messages of a slot are waited for together: so it goes on at 5, and
        # computes until 8. Stage 0 has gradient 1 at 8.5 and computes until 10.5.
        ("2*pp2", {"hidden": WIDE, "inside": HALF_MS}, 9.0 + 3 * 0.5),
        # Pulls of two steps, two messages, the last push of two, whose trade is begun when that of the layer before has
        # come, and a norm that goes round in three hops.
        ("2*pp2", {"inside": Speed(0.25e-3, 1e30)}, 9.0 + 10 * 0.25),
        # Four stages on two nodes: one micro-batch computes 12 ms, and crosses to the other node and back.
        ("pp4", {"hidden": WIDE, "between": TWO_MS, "node_size": 2, "tokens": 3}, 12.0 + 2 * 2.0),
        # Four replicas: a quarter of each bucket comes from each of three peers, 1 ms each, so a bucket takes 3 ms. The
        # six buckets are there at 3, 6, 9, 12, 15 and 18. A layer computes 0.25 ms forward and 0.5 backward; the last
        # bucket, the head, decides: backward begins at 18, and six pushes of 3 ms each leave one after the other.
        ("4*tp1", {"inside": QUARTERS}, 18.0 + 18.0 + NORM_MS),
        # Layers of 4 ms forward: the first begins at 6, when its bucket has followed the embedding's, and none waits.
        # Backwards of 8 ms a layer hide all pushes but the last layer's and the embedding's.
        ("4*tp1", {"inside": QUARTERS, "token_ms": 16.0}, 6.0 + 16.0 + 32.0 + 6.0 + NORM_MS),
    ],
)
def test_a_step_takes_what_is_worked_out_by_hand(strategy: str, job: dict[str, Any], ms: float) -> None:
    (step,) = emulate(emulated_job(strategy, **job), 1)[0]
    assert 1e3 * step.step_s == pytest.approx(ms, rel=1e-4 if "between" in job else 1e-6)


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


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["tp8/list", "pp2tp4/list", "pp4tp2/v", "tp4sp2/list"])
@pytest.mark.parametrize("longest", [1 << 17, 1 << 20])
def test_steps_of_long_sequences_take_on_an_emulated_node_what_is_simulated(longest: int, strategy: str) -> None:
    """An 8B model on eight GPUs; a micro-batch holds up to a half of the long sequence, beside many short ones."""
    shape, shapes = ModelShape(4096, 32, 32, 8, 14336, 128256, 8_030_000_000), [StrategyShape.parse(strategy)]
    made = analytic_cost_table(shape, used_schemes(shapes), longest, device_flops=4e14, link_bytes_per_second=3e11)
    costs = [replace(cost, max_length=longest // 2, shares=Shares.usual())
             for cost in made.costs]  # fmt: skip
    cluster = SimulatedJob(llama_plan(shape), shape.hidden, TableFile(CostTable(tuple(costs))), LinkModel(8), 8)
    lengths = (longest, *(2000 + 37 * place for place in range(60)), *(500 + place for place in range(100)))
    (step,) = emulate(EmulatedJob(cluster, (strategy,), lengths, sum(lengths)), 1)[0]
    assert not step.fault
    spans = [span for one in step.plan.phases[0].pipelines for batch in one.microbatches for span in batch.spans]
    assert any(span.start and span.stop == longest for span in spans), "the long one is cut"
    assert step.step_s == pytest.approx(Simulator(cluster).step(step.plan).step_s, rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "words"),
    [("tp4", 4, "no entry for tp4, which the strategies use"), ("pp2", 4, "uses 2 ranks but the job has 4"),
     ("tp2 + pp2", 0, "a job of 0 GPUs")],
)  # fmt: skip
def test_what_no_cluster_could_run_is_refused(strategy: str, num_ranks: int, words: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=words):
        emulate(emulated_job(strategy, num_ranks=num_ranks), 1)


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


# --- Jobs whose ranks have devices of two classes, made up by hydra.cluster; the cases called "mixed" are such
# jobs.
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


# --- A rank that computes slowly is told by rank 0 in one line, within twenty steps of a real job, and plans
# follow.
SLOW, PACE, RECOVERS = 2, 6.0, 22  # the rank, how slow it is, and the step from which on it is not
STEPS, SAVED = 36, 18


class Trained(NamedTuple):
    """What a rank saw of its job."""

    lines: list[str]
    plans: list[str]
    recipes: list[str]
    state: dict[str, Tensor]  # of masters, after the last step


def train(rank: int, folder: Path, mode: str, *, steps: int = STEPS, exact: bool = True, **block: Any) -> Trained:
    """A stage takes 0.8 ms a token besides, on the slow rank six times as much. It goes on from a checkpoint of the
    folder, if there is one."""
    calibration.APPLY_EVERY, calibration.EARLY, calibration.TRIED_AFTER = (
        1000,
        (),
        (),
    )  # a correction of all costs is no part of a plan
    forward, lines = CausalStage.forward, list[str]()
    engine: Any = None

    def sleeping(self: Any, hidden: Any, batch: Any) -> Any:
        slow = rank == SLOW and engine.global_steps < RECOVERS
        time.sleep(8e-4 * sum(batch.pack.lengths) * (PACE if slow else 1.0))
        return forward(self, hidden, batch)

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hydra").addHandler(handler)
    model = small_model().double() if exact else None
    exactly: Any = nullcontext() if model is None else float64_throughout(model)
    with exactly, mock.patch.object(CausalStage, "forward", sleeping):
        engine = small_engine(rank, model, strategies=["4*tp1"], cost_table=str(folder / "costs.json"),
                              cost_correction=mode, tokens_per_step=300, **block)  # fmt: skip
        plans, recipes = [], []
        while engine.global_steps < steps:
            engine.train_batch()
            plans.append(engine.last_step.plan)
            recipes.append(engine.last_step.planning_recipe)
            if block.get("checkpoint") and engine.global_steps == SAVED:
                engine.save_checkpoint(block["checkpoint"]["dir"])
        state = whole_state(engine)
        engine.destroy()
    told = [line for line in lines if "times as long as others" in line or "as fast as others" in line]
    return Trained(told, plans, recipes, state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With costs of what a stage takes: 0.8 ms a token, and some for a micro-batch of the small model."""
    TableFile(CostTable((SchemeCost(ParallelScheme(), 0.0, 0.8, 20.0, 1000),))).save(tmp_path / "costs.json")
    return tmp_path


def share(plan: str) -> float:
    """Of a step's tokens, those of the slow rank."""
    planned = StepPlan.from_json(plan)
    return sum(batch.num_tokens for batch in planned.pipelines[SLOW].microbatches) / planned.num_tokens


def trained(folder: Path, mode: str, **options: Any) -> list[Trained]:
    """By rank."""
    return run_ranks(partial(train, **options), 4, folder, mode, timeout=240)


@pytest.mark.drawn
def test_a_slow_rank_is_told_and_plans_give_it_less_until_it_recovers(folder: Path) -> None:
    applied, *others = trained(folder, "apply")
    (slow,) = [line for line in applied.lines if line.startswith(f"rank {SLOW} ") and "times as long" in line]
    assert slow.endswith("; the plans of the steps after the next one give it less")
    assert all(other.lines == [] and other.plans == applied.plans for other in others)
    paces = [max(StepPlan.from_json(plan).pipelines[SLOW].paces, default=1.0) for plan in applied.plans]
    known = next(step for step, pace in enumerate(paces) if pace > 1.0)
    assert known <= 20
    # Computing, which takes as long on all ranks, counts too, and the machine may be busy with other things.
    assert 1.5 < paces[known] < 1.25 * PACE
    assert paces[-1] < 0.5 * paces[known]

    def mean(plans: list[str]) -> float:
        return sum(map(share, plans)) / len(plans)

    before, after, again = (
        mean(applied.plans[part]) for part in (slice(known), slice(known, RECOVERS), slice(-6, None))
    )
    assert after < 0.75 * before
    assert again > 1.15 * after
    # Whatever plans are made by, the same is trained.
    told = trained(folder, "report")[0]
    assert not any(StepPlan.from_json(plan).pipelines[SLOW].paces for plan in told.plans)
    assert told.lines[0].endswith('; with hydra.cost_correction "apply" later plans give it less')
    masters = [name for name in applied.state if name.endswith("/master")]
    largest = max(float((told.state[name] - applied.state[name]).abs().max()) for name in masters)
    assert 0.0 < largest < 1e-9


@pytest.mark.long
def test_restarts_and_replays_are_equal_to_the_bit(folder: Path) -> None:
    job: Any = {"steps": SAVED + 2, "exact": False, "checkpoint": {"dir": str(folder / "saved"), "keep_last": None}}
    whole = trained(folder, "apply", **job)[0]
    assert StepPlan.from_json(whole.plans[-1]).pipelines[SLOW].paces
    # What it measures itself counts from the second step after it on.
    again = trained(folder, "apply", **job)[0]
    assert (again.plans, again.recipes) == (whole.plans[SAVED:], whole.recipes[SAVED:])
    assert same(again.state, whole.state)
    save_plans(map(StepPlan.from_json, whole.plans), plans := folder / "plans.jsonl")
    replayed = trained(folder, "off", steps=SAVED + 2, exact=False, replay=str(plans))[0]
    assert same(replayed.state, whole.state)


# --- Times of a step on a device with a queue: work is charged to who started it, in a stage and in a whole
# engine.
def test_a_stage_is_charged_its_kernels_and_its_waits() -> None:
    device = FakeDevice()
    assert stage_times(FakeDeviceClock(device), device) == pytest.approx(EXPECTED_STAGE_S, abs=1e-3)


def test_an_engines_work_is_charged_to_what_started_it() -> None:
    steps: list[Step] = run_ranks(engine_steps, 1)[0]
    for launched, stats, record, _ in steps:
        computing = launched["forward"] + launched["backward"]
        assert computing > 100 * EACH_S
        assert stats.compute_s == pytest.approx(computing, rel=0.01)
        assert stats.run_s == pytest.approx(computing, rel=0.05)
        assert stats.exposed_pull_s < 1.01 * launched["pull"]
        assert record.pipeline_ms == (1e3 * stats.run_s,)
    # The norm of a step, and the update of the step before: of the first step there is the norm only.
    first, second = steps
    assert 0 < first.record.optimizer_ms < second.record.optimizer_ms
    assert second.record.optimizer_ms == pytest.approx(1e3 * first.launched["optimizer"], rel=0.01)


def test_laps_of_a_step_can_be_kept() -> None:
    for step in run_ranks(engine_steps, 1)[0]:
        kinds = [kind for kind, _, _ in step.laps]
        batches = step.record.num_micro_batches[0]
        assert kinds.count("forward") == kinds.count("backward") == batches
        assert kinds.index("pull") < kinds.index("run") < kinds.index("forward")
        (run,) = ((begin, end) for kind, begin, end in step.laps if kind == "run")
        computing = [lap for lap in step.laps if lap[0] in ("forward", "backward")]
        assert all(run[0] <= begin < end <= run[1] for _, begin, end in computing)
        assert all(one[2] <= other[1] for one, other in pairwise(computing))


class FakePeak:
    """A peak that somebody else sets."""

    def __init__(self) -> None:
        self.bytes = 0

    def restart(self) -> None:
        self.bytes = 0

    def read(self) -> int:
        return self.bytes


def peaks(rank: int) -> list[int]:
    """What the records of three steps say, of which the second needs most."""
    engine = small_engine(rank, strategies=["tp1"])
    peak = engine.crew.stepper._peak = FakePeak()
    found: list[int] = []
    for needed in (300, 500, 200):

        def need(*_: Any, needed: int = needed) -> None:
            peak.bytes = max(peak.bytes, needed)

        engine.crew.update.compare = need  # called in each step
        engine.train_batch()
        found.append(engine.last_step.peak_memory_bytes)
    engine.destroy()
    return found


def test_peak_memory_is_of_one_step() -> None:
    assert run_ranks(peaks, 1)[0] == [300, 500, 200]


def test_the_peak_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 1), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: 7 if of == device else 0)
    peak = PeakMemory(device)
    peak.restart()
    assert (asked, peak.read()) == ([device], 7)
    assert PeakMemory(torch.device("cpu")).read() == 0
