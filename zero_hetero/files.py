"""Files that others may have written or may read: opened safely, kept whole, JSON with limits. Pure: no torch.

A name may be a link, a FIFO or a device: to open such a thing may wait for ever, give bytes without end, or change a
file elsewhere. So a name is looked at first (`lstat`), opened without following a link, and looked at again; and a new
file is made only where there is none (`O_EXCL`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any

_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_file(path: Path, most: int | None = None) -> FileIO:
    """A plain file of at most `most` bytes, to read. OSError that says why not for anything else, and for a stranger's
    file in a folder in which everybody may write."""
    _check(path, os.lstat(path), most)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = FileIO(handle, "rb")
    try:
        _check(path, os.fstat(handle), most)  # it may be another one by now
    except OSError:
        file.close()
        raise
    return file


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a plain file; see `open_file`."""
    with open_file(path, most) as file:
        data = bytearray()
        while part := file.read(most + 1 - len(data)):  # one may give less than it is asked for
            data += part
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return bytes(data)


def create_file(path: Path, mode: int = 0o666) -> FileIO:
    """A new file to write, without a buffer; FileExistsError where the name is taken, by a link too."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    return FileIO(handle, "wb")


def append_file(path: Path) -> FileIO:
    """A plain file to write behind what it has, made where there is none, without a buffer; else as `open_file`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = FileIO(os.open(path, flags, 0o600), "wb")
    try:
        _check(path, os.fstat(file.fileno()), None)
    except OSError:
        file.close()
        raise
    return file


def check_kind(path: Path, found: os.stat_result) -> None:
    """OSError unless it is a plain file."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind} and no file", str(path))


def check_owner(path: Path, found: os.stat_result) -> None:
    """OSError for what a stranger has put into a folder in which everybody may write.

    Who owns the folder, and root, are none; nor is anybody where only a group may write: it was chosen to.
    """
    folder = os.stat(path.parent)
    if folder.st_mode & stat.S_IWOTH and found.st_uid not in (os.geteuid(), folder.st_uid, 0):
        raise OSError(
            errno.EPERM, f"it belongs to user {found.st_uid}, and everybody may write in its folder", str(path)
        )


def _check(path: Path, found: os.stat_result, most: int | None) -> None:
    check_kind(path, found)
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {most}", str(path))
    check_owner(path, found)


def check_private(folder: Path, could: str = "can end this job or join it") -> None:
    """OSError unless `folder` is a folder of this user's in which nobody else may write, as they `could` do harm."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a file')} and no folder")
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise OSError(
            errno.EPERM,
            f"it belongs to user {found.st_uid} with the mode {stat.S_IMODE(found.st_mode):04o}, and must be of user "
            f"{os.geteuid()} with 0700, since who can write there {could}",
        )


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


MAX_DEPTH = 64
_MOST_DIGITS = 300  # a whole number of more is none that a float, or any counter, could hold
_TOO_MANY_DIGITS = re.compile(rf"\d{{{_MOST_DIGITS + 1}}}", re.ASCII)


class JsonError(ValueError):
    """What is wrong with a text, without its place, which the reader knows."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text, UTF-8 where it is bytes.

    JsonError for what is no JSON, and for keys that stand twice, NaN, infinite numbers, whole numbers of more than 300
    digits and nesting of more than 64 levels.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        # Of a plan's many numbers each would cost a call. Digits in a string may be as many as they like.
        parse_int = _whole if _TOO_MANY_DIGITS.search(plain) else None
        value = json.loads(
            plain, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=parse_int
        )
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise JsonError(str(error)) from None
    if too_deep(value):
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def too_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and dictionaries are nested in more than `most` levels."""
    # Level by level and not by recursion, which deep nesting could break before it is noticed.
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError("a key stands twice in one block")
    return block


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"the number {name}")
