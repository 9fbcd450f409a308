"""One job at a time saves in a folder: a claim that counts up, and who may take it from whom.

[Note: one owner] Whoever saves in a folder has made `.owner-N` there, with the highest N, and makes the next number
every 5 seconds and before each rename that changes the folder. A name can be made once (`O_EXCL`), so of two that make
the same number one is refused; nothing else is taken for atomic, no clock and no lock of a file system:

    the owner makes 8                 nobody else can have made 8, so it still owns the folder; then 7 goes
    another job sees 8, then 9        the owner lives: this job is refused, and told who it is
    it sees 9 for 30 s on its clock   the owner is frozen, cut off or gone: it makes 10
    it sees 9 of a process that is    at once: known for processes of this host (boot, network and process numbers)
      gone, or of its own job         and of the job, which may save by another process when its first one was lost
    an owner that was frozen wakes    10 is there: it saves no more

The number that a checkpoint was saved with stands in its manifest, so that of two the later one is known.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ds_hydra.watchdog.host import Identity, gone
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.files import create_file, parse_json, read_file

BEAT_S, STILL_S, POLL_S = 5.0, 30.0, 1.0
_NAME = re.compile(r"\.owner-([0-9]{1,18})")
_MOST_BYTES = 4096


class OwnedError(CheckpointError):
    """The folder is another job's."""


class Owner:
    """What one process knows of who owns a folder; `highest` is the highest number of its checkpoints."""

    def __init__(
        self,
        folder: Path,
        highest: Callable[[Path], int],
        me: Identity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder, self._highest, self._clock = folder, highest, clock
        self._me = me or _here()
        self.text = json.dumps(asdict(self._me))
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._job: str | None = None  # the text of this job's owner, as its rank 0 has told it
        self._number = 0  # that this process has made last; 0: it owns nothing
        self._seen: tuple[int, float] | None = None  # another job's number, and since when
        self._lost = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()

    @property
    def owns(self) -> bool:
        """Whether this process owns the folder, as far as it knows."""
        return self._number > 0 and not self._lost

    def take(self) -> bool:
        """Whether this process owns the folder now; where not, ask again in a second. OwnedError if another job does
        that is alive."""
        with self._lock:
            if self._number:
                return True
            self.folder.mkdir(parents=True, exist_ok=True)
            found, text = self._newest()
            if found and text not in (self._job, self.text) and not _gone(text, self._me):
                now = self._clock()
                first, since = self._seen = self._seen or (found, now)
                if found != first:
                    self._seen = None
                    raise OwnedError(
                        f"{self.folder} is in use: {_told(text)} saves there and is alive. End that job, or save "
                        "elsewhere"
                    )
                if now - since < STILL_S:
                    return False
            if not self._make(max(found, self._highest(self.folder)) + 1):
                self._number = 0
                if self._newest()[0] <= found:
                    raise OwnedError(f"{self.folder}/.owner-{found + 1} is in the way and no file of a job: remove it")
                return False
            self._seen, self._lost, self._ended = None, "", threading.Event()
            threading.Thread(target=self._beat, args=(self._ended,), name="folder owner", daemon=True).start()
            return True

    def claim(self) -> int:
        """The next number, which shows that this process owns the folder still; OwnedError, by whom, where it was
        taken over."""
        with self._lock:
            if not self._lost:
                found, text = self._newest()
                saved = 0 if found else self._highest(self.folder)  # by an owner that has come and gone, say
                if found > self._number or saved > self._number or not self._make(self._number + 1):
                    by = _told(self._newest()[1] or text)
                    self._lost = (
                        f"{self.folder} was taken over by another job, {by}, while this one stood still for "
                        f"{STILL_S:.0f} s or more: this job saves no more. Keep one of the two"
                    )
            if self._lost:
                raise OwnedError(self._lost)
            return self._number

    def follow(self, text: str) -> None:
        """Know who owns the folder for this job; this process may have done so before."""
        self._job = text
        if text != self.text:
            self._ended.set()
            with self._lock:
                self._number = 0

    def leave(self, user: object) -> None:
        """Let go of the folder when nobody uses it any more."""
        self.users.discard(user)
        if not self.users:
            self.release()

    def release(self) -> None:
        """Let go of the folder: another job may take it at once."""
        self._ended.set()
        with self._lock, contextlib.suppress(OSError):
            number, self._number = self._number, 0
            if number and not self._lost:
                (self.folder / f".owner-{number}").unlink(missing_ok=True)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with self._lock, contextlib.suppress(OSError):  # a disk that is full or away: it is tried again
                if ended.is_set():
                    return
                try:
                    self.claim()
                except OwnedError:
                    return

    def _make(self, number: int) -> bool:
        """Whether this process, and no other, has made the number, and none is higher."""
        try:
            file = create_file(self.folder / f".owner-{number}", 0o644)
        except FileExistsError:
            return False
        before, self._number = self._number, number
        with contextlib.suppress(OSError), file:  # on a full disk the name alone has to do
            file.write(self.text.encode())
        higher = self._newest()[0] > number
        for path in self.folder.glob(".owner-*"):
            found = _NAME.fullmatch(path.name)
            if found and int(found[1]) in ((number, before) if higher else range(number)):
                path.unlink(missing_ok=True)
        return not higher

    def _newest(self) -> tuple[int, str]:
        """The highest number there is, 0 for none, and who has made it; what strangers have put there counts for
        nothing."""
        numbers = sorted(int(found[1]) for name in os.listdir(self.folder) if (found := _NAME.fullmatch(name)))
        for number in reversed(numbers):
            try:
                return number, read_file(self.folder / f".owner-{number}", _MOST_BYTES).decode("utf-8", "replace")
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EPERM):  # gone by now, say: its maker has made the next
                    return number, ""
        return 0, ""


def _here() -> Identity:
    """This process, with the name space that its number is of."""
    me = Identity.of_self()
    with contextlib.suppress(OSError):
        return Identity(f"{me.host}/{os.readlink('/proc/self/ns/pid')}", me.pid, me.started)
    return me


def _read(text: str) -> Identity | None:
    try:
        found = Identity(**parse_json(text))
    except (TypeError, ValueError):
        return None
    plain = isinstance(found.host, str) and isinstance(found.pid, int) and isinstance(found.started, str)
    return found if plain and 0 < found.pid < 2**31 else None


def _gone(text: str, me: Identity) -> bool:
    """Whether who has written this is known to have ended."""
    found = _read(text)
    return found is not None and found.host == me.host and bool(found.started) and gone(found.pid, found.started)


def _told(text: str) -> str:
    found = _read(text)
    return "another process" if found is None else f"process {found.pid} on {found.host.partition('/')[0]}"


_OWNERS: dict[str, Owner] = {}
os.register_at_fork(after_in_child=_OWNERS.clear)


def owner_of(folder: Path, highest: Callable[[Path], int]) -> Owner:
    """This process's one Owner of a folder."""
    return _OWNERS.setdefault(os.path.realpath(folder), Owner(folder, highest))


@atexit.register
def _release_all() -> None:
    for owner in list(_OWNERS.values()):
        owner.release()
