"""Rivals' methods as published, and the small models that emulated clusters train."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

import ds_hydra.planner.kernels as product
from benchmarks.rivals import kernels
from benchmarks.rivals.dispatch import ComparedDispatch
from benchmarks.rivals.hydraulis import HydraulisPlanner
from benchmarks.rivals.proposal import propose_by_program
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.emulate.clock import ELEMENTS, RANK_BYTES, RANK_TASKS, Limits, check_ranks, machine_limits, small_model
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.planner import validate_plan
from ds_hydra.planner.exact import dispatch_ms, pack_exactly
from ds_hydra.planner.kernels.problem import Scheme
from ds_hydra.rivals.costs import JobSetting, OwnModel, Recomputed, Way, table_of
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import POOL, TABLES, a800_batch

# --- Rivals' methods: Algorithm 1 as printed, packing by Eq. 1, proposals by Eq. 4, the published memory model.
TABLE = CostTable.load(TABLES / "llama_32b_a800.json")


def algorithm_1(
    times: np.ndarray, tokens: list[int], limits: list[int], pp: list[int], seed: int, trials: int
) -> list[int]:
    """The paper's lines 1-27, without any of the shortcuts of the kernel; the same permutations."""
    pipelines, n = times.shape
    order, state = list(range(n)), seed + 1
    best, best_owner = math.inf, [-1] * n
    for _ in range(trials):
        for i in range(n - 1, 0, -1):
            state = (state * 6364136223846793005 + 1442695040888963407) % 4611686018427387904
            j = (state >> 20) % (i + 1)
            order[i], order[j] = order[j], order[i]
        c, e, longest, owner = [0.0] * pipelines, [0.0] * pipelines, [0] * pipelines, [-1] * n
        by_length = [{tokens[i]: times[j, i] for i in range(n)} for j in range(pipelines)]
        for i in order:
            least, chosen = math.inf, -1
            for j in range(pipelines):
                if tokens[i] > limits[j]:
                    continue
                c_new = c[j] + times[j, i]
                e_new = by_length[j][max(longest[j], tokens[i])] * (pp[j] - 1)
                worst = max([c_new + e_new, *(c[k] + e[k] for k in range(pipelines) if k != j)])
                if worst < least:
                    least, chosen = worst, j
            owner[i] = chosen
            c[chosen] += times[chosen, i]
            longest[chosen] = max(longest[chosen], tokens[i])
            e[chosen] = by_length[chosen][longest[chosen]] * (pp[chosen] - 1)
        total = max(x + y for x, y in zip(c, e, strict=True))
        if total < best:
            best, best_owner = total, owner
    return best_owner


@pytest.mark.parametrize("text", ["tp16 + 2*tp8 + 8*tp4", "tp16 + 2*tp8pp3", "tp16 + tp8 + 8*tp4 + tp2pp4"])
def test_algorithm_1_is_the_printed_one(text: str) -> None:
    problem = ComparedDispatch.of(a800_batch(3, 80), StrategyShape.parse(text), TABLE)
    ours = problem.by_algorithm_1(trials=5, seed=2)
    assert ours is not None
    printed = algorithm_1(
        problem.times, problem.items.tokens.tolist(), problem.max_length.tolist(), problem.pp.tolist(), 2, 5
    )
    assert ours.tolist() == printed


def test_highs_finds_the_optimum_of_small_dispatches() -> None:
    draw = random.Random(1)
    for text in ("tp16 + 2*tp8", "2*tp8pp2 + 2*tp4", "tp16 + 2*tp4pp2"):
        lengths = [draw.randrange(100, 6000) for _ in range(7)]
        problem = ComparedDispatch.of(lengths, StrategyShape.parse(text), TABLE)
        greedy = problem.by_algorithm_1()
        found = problem.by_search()
        assert greedy is not None
        assert found is not None
        exact = problem.by_highs(greedy, found[1])
        assert exact is not None
        pipelines = len(problem.pp)
        optimum = min(
            dispatch_ms(problem.times, problem.pp, np.array(owner))
            for owner in itertools.product(range(pipelines), repeat=len(lengths))
        )
        assert exact.optimal
        assert exact.ms == pytest.approx(optimum, rel=1e-6)
        assert found[1] <= optimum * (1 + 1e-9)
        assert optimum * (1 - 1e-9) <= problem.ms(found[0]) <= optimum * 1.01


