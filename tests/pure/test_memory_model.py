"""Memory: published constants, a model's counts, layers computed again, rooms of profiling and composing."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ds_hydra.commands.profile import Request
from ds_hydra.costs.analytic import estimate_activations
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.memory import Activations, JobMemory, gibibytes, held_elements
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.actions import Action, Order, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, Schedule
from ds_hydra.pipe.schedules.simulate import TimedAction
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import UNITS, work_of
from ds_hydra.plan.step_plan import MicroBatchPlan, PipelinePlan, Span
from ds_hydra.planner.composing import ArenaRoom, room_beside
from ds_hydra.planner.cutting import longest_of
from ds_hydra.planner.exact import counts_to_strategy
from ds_hydra.profiling import stage_timer, survey
from ds_hydra.profiling.fit import SchemeEntry, make_ladder
from ds_hydra.profiling.links import Links
from ds_hydra.profiling.stage_timer import LocalGroup, Timing, step_costs, within_memory
from ds_hydra.profiling.survey import SIZES, RepeatBudget, Survey, message_sizes
from ds_hydra.simulate.pipeline import StageTimes, memory_over_time
from ds_hydra.zero_hetero.clock import HostClock
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.device_steps import FakeDevice, FakeDeviceClock, Queued
from tests.support.planner_cases import GIB
from tests.support.planner_cases import small_llama_job as job


# --- MaxLen by the published constants, and memory counted from a model's plan.
def test_states_follow_the_real_split() -> None:
    total = 2 * 1000 * 64 + 8 * 12 * 64 * 64
    alone = job(1).needs(ParallelScheme(), 0)
    assert alone.masters == 4 * total
    assert alone.optimizer == 2 * 4 * total
    assert alone.params == 2 * total
    assert alone.grads == 4 * (total + 1000 * 64)  # the first sum, of the head, has no gradients to lie among
    assert job(1, phases=True).needs(ParallelScheme(), 0).masters == 2 * 4 * total
    alone, copied = (job(2, copies=copies).needs(ParallelScheme(), 0) for copies in (False, True))
    more = copied.masters + copied.optimizer - alone.masters - alone.optimizer
    assert more == 16 * math.ceil(total / 2)  # another rank's masters, gradient and two moments
    for_update = job(1, update_bytes=8).needs(ParallelScheme(), 0)
    assert for_update.total(1) == for_update.states + 8 * total, "one token keeps less than an update takes"
    assert for_update.total(4000) == job(1).needs(ParallelScheme(), 0).total(4000), "when it is made they are gone"
    on_host = job(2, copies=True, copies_on_host=True).needs(ParallelScheme(), 0)
    more = on_host.masters + on_host.optimizer - alone.masters - alone.optimizer
    largest = max(bucket.numel for bucket in job(2).plan.buckets)
    assert more == 4 * math.ceil(total / 2) + 12 * math.ceil(largest / 2)  # the gradient, and one bucket's update
    away = job(2, run=1000).needs(ParallelScheme(), 0)
    assert away.masters == away.optimizer == 0
    assert away.host_states == 12 * math.ceil(total / 2) == alone.masters + alone.optimizer
    assert away.update == 12 * 3 * 1000, "three runs"
    assert job(2, run=total).needs(ParallelScheme(), 0).update == away.host_states, "no more than there is"
    assert away.total(4000) == alone.total(4000) - away.host_states, "when runs come activations are gone"
    saved = job(2, run=1000, saves=True).needs(ParallelScheme(), 0)
    assert saved.host_states == 2 * away.host_states
    assert saved.states == away.states
    held = job(2, copies=True, copies_on_host=True, saves=True).needs(ParallelScheme(), 0)
    assert held.host_states == 2 * away.host_states
    longest = job(2, device=2**30, run=1000).max_length(ParallelScheme())
    assert longest > job(2, device=2**30).max_length(ParallelScheme())
    assert job(2, device=2**30, run=1000, host_bytes=float(away.host_states)).max_length(ParallelScheme()) == longest
    assert job(2, device=2**30, run=1000, host_bytes=away.host_states - 1.0).max_length(ParallelScheme()) == 0
    shared = job(8).needs(ParallelScheme(2, 2), 0)
    assert shared.masters == 4 * total // 8
    assert shared.params == 2 * (1000 * 64 + 4 * 12 * 64 * 64) // 2  # embeddings and half of the layers, by tp


def together(memory: JobMemory, *texts: str) -> JobMemory:
    shapes = [StrategyShape.parse(text) for text in texts]
    return memory.together({s: place_strategy(s, memory.num_ranks, memory.plan.num_layers) for s in shapes})


def test_a_rank_keeps_room_for_the_most_demanding_candidate() -> None:
    alone, both = together(job(), "2*tp4"), together(job(), "2*tp4", "8*tp1")
    tp4, tp1 = ParallelScheme(4), ParallelScheme(1)
    assert (alone.needs(tp4, 0).params, alone.needs(tp4, 0).grads) == (
        job().needs(tp4, 0).params,
        job().needs(tp4, 0).grads,
    )
    assert both.needs(tp4, 0).params == both.needs(tp1, 0).params == 4 * alone.needs(tp4, 0).params
    assert both.needs(tp4, 0).scratch == alone.needs(tp4, 0).scratch, "what a step itself needs"
    assert both.needs(tp1, 0).scratch > both.needs(tp4, 0).scratch
    assert both.max_length(tp4) < alone.max_length(tp4)
    assert both.max_length(tp1) == job().max_length(tp1)


def test_contributions_are_counted_where_pipelines_differ() -> None:
    """Rank 1 of `tp4 + 4*tp1` receives its shard from rank 0, and the sum of the four others from one of them, in FP32.

    Under `2*tp4` a rank casts what it holds, gets as much of two ranks, and has the sum of half of it in FP32, which
    leaves for an owner; and it receives another sum, for its own shard.
    """
    mixed, uniform = together(job(), "tp4 + 4*tp1"), together(job(), "2*tp4")
    total = 2 * 1000 * 64 + 8 * 12 * 64 * 64
    share, held, gap = 4 * total // 8, 2 * total // 4, 4 * 64 * 10 * 8  # bytes; a gap per message and bucket
    for memory, expected in ((mixed, 2 * share), (uniform, 3 * held + share)):
        assert expected <= memory.needs(ParallelScheme(4), 0).scratch <= expected + gap
    narrow = replace(uniform, grad_bytes=2, _cache={}, _ranks={}).needs(ParallelScheme(4), 0)
    first = 4 * 1000 * 64 // 8  # bytes of the first sum, which lies behind the gradients in both
    assert narrow.grads - first == (uniform.needs(ParallelScheme(4), 0).grads - first) // 2
    assert narrow.scratch <= 2 * held + share + gap, "what is sent in its own type leaves from where it is"


def test_proposed_strategies_that_do_not_fit_together_are_left_out() -> None:
    from ds_hydra.engine.costs import without_the_largest

    table = CostTable(tuple(SchemeCost(ParallelScheme(tp), 1e-6, 0.1, 1.0, 4096) for tp in (1, 4)))
    texts = ("8*tp1", "2*tp4")
    roomy = together(job(), *texts)
    assert without_the_largest(roomy, table, 4096) is roomy
    need = roomy.fullest(ParallelScheme(4), 4096).total(4096)
    tight = together(job(device=0.9 * need / 0.95), *texts)
    assert tight.max_length(ParallelScheme(1)) >= 1
    assert [str(shape) for shape in without_the_largest(tight, table, 4096).strategies] == ["2*tp4"]
    assert without_the_largest(tight, table, 100) is tight, "short sequences have room beside both"


def test_max_length_is_the_most_that_fits_on_every_stage() -> None:
    memory = job(8, device=64 * 2**20)
    for scheme in (
        ParallelScheme(),
        ParallelScheme(2),
        ParallelScheme(1, 4),
        ParallelScheme(2, 2, 2),
        ParallelScheme(1, 1, 4),
    ):
        limit = memory.max_length(scheme)
        assert all(needs.total(limit) <= memory.capacity for needs in memory.stages(scheme))
        assert any(needs.total(limit + 1) > memory.capacity for needs in memory.stages(scheme))


def test_the_embeddings_gradient_counts_where_a_small_micro_batch_ends_beside_others() -> None:
    first, *others = job().stages(ParallelScheme(2, 4))
    assert (first.embeddings, {needs.embeddings for needs in others}) == (2 * 1000 * 64 // 2, {0})
    kept = first.per_token / first.alive
    assert first.held(100, 1) == first.states + math.ceil(100 * kept + first.embeddings), "whoever computes beside it"
    few, many = 1000, 10_000
    assert first.on_top(10, given_back=few) == first.embeddings - few
    assert first.on_top(many, given_back=many * kept) == many * first.transient


def test_the_gradient_of_a_tied_weight_is_there_three_times_at_the_end_of_a_backward() -> None:
    """That of the head, that of the embeddings and their sum, which autograd makes apart."""
    plan = job(1).plan
    tied = replace(job(1), plan=replace(plan, last=plan.last | plan.first)).needs(ParallelScheme(), 0)
    alone = job(1).needs(ParallelScheme(), 0)
    assert (tied.embeddings, tied.tied, alone.tied) == (2 * alone.embeddings, True, False)
    assert tied.on_top(1, given_back=100) == tied.head + 2 * alone.embeddings - 100
    assert not replace(job(2), plan=replace(plan, last=plan.last | plan.first)).needs(ParallelScheme(pp=2), 0).tied, (
        "on two ranks"
    )


@pytest.mark.parametrize("is_one", [True, False])
def test_a_forward_keeps_the_gradient_of_the_heads_weight_until_its_backward(is_one: bool) -> None:
    """Slices a0 and a1 and a whole sequence b: only a1 and, after it, b make theirs in the forward, so a0's is made
    while b's is there. Where head and loss are not one function, every backward makes its own."""
    kept = {(1, 1): Activations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
    memory = replace(job(1), activations=kept, plain_head=is_one)
    batches = [(Span(0, 0, 1),), (Span(0, 1, 2),), (Span(1, 0, 1),)]
    pipeline = PipelinePlan(PipelineShape.parse("tp1"), tuple(map(MicroBatchPlan, batches)), 1.0)
    done = [("forward", 0), ("forward", 1), ("backward", 1), ("forward", 2), ("backward", 0), ("backward", 2)]
    actions = tuple(TimedAction(Action(kind, number), 0.0, 0.0) for kind, number in done)  # type: ignore[arg-type]
    stage = place_strategy(StrategyShape.parse("tp1"), 1, 8).pipelines[0].stages[0]
    (_, states), *curve = memory_over_time(memory, pipeline, StageTimes(stage, 0, (), 0.0, (), 0.0, actions=actions))
    needs = memory.needs(ParallelScheme(), 0)
    blocks = sum(1000 * size for _, size in needs.blocks)  # the logits of one token
    made, last = needs.head + blocks, needs.embeddings
    again = max(made, last)
    assert needs.head > needs.embeddings > blocks
    if is_one:
        expected = [
            blocks,
            made,
            needs.embeddings + needs.head,
            made,
            needs.head + again,
            needs.head + needs.embeddings,
        ]
    else:
        expected = [made, made, again, made, again, again]
    assert [held - states for _, held in curve[::2]] == expected
    assert [held - states for _, held in curve[1::2]] == [is_one * one * needs.head for one in (0, 1, 0, 1, 1, 0)]


@pytest.mark.parametrize(("shape", "of_head"), [("pp2", 1), ("pp2/v", 0)])
def test_only_the_stage_that_ends_the_model_makes_its_head(shape: str, of_head: int) -> None:
    """Of a plain pipeline that is the last stage, of a V the first; costs have one key for both."""
    kept = {(1, 1): Activations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
    strategy = place_strategy(StrategyShape.parse(shape), 2, 8)
    memory = replace(job(2), activations=kept).together({StrategyShape.parse(shape): strategy})
    pipeline = PipelinePlan(PipelineShape.parse(shape), (MicroBatchPlan((Span(0, 0, 1),)),), 1.0)
    for index, stage in enumerate(strategy.pipelines[0].stages):
        forward = TimedAction(Action("forward", 0, len(stage.ranges) - 1), 0.0, 0.0)
        times = StageTimes(stage, index, (), 0.0, (), 0.0, actions=(forward,))
        (_, states), (_, held), _ = memory_over_time(memory, pipeline, times)
        assert (held - states >= memory.needs(ParallelScheme(pp=2), index).head > 0) == (index == of_head)


def test_a_stage_keeps_as_many_micro_batches_as_its_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_at_a_time(batches: Batches, num_stages: int) -> tuple[Order, ...]:
        return (slots_from_text(" ".join(f"F{m} B{m}" for m in range(len(batches))))[0],) * num_stages

    monkeypatch.setitem(SCHEDULES, "one-at-a-time", Schedule("one-at-a-time", one_at_a_time))
    usual, few = job().stages(ParallelScheme(pp=4)), job().stages(PipelineShape.parse("pp4/one-at-a-time"))
    assert [needs.per_token for needs in usual] == [(4 - i) * needs.per_token for i, needs in enumerate(few)]
    assert [(needs.logits, needs.head) for needs in (usual[0], usual[-1])] == [(0.0, 0), (1000.0, 4 * 1000 * 64)]
    with pytest.raises(PlanError, match="schedule 'none' is not known"):
        job().needs(PipelineShape.parse("pp4/none"), 0)


def test_a_split_backward_keeps_the_same_on_every_stage_but_what_no_weight_needs() -> None:
    usual, split = job().stages(ParallelScheme(pp=4)), job().stages(PipelineShape.parse("pp4/zb-h1"))
    one = [needs.per_token / (4 - index) for index, needs in enumerate(usual)]
    assert [needs.per_token for needs in split] == pytest.approx(
        [(4 - index + job().activations[1, 1].until_weight * index) * kept for index, kept in enumerate(one)]
    )
    both = [StrategyShape.parse("2*pp4"), StrategyShape.parse("2*pp4/zb-h1")]
    held = job().together({shape: place_strategy(shape, 8, job().plan.num_layers) for shape in both})
    assert [needs.per_token for needs in held.stages(ParallelScheme(pp=4))] == [needs.per_token for needs in split]


def test_a_sequence_in_slices_has_the_room_of_all_micro_batches_less_its_contexts() -> None:
    from ds_hydra.engine.costs import check_memory

    shares = Shares(Terms(0.3, 0.3, 0.3), Terms(0.0, 0.3, 0.1), context=0.25, recomputed=1.0)
    table = CostTable((SchemeCost(ParallelScheme(pp=4), 1e-6, 0.1, 1.0, 4096, 1, shares),))
    strategies = [StrategyShape.parse("2*pp4")]
    check_memory(table, job(), strategies, int(4 * 4096 / 1.25), "sequence 3 has", no_slices="")
    with pytest.raises(ConfigError, match=r"13108 tokens .* more than 13107 in slices of up to 4096.*keys and values"):
        check_memory(table, job(), strategies, 13108, "sequence 3 has", no_slices="")
    with pytest.raises(ConfigError, match=r"more than 4096 in one .*not cut: told\. In slices .* hold 13107 tokens"):
        check_memory(table, job(), strategies, 5000, "sequence 3 has", no_slices="told")
    tight = job(device=40 * 2**20)
    stages = tight.stages(ParallelScheme(pp=4))
    first = stages[0].held(100_000 * 1.25, 4096)
    assert first == stages[0].states + math.ceil(125_000 * stages[0].per_token / 4 + 4096 * stages[0].transient)
    most = max(needs.held(100_000 * 1.25, 4096) for needs in stages)
    with pytest.raises(ConfigError, match=rf"about {gibibytes(most)}, {gibibytes(most - tight.capacity)} more than"):
        check_memory(table, tight, strategies, 100_000, "sequence 3 has", no_slices="")
    # Where a layer keeps a fifth if it is computed again, all but one of a stage's layers may keep no more than that.
    again = CostTable((replace(table.costs[0], shares=replace(shares, recomputed=0.2)),))
    longest = int((4 * 4096 - 0.8 * 4096 / (job().plan.num_layers // 4)) / 0.45)
    check_memory(again, job(), strategies, longest, "sequence 3 has", no_slices="")
    with pytest.raises(ConfigError, match=rf"{longest + 1} tokens .* more than {longest} in slices .* computed again"):
        check_memory(again, job(), strategies, longest + 1, "sequence 3 has", no_slices="")


@pytest.mark.parametrize("schedule", ["1f1b", "list"])
def test_every_stage_has_the_room_that_plans_with_slices_may_fill(schedule: str) -> None:
    shape = PipelineShape.parse(f"pp4/{schedule}")
    cut = job(device=64 * 2**20, slices=True)
    limit = cut.max_length(shape)
    for needs in cut.stages(shape):
        assert needs.held(4 * limit, limit) <= cut.capacity
    whole = job(device=64 * 2**20)
    assert (whole.max_length(shape) > limit) == (schedule == "1f1b"), "a list order fills its room in any case"


def test_what_waits_for_weights_gradients_is_counted_as_it_was_measured() -> None:
    shape = PipelineShape.parse("pp4/zb-h1")
    figures = {key: replace(one, until_weight=0.5) for key, one in job().activations.items()}
    one = job().stages(ParallelScheme(pp=4))[-2].per_token / 2
    assert replace(job(), activations=figures).needs(shape, 2).per_token == pytest.approx((2 + 2 * 0.5) * one)


def test_estimated_shares_of_memory_are_those_of_the_layer() -> None:
    """7B Llama in BF16: 45.5 bytes a hidden unit, of which 8 are FP32 gradients of keys and values if there are any."""
    usual, few, again = (
        estimate_activations(4096, 11008, 32, heads, 2, 1, 1, checkpointing=checkpointing)
        for heads, checkpointing in ((32, False), (8, False), (32, True))
    )
    assert usual.layer / 4096 == pytest.approx(45.5, abs=0.1)
    assert usual.context == pytest.approx(8 / 45.5, abs=1e-3)
    assert usual.until_weight == pytest.approx(32.1 / 45.5, abs=1e-3)
    assert few.context < usual.context / 3
    assert (again.layer, again.until_weight, again.context) == (2 * 4096, 0.0, (8 + 4) / 2)
    assert again.transient == 2 * usual.transient == 2 * usual.layer


def test_a_run_of_the_model_beside_its_copy_fills_what_is_free_and_refuses_nothing() -> None:
    scheme, alone = ParallelScheme(), job(1)
    needs, limit = alone.needs(scheme, 0), alone.max_length(scheme)
    more = needs.total(1) - needs.states + 1000
    beside = job(1, twin_bytes=more)
    assert beside.needs(scheme, 0).total(1) == needs.total(1) + 1000
    assert beside.needs(scheme, 0).total(limit) == needs.total(limit), "a step's activations are more, and gone by then"
    filling = job(1, twin_bytes=2**40)
    assert filling.needs(scheme, 0).total(1) == int(alone.capacity)
    assert filling.max_length(scheme) == limit


def test_states_that_do_not_fit_give_zero_and_no_device_gives_an_error() -> None:
    assert job(8, device=2**20).max_length(ParallelScheme()) == 0
    with pytest.raises(ConfigError, match="device_bytes"):
        job(8, device=float("inf")).max_length(ParallelScheme())
    with pytest.raises(ConfigError, match="tp8sp1"):
        job().needs(ParallelScheme(8), 0)


def test_jobs_that_do_not_fit_are_refused_with_numbers_and_keys() -> None:
    from ds_hydra.engine.costs import check_memory, within_memory

    table = CostTable(tuple(SchemeCost(ParallelScheme(tp), 1e-6, 0.1, 1.0, 4096) for tp in (1, 2)))
    strategies = [StrategyShape.parse("8*tp1"), StrategyShape.parse("4*tp2")]
    tight = job(8, device=3 * 2**20)
    check = partial(check_memory, no_slices="this test wants it")
    with pytest.raises(ConfigError, match=r"(?s)hydra\.strategies\[0\].*MiB.*more than the.*larger tp or pp"):
        check(table, tight, strategies, 100, "sequence 3 has")
    with pytest.raises(ConfigError, match=r"sequence 3 has 5000 tokens .* more than 4096 .*hydra\.context_length"):
        check(table, job(), strategies, 5000, "sequence 3 has")
    check(table, job(), strategies, 4096, "sequence 3 has")
    states_only = job(8, device=job().fullest(ParallelScheme(), 1).states / job().capacity * GIB)
    with pytest.raises(ConfigError, match=r"hydra\.strategies\[0\].*stage 0 of tp1 .*and one token"):
        check(within_memory(table, states_only), states_only, strategies, 100, "sequence 3 has")
    small = within_memory(table, job(8, device=40 * 2**20))
    assert 1 <= small[ParallelScheme()].max_length < 4096
    with pytest.raises(ConfigError, match="no scheme fits"):
        within_memory(table, job(8, device=2**20))
    with pytest.raises(ConfigError, match=r"0\.7 MiB of the 0\.5 MiB of a host"):
        within_memory(table, job(8, device=40 * 2**20, run=1000, host_bytes=2.0**19))


def test_nodes_that_share_queries_keep_keys_of_all_and_more_queries() -> None:
    """Six ranks share 32 heads two by two: three parts of a row, the first of 0.58 of its queries and keys,
    the last of 0.18 with all of them; counted are the most of either."""
    two, six = (sp * estimate_activations(4096, 11008, 32, 32, 2, 1, sp).layer for sp in (2, 6))
    queries_and_outputs, keys_and_values = 2 * (3**0.5 - 1.0), 2 * (3 - 1)
    assert six - two == pytest.approx((queries_and_outputs + keys_and_values) * 4096 * 2)


# --- Layers computed again are counted in time and memory.
COST = SchemeCost(ParallelScheme(pp=4), 1e-6, 0.01, 2.0, 1024)
SHARES = Shares(Terms(0.3, 0.35, 0.3), Terms(0.0, 0.3, 0.1), 0.75, 0.25, 0.2)


def test_a_micro_batch_that_recomputes_keeps_less_and_takes_a_forward_more() -> None:
    batch = MicroBatchPlan((Span(0, 1000, 2000),))
    none, half, every = (
        work_of(replace(batch, recompute=share), COST, SHARES, parts=1, followed=True) for share in (0.0, 0.5, 1.0)
    )
    assert (none.kept, half.kept, every.kept) == (1250 * UNITS, 850 * UNITS, 450 * UNITS)
    assert none.until_weight == int(1250 * UNITS * 0.75)
    assert every.until_weight == int(250 * UNITS * 0.75), "what is recomputed waits for nothing"
    assert (every.forward, every.weight) == (none.forward, 0)
    assert every.backward == pytest.approx(none.backward + none.forward + none.weight, abs=2)
    assert half.weight == pytest.approx(none.weight / 2, abs=1)


def test_a_sequence_may_be_longer_where_layers_may_be_computed_again() -> None:
    one_layer = 0.8 * 1024 / 15  # of the largest slice, while it is computed again
    assert longest_of(COST, SHARES, layers=15) == int((4096 - one_layer) / 0.45) > longest_of(COST, SHARES)


# --- Profiling times what training runs, on devices too, and goes on where memory ends.
CPU = torch.device("cpu")
MOST_ELEMENTS = 4096
FULL = torch.OutOfMemoryError("device out of memory")


def stand_in(clock_of: Callable[[FakeDevice], Any]) -> float:
    """Seconds of the copies of a stand-in for four ranks, on a device that takes a second for each."""
    device = FakeDevice()
    group = LocalGroup(0, 4, clock_of(device))
    with Queued(device, 1.0, lambda: ""):
        group.allgather([[torch.empty(2) for _ in range(4)]], [torch.ones(2)])
    device.wait()
    return group.take().seconds


def test_a_stand_ins_copies_are_timed_on_the_device() -> None:
    assert stand_in(FakeDeviceClock) == pytest.approx(4.0 + 5.0, abs=5.0)  # four copies, and what they allocate
    assert stand_in(FakeDeviceClock) >= 4.0
    assert stand_in(lambda device: HostClock(lambda: device.host_s)) < 1e-3


def test_messages_up_to_the_jobs_largest() -> None:
    assert message_sizes(1000) == SIZES
    assert message_sizes(300_000_000) == (*SIZES, 1 << 25, 1 << 27, 300_000_000)


def test_the_jobs_shard_and_largest_message() -> None:
    buckets = [SimpleNamespace(numel=n, trainable=t) for n, t in ((4000, True), (600, True), (9000, False))]
    source = SimpleNamespace(plan=SimpleNamespace(buckets=buckets, num_layers=4), width=lambda layer: 16)
    of: dict[str, Any] = dict.fromkeys(Request.__dataclass_fields__)
    of |= {"source": source, "num_gpus": 2, "dtype": torch.bfloat16}
    short = Request(**{**of, "rungs": make_ladder(2, 16, 3)})
    assert short.shard_elements == 2300
    assert short.largest_message == 2 * 9000 // 2  # half of the largest bucket, to a rank that holds all of it
    assert Request(**{**of, "rungs": make_ladder(2, 4096, 3)}).largest_message == 2 * 8192 * 16


class CountingOptimizer(torch.optim.SGD):
    """Tells how many elements it was made for; a device takes 2 ms of each of its operations."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, lr=1.0)
        self.sizes.append(self.param_groups[0]["params"][0].numel())


def test_the_update_is_timed_on_the_device_at_the_shards_size() -> None:
    device = FakeDevice()
    CountingOptimizer.sizes.clear()
    with Queued(device, 1e-3, lambda: "update") as queue:
        costs = step_costs(
            CPU, Links(()), elements=5000, make_optimizer=CountingOptimizer, clock=FakeDeviceClock(device)
        )
    assert CountingOptimizer.sizes == [5000]
    assert costs["update_elements"] == 5000
    # Norm, clipping and update are some operations of 1 ms each: far more than a launch, far less than all of them.
    assert 3e-3 < 1e-3 * costs["update_ms_per_element"] * 5000 < queue.launched["update"] / 5


def test_the_update_of_a_shard_that_does_not_fit_is_timed_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def full_like(parameter: torch.Tensor, value: float) -> torch.Tensor:
        tried.append(parameter.numel())
        if parameter.numel() > MOST_ELEMENTS // 3:
            raise FULL
        return torch.empty_like(parameter).fill_(value)

    monkeypatch.setattr(stage_timer, "MOST_ELEMENTS", MOST_ELEMENTS)
    monkeypatch.setattr(torch, "full_like", full_like)
    costs = step_costs(CPU, Links(()), elements=4 * MOST_ELEMENTS, make_optimizer=CountingOptimizer)
    assert tried == [MOST_ELEMENTS, MOST_ELEMENTS // 2, MOST_ELEMENTS // 4]
    assert costs["update_elements"] == MOST_ELEMENTS // 4


class SmallDevice:
    """A stage timer with memory for so many tokens; a token takes 2 ms."""

    most_tokens = 0
    block_tokens = None
    scheme = ParallelScheme()
    place = SimpleNamespace(stage=SimpleNamespace(first_layer=0, last_layer=4))
    source = SimpleNamespace(plan=SimpleNamespace(no_slices=""))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not self.most_tokens:
            raise FULL

    def time(self, lengths: Sequence[int], *, warm_up: int = 1) -> Timing:
        if sum(lengths) > self.most_tokens:
            raise FULL
        return Timing(2.0 * sum(lengths), ())

    def time_parts(self, lengths: Sequence[int], start: int = 0) -> tuple[Timing, ...]:
        """It keeps half as much again as in one."""
        if 1.5 * (sum(lengths) + start) > self.most_tokens:
            raise FULL
        return tuple(Timing(ms * sum(lengths), ()) for ms in (0.6, 0.8, 0.6))


def measured(most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> SchemeEntry | None:
    monkeypatch.setattr(survey, "StageTimer", SmallDevice)
    monkeypatch.setattr(SmallDevice, "most_tokens", most_tokens)
    source: Any = SimpleNamespace(plan=SimpleNamespace(num_layers=4))
    rungs = make_ladder(16, 1024, 5)
    return Survey(source, CPU, torch.float32, Links(()), rungs, budget=RepeatBudget(0.0, 2, 2)).measure(
        ParallelScheme()
    )


def test_the_ladder_stops_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = measured(400, monkeypatch)
    assert entry is not None
    (stage,) = entry.stages
    assert max(sum(point.lengths) for point in stage.points) <= 400
    assert stage.no_room_tokens is not None
    assert 400 < stage.no_room_tokens <= 1024
    assert entry.record()["stages"][0]["no_room_tokens"] == stage.no_room_tokens
    assert entry.cost(10_000).max_length == stage.no_room_tokens - 1
    assert entry.cost(100).max_length == 100
    assert 0 < max(sum(point.lengths) + point.start for point in stage.split_points) <= 400 / 1.5
    assert stage.split is not None
    assert stage.split.forward.b == pytest.approx(0.3, abs=5e-3)
    whole = measured(10_000, monkeypatch)
    assert whole is not None
    assert max(sum(point.lengths) + point.start for point in whole.stages[0].split_points) > 1000
    assert whole.stages[0].no_room_tokens is None
    assert whole.cost(10_000).max_length == 10_000


@pytest.mark.parametrize("most_tokens", [0, 16])
def test_a_scheme_without_room_for_two_lengths_is_left_out(most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(most_tokens, monkeypatch) is None


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def broken() -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="shape is wrong"):
        within_memory(broken)
    assert within_memory(lambda: 7) == 7


def test_links_go_as_far_as_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group of one rank, with the collectives that such a group knows."""
    sizes: list[int] = []

    def prepare(numel: int) -> Callable[[], object]:
        if 4 * numel > 1 << 23:
            raise FULL
        sizes.append(4 * numel)
        return lambda: None

    monkeypatch.setattr(survey, "_calls", lambda *args: {"all_reduce": prepare})
    alone = SimpleNamespace(get_rank=lambda: 0, all_reduce=lambda *a, **k: None, barrier=lambda group: None,
                            ReduceOp=torch.distributed.ReduceOp)  # fmt: skip
    monkeypatch.setattr(survey, "dist", alone)
    group: Any = None
    (figure,) = survey.time_links([0, 1], group, CPU, sizes=message_sizes(1 << 27), repeats=2)
    assert sizes == list(SIZES)
    assert figure.largest_bytes == 1 << 23


# --- Room for composed strategies: none costs a candidate a token, and what does not fit is refused with its
# numbers.
POOL = ("tp4 + 4*tp1", "4*tp2")
SCHEMES = tuple(map(ParallelScheme, (1, 2, 4)))


def beside(device: float, *, composing: bool = True, tokens: int = 1 << 20) -> tuple[ArenaRoom, JobMemory, CostTable]:
    """A table whose MaxLen is `tokens`, or less where there is no memory for that."""
    shapes = [StrategyShape.parse(text) for text in POOL]
    memory = job(8, device).together({shape: place_strategy(shape, 8, 8) for shape in shapes})
    limits = [max(1, min(tokens, memory.max_length(scheme))) for scheme in SCHEMES]
    table = CostTable(
        tuple(SchemeCost(scheme, 0.0, 1.0, 0.0, limit, 1) for scheme, limit in zip(SCHEMES, limits, strict=True))
    )
    return room_beside(memory, table, composing=composing), memory, table


def recombined() -> list[StrategyShape]:
    """All strategies of the pool's pipelines on 8 ranks."""
    counts = itertools.product(range(9), range(5), range(3))
    return [counts_to_strategy(c, SCHEMES) for c in counts if c[0] + 2 * c[1] + 4 * c[2] == 8]


def test_where_memory_is_plenty_every_recombination_fits() -> None:
    room, _, _ = beside(GIB, tokens=256)
    assert len(recombined()) > 5
    assert [room.refusal(strategy) for strategy in recombined()] == [""] * len(recombined())


@pytest.mark.parametrize("device", [9e6, 1e7, 1.2e7, 2e7, float(GIB)])
def test_room_costs_no_candidate_a_token_and_what_is_let_in_fits(device: float) -> None:
    room, memory, table = beside(device)
    shapes = [PipelineShape.of(scheme) for scheme in SCHEMES]
    with_room = replace(memory, arena=room.arena, _cache={})
    for shape in shapes:
        assert min(table[shape].max_length, with_room.max_length(shape)) == min(
            table[shape].max_length, memory.max_length(shape)
        )
    for strategy in recombined():
        placed = place_strategy(strategy, 8, 8)
        if room.refusal(strategy):
            continue
        needed = held_elements(memory.plan, placed, memory.element, node_size=8)
        assert all(p <= has_p and g <= has_g for (p, g), (has_p, has_g) in zip(needed, room.arena, strict=True))
        beside_it = with_room.together({**memory.strategies, strategy: placed})
        for shape in set(strategy.pipelines):
            assert beside_it.max_length(shape) >= min(table[shape].max_length, memory.max_length(shape))


def test_what_does_not_fit_is_refused_with_its_numbers() -> None:
    room, memory, _ = beside(GIB, composing=False, tokens=256)
    whole = max(p for p, _ in room.arena)
    assert min(p for p, _ in room.arena) < whole
    refusal = room.refusal(StrategyShape.parse("8*tp1"))
    assert refusal.startswith("rank 0 has room for ")
    assert "elements of parameters but would hold" in refusal
    # Composed strategies keep tensor parallel groups inside nodes; what a user lists may lay them across.
    assert room.refusal_of_composed(StrategyShape.parse("2*tp4")) == room.refusal(StrategyShape.parse("2*tp4")) == ""
    odd = replace(room, node_size=7)
    assert odd.refusal_of_composed(StrategyShape.parse("2*tp4")).startswith("the ranks 4..7 of a tensor parallel group")
    assert "no candidate has the pipeline pp2" in room.refusal(StrategyShape.parse("tp4 + 2*tp1 + pp2"))
    at_its_limit, _, _ = beside(GIB)  # MaxLen takes all memory there is
    assert "activations" in at_its_limit.refusal(StrategyShape.parse("2*tp4"))
    assert "uses 4 ranks" in room.refusal(StrategyShape.parse("tp4"))
    assert memory.arena == ()


def test_a_record_holds_all_of_it() -> None:
    room, _, _ = beside(GIB)
    assert ArenaRoom.of_record(json.loads(json.dumps(room.to_record()))) == room
