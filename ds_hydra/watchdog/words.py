"""Whether an error is the cause of the job's end, and what is told of that.

The cause is told once on each host [Note: who tells].
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_hydra.ranks.screen import first, first_on_host
from ds_hydra.watchdog.host import EXIT_CODE, Identity, say
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from ds_hydra.zero_hetero.told import message_of, told_of

if TYPE_CHECKING:
    from ds_hydra.watchdog.meeting import Verdict

logger = logging.getLogger(__name__)

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


class LastWords:
    """What this rank says when the job ends: at most one text, by whichever of its threads comes first."""

    def __init__(self, rank: int, who: Sequence[Identity], above: int | None, secret: bytes, remedy: str):
        self._rank, self._above, self._hosts, self._remedy = rank, above, [one.host for one in who], remedy
        mine = secret + self._hosts[rank].encode()
        self._key = f"ds_hydra/verdict/{hashlib.sha256(mine).hexdigest()}"
        self._lock, self._spoke = threading.Lock(), False

    def spoken(self) -> bool:
        """Note that this rank has said what it had to say; whether it had before."""
        with self._lock:
            before, self._spoke = self._spoke, True
        return before

    def say(self, verdict: Verdict, step: int, activity: str) -> None:
        """Say it, if that is this rank's part and was not done."""
        if not self.spoken():
            if self._is_mine(verdict):
                say(self.line(verdict, step, activity))
            else:
                logger.debug("%s", self.line(verdict, step, activity))

    def line(self, verdict: Verdict, step: int, activity: str) -> str:
        """The whole text."""
        remedy = self._remedy if verdict.code == EXIT_CODE else ""  # otherwise starting again does not help
        text = f"{verdict.text}. {remedy}" if remedy else verdict.text
        return text if verdict.rank == self._rank else f"rank {self._rank} ends in step {step} ({activity}): {text}"

    def _is_mine(self, verdict: Verdict) -> bool:
        host, lost = self._hosts[self._rank], verdict.rank
        if lost == self._rank:
            return True
        if (verdict.error or verdict.still) and self._hosts[lost] == host:
            return False
        if lost == self._above:  # nobody passes verdicts on here any more, and several ranks have found the same
            asked = first(self._key)
            return first_on_host(self._key) if asked is None else asked
        return self._hosts.index(host) == self._rank
