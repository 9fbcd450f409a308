"""All ranks of a job in; this rank's place among the heartbeats, and its connection to the rank above, out."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ds_hydra.ranks.together import Texts, agree
from ds_hydra.watchdog.connection import NONCE_BYTES, Connection
from ds_hydra.watchdog.host import Identity, listen, own_address
from ds_hydra.watchdog.tree import Place, places
from ds_hydra.zero_hetero.errors import ConfigError

START_S = 60.0  # until every rank has connected
_AGAIN_S = 0.25


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
    mine = asdict(Identity.of_self())
    hosts = [json.loads(text)["host"] for text in channel.texts(json.dumps(mine))]
    tree = places(hosts)
    rank, place = channel.rank, tree[channel.rank]
    offer: dict[str, Any] = {"identity": mine}
    listener, refused = None, None
    if place.below:
        # On one host the loopback address is enough, and no other host can reach the port. Only rank 0 may hear other
        # hosts.
        alone = all(hosts[below] == hosts[rank] for below in place.below)
        given = address if rank == 0 else None
        try:
            listener = listen(given or ("127.0.0.1" if alone else own_address()))
            offer["address"] = listener.getsockname()[:2]
        except (ConfigError, OSError) as error:
            refused = error
    if rank == 0:
        offer["secret"] = secrets.token_bytes(32).hex()
    told = [json.loads(text) for text in agree(channel, refused, "listening for heartbeats", json.dumps(offer))]
    host, port = told[rank if place.above is None else place.above]["address"]
    identities = [Identity(**one["identity"]) for one in told]
    most = max(len(one.below) for one in tree)
    return Meeting(place, most, identities, bytes.fromhex(told[0]["secret"]), (host, port), listener)


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
