"""Looks at a thread: whether it does something, where it stands, whether it waits for other ranks. No torch.

A thread that waits for a lock, a message or a child uses no nanosecond of processor time, while one that computes uses
some even on the busiest machine, or waits there for a core, or for a disk. So whoever must tell a slow one from one
that stands still asks for this, and not for the time that has passed. It is read where Linux tells it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHONS = os.path.dirname(os.__file__) + os.sep
_BUSY = "RD"  # runs or waits for a core; waits for a disk, or for a file of another host


def work_of(pid: int, thread: int) -> tuple[int, bool]:
    """Nanoseconds of processor time that a thread has used, and whether it does something at this moment; (-1, False)
    where there is none."""
    place = Path(f"/proc/{pid}/task/{thread}")
    try:
        state, *fields = (place / "stat").read_text().rpartition(")")[2].split()
        try:
            used = int((place / "schedstat").read_text().split()[0])
        except OSError:  # a kernel that does not count so finely
            used = (int(fields[10]) + int(fields[11])) * _TICK_NS
    except (OSError, ValueError, IndexError):
        return -1, False
    return used, state in _BUSY


def work_beside(thread: int) -> int:
    """Nanoseconds of processor time that the other threads of this process, and all its children and theirs, have used
    so far, as far as they live."""
    found, open_ones = 0, [os.getpid()]
    while open_ones:
        pid = open_ones.pop()
        try:
            threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        except OSError:
            continue
        for one in threads:
            found += max(0, work_of(pid, one)[0]) if one != thread else 0
            try:
                children = Path(f"/proc/{pid}/task/{one}/children").read_text()
            except OSError:
                continue
            open_ones += map(int, children.split())
    return found


def stacks() -> str:
    """Of all threads, the innermost frames first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(number, number)}:\n" + "".join(f"  {_place(frame)}\n" for frame in walk(innermost))
        for number, innermost in sys._current_frames().items()
    )


def walk(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _from(frame: FrameType, *places: str) -> bool:
    return frame.f_code.co_filename.startswith(places)


def _of_python(frame: FrameType) -> bool:
    return _from(frame, _PYTHONS, "<frozen") and "-packages" not in frame.f_code.co_filename


def _of_groups(frame: FrameType) -> bool:
    return f"torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename


def is_wait(frames: Sequence[FrameType]) -> bool:
    """Whether a thread that does nothing waits for other ranks, or for another thread of this package."""
    outer = next((frame for frame in frames if not _of_python(frame)), None)
    return outer is not None and (_from(outer, _OURS) or _of_groups(outer))


def that_is_waited_for(frames: list[FrameType]) -> list[FrameType]:
    """The frames of another thread of this package that stands in code of others, where the one that trains waits for
    its threads; else its own."""
    if is_wait(frames) and _of_python(frames[0]):
        for innermost in sys._current_frames().values():
            others = list(walk(innermost))
            foreign = not (_from(others[0], _OURS) or _of_python(others[0]) or _of_groups(others[0]))
            if foreign and innermost is not frames[0] and any(_from(frame, _OURS) for frame in others):
                return others
    return frames


def user_frame(frames: Sequence[FrameType]) -> str:
    own = (one for one in frames if not _from(one, _OURS, "<") and "-packages" not in one.f_code.co_filename)
    user = next((frame for frame in own if not _of_python(frame)), frames[0] if frames else None)
    return "no frame" if user is None else _place(user)


def time_out_of(frames: Sequence[FrameType]) -> float:
    """The time-out of the group in which a thread waits, or of torch's default group, in seconds."""
    torch, found = sys.modules.get("torch.distributed"), None
    for frame in frames:
        if not _of_groups(frame):
            break
        found = frame.f_locals.get("group") or found
    try:
        group: Any = found or torch.group.WORLD  # type: ignore[union-attr]
        timeouts = [group._get_backend(kind).options._timeout for kind in group._device_types]
        return float(max(one.total_seconds() for one in timeouts))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0.0
