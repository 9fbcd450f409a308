"""What this rank is doing right now, in a word, for whoever reports on it: heartbeats, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

IDLE = "idle"  # outside a step, a save and a load


class Activity:
    """`now` is written by who does something and read by the heartbeat's thread.

    Inside an activity others may follow by plain assignment (a stage goes from "forward" to "backward" to "push"); when
    the activity ends, the one around it is back.
    """

    def __init__(self) -> None:
        self.now = IDLE

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before
