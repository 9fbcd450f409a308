"""What a job keeps for later ones: files in $XDG_CACHE_HOME/ds_hydra that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def kept_folder(kind: str) -> Path:
    """Where files of a kind are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "ds_hydra" / kind


def keep_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file that then appears at `path`; where nothing can be written nothing is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as partial:
            write(partial)
        os.replace(partial.name, path)
    except OSError:
        return
