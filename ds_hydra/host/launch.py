"""How ranks meet and torch.distributed is started, with waits that end and tell why.

[Note: locks of compilations]
DeepSpeed compiles operators at their first use, such as its communication on CPUs, into a folder of the user's; torch
keeps all but one process out of it by a file `lock`, for which they wait without a word and without an end. A process
that was killed meanwhile leaves the file, and each later job stands still before its first line. Whoever compiles holds
the file open, so on this host it can be found. On another host, with a folder that both see, it cannot: there the lock
counts as left behind when nothing in the folder was written for long.

[Note: meeting]
Ranks come minutes apart, since each imports, builds its model and reads its data first, and one that dies there is
nobody's peer yet. So those that have come say so in the store in which torch's groups will meet, and look for others:

  on their host    a process whose environment has the job's port and another RANK is that rank. It has died where it
                   was there and is gone, or never was for a while though the launcher stands on this host; it is frozen
                   where it was stopped for `frozen_s`
  on other hosts   who has come says each second in the store that it lives, and rank 0 hears it
  the store        is rank 0's, or the launcher's: it is lost where it closes, and frozen where it does not answer

Whoever finds a fault writes it there, and all end by it, with exit code 75. Nobody else ends before `timeout_s`: who is
waited for is named every ten seconds.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, NoReturn

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import PrefixStore, TCPStore
from torch.utils.file_baton import FileBaton

from ds_hydra.config.hydra_block import FaultsConfig, HydraConfig, check_num_ranks
from ds_hydra.host.devices import before_devices_start, device_index
from ds_hydra.host.environment import joins, launched_node_size, launched_number, longest_wait_s
from ds_hydra.ranks.channel import Texts
from ds_hydra.ranks.groups import wait_at_most
from ds_hydra.ranks.screen import show
from ds_hydra.watchdog.host import Identity, host, kill, say, started, status_of, stopped
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import Told, mark_told, message_of

_QUIET_S = 5.0  # of a wait of which nothing is told
_LOOK_S = 1.0
_LEFT_S = 600.0  # without a file written, after which nobody compiles


def tell_locks() -> None:
    """From now on a wait for such a lock is told, and ConfigError where it was left behind."""
    FileBaton.wait = _wait  # type: ignore[assignment, method-assign]


def _wait(baton: FileBaton) -> None:
    lock, began, told, looked = Path(baton.lock_file_path), time.monotonic(), False, 0.0
    while lock.exists():
        time.sleep(baton.wait_seconds)
        now = time.monotonic()
        if now - began < _QUIET_S or now - looked < _LOOK_S:
            continue
        looked, holder = now, _holder(lock)
        if holder is None and _unwritten_s(lock.parent) > _LEFT_S:
            raise ConfigError(_text(lock, holder))
        if not told:
            show(f"[ds_hydra] waiting: {_text(lock, holder)}")
            told = True


def _text(lock: Path, holder: int | None) -> str:
    what = f"the operator {lock.parent.name} is locked by {str(lock)!r}"
    if holder is not None:
        return f"{what}, while process {holder} of this host compiles it"
    return (
        f"{what}, which no process of this host holds, and nothing there was written for "
        f"{_unwritten_s(lock.parent):.0f} s: a run that was ended while it compiled leaves such a file. Unless another "
        f"host compiles there, delete it: rm {lock}"
    )


def _unwritten_s(folder: Path) -> float:
    """Since a file of a folder was written, the folder's own list included."""
    written = [0.0]
    for path in (folder, *folder.iterdir()):
        with contextlib.suppress(OSError):  # it is gone
            written.append(path.stat().st_mtime)
    return time.time() - max(written)


def _holder(lock: Path) -> int | None:
    """A process of this host that has the file open, as far as this user may see it."""
    name: Any = os.path.realpath(lock)
    for handles in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(handle) == name for handle in handles.iterdir()):
                return int(handles.parent.name)
    return None


_TURN_S, _BEAT_S, _NAMED_S = 0.25, 1.0, 10.0
_STAYS_S = 1.5  # that others still read in rank 0's store how the meeting ended
_ABSENT_S = 10.0  # after which a rank whose launcher is here would have a process
_MOST_NAMED = 4  # ranks
_HOST = host().partition("/")[0]
_meetings = 0  # of this process, each with keys of its own


