"""Signals in, requests out: SIGTERM and Ctrl-C ask to save and leave, SIGUSR1 asks to save and go on.

A handler only notes the request. It cannot save: it runs between any two instructions, on one rank, while a save needs
all ranks at the same step. The ranks exchange their requests with the figures at the end of each step and act then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from types import FrameType

from ds_hydra.ranks.screen import flush
from ds_hydra.zero_hetero.errors import INTERRUPTED

logger = logging.getLogger(__name__)

NOTHING, SAVE, LEAVE = 0, 1, 2  # what is asked for; of several ranks' requests the largest counts
_HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_INSTALLED: weakref.WeakSet[Signals] = weakref.WeakSet()


def _remove_in_child() -> None:
    """A forked child, such as a pool's worker, ends by SIGTERM as it would without us: who sends it waits for that."""
    for signals in list(_INSTALLED):
        signals.remove()


os.register_at_fork(after_in_child=_remove_in_child)


class Signals:
    """Handles the signals that the application leaves at their default; `request` is what they have asked for.

    Launchers and terminals send them to all ranks, of which rank 0 says what happens.
    """

    def __init__(self, rank: int = 0) -> None:
        self.request, self._says = NOTHING, rank == 0
        self._interrupts = 0
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Turn signals into requests from now on. Python allows that in the main thread only; elsewhere do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        _INSTALLED.add(self)
        for number in _HANDLED:
            current = signal.getsignal(number)
            if current in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = current
                signal.signal(number, self._handle)
            else:
                logger.info("%s is handled by the application: it does not save", signal.Signals(number).name)

    def remove(self) -> None:
        """Restore the handlers that were there before."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.request = max(self.request, SAVE)
            return
        self.request = LEAVE
        # os.write and not print: the signal may have interrupted a print, whose buffer must not be entered twice.
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                self._say(b"interrupted twice: ending at once, without saving")
                flush()
                os._exit(INTERRUPTED)
        self._say(b"finishing this step, then saving and leaving; Ctrl-C once more ends at once")

    def _say(self, text: bytes) -> None:
        if self._says:
            with contextlib.suppress(OSError):  # closed
                os.write(2, b"[ds_hydra] " + text + b"\n")
