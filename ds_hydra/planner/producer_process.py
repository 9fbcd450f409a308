"""The planner's producer as a child process: JSON lines to it in, its answers or what broke it out. Pure: no torch.

[Note: a process spoken to in lines]
The producer starts as a program of its own, not as a fork. A fork copies one thread of a process that has many (NCCL's,
the watchdog's, autograd's) and every lock in the state that it had at that moment: a lock which another thread held
stays locked in the child for ever. A program of its own shares nothing. It also holds no part of the device's memory,
and it can be killed at any time.

Messages are JSON lines, not pickles. A line that is cut off or damaged is an error that can be told from a plan, no
code of a message is ever run, and a person can read what was said:

  in    {"generation": 0, "step": 7, "ids": [4, 9], "lengths": [512, 96]}
  out   {"generation": 0, "step": 7, "plan": "...", "planning_ms": 3.1}
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_hydra.ranks.moving import work_of

BEAT_S = 1.0
MODULE = "ds_hydra.planner.producer"


def producer_command(module: str = MODULE, beat_s: float = BEAT_S) -> tuple[str, ...]:
    """How a producer is started that runs a module, and looks every `beat_s` seconds whether its parent lives."""
    start = Path(__file__).with_name("producer_start.py")
    return sys.executable, str(start), module, str(os.getpid()), str(beat_s)


class ProducerProcess:
    """One child process [Note: a process spoken to in lines].

    Wait on `changed` for a new entry of `answers` or `ready`, or until `broken` says why none will come.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # One thread: the producer works beside training and must not take a core for every thread that numpy likes.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        # An empty entry is the working directory, from which nothing is to be imported.
        places = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(places)},
        )
        self.answers: dict[tuple[int, int], str] = {}  # by (generation of the recipe, step)
        self.ready: dict[int, Mapping[str, Any]] = {}  # by generation: its digest and kernels
        self.broken: str | None = None  # why nothing more will come
        self.changed = threading.Condition()
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A pipe holds 64 KiB and a cost table may have more. If the training thread wrote it itself, a producer that
        # has stopped reading would stop training too; so each direction has a thread that may wait.
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True, name=f"planner{target.__name__}").start()

    @property
    def work(self) -> tuple[int, bool]:
        """What its planning thread has done so far, and whether it does something now (`ranks.moving`)."""
        return work_of(self.process.pid, self.process.pid)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; this never waits."""
        self._outbox.put(json.dumps(message))

    def _write(self) -> None:
        assert self.process.stdin is not None
        try:
            while (line := self._outbox.get()) is not None:
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()
            self.process.stdin.close()
        except (OSError, ValueError):
            self._break("died")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self._take(line.decode())
            except (ValueError, TypeError, KeyError, RecursionError):
                self._break("garbage")
                return
        self._break("died")

    def _take(self, line: str) -> None:
        message = json.loads(line)
        with self.changed:
            if "ready" in message:
                self.ready[int(message["generation"])] = {key: str(message[key]) for key in ("ready", "kernels")}
            else:
                self.answers[int(message["generation"]), int(message["step"])] = line
            self.changed.notify_all()

    def _break(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or reason  # the first reason is the cause, later ones follow from it
            self.changed.notify_all()

    def stop(self) -> None:
        """End the child at once; its threads end with its pipes."""
        self._outbox.put(None)
        self.process.kill()
        self.process.wait()
