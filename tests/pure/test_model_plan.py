"""Layouts of a model under any strategy: who computes with what, and whose gradients add up to each element's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.pipe.head_sharing import head_parts
from ds_hydra.pipe.model_plan import (
    Bucket,
    ModelPlan,
    ParamSpec,
    ShardRule,
    bucket_kinds,
    bucket_places,
    bucket_sizes,
    end_of_slots,
    make_buckets,
    twins_of,
)
from ds_hydra.pipe.placement import Pipeline, Stage, Strategy, place_strategy
from ds_hydra.pipe.shape import LayerRange, ParallelScheme, StrategyShape
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.planner_cases import fused_llama_plan

HEADS, KV_HEADS = 12, 2
Numbers = np.ndarray[Any, np.dtype[np.float64]]
LAYER = {
    "q.weight": ((24, 5), ShardRule(0, units=HEADS)),
    "k.weight": ((4, 5), ShardRule(0, units=KV_HEADS)),
    "o.weight": ((5, 24), ShardRule(1, units=HEADS)),
    "gate_up.weight": ((26, 5), ShardRule(0, parts=2)),  # 13 rows a part: divides nothing
    "experts": ((3, 14, 5), ShardRule(1, parts=2)),
    "whole_experts": ((18, 3, 2), ShardRule(0, by_width=(1, 2))),
    "down.weight": ((5, 13), ShardRule(1)),
    "norm.weight": ((5,), ShardRule()),
    "q_norm.weight": ((7,), ShardRule(gradient="partial")),
}


def model_plan(num_layers: int, tied: bool, frozen: bool = False) -> ModelPlan:
    specs = {"embed": ParamSpec("embed", (29, 5), ShardRule(0), not frozen)}
    layers = []
    for layer in range(num_layers):
        own = {f"{layer}.{name}": ParamSpec(f"{layer}.{name}", *rule) for name, rule in LAYER.items()}
        if frozen and layer == 0:
            own = {name: replace(spec, trainable="norm" in name) for name, spec in own.items()}
        specs |= own
        layers.append(frozenset(own))
    specs["norm"] = ParamSpec("norm", (5,))
    if not tied:
        specs["head"] = ParamSpec("head", (29, 5), ShardRule(0))
    last = frozenset({"norm", "embed" if tied else "head"})
    first = frozenset({"embed"})
    groups = [("embeddings", first), *((f"layers.{i}", own) for i, own in enumerate(layers)), ("head", last - first)]
    return ModelPlan(make_buckets(groups, specs), first, tuple(layers), last, HEADS, KV_HEADS, heads_cut=True)


@st.composite
def strategies(draw: st.DrawFn, num_layers: int) -> Strategy:
    """Pipelines of stages that differ in tp, sp and layers; where their ranges are even in number, also as a V."""
    pipelines: list[Pipeline] = []
    rank = 0
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=2)))
        stages: list[Stage] = []
        ranges = [LayerRange(*ends) for ends in zip([0, *cuts], [*cuts, num_layers], strict=True)]
        seconds: list[LayerRange | None] = [None] * len(ranges)
        if len(ranges) % 2 == 0 and draw(st.booleans()):
            half = len(ranges) // 2
            ranges, seconds = ranges[:half], [*reversed(ranges[half:])]
        for (first, last), second in zip(ranges, seconds, strict=True):
            tp, sp = draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(1, 3))
            ep = draw(st.sampled_from([1, tp, tp * sp]))
            stages.append(Stage(tuple(range(rank, rank + tp * sp)), first, last, tp, sp, second, ep))
            rank += tp * sp
        pipelines.append(Pipeline(tuple(stages)))
    return Strategy(tuple(pipelines))


CASES = st.integers(2, 5).flatmap(
    lambda layers: st.tuples(st.builds(model_plan, st.just(layers), st.booleans(), st.booleans()), strategies(layers))
)


def stage_of(strategy: Strategy, rank: int) -> Stage:
    pipeline, stage = strategy.locate(rank)
    return strategy.pipelines[pipeline].stages[stage]


@settings(max_examples=50)
@given(CASES)
def test_pull_gives_each_rank_what_its_stage_needs_once(case: tuple[ModelPlan, Strategy]) -> None:
    plan, strategy = case
    for bucket in plan.buckets:
        layout = plan.pull_layout(bucket, strategy)
        layout.validate()
        for rank in range(strategy.num_ranks):
            stage = stage_of(strategy, rank)
            slots = plan.slots(bucket, stage, stage.holder(rank))
            assert {slot.param.name for slot in slots} == plan.needed(stage) & {p.name for p in bucket.params}
            assert layout.held(rank) == sum(slot.numel for slot in slots)
            assert layout.sizes[rank] == end_of_slots(slots)
            filled = Counter(
                place
                for piece in layout.pieces[rank]
                for place in range(piece.offset, piece.offset + piece.stop - piece.start)
            )
            assert filled == Counter(place for slot in slots for place in range(slot.offset, slot.offset + slot.numel))


@settings(max_examples=50)
@given(CASES)
def test_whole_parameters_are_covered_by_each_group_that_shares_them(case: tuple[ModelPlan, Strategy]) -> None:
    plan, strategy = case
    for bucket in plan.buckets:
        layout = plan.pull_layout(bucket, strategy)
        for pipeline in strategy.pipelines:
            for stage in pipeline.stages:
                for first in range(0, len(stage.ranks), stage.holders):
                    held = np.zeros(bucket.numel, dtype=int)
                    for rank in stage.ranks[first : first + stage.holders]:
                        for piece in layout.pieces[rank]:
                            held[piece.start : piece.stop] += 1
                    assert_covers(plan, bucket, stage, held)


def assert_covers(plan: ModelPlan, bucket, stage: Stage, held: np.ndarray) -> None:  # type: ignore[no-untyped-def,type-arg]
    """Once if cut, by all ranks if not, by some ranks where there are fewer heads than ranks; not if not needed."""
    start = 0
    for param in bucket.params:
        counts = held[start : start + param.numel]
        start += param.numel
        if param.name not in plan.needed(stage):
            expected = 0
        elif param.rule.dim is None:
            expected = stage.holders
        elif param.rule.by_width is not None:
            expected = stage.holders // stage.ep
        else:
            expected = max(1, stage.tp // param.rule.units) if param.rule.units else 1
            expected *= stage.holders // stage.tp
        assert (counts == expected).all(), (param, stage)


@settings(max_examples=50)
@given(CASES)
def test_contributions_add_up_to_the_gradient(case: tuple[ModelPlan, Strategy]) -> None:
    """Numbers instead of counts: true gradients per pipeline and sp rank, shared as autograd would leave them. What all
    ranks of a stage share has met the tokens of all of them."""
    plan, strategy = case
    random = np.random.default_rng(0)
    for bucket in plan.buckets:
        layout = plan.push_layout(bucket, strategy)
        layout.validate()
        pushed, true = np.zeros(bucket.numel), np.zeros(bucket.numel)
        for pipeline in strategy.pipelines:
            for stage in pipeline.stages:
                gradients = random.integers(1, 1000, (stage.sp, bucket.numel)).astype(float)
                true += gradients.sum(0) * needed_mask(plan, bucket, stage)
                for sp_rank, gradient in enumerate(gradients):
                    for rank in stage.ranks[sp_rank * stage.tp : (sp_rank + 1) * stage.tp]:
                        local = local_gradient(plan, bucket, stage, stage.holder(rank), gradient, gradients.sum(0))
                        for piece in layout.pieces[rank]:
                            length = piece.stop - piece.start
                            pushed[piece.start : piece.stop] += local[piece.offset : piece.offset + length]
        np.testing.assert_allclose(pushed, true, rtol=1e-12)


def needed_mask(plan: ModelPlan, bucket, stage: Stage) -> np.ndarray:  # type: ignore[no-untyped-def,type-arg]
    needed = plan.needed(stage)
    return np.concatenate([np.full(param.numel, float(param.name in needed)) for param in bucket.params])


def local_gradient(
    plan: ModelPlan, bucket: Bucket, stage: Stage, holder: int, gradient: Numbers, of_all: Numbers
) -> Numbers:
    """What a rank's gradient buffer holds: its shard; for shared heads and partial gradients its part of the sum."""
    starts = dict(zip([p.name for p in bucket.params], np.cumsum([0, *(p.numel for p in bucket.params)]), strict=False))
    slots = plan.slots(bucket, stage, holder)
    local = np.full(end_of_slots(slots), np.nan)  # between the slots nobody may look
    for slot in slots:
        param, rule = slot.param, slot.param.rule
        holders = 1
        if rule.dim is None and rule.gradient == "partial":
            holders = stage.tp
        elif rule.dim is not None and rule.units:
            holders = max(1, stage.tp // rule.units)
        met = of_all if rule.by_width is not None and stage.ep > stage.tp else gradient
        own = met[starts[param.name] : starts[param.name] + param.numel]
        if rule.by_width is not None and stage.ep < stage.tp:
            holders = stage.tp  # never so: a plan refuses tp without ep
        cut = [own[lo:hi] for lo, hi in param.shard_intervals(*param.share(stage, holder))]
        local[slot.offset : slot.offset + slot.numel] = np.concatenate(cut) / holders
    return local


OF_THREE_OR_SIX_TWINS = (
    "sp4 + tp2 + 2*tp1", "tp2 + 6*tp1", "tp4 + 3*tp1", "tp8 + 3*tp4 + 4*tp1", "3*tp2 + 2*tp1", "tp4 + 6*tp2",
    "6*tp2 + 4*tp1", "tp16 + 6*tp8", "tp16 + 48*tp1",
)  # fmt: skip


def drawn_strategies(count: int) -> list[str]:
    """Strategies whose numbers of twins divide nothing."""
    random = np.random.default_rng(5)
    parts = ("tp1", "tp2", "tp4", "tp8", "sp3", "tp2pp2", "pp2/v")
    chosen = [random.choice(parts, random.integers(1, 4), replace=False) for _ in range(count)]
    return [" + ".join(f"{random.integers(1, 8)}*{part}" for part in some) for some in chosen]


@pytest.mark.parametrize("text", [*OF_THREE_OR_SIX_TWINS, *drawn_strategies(30)])
def test_every_parameter_begins_on_128_bytes(text: str) -> None:
    """Of a 7B model, in the pulled parameters and in the gradients of every rank."""
    shape = StrategyShape.parse(text)
    plan = fused_llama_plan(4, hidden=4096, vocab=32000)
    strategy = place_strategy(shape, shape.num_ranks, plan.num_layers)
    for twins in twins_of(strategy, 8):
        end = 0
        sizes = bucket_sizes(plan, strategy, twins, bucket_kinds(plan))
        assert sizes == tuple(place.size for place in bucket_places(plan, strategy, twins))
        for place in bucket_places(plan, strategy, twins):
            assert place.start == end, "buckets lie one after the other"
            assert [slot.param.name for slot in place.slots if (place.start + slot.offset) % 64] == []
            for one in (twins, *twins.pulling):
                part = one.part_of(end_of_slots(place.slots), 64)
                assert part % 64 == 0, "so does every twin's part"
                assert part * len(one.ranks) <= place.size
            end += place.size
        held = sum(slot.numel for place in bucket_places(plan, strategy, twins) for slot in place.slots)
        assert end - held < 1e-4 * held


def test_shard_intervals_are_slices_of_the_parameter() -> None:
    """Against numpy: intervals of the flat order are the rows that a rank would slice out."""
    for shape, rule in LAYER.values():
        param = ParamSpec("p", shape, rule)
        if rule.dim is None:
            continue
        full = np.arange(param.numel).reshape(shape)
        split = np.moveaxis(full.reshape(*shape[: rule.dim], rule.parts, -1, *shape[rule.dim + 1 :]), rule.dim, 0)
        flat = np.moveaxis(split, rule.dim + 1, 1).reshape(-1)
        for tp in (1, 2, 3, 6) if rule.by_width else (1, 2, 4, 6):
            for tp_rank in range(tp):
                mine = np.concatenate([flat[lo:hi] for lo, hi in param.shard_intervals(tp_rank, tp)])
                rows = shape[rule.dim] // rule.parts
                start, stop = param.shard_rows(tp_rank, tp)
                index = [part * rows + row for part in range(rule.parts) for row in range(start, stop)]
                assert set(mine) == set(np.take(full, index, axis=rule.dim).reshape(-1))
                assert param.shard_shape(tp_rank, tp) == np.take(full, index, axis=rule.dim).shape


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (ParallelScheme(tp=5), "12 heads cannot be shared by tp=5"),
        (ParallelScheme(tp=3), "2 heads cannot be shared by tp=3"),
        (ParallelScheme(tp=36), "embed: 29 rows cannot be cut over tp=36; use tp <= 29"),
    ],
)
def test_degrees_that_the_model_cannot_be_cut_by(scheme: ParallelScheme, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        model_plan(3, tied=True).check(place_strategy(StrategyShape.of([scheme]), scheme.num_ranks, 3))


def test_ranks_that_would_share_queries_are_not_proposed() -> None:
    """Of 12 heads, with two of keys: three sequence parallel ranks share none, and of four of six heads two by two."""
    found = set(feasible_schemes(model_plan(4, tied=False), 8, 8))
    assert ParallelScheme(sp=4) in found
    assert {ParallelScheme(sp=3), ParallelScheme(sp=8), ParallelScheme(2, 1, 4)}.isdisjoint(found)
    assert [head_parts(*one) for one in ((4, 12, 2), (3, 12, 2), (8, 12, 2), (4, 6, 1), (6, 4, 2))] == [4, 1, 4, 2, 2]


def test_sequence_parallelism_fills_a_node_or_two_and_tensor_parallelism_one() -> None:
    plan = model_plan(4, tied=False)
    inside = set(feasible_schemes(plan, 8, 8))
    across = set(feasible_schemes(plan, 8, 2))
    assert ParallelScheme(2, 2, 2) in inside
    of_two = {ParallelScheme(tp, pp, 4 // tp) for tp in (1, 2) for pp in (1, 2)}
    # Three nodes share the queries of one stage; of four, ranks of different nodes would share the heads.
    assert {scheme for scheme in across if scheme.tp * scheme.sp > 2} == {
        *of_two, ParallelScheme(sp=6), ParallelScheme(2, 1, 3)
    }  # fmt: skip
    assert max(scheme.tp for scheme in across) == 2
    assert all(scheme.tp * scheme.sp <= 3 for scheme in feasible_schemes(plan, 5, 3)), "two nodes are not there"
    large = [scheme for scheme in feasible_schemes(plan, 64, 12) if scheme.tp * scheme.sp > 12]
    assert {scheme.pp for scheme in large} == {1}, "24 ranks are too many to share heads"
    assert max(scheme.num_ranks for scheme in large) == 48
