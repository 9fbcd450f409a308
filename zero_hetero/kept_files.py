"""What a job keeps for later ones: files in $XDG_CACHE_HOME/ds_hydra that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_PARTIAL = ".partial"
_LONGEST_S = 24 * 3600.0  # that a file may take to be written


def kept_folder(kind: str) -> Path:
    """Where files of a kind are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "ds_hydra" / kind


def keep_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file that then appears at `path`; where nothing can be written nothing is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PARTIAL, delete=False) as partial:
            try:
                write(partial)
                partial.close()
                os.replace(partial.name, path)
            except BaseException:  # an interrupt, too: nothing half written stays
                with suppress(OSError):
                    os.unlink(partial.name)
                raise
    except OSError:
        return


def _sweep(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left, once nobody can be writing it any more."""
    oldest = time.time() - _LONGEST_S
    for path in folder.glob(f"tmp*{_PARTIAL}"):
        with suppress(OSError):  # another process may sweep, too
            if path.stat().st_mtime < oldest:
                path.unlink()
