"""Threads that wait for a rank that is gone are freed: sockets are shut, communicators aborted."""

from __future__ import annotations

import json
import socket
import threading
import time
from unittest import mock

import pytest

from ds_hydra.elastic.freeing import WAIT_S, Freeing, carried, open_sockets, shut
from ds_hydra.ranks.groups import Aborting


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection to it."""
    made = socket.create_connection(listener.getsockname())
    return made, listener.accept()[0]


def is_shut(one: socket.socket) -> bool:
    one.settimeout(0.05)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False


def test_listeners_and_the_connections_of_members_are_spared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as members, socket.create_server(("127.0.0.1", 0)) as groups:
        made, taken = pair(members)
        of_groups, other = pair(groups)
        left, right = socket.socketpair()
        shut(open_sockets(), {members.getsockname()})
        assert is_shut(of_groups)
        assert is_shut(other)
        assert not any(map(is_shut, (made, taken, left, right)))
        again, _ = pair(groups)  # it listens still
        for one in (made, taken, of_groups, other, left, right, again):
            one.close()


def test_who_is_parked_is_not_freed_until_it_goes_on() -> None:
    stuck: list[str] = []
    freeing = Freeing(WAIT_S, stuck.append)
    freeing.park()
    freeing.begin()  # a fault that becomes known when its thread has come out already
    time.sleep(3 * WAIT_S)
    assert not stuck
    freeing.resume()
    freeing.begin()
    freeing.begin()
    time.sleep(3 * WAIT_S)
    assert len(stuck) == 1, "a thread that is not parked in time is told to be stuck, once"
    assert "in test_who_is_parked_is_not_freed_until_it_goes_on" in stuck[0], "and where it stands"


def test_a_connection_is_left_alone_while_bytes_pass() -> None:
    """Bytes have passed over one of two at each of the first looks."""
    looks = [{"one": (at, 0), "other": (5, 5)} for at in (0, 17, 34, 34, 34)]
    freeing, left_alone = Freeing(20 * WAIT_S, lambda _: None), list[set[str]]()
    freeing._made |= {(0, "one"), (1, "other")}

    def shut(sockets: set[tuple[int, str]], _: object) -> None:
        left_alone.append({"one", "other"} - {name for _, name in sockets})
        if len(left_alone) == 4:
            freeing._parked.set()

    with mock.patch.multiple("ds_hydra.elastic.freeing", carried=mock.Mock(side_effect=looks), shut=shut):
        freeing.begin()
        assert freeing._thread is not None
        freeing._thread.join()
    assert left_alone == [{"one"}, {"one"}, set(), set()]


def test_bytes_that_pass_are_counted() -> None:
    def sums() -> list[int]:
        return [sum(of_ends) for of_ends in zip(*carried(made).values(), strict=True)]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = open_sockets()
        sends, receives = pair(listener)
        made = open_sockets() - before
        acknowledged, come = sums()
        assert sums() == [acknowledged, come] == [acknowledged, 0]
        sends.send(b"part of a message")
        deadline = time.monotonic() + 5.0
        while sums() != [acknowledged + 17, 17] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sums() == [acknowledged + 17, 17]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
            assert not carried(open_sockets() - before - made), "one of another kind is no obstacle"
        sends.close()
        receives.close()


class Told:
    """All ranks' texts: this one's, and that of a rank which has these connections."""

    rank, num_ranks = 0, 2

    def __init__(self, *theirs: socket.socket):
        self.theirs = [(one.getsockname(), one.getpeername()) for one in theirs]

    def texts(self, text: str) -> list[str]:
        return [text, json.dumps(self.theirs)]


def test_at_the_start_what_leads_to_another_rank_is_shut_and_nothing_of_a_script() -> None:
    with socket.create_server(("127.0.0.1", 0)) as of_rank, socket.create_server(("127.0.0.1", 0)) as database:
        mine, theirs = pair(of_rank)
        own, answers = pair(database)
        freeing = Freeing(WAIT_S, lambda _: None)
        freeing.adopt(Told(theirs))
        freeing.begin()
        time.sleep(3 * WAIT_S)
        assert is_shut(mine)
        assert not is_shut(own)
        for one in (mine, theirs, own, answers):
            one.close()


class Communicator:
    """Its abort returns when that of all has begun, as the kernels of each hold up the others'."""

    def __init__(self, begun: threading.Barrier):
        self.begun, self.aborted = begun, 0

    def abort(self) -> None:
        self.begun.wait(timeout=10)
        self.aborted += 1


def test_all_are_aborted_at_once_and_once() -> None:
    begun = threading.Barrier(3)
    all_of_them = [Communicator(begun) for _ in range(3)]
    aborting = Aborting(lambda: all_of_them)
    aborting.check()
    others = [threading.Thread(target=aborting.abort) for _ in range(2)]
    for other in others:
        other.start()
    aborting.abort()
    assert [one.aborted for one in all_of_them] == [1, 1, 1], "and it returns when that is done, whoever began"
    for other in others:
        other.join()
    with pytest.raises(RuntimeError, match="another rank is gone"):
        aborting.check()
    late = Communicator(threading.Barrier(1))
    all_of_them.append(late)  # made while its rank was being freed
    aborting.abort()
    assert [one.aborted for one in all_of_them] == [1, 1, 1, 1]
    aborting.resume()
    aborting.check()


def test_nothing_that_comes_after_it_has_begun_is_believed() -> None:
    """A kernel may end as soon as the first communicator is told."""
    believed: list[bool] = []

    class First:
        def abort(self) -> None:
            try:
                aborting.check()
            except RuntimeError:
                believed.append(False)
            else:
                believed.append(True)

    first = First()
    aborting = Aborting(lambda: [first])
    aborting.abort()
    assert believed == [False]
