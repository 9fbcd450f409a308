"""A line that moves while something computes, so that nobody wonders whether it still does.

A process of its own writes it: one that compiles holds Python's lock for seconds, and one that is about to fork ranks
must have no thread. This file is run by its path, without site-packages, which takes some hundredths of a second.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_S, EVERY_LINE_S = 1.0, 5.0  # on a terminal the line is written anew; elsewhere another one follows


@contextmanager
def moving(words: str, usual_s: float | None = None) -> Iterator[None]:
    """Say what is being computed, and for how many seconds already, until the block ends; `usual_s` is what it took."""
    sys.stdout.flush()
    usual = "" if usual_s is None else f" of about {usual_s:.0f}"
    writer = subprocess.Popen([sys.executable, "-I", "-S", __file__, words, usual], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        # A word, and not the pipe's end alone: forked ranks may hold it open.
        assert writer.stdin is not None
        writer.stdin.write(b"end\n")
        writer.stdin.close()
        writer.wait()


def write(words: str, usual: str) -> None:
    """Write the line until something comes in, or who started this has ended."""
    began, on_screen = time.monotonic(), sys.stdout.isatty()
    shown = wait_s = 0.0
    while not select.select([sys.stdin], [], [], wait_s)[0]:
        seconds = time.monotonic() - began
        wait_s = EVERY_S if on_screen else EVERY_LINE_S
        text = f"   {words}: {seconds:.0f} s{usual}"
        shown = max(shown, len(text))
        print(f"\r{text}" if on_screen else text, end="" if on_screen else "\n", flush=True)
    if on_screen:
        print("\r" + " " * int(shown) + "\r", end="", flush=True)


if __name__ == "__main__":
    write(*sys.argv[1:])