class Fellows:
    """The processes of this job's ranks that this host shows: what the launcher of this one has started, by RANK."""

    def __init__(self, rank: int, port: str, pid: int | None = None):
        self._port, self.now = f"MASTER_PORT={port}", dict[int, tuple[int, ...]]()
        self._stopped: dict[int, float] = {}  # since when
        self._began, self._first = time.monotonic(), dict[int, int]()
        self._launcher = _launcher_of(pid or os.getpid(), rank)
        local, size = launched_number("LOCAL_RANK"), launched_node_size()
        known = self._launcher is not None and local is not None and size is not None
        self._starts_here = range(rank - local, rank - local + size) if known else range(0)  # type: ignore[operator]

    def look(self) -> None:
        """See who is there now."""
        found: dict[int, list[int]] = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc") if self._launcher else ())):
            environment = _environment(pid)
            for text in environment if self._port in environment else ():
                number = text.removeprefix("RANK=")
                if number != text and number.isdigit() and _launcher_of(pid, int(number)) == self._launcher:
                    found.setdefault(int(number), []).append(pid)
        self.now = {rank: tuple(sorted(pids)) for rank, pids in found.items()}
        for rank, pids in self.now.items():
            self._first.setdefault(rank, pids[0])
            if any(stopped(_identity(pid)) for pid in pids):
                self._stopped.setdefault(rank, time.monotonic())
            else:
                self._stopped.pop(rank, None)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped it, as it was seen last."""
        return rank in self._stopped

    def fault(self, frozen_s: float) -> tuple[int, str] | None:
        """A rank that cannot come, and why; one that is frozen is ended."""
        now = time.monotonic()
        for rank, pid in self._first.items():
            if rank not in self.now:
                return rank, f"rank {rank} died before all ranks had met (process {pid} on {_HOST})"
        for rank, since in self._stopped.items():
            if now - since > frozen_s:
                for pid in self.now[rank]:
                    kill(_identity(pid))
                return rank, f"rank {rank} is frozen: its process {self.now[rank][0]} on {_HOST} was stopped"
        for rank in self._starts_here:
            if rank not in self.now and now - self._began > _ABSENT_S:
                return rank, f"rank {rank} died before all ranks had met: no process on {_HOST} has RANK={rank}"
        return None

    def where(self, rank: int) -> str:
        """What is seen of a rank that has not come, in brackets."""
        return f" (process {self.now[rank][0]} on {_HOST} has not come yet)" if rank in self.now else ""


def _launcher_of(pid: int, rank: int) -> int | None:
    """The next process above that is not this rank's own: it has another RANK, or none. None where nothing shows it, as
    where a process was forked and told its rank later."""
    own, above = f"RANK={rank}", pid
    while above > 1 and own in _environment(above):
        above = int([*status_of(above), "0", "0"][1])
    return above if above > 1 and above != pid else None


def _environment(pid: int) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    return frozenset()


def _identity(pid: int) -> Identity:
    return Identity(host(), pid, started(pid))


class _Ended(NamedTuple):
    rank: int
    text: str


class RankMeeting:
    """Exchanges texts of all ranks over their store (`Texts` of `ranks.channel`), of which each call waits for all."""

    def __init__(self, rank: int, num_ranks: int, make_store: Callable[[], Any], *, timeout_s: float, frozen_s: float):
        """`frozen_s` 0: nobody counts as dead or frozen."""
        global _meetings
        _meetings += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.rank, self.num_ranks = rank, num_ranks
        self._prefix, self._make_store = f"ds_hydra/meeting_{attempt}_{_meetings}", make_store
        self._timeout_s, self._frozen_s, self._round = timeout_s, frozen_s, 0
        self._fellows = Fellows(rank, os.environ["MASTER_PORT"])
        self._store: Any = None
        self._asked: float | None = None  # when the store was asked that has not answered yet
        self._missing: list[int] = []
        self._heard: dict[int, tuple[int, float]] = {}
        self._found: _Ended | None = None

    def texts(self, text: str) -> list[str]:
        """Every rank's text, by rank. RuntimeError where a rank cannot come; it ends the script with exit code 75."""
        self._round += 1
        answers, done, began, told, looked = list[Any](), Event(), time.monotonic(), 0.0, 0.0
        Thread(target=self._exchange, args=(text, answers, done), daemon=True, name="meeting").start()
        while not done.wait(_TURN_S):
            now = time.monotonic()
            waited = now - began
            if self._frozen_s and now > looked + _BEAT_S:
                looked = now
                self._look(now)
            if waited > self._timeout_s + _STAYS_S * (self.rank > 0):  # rank 0 knows who is missing
                self._found = _Ended(self.rank, f"{self._waited_for()} did not come within {self._timeout_s:g} s "
                                                "(hydra.timeout_seconds)")  # fmt: skip
            if self._found is not None:
                done.wait(4 * _TURN_S)  # the other thread tells it
                self._end(self._found)
            if waited > told + _NAMED_S and (self.rank == 0 or (self._store is None and self._tells())):
                told = waited
                say(f"rank {self.rank} waits for {self._waited_for()} since {waited:.0f} s")
        if isinstance(answers[0], _Ended):
            self._end(answers[0])
        found: list[str] = answers[0]
        return found

    def _look(self, now: float) -> None:
        self._fellows.look()
        fault = self._fellows.fault(self._frozen_s)
        if fault is None and self._asked is not None and now - self._asked > self._frozen_s:
            fault = 0, "rank 0 is frozen, or whoever keeps the ranks' store: it does not answer"
        if fault is not None and self._found is None:
            self._found = _Ended(*fault)

    def _tells(self) -> bool:
        return self.rank == min(self._fellows.now.keys() - {0}, default=self.rank)

    def _waited_for(self) -> str:
        if self._store is None:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return f"rank 0, or whoever keeps the ranks' store, at {where}{self._fellows.where(0)}"
        more = f" and {len(self._missing) - _MOST_NAMED} more" if len(self._missing) > _MOST_NAMED else ""
        named = (f"rank {rank}{self._fellows.where(rank)}" for rank in self._missing[:_MOST_NAMED])
        return (", ".join(named) or "the other ranks") + more

    def _end(self, ended: _Ended) -> NoReturn:
        if self.rank == 0:
            time.sleep(_STAYS_S)
        text = f"{ended.text}. Restart the job"
        raise mark_told(RuntimeError(text), Told(ended.rank, text, here=False))

    # What asks the store: one thread, since no answer may come.

    def _exchange(self, text: str, answers: list[Any], done: Event) -> None:
        try:
            if self._store is None:
                self._store = PrefixStore(self._prefix, self._make_store())
            answers.append(self._exchanged(text))
        except Exception as error:
            answers.append(_Ended(0, f"the ranks' store is lost, with rank 0 or whoever keeps it: {message_of(error)}"))
        done.set()

    def _ask(self, name: str, *args: Any) -> Any:
        self._asked = time.monotonic()
        try:
            return getattr(self._store, name)(*args)
        finally:
            self._asked = None

    def _exchanged(self, text: str) -> list[str] | _Ended:
        self._heard.clear()
        keys = [f"{self._round}/{rank}" for rank in range(self.num_ranks)]
        whole = f"{self._round}/all"
        self._ask("set", keys[self.rank], text)
        self._ask("add", f"{self._round}/here", 1)
        for _ in self._turns():
            if self._found is not None:
                self._ask("set", "ended", f"{self._found.rank} {self._found.text}")
            if self._ask("check", ["ended"]):
                rank, _, why = self._ask("get", "ended").decode().partition(" ")
                return _Ended(int(rank), why)
            if self.rank == 0 and self._ask("add", f"{self._round}/here", 0) == self.num_ranks:
                self._ask("set", whole, "")
            if self._ask("check", [whole]):
                return [found.decode() for found in self._ask("multi_get", keys)]
        raise AssertionError("turns do not end")

    def _turns(self) -> Iterator[None]:
        """Turns of the wait for others; in some this rank says that it lives, and rank 0 hears who else does."""
        beat = named = time.monotonic()
        while True:
            yield
            time.sleep(_TURN_S)
            now = time.monotonic()
            if now - beat > _BEAT_S:
                beat = now
                self._ask("add", f"alive/{self.rank}", 1)
            if self.rank == 0 and now - named > 2 * _BEAT_S:
                named = now
                self._hear(now)

    def _hear(self, now: float) -> None:
        """Who has not come; and of those that have, who is silent."""
        here = [self._ask("check", [f"{self._round}/{rank}"]) for rank in range(self.num_ranks)]
        self._missing = [rank for rank, came in enumerate(here) if not came]
        for rank in range(1, self.num_ranks):
            if here[rank]:
                count = self._ask("add", f"alive/{rank}", 0)
                before = self._heard.get(rank, (-1, now))
                self._heard[rank] = (count, now) if count != before[0] else before
                if self._frozen_s and now - self._heard[rank][1] > self._frozen_s:
                    why = f"rank {rank} is frozen or its host is lost: it had come, and is not heard any more"
                    self._found = self._found or _Ended(rank, why)


