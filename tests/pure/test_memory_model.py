"""MaxLen by the published constants, and memory counted from a model's plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from ds_hydra.costs.activations import Activations
from ds_hydra.costs.analytic import estimate_activations
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.memory import JobMemory, gibibytes
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.actions import Action, Order, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, Schedule
from ds_hydra.pipe.schedules.simulate import TimedAction
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan, PipelinePlan, Span
from ds_hydra.simulate.memory import memory_over_time
from ds_hydra.simulate.pipeline import StageTimes
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.llama_memory import GIB, job
from tools.check_cost_model import PUBLISHED_MAX_LENGTH, RANKS, TABLES, max_length


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, rows in PUBLISHED_MAX_LENGTH.items() for name in rows]
)
def test_max_length_equals_the_published_formula(model: str, name: str) -> None:
    assert max_length(model, ParallelScheme.parse(name), RANKS[model]) == PUBLISHED_MAX_LENGTH[model][name]


def test_published_tables_hold_the_same_max_length() -> None:
    for model in ("7b", "32b"):
        for cost in CostTable.load(TABLES / f"llama_{model}_a800.json").costs:
            assert cost.max_length == PUBLISHED_MAX_LENGTH[model][str(cost.scheme)]


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
    on_host = job(2, copies=True, copies_on_host=True).needs(ParallelScheme(), 0)
    more = on_host.masters + on_host.optimizer - alone.masters - alone.optimizer
    largest = max(bucket.numel for bucket in job(2).plan.buckets)
    assert more == 4 * math.ceil(total / 2) + 12 * math.ceil(largest / 2)  # the gradient, and one bucket's update
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


def test_more_ranks_and_more_splitting_hold_more() -> None:
    memory = job(8, device=64 * 2**20)
    assert memory.max_length(ParallelScheme(1, 1, 2)) > memory.max_length(ParallelScheme())
    assert memory.max_length(ParallelScheme(2)) > memory.max_length(ParallelScheme())
    assert job(64, device=64 * 2**20).needs(ParallelScheme(), 0).masters < memory.needs(ParallelScheme(), 0).masters


def test_first_stage_keeps_the_most_micro_batches() -> None:
    needs = job().stages(ParallelScheme(1, 4))
    assert [round(n.per_token / needs[-2].per_token, 1) for n in needs[1:-1]] == [1.5, 1.0]
    assert (needs[0].logits, needs[0].head) == (0.0, 0)
    assert (needs[-1].logits, needs[-1].head) == (1000.0, 4 * 1000 * 64)


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
    from ds_hydra.engine.fits import check_memory

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
    assert (again.until_weight, again.context) == (0.0, (8 + 4) / 2)


def test_states_that_do_not_fit_give_zero_and_no_device_gives_an_error() -> None:
    assert job(8, device=2**20).max_length(ParallelScheme()) == 0
    with pytest.raises(ConfigError, match="device_bytes"):
        job(8, device=float("inf")).max_length(ParallelScheme())
    with pytest.raises(ConfigError, match="tp8sp1"):
        job().needs(ParallelScheme(8), 0)


def test_jobs_that_do_not_fit_are_refused_with_numbers_and_keys() -> None:
    from ds_hydra.engine.fits import check_memory, within_memory

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


def test_checkpointing_keeps_less() -> None:
    full = estimate_activations(4096, 11008, 32, 32, 2, 1, 1)
    light = estimate_activations(4096, 11008, 32, 32, 2, 1, 1, checkpointing=True)
    assert light.layer < full.layer / 8
    assert light.transient > full.transient
    assert Activations(1.0, 0.0, 0.0).transient == 0.0


def test_nodes_that_share_queries_keep_keys_of_all_and_more_queries() -> None:
    """Six ranks share 32 heads two by two: three parts of a row, the first of 0.58 of its queries and keys,
    the last of 0.18 with all of them; counted are the most of either."""
    two, six = (sp * estimate_activations(4096, 11008, 32, 32, 2, 1, sp).layer for sp in (2, 6))
    queries_and_outputs, keys_and_values = 2 * (3**0.5 - 1.0), 2 * (3 - 1)
    assert six - two == pytest.approx((queries_and_outputs + keys_and_values) * 4096 * 2)
