"""A thread that makes groups with a rank that is gone comes out, wherever it stands."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.elastic.freeing import WAIT_S, Freeing
from ds_hydra.elastic.going_on import make_default_group
from ds_hydra.elastic.messages import Member, View
from ds_hydra.testing import run_ranks
from tests.support.elastic_job import LATEST, port_at, tell_and_go

CPU = torch.device("cpu")

HERE = "127.0.0.1"


@contextmanager
def before(port: int) -> Iterator[int]:
    """A port before this one, of a host that does not answer."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        for free in range(port - 1, 1024, -1):
            try:
                full.bind((HERE, free))
                break
            except OSError:
                continue
        full.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        yield full.getsockname()[1]


def makes_groups(_: int, peer: str) -> tuple[str, str]:
    """Rank 0 of two, of which the other has told its address and is gone: how that ends, and the next group's name."""
    dist.destroy_process_group()
    freeing = Freeing(20 * WAIT_S, lambda where: os._exit(9 if "init_process_group" in where else 10))
    server = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    done = threading.Event()

    def other() -> None:
        store = dist.PrefixStore("epoch1", dist.TCPStore(HERE, server.port, is_master=False))
        told = store.get("0//cpu//0/0")
        at = port_at(told)
        own = int.from_bytes(told[at : at + 2], "big")
        with nullcontext(LATEST) if peer == "awaited" else before(own) as port:
            tell_and_go(store, 1, 0, port)
            freeing.begin()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ended = "the groups were made"
    try:
        with freeing.making(2):
            make_default_group(view(1, server.port, 2), 0, 100.0, lambda: False, CPU)
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        ended = str(error)
    done.set()
    thread.join()
    freeing.park()
    if dist.is_initialized():
        dist.destroy_process_group()
    make_default_group(view(2, server.port, 1), 0, 100.0, lambda: False, CPU)
    assert dist.group.WORLD is not None
    return ended, dist.group.WORLD.group_name


def view(epoch: int, port: int, ranks: int) -> View:
    members = tuple(Member(id, "host", (HERE, 0), id, "") for id in range(ranks))
    return View(epoch, members, (), (HERE, port))


@pytest.mark.parametrize("peer", ["awaited", "called"])
def test_a_rank_that_connects_its_groups_is_freed_from_one_that_is_gone(peer: str) -> None:
    """In vain gloo would wait for 500 s."""
    ((ended, name),) = run_ranks(makes_groups, 1, peer, timeout=60)
    assert "onnect" in ended, "that is neither made, nor any other error"
    assert name == "0", "ranks find each other by the name, whether or not they could make this group before"


def test_a_view_whose_store_is_gone_is_given_up() -> None:
    with socket.create_server((HERE, 0)) as server:
        place = server.getsockname()
    asked: list[bool] = []

    def over() -> bool:
        asked.append(True)
        return len(asked) > 1

    with pytest.raises(ConnectionRefusedError):
        make_default_group(view(1, place[1], 2), 0, 1000.0, over, CPU)
    assert len(asked) == 2


def passes_a_large_message(rank: int, store: Path) -> list[str]:
    """Both ranks are freed while one message passes and neither has begun another: how each of two waits has ended."""
    dist.destroy_process_group()
    freeing, looks, waits = Freeing(60.0, lambda where: os._exit(9)), count(), list[str]()
    with freeing.making(2):
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
        dist.barrier()

    def carried(sockets: Collection[tuple[int, str]]) -> dict[str, int]:
        """Bytes pass until the message has passed, however slow this machine is."""
        return {name: 0 if waits else next(looks) for _, name in sockets}

    large = torch.ones(50_000_000)
    with mock.patch.multiple("ds_hydra.elastic.freeing", carried=carried, _PASSING_S=60.0):
        freeing.begin()
        for sends in (rank == 0, False):
            try:
                work = dist.isend(large, 1) if sends else dist.irecv(large, 1 - rank)
                assert work is not None
                work.wait()
                waits.append("passed")
            except RuntimeError:
                waits.append("freed")
        freeing.park()
    return waits


def test_a_message_of_which_a_part_has_passed_passes_whole(tmp_path: Path) -> None:
    """gloo would wait for the rest of it until its time-out."""
    assert run_ranks(passes_a_large_message, 2, tmp_path / "store", timeout=60) == [["passed", "freed"]] * 2
