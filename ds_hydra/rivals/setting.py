"""What rivals are set up for: a model with its costs and memory, GPUs, a context, tokens of a step. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.memory import MemoryModel
from ds_hydra.simulate.links import INSIDE, Speed
from ds_hydra.simulate.llama import SHIPPED, ShippedModel


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


@dataclass(frozen=True, eq=False)
class RivalModel:
    """A model on a device, as costs of other systems are derived from it; each is made once, and equal to no other."""

    sizes: ShippedModel
    published: Published
    found: TableFile  # the measured schemes
    inside: Speed = INSIDE  # of a node's links

    @classmethod
    def of_shipped(cls, name: str, found: TableFile, inside: Speed = INSIDE) -> RivalModel:
        """With the sizes of a shipped table, and these costs."""
        return cls(SHIPPED[name], PUBLISHED[name], found, inside)

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
