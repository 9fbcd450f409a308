"""Members of an elastic job that stand still while others wait for them: found by themselves, and lost to the others.

[Note: stands in the store]
The members' heartbeats tell who lives. Who waits for others for half of the time for which it may, or stands still
elsewhere for as long, says so each second in the store in which torch's ranks of this view have met, signed with the
job's secret. Who stands reads what the others say, and ends itself if they have waited for too long,
by [Note: who stands still]; the others then lose it as one that has died. A record that does not change, or that is not
signed, counts for nothing, and a rank without one counts as one that moves: then nobody ends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ds_hydra.watchdog.host import EXIT_CODE, end_process, say
from ds_hydra.watchdog.progress import LOOK_S, Progress, Stand, stuck

if TYPE_CHECKING:
    from ds_hydra.elastic.agent import MemberAgent

_READ_S = 2.5 * LOOK_S  # within which others read why
_FRESH_S = 4.0  # after which a record that has not changed counts for nothing


class Stands:
    """Of one member; it has a thread of its own."""

    def __init__(self, progress: Progress, agent: MemberAgent):
        self._progress, self._agent, self._secret = progress, agent, agent.invitation.secret.encode()
        self._read: dict[str, tuple[bytes, float]] = {}  # by key: what stood there, and since when
        self._told = ""
        self._closing = threading.Event()
        threading.Thread(target=self._live, daemon=True, name="stands").start()

    def close(self) -> None:
        self._closing.set()
        self._progress.watch_the_end()

    def _live(self) -> None:
        while not self._closing.wait(LOOK_S):
            now = time.monotonic()
            with suppress(RuntimeError, ValueError):  # there are no groups at this moment
                self._progress.rank = dist.get_rank()
            self._progress.look_at_the_end(now)
            stand = self._progress.look(now)
            if stand.still_s > stand.limit_s / 2 and not self._agent.faulty:
                try:
                    self._compare(stand, now)
                except (RuntimeError, ValueError):  # the store is gone, or the groups are being made
                    self._read.clear()

    def _compare(self, stand: Stand, now: float) -> None:
        kept: Any = dist.distributed_c10d._get_default_store()
        store = kept.clone()  # another thread may hang in that one
        rank, key = dist.get_rank(), f"ds_hydra/stands/{self._agent.view.epoch}"
        stand = stand._replace(rank=rank)
        store.set(f"{key}/{rank}", self._signed(f"{key}/{rank}", stand))
        if stand.waits_s:
            why = self._found(store, f"{key}/why", now)
        else:
            others = [self._found(store, f"{key}/{one}", now) for one in range(dist.get_world_size()) if one != rank]
            stands = [Stand(*one) if one else stand._replace(rank=-1, stands_s=0.0) for one in others]
            _, why = stuck([stand, *stands])
        if why and why != self._told:
            self._told = why
            store.set(f"{key}/why", self._signed(f"{key}/why", why))
            self._progress.write(why)
        if why and not stand.waits_s and not self._agent.faulty and not self._closing.wait(_READ_S):
            say(f"{why}; {self._progress.told}. It is lost to the others")
            end_process(EXIT_CODE)

    def _signed(self, key: str, value: Any) -> bytes:
        text = json.dumps(value)
        return f"{self._code(key, text)} {text}".encode()

    def _code(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(), hashlib.sha256).hexdigest()

    def _found(self, store: Any, key: str, now: float) -> Any:
        """What another has said there; None where that is nothing, not signed, or old."""
        if not store.check([key]):
            return None
        raw = store.get(key)
        before = self._read.get(key, (b"", 0.0))
        self._read[key] = before if before[0] == raw else (raw, now)
        code, _, text = raw.decode().partition(" ")
        fresh = now - self._read[key][1] < _FRESH_S or key.endswith("/why")
        return json.loads(text) if fresh and hmac.compare_digest(code, self._code(key, text)) else None
