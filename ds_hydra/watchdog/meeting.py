"""How ranks meet for their heartbeats: each one's place among them, and its connection to the rank above.

[Note: a tree of hosts]
The first rank of each host hears the others of its host, and rank 0 hears those first ranks; each also hears whom it is
heard by. With the ranks 0..3 on one host and 4..7 on another:

  0 hears 1 2 3 and 4        4 hears 0 and 5 6 7        5 hears 4

So of 1024 ranks on hosts of 8, rank 0 hears 134 and not 1023. What a rank finds out goes up to rank 0, which decides
which fault was the first, and its verdict comes down again. Only of the rank above itself a rank decides alone: if
that one died or froze, nothing goes up or down past it. Its host's ranks then end by that verdict, and the rest of the
job by rank 0's, which found the same.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ds_hydra.ranks.calling import READS
from ds_hydra.ranks.channel import Texts, agree
from ds_hydra.watchdog.connection import NONCE_BYTES, Connection
from ds_hydra.watchdog.host import EXIT_CODE, Identity, listen, own_address
from ds_hydra.watchdog.progress import Stand
from ds_hydra.zero_hetero.errors import ConfigError

START_S = 60.0  # until every rank has connected
_AGAIN_S = 0.25


class Place(NamedTuple):
    """A rank's place in the tree."""

    above: int | None  # the rank that hears this one; None: it is rank 0
    below: tuple[int, ...]  # those that it hears


def places(hosts: Sequence[str]) -> list[Place]:
    """Every rank's place, by the name of its host."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    above = [None if rank == 0 else 0 if first[host] == rank else first[host] for rank, host in enumerate(hosts)]
    below: list[list[int]] = [[] for _ in hosts]
    for rank, of in enumerate(above):
        if of is not None:
            below[of].append(rank)
    return [Place(*place) for place in zip(above, map(tuple, below), strict=True)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job cannot go on, and how long a rank may still live [Note: who ends when].

    A rank inside a step has `turns` left, one outside a step `idle_s` seconds (None: until it begins a step).
    """

    rank: int  # whose fault it is
    text: str
    turns: int
    idle_s: float | None
    gone: bool = False  # that rank does nothing more
    frozen: bool = False  # nor can it end itself
    error: str = ""  # with which that rank failed; it tells of it by itself
    code: int = EXIT_CODE  # with which the other ranks end
    still: bool = False  # all write their stacks, and who does nothing ends outside a step, too


class Call(NamedTuple):
    """A call of all ranks in which a rank waits for others [Note: one call on all ranks]."""

    rank: int
    number: int  # of calls before it
    name: str


@dataclass
class Peer:
    """What a rank knows of another one."""

    rank: int
    heard: float
    step: int = 0
    activity: str = "start"
    connection: Connection | None = None
    left: bool = False
    judged: bool = False
    call: Call | None = None  # in which it waits, or one below it
    call_since: float = 0.0
    stands: Sequence[Stand] = ()  # of it and those below it, as far as they matter

    def note_call(self, call: Call | None, now: float) -> None:
        """It waits in this call."""
        if call != self.call:
            self.call, self.call_since = call, now


def different_calls(peers: Iterable[Peer], now: float, stays_s: float) -> dict[int, str]:
    """The calls of ranks, by name, that wait in different ones for longer than `stays_s`, though equally many were made
    before; empty where there are none."""
    waiting = ((peer.call, peer.call_since) for peer in peers)
    calls = [(call, now - since > stays_s) for call, since in waiting if call is not None and call.name != READS]
    for number in {call.number for call, _ in calls}:
        if len({call.name for call, stays in calls if stays and call.number == number}) > 1:
            return {call.rank: call.name for call, _ in calls if call.number == number}
    return {}


class Meeting(NamedTuple):
    """What a rank knows when all have said who they are and where they listen."""

    place: Place
    most_heard: int  # by any rank
    identities: Sequence[Identity]
    secret: bytes
    address: tuple[str, int]  # where the rank above listens; this rank's own on rank 0
    listener: socket.socket | None  # where ranks below connect


def meet(channel: Texts, address: str | None) -> Meeting:
    """Every rank must call it. ConfigError, on all of them, where one cannot listen; `address` is for rank 0."""
    mine = Identity.of_self()
    hosts = channel.texts(mine.host)
    tree = places(hosts)
    rank, place = channel.rank, tree[channel.rank]
    among = [hosts[below] for below in place.below]  # of other hosts on rank 0 alone
    listener, told = listens(channel, mine, "heartbeats", among, None if rank else address)
    host, port = told[rank if place.above is None else place.above]["address"]
    identities = [Identity(**one["identity"]) for one in told]
    most = max(len(one.below) for one in tree)
    return Meeting(place, most, identities, bytes.fromhex(told[0]["secret"]), (host, port), listener)


def listens(
    channel: Texts, mine: Identity, what: str, among: Sequence[str], address: str | None, **told: Any
) -> tuple[socket.socket | None, list[dict[str, Any]]]:
    """Listen for ranks of the hosts `among`, if there are any; and what every rank tells: its "identity", its "address"
    and more, rank 0 also a "secret". Every rank must call it. ConfigError, on all of them, where one cannot listen."""
    listener, refused = None, None
    told |= {"identity": asdict(mine)} | ({"secret": secrets.token_hex(32)} if channel.rank == 0 else {})
    try:
        if among:
            # On one host the loopback address is enough, and no other host can reach the port.
            listener = listen(address or ("127.0.0.1" if {*among} == {mine.host} else own_address()))
            told["address"] = listener.getsockname()[:2]
    except (ConfigError, OSError) as error:
        refused = error
    return listener, [json.loads(text) for text in agree(channel, refused, f"listening for {what}", json.dumps(told))]


def greet(address: tuple[str, int], secret: bytes, rank: int) -> Connection:
    """Connect `rank` to the one above it, which listens there, and show that it knows the secret.

    ConnectionError when it cannot be reached.
    """
    deadline = time.monotonic() + START_S
    while True:
        try:
            return greeted(address, secret, rank, max(1.0, deadline - time.monotonic()))
        except OSError as error:
            # Too many strangers may stand before its door. They are sent away after a while.
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"rank {rank} could not reach the heartbeats' port {address} in {START_S:.0f} s ({error}): "
                    "see that no firewall and no flood of connections is in between, or give another address in "
                    "hydra.faults.address"
                ) from error
            time.sleep(_AGAIN_S)


def greeted(address: tuple[str, int], secret: bytes, rank: int, patience_s: float) -> Connection:
    """One try of `greet`; OSError where it fails within `patience_s`, ConnectionRefusedError where nobody listens."""
    sock = socket.create_connection(address, timeout=patience_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = b""
        while len(theirs) < NONCE_BYTES:
            data = sock.recv(NONCE_BYTES - len(theirs))
            if not data:
                raise ConnectionError("the connection was closed")
            theirs += data
    except OSError:
        sock.close()
        raise
    mine = secrets.token_bytes(NONCE_BYTES)
    connection = Connection(sock, server=False)
    connection.set_key(secret, theirs + mine)
    connection.send_raw(mine)
    connection.send({"rank": rank})
    return connection