def meeting_of(*, timeout_s: float, frozen_s: float) -> RankMeeting | None:
    """Of all ranks that a launcher has started; None for a rank alone, or where the environment does not name them."""
    rank, num_ranks = launched_number("RANK"), launched_number("WORLD_SIZE")
    address, port = os.environ.get("MASTER_ADDR"), launched_number("MASTER_PORT")
    if rank is None or num_ranks is None or num_ranks < 2 or rank < 0 or not address or not port:
        return None
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    make_store = partial(  # as torch makes it for `env://`, which takes the same one as long as it is there
        TCPStore, address, port, num_ranks, is_master=keeps, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, multi_tenant=True, use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )  # fmt: skip
    return RankMeeting(rank, num_ranks, make_store, timeout_s=timeout_s, frozen_s=frozen_s)


_LISTENING_S, _ANSWER_S = 2.0, 8.0  # until a connection to MASTER_PORT, and an answer there, count as not coming
_OTHER_PLACE = frozenset({"init_method", "rank", "world_size"})  # arguments that say where ranks meet otherwise
_FROZEN_S, _TIMEOUT = FaultsConfig().frozen_seconds, torch.distributed.constants.default_pg_timeout
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(
    config: HydraConfig,
    *,
    port: int,
    required: bool | None = None,
    begin: Callable[[Texts], object] | None = None,
) -> None:
    """Start torch.distributed through DeepSpeed, with an explicit timeout and nothing compiled on CPU.

    `port` and `required` are `distributed_port` and `dist_init_required` of `deepspeed.initialize`. All ranks `begin`
    with a channel of theirs when they have met, where torch.distributed was not there before. Raises ConfigError when
    no launcher has set the environment, or when the strategies do not fit the number of ranks.
    """
    _require_launcher()
    check_launched_ranks(config)
    timeout = timedelta(seconds=longest_wait_s(config, begun=False))
    accelerator = get_accelerator()
    before_devices_start(config, accelerator.communication_backend_name(), launched_number("WORLD_SIZE"))
    if accelerator.device_name() != "cpu" and "LOCAL_RANK" in os.environ:
        accelerator.set_device(device_index(int(os.environ["LOCAL_RANK"]), accelerator.device_count()))
    init_as_deepspeed(
        begin=begin,
        frozen_s=config.faults.frozen_seconds,
        dist_backend=accelerator.communication_backend_name(),
        distributed_port=port,
        dist_init_required=required,
        timeout=timeout,
        verbose=False,
    )
    if (everyone := torch.distributed.group.WORLD) is not None:
        wait_at_most(timeout, [everyone])  # a script may have made it, with torch's 30 minutes
    if not joins():
        check_num_ranks(config, dist.get_world_size())
    if "LOCAL_RANK" not in os.environ:  # the script itself started torch.distributed, without a launcher
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % max(1, accelerator.device_count()))