def test_search_beats_algorithm_1_and_respects_its_bound() -> None:
    for seed in range(6):
        problem = ComparedDispatch.of(a800_batch(seed), StrategyShape.parse("tp16 + 2*tp8 + 8*tp4"), TABLE)
        found, greedy = problem.by_search(), problem.by_algorithm_1()
        assert found is not None
        assert greedy is not None
        assert found[1] <= problem.ms(found[0]) <= problem.ms(greedy) * (1 + 1e-9)


@pytest.mark.drawn
@pytest.mark.parametrize("pp", [1, 3])
def test_packing_by_eq_1_is_between_its_bound_and_highs(pp: int) -> None:
    rng = np.random.default_rng(pp)
    for _ in range(12):
        tokens = np.sort(rng.integers(20, 900, size=10))[::-1].copy()
        work = tokens * 0.5 + tokens**2 * 1e-4
        scheme, bins = Scheme(30.0, 1500, 100, pp, 0.0), np.zeros(10, dtype=np.int64)
        v, ms, _, _ = kernels.compiled().pack(scheme, work, tokens, 40, bins)
        loads = np.bincount(bins, weights=work, minlength=v) + 30.0
        assert ms == pytest.approx(loads.max() * (pp - 1 + v))
        bound = kernels.compiled().packing_bound(scheme, work, tokens, v, ms)
        exact = pack_exactly(work, tokens, v, 1500, bins)
        assert exact is not None
        best = (exact.ms + 30.0) * (pp - 1 + v)
        assert bound <= ms * (1 + 1e-9)
        assert best * (1 - 1e-9) <= ms <= best * 1.03


def test_packing_by_eq_1_leaves_the_planner_s_kernels_as_they_are() -> None:
    work = np.array([6.0, 5.0, 4.0])
    tokens = np.array([600, 500, 400], dtype=np.int64)
    scheme, bins = Scheme(1.0, 1000, 1000, 3, 0.0), np.zeros(3, dtype=np.int64)
    assert kernels.compiled().pack(scheme, work, tokens, 40, bins)[1] == pytest.approx((9.0 + 1.0) * 4)
    assert product.compiled().pack(scheme, work, tokens, 40, bins)[1] == pytest.approx(15.0 + 2.0 + 2 * 10.0)


@pytest.mark.drawn
def test_hydraulis_plans_are_valid_and_state_what_they_take() -> None:
    planner = HydraulisPlanner(TABLE, [StrategyShape.parse(text) for text in POOL])
    for seed in range(3):
        lengths = a800_batch(seed, 100)
        validate_plan(planner.plan(seed, range(100), lengths), TABLE, 64)
    with pytest.raises(PlanError, match="no strategy holds a sequence of 50000 tokens"):
        planner.plan(0, [0], [50000])


def test_the_paper_s_program_with_one_scheme_gives_that_scheme() -> None:
    only = propose_by_program(TABLE, 64, a800_batch(0, 5000), 16384, [ParallelScheme(8)])
    assert only == (StrategyShape.parse("8*tp8"),)


