"""Seconds of computing and of waiting in; one rank's virtual time out [Note: virtual time]. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class VirtualClock:
    """One rank's time in seconds; it goes back only after what is done `apart`.

    The engine dates what the rank does by it, as by any clock.
    """

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

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is done in this context takes its time from now on, and afterwards it is now again."""
        now = self._now_s
        yield
        self._now_s = now

    def wait_until(self, time_s: float) -> None:
        """Go on at `time_s`, or at once if that has passed."""
        self._now_s = max(self._now_s, time_s)


class VirtualLane:
    """Later steps of a transfer take their time beside computing, as they do on a device, and one after the other
    [Note: lanes]."""

    early = True

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._inside = False
        self._free_s = 0.0  # when all that was begun in it is done

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Lane`."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with self._clock.apart():
                self._clock.wait_until(self._free_s)
                yield
                self._free_s = self._clock.now()
        finally:
            self._inside = False

    def mark(self) -> float:
        """See `Lane`."""
        return self._clock.now()

    def wait(self, mark: float) -> None:
        """See `Lane`."""
        self._clock.wait_until(mark)
