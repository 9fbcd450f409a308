"""What one rank tells the others of an error, and what they know of it. Pure: no torch.

Apart from the errors themselves, whose import must cost next to nothing.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any, NamedTuple

_MOST_CHARACTERS = 1 << 14  # that one rank tells all others of an error


def message_of(error: BaseException) -> str:
    """What an error says, whatever it is: one of a script may have no text, or print a whole tensor."""
    try:
        return str(error)[:_MOST_CHARACTERS]
    except Exception as failed:
        return f"(its text cannot be made: {type(failed).__name__})"


def told_with_place(error: BaseException) -> str:
    """Type and message of an error of a function of the script's, and where in the script it was raised."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("ds_hydra", "torch"):
            place = f" in {frame.f_code.co_name} ({frame.f_code.co_filename}:{line})"
    return f"{type(error).__name__}: {message_of(error)}{place}"


class Told(NamedTuple):
    """Of an error that is raised on all ranks at once: where and what its cause is."""

    rank: int  # the first on which it happened
    text: str  # "Type: message": equal on all ranks
    here: bool  # whether it happened on this rank too; if not, the error is that rank's message


def mark_told(error: Any, told: Told) -> Any:
    """The same error, known to all ranks."""
    with contextlib.suppress(AttributeError, TypeError):  # of a class that takes no more attributes
        error.hydra_told = told
    return error


def told_of(error: BaseException) -> Told | None:
    """What all ranks know of an error; None where it is this rank's alone, as far as anybody knows."""
    return getattr(error, "hydra_told", None)


def release(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, and of those errors it follows from: whole worlds, where it goes on.

    Call it outside of the `except` block. A frame that keeps the error in a variable keeps itself alive by it.
    """
    seen: list[BaseException] = []
    left = [error]
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.append(one)
            left += [one.__cause__, one.__context__]
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
