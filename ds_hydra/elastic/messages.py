"""What members of an elastic job agree on and say to each other, as it is and as it travels; what the membership
machine asks to be done. Pure.

[Note: members and ranks]
A member is a process, with an id that no other process of the job ever has. A view is the set of members that train
together in an epoch; a member's rank is its position there, where those of a host lie side by side. So of the members
0 1 2 3 of epoch 0, when 1 has died, epoch 1 has the members 0 2 3 with the ranks 0 1 2; a process that joins in epoch 2
becomes member 4, with rank 3.

[Note: what travels]
A loss among a thousand members is told in bytes by the hundred for each, not by the hundred thousand: members are told
as places in a roster that both ends have, reports as how often each comes in a row, and tables by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, ValidationInfo

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


_MOST = 1 << 16  # members


class Ballot(NamedTuple):
    """Number of a round, which no other has: its candidate's id tells rounds of one number apart."""

    number: int
    candidate: int


NO_BALLOT = Ballot(-1, -1)


def _told(value: Any, base: Sequence[Member]) -> Any:
    """A value as JSON can hold it, where `base` is known at the other end [Note: what travels]."""
    if isinstance(value, NormTable):
        return value.text
    if is_dataclass(value):
        return {one.name: _told(getattr(value, one.name), base) for one in fields(value)}
    if not isinstance(value, tuple):
        return value
    if value and isinstance(value[0], Member):
        return _places(value, base)
    if value and isinstance(value[0], Report):
        return [[len(list(same)), asdict(report)] for report, same in groupby(value)]
    return [_told(one, base) for one in value]


def _places(members: Sequence[Member], base: Sequence[Member]) -> list[Any]:
    """Runs (first place, how many) of the base, and whole those that are not in it."""
    at, found = {member: place for place, member in enumerate(base)}, list[Any]()
    for member in members:
        place = at.get(member)
        if place is None:
            found.append(asdict(member))
        elif found and isinstance(found[-1], list) and sum(found[-1]) == place:
            found[-1][1] += 1
        else:
            found.append([place, 1])
    return found


def _of_places(told: Any, info: ValidationInfo[Any]) -> list[Any]:
    if len(told) > _MOST:
        raise ValueError(f"{len(told)} members")
    base: Sequence[Member] = info.context or ()
    found: list[Any] = []
    for one in told:
        if isinstance(one, dict):
            found.append(one)
        else:
            first, count = one
            if first < 0 or count < 1 or first + count > len(base):
                raise ValueError(f"places {one} of {len(base)}")
            found += base[first : first + count]
    return found


def _of_runs(told: Any) -> list[Any]:
    if sum(count for count, _ in told) > _MOST:
        raise ValueError("too many reports")
    return [report for count, report in told for _ in range(count)]


Members = Annotated[tuple[Member, ...], BeforeValidator(_of_places)]
Reports = Annotated[tuple[Report, ...], BeforeValidator(_of_runs)]
Table = Annotated[NormTable, BeforeValidator(NormTable.of_text)]


@dataclass(frozen=True)
class Roster:
    """Who is in an epoch: the part of a view that is decided, before reports and a store make a view of it."""

    epoch: int
    members: Members  # by rank; the first has the lowest id
    next_id: int  # of the next process that joins

    @cached_property
    def ids(self) -> frozenset[int]:
        return frozenset(self.by_id)

    @cached_property
    def by_id(self) -> dict[int, Member]:
        return {member.id: member for member in self.members}


NOBODY = Roster(NOTHING_HELD, (), 0)

# Messages. `epoch` is that of the newest roster that the sender knows; there is one roster of an epoch. Members are
# told as places in it.


