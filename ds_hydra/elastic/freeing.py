"""Frees a thread that waits for a rank that is gone: NCCL's communicators are aborted, the sockets of the groups shut.

[Note: freeing a thread]
gloo cannot abort, and a thread that waits for a living neighbour, which itself waits for the dead one, would wait for
the groups' time-out. When the sockets of its groups are shut, each wait ends with an ordinary RuntimeError.

  whose      of the groups alone: what was opened while groups were made, and what at the start has its other end in a
             rank, known by descriptor and inode, so that a number that has been used again is left alone. Connections
             of the membership, from or to one of its addresses, are spared, those too that its threads make meanwhile
  never      a listening socket: gloo ends the process when one of its own is shut
  answered   while groups are made, a rank waits at its listening socket for those of higher addresses, which may be
             dead: nothing is there to be shut. So this process connects to it itself, as each of the ranks, by the
             number with which gloo's connections begin, and closes: they have come, and are gone
  after      NCCL's communicators are aborted, for which they need their own sockets [Note: aborting]; a thread that is
             making one, which cannot be aborted, is freed by these
  when       `WAIT_S` after the fault is known. If a socket is shut just while gloo handles the end of its peer, a wait
             may be lost
  not yet    while bytes pass: gloo never ends the wait for a message of which a part has passed already. Between ranks
             that live it passes whole, also where nobody waits for it. Of one that the dead rank has begun the wait
             lasts until the groups' time-out
  how often  again and again until the thread is parked: it may be about to make groups, which opens sockets
  and else   a thread that is not parked after `stuck_s` will not be: the process has to end, and says where it stands
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hydra.ranks.groups import Aborting

if TYPE_CHECKING:
    from ds_hydra.ranks.channel import Texts

WAIT_S = 0.25
_PASSING_S = 3.0  # for which connections over which bytes pass are left alone
_ABORTED_S = 3.0  # in which communicators are aborted that are not being made
_ANSWER_S = 0.5  # within which this process has a connection to itself
_CARRIED = struct.Struct("=120xQQ")  # tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info
_ASKING = 2  # TCP_SYN_SENT, the state of a connection that the other end has not answered yet
_TABLES = {socket.AF_INET: "/proc/self/net/tcp", socket.AF_INET6: "/proc/self/net/tcp6"}  # of all connections
_FRAMES = 12  # the innermost ones tell where a thread stands
_Socket = tuple[int, str]  # descriptor, and "socket:[inode]"
_Address = tuple[str, int]


class Freeing:
    """Frees the thread that trains, on behalf of another one. It begins anew with each fault.

    `stuck` is called if the thread is not parked `stuck_s` seconds after `begin`, with the frames in which it stands;
    `spared` gives the addresses of which no connection is shut.
    """

    def __init__(
        self,
        stuck_s: float,
        stuck: Callable[[str], None],
        spared: Callable[[], Collection[_Address]] = frozenset[_Address],
    ) -> None:
        self._stuck_s, self._stuck, self._spared = stuck_s, stuck, spared
        self._made: set[_Socket] = set()
        self._before: set[_Socket] | None = None  # what was open before the groups that are being made
        self._lock = threading.Lock()
        self._parked = threading.Event()
        self._thread: threading.Thread | None = None
        self._freed, self._num_ranks = threading.get_ident(), 0
        self.aborting = Aborting()

    @contextmanager
    def making(self, num_ranks: int) -> Iterator[None]:
        """Within it the thread that trains makes or connects groups of so many ranks: the sockets that it opens are
        theirs."""
        with self._lock:
            self._before, self._num_ranks, self._freed = open_sockets(), num_ranks, threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._made |= self._opened()
                self._before = None

    def adopt(self, channel: Texts) -> None:
        """What is open now between ranks belongs to their groups, if it is not spared; every rank must call it. Other
        connections, such as those of a script to a database, are left alone."""
        own = {ends: one for one in open_sockets() if (ends := _ends(one)) is not None}
        texts = channel.texts(json.dumps(list(own)))
        told = [json.loads(text) for rank, text in enumerate(texts) if rank != channel.rank]
        others = {(_address(there), _address(here)) for ends in told for here, there in ends}
        with self._lock:
            self._made |= {one for ends, one in own.items() if ends in others}

    def begin(self) -> None:
        """A fault is known: free the thread that trains, in a thread of its own. More calls do nothing until `resume`,
        nor does the first one where that thread is parked."""
        with self._lock:
            if self._thread is None and not self._parked.is_set():
                self._thread = threading.Thread(target=self._free, daemon=True, name="freeing")
                self._thread.start()

    def park(self) -> None:
        """The thread that trains is out of all communication; it returns when nothing is shut any more."""
        self._parked.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def resume(self) -> None:
        """The thread that was parked is about to go on: the next fault is another one."""
        with self._lock:
            self._thread = None
            self._parked.clear()

    def forget(self) -> None:
        """All groups are gone, and with them their sockets."""
        self.aborting.resume()
        with self._lock:
            self._made.clear()

    def _opened(self) -> set[_Socket]:
        return set() if self._before is None else open_sockets() - self._before

    def _free(self) -> None:
        """The life of the thread."""
        began = time.monotonic()
        with self._lock:
            before = carried(self._made)
        while time.monotonic() < began + self._stuck_s:
            if self._parked.wait(WAIT_S):
                return
            self.aborting.abort(within=_ABORTED_S)
            with self._lock:
                opened, spared = self._opened(), self._spared()
                now = carried(self._made)
                waits = time.monotonic() < began + _PASSING_S
                passing = {name for name in now if waits and now[name] != before.get(name)}
                shut({one for one in self._made | opened if one[1] not in passing}, spared)
                answer(opened, self._num_ranks, spared)
                before = now
        if not self._parked.wait(WAIT_S):
            self._stuck(self._where())

    def _where(self) -> str:
        """The innermost frames of the thread that trains."""
        frame = sys._current_frames().get(self._freed)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame else "its thread has ended\n"


def open_sockets() -> set[_Socket]:
    """The sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


