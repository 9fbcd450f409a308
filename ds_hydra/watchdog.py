"""Heartbeats between ranks, outside the collectives: a dead or frozen rank in, an end of the job on all ranks out.

[Note: who ends when] Every rank has a connection to rank 0 and a thread that beats on it. A closed connection is a
dead rank, a silent one a frozen rank. What happened is told to all ranks as a verdict; each ends itself by it:
a frozen rank ends the job at once; a dead, failed or departed one ends ranks that are inside a step, since that
step can never complete, while a rank outside a step may be about to leave as well and gets more time. Times are counted
in turns of the thread: a rank that gets no processor time judges nobody.

Whoever connects must know the job's secret, which travels over the ranks' process group. Nothing that is received can
do more than end this job.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

EXIT_CODE = 75  # "try again": a restart resumes
IDLE = "idle"  # phase of a rank outside a step

_MAX_FRAME = 4096
_MAC_BYTES, _NONCE_BYTES = 16, 16
_TURN_S = 0.25
_BUSY_TURNS = 4  # inside a step, after a rank died or failed
_LEFT_TURNS = 8  # inside a step, after a rank left in peace
_HANDSHAKE_S = 10.0
_START_S = 60.0  # until every rank has connected
_MAX_STRANGERS = 64


_OPEN: weakref.WeakSet[_Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not hold connections open whose end tells that this rank has died."""
    for channel in list(_OPEN):
        channel.close()


os.register_at_fork(after_in_child=_close_in_child)


