"""Heartbeats between ranks, outside the collectives: a dead or frozen rank in, an end of the job on all ranks out.

[Note: who ends when]
Every rank has connections to few others [Note: a tree of hosts], and a thread that sends heartbeats over them. A closed
connection means that the rank has died; silence means that it is frozen. Rank 0 tells all ranks what happened, as a
verdict, and each rank ends itself by it:

  what happened       a rank inside a step ends     a rank outside a step ends
  a rank is frozen    at once                       at once
  a rank died         after 4 turns (1 s)           after `frozen_s` (9 s)
  a rank failed       after 4 turns                 4 turns into its next step
  a rank has left     after 8 turns                 8 turns into its next step

Inside a step a rank waits for messages that the lost rank will never send, so the step can never complete. Outside a
step it waits for nobody: it may be about to leave by itself, as all ranks do after the last step, and to end it then
would make an error of a job that succeeded. The turns that a rank inside a step still gets are for its own exception:
often it is about to fail too, with an error that says more than the verdict.

Whoever connects must know the job's secret, which travels over the ranks' process group. Nothing that is received can
do more than end this job.
"""

from __future__ import annotations

import atexit
import json
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

from ds_hydra.watchdog.activity import IDLE
from ds_hydra.watchdog.connection import NONCE_BYTES, Connection
from ds_hydra.watchdog.host import Identity, end_process, kill, listen, own_address
from ds_hydra.watchdog.sides import TURN_S, Side
from ds_hydra.watchdog.tree import Peer, Verdict, places

logger = logging.getLogger(__name__)

_RANKS_A_BEAT = 256  # ranks that one rank hears in the time between two heartbeats of a small job
_START_S = 60.0  # until every rank has connected


class Texts(Protocol):
    """Exchanges short texts between all ranks (`ranks.channel.Channel`)."""

    rank: int
    num_ranks: int

    def texts(self, text: str) -> list[str]: ...


def beat_seconds(num_heard: int, heartbeat_s: float, frozen_s: float) -> float:
    """Seconds between two heartbeats of a rank: `heartbeat_s`, or more where many would keep one rank busy.

    The rank that hears most, `num_heard`, hears and answers them in a thread of the process that trains. Where it hears
    1024, each beats once in 3 s: still three beats within 9 s, after which a silent rank counts as frozen.
    """
    return max(heartbeat_s, min(frozen_s / 3, heartbeat_s * num_heard / _RANKS_A_BEAT))


