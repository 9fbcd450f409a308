"""What rank 0's watchdog takes of a core: its own thread, with the connections of all ranks that it hears.

Those ranks, the others of its host and the first one of each other host, are one forked process, which connects once
for each of them, sends their heartbeats at the times at which they would, and reads the answers. The figure is the
watchdog's thread's own time; what the kernel does for the sockets is in it.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds_hydra.watchdog.connection import Connection
from ds_hydra.watchdog.meeting import greet
from ds_hydra.watchdog.watchdog import Watchdog
from tools import aims, machine
from tools.devices.count import NODE_SIZE
from tools.devices.table import Table

JOBS = (64, 1024)
HEARTBEAT_S = 1.0
_CONNECTING_S = 60.0
_MEASURED_S, _QUICK_S = 15.0, 3.0


@dataclass
class _Alone:
    """The texts of many ranks, all of which say what rank 0 says, but for the host that they are on."""

    num_ranks: int
    rank: int = 0

    def texts(self, text: str) -> list[str]:
        if not text.startswith("{"):  # all but who they are
            return [text] * self.num_ranks
        said = json.loads(text)
        return [json.dumps(said | {"host": f"node{rank // NODE_SIZE}"}) for rank in range(self.num_ranks)]


def heartbeats(quick: bool) -> Table:
    """The share of a core, for jobs of several sizes; quick: of the largest, measured for a shorter time."""
    table = Table("rank 0's watchdog", ["ranks", "hears", "beats a rank and s", "of a core", "aim"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, _most_files()), _most_files()))
    most = machine.limit(aims.HEARTBEATS)
    for num_ranks in JOBS[-1:] if quick else JOBS:
        dog, share, connected = _measured(num_ranks, _QUICK_S if quick else _MEASURED_S)
        table.rows.append([num_ranks, connected, round(1 / dog.beat_s, 2), f"{share:.2%}", str(most)])
        if connected != len(dog.below):
            table.missed.append(f"only {connected} of {len(dog.below)} ranks have connected")
        if share > most.here:
            table.missed.append(f"{num_ranks} ranks: {share:.4f} of a core (aim {most})")
    return table


def _most_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _measured(num_ranks: int, seconds: float) -> tuple[Watchdog, float, int]:
    """A watchdog that has run, the share of a core that its thread took, and its connections."""
    dog = Watchdog(_Alone(num_ranks), lambda: (1, "forward"), heartbeat_s=HEARTBEAT_S, end=lambda text: None)
    assert dog.address is not None, "it listens"
    child = os.fork()
    if child == 0:
        try:
            _others(dog)
        finally:
            os._exit(0)
    try:
        deadline = time.monotonic() + _CONNECTING_S
        while _connected(dog) < len(dog.below) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert dog._thread is not None, "several ranks are watched"
        assert dog._thread.ident is not None, "it runs"
        clock = time.pthread_getcpuclockid(dog._thread.ident)
        time.sleep(dog.beat_s)  # what connecting has left is over
        began, spent = time.monotonic(), time.clock_gettime(clock)
        time.sleep(seconds)
        share = (time.clock_gettime(clock) - spent) / (time.monotonic() - began)
        return dog, share, _connected(dog)
    finally:
        dog.closing.set()
        assert dog._thread is not None, "it runs"
        dog._thread.join(timeout=10)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _connected(dog: Watchdog) -> int:
    return sum(peer.connection is not None for peer in dog.peers.values())


def _others(dog: Watchdog) -> None:
    """The life of the ranks that rank 0 hears: each sends a beat in its turn, and hears what rank 0 says."""
    selector = selectors.DefaultSelector()
    connections: list[Connection] = []
    assert dog.address is not None, "it listens"
    for rank in dog.below:
        connections.append(greet(dog.address, dog.secret, rank))
        connections[-1].socket.setblocking(False)
        selector.register(connections[-1].socket, selectors.EVENT_READ, connections[-1])
    _beat_for_ever(connections, selector, dog.beat_s)


def _beat_for_ever(connections: Sequence[Connection], selector: selectors.BaseSelector, beat_s: float) -> None:
    begin, turn = time.monotonic(), 0
    while True:
        due = begin + turn * beat_s / len(connections)
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            key.data.receive()
            for _ in key.data.messages():
                pass
        while time.monotonic() >= begin + turn * beat_s / len(connections):
            connections[turn % len(connections)].send({"beat": [1, "forward"]})
            turn += 1
