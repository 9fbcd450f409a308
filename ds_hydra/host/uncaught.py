"""How a script ends that does not catch a refusal: with the text of the refusal, once, and an exit code of its own.

A traceback says where in this package a refusal was found; its text says what to change. So only the text is shown, and
only by one rank where all ranks refuse the same thing. Other uncaught errors are shown as Python shows them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from types import TracebackType
from typing import Any

from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

logger = logging.getLogger(__name__)

EXIT_CODES: dict[type[BaseException], int] = {ConfigError: 78, PlanError: 78, CheckpointError: 74}
"""EX_CONFIG and EX_IOERR of sysexits.h. Unlike after 75 (a dead rank), starting the same job again does not help."""

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
        code = next((code for refusal, code in EXIT_CODES.items() if issubclass(kind, refusal)), None)
        if code is None or hasattr(sys, "ps1") or sys.flags.interactive:
            before(kind, error, trace)
            return
        logger.debug("a refusal was not caught", exc_info=(kind, error, trace))
        screen = sys.__stderr__  # torch.distributed calls the hook that was there before it with another sys.stderr
        if _is_first_to_tell(f"{kind.__name__}: {error}") and screen is not None:
            sys.stdout.flush()
            screen.write(f"ds_hydra.{kind.__name__}: {error}\n")
            screen.flush()
        raise SystemExit(code)  # Python leaves with the code of a hook's SystemExit

    hook.is_ds_hydra = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _is_first_to_tell(text: str) -> bool:
    """Whether this rank is the one that shows an error of this text.

    Before the ranks have met they have only read the same config, so the first rank of each node speaks for its node.
    Later an error may belong to one rank alone: of all ranks with the same text, the first to reach the ranks' common
    store shows it.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    key = f"ds_hydra/uncaught/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = distributed.distributed_c10d._get_default_store()
        first = store.add(key, 1) == 1
        deadline = time.monotonic() + _PATIENCE_S
        while distributed.get_rank() == 0 and time.monotonic() < deadline:  # it may be the one that keeps the store
            if store.add(key, 0) == distributed.get_world_size():
                break
            time.sleep(0.02)
    except RuntimeError:  # the store is gone with the rank that kept it
        return True
    return first
