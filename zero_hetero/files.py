"""Files in folders that others may write in: opened only if they are what they should be, made only where nothing is.

A name may be a link, a FIFO or a device: to open such a thing may wait for ever, give bytes without end, or change a
file elsewhere. So a name is looked at first (`lstat`), opened without following a link, and looked at again; and a new
file is made only where there is none (`O_EXCL`).
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

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


def check_private(folder: Path) -> None:
    """OSError unless `folder` is a folder of this user's in which nobody else may write."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a file')} and no folder")
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise OSError(
            errno.EPERM,
            f"it belongs to user {found.st_uid} with the mode {stat.S_IMODE(found.st_mode):04o}, and must be of user "
            f"{os.geteuid()} with 0700, since who can write there can end this job or join it",
        )