class Watchdog:
    """This rank's heartbeat and its ear for the others'. See [Note: who ends when]."""

    def __init__(
        self,
        channel: Texts,
        where: Callable[[], tuple[int, str]],
        *,
        heartbeat_s: float = 1.0,
        frozen_s: float = 9.0,
        address: str | None = None,
        end: Callable[[str], None] | None = None,
    ):
        """Connect all ranks; every rank must call it. `where` says (step, activity); `end` replaces the process' end.

        Does nothing when the job has a single rank, or when `heartbeat_s` is 0.
        """
        self.rank, self.num_ranks, self._where = channel.rank, channel.num_ranks, where
        self.heartbeat_s, self.frozen_s, self._end = heartbeat_s, frozen_s, end or end_process
        self._verdict: Verdict | None = None
        self._turns = 0
        self._judged_at = 0.0
        self._reported = False
        self._outbox: list[str] = []
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._hook_before, self._hook = sys.excepthook, self._excepthook  # a bound method: kept, to compare later
        self.address: tuple[str, int] | None = None
        self.above: Peer | None = None
        if channel.num_ranks == 1 or heartbeat_s == 0:
            return
        self._connect(channel, address)
        self._thread = threading.Thread(target=self._live, daemon=True, name="watchdog")
        self._thread.start()
        channel.texts("")  # a rank that leaves at once must not be gone before the others have connected
        atexit.register(self.close)
        self._hook_before, sys.excepthook = sys.excepthook, self._hook

    @property
    def running(self) -> bool:
        """Whether this rank is watched."""
        return self._thread is not None

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""
        if self.running and not self.closing.is_set() and not self._reported:
            self._reported = True
            step, activity = self._where()
            text = f"rank {self.rank} failed in step {step} ({activity}): {type(error).__name__}: {error}"
            with self._lock:
                self._outbox.append(text[:1500])
            # Wait until rank 0 has heard this and answered. Its verdict may name another rank: a collective that fails
            # here because rank 2 died is rank 2's fault, and the user should read that beside this rank's traceback.
            deadline = time.monotonic() + 4 * TURN_S
            while self._verdict is None and time.monotonic() < deadline:
                time.sleep(TURN_S / 5)
            if self._verdict is not None and not self._verdict.text.startswith(f"rank {self.rank} "):
                sys.stderr.write(
                    f"[ds_hydra] rank {self.rank} failed in step {step} ({activity}): {self._verdict.text}. "
                    "Restart the job: it resumes from the newest checkpoint\n"
                )

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An exception that ends the script of one rank, also between steps, is told to the others."""
        self.report(error)
        self._hook_before(kind, error, trace)

    def close(self) -> None:
        """Say farewell: this rank leaves in good order, and the others may finish work that does not need it."""
        if self._thread is not None and not self.closing.is_set():
            self.closing.set()
            self._thread.join(timeout=5.0)
            atexit.unregister(self.close)
            if sys.excepthook is self._hook:
                sys.excepthook = self._hook_before

    # Connecting.

    def _connect(self, channel: Texts, address: str | None) -> None:
        mine = asdict(Identity.of_self())
        hosts = [json.loads(text)["host"] for text in channel.texts(json.dumps(mine))]
        tree = places(hosts)
        place = tree[self.rank]
        self.beat_s = beat_seconds(max(len(one.below) for one in tree), self.heartbeat_s, self.frozen_s)
        offer: dict[str, Any] = {}
        if place.below:
            # On one host the loopback address is enough, and no other host can reach the port. Only rank 0 may hear
            # other hosts.
            alone = all(hosts[rank] == hosts[self.rank] for rank in place.below)
            given = address if self.rank == 0 else None
            self.listener = listen(given or ("127.0.0.1" if alone else own_address()))
            offer["address"] = self.listener.getsockname()[:2]
        if self.rank == 0:
            offer["secret"] = secrets.token_bytes(32).hex()
        told = [json.loads(text) for text in channel.texts(json.dumps({"identity": mine, "offer": offer}))]
        self.identities = [Identity(**one["identity"]) for one in told]
        self.secret = bytes.fromhex(told[0]["offer"]["secret"])
        host, port = told[self.rank if place.above is None else place.above]["offer"]["address"]
        self.address = (host, port)
        now = time.monotonic()
        # Those below count as heard until _START_S from now, since none can beat before it has connected.
        self.below = {rank: Peer(rank, now + _START_S) for rank in place.below}
        self.peers = dict(self.below)
        if place.above is not None:
            self.above = self.peers[place.above] = Peer(place.above, now)
            self.above.connection = self._greet()

    def _greet(self) -> Connection:
        """Connect to the rank above and show that this rank knows the secret."""
        assert self.address is not None, "that rank has said where it listens"
        sock = socket.create_connection(self.address, timeout=_START_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_START_S)
        theirs = b""
        while len(theirs) < NONCE_BYTES:
            data = sock.recv(NONCE_BYTES - len(theirs))
            if not data:
                raise ConnectionError(f"the heartbeat connection was closed by {self.address}")
            theirs += data
        mine = secrets.token_bytes(NONCE_BYTES)
        connection = Connection(sock, server=False)
        connection.set_key(self.secret, theirs + mine)
        connection.send_raw(mine)
        connection.send({"rank": self.rank})
        return connection

    # Living: one thread.

    def _live(self) -> None:
        try:
            Side(self).run()
        except Exception:
            logger.exception("the watchdog of rank %d has ended; faults of other ranks go unnoticed", self.rank)

    def beat(self) -> dict[str, Any]:
        """The message that this rank sends every `beat_s` seconds: where it is."""
        step, activity = self._where()
        return {"beat": [step, activity]}

    def judge(self, verdict: Verdict) -> bool:
        """Accept a verdict, if it is the first; True if it was."""
        # One death makes many: ranks that lose their peer fail one after the other. Only the first is the cause.
        if self._verdict is not None:
            return False
        self._verdict, self._turns, self._judged_at = verdict, 0, time.monotonic()
        return True

    def obey(self) -> None:
        """Once a turn: end this process if the verdict asks for it."""
        verdict = self._verdict
        if verdict is None or self.closing.is_set():
            return
        step, activity = self._where()
        # Turns and not seconds: a turn passes only while this thread gets processor time. On a host so busy that a
        # rank runs for a moment every 1.5 s, 4 turns are 6 s, and its own error still has 4 chances to come first.
        # They count from 0 again for a rank that was idle, since its next step can still fail by itself.
        self._turns = self._turns + 1 if activity != IDLE else 0
        waited = time.monotonic() - self._judged_at
        if self._turns >= max(1, verdict.turns) or (verdict.idle_s is not None and waited >= verdict.idle_s):
            if verdict.frozen is not None:
                kill(self.identities[verdict.frozen])
            self._end(
                f"rank {self.rank} ends in step {step} ({activity}): {verdict.text}. Restart the job: it resumes "
                "from the newest checkpoint"
            )

    def take_outbox(self) -> list[str]:
        """Texts of errors on this rank, which the others are to hear."""
        with self._lock:
            taken, self._outbox = self._outbox, []
        return taken
