"""This process and its host: who it is beyond doubt, where it can listen, how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from ds_hydra.ranks.screen import flush, show
from ds_hydra.zero_hetero.errors import OTHERS_FAULT, ConfigError

EXIT_CODE = OTHERS_FAULT


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank's process, described so that it cannot be mistaken for another one."""

    host: str
    pid: int
    started: str  # in clock ticks since boot; "" where that is not known

    @classmethod
    def of_self(cls) -> Identity:
        return cls(host(), os.getpid(), started(os.getpid()))


def say(text: str) -> None:
    """Write a line that must be seen, whatever the script has done with its logs."""
    show(f"[ds_hydra] {text}")


def end_process(code: int) -> None:
    """End at once: other threads may hang in a collective for ever."""
    # sys.exit would only end the watchdog's thread: the main thread sits in a collective that never returns, and no
    # exception can be raised there. os._exit ends all threads, but flushes nothing by itself.
    flush()
    os._exit(code)


def abort_later() -> None:
    """Let this process live a few seconds longer when any of its threads aborts it.

    For torch's own watchdog, which may abort a rank a moment after another one has died: within these seconds ours
    tells who died, and ends the process with 75. A rank that aborts for another reason ends as ever, after them.
    """
    # The C library's sleep() is the handler: the number that it gets, of the signal, are its seconds, 6. It needs
    # neither Python nor memory, whatever the aborting thread was in. When it returns, abort() goes on.
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def kill(who: Identity) -> None:
    """End a frozen process of this job that runs on this host."""
    # A process number is used again once its process is gone. Only the time at which it started tells whether number
    # 4711 is still the rank that froze, and not somebody else's program.
    if who.host == host() and who.pid != os.getpid() and who.started and started(who.pid) == who.started:
        with contextlib.suppress(OSError):
            os.kill(who.pid, signal.SIGKILL)


def host() -> str:
    """A name of this host that no other has: containers may share host names, and on one machine its boot, too."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    # An address of this machine is another one's, or nobody's, in a network of its own.
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)


def started(pid: int) -> str:
    return (status_of(pid) + [""] * 20)[19]


def stopped(who: Identity) -> bool:
    """Whether a process of this host was stopped by a signal: it cannot end by itself."""
    return who.host == host() and status_of(who.pid)[:1] == ["T"]


def gone(pid: int, since: str) -> bool:
    """Whether it is known that the process of this host with a number and a start time has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    now = status_of(pid)  # one that has ended stays, as "Z", until its parent has asked for its code
    return bool(now) and (now[0] in "ZX" or now[19] != since)


def status_of(pid: int) -> list[str]:
    """What the system tells of a process, from its state on; empty where it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def own_address(target: str | None = None) -> str:
    """This host's address on the interface that leads to a target: where the others were told to reach rank 0, if none
    is given."""
    target = target or os.environ.get("MASTER_ADDR", "127.0.0.1")
    # To connect a UDP socket sends nothing: the system only chooses the interface, and with it the own address.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no interface leads to MASTER_ADDR {target!r} ({error}): name one in hydra.faults.address"
        ) from None


def listen(address: str) -> socket.socket:
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
