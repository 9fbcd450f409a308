"""How a script ends: signals that ask to save and leave, refusals that it does not catch, and an exit code of its own.

A traceback says where in this package a refusal was found; its text says what to change. So only the text is shown, and
only by one rank where all ranks refuse the same thing. That a connection was lost is the consequence of what another
rank tells: a line says so. Other uncaught errors are shown as Python shows them.

A signal's handler only notes the request. It cannot save: it runs between any two instructions, on one rank, while a
save needs all ranks at the same step. The ranks exchange their requests with the figures at the end of each step and
act then.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
import threading
import weakref
from types import FrameType, TracebackType
from typing import NamedTuple

from ds_hydra.ranks.screen import first, first_on_host, flush, met, show
from ds_hydra.zero_hetero.errors import (
    INTERRUPTED,
    OTHERS_FAULT,
    CheckpointError,
    ConfigError,
    NumericsError,
    PlanError,
)
from ds_hydra.zero_hetero.told import message_of, told_of

logger = logging.getLogger(__name__)


EXIT_CODES = {kind: kind.exit_code for kind in (ConfigError, PlanError, CheckpointError)}
"""Unlike after 75 (another rank's fault), starting the same job again does not help."""

_PATIENCE_S = 2.0  # how long rank 0 stays, so that others can still ask whether it has told of an error


def show_refusals_plainly() -> None:
    """From now on a refusal that the script does not catch ends it without a traceback.

    Other errors go to the hook that was there before. So do all errors of an interactive session, which must not end.
    The traceback is still logged at level DEBUG.
    """
    before = sys.excepthook
    if getattr(before, "is_ds_hydra", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ending = _ending(error)
        if ending is None or hasattr(sys, "ps1") or sys.flags.interactive:
            before(kind, error, trace)
            return
        logger.debug("a refusal was not caught", exc_info=(kind, error, trace))
        if _is_first_to_tell(ending.key, alike=told_of(error) is None):
            # Not sys.stderr: torch.distributed calls the hook that was there before it with another one, and drops what
            # was written there where that hook leaves.
            show(ending.line, sys.__stderr__)
        raise SystemExit(ending.code)  # Python leaves with the code of a hook's SystemExit

    hook.is_ds_hydra = True  # type: ignore[attr-defined]
    sys.excepthook = hook


class _Ending(NamedTuple):
    code: int
    line: str
    key: str  # by which ranks know that they would say the same


def _ending(error: BaseException) -> _Ending | None:
    """How a script ends by an error that one line tells; None for other errors."""
    told, line = told_of(error), f"{type(error).__name__}: {message_of(error)}"
    if isinstance(error, (ConfigError, PlanError, CheckpointError, NumericsError)):
        text = line if told is None else told.text
        return _Ending(error.exit_code, f"ds_hydra.{text}", text)
    if told is not None:
        # Of another rank, whose message the error is.
        return None if told.here else _Ending(OTHERS_FAULT, f"[ds_hydra] {message_of(error)}", told.text)
    from ds_hydra.watchdog.words import lost_connection  # which brings torch

    if met() and lost_connection(error):
        return _Ending(
            OTHERS_FAULT, f"[ds_hydra] the connection to another rank, which tells why, is lost ({line})", ""
        )
    return None


def _is_first_to_tell(text: str, *, alike: bool) -> bool:
    """Whether this rank is the one that shows an error of this text.

    Before the ranks have met they have only read the same config, so the first rank of each node speaks for its node;
    unless they do not fail `alike`, since one that is lost cannot speak.
    Later an error may belong to one rank alone: of all ranks with the same text, the first to reach the ranks' common
    store shows it.
    """
    if not met() and not alike:
        return first_on_host(f"ds_hydra/{os.environ.get('MASTER_PORT')}/{text}"[:100])
    if not met():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    key = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return first(f"ds_hydra/uncaught/{key}", all_by_s=_PATIENCE_S) is not False


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