@dataclass(frozen=True, slots=True)
class Word:
    """beat     I live, and have the view of the epoch `number`
    ask      what is the newest roster?
    fault    to the coordinator: a round is needed
    planned  to the coordinator: a round is needed, at the end of the step, without an abort
    failing  my training has met an error: if a member has left, it may be due to that, and a round is needed
    accept   what was proposed in your round `number` is accepted here
    kill     the frozen process that is member `number` runs on your host: end it
    bye      I leave in good order"""

    what: Literal["beat", "ask", "fault", "planned", "failing", "accept", "kill", "bye"]
    epoch: int
    number: int = 0


ASKING = ("ask", "fault", "planned", "failing", "kill")  # of a member that knows this roster, and no older or newer one


@dataclass(frozen=True, slots=True)
class Stop:
    """From a candidate: promise to follow no older round, and vote once training stands still."""

    ballot: Ballot
    epoch: int
    planned: bool
    tables: tuple[str, ...] = ()  # names of those that are to come with the vote


@dataclass(frozen=True, slots=True)
class Vote:
    """Training stands still here, and goes on by an install of this ballot or of a later one only."""

    ballot: Ballot
    epoch: int
    accepted: tuple[Ballot, Roster] | None  # a successor of the newest roster that may be decided
    report: Report
    held: Members | None  # by rank, of the epoch of the report's layout; None: the newest roster's
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Propose:
    """Accept this successor of the roster of `epoch`."""

    ballot: Ballot
    epoch: int
    roster: Roster


@dataclass(frozen=True, slots=True)
class Install:
    """Go on in the view that this makes. `epoch` is that of the roster before; -1 for who is not in it."""

    ballot: Ballot
    epoch: int
    roster: Roster
    former: Members
    store: tuple[str, int]
    reports: Reports  # by rank
    tables: tuple[Table, ...] = ()  # that it lacks

    @property
    def view(self) -> View:
        ids = [member.id for member in self.roster.members]
        return View(self.roster.epoch, self.roster.members, self.former, self.store,
                    dict(zip(ids, self.reports, strict=True)), {one.name: one for one in self.tables})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Newer:
    """What you said is of an epoch that is over, or of a round older than that of `ballot`; this is the newest roster.
    Who is not in it is left behind."""

    roster: Roster
    ballot: Ballot = NO_BALLOT
    epoch: int = NOTHING_HELD  # told whole


Message = Word | Stop | Vote | Propose | Install | Newer
_KINDS: Mapping[str, type] = {kind.__name__: kind for kind in (Word, Stop, Vote, Propose, Install, Newer)}


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[name])


def to_wire(message: Message, rosters: Mapping[int, Roster]) -> dict[str, Any]:
    """As JSON can hold it; `rosters` are those that the sender knows, by epoch."""
    return {type(message).__name__: _told(message, rosters.get(message.epoch, NOBODY).members)}


def from_wire(wire: Mapping[str, Any], rosters: Mapping[int, Roster]) -> Message | None:
    """What `to_wire` made, None where it needs a roster that is not known here; ValueError, LookupError or TypeError
    for anything else."""
    ((name, body),) = wire.items()
    adapter, base = _adapter(name), rosters.get(body["epoch"], NOBODY)
    if base is NOBODY and body["epoch"] != NOTHING_HELD and name in ("Vote", "Propose", "Install"):
        return None
    message: Message = adapter.validate_python(body, context=base.members)
    return message


# Actions.


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; connect first where there is no connection."""

    to: Member
    message: Message


@dataclass(frozen=True, slots=True)
class Abort:
    """Free the training thread from its communication."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Training goes on in this view."""

    view: View


@dataclass(frozen=True, slots=True)
class TakeToken:
    """Write this roster into the shared folder as the successor of that of `epoch`, unless one is there; then call
    `token`."""

    epoch: int
    roster: Roster


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open a store for an epoch; then call `opened`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End a frozen process of this host."""

    member: Member


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process with code 75, and say why. `behind`: the others go on without it."""

    why: str
    behind: bool = False


Action = Send | Abort | GoOn | TakeToken | OpenStore | KillProcess | Exit
