"""What the members of an elastic job agree on, what each tells, and what it does about the open step. Pure.

[Note: members and ranks]
A member is a process, with an id that no other process of the job ever has. A view is the set of members that train
together in an epoch; a member's rank is its position there, where those of a host lie side by side. So of the members
0 1 2 3 of epoch 0, when 1 has died, epoch 1 has the members 0 2 3 with the ranks 0 1 2; a process that joins in epoch 2
becomes member 4, with rank 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ds_hydra.zero_hetero.norm_table import NormTable

NOTHING_HELD = -1  # steps committed, and epoch of its layout, of a process that joins


@dataclass(frozen=True, slots=True)
class Member:
    """A process, where it listens for the others, and what tells it from any other process of its host."""

    id: int
    host: str  # as `watchdog.host.host` names it; members with one name are in one node
    address: tuple[str, int]
    pid: int = 0
    started: str = ""  # in clock ticks since the host's boot


@dataclass(frozen=True, slots=True)
class Report:
    """What a member holds while its training stands still, told to all that go on with it."""

    committed: int = NOTHING_HELD  # steps whose update it has applied
    table: str | None = None  # name of that of the open step, if whole: of step `committed`, counted from 0
    last: str | None = None  # of that of the step before
    layout_epoch: int = NOTHING_HELD  # the epoch in which the cut of its masters was made


@dataclass(frozen=True, slots=True)
class View:
    """Who trains together from here on. Equal, but for `tables`, on all members that install it."""

    epoch: int  # larger than that of any view before; epochs may be left out
    members: tuple[Member, ...]  # by rank; the first has the lowest id
    former: tuple[Member, ...]  # by rank, of the epoch of the newest layout that a report names; () at the start
    store: tuple[str, int]  # where a store for this epoch's groups listens
    reports: Mapping[int, Report] = field(default_factory=dict)  # by id, of all members; a joiner's has `committed` -1
    tables: Mapping[str, NormTable] = field(default_factory=dict, compare=False, repr=False)  # those this one lacks

    @property
    def joined(self) -> frozenset[int]:
        """Members that have just come: they hold nothing."""
        return frozenset(one for one, report in self.reports.items() if report.committed == NOTHING_HELD)


def to_apply(own: Report, reports: Collection[Report]) -> str | None:
    """Name of the table by which this member completes its open step; None where it has nothing to complete
    [Note: the vote]. It is at most one step behind another, and has the gradients of the step that it lacks."""
    newest = max(report.committed for report in reports)
    names = (one.last if own.committed < newest else one.table for one in reports if one.committed == newest)
    return None if own.committed == NOTHING_HELD else next((name for name in names if name is not None), None)


def lacking(reports: Mapping[int, Report]) -> dict[int, str]:
    """By id, of members that do not hold the table by which they complete their step, its name."""
    kinds = dict.fromkeys(reports.values())
    of_kind = {own: to_apply(own, kinds.keys()) for own in kinds}
    return {
        one: name
        for one, own in reports.items()
        if (name := of_kind[own]) is not None and name not in (own.table, own.last)
    }


def newest_layout(reports: Collection[Report]) -> int:
    """The epoch of the cut from which all go on: who has taken it proves that all have their part of it."""
    return max(report.layout_epoch for report in reports)


def usable(table: NormTable | None) -> NormTable | None:
    """The table of a step that can be applied: the ranks have said the same of their models, and none refuses."""
    if table is None or len({word for _, word, _ in table.rows}) > 1 or any(word < 0 for _, word, _ in table.rows):
        return None
    return table
