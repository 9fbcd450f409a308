"""A line that must be seen in; written to a stream that may be closed, or that nobody reads any more. No torch."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TextIO

_PATIENCE_S = 1.0  # a pipe that nobody reads takes no more; whoever must end does not wait for it


def show(line: str, screen: TextIO | None = None) -> None:
    """Write a line to `screen`, by default sys.stderr, after what was printed before; nothing where that is closed."""
    stream = sys.stderr if screen is None else screen

    def write() -> None:
        if stream is not None:
            stream.write(f"{line}\n")
            stream.flush()

    flush()
    _within_patience(write)


def flush() -> None:
    """Hand on what was printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as Python has it where the process began without one
            _within_patience(stream.flush)


def _within_patience(action: Callable[[], object]) -> None:
    def tried() -> None:
        with contextlib.suppress(OSError, ValueError):
            action()

    try:
        thread = threading.Thread(target=tried, daemon=True)
        thread.start()
    except RuntimeError:  # no more threads, as where Python ends
        tried()
    else:
        thread.join(_PATIENCE_S)