def test_of_a_users_table_ulysses_counts_as_it_was_measured_and_rings_as_shares_of_its_units() -> None:
    costs = (
        SchemeCost(ParallelScheme(1), 2e-6, 0.02, 10.0, 1000, floor=3.0),
        SchemeCost(ParallelScheme(1, 1, 2), 1.2e-6, 0.011, 10.0, 2100),
        SchemeCost(ParallelScheme(2), 1e-6, 0.012, 9.0, 2000),
    )
    kept = TableFile(CostTable(costs))
    again = replace(kept, job=JobFingerprint("m", "d", "bf16", "flash", StageOptions(activation_checkpointing=True)))
    setting = JobSetting(OwnModel.of(kept, LinkModel(8)), 4, 1000, 8000)
    ring, ulysses = (table_of(setting, Way((1, 2, 4), ulysses=one)) for one in (False, True))
    shared = ring[ParallelScheme(1, 1, 2)]
    assert (shared.a, shared.b, shared.c, shared.floor, shared.max_length) == (1e-6, 0.01, 10.0, 3.0, 2100)
    assert shared.sequence_ms([1000])[0] == pytest.approx(11.0, rel=1e-4), "its messages take no time"
    assert ring[ParallelScheme(1, 1, 4)].max_length == 4000
    assert [(one.scheme, one.a, one.max_length) for one in ulysses.costs] == [
        (one.scheme, one.a, one.max_length) for one in costs
    ]
    some = table_of(setting, Way(ulysses=True, again=Recomputed.SOME))[ParallelScheme(2)]
    assert (some.b, some.max_length) == (pytest.approx(1.04 * 0.012), int(2000 * 32 / 22.7))
    assert OwnModel.of(kept, LinkModel(8)).forms == tuple(Recomputed)
    assert OwnModel.of(again, LinkModel(8)).forms == (Recomputed.NOTHING,), "the table has it already"


# --- How many ranks an emulated cluster may have, and the small model that stands for a large one.
ENOUGH = Limits(64 * RANK_BYTES, 64 * RANK_TASKS, 4096)


def test_what_the_machine_allows_is_accepted() -> None:
    check_ranks(64, ENOUGH)
    assert min(machine_limits()) > 0


@pytest.mark.parametrize(
    ("num_ranks", "limits", "words"),
    [
        (0, ENOUGH, "cluster of 0 ranks; give at least 1"),
        (-3, ENOUGH, "cluster of -3 ranks"),
        (65, ENOUGH, "at most 64 ranks can be forked"),
        (8, ENOUGH._replace(memory_bytes=7 * RANK_BYTES), "bytes of memory but there are .* at most 7"),
        (8, ENOUGH._replace(tasks=-5), "processes and threads but there are -5 left: at most 0"),
        (64, ENOUGH._replace(files=256), "ulimit -n"),
    ],
)
def test_more_ranks_than_can_be_forked_are_refused(num_ranks: int, limits: Limits, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ranks(num_ranks, limits)


def test_a_small_model_keeps_structure_and_bytes() -> None:
    specs = {
        "embed.weight": ParamSpec("embed.weight", (32000, 4096), ShardRule(dim=0)),
        "q.weight": ParamSpec("q.weight", (4096, 4096), ShardRule(dim=0, units=32)),
        "up.weight": ParamSpec("up.weight", (2 * 11008, 4096), ShardRule(dim=0, parts=2)),
        "down.weight": ParamSpec("down.weight", (4096, 11008), ShardRule(dim=1)),
        "norm.weight": ParamSpec("norm.weight", (4096,), trainable=False),
    }
    names = list(specs)
    groups = [("embed", frozenset(names[:1])), ("layer", frozenset(names[1:]))]
    plan = ModelPlan(make_buckets(groups, specs), frozenset(names[:1]), (frozenset(names[1:]),), frozenset())
    small = small_model(plan, 4096, 2, 4)
    assert [bucket.name for bucket in small.plan.buckets] == ["embed", "layer", "layer.frozen"]
    assert small.pushed_bytes == (2 * small.pulled_bytes[0], 2 * small.pulled_bytes[1])
    assert small.plan.layers == (frozenset(name.replace(".", "/") for name in names[1:]),)
    for true, few, stands_for in zip(plan.buckets, small.plan.buckets, small.pulled_bytes, strict=True):
        assert few.numel * stands_for == pytest.approx(2 * true.numel)
        assert few.numel <= 1.05 * ELEMENTS
        for one, other in zip(true.params, few.params, strict=True):
            assert other.numel / few.numel == pytest.approx(one.numel / true.numel, rel=0.05)
            if one.rule.dim is not None:  # the shards of all degrees keep their proportions too
                for tp in (2, 4, 8):
                    shards = [sum(hi - lo for lo, hi in param.shard_intervals(1, tp)) for param in (one, other)]
                    assert shards[1] / other.numel == pytest.approx(shards[0] / one.numel, rel=0.05)
    assert small.feature_bytes == 8192