class Gather(Protocol):
    """Exchanges short texts between all ranks (`checkpoint.meeting.Meeting`)."""

    rank: int
    num_ranks: int

    def gather(self, text: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank's process, such that it cannot be taken for another one."""

    host: str
    pid: int
    started: str  # in clock ticks since boot; "" where that is not known

    @classmethod
    def of_self(cls) -> Identity:
        return cls(_host(), os.getpid(), _started(os.getpid()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job cannot go on. `turns` in a step, or `idle_s` seconds outside one (None: for ever), are left."""

    text: str
    turns: int
    idle_s: float | None
    frozen: int | None = None  # a rank that cannot end itself


class _Channel:
    """Frames with a message authentication code over a non-blocking socket."""

    def __init__(self, sock: socket.socket, *, server: bool):
        sock.setblocking(False)
        self.socket, self._server = sock, server
        _OPEN.add(self)
        self._key: bytes | None = None
        self._in, self._out = bytearray(), bytearray()
        self._received = self._sent = 0

    def set_key(self, secret: bytes, nonces: bytes) -> None:
        self._key = hmac.digest(secret, nonces, hashlib.sha256)

    def take_raw(self, size: int) -> bytes | None:
        """`size` bytes before any frame, once they are there."""
        if len(self._in) < size:
            return None
        raw = bytes(self._in[:size])
        del self._in[:size]
        return raw

    def send_raw(self, data: bytes) -> None:
        self._out += data
        self.flush()

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        assert len(body) + _MAC_BYTES <= _MAX_FRAME, "messages are short"
        self._out += (len(body) + _MAC_BYTES).to_bytes(4, "big") + body + self._mac(self._server, self._sent, body)
        self._sent += 1
        self.flush()

    def flush(self) -> None:
        """Send what the system takes now; errors show when reading."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        if len(self._out) > 64 * _MAX_FRAME:  # nobody reads at the other end
            self._out.clear()

    def receive(self) -> bool:
        """Read what is there; False when the other end has closed."""
        try:
            while True:
                data = self.socket.recv(65536)
                if not data:
                    return False
                self._in += data
                if len(self._in) > 64 * _MAX_FRAME:
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def messages(self) -> Iterator[dict[str, Any]]:
        """Complete frames; ValueError for one that is not from this job."""
        while len(self._in) >= 4:
            size = int.from_bytes(self._in[:4], "big")
            if not _MAC_BYTES < size <= _MAX_FRAME:
                raise ValueError("a frame of impossible size")
            if len(self._in) < 4 + size:
                return
            body, mac = bytes(self._in[4 : 4 + size - _MAC_BYTES]), bytes(self._in[4 + size - _MAC_BYTES : 4 + size])
            del self._in[: 4 + size]
            if not hmac.compare_digest(mac, self._mac(not self._server, self._received, body)):
                raise ValueError("a frame that does not know the job's secret")
            self._received += 1
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError("a frame that is no message")
            yield message

    def _mac(self, from_server: bool, count: int, body: bytes) -> bytes:
        assert self._key is not None, "frames follow the handshake"
        text = bytes([from_server]) + count.to_bytes(8, "big") + body
        return hmac.digest(self._key, text, hashlib.sha256)[:_MAC_BYTES]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


@dataclass
class _Peer:
    """What a rank knows of another one."""

    rank: int
    heard: float
    step: int = 0
    phase: str = "start"
    channel: _Channel | None = None
    left: bool = False
    judged: bool = False


class Watchdog:
    """This rank's heartbeat and its ear for the others'. See [Note: who ends when]."""

    def __init__(
        self,
        meeting: Gather,
        where: Callable[[], tuple[int, str]],
        *,
        heartbeat_s: float = 1.0,
        frozen_s: float = 9.0,
        address: str | None = None,
        end: Callable[[str], None] | None = None,
    ):
        """Connects all ranks; every rank must call it. `where` says (step, phase); `end` replaces the process' end.

        Does nothing for a rank alone or without a heartbeat.
        """
        self.rank, self._num_ranks, self._where = meeting.rank, meeting.num_ranks, where
        self._heartbeat_s, self._frozen_s, self._end = heartbeat_s, frozen_s, end or _end_process
        self._verdict: Verdict | None = None
        self._turns = 0
        self._judged_at = 0.0
        self._reported = False
        self._outbox: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.address: tuple[str, int] | None = None
        if meeting.num_ranks == 1 or heartbeat_s == 0:
            return
        self._connect(meeting, address)
        self._thread = threading.Thread(target=self._live, daemon=True, name="watchdog")
        self._thread.start()
        atexit.register(self.close)
        _watch_exceptions(self)

    @property
    def running(self) -> bool:
        """Whether this rank is watched."""
        return self._thread is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """What happens inside concerns all ranks: an exception of one ends the others too."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""
        if self.running and not self._closing.is_set() and not self._reported:
            self._reported = True
            step, phase = self._where()
            text = f"rank {self.rank} failed in step {step}, phase {phase}: {type(error).__name__}: {error}"
            with self._lock:
                self._outbox.append({"failed": text[:1500]})
            deadline = time.monotonic() + 4 * _TURN_S  # to be heard, and to hear whose fault it was
            while self._verdict is None and time.monotonic() < deadline:
                time.sleep(_TURN_S / 5)
            if self._verdict is not None and not self._verdict.text.startswith(f"rank {self.rank} "):
                sys.stderr.write(
                    f"[ds_hydra] rank {self.rank} failed in step {step}, phase {phase}: {self._verdict.text}. "
                    "Restart the job: it resumes from the newest checkpoint\n"
                )

    def close(self) -> None:
        """Leave in peace: the others may go on with what needs this rank no more."""
        if self._thread is not None and not self._closing.is_set():
            self._closing.set()
            self._thread.join(timeout=5.0)
            atexit.unregister(self.close)

    # Connecting.

    def _connect(self, meeting: Gather, address: str | None) -> None:
        mine = asdict(Identity.of_self())
        offer: dict[str, Any] = {}
        if self.rank == 0:
            self._secret = secrets.token_bytes(32)
        hosts = [json.loads(text)["host"] for text in meeting.gather(json.dumps(mine))]
        if self.rank == 0:
            listen = address or ("127.0.0.1" if len(set(hosts)) == 1 else _own_address())
            self._listener = _listen(listen)
            offer = {"address": listen, "port": self._listener.getsockname()[1], "secret": self._secret.hex()}
        told = [json.loads(text) for text in meeting.gather(json.dumps({"identity": mine, "offer": offer}))]
        self._identities = [Identity(**one["identity"]) for one in told]
        offer = told[0]["offer"]
        self._secret = bytes.fromhex(offer["secret"])
        self.address = (offer["address"], offer["port"])
        now = time.monotonic()
        self._peers = {rank: _Peer(rank, now + _START_S) for rank in range(self._num_ranks) if rank != self.rank}
        if self.rank != 0:
            self._peers = {0: _Peer(0, now)}
            self._peers[0].channel = self._greet()

    def _greet(self) -> _Channel:
        """Connect to rank 0 and show that this rank knows the secret."""
        assert self.address is not None, "rank 0 has said where it listens"
        sock = socket.create_connection(self.address, timeout=_START_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_START_S)
        theirs = b""
        while len(theirs) < _NONCE_BYTES:
            data = sock.recv(_NONCE_BYTES - len(theirs))
            if not data:
                raise ConnectionError(f"rank 0 closed the heartbeat connection to {self.address}")
            theirs += data
        mine = secrets.token_bytes(_NONCE_BYTES)
        channel = _Channel(sock, server=False)
        channel.set_key(self._secret, theirs + mine)
        channel.send_raw(mine)
        channel.send({"rank": self.rank})
        return channel

    # Living: one thread, whichever side of the connection this is.

    def _live(self) -> None:
        try:
            (_Server(self) if self.rank == 0 else _Client(self)).run()
        except Exception:
            logger.exception("the watchdog of rank %d has ended; faults of other ranks go unnoticed", self.rank)

    def beat(self) -> dict[str, Any]:
        """What this rank says regularly."""
        step, phase = self._where()
        return {"beat": [step, phase]}

    def judge(self, verdict: Verdict) -> bool:
        """Take a verdict; the first one stands."""
        if self._verdict is not None:
            return False
        self._verdict, self._turns, self._judged_at = verdict, 0, time.monotonic()
        return True

    def obey(self) -> None:
        """Once a turn: end this process if the verdict asks for it."""
        verdict = self._verdict
        if verdict is None or self._closing.is_set():
            return
        step, phase = self._where()
        self._turns = self._turns + 1 if phase != IDLE else 0
        waited = time.monotonic() - self._judged_at
        if self._turns >= max(1, verdict.turns) or (verdict.idle_s is not None and waited >= verdict.idle_s):
            if verdict.frozen is not None:
                _kill(self._identities[verdict.frozen])
            self._end(
                f"rank {self.rank} ends in step {step}, phase {phase}: {verdict.text}. Restart the job: it resumes "
                "from the newest checkpoint"
            )

    def died(self, peer: _Peer) -> Verdict:
        text = f"rank {peer.rank} died, last heard of in step {peer.step}, phase {peer.phase}"
        return Verdict(text, _BUSY_TURNS, self._frozen_s)

    def frozen(self, peer: _Peer, silent_s: float) -> Verdict:
        who = self._identities[peer.rank]
        text = (
            f"rank {peer.rank} is frozen: nothing heard for {silent_s:.1f} s, last in step {peer.step}, phase "
            f"{peer.phase} (process {who.pid} on {who.host})"
        )
        return Verdict(text, 0, 0.0, peer.rank)

    def left(self, peer: _Peer) -> Verdict:
        return Verdict(f"rank {peer.rank} has left the job after step {peer.step}", _LEFT_TURNS, None)

    def take_outbox(self) -> list[dict[str, Any]]:
        with self._lock:
            taken, self._outbox = self._outbox, []
        return taken


class _Side:
    """The loop of the thread: listen, beat, judge, obey; at its end a farewell."""

    def __init__(self, dog: Watchdog):
        self.dog = dog
        self.selector = selectors.DefaultSelector()

    def run(self) -> None:
        dog = self.dog
        last_turn, next_beat = time.monotonic(), 0.0
        while not dog._closing.is_set():
            for key, _ in self.selector.select(timeout=min(_TURN_S, dog._heartbeat_s)):
                self.ready(key)
            now = time.monotonic()
            if now - last_turn > max(2.0, 4 * _TURN_S):  # this process did not run: the others' silence is its own
                for peer in dog._peers.values():
                    peer.heard = max(peer.heard, now)
            elif now >= last_turn + 0.8 * _TURN_S:
                self.check(now)
                dog.obey()
            else:
                continue
            last_turn = now
            for message in dog.take_outbox():
                self.failed(message)
            if now >= next_beat:
                next_beat = now + dog._heartbeat_s
                self.broadcast(dog.beat())
        for message in dog.take_outbox():
            self.failed(message)
        self.broadcast({"bye": dog._where()[0]})
        self.close()

    def ready(self, key: selectors.SelectorKey) -> None:
        raise NotImplementedError

    def check(self, now: float) -> None:
        """Silence of those that are still there."""
        for peer in self.dog._peers.values():
            silent = now - peer.heard
            if not peer.left and not peer.judged and silent > self.dog._frozen_s:
                peer.judged = True
                self.verdict(self.dog.frozen(peer, silent))

    def verdict(self, verdict: Verdict) -> None:
        self.dog.judge(verdict)

    def failed(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def broadcast(self, message: dict[str, Any]) -> None:
        for peer in self.dog._peers.values():
            if peer.channel is not None:
                peer.channel.send(message)

    def note(self, peer: _Peer, message: dict[str, Any]) -> None:
        """A beat or a farewell."""
        peer.heard = max(peer.heard, time.monotonic())
        if "beat" in message:
            peer.step, peer.phase = int(message["beat"][0]), str(message["beat"][1])
        if "bye" in message:
            peer.left, peer.step = True, int(message["bye"])
            self.verdict(self.dog.left(peer))

    def lost(self, peer: _Peer) -> None:
        """The connection is closed."""
        if peer.channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.channel.socket)
            peer.channel.close()
            peer.channel = None
        if not peer.left and not peer.judged:
            peer.judged = peer.left = True
            self.verdict(self.dog.died(peer))

    def close(self) -> None:
        for peer in self.dog._peers.values():
            if peer.channel is not None:
                with contextlib.suppress(OSError):
                    peer.channel.socket.shutdown(socket.SHUT_WR)
                peer.channel.close()
        self.selector.close()


class _Client(_Side):
    """A rank other than 0: hears rank 0 only, and by it of the others."""

    def __init__(self, dog: Watchdog):
        super().__init__(dog)
        self.peer = dog._peers[0]
        assert self.peer.channel is not None, "connected by the constructor"
        self.selector.register(self.peer.channel.socket, selectors.EVENT_READ)

    def ready(self, key: selectors.SelectorKey) -> None:
        channel = self.peer.channel
        if channel is None:
            return
        open_still = channel.receive()
        try:
            for message in channel.messages():
                self.note(self.peer, message)
                if "verdict" in message:
                    self.dog.judge(Verdict(**message["verdict"]))
        except (ValueError, TypeError, KeyError, IndexError):
            open_still = False
        if not open_still:
            self.lost(self.peer)

    def failed(self, message: dict[str, Any]) -> None:
        self.broadcast(message)


class _Server(_Side):
    """Rank 0: accepts the others, hears all, tells all."""

    def __init__(self, dog: Watchdog):
        super().__init__(dog)
        dog._listener.setblocking(False)
        self.selector.register(dog._listener, selectors.EVENT_READ, None)
        self.strangers: dict[_Channel, tuple[float, bytes]] = {}

    def ready(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._accept()
        elif isinstance(key.data, _Peer):
            self._hear(key.data)
        else:
            self._meet(key.data)

    def check(self, now: float) -> None:
        for channel in [c for c, (since, _) in self.strangers.items() if now - since > _HANDSHAKE_S]:
            self._refuse(channel)
        super().check(now)

    def verdict(self, verdict: Verdict) -> None:
        if self.dog.judge(verdict):
            self.broadcast({"verdict": asdict(verdict)})

    def failed(self, message: dict[str, Any]) -> None:
        self.verdict(Verdict(str(message["failed"]), _BUSY_TURNS, None))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.dog._listener.accept()
                if len(self.strangers) >= _MAX_STRANGERS + self.dog._num_ranks:
                    sock.close()
                    continue
                channel = _Channel(sock, server=True)
                nonce = secrets.token_bytes(_NONCE_BYTES)
                self.strangers[channel] = (time.monotonic(), nonce)
                self.selector.register(sock, selectors.EVENT_READ, channel)
                channel.send_raw(nonce)

    def _meet(self, channel: _Channel) -> None:
        """A stranger speaks: it is a rank if its first frame knows the secret."""
        open_still = channel.receive()
        _, nonce = self.strangers[channel]
        try:
            if channel._key is None:
                theirs = channel.take_raw(_NONCE_BYTES)
                if theirs is not None:
                    channel.set_key(self.dog._secret, nonce + theirs)
            if channel._key is not None:
                for message in channel.messages():
                    peer = self.dog._peers[int(message["rank"])]
                    if peer.channel is not None or peer.left:
                        raise ValueError("that rank is here already")
                    peer.channel, peer.heard = channel, time.monotonic()
                    del self.strangers[channel]
                    self.selector.modify(channel.socket, selectors.EVENT_READ, peer)
                    self._hear(peer)
                    return
        except (ValueError, TypeError, KeyError):
            open_still = False
        if not open_still:
            logger.warning("refused a connection to the heartbeat port that does not know the job's secret")
            self._refuse(channel)

    def _refuse(self, channel: _Channel) -> None:
        self.strangers.pop(channel, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(channel.socket)
        channel.close()

    def _hear(self, peer: _Peer) -> None:
        channel = peer.channel
        if channel is None:
            return
        open_still = channel.receive()
        try:
            for message in channel.messages():
                self.note(peer, message)
                if "failed" in message:
                    self.failed(message)
        except (ValueError, TypeError, KeyError, IndexError):
            open_still = False
        if not open_still:
            self.lost(peer)

    def close(self) -> None:
        for channel in list(self.strangers):
            self._refuse(channel)
        self.dog._listener.close()
        super().close()


def _end_process(text: str) -> None:
    """Say why and end at once: other threads may hang in a collective for ever."""
    sys.stdout.flush()
    sys.stderr.write(f"[ds_hydra] {text}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def _kill(who: Identity) -> None:
    """End a frozen process of this job that runs on this host."""
    if who.host == _host() and who.pid != os.getpid() and who.started and _started(who.pid) == who.started:
        with contextlib.suppress(OSError):
            os.kill(who.pid, signal.SIGKILL)


def _host() -> str:
    """A name of this host that no other has: containers may share host names."""
    try:
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _own_address() -> str:
    """This host's address on the interface over which the others were told to reach rank 0."""
    target = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no interface leads to MASTER_ADDR {target!r} ({error}): name one in hydra.faults.address"
        ) from None


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen for heartbeats on {address!r} ({error}): give an address of rank 0's host in "
            "hydra.faults.address"
        ) from None
    listener.listen(1024)
    return listener


def _watch_exceptions(dog: Watchdog) -> None:
    """An exception that ends the script of one rank, also between steps, is told to the others."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        dog.report(error)
        before(kind, error, trace)

    sys.excepthook = hook
