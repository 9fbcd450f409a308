"""Slow ranks are told by what they compute beside others, whatever the cost table is wrong by."""

from __future__ import annotations

import random
import re

import pytest

from ds_hydra.report.stragglers import LEAST, StageTime, Stragglers


def step(
    rng: random.Random, slow: dict[int, float], *, tp: int = 1, num: int = 16, wrong: float = 3.0
) -> list[StageTime]:
    """A step of pipelines of two kinds of stages, of `num` ranks in all; the table is wrong for the second kind."""
    stages = []
    for first in range(0, num, tp):
        ranks, kind = tuple(range(first, first + tp)), first // tp % 2
        expected = rng.uniform(50.0, 200.0)
        pace = max(slow.get(rank, 1.0) for rank in ranks) * rng.gauss(1.0, 0.02) * (wrong if kind else 1.0)
        stages.append(StageTime(kind, ranks, expected, expected * pace))
    return stages


@pytest.mark.parametrize("factor", [1.2, 2.0])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_slow_rank_is_told_once_within_20_steps_and_when_it_recovers(rank: int, factor: float) -> None:
    rng, watch = random.Random(rank), Stragglers()
    for _ in range(30):
        assert watch.observe(step(rng, {})) == []
    told = [line for _ in range(20) for line in watch.observe(step(rng, {rank: factor}))]
    assert len(told) == 1
    found = re.match(r"rank (\d+) computes (\S+) times as long", told[0])
    assert found is not None
    assert int(found[1]) == rank
    assert float(found[2]) == pytest.approx(factor, rel=0.04)
    later = [line for _ in range(20) for line in watch.observe(step(rng, {}))]
    assert later == [f"rank {rank} computes as fast as others again"]


def test_a_rank_that_is_slow_from_the_start_is_told_as_soon_as_enough_steps_tell() -> None:
    rng, watch = random.Random(0), Stragglers()
    told = [watch.observe(step(rng, {3: 1.3})) for _ in range(LEAST)]
    assert told[:-1] == [[]] * (LEAST - 1)
    assert len(told[-1]) == 1


def test_ranks_of_one_stage_are_named_together() -> None:
    rng, watch = random.Random(0), Stragglers()
    (line,) = [line for _ in range(20) for line in watch.observe(step(rng, {6: 1.25}, tp=4))]
    assert line.startswith("ranks 4, 5, 6, 7 compute 1.")
    assert "one may hold up the others" in line


def test_nobody_is_told_for_noise_for_single_long_steps_or_for_a_stage_without_its_like() -> None:
    rng, watch = random.Random(0), Stragglers()
    for number in range(300):
        long = {rng.randrange(16): 5.0} if number % 3 == 0 else {}
        assert watch.observe(step(rng, long)) == []
    alone = Stragglers()
    for _ in range(50):
        assert alone.observe([StageTime("a", (0,), 10.0, 30.0), StageTime("b", (1,), 10.0, 10.0)]) == []
        assert alone.observe([StageTime("a", (0,), 0.0, 0.0), StageTime("a", (1,), 10.0, 10.0)]) == []