def init_as_deepspeed(
    *args: Any, begin: Callable[[Texts], object] | None = None, frozen_s: float = _FROZEN_S, **kwargs: Any
) -> None:
    """`deepspeed.init_distributed`, with nothing compiled on CPU, when all ranks have come [Note: meeting]."""
    backend = (args[0] if args else kwargs.get("dist_backend")) or get_accelerator().communication_backend_name()
    meeting = None  # its store is torch's, too, as long as it is there
    if not torch.distributed.is_initialized() and not _OTHER_PLACE & kwargs.keys():
        of_agent, timeout = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", kwargs.get("timeout", _TIMEOUT)
        if not of_agent:
            check_port()
        meeting = meeting_of(timeout_s=timeout.total_seconds(), frozen_s=frozen_s)
        if meeting is not None:
            (begin or (lambda channel: channel.texts("")))(meeting)
        if of_agent:
            _meet_in_this_attempt(backend, timeout)
    tell_locks()
    with _no_shared_memory_operator(), _own_device_in_environment():
        deepspeed.init_distributed(*args, **kwargs)


def check_port() -> None:
    """ConfigError where another program listens on MASTER_PORT, on rank 0 as on those that would ask it for ever."""
    rank, port, address = launched_number("RANK"), launched_number("MASTER_PORT"), os.environ.get("MASTER_ADDR")
    if rank is None or not port or not address:
        return
    if rank == 0:
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and not _listens_itself(port):
                    raise _port_taken(f"rank 0 cannot listen on it: {error.strerror}") from None
        return
    try:
        socket.create_connection((address, port), timeout=_LISTENING_S).close()
    except OSError:
        return  # rank 0 is not there yet
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(torch.distributed.DistError):
            patience = timedelta(seconds=_ANSWER_S)
            torch.distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # torch waits for an answer longer than it is told to
    asking.start()
    asking.join(_ANSWER_S)
    fellows = Fellows(rank, str(port))
    fellows.look()
    if not answered.is_set() and not fellows.is_stopped(0):  # of which the meeting tells
        raise _port_taken("what listens there does not answer as rank 0 does")


