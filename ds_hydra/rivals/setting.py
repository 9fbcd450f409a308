"""What rivals are set up for: a model with its costs and memory, GPUs, a context, tokens of a step. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.memory import MemoryModel
from ds_hydra.simulate.links import INSIDE, LinkModel, Speed
from ds_hydra.simulate.llama import SHIPPED, ShippedModel
from ds_hydra.zero_hetero.nodes import largest_node

NODE = 8  # GPUs
_SOME_KEPT, _SOME_AGAIN = 22.7 / 32, 1.04  # where norms and the MLP's activation are computed again


class Published(NamedTuple):
    """What is known of the model of a shipped table besides its sizes."""

    heads: int  # that TP and Ulysses share
    zero_3_ms: float  # of a micro-batch
    room_bytes: float  # of a device, less margins
    state_bytes: float  # of a layer, over hidden^2
    sharded_share: float = 0.75  # of the states, over all ranks


_DEVICE, _GAP = 85_198_897_152, 5_242_880_000
# Memory: github.com/lhy101/Hydraulis, examples/strategy/build_parallel_scheme_space_{7b,32b}.py (the same in
# PKU-DAIR/Hetu, Apache-2.0). TP 8 and 16 were measured for the model of 52 heads, which none of them divides: 64 of the
# same size are meant. ZeRO-3: b1 of GPT 7B and 30B in FlexSP's solver, see `costs`.
PUBLISHED = {
    "a800-7b": Published(32, 629.3563, _DEVICE - _GAP - 6_442_450_944, 210.0),
    "a800-32b": Published(64, 2789.3644, _DEVICE - _GAP - 10_737_418_240, 201.0),
}


class Recomputed(Enum):
    """What the backward computes again; the value is what texts of set-ups say."""

    NOTHING = ""
    SOME = " selective AC"
    ALL = " AC"

    def kept(self, shares: Shares) -> float:
        """Share of the activations that stays until the backward."""
        return {Recomputed.NOTHING: 1.0, Recomputed.SOME: _SOME_KEPT, Recomputed.ALL: shares.recomputed}[self]

    def times(self, shares: Shares) -> Terms:
        """How many times a, b and c it takes."""
        if self is Recomputed.ALL:
            return Terms(*(1.0 + share for share in shares.forward))
        return Terms(1.0, _SOME_AGAIN if self is Recomputed.SOME else 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class RivalModel:
    """A model on a device, as costs of other systems are derived from it; each is made once, and equal to no other."""

    sizes: ShippedModel
    published: Published
    found: TableFile  # the measured schemes
    inside: Speed = INSIDE  # of a node's links
    node: int = NODE
    forms: tuple[Recomputed, ...] = tuple(Recomputed)  # that rivals may use

    @classmethod
    def of_shipped(cls, name: str, found: TableFile, inside: Speed = INSIDE, node: int = NODE) -> RivalModel:
        """With the sizes of a shipped table, and these costs."""
        return cls(SHIPPED[name], PUBLISHED[name], found, inside, node)

    @property
    def measured_ulysses(self) -> tuple[SchemeCost, ...]:
        """Schemes with Ulysses that need not be derived."""
        return ()

    @property
    def transfers(self) -> bool:
        """Whether pulls and pushes are known."""
        return True

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return self.sizes.shape

    def max_length(self, gpus: int, scheme: ParallelScheme, *, kept: float = 1.0, zero_3: bool = False) -> int:
        """MaxLen in tokens by appendix C.1; `kept`: share of the activations. 0 or less where states do not fit."""
        one = self.published
        return MemoryModel(
            self.shape.hidden, self.shape.layers, self.shape.vocab, one.room_bytes, gpus,
            kept * self.sizes.activations[scheme.tp], one.state_bytes, 1.0 if zero_3 else one.sharded_share,
        ).max_length(scheme)  # fmt: skip


class OwnModel(RivalModel):
    """A user's table: Ulysses as it was measured, or estimated, with this engine, which favours the rival. Of the model
    little is known: gathers of ZeRO-3 and, without `shape`, messages of rings take no time."""

    @classmethod
    def of(
        cls, found: TableFile, links: LinkModel, shape: ModelShape | None = None,
        forms: tuple[Recomputed, ...] = tuple(Recomputed),
    ) -> OwnModel:  # fmt: skip
        """With the rows of this table whose stages are alike."""
        table = found.table
        alike = tuple(replace(table[one], shares=table.shares(one)) for one in dict.fromkeys(table.schemes))
        own = replace(found, table=CostTable(alike, table.source))
        sizes = ShippedModel(shape or ModelShape(1, 1, 1, 1, 1, 1, 1), {})
        if found.job is not None and found.job.stages.activation_checkpointing:
            forms = (Recomputed.NOTHING,)  # more of it
        return cls(sizes, Published(1, 0.0, 0.0, 0.0), own, links.inside, largest_node(links.node_size), forms)

    @property
    def measured_ulysses(self) -> tuple[SchemeCost, ...]:
        """Those without it too."""
        return self.found.table.costs

    @property
    def transfers(self) -> bool:
        """See `RivalModel`."""
        return False

    def max_length(self, gpus: int, scheme: ParallelScheme, *, kept: float = 1.0, zero_3: bool = False) -> int:
        """MaxLen as the table has it, or of as many times the ranks; 0 where it has neither."""
        most = {cost.uniform: cost.max_length for cost in self.found.table.costs}
        unit = ParallelScheme(scheme.tp, scheme.pp)
        return int(most.get(scheme, scheme.sp * most.get(unit, 0)) / kept)


class Setting(Protocol):
    """A job that a system is set up for. `keys`: heads of keys and values over those of queries; `between`: GB/s of
    each GPU between nodes. It can be hashed: tables that are made for it are kept."""

    @property
    def of_model(self) -> RivalModel: ...
    @property
    def gpus(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def keys(self) -> float: ...
    @property
    def between(self) -> float: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class JobSetting:
    """A setting by itself."""

    of_model: RivalModel
    gpus: int
    context: int
    tokens: int
    keys: float = 1.0
    between: float = 25.0
