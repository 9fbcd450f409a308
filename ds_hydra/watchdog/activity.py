"""The activity of this rank, in one word such as "forward" or "saving"; heartbeats and errors report it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

IDLE = "idle"  # outside a step, a save and a load


class Activity:
    """`now` is written by the part that does the work and read by the heartbeat's thread.

    Within a `with` block, plain assignments to `now` may follow (a stage goes from "forward" to "backward" to "push").
    When the block ends, `now` is again what it was before.
    """

    # No lock: one thread writes a name, the other reads it, and either name is true at the moment of the change.

    def __init__(self) -> None:
        self.now = IDLE

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before