def _listens_itself(port: int) -> bool:
    """Whether this process listens on a port: the store of groups that it had before, which torch uses again."""
    own: set[str] = set()
    for handle in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(handle))
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            listens = fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
            if listens and f"socket:[{fields[9]}]" in own:
                return True
    return False


def _port_taken(why: str) -> ConfigError:
    where = f"MASTER_PORT={os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']}"
    return ConfigError(
        f"{where} cannot be used ({why}): is another job running there? Give a free port by the "
        "launcher's --master_port"
    )


def check_launched_ranks(config: HydraConfig) -> None:
    """Raise ConfigError when the launcher has started more or fewer ranks than the strategies use.

    Without a launcher's environment there is nothing to check yet.
    """
    num_ranks = launched_number("WORLD_SIZE")
    if num_ranks is not None:
        check_num_ranks(config, num_ranks)


@contextmanager
def _no_shared_memory_operator() -> Iterator[None]:
    """Keep DeepSpeed from compiling an operator for CPU inference whenever it starts torch.distributed.

    It takes a C++ compiler and 20 s, and leaves 66 MiB per rank in /dev/shm.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        yield
    finally:
        backend.build_shm_op = build


@contextmanager
def _own_device_in_environment() -> Iterator[None]:
    """DeepSpeed takes LOCAL_RANK for the number of the device that the default group is bound to. By LOCAL_RANK the
    ranks of a host are told apart, so it comes back."""
    local, accelerator = os.environ.get("LOCAL_RANK"), get_accelerator()
    number = local
    if local is not None and accelerator.device_name() != "cpu":
        number = str(device_index(int(local), accelerator.device_count()))
    if number == local:
        yield
        return
    os.environ["LOCAL_RANK"] = str(number)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = str(local)


def _meet_in_this_attempt(backend: str, timeout: timedelta) -> None:
    """Start the process group under torchrun, with keys of this attempt only in torchrun's store."""
    # torchrun's agent keeps one store over its restarts (--max-restarts). After a rank has died, the store still holds
    # the addresses under which the ranks of attempt 0 met; ranks of attempt 1 that read the same keys would try to
    # connect to processes that are gone. So attempt 1 writes and reads below ".../attempt_1".
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, num_ranks, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # With its device a rank makes its communicators where groups are made, and not at their first use, as it does under
    # DeepSpeed's launcher. A rank alone has nobody to reach.
    on_cuda = backend == "nccl" and num_ranks > 1
    number = device_index(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()) if on_cuda else 0
    device = torch.device("cuda", number) if on_cuda else None
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(f"ds_hydra/attempt_{attempt}", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device,
    )


def _require_launcher() -> None:
    if torch.distributed.is_initialized() or all(name in os.environ for name in _LAUNCHER_VARIABLES):
        return
    if "OMPI_COMM_WORLD_RANK" in os.environ or importlib.util.find_spec("mpi4py"):
        return
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    raise ConfigError(
        f"the environment lacks {', '.join(missing)}, which a launcher sets: start the script by "
        "'deepspeed --num_gpus N script.py ...' or 'torchrun --nproc_per_node N script.py ...'"
    )
