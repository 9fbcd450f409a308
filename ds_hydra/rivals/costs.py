"""Costs and memory of the schemes that each system may use, and what a comparison is set up for. Pure: no torch.

[Note: costs of other systems]
Measured are T(l) of <TP, PP> (Hydraulis' tables for LLaMA on A800), and by FlexSP the bandwidth of all-to-alls by the
number of GPUs and what a micro-batch takes under ZeRO-3 besides its tokens. All else follows from them, and what is
left out is left out in the rival's favour:

  MaxLen            the formula of Hydraulis, appendix C.1, with its constants and the job's number of GPUs; for
                    ZeRO-3 with all states sharded over all GPUs
  TP 1, PP 1        not measured for either model: PP times a, b and c of the measured TP 1 scheme with the least PP
  more stages       a, b and c of the deepest measured scheme of this TP, in proportion
  context parallel  degree s: a/s and b/s, and c as it is. Keys and values go round a ring, forward once, backward twice
                    with their gradients, at the link speeds that all systems are simulated with; of that a sequence
                    waits for what its attention does not hide. Where the degree changes with the length, sequences that
                    one unit can hold, and is done with before the step ends, pay nothing for it
  Ulysses           degree s: a/s and b/s, and the all-to-alls of four tensors forward and four backward, at the
                    measured bandwidth of as many GPUs as TP * s. Ours exchanges the heads of a rank in up to eight
                    groups, one for each 512 tokens that a rank has of the micro-batch, and attention of one group goes
                    on during messages of the others: of four equal ones a quarter of all messages is exposed, and of
                    the rest what attention does not hide. Ours plans as if all micro-batches were equally long and
                    sequences rows of their own, and is judged by the rows that it really has. Between nodes ours sends
                    from one rank to another, at the speed of the links as rings, and pays the measured bandwidth inside
                    the node only [Note: rows over nodes]
  ZeRO-3            c is FlexSP's, 0.63 s (GPT 7B) and 2.79 s (30B) for each micro-batch, parameters' gathers included;
                    with `hidden_gathers` it is that of <TP, PP>, as if they took no time at all
  recomputation     all layers are computed again: the forward's share of T(l) more; of the activations a token keeps
                    what `Shares.recomputed` says, and a layer's own while it is computed counts as nothing. Or norms
                    and the MLP's activation only: of 32 bytes a hidden unit and layer a token of a LLaMA keeps 22.7,
                    two inputs of matrix products (4) and the MLP's inner one (5.4) less, for 4 % more of b, an
                    assumption in the rival's favour
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.head_sharing import head_parts, near_ranks
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.layouts import MOST_SHARING
from ds_hydra.rivals.waits import TwoHopCost, WaitingCost, fields_of, waits_of
from ds_hydra.simulate.job import SHIPPED, ShippedModel, SimulatedJob, llama_plan
from ds_hydra.simulate.links import BETWEEN, INSIDE, LinkModel, Speed
from ds_hydra.zero_hetero.nodes import largest_node


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of one device by appendix C.1 of Hydraulis, solved for the tokens of a micro-batch.

    `activation_bytes` is A (bytes per token, hidden unit and layer), `state_bytes` is B (bytes per layer and
    hidden^2), `sharded_share` is alpha, the part of the model states that is sharded over all ranks.
    """

    hidden: int
    layers: int
    vocab: int
    device_bytes: float  # capacity less a safety margin
    num_ranks: int
    activation_bytes: float = 40.0
    state_bytes: float = 201.0
    sharded_share: float = 0.75

    def max_length(self, scheme: ParallelScheme, activation_bytes: float | None = None) -> int:
        """MaxLen in tokens; 0 or less when not even the model states fit.

        A stage keeps PP micro-batches' activations of layers/PP layers. The first stage holds one embedding
        table, the only stage of PP = 1 the output table too; both are sharded over all ranks.
        """
        share, split = self.sharded_share, 1.0 - self.sharded_share
        layer_states = self.layers * self.hidden**2 * self.state_bytes
        states = layer_states * (share / self.num_ranks + split / (scheme.tp * scheme.pp))
        table = 16.0 * self.hidden * self.vocab
        states += table * (2 * share / self.num_ranks + (2 if scheme.pp == 1 else 1) * split / scheme.tp)
        per_token = self.layers * self.hidden * (activation_bytes or self.activation_bytes)
        return int((self.device_bytes - states) * scheme.tp * scheme.sp // per_token)


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
# same size are meant. ZeRO-3: b1 of GPT 7B and 30B in FlexSP's solver.
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


# 10^9 bytes a second of each GPU in an all-to-all over so many, rows of 4096 tokens (FlexSP, branch flexsp of
# PKU-DAIR/Hetu-Galvatron, galvatron/flexsp_solver/solver.py, Apache-2.0).
ALL_TO_ALL = {2: 119.54, 4: 104.07, 8: 96.5, 16: 20.01, 32: 10.53, 64: 7.77}
_RING = 6  # keys and values forward, again backward, and their gradients
_TENSORS = 8  # queries, keys, values and outputs, forward and backward
_BYTES = 2  # BF16
_OURS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # 24 GPUs, three nodes, share queries [Note: heads inside a node]


@dataclass(frozen=True)
class Way:
    """How a system's schemes differ from measured ones; `degrees`: of what shares a sequence among ranks."""

    degrees: tuple[int, ...] = (1,)
    ulysses: bool = False  # else a ring
    overlapped: bool = False  # its messages, by attention
    by_length: bool = False  # only sequences that need it are shared: those that no unit holds, or none within
    alone_ms: float = math.inf  # so much time
    zero_3: bool = False
    hidden_gathers: bool = False
    again: Recomputed = Recomputed.NOTHING
    stages: tuple[int, ...] = ()  # further numbers of stages


@lru_cache(maxsize=64)
def measured(setting: Setting) -> CostTable:
    """The measured schemes that fit the job's GPUs, with MaxLen for that number."""
    found = setting.of_model.found.table
    costs = [cost for cost in found.costs if cost.scheme.num_ranks <= setting.gpus]
    return CostTable(tuple(_limited(costs, setting, Way())), found.source)


@lru_cache(maxsize=64)
def table_of(setting: Setting, way: Way) -> CostTable:
    """All schemes within the job's GPUs that the measured ones become that way [Note: costs of other systems]."""
    found = setting.of_model.found.table
    if way.ulysses and (own := setting.of_model.measured_ulysses):
        wanted = [_again(cost, way) for cost in own]
    else:
        wanted = [cost for base in _more_stages(found, way) for cost in _shared(setting, base, way)]
    fitting = [cost for cost in wanted if cost.scheme.num_ranks <= setting.gpus]
    return CostTable(tuple(_limited(fitting, setting, way)), found.source)


def _again(cost: SchemeCost, way: Way) -> SchemeCost:
    """A measured scheme with what the way computes again."""
    if way.again is Recomputed.NOTHING:
        return cost
    assert cost.shares is not None, "tables have shares"
    more = way.again.times(cost.shares)
    derived = _from(cost, f"with{way.again.value}")
    return replace(cost, a=more.a * cost.a, b=more.b * cost.b, c=more.c * cost.c, derived=derived)


def _more_stages(found: CostTable, way: Way) -> Iterator[SchemeCost]:
    """The measured schemes without Ulysses, TP 1 without pipelines, and deeper pipelines where they are asked for."""
    plain = [cost for cost in found.costs if cost.uniform.sp == 1]
    yield from plain
    known: dict[int, list[SchemeCost]] = {}
    for cost in plain:
        known.setdefault(cost.uniform.tp, []).append(cost)
    for tp, costs in known.items():
        by_depth = sorted(costs, key=lambda cost: cost.scheme.pp)
        if by_depth[0].scheme.pp > 1 and tp == 1:
            yield _with_stages(by_depth[0], 1)
        for pp in way.stages:
            if pp > by_depth[-1].scheme.pp:
                yield _with_stages(by_depth[-1], pp)


def _with_stages(cost: SchemeCost, pp: int) -> SchemeCost:
    share, scheme = cost.scheme.pp / pp, ParallelScheme(cost.uniform.tp, pp)
    derived = _from(cost, f"as {pp} stage{'s' if pp > 1 else ''}")
    return replace(cost, scheme=scheme, a=share * cost.a, b=share * cost.b, c=share * cost.c, derived=derived)


def _from(cost: SchemeCost, how: str) -> str:
    """What a derived entry says of itself."""
    return f"{cost.derived or f'measured {cost.scheme}'}, {how}"


def _shared(setting: Setting, base: SchemeCost, way: Way) -> Iterator[SchemeCost]:
    """A scheme with its sequences shared by 1, 2, ... times as many ranks."""
    shares = base.shares
    assert shares is not None, "the tables have shares"
    base = with_keys(base, setting.keys)
    more = way.again.times(shares)
    unit = ParallelScheme(base.uniform.tp, base.scheme.pp)
    alone = setting.of_model.max_length(setting.gpus, unit, kept=way.again.kept(shares))
    of_unit = replace(base, a=more.a * base.a, b=more.b * base.b)
    if math.isfinite(way.alone_ms):
        alone = min(alone, int(of_unit.tokens_in(way.alone_ms / base.scheme.pp)))
    heads = setting.of_model.published.heads // base.uniform.tp
    for degree in way.degrees:
        scheme = ParallelScheme(base.uniform.tp, base.scheme.pp, degree)
        a, b, c = more.a * base.a / degree, more.b * base.b / degree, more.c * base.c
        if way.zero_3 and not way.hidden_gathers:
            c = setting.of_model.published.zero_3_ms / base.scheme.pp
        kind = "Ulysses" if way.ulysses else "a ring"
        how = [f"{kind} of {degree}"] * (degree > 1) + [f"with{way.again.value}"] * bool(way.again.value)
        derived = _from(base, " and ".join(how)) if how else base.derived
        known = base.max_length, base.util_length, base.shares, derived, base.stages, base.floor
        if not way.ulysses and degree > 1:
            ring = _ring_ms(setting, base, degree)
            yield WaitingCost(scheme, a, b, c, *known, message=ring, alone=max(0, alone) if way.by_length else 0)
            continue
        if degree > heads or (heads % degree and not _shares_queries(setting, scheme)):
            continue
        if not way.overlapped or degree == 1:
            yield SchemeCost(scheme, a, b + _all_to_all_ms(setting, base, degree, degree), c, *known)
            continue
        tokens = setting.tokens * base.uniform.tp / setting.gpus  # of a rank in the step
        tokens = int(tokens / math.ceil(tokens / max(1, alone)))
        yield _overlapping(setting, base, SchemeCost(scheme, a, b, c, *known), tokens)


def with_ulysses(setting: Setting, lengths: Sequence[int]) -> CostTable:
    """What ours chooses from: the measured schemes, and Ulysses on them.

    Pipelines are searched by a, b and c alone, so there what messages leave exposed in the mean of `lengths` is in b.
    """
    plain, more = measured(setting), table_of(setting, Way(_OURS, ulysses=True, overlapped=True))
    known = set(plain.schemes)
    added = [cost for cost in more.costs if cost.scheme not in known and _is_used(cost.uniform)]
    own = [with_keys(cost, setting.keys) for cost in plain.costs]
    shared = (cost if cost.scheme.pp == 1 else averaged(cost, lengths) for cost in added)
    return CostTable((*own, *shared), plain.source)


def _is_used(scheme: ParallelScheme) -> bool:
    return scheme.pp == 1 or scheme.tp * scheme.sp <= MOST_SHARING


def _shares_queries(setting: Setting, scheme: ParallelScheme) -> bool:
    """Whether whole nodes share the queries of a pipeline's one stage, and their ranks the heads."""
    every = setting.of_model.published.heads
    near = near_ranks(scheme.sp, scheme.tp, setting.of_model.node)
    parts = head_parts(scheme.sp, every, max(1, round(setting.keys * every)), scheme.tp, near=near)
    return scheme.pp == 1 and 0 < near == parts


def _overlapping(setting: Setting, base: SchemeCost, cost: SchemeCost, tokens: int) -> WaitingCost:
    """What ours pays besides for a scheme, in which a rank has so many tokens at once."""
    scheme = cost.uniform
    every, tp, degree = setting.of_model.published.heads, scheme.tp, scheme.sp
    of_keys = max(1, round(setting.keys * every))
    near, k = near_ranks(degree, tp, setting.of_model.node), setting.of_model.shape

    def shared_by(ranks: int) -> tuple[int, int]:
        """Heads and key heads of a rank where so many share them."""
        return every // tp // ranks, max(1, of_keys // tp // ranks)

    def one_hop() -> WaitingCost:
        own, of_rank = shared_by(degree)
        return WaitingCost(
            *fields_of(cost), message=_all_to_all_ms(setting, base, degree, degree),
            waits=waits_of(tokens, own, of_rank), heads=own, kv_heads=of_rank,
        )  # fmt: skip

    if not near:
        return one_hop()
    # A token's queries, there and their gradients back, from one rank to one.
    between = 1e3 * 2 * _BYTES * (k.width or k.hidden) / (tp * near) * k.layers / scheme.pp / (1e9 * setting.between)

    def two_hops(sharers: int, over_all: WaitingCost | None = None) -> WaitingCost:
        if sharers == degree > 2 * near:  # each rank sends to those of several nodes at once
            return one_hop()
        own, of_rank = shared_by(sharers)
        return TwoHopCost(
            *fields_of(cost), heads=own, kv_heads=of_rank, nodes=degree // near, by_heads=sharers == degree,
            inside=_all_to_all_ms(setting, base, degree, near, copies=sharers), between=between,
            keys=max(setting.keys, min(1.0, tp * sharers / every)), over_all=over_all,
        )  # fmt: skip

    frugal, not_frugal = (head_parts(degree, every, of_keys, tp, near=near, sliced=one) for one in (True, False))
    if scheme.pp > 1 or frugal == not_frugal:
        return two_hops(frugal)
    return two_hops(not_frugal, two_hops(frugal))


def averaged(cost: SchemeCost, lengths: Sequence[int]) -> SchemeCost:
    """The same with what its messages leave exposed added to b, as the mean over the tokens of these sequences."""
    if not isinstance(cost, WaitingCost):
        return cost
    alone, tokens = cost.without_waits, np.asarray(lengths, dtype=np.float64)
    waits = float((cost.sequence_ms(lengths) - alone.sequence_ms(lengths)).sum() / tokens.sum())
    return replace(alone, b=alone.b + waits, derived=f"{cost.derived}, waits for messages in b")


def _ring_ms(setting: Setting, base: SchemeCost, degree: int) -> float:
    """What the ring takes for a token of a sequence on one stage, in ms: its slowest hop decides."""
    k, tp = setting.of_model.shape, base.uniform.tp
    of_layer = setting.keys * _RING * _BYTES * (k.width or k.hidden) / tp * (degree - 1) / degree
    rate = setting.of_model.inside.bytes_per_s if tp * degree <= setting.of_model.node else 1e9 * setting.between
    return 1e3 * of_layer * k.layers / base.scheme.pp / rate


def _all_to_all_ms(setting: Setting, base: SchemeCost, degree: int, sharers: int, copies: int = 0) -> float:
    """What the all-to-alls of a token take one stage, in ms, where so many of its ranks share the heads; ranks that
    share a head of keys all receive it: the sharers, or so many as `copies` says."""
    if sharers == 1:
        return 0.0
    k, tp = setting.of_model.shape, base.uniform.tp
    # Where TP groups fill nodes, as large a part of the bytes leaves the node as with Ulysses over TP * degree GPUs.
    across = sharers if tp * sharers <= setting.of_model.node else tp * sharers
    keys = min(1.0, max(setting.keys, tp * (copies or sharers) / setting.of_model.published.heads))
    of_layer = (0.5 + 0.5 * keys) * _TENSORS * _BYTES * (k.width or k.hidden) / (tp * degree)
    far = across > setting.of_model.node
    rates = [(gpus, rate) for gpus, rate in sorted(ALL_TO_ALL.items()) if (gpus > NODE) == far]
    rate = next((rate for gpus, rate in rates if gpus >= across), rates[-1][1])
    here, there = (1e9 * setting.between, BETWEEN) if far else (setting.of_model.inside.bytes_per_s, INSIDE)
    rate *= here / there.bytes_per_s
    return 1e3 * of_layer * k.layers / base.scheme.pp / (1e9 * rate)


def with_keys(cost: SchemeCost, keys: float) -> SchemeCost:
    """The same where keys and values have this share of the queries' heads: their gradients, which stages keep for
    slices, are smaller. What their weights take less is not counted."""
    if keys == 1.0 or cost.shares is None:
        return cost
    return replace(cost, shares=replace(cost.shares, context=keys * cost.shares.context))


def _limited(costs: Iterable[SchemeCost], setting: Setting, way: Way) -> Iterator[SchemeCost]:
    """The schemes that hold something, with the tokens that they hold."""
    model = setting.of_model
    for cost in costs:
        assert cost.shares is not None, "the tables have shares"
        kept = way.again.kept(cost.shares)
        if isinstance(cost, TwoHopCost) and not cost.by_heads and cost.over_all is None:
            # Nodes keep keys and values of all, and the first one more queries and outputs than it holds tokens.
            more = math.sqrt(cost.nodes) - 1.0 + cost.keys * (cost.nodes - 1)
            kept += 2 * _BYTES * more / model.sizes.activations[cost.uniform.tp]
        most = model.max_length(setting.gpus, cost.uniform, kept=kept, zero_3=way.zero_3)
        if most >= 1:
            yield replace(cost, max_length=most, util_length=min(cost.util_length, most))


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `most`."""
    return tuple(1 << n for n in range(most.bit_length()) if 1 << n <= most)


def cluster_of(setting: Setting, table: CostTable) -> SimulatedJob:
    """The job's model and GPUs, with these costs and the links that all systems are simulated with."""
    model = setting.of_model
    links = LinkModel(model.node, model.inside, BETWEEN._replace(bytes_per_s=1e9 * setting.between))
    found = replace(model.found, table=table)
    return SimulatedJob(llama_plan(model.shape), model.shape.hidden, found, links, setting.gpus)
