"""Worlds: channels, groups and transports of all ranks, given back without a trace; ranks that give no result."""

from __future__ import annotations

import gc
import logging
import os
import re
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.engine import engine as engines
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.ranks import channel as channels
from ds_hydra.ranks import world as worlds
from ds_hydra.ranks.channel import Channel, first_channel
from ds_hydra.ranks.groups import GroupCache, apart, make_groups, needed_groups, side_groups
from ds_hydra.ranks.world import World
from ds_hydra.step.strategy_runtime import teams_of
from ds_hydra.testing import RankError, run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize
from tests.support.small_job import small_engine
from tests.support.strict import OnDevices
from tools import aims


# --- Worlds: channels, groups and transports of all ranks, given back without a trace.
def test_texts_of_any_length_reach_all_ranks() -> None:
    sizes = (0, 5, 4088, 4089, 1 << 15, (1 << 15) + 1, 200_000)

    def talk(rank: int) -> list[tuple[str, list[str]]]:
        channel = Channel(dist.group.WORLD, rank, 3)
        return [
            (channel.tell("ä" * size if rank == 0 else None), channel.texts(f"{rank}" * (size if rank == 1 else 2)))
            for size in sizes
        ]

    for found in run_ranks(talk, 3):
        assert found == [("ä" * size, ["00", "1" * size, "22"]) for size in sizes]


