"""Whole training under the strict transport: what would once hang on NCCL, and a share of the table of cases."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch.distributed as dist
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.elastic.copies import Copy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import THEN
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.pushes import Pushes
from ds_hydra.zero_hetero.transport import GroupCollectives
from tests.support.cases import CASES, UNDER_STRICT
from tests.support.equivalence import compare
from tests.support.random_cases import random_case
from tests.support.small_job import same, sequences, small_config, small_engine, whole_state
from tests.support.strict import Rules, StrictError, one_push_at_a_time, strict_world
from tests.support.strict_line import StrictLane

DRAWN, LONG = pytest.mark.drawn, pytest.mark.long

# Each of these stood still in its first step before pushes waited for the last message, and before all pairs and
# groups were connected at start; those of one row train in turn. What a rank waited for:
ONCE_HUNG = [
    (4, "lazy", [
        # "exchange 0 of 'edges' is the first of 'edges', which is made at its first use: the host waits for rank 0"
        "tp2 + pp2",
        # not these, but the pushes of one begin among weight gradients, and in a V messages of both parts pass between
        # two ranks
        "tp2pp2/zb-h1", "pp2/v + pp2/list",
    ]),
    (4, "blocking", [
        # "exchange 1 of 'edges' waits for rank 1 to send to rank 0": rank 1 was in a push, in which it waited for
        # rank 0
        "2*pp2",
        # "exchange 2 of 'edges' waits for rank 3 to send to rank 1"
        "tp2pp2",
        # nor these
        "pp4/zb-h1", "tp2pp2/v",
    ]),
    (8, "lazy connect", [
        # "exchange 0 of 'edges' is the first of 'edges'", from rank 5: "the host waits for rank 0", which has no edges
        "tp4 + 2*pp2",
        # "exchange 6 of 'links' connects a new pair: the host waits for rank 1", from rank 4, in its last backward
        "tp4pp2",
    ]),
]  # fmt: skip


def trained(
    rank: int,
    strategies: Sequence[str],
    num_ranks: int,
    *,
    node_size: int | None = None,
    after_step: Callable[[str], None] = lambda strategy: None,
) -> dict[str, Tensor]:
    """All that is trained after a step under each of the strategies in turn, and one more under the first."""
    config = small_config(num_ranks, node_size=node_size)
    config["hydra"]["strategies"] = list(strategies)
    engine = small_engine(rank, config=config)
    for strategy in (*strategies, strategies[0]):
        engine.train_batch()
        assert engine.last_step.strategy == str(StrategyShape.parse(strategy))
        after_step(strategy)
    return whole_state(engine)


@pytest.mark.drawn
@pytest.mark.parametrize(("num_ranks", "rule", "strategies"), ONCE_HUNG)
def test_what_once_hung_trains_to_the_same_bits(num_ranks: int, rule: str, strategies: list[str]) -> None:
    def both(rank: int) -> bool:
        with strict_world(Rules(**dict.fromkeys(rule.split(), True), stall_s=100)):
            strict = trained(rank, strategies, num_ranks)
        return same(strict, trained(rank, strategies, num_ranks))

    assert run_ranks(both, num_ranks, timeout=240) == [True] * num_ranks


@pytest.mark.parametrize(
    ("rule", "strategies"),
    [
        pytest.param("connect lazy", ["4*tp1", "tp2 + pp2"], marks=pytest.mark.long),
        # Where pushes start among the collectives of tensor or sequence parallel ranks: the same on all of them.
        ("blocking", ["2*tp2", "tp2pp2", "tp2pp2/v", "2*sp2", "2*pp2"]),
    ],
)
def test_with_room_for_one_push_at_a_time_the_bits_are_the_same(rule: str, strategies: list[str]) -> None:
    """Also where large slices travel by themselves, and twins trade in pieces, as those of large models do."""

    def both(rank: int) -> bool:
        large = mock.patch.multiple(scratch_plan, LARGE=200, AT_ONCE=128)
        with strict_world(Rules(**dict.fromkeys(rule.split(), True), stall_s=100)), one_push_at_a_time(), large:
            strict = trained(rank, strategies, 4)
        return same(strict, trained(rank, strategies, 4))

    assert run_ranks(both, 4, timeout=240) == [True] * 4


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("room", "rule", "strategies"),
    [
        (True, "blocking", ["2*tp2", "tp2pp2/v", "tp2 + 2*tp1"]),
        (False, "connect lazy", ["4*tp1", "tp2 + pp2", "pp4/zb-h1"]),
    ],
)
def test_sums_leave_for_their_copies_among_the_pushes(room: bool, rule: str, strategies: list[str]) -> None:
    """On all ranks at the same places of their order, whoever has memory for how many pushes."""

    def both(rank: int) -> bool:
        rules = Rules(**dict.fromkeys(rule.split(), True), stall_s=100)
        with strict_world(rules), contextlib.nullcontext() if room else one_push_at_a_time():
            strict = protected(rank, strategies)
        return same(strict, trained(rank, strategies, 4))

    assert run_ranks(both, 4, timeout=240) == [True] * 4


def protected(rank: int, strategies: Sequence[str]) -> dict[str, Tensor]:
    """As `trained`, with a copy on each rank, compared after each step; none is left for the end of the pushes."""
    config = small_config(4)
    config["hydra"]["strategies"] = list(strategies)
    engine = small_engine(rank, config=config)
    crew = engine.crew
    names = [{"names": group.names} for group in engine.job.recipe.groups]
    copy = Copy(engine.job.source, names, crew.masters, crew.update.optimizer, crew.world, shift=1)
    crew.update.copy = copy
    copy.refresh()
    leave = copy.leave
    for step in range(len(strategies) + 1):
        with mock.patch.object(copy, "leave", mock.Mock(side_effect=leave)) as left:
            engine.train_batch()
        assert [*sorted(one.args[0] for one in left.call_args_list)] == list(range(len(crew.masters.trained.shards)))
        copy.compare(step)
    return whole_state(engine)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("node_size", "strategies"),
    [(None, ["2*tp2", "tp2pp2/v", "2*sp2"]), (2, ["sp4", "2*sp2", "tp2sp2"]), (3, ["4*tp1"])],
)
def test_all_that_a_rank_starts_may_run_in_one_queue(node_size: int | None, strategies: list[str]) -> None:
    """Twins gather and trade while the model's collectives run, also where a node's sequence parallel ranks are the
    teams; everybody is slowed at random."""

    def both(rank: int) -> bool:
        rules = Rules(one_queue=True, connect=True, sleeps=5, stall_s=100)
        trade = mock.patch.object(GroupCollectives, "trade", autospec=True, side_effect=GroupCollectives.trade)

        def has_traded(strategy: str) -> None:
            twins = strategy != "tp2pp2/v"  # one pipeline, whose ranks share nothing
            assert traded.called is twins, f"{strategy}: by the collective of a team's group"
            traded.reset_mock()

        with strict_world(rules), one_push_at_a_time(), trade as traded:
            strict = trained(rank, strategies, 4, node_size=node_size, after_step=has_traded)
        return same(strict, trained(rank, strategies, 4, node_size=node_size))

    assert run_ranks(both, 4, timeout=240) == [True] * 4


def train_with_polls(strategy: str, stall_s: float) -> None:
    """Two steps on four ranks, all that a rank starts in one queue. A push that is ready starts in its hook or in a
    later one, as the answers on this rank are drawn. StrictError if they wait for more than `stall_s`."""

    def steps(rank: int) -> None:
        answers, issue_ready = random.Random(rank), Pushes._issue_ready

        def polled(self: Pushes, *, ending: bool = False) -> None:
            if ending or answers.random() < 0.1:  # a layer has about ten hooks
                issue_ready(self, ending=ending)

        rules, polls = Rules(one_queue=True, stall_s=stall_s), mock.patch.object(Pushes, "_issue_ready", polled)
        with strict_world(rules), one_push_at_a_time(), polls:
            engine = small_engine(rank, strategies=[strategy])
            for _ in range(2):
                engine.train_batch()

    run_ranks(steps, 4, timeout=240)


@pytest.mark.parametrize(
    "strategy", [pytest.param("2*sp2", marks=DRAWN), *(pytest.param(one, marks=LONG) for one in ("2*tp2", "tp2pp2"))]
)
def test_one_queue_stands_still_where_a_device_decides_when_a_push_starts(strategy: str) -> None:
    """What once decided it, and each rank draws for itself."""
    with pytest.raises(StrictError, match=r"waits for .* it would wait for ever"):
        train_with_polls(strategy, stall_s=6)


@pytest.mark.parametrize(
    "number", [pytest.param(1001, marks=DRAWN), *(pytest.param(n, marks=LONG) for n in range(1002, 1025))]
)
def test_a_drawn_job_ends_with_the_references_numbers(number: int) -> None:
    """Strategies, schedules, phases, slices, node sizes and families together, all that a rank starts in one queue,
    room for one push, everybody slowed at random; the other rules are drawn. The first has several phases, sequence
    parallel ranks, a list and a V. Slices travel by themselves, as those of large models do."""
    rng, case = random.Random(number), random_case(number)
    if not any(THEN in text for text in case.strategies):  # the last strategy of several phases comes in step 3
        case = replace(case, steps=2)
    more = {name: rng.random() < 0.5 for name in ("connect", "lazy")}
    rules = Rules(one_queue=True, blocking=rng.random() < 0.2, sleeps=number, stall_s=120.0, **more)
    with one_push_at_a_time(), mock.patch.object(scratch_plan, "LARGE", 200):
        missed = compare(case, timeout=400.0, strict=rules).missed(case.aims, case.name)
    assert not missed, missed


@pytest.mark.drawn
def test_a_step_follows_one_that_failed() -> None:
    """A rank cannot read its sequences; all of them give the step up and go on with the next."""

    class Read:
        def __init__(self, items: list[Tensor]) -> None:
            self.items, self.fails = items, False

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> Tensor:
            if self.fails:
                raise OSError("the disk is gone")
            return self.items[index]

    def steps(rank: int) -> dict[str, Tensor]:
        data = Read(sequences())
        engine = small_engine(rank, strategies=["2*tp2", "tp2pp2"], data=data)
        engine.train_batch()
        data.fails = rank == 1
        with pytest.raises(Exception, match="the disk is gone"):
            engine.train_batch()
        data.fails = False
        for _ in range(2):
            engine.train_batch()
        return whole_state(engine)

    def both(rank: int) -> bool:
        with strict_world(Rules(one_queue=True, blocking=True, sleeps=2, stall_s=100)), one_push_at_a_time():
            strict = steps(rank)
        return same(strict, steps(rank))

    assert run_ranks(both, 4, timeout=240) == [True] * 4


def test_a_lane_that_nobody_waits_for_is_found() -> None:
    """The optimizer reads gradients that the lane may still be adding up."""

    def forgets(rank: int) -> None:
        forget = mock.patch.object(StrictLane, "wait", return_value=None)
        with strict_world(), one_push_at_a_time(), forget:
            trained(rank, ["2*tp2"], 4)

    with pytest.raises(StrictError, match="in the lane, and nobody has waited for its mark"):
        run_ranks(forgets, 4, timeout=240)


@pytest.mark.drawn
def test_no_step_connects_a_pair(tmp_path: Path) -> None:
    """Nor does one under a strategy that is no candidate, which the plans of an earlier run ask for."""
    plans = str(tmp_path / "plans.jsonl")

    def steps(rank: int, strategies: list[str], **hydra: object) -> tuple[list[list[int]], dict[str, Tensor]]:
        config = small_config(4, node_size=2, **hydra)
        config["hydra"]["strategies"] = strategies
        counts: list[list[int]] = []
        with strict_world(Rules(connect=True, lazy=True)) as transports:
            engine = small_engine(rank, config=config)
            runtime = StrategyRuntime.train

            def train(self: StrategyRuntime, *args: Any, **kwargs: Any) -> Any:
                counts.append([len(transport.connected) for transport in transports])
                loss = runtime(self, *args, **kwargs)
                counts.append([len(transport.connected) for transport in transports])
                return loss

            with mock.patch.object(StrategyRuntime, "train", train):
                for _ in range(3):
                    engine.train_batch()
            return counts, whole_state(engine)

    def both(rank: int) -> tuple[list[list[int]], list[list[int]], bool]:
        recorded, state = steps(rank, ["tp2 + pp2"], plans_file=plans)
        dist.barrier()  # rank 0 has written the plans
        others = ["4*tp1", "pp2 + tp2"]  # neither its group nor its edges
        replayed, again = steps(rank, others, planner={"ahead": 0}, replay=plans)
        return recorded, replayed, same(state, again)

    for recorded, replayed, equal in run_ranks(both, 4, timeout=240):
        assert recorded == [recorded[0]] * 6
        assert replayed == [replayed[0]] * 6
        assert recorded[0][0] > 0
        assert equal


@pytest.mark.parametrize(
    ("name", "rule"),
    [pytest.param(*row, marks=pytest.mark.drawn) for row in UNDER_STRICT.items()]
    + [
        pytest.param(case.name, rule, marks=pytest.mark.long)
        for case in CASES
        for rule in ("connect", "lazy", "blocking")
    ],
)
def test_rows_of_the_table(name: str, rule: str) -> None:
    (case,) = (case.shortened() for case in CASES if case.name == name)
    if UNDER_STRICT.get(name) == rule:
        case = replace(case, strategies=case.strategies[:2], steps=2)
    rules = Rules(**dict.fromkeys(rule.split(), True), stall_s=100)
    missed = compare(case, timeout=240, strict=rules).missed(case.aims, case.name)
    assert not missed, missed
