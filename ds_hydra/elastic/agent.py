"""The thread that runs the membership machine beside training, with its sockets and processes; who stands still, found.

[Note: stands in the store]
The members' heartbeats tell who lives. Who waits for others for half of the time for which it may, or stands still
elsewhere for as long, says so each second in the store in which torch's ranks of this view have met, signed with the
job's secret. Who stands reads what the others say, and ends itself if they have waited for too long,
by [Note: who stands still]; the others then lose it as one that has died. A record that does not change, or that is not
signed, counts for nothing, and a rank without one counts as one that moves: then nobody ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.links import Event, Links
from ds_hydra.elastic.membership import TURN_S, Membership, Patience
from ds_hydra.elastic.messages import Member, Report, View
from ds_hydra.ranks.channel import Texts, agree
from ds_hydra.watchdog.host import EXIT_CODE, Identity, end_process, kill, listen, own_address, say, stopped
from ds_hydra.watchdog.meeting import listens
from ds_hydra.watchdog.progress import LOOK_S, Progress, Stand, stuck
from ds_hydra.zero_hetero.files import create_file, read_file
from ds_hydra.zero_hetero.norm_table import NormTable

logger = logging.getLogger(__name__)

_UNANSWERED = 40  # times that a process which wants to join has asked in vain, one after the other
_ANSWERS_S = 1.0  # within which a member that is not frozen greets
_MOST_BYTES = 64 * 2**20  # of an invitation or a token
_WHOLE_S = 2.0  # within which a token that exists has to be whole
Store = tuple[tuple[str, int], Any]  # where it listens, and what keeps it open


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a process needs to join a job. It holds the job's secret: hand it to nobody else."""

    secret: str
    members: tuple[Member, ...]
    folder: str | None
    run: str
    job: str = ""  # what must be equal on who joins, as the job's start tells it

    def write(self, path: Path) -> None:
        """Readable for this user only, and whole at any moment."""
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)  # of a process before that had this number
        with create_file(new, 0o600) as file:
            file.write(json.dumps(asdict(self)).encode())
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> Invitation:
        return TypeAdapter(cls).validate_python(json.loads(read_file(path, _MOST_BYTES)))


def open_store(host: str) -> Store:
    """A store of torch's for the groups of an epoch, on a free port."""
    import torch.distributed as dist

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return (host, store.port), store


