"""How many ranks an emulated cluster may have, and the small model that stands for a large one."""

from __future__ import annotations

import pytest

from ds_hydra.emulate.limits import RANK_BYTES, RANK_TASKS, Limits, check_ranks, machine_limits
from ds_hydra.emulate.small_model import ELEMENTS, small_model
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.zero_hetero.errors import ConfigError

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
