"""Lines that must be seen, though nobody may read the stream any more; which of several ranks writes one. No torch."""

from __future__ import annotations

import _thread
import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

_BEGINS_S = 0.5  # within which a thread begins, if it does
_PATIENCE_S = 1.0  # a pipe that nobody reads takes no more; whoever must end does not wait for it


def show(line: str, screen: TextIO | None = None) -> None:
    """Write a line to `screen`, by default sys.stderr, after what was printed before; nothing where that is closed."""
    stream = sys.stderr if screen is None else screen

    def write() -> None:
        if stream is not None:
            stream.write(f"{line}\n")
            stream.flush()

    flush()
    within(_PATIENCE_S, write)


def flush() -> None:
    """Hand on what was printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as Python has it where the process began without one
            within(_PATIENCE_S, stream.flush)


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do it in a thread of its own, for which this one waits so many seconds; here, where no thread begins.

    Errors of a stream that is closed are nothing.
    """
    mine, begun, done = threading.Lock(), threading.Event(), threading.Event()

    def tried() -> None:
        if mine.acquire(blocking=False):
            begun.set()
            with contextlib.suppress(OSError, ValueError):
                action()
            done.set()

    # Not threading's: where there is no memory left a new thread dies before it says that it has begun, for which
    # `Thread.start` waits without end.
    with contextlib.suppress(RuntimeError):  # no more threads, as where Python ends
        _thread.start_new_thread(tried, ())
        begun.wait(_BEGINS_S)
    tried()
    done.wait(seconds)


_TURN_S = 0.02
_HELD: list[socket.socket] = []  # names that this process has, until it ends


def first(key: str, *, within_s: float = 0.5, all_by_s: float = 0.0) -> bool | None:
    """Whether this rank asks first for `key`; None where the store is gone or does not answer in time.

    The rank that keeps the store, usually rank 0, may end after its question, and the others could no longer ask: with
    `all_by_s` rank 0 waits so long until all have asked.
    """
    answers: list[bool | None] = []
    within(within_s + all_by_s, partial(_ask, key, all_by_s, answers))
    return answers[0] if answers else None


def first_on_host(key: str, *, all_by_s: float = 0.7) -> bool:
    """Whether this process of a host asks first for `key`, of those that ask within `all_by_s`; it takes that long.

    Also True where the system has no sockets without a file, as Linux has.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0{key}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    _HELD.append(name)
    time.sleep(all_by_s)
    return True


def _ask(key: str, all_by_s: float, answers: list[bool | None]) -> None:
    distributed: Any = sys.modules["torch.distributed"]
    try:
        # Another thread may hang in the store, and nobody else can use it as long: so this is a connection of its own.
        store = distributed.distributed_c10d._get_default_store().clone()
        answer = store.add(key, 1) == 1
        deadline = time.monotonic() + all_by_s
        while distributed.get_rank() == 0 and time.monotonic() < deadline:
            if store.add(key, 0) == distributed.get_world_size():
                break
            time.sleep(_TURN_S)
        answers.append(answer)
    except (RuntimeError, ValueError):  # the store is gone with the rank that kept it, or the groups were destroyed
        answers.append(None)


def met() -> bool:
    """Whether the ranks have met."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
