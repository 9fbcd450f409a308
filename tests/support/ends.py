"""Ranks that run a program as scripts of their own do, to see how each of them ends: exit code, time, last words."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ds_hydra.ranks.forked import one_thread
from ds_hydra.ranks.screen import flush
from ds_hydra.zero_hetero.errors import INTERRUPTED

TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class End:
    """How a rank ended. `code`: exit code, a negative signal, None if it had to be killed."""

    code: int | None
    seconds: float  # from `mark_fault` of any rank on, or else from the start
    told: str  # all that it wrote
    pid: int = 0  # of its process, and of its process group


def codes(found: Sequence[End]) -> list[int | None]:
    """How ranks ended."""
    return [end.code for end in found]


def all_told(found: Sequence[End]) -> str:
    """All that ranks wrote."""
    return "".join(end.told for end in found)


def mark_fault(place: Path, *, again: bool = False) -> None:
    """Note that the fault happens now; once, or `again` where it is what a rank does last."""
    if again or not (place / "fault").exists():
        draft = place / f"fault.{os.getpid()}"  # several ranks may come here at once
        draft.write_text(repr(time.time()))
        draft.rename(place / "fault")


def ends(
    program: Callable[[int, Path], object],
    num_ranks: int,
    *,
    limit_s: float = 60.0,
    finalized: bool = False,
    during: Callable[[Sequence[int]], None] | None = None,
) -> list[End]:
    """Fork `num_ranks` ranks of one gloo group, each of which runs `program(rank, folder)`; how each ended.

    `finalized`: by Python's own end, with what becomes of daemon threads there, which takes a second of CPU. `during`
    is called once with the ranks' process ids when all of them have made a file "ready" with their number.
    """
    with tempfile.TemporaryDirectory(prefix="ends-") as scratch:
        place, began = Path(scratch), time.time()
        sys.stdout.flush()
        sys.stderr.flush()
        pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                live(partial(program, rank, place), rank, num_ranks, place, finalized=finalized)
            pids.append(pid)
        at: dict[int, tuple[int | None, float]] = {}
        while len(at) < num_ranks:
            for rank, pid in enumerate(pids):
                if rank not in at:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        at[rank] = (os.waitstatus_to_exitcode(status), time.time())
                    elif time.time() > began + limit_s:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        at[rank] = (None, time.time())
            if during is not None and all((place / f"ready{rank}").exists() for rank in range(num_ranks)):
                during(pids)
                during = None
            time.sleep(0.01)
        since = float((place / "fault").read_text()) if (place / "fault").exists() else began
        told = [(place / f"stderr{rank}").read_text() for rank in range(num_ranks)]
        return [End(at[rank][0], at[rank][1] - since, told[rank], pid) for rank, pid in enumerate(pids)]


def live(program: Callable[[], object], rank: int, num_ranks: int, place: Path, *, finalized: bool = False) -> None:
    """The life of a forked rank; it ends the process as a script of its own would end."""
    from ds_hydra.host.ending import show_refusals_plainly

    gc.freeze()  # what the test has made is nothing to collect here
    os.setpgid(0, 0)
    handle = os.open(place / f"stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)
    os.dup2(handle, 1)
    sys.stderr = sys.stdout = os.fdopen(os.dup(handle), "w", buffering=1)  # pytest has put its own in their place
    sys.__stderr__ = sys.stderr  # type: ignore[misc]
    sys.excepthook = sys.__excepthook__
    code = _left(lambda: _run(program, rank, num_ranks, place, show_refusals_plainly))
    if finalized:
        ctypes.pythonapi.Py_Exit(code)
    _left(threading._shutdown)  # type: ignore[attr-defined]  # as Python does before functions at exit
    _left(atexit._run_exitfuncs)
    flush()
    os._exit(code)


def _run(program: Callable[[], object], rank: int, num_ranks: int, place: Path, begin: Callable[[], None]) -> None:
    one_thread()
    atexit._clear()
    for of_parent in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # its folders are still in use
        of_parent.detach()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    begin()
    store = dist.FileStore(f"{place}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    program()


def _left(action: Callable[[], object]) -> int:
    """The exit code with which Python would leave after this."""
    try:
        action()
    except SystemExit as leave:
        return _code(leave)
    except BaseException as error:
        sys.last_value = error
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as leave:  # how a refusal ends a script
            return _code(leave)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _code(leave: SystemExit) -> int:
    if leave.code is None or isinstance(leave.code, int):
        return leave.code or 0
    print(leave.code, file=sys.stderr)
    return 1
