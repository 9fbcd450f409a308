"""Seconds of computing and of waiting in; one rank's virtual time out [Note: virtual time]. Pure: no torch."""

from __future__ import annotations


class VirtualClock:
    """One rank's time in seconds; it never goes back. The engine dates what the rank does by it, as by any clock."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the cluster was made."""
        return self._now_s

    def seconds(self, begin: float, end: float) -> float:
        """Seconds from one moment to a later one."""
        return end - begin

    def wait(self) -> None:
        """The rank itself is what the time is about: it has come to this moment."""

    def compute(self, seconds: float) -> None:
        """Let the time of some computing pass."""
        self._now_s += seconds

    def wait_until(self, time_s: float) -> None:
        """Go on at `time_s`, or at once if that has passed."""
        self._now_s = max(self._now_s, time_s)
