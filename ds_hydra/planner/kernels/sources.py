"""Copies of the kernels' source in a folder of the user's, beside which numba keeps what it compiles. Pure: no torch.

Numba keeps what it compiled beside the file of a function, and takes it for stale once that file has another path, size
or time. So each clone, installation and container would compile for a minute what is compiled already. Compiled kernels
are therefore functions of copies, whose folder bears the digest of their source and numba's release, and whose time is
always the same: whoever has these sources finds these files.

What numba loads is code. So nobody else may be able to write in that folder; where somebody may, numba's usual places
are used, which hold for one checkout alone.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ds_hydra.zero_hetero.files import check_private, keep_file, kept_folder

logger = logging.getLogger(__name__)
_TIME_NS = 10**18  # of every copy


@functools.cache
def folder_of_kernels() -> Path | None:
    """Where compiled kernels are kept, made if need be: `NUMBA_CACHE_DIR`, else among the user's kept files; None
    where there can be no folder in which this user alone may write."""
    named, folder = os.environ.get("NUMBA_CACHE_DIR"), None
    try:
        folder = Path(named) if named else kept_folder("kernels")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder, "can have this job run what they like")
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        logger.warning(
            "planner: compiled kernels are kept for this checkout alone, not in %s: %s", folder or "a home", error
        )
        return None
    return folder.resolve()


@contextmanager
def beside_copies() -> Iterator[None]:
    """Here numba takes the place beside a function's file before all others, if there are copies."""
    import numba

    config: Any = numba.config
    before = config.CACHE_DIR
    if folder_of_kernels() is not None:
        config.CACHE_DIR = ""
    try:
        yield
    finally:
        config.CACHE_DIR = before


def as_copied(function: types.FunctionType, digest: str, release: str) -> types.CodeType:
    """A function's code, as if it stood in the copy of its module for this digest and this release of numba; as it is
    where no copy can be kept."""
    copy = _copy(function.__module__, digest, release)
    return function.__code__ if copy is None else function.__code__.replace(co_filename=copy)


@functools.cache
def _copy(module: str, digest: str, release: str) -> str | None:
    """The path of a module's copy, written if it is not there."""
    folder = folder_of_kernels()
    if folder is None:
        return None
    source = Path(str(sys.modules[module].__file__)).read_bytes()
    copy = folder / f"ds_hydra-{digest}-numba-{release}" / f"{module}.py"

    def write(file: IO[bytes]) -> None:
        file.write(source)
        file.flush()
        os.utime(file.fileno(), ns=(_TIME_NS, _TIME_NS))

    def is_there() -> bool:
        return copy.is_file() and copy.stat().st_mtime_ns == _TIME_NS and copy.read_bytes() == source

    if not is_there():
        keep_file(copy, write)
    return str(copy) if is_there() else None
