"""A verdict in; its text on the screen out, once on each host [Note: who tells]."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_hydra.ranks.once import first, first_on_host
from ds_hydra.watchdog.host import EXIT_CODE, Identity, say

if TYPE_CHECKING:
    from ds_hydra.watchdog.tree import Verdict

logger = logging.getLogger(__name__)


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
        if verdict.error and self._hosts[lost] == host:
            return False
        if lost == self._above:  # nobody passes verdicts on here any more, and several ranks have found the same
            asked = first(self._key)
            return first_on_host(self._key) if asked is None else asked
        return self._hosts.index(host) == self._rank