def test_rows_and_errors_reach_all_ranks() -> None:
    def talk(rank: int) -> tuple[torch.Tensor, str]:
        channel = Channel(dist.group.WORLD, rank, 3)
        assert channel.settle(None, "trying", f"r{rank}") == ["r0", "r1", "r2"]
        table = channel.rows(torch.tensor([[rank, 2.5]], dtype=torch.float64))
        with pytest.raises(CheckpointError) as raised:
            channel.settle(OSError("no") if rank else None, "saving")
        return table, str(raised.value)

    for table, text in run_ranks(talk, 3):
        assert table.tolist() == [[[0, 2.5]], [[1, 2.5]], [[2, 2.5]]]
        assert text == "saving failed on rank 1, 2: no"


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_rows_of_many_ranks_come_in_few_steps(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_RING", 1)

    def talk(rank: int) -> tuple[torch.Tensor, int]:
        with mock.patch.object(dist, "isend", wraps=dist.isend) as sends:
            table = Channel(dist.group.WORLD, rank, num_ranks).rows(torch.tensor([rank, 10 * rank]))
        return table, sends.call_count

    for table, sent in run_ranks(talk, num_ranks):
        assert table.tolist() == [[rank, 10 * rank] for rank in range(num_ranks)]
        assert sent == (num_ranks - 1).bit_length()


def test_groups_without_a_common_rank_are_made_together() -> None:
    assert apart([(0, 1), (2, 3), (1, 2), (0, 1, 2, 3), (4, 5)]) == [
        ((0, 1), (2, 3), (4, 5)),
        ((1, 2),),
        ((0, 1, 2, 3),),
    ]
    assert apart([]) == []
    made: list[list[tuple[int, ...]]] = []
    cache = GroupCache(2, lambda groups: made.append(list(groups)))
    cache.create([(0, 1), (2, 3)])
    cache.create([(2, 3), (0, 2), (0, 1), (0, 2)])
    assert made == [[(0, 1), (2, 3)], [(0, 2)]]
    assert len(cache) == 3


def test_one_call_splits_a_group_that_knows_its_device() -> None:
    """Ranks outside the wanted groups are split off one by one."""
    everyone, ranks = world_of_device(0)
    with mock.patch.multiple(dist, split_group=mock.DEFAULT, **ranks) as patched:
        patched["split_group"].return_value = "own"
        assert make_groups(everyone, [(0, 1), (3, 4)]) == "own"
    patched["split_group"].assert_called_once_with(everyone, [[0, 1], [3, 4], [2], [5]], None, None)


def test_torch_cannot_split_a_group_that_is_not_its_first() -> None:
    """It would end the process: a second default group, after a loss or of a script, makes groups one by one."""
    everyone, ranks = world_of_device(7)
    with mock.patch.multiple(dist, new_group=lambda ranks, *_, **__: ranks, **ranks):
        assert make_groups(everyone, [(0, 1), (3, 4)]) == [3, 4]


def world_of_device(uid: int) -> tuple[Any, dict[str, Any]]:
    """A default group of six on devices, that many of NCCL's after the first one; and what torch says to rank 3."""
    backend = SimpleNamespace(uid=uid)
    everyone = SimpleNamespace(bound_device_id=torch.device("cuda", 0), _get_backend=lambda device: backend)
    return everyone, {"get_rank": lambda group: 3, "get_world_size": lambda group: 6}


def test_a_group_of_one_rank_and_an_inference_engine_waits_for_no_other_rank() -> None:
    """What torch splits a new group from, where the default one is bound to a device: nothing among side groups."""

    def made(rank: int) -> list[torch.device | None]:
        everyone: Any = dist.group.WORLD
        bound, device = list[torch.device | None](), torch.device("cuda", rank)
        everyone.bound_device_id = device
        for within in (nullcontext(), side_groups(), nullcontext()):
            with within:
                bound.append(everyone.bound_device_id)  # what `_new_process_group_helper` asks
                if everyone.bound_device_id is None and rank == 0:
                    alone = dist.new_group([0], backend="gloo", use_local_synchronization=True)
                    assert dist.get_process_group_ranks(alone) == [0]
        everyone.bound_device_id = None
        return bound

    assert run_ranks(made, 2) == [[torch.device("cuda", rank), None, torch.device("cuda", rank)] for rank in range(2)]


def test_a_rank_alone_talks_to_itself() -> None:
    channel = Channel(None, 0, 1)
    assert channel.texts("x") == ["x"]
    assert channel.tell("x") == "x"
    assert channel.rows(torch.ones(2)).tolist() == [[1, 1]]


def test_worlds_are_given_back_whole() -> None:
    def many(rank: int) -> list[tuple[int, int]]:
        seen = []
        for turn in range(10):
            world = World.of_process(torch.device("cpu"), Cluster.of(4, 2), timeout_s=30, aborts=None)
            world.groups.create([(0, 1, 2, 3)] if turn % 2 else [(0, 1), (2, 3)])
            assert world.channel.texts(str(rank)) == ["0", "1", "2", "3"]
            assert world.background.tell("x" if rank == 0 else None) == "x"
            received = torch.zeros(1)
            sent = torch.tensor([float(rank)])
            world.links.exchange([((rank + 1) % 4, sent)], [((rank - 1) % 4, received)]).wait()
            assert received.item() == (rank - 1) % 4
            world.close()
            del world
            gc.collect()
            seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        return seen

    for seen in run_ranks(many, 4):
        assert seen[9] <= seen[3], seen


@pytest.mark.parametrize("made", ["before", "after", "control"])
def test_how_long_ranks_wait_may_be_shortened(made: str) -> None:
    def late(rank: int) -> str:
        world = World.of_process(torch.device("cpu"), Cluster.of(2, 2), timeout_s=60, aborts=None)
        if made == "before":
            world.groups.create([(0, 1)])
        world.wait_at_most(0.5)
        world.groups.create([(0, 1)])
        group = world.group if made == "control" else world.groups.of_team((0, 1))
        if rank == 1:
            time.sleep(2.0)
            return ""
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        return str(raised.value)

    assert "Timed out waiting 500ms" in run_ranks(late, 2)[0]


def test_twins_have_groups_of_their_own_beside_those_of_sequence_parallel_ranks() -> None:
    """On devices: what shares a communicator ends in one order, and pulls would hold up the model's collectives."""
    placed = place_strategy(StrategyShape.parse("2*sp2"), 4, 2)

    def others(rank: int) -> bool:
        with mock.patch.object(worlds, "dist", OnDevices()):
            world = World.of_process(torch.device("cpu"), Cluster.of(4, 2), timeout_s=60, aborts=None)
            world.connect([placed], links=(), edges=(), teams=tuple(teams_of(placed, 2)))
        ranks = (0, 1) if rank < 2 else (2, 3)
        different = world.groups.of_team(ranks) is not world.teams.of_team(ranks)
        world.close()
        return different

    assert run_ranks(others, 4) == [True] * 4


def open_sockets() -> int:
    """Sockets of this process."""
    found = 0
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(handle).startswith("socket:")
    return found


def test_groups_for_small_messages_connect_pairs_when_they_talk() -> None:
    """As on devices: on gloo alone such a group is the default one, whose sockets are left out."""

    def start(rank: int) -> list[int]:
        before, counts = open_sockets(), []

        def note() -> None:
            counts.append(open_sockets() - before)
            dist.barrier()  # or another rank, a step ahead, would be among this one's connections

        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            with first_channel() as channel:
                note()
                channel.texts("a host's name")
                note()
            note()
        return counts

    for made, talks, closed in run_ranks(start, 12, timeout=120):
        assert closed < made < talks <= aims.SOCKETS


@pytest.mark.parametrize(("launcher", "size"), [({}, 2), ({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, 4)])
def test_a_job_asks_the_hosts_for_the_size_of_its_nodes(launcher: dict[str, str], size: int) -> None:
    def start(rank: int) -> NodeSize:
        os.environ.update(launcher)
        with mock.patch.object(engines, "host", return_value="ab"[rank // 2]):
            return small_engine(rank).crew.world.node_size

    assert run_ranks(start, 4) == [size] * 4


@pytest.mark.drawn
def test_a_job_on_uneven_nodes_trains_as_one_on_even_ones() -> None:
    """Launchers tell each rank of its own node alone: ranks that took it for everybody's would wait for each other."""

    def train(rank: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], float, str]:
        own = sizes[0] if rank < sizes[0] else sizes[1]
        os.environ |= {"LOCAL_WORLD_SIZE": str(own), "TORCHELASTIC_RUN_ID": "x"}
        engine = small_engine(rank, strategies=["2*sp2", "tp2 + 2*tp1", "4*tp1"], choose="cycle")
        for _ in range(3):
            engine.train_batch()
        assert engine.last_step is not None
        found = engine.crew.world.cluster.sizes, engine.last_step.loss, engine.last_step.plan_digest
        engine.destroy()
        return found

    (even, even_loss, even_digest), *_ = run_ranks(train, 4, (2, 2))
    (sizes, loss, digest), *others = run_ranks(train, 4, (1, 3))
    assert (even, sizes) == ((2, 2), (1, 3))
    assert loss == pytest.approx(even_loss, rel=1e-5)
    assert digest != even_digest
    assert {other[2] for other in others} == {digest}


def test_a_listed_strategy_that_lays_a_tensor_parallel_group_over_two_nodes_is_told() -> None:
    def start(rank: int) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_hydra").addHandler(handler)
        small_engine(rank, strategies=["tp1 + tp2 + tp1", "tp2 + 2*tp1"], node_size=2).destroy()
        return [line for line in lines if "lie on two nodes" in line]

    (told,), *others = run_ranks(start, 4)
    assert told.startswith("strategy 'tp1 + tp2 + tp1': the ranks 1..2 of a tensor parallel group of pipeline 1 lie")
    assert told.endswith("in the order '2*tp1 + tp2' none would")
    assert others == [[], [], []]


CLUSTERS: list[tuple[list[Any], str]] = [
    ([{"ranks": 2, "nodes": 2, "device": "cpu"}], ""),
    ([{"ranks": 2}], "nodes of 2 = 2 ranks but the job has 4"),
    ([{"ranks": 2, "device": "h800"}, {"ranks": 2, "device": "h20"}],
     r"devices of 2 classes: 2 of h800 .ranks 0\.\.1., 2 of h20 .ranks 2\.\.3.*start ranks of one class only"),
]  # fmt: skip


def test_a_cluster_that_is_not_so_or_mixed_is_refused_on_all_ranks() -> None:
    def start(rank: int, cluster: list[Any]) -> str:
        try:
            small_engine(rank, cluster=cluster).destroy()
        except ConfigError as error:
            return str(error)
        return ""

    for refusals in run_ranks(lambda rank: [start(rank, cluster) for cluster, _ in CLUSTERS], 4):
        for (_, words), refusal in zip(CLUSTERS, refusals, strict=True):
            assert bool(refusal) == bool(words)
            assert re.search(words, refusal)


class Nccl:
    """What of torch's NCCL backend is asked for."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False):
            self.first, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)


def test_groups_take_as_much_of_a_device_as_their_part_allows() -> None:
    """Pulls, pushes and stages few multiprocessors; what computing waits for comes first."""
    placed = place_strategy(StrategyShape.parse("2*tp2"), 4, 2)

    def options_of_groups(rank: int) -> list[tuple[int, bool, int | None]]:
        noted: list[tuple[int, bool, int | None]] = []
        make = dist.new_group

        def new_group(ranks: Any, timeout: Any = None, backend: Any = None, pg_options: Any = None) -> Any:
            if pg_options is not None:
                noted.append((len(ranks), pg_options.first, pg_options.config.max_ctas))
            assert (pg_options is None) == (backend == "gloo")
            return make(ranks, timeout, backend)

        with (
            mock.patch.object(dist, "get_backend", return_value="nccl"),
            mock.patch.object(dist, "ProcessGroupNCCL", Nccl, create=True),
            mock.patch.object(dist, "new_group", new_group),
        ):
            world = World.of_process(torch.device("cpu"), Cluster.of(4, 2), timeout_s=60, aborts=None)
            world.groups.create(needed_groups(placed))
            world.teams.create(teams_of(placed, 2))
        assert world.links.group is not dist.group.WORLD  # type: ignore[attr-defined]
        world.close()
        return noted

    of_all, of_tensor_parallel, of_twins = [(4, False, 8), (4, True, 8)], [(2, True, None)] * 2, [(2, False, 8)] * 2
    assert run_ranks(options_of_groups, 4) == [of_all + of_tensor_parallel + of_twins] * 4


def test_operators_that_add_up_in_one_order_suffice_for_training() -> None:
    def train(rank: int) -> list[bool]:
        engine = small_engine(rank, deterministic=True)
        engine.train_batch()
        during = torch.are_deterministic_algorithms_enabled()
        engine.destroy()
        return [during, torch.are_deterministic_algorithms_enabled()]

    assert run_ranks(train, 2) == [[True, False]] * 2


# --- What `run_ranks` says of a rank that gives no result: where it hangs, and how it left.
def test_a_rank_that_hangs_tells_where(capfd: pytest.CaptureFixture[str]) -> None:
    def sleeps_on_rank_1(rank: int) -> None:
        time.sleep(60 * rank)

    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_ranks(sleeps_on_rank_1, 2, timeout=2)
    assert capfd.readouterr().err.count("in sleeps_on_rank_1") == 1


def test_a_rank_that_leaves_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 left without a result, exit code 3"):
        run_ranks(lambda rank: os._exit(3), 1)