class MemberAgent:
    """This process among the members, as its training sees it."""

    def __init__(
        self,
        me: Member,
        listener: socket.socket,
        invitation: Invitation,
        roster: m.Roster | None,
        *,
        frozen_s: float = 9.0,
        patience: Patience | None = None,
        most: int | None = None,
        heartbeat_s: float = 1.0,
        place: Path | None = None,
    ):
        """Use `start` or `join`. `most` as of `Membership`; `place` has the newest invitation, for a process that
        joins."""
        self._place, self._invitation = place, invitation
        self._machine = Membership(me, roster, folder=invitation.folder is not None, patience=patience, most=most)
        self._links = Links(
            self._machine, listener, bytes.fromhex(invitation.secret), frozen_s=frozen_s, heartbeat_s=heartbeat_s
        )
        self._store: Store | None = None
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._fault, self._closing, self._installed = threading.Event(), threading.Event(), threading.Condition()
        self._callbacks: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._view: View | None = None
        self._leaves = False  # whether it is to leave when its training parks
        if roster is not None:
            self._view = View(roster.epoch, roster.members, (), (roster.members[0].address[0], 0))
        self._thread = threading.Thread(target=self._live, daemon=True, name="membership")
        self._thread.start()

    @classmethod
    def start(
        cls,
        channel: Texts,
        *,
        folder: Path | None,
        scratch: Path | None = None,
        address: str | None = None,
        job: str = "",
        **more: Any,
    ) -> MemberAgent:
        """Every rank of the job's start must call it; ranks become ids.

        `folder`: one that all of them see, or None; then `scratch`, if all of them are on one host, which sees it.
        """
        mine = Identity.of_self()
        hosts = agree(channel, None, "meeting", mine.host)
        common = folder or (scratch if len(set(hosts)) == 1 else None)
        more_told = {"run": secrets.token_hex(8), "folder": common and str(common)}
        listener, told = listens(channel, mine, "members", hosts, address, **more_told)
        members = tuple(Member(rank, address=tuple(one["address"]), **one["identity"]) for rank, one in enumerate(told))
        roster = m.Roster(0, members, len(members))
        invitation = Invitation(told[0]["secret"], members, told[0]["folder"], told[0]["run"], job)
        assert listener is not None, "all listen"
        return cls(members[channel.rank], listener, invitation, roster, **more)

    @classmethod
    def join(cls, place: Path, *, address: str | None = None, **more: Any) -> MemberAgent:
        """As a process that wants to join by the invitation in this file; its first `park` returns when it is a
        member."""
        invitation = Invitation.read(place)
        mine = Identity.of_self()
        others = [one.address[0] for one in invitation.members if one.host != mine.host]
        listener = listen(address or (own_address(others[0]) if others else "127.0.0.1"))
        me = Member(-1, mine.host, listener.getsockname()[:2], mine.pid, mine.started)
        return cls(me, listener, invitation, None, place=place, **more)

    # What training calls.

    @property
    def view(self) -> View:
        """The view that was installed last."""
        assert self._view is not None, "a process that joins has a view after its first `park`"
        return self._view

    @property
    def wanted(self) -> bool:
        """Whether a process waits to join. If it holds on the coordinator, all are to `park` at the step's end."""
        return self._machine.wanted

    @property
    def invitation(self) -> Invitation:
        """For processes that are to join."""
        return replace(self._invitation, members=self._machine.roster.members or self._invitation.members)

    @property
    def faulty(self) -> bool:
        """Whether the present view is known to be over by a fault."""
        return self._fault.is_set()

    def fault(self, within: float) -> bool:
        """Whether the present view is over by a fault, which may become known within so many seconds."""
        if not self._fault.is_set():
            self._tell(self._machine.fail)
        return self._fault.wait(within)

    def park(self, report: Report, tables: Sequence[NormTable] = (), leaving: frozenset[int] = frozenset()) -> View:
        """Say that this thread is out of all communication, and holds the tables that its report names; return when the
        next view is installed. Members that are `leaving`, which all must name alike, leave by it with code 0.

        Without a fault it asks all to park at the end of their step, as for a process that joins. The process ends with
        code 75 where it is left behind, or too few members are left to go on.
        """
        with self._installed:
            before, self._leaves = self._view, self._machine.me.id in leaving
            self._tell(partial(self._machine.park, report, tables, leaving))
            self._installed.wait_for(lambda: self._view is not before or self._closing.is_set())
            if self._view is before or self._view is None:
                raise SystemExit(0 if self._leaves else EXIT_CODE)  # or closed by another thread
            return self._view

    def rebuilt(self) -> None:
        """Say that the view is in use: groups are made, masters are cut anew."""
        self._tell(self._machine.rebuilt)

    def unfit(self, members: int) -> None:
        """Say that no view of so many members can be used: nobody is to join until such a one."""
        self._tell(partial(self._machine.unfit.add, members))

    def on_abort(self, callback: Callable[[], None], installed: Callable[[], None]) -> None:
        """Call `callback` once for each fault, and `installed` before each `park` returns with a view, both on the
        agent's own thread, but for a fault that is known already; they must not take long."""
        self._callbacks.append((callback, installed))
        if self._fault.is_set():
            callback()

    def addresses(self) -> frozenset[tuple[str, int]]:
        """Where agents listen: their connections are spared when those of the groups are shut."""
        machine = self._machine
        members = (machine.me, *machine.roster.members, *self._invitation.members)
        return frozenset(one.address for one in members)

    def close(self) -> None:
        """Leave the job in good order."""
        self._closing.set()
        self._links.wake()
        self._thread.join(timeout=5.0)
        with self._installed:
            self._installed.notify_all()

    # Living: one thread.

    def _tell(self, event: Event) -> None:
        self._inbox.put(event)
        self._links.wake()

    def _live(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("the thread of the membership has ended")
            self._leave(f"the thread of the membership has ended: {error!r}")

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing.is_set():
            self._handle(self._links.wait(max(0.0, last + TURN_S - time.monotonic())))
            while not self._inbox.empty():
                self._handle([self._inbox.get()])
            now = time.monotonic()
            if now - last >= TURN_S:
                if now - last > 8 * TURN_S:  # this process was suspended: it is the one that did not listen
                    self._links.listened()
                last = now
                self._turn()
        self._links.close(m.Word("bye", self._machine.roster.epoch))

    def _turn(self) -> None:
        self._handle([self._machine.tick])
        if self._machine.me.id >= 0:
            self._handle(self._links.watch())
            return
        if self._links.unanswered and self._place is not None and self._place.exists():
            self._invitation = Invitation.read(self._place)  # others may be members now
        self._links.knock(self._invitation.members)
        if self._links.unanswered > _UNANSWERED:
            self._leave("no member of the job answers any more: it has ended")

    def _handle(self, events: Iterable[Event]) -> None:
        machine = self._machine
        for event in events:
            joins = machine.me.id < 0
            event()
            if joins and machine.me.id >= 0:
                self._links.joined()
            for action in machine.taken():
                self._do(action)

    def _do(self, action: m.Action) -> None:
        match action:
            case m.Send(to, message):
                self._links.send(to, message)
            case m.Abort():
                self._fault.set()
                for callback, _ in self._callbacks:
                    callback()
            case m.GoOn(view):
                for _, installed in self._callbacks:
                    installed()
                with self._installed:
                    self._view = view
                    self._fault.clear()
                    self._installed.notify_all()
            case m.TakeToken(epoch, roster):
                threading.Thread(target=self._take_token, args=(epoch, roster), daemon=True).start()
            case m.OpenStore(epoch):
                self._store = open_store(self._machine.me.address[0])
                self._tell(partial(self._machine.opened, epoch, self._store[0]))
            case m.KillProcess(member):
                threading.Thread(target=end_frozen, args=(member,), daemon=True).start()
            case m.Exit(why, behind):
                self._leave(why, behind)

    def _leave(self, why: str, behind: bool = False) -> None:
        if behind and self._leaves:
            self._closing.set()
            with self._installed:
                self._installed.notify_all()
            return
        say(f"member {self._machine.me.id} ends: {why}. Restart the job: it resumes from the newest checkpoint")
        end_process(EXIT_CODE)

    def _take_token(self, epoch: int, roster: m.Roster) -> None:
        assert self._invitation.folder is not None, "asked for with a folder only"
        try:
            found = take_token(Path(self._invitation.folder), f"{self._invitation.run}-{epoch}", roster)
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.error("no token for the epoch after %d: %s", epoch, error)
            found = None
        self._tell(partial(self._machine.token, epoch, found))


def end_frozen(member: Member) -> None:
    """Kill a member of this host, unless its agent answers: who asked for that may have been cut off since."""
    who = Identity(member.host, member.pid, member.started)
    if not stopped(who):
        with contextlib.suppress(OSError), socket.create_connection(member.address, timeout=_ANSWERS_S) as sock:
            if sock.recv(1):  # the nonce with which it greets
                return
    kill(who)


def take_token(folder: Path, name: str, roster: m.Roster) -> m.Roster:
    """Write this roster as a file that only one process can make; the roster that stands there.

    OSError or ValueError where the folder cannot be used, or whoever made the file has not finished it.
    """
    place = folder / "epochs" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        made = create_file(place, 0o600)
    except FileExistsError:
        deadline = time.monotonic() + _WHOLE_S
        while not (text := read_file(place, _MOST_BYTES)).endswith(b"\n"):
            if time.monotonic() > deadline:
                raise ValueError(f"{place} is not whole: whoever made it has died") from None
            time.sleep(0.05)
        found = m.from_wire(json.loads(text), {})
        if not isinstance(found, m.Newer):
            raise ValueError(f"{place} holds no roster") from None
        return found.roster
    with made as file:
        file.write(json.dumps(m.to_wire(m.Newer(roster), {})).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return roster


_READ_S = 2.5 * LOOK_S  # within which others read why
_FRESH_S = 4.0  # after which a record that has not changed counts for nothing


class Stands:
    """Of one member; it has a thread of its own."""

    def __init__(self, progress: Progress, agent: MemberAgent):
        self._progress, self._agent, self._secret = progress, agent, agent.invitation.secret.encode()
        self._read: dict[str, tuple[bytes, float]] = {}  # by key: what stood there, and since when
        self._told = ""
        self._closing = threading.Event()
        threading.Thread(target=self._live, daemon=True, name="stands").start()

    def close(self) -> None:
        self._closing.set()
        self._progress.watch_the_end()

    def _live(self) -> None:
        while not self._closing.wait(LOOK_S):
            now = time.monotonic()
            with suppress(RuntimeError, ValueError):  # there are no groups at this moment
                self._progress.rank = dist.get_rank()
            self._progress.look_at_the_end(now)
            stand = self._progress.look(now)
            if stand.still_s > stand.limit_s / 2 and not self._agent.faulty:
                try:
                    self._compare(stand, now)
                except (RuntimeError, ValueError):  # the store is gone, or the groups are being made
                    self._read.clear()

    def _compare(self, stand: Stand, now: float) -> None:
        kept: Any = dist.distributed_c10d._get_default_store()
        store = kept.clone()  # another thread may hang in that one
        rank, key = dist.get_rank(), f"ds_hydra/stands/{self._agent.view.epoch}"
        stand = stand._replace(rank=rank)
        store.set(f"{key}/{rank}", self._signed(f"{key}/{rank}", stand))
        if stand.waits_s:
            why = self._found(store, f"{key}/why", now)
        else:
            others = [self._found(store, f"{key}/{one}", now) for one in range(dist.get_world_size()) if one != rank]
            stands = [Stand(*one) if one else stand._replace(rank=-1, stands_s=0.0) for one in others]
            _, why = stuck([stand, *stands])
        if why and why != self._told:
            self._told = why
            store.set(f"{key}/why", self._signed(f"{key}/why", why))
            self._progress.write(why)
        if why and not stand.waits_s and not self._agent.faulty and not self._closing.wait(_READ_S):
            say(f"{why}; {self._progress.told}. It is lost to the others")
            end_process(EXIT_CODE)

    def _signed(self, key: str, value: Any) -> bytes:
        text = json.dumps(value)
        return f"{self._code(key, text)} {text}".encode()

    def _code(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(), hashlib.sha256).hexdigest()

    def _found(self, store: Any, key: str, now: float) -> Any:
        """What another has said there; None where that is nothing, not signed, or old."""
        if not store.check([key]):
            return None
        raw = store.get(key)
        before = self._read.get(key, (b"", 0.0))
        self._read[key] = before if before[0] == raw else (raw, now)
        code, _, text = raw.decode().partition(" ")
        fresh = now - self._read[key][1] < _FRESH_S or key.endswith("/why")
        return json.loads(text) if fresh and hmac.compare_digest(code, self._code(key, text)) else None
