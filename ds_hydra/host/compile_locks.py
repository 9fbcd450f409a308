"""A wait for a lock under which an operator is compiled in; who holds it, or that nobody does, out.

[Note: locks of compilations]
DeepSpeed compiles operators at their first use, such as its communication on CPUs, into a folder of the user's; torch
keeps all but one process out of it by a file `lock`, for which they wait without a word and without an end. A process
that was killed meanwhile leaves the file, and each later job stands still before its first line. Whoever compiles holds
the file open, so on this host it can be found. On another host, with a folder that both see, it cannot: there the lock
counts as left behind when nothing in the folder was written for long.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from torch.utils.file_baton import FileBaton

from ds_hydra.ranks.screen import show
from ds_hydra.zero_hetero.errors import ConfigError

_QUIET_S = 5.0  # of a wait of which nothing is told
_LOOK_S = 1.0
_LEFT_S = 600.0  # without a file written, after which nobody compiles


def tell_locks() -> None:
    """From now on a wait for such a lock is told, and ConfigError where it was left behind."""
    FileBaton.wait = _wait  # type: ignore[assignment, method-assign]


def _wait(baton: FileBaton) -> None:
    lock, began, told, looked = Path(baton.lock_file_path), time.monotonic(), False, 0.0
    while lock.exists():
        time.sleep(baton.wait_seconds)
        now = time.monotonic()
        if now - began < _QUIET_S or now - looked < _LOOK_S:
            continue
        looked, holder = now, _holder(lock)
        if holder is None and _unwritten_s(lock.parent) > _LEFT_S:
            raise ConfigError(_text(lock, holder))
        if not told:
            show(f"[ds_hydra] waiting: {_text(lock, holder)}")
            told = True


def _text(lock: Path, holder: int | None) -> str:
    what = f"the operator {lock.parent.name} is locked by {str(lock)!r}"
    if holder is not None:
        return f"{what}, while process {holder} of this host compiles it"
    return (
        f"{what}, which no process of this host holds, and nothing there was written for "
        f"{_unwritten_s(lock.parent):.0f} s: a run that was ended while it compiled leaves such a file. Unless another "
        f"host compiles there, delete it: rm {lock}"
    )


def _unwritten_s(folder: Path) -> float:
    """Since a file of a folder was written, the folder's own list included."""
    written = [0.0]
    for path in (folder, *folder.iterdir()):
        with contextlib.suppress(OSError):  # it is gone
            written.append(path.stat().st_mtime)
    return time.time() - max(written)


def _holder(lock: Path) -> int | None:
    """A process of this host that has the file open, as far as this user may see it."""
    name: Any = os.path.realpath(lock)
    for handles in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(handle) == name for handle in handles.iterdir()):
                return int(handles.parent.name)
    return None
