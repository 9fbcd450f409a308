"""What the members of an elastic job agree on, and what training sees of the agreement: types only. Pure.

[Note: members and ranks]
A member is a process, with an id that no other process of the job ever has. A view is the set of members that train
together in an epoch; a member's rank is its position there, where those of a host lie side by side. So of the members
0 1 2 3 of epoch 0, when 1 has died, epoch 1 has the members 0 2 3 with the ranks 0 1 2; a process that joins in epoch 2
becomes member 4, with rank 3.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

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
class NormTable:
    """What all ranks said of their gradients in a step: the vote that the step is complete everywhere.

    A rank's row is the sum of its squares, its word and its share of the loss, as `zero_hetero.grad_norm.norm_table`
    gathers them.
    """

    step: int
    rows: tuple[tuple[float, float, float], ...]  # by rank


def table_text(table: NormTable) -> str:
    """A table as it travels: its bits, as a row may hold NaN, which equals nothing, and 0.0 equals -0.0."""
    flat = tuple(chain.from_iterable(table.rows))
    return b64encode(struct.pack(f"<q{len(flat)}d", table.step, *flat)).decode()


@lru_cache(maxsize=16)  # the votes of a thousand members have the same two
def table_of_text(text: str) -> NormTable:
    """What `table_text` made; ValueError for anything else."""
    raw = b64decode(text, validate=True)
    if len(raw) % 24 != 8:
        raise ValueError(f"{len(raw)} bytes are no table of rows of three numbers")
    step, *flat = struct.unpack(f"<q{len(raw) // 8 - 1}d", raw)
    return NormTable(step, tuple(zip(flat[::3], flat[1::3], flat[2::3], strict=True)))


Table = Annotated[
    NormTable,
    PlainSerializer(table_text),
    BeforeValidator(lambda value: table_of_text(value) if isinstance(value, str) else value),
]


@dataclass(frozen=True, slots=True)
class Report:
    """What a member holds while its training stands still, told to all that go on with it."""

    committed: int = NOTHING_HELD  # steps whose update it has applied
    table: Table | None = None  # of the open step, if whole: that of step `committed`, counted from 0
    last: Table | None = None  # of the step before
    layout_epoch: int = NOTHING_HELD  # the epoch in which the cut of its masters was made


@dataclass(frozen=True, slots=True)
class View:
    """Who trains together from here on. Equal, field by field, on all members that install it."""

    epoch: int  # larger than that of any view before; epochs may be left out
    members: tuple[Member, ...]  # by rank; the first has the lowest id
    former: tuple[Member, ...]  # by rank, of the epoch of the newest layout that a report names; () at the start
    store: tuple[str, int]  # where a store for this epoch's groups listens
    reports: Mapping[int, Report] = field(default_factory=dict)  # by id, of all members; a joiner's has `committed` -1

    def rank_of(self, member: int) -> int:
        """Rank of the member with this id; ValueError where it is none."""
        return [one.id for one in self.members].index(member)

    @property
    def joined(self) -> frozenset[int]:
        """Members that have just come: they hold nothing."""
        return frozenset(one for one, report in self.reports.items() if report.committed == NOTHING_HELD)

    def to_wire(self) -> dict[str, Any]:
        """As JSON can hold it. Tables, of which the reports of N members hold 2 N, are there once each."""
        tables: dict[str, int] = {}
        texts: dict[int, str] = {}  # by identity: those that came over the wire alike are one object

        def index(table: NormTable | None) -> int | None:
            if table is None:
                return None
            if id(table) not in texts:
                texts[id(table)] = table_text(table)
            return tables.setdefault(texts[id(table)], len(tables))

        reports = {
            str(member): [report.committed, index(report.table), index(report.last), report.layout_epoch]
            for member, report in self.reports.items()
        }
        return {
            "epoch": self.epoch,
            "members": [asdict(member) for member in self.members],
            "former": [asdict(member) for member in self.former],
            "store": list(self.store),
            "reports": reports,
            "tables": list(tables),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> View:
        """What `to_wire` made; ValueError (pydantic's, KeyError, IndexError also) for anything else."""
        tables = wire["tables"]
        reports = {
            int(member): {
                "committed": committed,
                "table": None if table is None else tables[table],
                "last": None if last is None else tables[last],
                "layout_epoch": layout_epoch,
            }
            for member, (committed, table, last, layout_epoch) in wire["reports"].items()
        }
        return _adapter().validate_python({**{key: wire[key] for key in _PLAIN}, "reports": reports})


_PLAIN = ("epoch", "members", "former", "store")


@cache
def _adapter() -> TypeAdapter[View]:
    return TypeAdapter(View)
