"""Bytes on each rank, and MaxLen, from a model's plan, a scheme and a device. Pure: no torch.

[Note: memory]
A rank holds its 1/N of the master shards (FP32 parameters and optimizer state) whatever the strategy, on its device or
on the host, which then has them beside what layers keep there and copies of saves [Note: updates by runs]; and memory
for the parameters and gradients of its share of a stage, as much as the most demanding of all candidate strategies
needs there, since strategies change within a job; the masters' gradients lie there too [Note: where sums lie]. In a
step it holds scratch memory of pull and push, what that step's strategy needs, and activations. With the candidates
`4*tp16` and `64*tp1` each rank has room for the whole model in every step, and `tp16` is left less for activations than
it would have alone.

The schedule tells of how many micro-batches a stage keeps the activations at once: under 1F1B stage i of PP keeps up to
PP - i. Where the backward is split, a part of a micro-batch stays from its input gradient to its weight gradient. Where
sequences may run in slices, or the schedule looks only at the room that it has, a stage keeps up to PP times MaxLen
tokens wherever it stands, in whatever micro-batches; those of slices that others follow count more, for the gradients
of their keys and values [Note: shares of a micro-batch]. While it computes, it needs a transient on top: a block of
logits and the sum of the head's gradient, or what a layer's backward needs, whichever is more (Hydraulis, appendix C.1,
with the stages of the embeddings and of the head counted by themselves); and it holds what is still on its way to other
stages. Activations and transient grow with the tokens of a micro-batch; MaxLen is where the sum meets the device's
bytes less a margin.

When all activations are gone the optimizer makes its update; and before some updates each rank runs all layers of the
user's own model beside a copy, on a few tokens [Note: the twin]. A rank without memory for that goes without, and says
so. So it counts up to what is free, and no plan is refused for it.

Buffers of messages are counted from the plans that these follow, one by one, and not from a formula: contributors to a
shard differ from rank to rank where pipelines do. Example, a model of 7B parameters on 64 ranks: under `4*tp16` each
owner receives 4 contributions, under `tp16 + 48*tp1` 49 of them, with 12 times the memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.shares import CONTEXT, RECOMPUTED, UNTIL_WEIGHT, Shares, Terms
from ds_hydra.pipe.model_plan import (
    HEAD_LOGITS_AT_ONCE,
    LOGITS_AT_ONCE,
    Bucket,
    BucketTransfers,
    ModelPlan,
    bucket_kinds,
    bucket_sizes,
    places_by_size,
    plan_transfers,
    push_order,
    room_for_pushes,
    twins_of,
)
from ds_hydra.pipe.placement import Strategy, place_pipeline, place_strategy
from ds_hydra.pipe.schedules.registry import most_alive, most_sent, weighs
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import Column, padded
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize
from ds_hydra.zero_hetero.scratch_plan import Window, end_of, in_turn, pull_scratch, push_scratch, twin_push_bytes
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.twin_plan import TwinPull

RUNS_AT_ONCE = 3
"""Of masters and states on the host: one comes, one is updated, one leaves [Note: updates by runs]."""
EXPERT_IMBALANCE = 1.5
"""Rows of the busiest rank over even ones, where experts are spread and nothing is said. A guess: with a router's load
balancing loss it is nearer to 1, and `expert_imbalance` of a step's record tells what it was."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes per token of a whole micro-batch on one rank, for one TP and SP degree.

    `layer`, `first` and `last` are kept from forward to backward, by each layer, by the embeddings and by what
    follows the layers (logits apart); `transient` is needed while a layer computes its backward. Of what is kept the
    share `until_weight` stays from the input's gradient to the weights' where the backward is split, and a token of a
    slice that others follow keeps the share `context` more [Note: shares of a micro-batch]. A token of a layer that is
    computed again keeps the share `recomputed`. `state`: bytes of a layer, not per token, that a slice which others
    follow keeps of states that are carried on, and of their gradients. `experts`: what whole experts keep of `layer`,
    which counts as many tokens for each rank's; 0 where none are spread over ranks, or nothing is known of them.
    `tile`: bytes that a tile of rows takes while it computes, however many tokens there are [Note: tiles]; `host`: per
    token, of a layer, on the host [Note: fetched layers].
    """

    layer: float
    first: float
    last: float
    transient: float = 0.0
    until_weight: float = UNTIL_WEIGHT
    context: float = CONTEXT
    recomputed: float = RECOMPUTED
    state: float = 0.0
    experts: float = 0.0
    tile: float = 0.0
    host: float = 0.0
    tile_tokens: float = 0.0  # of a micro-batch, that fill a tile

    def shares(self, forward: Terms, weight: Terms) -> Shares:
        """Of a cost table's row, with these shares of its time."""
        state = self.state / self.layer if self.state else 0.0
        return Shares(forward, weight, self.until_weight, self.context, self.recomputed, state)

    def routed(self, imbalance: float) -> Activations:
        """Those of a rank whose experts are chosen `imbalance` times as often as even routing has it."""
        if not self.experts:
            return self
        # What a layer needs while it computes its backward is mostly gradients of what it keeps.
        grown = 1.0 + (imbalance - 1.0) * self.experts / self.layer
        return replace(self, layer=grown * self.layer, transient=grown * self.transient)


