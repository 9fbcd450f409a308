"""Frees a thread that waits in gloo for a rank that is gone: the sockets of the groups are shut under it.

[Note: freeing a thread]
gloo cannot abort, and a thread that waits for a living neighbour, which itself waits for the dead one, would wait for
the groups' time-out. When the sockets of its groups are shut, each wait ends with an ordinary RuntimeError.

  whose      of the groups alone: what was opened while groups were made, and what at the start has its other end in a
             rank, known by descriptor and inode, so that a number that has been used again is left alone. Connections
             of the membership, from or to one of its addresses, are spared, those too that its threads make meanwhile
  never      a listening socket: gloo ends the process when one of its own is shut. It has no peer, which tells it
  when       `WAIT_S` after the fault is known. If a socket is shut just while gloo handles the end of its peer, a wait
             may be lost
  how often  again and again until the thread is parked: it may be about to make groups, which opens sockets
  and else   a thread that is not parked after `stuck_s` will not be: the process has to end
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hydra.ranks.together import Texts

WAIT_S = 0.25
_Socket = tuple[int, str]  # descriptor, and "socket:[inode]"
_Address = tuple[str, int]


class Freeing:
    """Frees the thread that trains, on behalf of another one. It begins anew with each fault.

    `stuck` is called if the thread is not parked `stuck_s` seconds after `begin`; `spared` gives the addresses of which
    no connection is shut.
    """

    def __init__(
        self,
        stuck_s: float,
        stuck: Callable[[], None],
        spared: Callable[[], Collection[_Address]] = frozenset[_Address],
    ) -> None:
        self._stuck_s, self._stuck, self._spared = stuck_s, stuck, spared
        self._made: set[_Socket] = set()
        self._before: set[_Socket] | None = None  # what was open before the groups that are being made
        self._lock = threading.Lock()
        self._parked = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def making(self) -> Iterator[None]:
        """Within it groups are made or connected: the sockets that it opens are theirs."""
        with self._lock:
            self._before = open_sockets()
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
        with self._lock:
            self._made.clear()

    def _opened(self) -> set[_Socket]:
        return set() if self._before is None else open_sockets() - self._before

    def _free(self) -> None:
        """The life of the thread."""
        for _ in range(max(1, round(self._stuck_s / WAIT_S))):
            if self._parked.wait(WAIT_S):
                return
            with self._lock:
                shut(self._made | self._opened(), self._spared())
        if not self._parked.wait(WAIT_S):
            self._stuck()


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


def shut(sockets: Collection[_Socket], spared: Collection[_Address] = ()) -> None:
    """Shut those of the sockets that are still open, but none that listens [Note: freeing a thread]."""
    for descriptor, target in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            still_it = os.readlink(f"/proc/self/fd/{connection.fileno()}") == target
            if still_it and connection.family in (socket.AF_INET, socket.AF_INET6):
                ends = {connection.getsockname()[:2], connection.getpeername()[:2]}
                if ends.isdisjoint(spared):
                    connection.shutdown(socket.SHUT_RDWR)
