"""Ranks of several hosts hear each other by way of the first rank of each: whoever goes is named on all of them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.screen import first, first_on_host
from ds_hydra.testing import run_ranks
from ds_hydra.watchdog import Watchdog, host, meeting
from ds_hydra.watchdog.host import listen

HOSTS = ("a", "a", "b", "b", "b")  # rank 0 hears 1 and 2, rank 2 hears 3 and 4
FROZEN_S = 2.0
CONNECTING = "connecting group 3 of 5, of ranks [0, 2]"


def watched(rank: int, lost: int, how: str) -> tuple[str, float]:
    """Why this rank of a step ended when rank `lost` went, and seconds from then."""
    ended: list[str] = []
    stuck, asleep = threading.Event(), threading.Event()

    def where() -> tuple[int, str]:
        if stuck.is_set() and threading.current_thread().name == "watchdog":
            asleep.set()
            time.sleep(FROZEN_S + 1.5 if how == "frozen" else 1.5)  # it neither speaks nor hears
        return 7, CONNECTING if how == "connects" else "forward"

    still_s = (2.0 if rank == lost else 60.0) if how in ("still", "connects") else None
    meeting = Channel(None, rank, len(HOSTS))
    with mock.patch.object(host, "host", return_value=HOSTS[rank]):
        dog = Watchdog(meeting, where, heartbeat_s=0.2, frozen_s=FROZEN_S, still_s=still_s, end=ended.append)
    assert len(dog.peers) == (2, 1, 3, 1, 1)[rank]
    time.sleep(0.5)
    meeting.texts("")
    began = time.monotonic()
    if rank == lost:
        if how == "failed":
            dog.report(ValueError("no good"))
        elif how == "left":
            dog.close()
        elif still_s is None:
            stuck.set()
            asleep.wait()
            for peer in dog.peers.values() if how == "died" else ():
                assert peer.connection is not None
                peer.connection.socket.shutdown(socket.SHUT_RDWR)
    while rank != lost and not ended and time.monotonic() < began + 8.0:
        time.sleep(0.02)
    took = time.monotonic() - began
    meeting.texts("")
    dog.close()
    return (ended or [""])[0], took


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("lost", "how", "told", "most_s"),
    [
        (4, "died", "rank 4 died, last heard of in step 7 (forward)", 3.0),
        (2, "died", "rank 2 died", 3.0),
        (0, "died", "rank 0 died", 3.0),
        (4, "frozen", "rank 4 is frozen", FROZEN_S + 2.0),
        (2, "frozen", "rank 2 is frozen", FROZEN_S + 2.0),
        (0, "frozen", "rank 0 is frozen", FROZEN_S + 2.0),
        (3, "failed", "rank 3 failed in step 7 (forward): ValueError: no good", 3.0),
        (3, "left", "rank 3's script ended after 6 steps, ", 4.0),
        (3, "still", "rank 3 has been in step 7 (forward) for 2 s", 5.0),
        (3, "connects", f"rank 3 has been in step 7 ({CONNECTING}) for 2 s", 5.0),
    ],
)
def test_who_goes_is_named_on_the_ranks_of_all_hosts(lost: int, how: str, told: str, most_s: float) -> None:
    for rank, (ended, took) in enumerate(run_ranks(watched, len(HOSTS), lost, how)):
        if rank != lost:
            assert told in ended, rank
            assert took < most_s, rank


def test_strangers_before_the_door_do_not_stop_a_start() -> None:
    """100 connections stand there when the ranks come, of which 12 say something wrong."""
    clients: list[socket.socket] = []

    def flooded(address: str) -> socket.socket:
        listener = listen(address)
        clients.extend(socket.create_connection(listener.getsockname(), timeout=5) for _ in range(100))
        for client in clients[:12]:
            client.sendall(b"GET / HTTP/1.1\r\n" * 8)
        return listener

    def start(rank: int) -> tuple[float, list[str]]:
        lines: list[str] = []

        def keep(record: logging.LogRecord) -> bool:
            lines.append(record.getMessage())
            return True

        logging.getLogger("ds_hydra.watchdog.connection").addFilter(keep)
        began, ended = time.monotonic(), list[str]()
        with mock.patch.object(meeting, "listen", flooded):
            dog = Watchdog(
                Channel(None, rank, 3), lambda: (1, "forward"), heartbeat_s=0.2, frozen_s=5.0, end=ended.append
            )
        took = time.monotonic() - began
        Channel(None, rank, 3).texts("")
        dog.close()
        assert not ended
        return took, lines

    found = run_ranks(start, 3)
    assert max(took for took, _ in found) < 8.0
    assert [len(lines) for _, lines in found] == [2, 0, 0], found  # the first and the tenth
    assert found[0][1][1].endswith("10 so far")


def test_one_rank_of_a_host_is_the_first_where_the_ranks_store_is_gone() -> None:
    key = f"ds_hydra/test/{os.getpid()}"

    def ask(rank: int) -> tuple[bool | None, bool]:
        dist.destroy_process_group()
        return first(key), first_on_host(key)

    found = run_ranks(ask, 3)
    assert [stored for stored, _ in found] == [None] * 3
    assert sum(on_host for _, on_host in found) == 1
