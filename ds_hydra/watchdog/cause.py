"""An error of this rank in; whether it is the cause of the job's end or only follows from another rank's, out."""

from __future__ import annotations

import json
import re
import sys

from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from ds_hydra.zero_hetero.told import message_of, told_of

_MAX_JSON = 1800  # of an error, which a verdict holds twice, and which travels in one frame
# gloo and NCCL raise plain RuntimeErrors where the other end of a connection has gone, and name themselves in the text,
# as a script's own error of some other connection does not. The store has types for that.
_LOST = re.compile(r"gloo|nccl", re.I)


def follows(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's fault: that rank's message, or a lost connection."""
    told = told_of(error)
    if told is not None:
        return not told.here
    return lost_connection(error) or (error.__cause__ is not None and follows(error.__cause__))


def lost_connection(error: BaseException) -> bool:
    """Whether a collective, a message or the ranks' store has failed."""
    distributed = sys.modules.get("torch.distributed")
    kinds = getattr(distributed, "DistError", ())
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and _LOST.search(message_of(error)) is not None)


def timed_out(error: BaseException) -> bool:
    """Whether a collective or message has ended because others did not come to it in time."""
    return lost_connection(error) and "timed out" in message_of(error).lower()


def refusal_code(error: BaseException) -> int | None:
    """The exit code of a refusal; None for other errors."""
    return error.exit_code if isinstance(error, (ConfigError, PlanError, CheckpointError)) else None


def as_line(error: BaseException) -> str:
    """Type and message in one line that a frame can hold."""
    line = " ".join(f"{type(error).__name__}: {message_of(error)}".split())
    while len(json.dumps(line)) > _MAX_JSON:  # a character may take six bytes there
        line = line[: 3 * len(line) // 4]
    return line
