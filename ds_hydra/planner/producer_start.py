"""The planner's process, before it imports anything: `python producer_start.py MODULE PARENT BEAT_S`. Pure: no torch.

From here on, however long the imports take, it leaves within BEAT_S seconds when the process PARENT is gone. Then it
runs `main(requests, tell)` of the module. It is a file to be run, not a module: `python -m` and `-c` import from the
working directory, where a job may have a json.py of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO


def lines_to(file: IO[str]) -> Callable[[Mapping[str, object]], None]:
    """What writes JSON lines to the parent; this process ends where nobody reads any more."""

    def tell(message: Mapping[str, object]) -> None:
        try:
            file.write(json.dumps(message) + "\n")
            file.flush()
        except OSError:
            os._exit(0)

    return tell


def leave_after(parent: int, beat_s: float) -> None:
    """Leave when the process `parent` is gone."""

    # The end of the input does not always tell: a data loader's worker that was forked from the trainer holds the
    # pipe's other end too, and can outlive it.
    def look() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(beat_s)
        os._exit(0)

    threading.Thread(target=look, daemon=True, name="parent").start()


def main(module: str, parent: int, beat_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training process's to handle
    # Answers go over a copy of stdout, and stdout itself now leads to stderr: what numba or HiGHS print from C, past
    # Python, can never get between two answers.
    tell = lines_to(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    leave_after(parent, beat_s)
    folder = os.path.dirname(os.path.realpath(__file__))
    root = os.path.dirname(os.path.dirname(folder))
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != folder]  # Python put it first
    if root not in sys.path:
        sys.path.insert(0, root)
    import_module(module).main(sys.stdin, tell)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
