"""How fast this machine computes, and what aims in seconds are on it.

Seconds and milliseconds in `tools/aims.py` are those of the reference machine: one whose CPU does the loop of this file
in `aims.LOOP_S`. On another machine an aim is longer or shorter by as much as the loop is, in the same run. What the
loop does is in the tools' own mix: functions, objects and dictionaries of Python, small arrays, and memory that is
touched for the first time. It is measured as CPU time, as the least of some rounds, so that others' work makes no aim
longer; and again from time to time, since a virtual machine's speed can double within minutes.

Simulated and predicted milliseconds are the same on every machine and are compared as they are.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tools import aims

_ROUNDS = 3  # of one measurement, which together take about a second
_FRESH_S = 5.0  # how long a measurement says what the machine does now


@dataclass(frozen=True)
class Limit:
    """An aim in seconds or milliseconds: as it stands in the table, and on this machine."""

    aim: float
    here: float

    def __str__(self) -> str:
        return f"{self.here:.3g}, as {self.aim:g} on the reference machine"


def limit(aim: float, *, waits: bool = False) -> Limit:
    """What an aim is on this machine. Of what `waits` for timers and for other processes a faster machine shortens
    hardly anything, so that only a slower one changes it."""
    times = slowness()
    return Limit(aim, aim * (max(1.0, times) if waits else times))


def slowness() -> float:
    """This machine's CPU time over the reference machine's, around now."""
    return loop_s() / aims.LOOP_S


_measured: list[tuple[float, float]] = []  # when the last two measurements ended, and what they gave


def loop_s() -> float:
    """CPU seconds of the loop around now: the longer of this process's last two measurements, before and after what an
    aim is for. The last one is made now, if it is not fresh."""
    if not _measured or time.monotonic() - _measured[-1][0] > _FRESH_S:
        least = min(_round_s() for _ in range(_ROUNDS))
        _measured[:] = [*_measured[-1:], (time.monotonic(), least)]
    return max(seconds for _, seconds in _measured)


def _round_s() -> float:
    began = time.thread_time()
    _objects(400_000)
    _arrays(15_000)
    _fresh_memory(8)
    return time.thread_time() - began


class _Pair:
    __slots__ = ("one", "other")

    def __init__(self, one: int, other: int) -> None:
        self.one, self.other = one, other


def _kept(pair: _Pair, sums: dict[int, int], key: int) -> int:
    sums[key] = pair.one + pair.other
    return sums[key]


def _objects(count: int) -> int:
    sums: dict[int, int] = {}
    total = 0
    for number in range(count):
        total += _kept(_Pair(number, number & 7), sums, number & 1023)
    return total


def _arrays(count: int) -> None:
    values, indices = np.arange(256.0), np.arange(256)
    for _ in range(count):
        sums = values * 2.0 + indices
        sums[indices & 127].sum()
        np.maximum(sums, values).cumsum()


def _fresh_memory(count: int) -> None:
    for _ in range(count):
        block = np.empty(1 << 22)  # 32 MiB, which go back to the system after each turn
        block.fill(1.0)
        block += 1.0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Beside processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