class ElementBytes(NamedTuple):
    """Bytes of one element of what a rank holds."""

    param: int  # as it is computed with, and as it is pulled
    grad: int  # where micro-batches add up
    master: int = 4
    wire: int | None = None  # of a gradient that is pushed; None: as `param`
    apart: bool = False  # whether trained masters are on the host, and are pulled from copies on the device

    def pulled(self, bucket: Bucket) -> int:
        """Of what is pulled of a bucket."""
        return max(self.param, self.master) if bucket.wide else self.param


class RankBytes(NamedTuple):
    """What one rank holds under one strategy, masters and activations apart."""

    params: int
    grads: int  # with the sums that the rank owns [Note: where sums lie]; at least what pulls take there
    scratch: int  # of pushes

    @property
    def total(self) -> int:
        return sum(self)


def rank_bytes(
    plan: ModelPlan, strategy: Strategy, element: ElementBytes, *, node_size: NodeSize
) -> tuple[RankBytes, ...]:
    """Bytes of every rank under a strategy, of ranks on such nodes."""
    found = _ranks(plan, strategy, element, node_size)
    return tuple(RankBytes(one.params, one.grads, end_of(one.windows)) for one in found)


def held_elements(
    plan: ModelPlan, strategy: Strategy, element: ElementBytes, *, node_size: NodeSize
) -> tuple[tuple[int, int], ...]:
    """Elements of every rank's memory for parameters, with the gaps between them, and of that for gradients."""
    found = _ranks(plan, strategy, element, node_size)
    return tuple((one.params // element.param, -(-one.grads // element.grad)) for one in found)


def push_turns(plan: ModelPlan, strategy: Strategy, element: ElementBytes, *, node_size: NodeSize) -> Column:
    """How many pushes must be over on a rank before it has memory for one: shape (num_pushes, num_ranks), in the order
    of starting [Note: scratch memory]."""
    turns = [[window.after for window in one.windows] for one in _ranks(plan, strategy, element, node_size)]
    return np.array(turns, dtype=np.int64).T


class _Rank(NamedTuple):
    """Bytes of one rank, and the windows of its pushes in the order of starting."""

    params: int
    grads: int
    windows: Sequence[Window]


@lru_cache(maxsize=64)  # a start asks for each strategy several times, for its needs, its buffers and its pushes
def _ranks(plan: ModelPlan, strategy: Strategy, element: ElementBytes, node_size: NodeSize) -> tuple[_Rank, ...]:
    transfers = plan_transfers(plan, strategy, node_size)
    pulls, pushes = _scratch_of(plan, transfers, strategy, element)
    found: dict[int, _Rank] = {}
    kinds, order, num_ranks = bucket_kinds(plan), push_order(plan, strategy), strategy.num_ranks
    most_stages = strategy.most_stages
    for twins in twins_of(strategy, node_size):
        sizes = bucket_sizes(plan, strategy, twins, kinds)
        params = sum(size * element.pulled(bucket) for size, bucket in zip(sizes, plan.buckets, strict=True))
        places = places_by_size(plan, sizes, order, num_ranks, grad_bytes=element.grad, master_bytes=element.master)
        room, grads = room_for_pushes(params + places.pushed_bytes, most_stages), places.num_bytes
        for rank in twins.ranks:
            windows = in_turn(tuple(pushes[:, rank].tolist()), room)
            found[rank] = _Rank(params, max(grads, int(pulls[rank])), windows)
    return tuple(found[rank] for rank in range(strategy.num_ranks))


def _scratch_of(
    plan: ModelPlan, transfers: Sequence[BucketTransfers], strategy: Strategy, element: ElementBytes
) -> tuple[Column, Column]:
    """Bytes of all pulls, shape (num_ranks,), and of each push in the order of starting, (num_pushes, num_ranks)."""
    num_ranks = strategy.num_ranks
    pulls = np.zeros(num_ranks, dtype=np.int64)
    pushes: dict[int, Column] = {}
    kept = element.master if plan.frozen_wide else element.param
    cast: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # by elements of a bucket, and its owners
    # By the plan's identity: equal buckets share their plans, which `transfers` keeps.
    known: dict[int, Column] = {}
    for index, (bucket, (pull, push)) in enumerate(zip(plan.buckets, transfers, strict=True)):
        param, wire = element.pulled(bucket), element.pulled(bucket) if bucket.wide else element.wire or element.param
        # Masters are cast, frozen ones are kept cast.
        if param != (element.master if bucket.trainable else kept) or (element.apart and bucket.trainable):
            if (like := (bucket.numel, bucket.owners)) not in cast:
                cast[like] = [padded(size) for size in bucket.masters(num_ranks).sizes]
            pulls += param * np.array(cast[like])
        if id(pull) not in known:
            known[id(pull)] = pull_scratch(pull.enter if isinstance(pull, TwinPull) else pull)
        pulls += param * known[id(pull)]
        if push is not None:
            if id(push) not in known:
                if isinstance(push, TransferPlan):
                    known[id(push)] = push_scratch(push, cast=wire != element.grad) * wire
                else:
                    known[id(push)] = twin_push_bytes(push, (wire, element.master), element.grad)
            pushes[index] = known[id(push)]
    pushed = np.array([pushes[index] for index in push_order(plan, strategy)], dtype=np.int64)
    return pulls, pushed.reshape(-1, num_ranks)


Shape = ParallelScheme | PipelineShape
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one rank in one stage of a pipeline; `per_token` counts tokens of a micro-batch."""

    scheme: Shape
    stage: int
    masters: int  # parameters, 1/N, and gradients if they outlive a phase; of frozen ones in the compute dtype
    optimizer: int  # its state, 1/N
    params: int
    grads: int  # with those of the masters, where these lie in the same memory
    scratch: int  # of pull and push
    head: int  # the sum of the gradient of the head's weight, while it is made
    head_kept: int  # of one that another micro-batch may hold meanwhile [Note: head and loss as one]
    tied: bool  # whether it stays until the embeddings' gradient, that of the same weight, is there
    embeddings: int  # their gradient, at the end of a backward; where tied also the sum, a tensor of its own
    logits: float  # elements for a token
    blocks: tuple[tuple[int, int], ...]  # elements of these that are there at once at most, with bytes of each
    per_token: float  # activations that are kept, of all micro-batches under way
    alive: float  # how many these count as
    transient: float  # per token, while a layer computes its backward
    until_weight: float  # share of the activations that stays after the input's gradient
    context: float  # tokens that a token counts more in a slice that others follow
    recomputed: float  # tokens that a token counts in a layer that is computed again
    layer: float  # bytes per token of one layer, which it keeps while it is computed again
    sent: float  # per token, held only because it is on its way to another stage
    state: float = 0.0  # bytes of one layer, that a slice which others follow keeps of states and their gradients
    update: int = 0  # while the optimizer makes one, when activations are gone
    twin: int = 0  # between a backward and an update, where there is memory for it
    tile: float = 0.0  # bytes that a tile of rows takes while it computes [Note: tiles]
    tile_tokens: float = 0.0  # that fill it
    gone: float = 0.0  # per token, of what is kept: what follows the layers, free when they compute their backward
    host: float = 0.0  # per token, of all micro-batches under way, on the host
    host_states: int = 0  # bytes on the host that do not depend on micro-batches

    @property
    def states(self) -> int:
        """What does not depend on the micro-batch."""
        return self.masters + self.optimizer + self.params + self.grads + self.scratch

    def total(self, num_tokens: int) -> int:
        """All bytes with micro-batches of this many tokens."""
        return self.held(self.alive * num_tokens, num_tokens)

    def held(self, kept_tokens: float, num_tokens: int) -> int:
        """All bytes with so many tokens kept at once, while one of micro-batches of up to `num_tokens` computes."""
        computing = math.ceil(self.per_token / self.alive * kept_tokens + self.on_top(num_tokens) + self.head_kept)
        return self.states + max(self.update, self.twin, computing)

    def on_top(
        self, num_tokens: int, *, again: bool = False, given_back: float = 0.0, head: bool = True, logits: bool = True
    ) -> float:
        """Bytes beside what is kept, while one of micro-batches of up to so many tokens computes.

        `again`: its backward computes the layer that it comes to first again. `given_back`: what its layers have kept,
        free when the embeddings' gradient is made. `head`: whether it makes the gradient of the head's weight.
        """
        made = head * self.head
        layer = self.transient + again * self.layer * (1.0 - self.recomputed)
        tile = self.tile * min(1.0, num_tokens / self.tile_tokens) if self.tile_tokens else 0.0
        # Logits are made block by block, so they grow with the tokens only until one block is full.
        blocks = sum(min(at_once, self.logits * num_tokens) * size for at_once, size in self.blocks)
        later = max((layer - self.gone) * num_tokens + tile, self.embeddings - given_back) + made * self.tied
        return max(made + logits * blocks, later) + self.sent * num_tokens

    def on_host(self, num_tokens: int) -> int:
        """Bytes on the host with micro-batches of this many tokens."""
        return self.host_states + math.ceil(self.host * num_tokens)

    def longest_in_slices(self, size: int, capacity: float) -> int:
        """Tokens of the longest sequence in slices of so many, all layers of which are computed again."""
        fixed = self.states + self.head_kept + self.on_top(size, again=True)
        each = self.per_token / self.alive * (min(1.0, self.recomputed) + self.context)
        return max(0, int((capacity - fixed) / each)) if each else 0

    def max_length(self, capacity: float, host_capacity: float = math.inf) -> int:
        """Most tokens of a micro-batch within `capacity` bytes, and `host_capacity` of the host; 0 when the states
        alone do not fit."""
        if self.host and host_capacity < math.inf:
            within = self.max_length(capacity)
            return max(0, min(within, int((host_capacity - self.host_states) / self.host)))
        if self.total(1) > capacity or self.host_states > host_capacity:
            return 0
        # Needs grow with the tokens: double until it is too much, then halve the interval between.
        fits, too_many = 1, 2
        while self.total(too_many) <= capacity:
            fits, too_many = too_many, 2 * too_many
            if too_many > _MOST_TOKENS:
                return fits
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if self.total(middle) <= capacity else (fits, middle)
        return fits


class _Width(NamedTuple):
    width: int
    trained: int


@dataclass(frozen=True)
class JobMemory:
    """Memory of a job: its model, ranks, dtypes and measured or estimated activations by (tp, sp).

    `strategies` are all candidates of the job, placed on its ranks. A scheme that is in none of them counts as if there
    were one more, of as many of its pipelines as the ranks hold. So before the candidates are known each scheme counts
    as if it were alone.
    """

    plan: ModelPlan
    num_ranks: int
    activations: Mapping[tuple[int, int], Activations]
    param_bytes: int  # of an element in the compute dtype
    master_bytes: int = 4
    optimizer_states: int = 2  # tensors of the masters' size, such as Adam's two moments
    update_bytes: int = 0  # of a trained element, while an update is made, beside these
    device_bytes: float = math.inf
    host_bytes: float = math.inf  # of the host's memory, for one rank
    class_bytes: Mapping[str, float] = field(default_factory=dict)  # of devices of classes that differ
    cluster: Cluster | None = None  # where devices are of several classes: which rank has which
    margin: float = 0.05  # share of the device left for fragmentation and what is not counted
    vocab: int = 1
    outputs: int | None = None  # of the head for each token; None: one for each word
    grad_bytes: int | None = None  # of an element where gradients add up; None: the wider of the other two
    wire_bytes: int | None = None  # of an element of a gradient on its way; None: as in the compute dtype
    node_size: NodeSize | None = None  # None: all ranks are on one
    slices: bool = False  # whether plans may cut sequences
    plain_head: bool = True  # whether head and loss are one function [Note: head and loss as one]
    serial: bool = True  # whether messages between stages end in the order of their start, as on NCCL
    phases: bool = False  # whether steps may have several, over which the masters' gradients add up
    copies: bool = False  # whether a rank keeps another one's masters, states and summed gradient, too
    copies_on_host: bool = False  # all of these but the gradient
    run: int = 0  # elements of masters on the host that come to the device for an update at once; 0: they stay there
    saves: bool = False  # whether a save in the background copies masters and states to the host
    twin_bytes: int = 0  # of the user's model while it runs beside its copy
    expert_imbalance: float = EXPERT_IMBALANCE  # rows of the busiest rank of those that share experts, over even ones
    strategies: Mapping[StrategyShape, Strategy] = field(default_factory=dict)
    arena: tuple[tuple[int, int], ...] = ()  # elements of parameters and gradients that each rank keeps room for anyway
    _cache: dict[tuple[Shape, int], Needs] = field(default_factory=dict, compare=False, repr=False)
    _ranks: dict[StrategyShape, tuple[RankBytes, ...]] = field(default_factory=dict, compare=False, repr=False)

    def together(self, strategies: Mapping[StrategyShape, Strategy]) -> JobMemory:
        """The memory of the job if these are its candidates."""
        return replace(self, strategies=dict(strategies), _cache={})

    def demand(self, shape: StrategyShape) -> int:
        """Bytes of parameters, gradients and scratch memory on the fullest rank under one of the candidates."""
        return max(held.total for held in self._of_ranks(shape, self.strategies[shape]))

    @property
    def capacity(self) -> float:
        """Bytes that may be planned with on every rank."""
        return self.capacity_on("")

    def capacity_on(self, device: str) -> float:
        """Bytes that may be planned with on devices of a class; of no class, on every rank."""
        return self.class_bytes.get(device, self.device_bytes) * (1.0 - self.margin)

    def capacity_of(self, scheme: Shape, stage_index: int) -> float:
        """Bytes that may be planned with on the devices of one stage."""
        return self.capacity_on("" if isinstance(scheme, ParallelScheme) else scheme.stages[stage_index].device)

    def over(self, needs: Needs, num_tokens: int = 1) -> float:
        """Bytes that a stage needs beyond those that it has, with micro-batches of so many tokens."""
        return needs.total(num_tokens) - self.capacity_of(needs.scheme, needs.stage)

    def needs(self, scheme: Shape, stage_index: int) -> Needs:
        """Bytes of the fullest rank of one stage. ConfigError when (tp, sp) has no activation figures."""
        key = (scheme, stage_index)
        if key not in self._cache:
            self._cache[key] = self._count(scheme, stage_index)
        return self._cache[key]

    def stages(self, scheme: Shape) -> tuple[Needs, ...]:
        """Needs of every stage."""
        return tuple(self.needs(scheme, index) for index in range(scheme.pp))

    def fullest(self, scheme: Shape, num_tokens: int) -> Needs:
        """The stage that needs the most beyond what its devices have, for micro-batches of this many tokens."""
        beyond = self.over if self.class_bytes else Needs.total
        return max(self.stages(scheme), key=lambda needs: beyond(needs, num_tokens))

    def max_length(self, scheme: Shape) -> int:
        """MaxLen in tokens: the least of the stages'; 0 when the model states of one do not fit."""
        if math.isinf(self.device_bytes):
            raise ConfigError("memory model: there is no MaxLen without device_bytes; give the device's memory")
        return min(
            needs.max_length(self.capacity_of(scheme, needs.stage), self.host_bytes) for needs in self.stages(scheme)
        )

    def longest_in_slices(self, scheme: Shape, size: int) -> int:
        """The same in slices of so many tokens, all layers of which are computed again."""
        return min(
            needs.longest_in_slices(size, self.capacity_of(scheme, needs.stage))
            if needs.host_states <= self.host_bytes else 0
            for needs in self.stages(scheme)
        )  # fmt: skip

    @property
    def _copied(self) -> tuple[int, int]:
        """How many copies of values and states lie there, and elements that the update of one on the host takes."""
        if not (self.copies and self.copies_on_host):
            return int(self.copies), 0
        largest = max((bucket.numel for bucket in self.plan.buckets if bucket.trainable), default=0)
        return 0, (1 + self.optimizer_states) * math.ceil(largest / self.num_ranks)

    def _count(self, scheme: Shape, index: int) -> Needs:
        shape = PipelineShape.of(scheme) if isinstance(scheme, ParallelScheme) else scheme
        stage = place_pipeline(shape, 0, self.plan.num_layers).stages[index]
        found = self.activations.get((stage.tp, stage.sp))
        if found is None:
            known = ", ".join(f"tp{tp}sp{sp}" for tp, sp in sorted(self.activations))
            raise ConfigError(f"memory model: no activation figures for tp{stage.tp}sp{stage.sp}; it has {known}")
        kept = found.routed(self.expert_imbalance) if stage.ep > 1 else found
        shape, alike = self._alike(shape)
        placed = [place_pipeline(pipeline, 0, self.plan.num_layers).stages[index] for pipeline in alike]
        held = max(
            (self._held(pipeline, index) for pipeline in alike if pipeline == shape or pipeline.parts == 2),
            key=lambda held: held.total,
        )
        share, frozen = (self.plan.most_owned(self.num_ranks, trainable=kind) for kind in (True, False))
        layers = max(stage.num_layers for stage in placed)
        last = any(stage.ranges[-1].last == self.plan.num_layers for stage in placed)
        per_batch = layers * kept.layer + (kept.first if index == 0 else 0.0) + (kept.last if last else 0.0)
        # What has come from another stage stays on the device [Note: fetched layers].
        per_batch += kept.host if index else 0.0
        alive, sent = self._at_once(shape, alike, index, kept.until_weight)
        outputs, wide = self.outputs or self.vocab, max(4, self.param_bytes)
        masters, optimizer, host_states, runs = self._states(share, frozen)
        of_head, of_first = self._width_of(self.plan.last, outputs), self._width_of(self.plan.first, self.vocab)
        rows, words = math.ceil(outputs / stage.tp), math.ceil(self.vocab / stage.tp)
        tied = shape.pp == 1 and bool(self.plan.first & self.plan.last)
        head = rows * of_head.trained * (wide if self.plain_head else 2 * self.param_bytes) if last else 0
        # Several forwards before a backward: never where whole micro-batches run under 1F1B and its like.
        waits = self.plain_head and (self.slices or any(weighs(one.schedule) for one in alike))
        free = self.capacity_of(scheme, index) - masters - optimizer - held.total
        return Needs(
            scheme,
            index,
            masters=masters, optimizer=optimizer,
            params=held.params, grads=held.grads, scratch=held.scratch,
            head=head,
            head_kept=head if waits else 0,
            tied=tied,
            embeddings=words * of_first.trained * self.param_bytes * (1 + tied) if index == 0 else 0,
            logits=rows / stage.sp if last else 0.0,
            blocks=self._blocks(rows, wide) if last else (),
            per_token=alive * per_batch,
            alive=alive,
            transient=kept.transient,
            until_weight=kept.until_weight,
            context=kept.context,
            recomputed=kept.recomputed,
            layer=kept.layer,
            sent=sent * of_head.width * self.param_bytes / (stage.sp * (stage.tp if self.plan.token_sharding else 1)),
            state=kept.state,
            tile=kept.tile, tile_tokens=kept.tile_tokens,
            gone=kept.last if last and kept.tile else 0.0,
            host=alive * (layers - (index > 0)) * kept.host,
            host_states=host_states,
            update=self.update_bytes * share + runs,
            twin=int(max(0, min(self.twin_bytes, free))),
        )  # fmt: skip

    def _states(self, share: int, frozen: int) -> tuple[int, int, int, int]:
        """Bytes of masters and of the optimizer on the device, of both on the host, and of the runs of an update; of so
        many trained and frozen elements."""
        here, (copied, updated), states = int(not self.run), self._copied, self.optimizer_states
        of_frozen = frozen * (self.master_bytes if self.plan.frozen_wide else self.param_bytes)
        masters = (here + self.phases + self.copies + copied) * share * self.master_bytes + (1 + copied) * of_frozen
        optimizer = ((here + copied) * states * share + updated) * self.master_bytes
        each, also = (1 + states) * self.master_bytes, int(self.copies and self.copies_on_host) + int(self.saves)
        on_host = (also + (self.run > 0)) * share * each + also * of_frozen
        return masters, optimizer, on_host, each * min(share, RUNS_AT_ONCE * self.run)

    def _at_once(
        self, shape: PipelineShape, alike: Collection[PipelineShape], index: int, until_weight: float
    ) -> tuple[float, int]:
        """Micro-batches that a stage keeps at once at most, and that are on their way from it."""
        counts = (most_alive(one.schedule, shape.pp, 1, until_weight)[index] for one in alike)
        sent = (most_sent(one.schedule, shape.pp, one.parts, serial=self.serial)[index] for one in alike)
        return max(shape.pp if self.slices else 1.0, *counts), max(sent) if shape.pp > 1 else 0

    def _blocks(self, rows: int, wide: int) -> tuple[tuple[int, int], ...]:
        if self.plain_head:
            return (max(HEAD_LOGITS_AT_ONCE, rows), self.param_bytes), (max(LOGITS_AT_ONCE, rows), wide)
        copied = wide if self.param_bytes < 4 else 0  # beside logits, and probabilities that become their gradient
        return ((max(LOGITS_AT_ONCE, rows), self.param_bytes + wide + copied),)

    def _alike(self, shape: PipelineShape) -> tuple[PipelineShape, set[PipelineShape]]:
        """A shape as it can be run, and the pipelines with its costs.

        Costs have one key for all pipelines of the same stages: of their schedules the one that keeps the most is
        counted, and of a V's stages what they hold more than others.
        """
        pipelines = {pipeline for strategy in self.strategies for pipeline in strategy.pipelines}
        alike = {pipeline for pipeline in pipelines if pipeline.cost_key == shape.cost_key}
        if shape.parts == 1:
            alike.add(shape)
        elif not weighs(shape.schedule):  # the key of a V, which only a schedule that weighs times can run
            shape = replace(shape, schedule="list")
            alike.add(shape)
        return shape, alike

    def _width_of(self, names: Collection[str], rows: int) -> _Width:
        """Features of the hidden states, as the weight of so many rows of the head or the embeddings tells them, and of
        its gradient; 0: it is not known."""
        for bucket in self.plan.buckets:
            for param in bucket.params:
                if param.name in names and len(param.shape) == 2 and param.shape[0] == rows:
                    return _Width(param.shape[1], param.shape[1] if param.trainable else 0)
        return _Width(0, 0)

    def _held(self, shape: PipelineShape, index: int) -> RankBytes:
        """Of the ranks that hold this stage in some strategy, the needs of the one that needs the most."""
        candidates = {one: placed for one, placed in self.strategies.items() if shape in one.pipelines}
        if not candidates:
            # Which rank has which device does not change what each of them holds.
            shape = shape.anywhere
            copies = max(1, self.num_ranks // shape.num_ranks)
            alone = StrategyShape((shape,) * copies)
            candidates = {alone: place_strategy(alone, copies * shape.num_ranks, self.plan.num_layers)}
        found: list[RankBytes] = []
        for one, placed in candidates.items():
            everyone = [self._of_ranks(each, where) for each, where in {**self.strategies, one: placed}.items()]
            own = self._of_ranks(one, placed)
            for pipeline, place in zip(one.pipelines, placed.pipelines, strict=True):
                ranks = place.stages[index].ranks if pipeline == shape else ()
                # Most ranks hold what others hold under all candidates.
                kinds = (
                    (own[rank], *(each[rank] for each in everyone if rank < len(each)), *self._room_on(rank))
                    for rank in ranks
                )
                for held in dict.fromkeys(kinds):
                    params, grads = (max(one[item] for one in held) for item in (0, 1))
                    found.append(RankBytes(params, grads, held[0].scratch))
        return max(found, key=lambda held: held.total)

    def _room_on(self, rank: int) -> list[RankBytes]:
        """What a rank keeps room for anyway, if anything."""
        if not self.arena:
            return []
        params, grads = self.arena[rank]
        return [RankBytes(params * self.element.param, grads * self.element.grad, 0)]

    def _of_ranks(self, shape: StrategyShape, placed: Strategy) -> tuple[RankBytes, ...]:
        if shape not in self._ranks:
            nodes = self.node_size or placed.num_ranks
            plan = self.plan if placed.num_ranks == self.num_ranks else self.plan.evenly
            self._ranks[shape] = rank_bytes(plan, placed, self.element, node_size=nodes)
        return self._ranks[shape]

    @property
    def element(self) -> ElementBytes:
        """Bytes of one element of what a rank holds."""
        wide = max(self.master_bytes, self.param_bytes)
        return ElementBytes(self.param_bytes, self.grad_bytes or wide, self.master_bytes, self.wire_bytes, self.run > 0)


def gibibytes(num_bytes: float) -> str:
    """Bytes for a reader."""
    return f"{num_bytes / 2**30:.2f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
