"""What the membership machine hears (events), asks to be done (actions), and says to other members (messages). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from ds_hydra.elastic.view import Member, Report, View


class Ballot(NamedTuple):
    """Number of a round, which no other has: its candidate's id tells rounds of one number apart."""

    number: int
    candidate: int


@dataclass(frozen=True, slots=True)
class Roster:
    """Who is in an epoch: the part of a view that is decided, before reports and a store make a view of it."""

    epoch: int
    members: tuple[Member, ...]  # by rank; the first has the lowest id
    next_id: int  # of the next process that joins

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(member.id for member in self.members)

    def member(self, number: int) -> Member:
        return next(member for member in self.members if member.id == number)


# Messages. `epoch` and `roster` are those that the sender knows to be the newest.


@dataclass(frozen=True, slots=True)
class Beat:
    """I live."""

    epoch: int
    installed: int  # the epoch whose view this member has


@dataclass(frozen=True, slots=True)
class Fault:
    """To the coordinator: a round is needed; `planned`: at the end of the step, without an abort."""

    epoch: int
    planned: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """From a candidate: promise to follow no older round, and vote once training stands still."""

    ballot: Ballot
    roster: Roster
    planned: bool


@dataclass(frozen=True, slots=True)
class Vote:
    """Training stands still here, and goes on by an install of this ballot or of a later one only."""

    ballot: Ballot
    epoch: int  # of the newest roster
    roster: Roster | None  # that one, if it is not the one of the stop
    accepted: tuple[Ballot, Roster] | None  # a successor of it that may be decided
    report: Report
    held: tuple[Member, ...] | None  # by rank, of the epoch of the report's layout; None: those of the stop's roster


@dataclass(frozen=True, slots=True)
class Nack:
    """A newer round is promised."""

    ballot: Ballot
    roster: Roster


@dataclass(frozen=True, slots=True)
class Propose:
    """Accept this successor of the roster of `epoch`."""

    ballot: Ballot
    epoch: int
    roster: Roster


@dataclass(frozen=True, slots=True)
class Accept:
    """It is accepted here."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Install:
    """Go on in this view."""

    ballot: Ballot
    roster: Roster
    view: View


@dataclass(frozen=True, slots=True)
class Over:
    """What you said is of an epoch that is over; this is the newest. Who is not in it is left behind."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Kill:
    """This frozen process runs on your host: end it."""

    roster: Roster
    member: Member


@dataclass(frozen=True, slots=True)
class Bye:
    """I leave in good order."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Failing:
    """My training has met an error: if a member has left, it may be due to that, and a round is needed."""

    epoch: int


Message = Beat | Fault | Stop | Vote | Nack | Propose | Accept | Install | Over | Kill | Bye | Failing


# Events.


@dataclass(frozen=True, slots=True)
class Tick:
    """A turn of `membership.TURN_S` has passed in which this process ran."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from the process that is `sender` (-1: one that wants to join)."""

    sender: int
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A member cannot be reached; `dead`: nobody listens at its address, while its host answers."""

    member: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Silent:
    """A member is connected, and has not been heard for too long."""

    member: int


@dataclass(frozen=True, slots=True)
class Parked:
    """Training stands still on this process, out of all communication."""

    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """Training has met an error here that may come from another member."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Training uses the installed view."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Training cannot use views of so many members."""

    members: int


@dataclass(frozen=True, slots=True)
class Token:
    """What stands in the shared folder as the successor of the roster of `epoch`; None: the folder does not answer."""

    epoch: int
    roster: Roster | None


@dataclass(frozen=True, slots=True)
class Opened:
    """The store of an epoch listens."""

    epoch: int
    store: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Knock:
    """A process, whose id is -1, wants to join."""

    joiner: Member


@dataclass(frozen=True, slots=True)
class KnockGone:
    """It has gone away again."""

    joiner: Member


Event = Tick | Heard | Lost | Silent | Parked | Failed | Rebuilt | Unfit | Token | Opened | Knock | KnockGone


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
    """Write this roster into the shared folder as the successor of that of `epoch`, unless one is there; `Token`."""

    epoch: int
    roster: Roster


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open a store for an epoch; `Opened`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End a frozen process of this host."""

    member: Member


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process with code 75, and say why."""

    why: str


Action = Send | Abort | GoOn | TakeToken | OpenStore | KillProcess | Exit

_KINDS: Mapping[str, type] = {
    kind.__name__: kind for kind in (Beat, Fault, Stop, Vote, Nack, Propose, Accept, Over, Kill, Bye, Failing)
}


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(Roster if name == "Roster" else _KINDS[name])


def to_wire(message: Message) -> dict[str, Any]:
    """As JSON can hold it."""
    if isinstance(message, Install):
        roster = _adapter("Roster").dump_python(message.roster, mode="json")
        return {"Install": {"ballot": message.ballot, "roster": roster, "view": message.view.to_wire()}}
    return {type(message).__name__: _adapter(type(message).__name__).dump_python(message, mode="json")}


def from_wire(wire: Mapping[str, Any]) -> Message:
    """What `to_wire` made; ValueError, LookupError or TypeError for anything else."""
    ((name, body),) = wire.items()
    if name == "Install":
        roster = _adapter("Roster").validate_python(body["roster"])
        return Install(Ballot(*map(int, body["ballot"])), roster, View.from_wire(body["view"]))
    message: Message = _adapter(name).validate_python(body)
    return message
