"""Signals become requests; a second Ctrl-C ends the process at once; what the application handles stays its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from ds_hydra.host.ending import LEAVE, NOTHING, SAVE, Signals


def in_child(body: Callable[[], int]) -> int:
    """Exit code of a forked process that runs `body`."""

    def live() -> NoReturn:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 99
        try:
            code = body()
        finally:
            os._exit(code)

    pid = os.fork()
    if pid == 0:
        live()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("sent", "request_"),
    [
        ((), NOTHING),
        ((signal.SIGUSR1,), SAVE),
        ((signal.SIGTERM,), LEAVE),
        ((signal.SIGINT,), LEAVE),
        ((signal.SIGTERM, signal.SIGUSR1), LEAVE),
        ((signal.SIGTERM, signal.SIGTERM), LEAVE),  # launchers repeat themselves
    ],
)
def test_the_largest_request_counts(sent: tuple[signal.Signals, ...], request_: int) -> None:
    def body() -> int:
        signals = Signals()
        signals.install()
        for number in sent:
            os.kill(os.getpid(), number)
        return signals.request

    assert in_child(body) == request_


@pytest.mark.parametrize(("rank", "lines"), [(0, 2), (3, 0)])
def test_rank_0_says_what_happens(rank: int, lines: int) -> None:
    reading, writing = os.pipe()

    def body() -> int:
        os.dup2(writing, 2)
        Signals(rank).install()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return 3

    assert in_child(body) == 130
    os.close(writing)
    with os.fdopen(reading) as told:
        assert len(told.readlines()) == lines


def test_handlers_of_the_application_stay_and_ours_go() -> None:
    def body() -> int:
        seen: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
        signals = Signals()
        signals.install()
        os.kill(os.getpid(), signal.SIGTERM)
        signals.remove()
        kept = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return 0 if seen == [signal.SIGTERM] and signals.request == NOTHING and kept else 1

    assert in_child(body) == 0


def test_a_forked_child_ends_by_a_signal_as_it_would_without_us() -> None:
    def body() -> int:
        Signals().install()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"here")
            time.sleep(20)
            os._exit(3)
        os.read(reading, 4)
        os.kill(child, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256

    assert in_child(body) == -signal.SIGTERM % 256
