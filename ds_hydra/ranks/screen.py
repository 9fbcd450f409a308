"""A line that must be seen in; written to a stream that may be closed, or that nobody reads any more. No torch."""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TextIO

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
