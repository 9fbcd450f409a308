"""How a script ends that does not catch a refusal: with the text of the refusal, once, and an exit code of its own.

A traceback says where in this package a refusal was found; its text says what to change. So only the text is shown, and
only by one rank where all ranks refuse the same thing. Other uncaught errors are shown as Python shows them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from types import TracebackType

from ds_hydra.ranks.once import first, met
from ds_hydra.zero_hetero.errors import (
    OTHERS_FAULT,
    CheckpointError,
    ConfigError,
    NumericsError,
    PlanError,
    told_of,
)

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
        told, code = told_of(error), None
        if isinstance(error, (ConfigError, PlanError, CheckpointError, NumericsError)):
            code = error.exit_code
        elif told is not None and not told.here:
            code = OTHERS_FAULT  # the error is that rank's message
        if code is None or hasattr(sys, "ps1") or sys.flags.interactive:
            before(kind, error, trace)
            if met() and _lost_connection(error):
                raise SystemExit(OTHERS_FAULT)
            return
        logger.debug("a refusal was not caught", exc_info=(kind, error, trace))
        screen = sys.__stderr__  # torch.distributed calls the hook that was there before it with another sys.stderr
        text = f"{kind.__name__}: {error}" if told is None else told.text
        if _is_first_to_tell(text) and screen is not None:
            sys.stdout.flush()
            screen.write(f"[ds_hydra] {error}\n" if code == OTHERS_FAULT else f"ds_hydra.{text}\n")
            screen.flush()
        raise SystemExit(code)  # Python leaves with the code of a hook's SystemExit

    hook.is_ds_hydra = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _lost_connection(error: BaseException) -> bool:
    from ds_hydra.watchdog.cause import lost_connection

    return lost_connection(error)


def _is_first_to_tell(text: str) -> bool:
    """Whether this rank is the one that shows an error of this text.

    Before the ranks have met they have only read the same config, so the first rank of each node speaks for its node.
    Later an error may belong to one rank alone: of all ranks with the same text, the first to reach the ranks' common
    store shows it.
    """
    if not met():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return first(f"ds_hydra/uncaught/{hashlib.sha256(text.encode()).hexdigest()}", all_by_s=_PATIENCE_S) is not False