def _ends(one: _Socket) -> tuple[_Address, _Address] | None:
    """This process's address of a TCP connection and the other end's; None for any other socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one[0])) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return _address(connection.getsockname()), _address(connection.getpeername())
    return None


def _address(given: Sequence[Any]) -> _Address:
    """Host and port, alike for both families."""
    return str(given[0]).removeprefix("::ffff:"), int(given[1])


def carried(sockets: Collection[_Socket]) -> dict[str, tuple[int, ...]]:
    """By name, the bytes that the other end has acknowledged, and those that have come from there; of TCP alone."""
    found = {}
    for name, one in _still_open(sockets):
        with contextlib.suppress(OSError):
            found[name] = _CARRIED.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CARRIED.size))
    return found


def shut(sockets: Collection[_Socket], spared: Collection[_Address] = ()) -> None:
    """Shut those of the sockets that are still open, but none that listens [Note: freeing a thread]."""
    for name, one in _still_open(sockets):
        with contextlib.suppress(OSError):
            if not {_address(one.getsockname()), _other_end(name, one)} & set(spared):
                one.shutdown(socket.SHUT_RDWR)


def answer(sockets: Collection[_Socket], num_ranks: int, spared: Collection[_Address] = ()) -> None:
    """Come to those of the sockets that listen as each of so many ranks, and go [Note: freeing a thread]."""
    for _, one in _still_open(sockets):
        with contextlib.suppress(OSError):
            place = one.getsockname()
            if _address(place) in spared or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            for number in range(num_ranks):
                with socket.socket(one.family) as caller:
                    caller.settimeout(_ANSWER_S)
                    caller.connect(place)
                    caller.sendall(number.to_bytes(8, sys.byteorder))


def _still_open(sockets: Collection[_Socket]) -> Iterator[tuple[str, socket.socket]]:
    """Those of TCP, with their names."""
    for descriptor, name in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if os.readlink(f"/proc/self/fd/{one.fileno()}") == name and one.family in _TABLES:
                yield name, one


def _other_end(name: str, one: socket.socket) -> _Address:
    """Of a connection, or of one that is asked for; OSError for a socket that listens, or is neither."""
    try:
        return _address(one.getpeername())
    except OSError:
        # A host that is gone does not answer, and whoever connects to it would wait for minutes.
        if one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ASKING:
            raise
        inode = name.removeprefix("socket:[").removesuffix("]")
        for line in Path(_TABLES[one.family]).read_text().splitlines()[1:]:
            fields = line.split()  # a number, here, there, the state, ...
            if fields[9] == inode:
                host, port = fields[2].split(":")
                words = (int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8))
                return _address((socket.inet_ntop(one.family, b"".join(words)), int(port, 16)))
        raise
