"""The hosts of all ranks in; whom each rank hears, and why a job ends, out.

[Note: a tree of hosts]
The first rank of each host hears the others of its host, and rank 0 hears those first ranks; each also hears whom it is
heard by. With the ranks 0..3 on one host and 4..7 on another:

  0 hears 1 2 3 and 4        4 hears 0 and 5 6 7        5 hears 4

So of 1024 ranks on hosts of 8, rank 0 hears 134 and not 1023. What a rank finds out goes up to rank 0, which decides
which fault was the first, and its verdict comes down again. Only of the rank above itself a rank decides alone: if
that one died or froze, nothing goes up or down past it. Its host's ranks then end by that verdict, and the rest of the
job by rank 0's, which found the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hydra.watchdog.connection import Connection
from ds_hydra.watchdog.host import EXIT_CODE


class Place(NamedTuple):
    """A rank's place in the tree."""

    above: int | None  # the rank that hears this one; None: it is rank 0
    below: tuple[int, ...]  # those that it hears


def places(hosts: Sequence[str]) -> list[Place]:
    """Every rank's place, by the name of its host."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    above = [None if rank == 0 else 0 if first[host] == rank else first[host] for rank, host in enumerate(hosts)]
    below: list[list[int]] = [[] for _ in hosts]
    for rank, of in enumerate(above):
        if of is not None:
            below[of].append(rank)
    return [Place(*place) for place in zip(above, map(tuple, below), strict=True)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job cannot go on, and how long a rank may still live [Note: who ends when].

    A rank inside a step has `turns` left, one outside a step `idle_s` seconds (None: until it begins a step).
    """

    rank: int  # whose fault it is
    text: str
    turns: int
    idle_s: float | None
    gone: bool = False  # that rank does nothing more
    frozen: bool = False  # nor can it end itself
    error: str = ""  # with which that rank failed; it tells of it by itself
    code: int = EXIT_CODE  # with which the other ranks end


class Call(NamedTuple):
    """A call of all ranks in which a rank waits for others [Note: one call on all ranks]."""

    rank: int
    number: int  # of calls before it
    name: str


@dataclass
class Peer:
    """What a rank knows of another one."""

    rank: int
    heard: float
    step: int = 0
    activity: str = "start"
    connection: Connection | None = None
    left: bool = False
    judged: bool = False
    call: Call | None = None  # in which it waits, or one below it
    call_since: float = 0.0

    def note_call(self, call: Call | None, now: float) -> None:
        """It waits in this call."""
        if call != self.call:
            self.call, self.call_since = call, now


def different_calls(peers: Iterable[Peer], now: float, stays_s: float) -> dict[int, str]:
    """The calls of ranks, by name, that wait in different ones for longer than `stays_s`, though equally many were made
    before; empty where there are none."""
    calls = [(peer.call, now - peer.call_since > stays_s) for peer in peers if peer.call is not None]
    for number in {call.number for call, _ in calls}:
        if len({call.name for call, stays in calls if stays and call.number == number}) > 1:
            return {call.rank: call.name for call, _ in calls if call.number == number}
    return {}
