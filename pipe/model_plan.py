"""A model's parameters: shapes, shard rules, buckets, their layouts under a strategy, and their transfers. Pure.

Ranks that hold the same shards of the same layers are twins, and share the work of pulls and pushes [Note: twins].

[Note: flat order]
A parameter is flat with its tensor parallel dimension outermost, so that every TP shard is one contiguous interval (one
per part for fused weights such as gate-and-up). A bucket is the concatenation of the parameters of one transformer
layer, of the embeddings, or of the head. What a rank holds of a bucket lies in its local buffer in the same order.

Row-parallel example: a weight of shape (2, 6), outputs by inputs, of which tp = 2 cuts the inputs (dim 1):

  as torch stores it     a0 a1 a2 a3 a4 a5 b0 b1 b2 b3 b4 b5    rank 0 needs a0 a1 a2 and b0 b1 b2: two intervals
  in flat order, (6, 2)  a0 b0 a1 b1 a2 b2 a3 b3 a4 b4 a5 b5    rank 0 has the first 6, rank 1 the last 6

The layer's parameter is the transposed view of its 6 elements: shape (2, 3), no copy. With tp = 3 the same flat order
gives 4 elements to each rank, so any two strategies differ only in where they cut it.

Fused example: gate and up of 4 rows each in one weight of 8 rows. Rank 0 of 2 holds the rows 0..1 and 4..5, which are
two intervals, as each part is cut for itself.

[Note: gaps]
In a rank's buffers every parameter and every bucket begins at a multiple of 64 elements. Libraries choose the kernel
of a product by the alignment of its factors: below 16 bytes a slower one, for some types none. What lies between two
parameters is never read as a value of the model; it travels with a bucket where twins share one. The masters have no
gaps, so a checkpoint knows nothing of them:

  masters      | a (3, 30)          | b (40)     |                  elements 0..89, 90..129
  of a rank    | a      | 38 unused | b     | 24 unused |           elements 0..89, 128..167; a bucket after it from 192
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Literal, NamedTuple

from pydantic import PlainSerializer

from ds_hydra.pipe.head_sharing import Boxes
from ds_hydra.pipe.placement import Stage, Strategy, check_experts, check_heads
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.zero_hetero.contributions import Place, aligned, places_of_sums
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import ALIGNMENT, Layout, Piece, even_layout, padded
from ds_hydra.zero_hetero.nodes import NodeSize
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from ds_hydra.zero_hetero.twin_plan import TwinPull, TwinPush, Twins, plan_twin_pull, plan_twin_push

Gradient = Literal["complete", "partial"]
Blocks = tuple[tuple[int, int], ...]  # rows, and how many units they are
Names = Annotated[frozenset[str], PlainSerializer(sorted)]  # equal in every process, whatever Python's hashes there

BY_WIDTH = "the job is set up for experts that are cut by width; name an ep in hydra.strategies"
WIDE = "fp32"  # the bucket of all parameters that a model keeps in FP32
LOGITS_AT_ONCE = 1 << 25
"""Elements, 128 MiB in FP32, of what a loss holds at a time beside the logits. Where autograd goes through these, a
micro-batch with more computes its head twice, in blocks of as many."""
HEAD_LOGITS_AT_ONCE = 1 << 27
"""Elements, 256 MiB in BF16, of a head's product where head and loss are one: 1,024 rows of 131,072 words. Fewer would
be too few for products at full speed, and read and write the weight's FP32 gradient more often."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """How tensor parallel ranks share one parameter.

    `dim` is cut (None: every rank holds the whole parameter) in each of `parts` fused parts, in whole `units` (heads;
    None: single rows). If there are fewer units than ranks, several ranks hold each unit and their gradients add up.
    For an uncut parameter, `gradient` says whether each rank's gradient is "complete" (the same everywhere) or
    "partial" (to be summed). Stacked experts that are spread as whole ones [Note: whole experts] are cut by the stage's
    `ep`: `by_width` are dim and parts by which tensor parallel ranks would have cut them. Parts of different sizes are
    `blocks` of dimension 0, each with its rows and its own units. With `degrees`, ranks of other degrees all hold the
    whole, and have its complete gradient.
    """

    dim: int | None = None
    parts: int = 1
    units: int | None = None
    gradient: Gradient = "complete"
    by_width: tuple[int | None, int] | None = None
    blocks: Blocks = ()
    degrees: tuple[int, ...] = ()

    def of(self, tp: int) -> ShardRule:
        """The rule for ranks of one degree."""
        return self if not self.degrees or tp in self.degrees else ShardRule()


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the whole model: its name there, full shape, rule, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    rule: ShardRule = ShardRule()
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def share(self, stage: Stage, holder: int) -> tuple[int, int]:
        """Which share of how many a holder of the stage has of this parameter; what follows calls them `tp_rank` and
        `tp`."""
        degree = stage.tp if self.rule.by_width is None else stage.ep
        return holder % degree, degree

    def shard_rows(self, tp_rank: int, tp: int) -> tuple[int, int]:
        """Rows [start, stop) of one part along the cut dimension that `tp_rank` of `tp` holds."""
        if self.rule.dim is None:
            raise PlanError(f"{self.name} is not cut over tensor parallel ranks")
        rows = self.shape[self.rule.dim] // self.rule.parts
        units = self.rule.units or rows
        if self.rule.units and units % tp and tp % units:
            raise PlanError(
                f"{self.name}: {units} heads cannot be shared by tp={tp}; use a tp that divides {units} "
                f"or a multiple of {units}"
            )
        if not self.rule.units and rows < tp:
            raise PlanError(f"{self.name}: {rows} rows cannot be cut over tp={tp}; use tp <= {rows}")
        return share_of_rows(rows, units, tp_rank, tp)

    def shard_ranges(self, tp_rank: int, tp: int) -> tuple[tuple[int, int], ...]:
        """Rows [start, stop) of the whole cut dimension that `tp_rank` of `tp` holds, of each part; none: all of it."""
        rule = self.rule.of(tp)
        if rule.dim is None or tp == 1:
            return ()
        rows = self.shape[rule.dim] // rule.parts
        own = [share_of_rows(*block, tp_rank, tp) for block in rule.blocks]
        own = own or [self.shard_rows(tp_rank, tp)] * rule.parts
        begins = accumulate((size for size, _ in rule.blocks or ((rows, 0),) * rule.parts), initial=0)
        return tuple((begin + start, begin + stop) for begin, (start, stop) in zip(begins, own, strict=False))

    def shard_shape(self, tp_rank: int, tp: int) -> tuple[int, ...]:
        """Shape of what `tp_rank` of `tp` holds."""
        ranges = self.shard_ranges(tp_rank, tp)
        if not ranges or self.rule.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.rule.dim] = sum(stop - start for start, stop in ranges)
        return tuple(shape)

    def shard_intervals(self, tp_rank: int, tp: int) -> Iterator[tuple[int, int]]:
        """Intervals [start, stop) of the flat parameter that `tp_rank` of `tp` holds [Note: flat order]."""
        ranges = self.shard_ranges(tp_rank, tp)
        if not ranges or self.rule.dim is None:
            yield 0, self.numel
            return
        row_numel = self.numel // self.shape[self.rule.dim]
        yield from ((start * row_numel, stop * row_numel) for start, stop in ranges)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are pulled and pushed together, in flat order.

    The parameters of a bucket are all trainable or all frozen, so that frozen ones need no master state. Those of a
    `wide` one are pulled in FP32 where others are in 16 bit. `owners`: ranks among which its masters are cut evenly, in
    rising order; none: all ranks [Note: owners].
    """

    name: str
    params: tuple[ParamSpec, ...]
    trainable: bool = True
    wide: bool = False
    owners: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    def masters(self, num_ranks: int) -> Layout:
        """Which of so many ranks owns which interval."""
        return even_layout(self.numel, num_ranks, self.owners)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's shard lies in a rank's local buffer of a bucket."""

    param: ParamSpec
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All that planning needs to know of a model.

    `first` and `last` name the parameters that the first and the last stage need beside their layers (a tied embedding
    is in both); `layers[i]` names those of layer i. Every parameter is in exactly one bucket. The buckets are in the
    order in which a forward needs them.
    """

    buckets: tuple[Bucket, ...]
    first: Names
    layers: tuple[Names, ...]
    last: Names
    num_heads: int = 0  # 0: the layers say nothing of attention heads
    num_kv_heads: int = 0
    heads_cut: bool = False  # tensor parallelism cuts the attention heads, not only the linear layers
    no_tp: str = ""  # why tensor parallel ranks would train another model, for the user; "": they would not
    no_pp: str = ""  # the same of pipeline stages
    no_slices: str = ""  # the same of sequences that are cut into slices
    no_token_sharding: str = "nothing is known of it"  # the same of ranks that share tokens [Note: token sharding]
    no_ep: str = BY_WIDTH  # the same of whole experts that are spread over ranks
    experts: tuple[int, ...] = ()  # how many there are, where they are spread as whole ones [Note: whole experts]
    unread: Names = frozenset()  # parameters for which no loss was seen to have a gradient
    boxes: Boxes = ()  # modules of each layer that run once for each sequence
    alignment: int = ALIGNMENT  # in elements, of parameters and buckets in a rank's buffers [Note: gaps]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def frozen_wide(self) -> bool:
        """Whether frozen parameters are held in FP32, since some of them are computed with in that."""
        return any(bucket.wide and not bucket.trainable for bucket in self.buckets)

    @property
    def token_sharding(self) -> bool:
        """Whether tensor parallel ranks share the tokens between the blocks."""
        return not self.no_token_sharding

    @property
    def cuts_layers(self) -> bool:
        """Whether tensor parallel ranks hold a part of any layer, and not only of the embeddings and the head."""
        within = frozenset[str]().union(*self.layers)
        return any(p.rule.dim is not None for bucket in self.buckets for p in bucket.params if p.name in within)

    @property
    def evenly(self) -> ModelPlan:
        """The same with masters that all ranks own as much of, as of jobs of other numbers of ranks."""
        if not any(bucket.owners for bucket in self.buckets):
            return self
        return replace(self, buckets=tuple(replace(bucket, owners=()) for bucket in self.buckets))

    def most_owned(self, num_ranks: int, *, trainable: bool) -> int:
        """Elements of trained or of frozen masters on the rank that owns the most."""
        even, owned = 0, [0] * num_ranks
        for bucket in self.buckets:
            if bucket.trainable is trainable and not bucket.owners:
                even += bucket.numel
            for rank in bucket.owners if bucket.trainable is trainable else ():
                owned[rank] += math.ceil(bucket.numel / len(bucket.owners))
        return math.ceil(even / num_ranks) + max(owned)

    def needed(self, stage: Stage) -> frozenset[str]:
        """Names of the parameters that a stage computes with, in all of its parts."""
        names: frozenset[str] = frozenset()
        for first, last in stage.ranges:
            names = names.union(*self.layers[first:last])
            if first == 0:
                names |= self.first
            if last == self.num_layers:
                names |= self.last
        return names

    def slots(self, bucket: Bucket, stage: Stage, holder: int) -> tuple[Slot, ...]:
        """The local buffer of one bucket on a holder of the stage: the shards that it needs, in order [Note: gaps]."""
        needed = self.needed(stage)
        slots: list[Slot] = []
        offset = 0
        for param in bucket.params:
            if param.name in needed:
                slots.append(Slot(param, offset, param.shard_shape(*param.share(stage, holder))))
                offset += padded(slots[-1].numel, self.alignment)
        return tuple(slots)

    def pull_layout(self, bucket: Bucket, strategy: Strategy) -> Layout:
        """Which rank computes with which intervals of a bucket under a strategy."""
        return self._layout(bucket, strategy, self._held)

    def push_layout(self, bucket: Bucket, strategy: Strategy) -> Layout:
        """Which rank contributes the gradient of which intervals.

        This is `pull_layout`, except where all tensor parallel ranks have the same complete gradient: there each
        contributes its own part of it. Sequence parallel ranks all contribute, since they saw different tokens.
        """
        return self._layout(bucket, strategy, self._contributed)

    def _layout(
        self,
        bucket: Bucket,
        strategy: Strategy,
        pieces_of: Callable[[Slot, int, int], Iterator[tuple[int, int, int]]],
    ) -> Layout:
        starts: dict[str, int] = {}
        start = 0
        for param in bucket.params:
            starts[param.name] = start
            start += param.numel
        pieces: list[tuple[Piece, ...]] = [()] * strategy.num_ranks
        sizes = [0] * strategy.num_ranks
        known: dict[object, tuple[tuple[Piece, ...], int]] = {}  # replicas of a stage hold the same
        for stage in (stage for pipeline in strategy.pipelines for stage in pipeline.stages):
            kind, holders = (stage.ranges, stage.tp, stage.ep), stage.holders
            for holder in range(holders):
                key = kind, holder
                if key not in known:
                    slots = self.slots(bucket, stage, holder)
                    mine = tuple(
                        Piece(starts[slot.param.name] + lo, starts[slot.param.name] + hi, slot.offset + offset)
                        for slot in slots
                        for lo, hi, offset in pieces_of(slot, *slot.param.share(stage, holder))
                    )
                    known[key] = mine, end_of_slots(slots)
                # Ranks of a stage are numbered with tp fastest, so these are a tp rank's sequence parallel ranks, which
                # hold the same; or one rank alone.
                for rank in stage.ranks[holder::holders]:
                    pieces[rank], sizes[rank] = known[key]
        return Layout(bucket.numel, tuple(pieces), tuple(sizes), self.alignment)

    @staticmethod
    def _held(slot: Slot, tp_rank: int, tp: int) -> Iterator[tuple[int, int, int]]:
        offset = 0
        for lo, hi in slot.param.shard_intervals(tp_rank, tp):
            yield lo, hi, offset
            offset += hi - lo

    @staticmethod
    def _contributed(slot: Slot, tp_rank: int, tp: int) -> Iterator[tuple[int, int, int]]:
        # A norm weight of 4 elements under tp = 2, of which both ranks have the whole gradient: rank 0 sends elements
        # 0..1, rank 1 sends 2..3. If both sent all 4, the owners' sum would be twice the gradient.
        rule = slot.param.rule.of(tp)
        if tp > 1 and rule.dim is None and rule.gradient == "complete":
            lo, hi = slot.numel * tp_rank // tp, slot.numel * (tp_rank + 1) // tp
            if hi > lo:
                yield lo, hi, lo
        else:
            yield from ModelPlan._held(slot, tp_rank, tp)

    def check(self, strategy: Strategy) -> None:
        """Refuse a strategy whose degrees the model cannot be cut by, before anything is built.

        Raises PlanError naming the degrees and the numbers of the model that disagree.
        """
        shapes = {(stage.tp, stage.sp, stage.ep) for pipeline in strategy.pipelines for stage in pipeline.stages}
        if self.no_tp and any(tp > 1 for tp, *_ in shapes):
            raise PlanError(self.no_tp)
        if self.no_pp and any(len(pipeline.stages) > 1 for pipeline in strategy.pipelines):
            raise PlanError(self.no_pp)
        for tp, sp, ep in sorted(shapes):
            check_experts(self.experts, self.no_ep, tp, sp, ep)
            for bucket in self.buckets:
                for param in bucket.params:
                    if param.rule.by_width is None:
                        param.shard_ranges(0, tp)
            if self.num_heads:
                check_heads(self.num_heads, tp if self.heads_cut else 1)


def share_of_rows(rows: int, units: int, tp_rank: int, tp: int) -> tuple[int, int]:
    """Rows [start, stop) that `tp_rank` of `tp` holds of so many rows, which are cut in whole units."""
    # 2 key/value heads over tp = 4: ranks 0 and 1 hold head 0, ranks 2 and 3 hold head 1, as their queries need.
    first = tp_rank * units // tp
    last = first + 1 if units < tp else (tp_rank + 1) * units // tp
    return first * (rows // units), last * (rows // units)


def end_of_slots(slots: Sequence[Slot]) -> int:
    """Elements of a bucket's local buffer up to the end of its last slot."""
    return slots[-1].offset + slots[-1].numel if slots else 0


def make_buckets(named: Sequence[tuple[str, frozenset[str]]], specs: Mapping[str, ParamSpec]) -> tuple[Bucket, ...]:
    """Buckets by name and the parameters of each, in the model's order.

    Trainable and frozen parameters of one name become two buckets; a bucket without parameters is left out. The bucket
    WIDE is in FP32.
    """
    buckets: list[Bucket] = []
    for name, members in named:
        for trainable in (True, False):
            params = tuple(s for s in specs.values() if s.name in members and s.trainable is trainable)
            if params:
                buckets.append(Bucket(name if trainable else f"{name}.frozen", params, trainable, name == WIDE))
    return tuple(buckets)


OPEN_AT_LEAST = 64 << 20
"""Bytes that open pushes may always take."""
_OPEN_SHARE = 96  # and this part of the parameters and gradients that a rank holds, for each stage of a pipeline


class BucketTransfers(NamedTuple):
    """How one bucket travels under one strategy, between the masters and those who compute with it.

    Buckets that travel alike share these plans, the same objects.
    """

    pull: TransferPlan | TwinPull
    push: TransferPlan | TwinPush | None  # None: frozen parameters have no gradients


@lru_cache(maxsize=64)
def twins_of(strategy: Strategy, node_size: NodeSize) -> tuple[Twins, ...]:
    """The twins of a strategy, by their first rank; every rank is among one of them."""
    found: dict[object, list[int]] = {}
    for stage in (stage for pipeline in strategy.pipelines for stage in pipeline.stages):
        for holder in range(stage.holders):
            # Sequence parallel ranks saw different tokens, but they hold the same parameters, unless ep is that of all.
            found.setdefault((stage.ranges, stage.tp, stage.ep, holder), []).extend(
                stage.ranks[holder :: stage.holders]
            )
    return tuple(sorted((Twins.of(ranks, node_size) for ranks in found.values()), key=lambda twins: min(twins.ranks)))


def twins_with(strategy: Strategy, rank: int, node_size: NodeSize) -> Twins:
    """A rank's twins, itself among them."""
    return next(twins for twins in twins_of(strategy, node_size) if rank in twins.ranks)


class BucketPlace(NamedTuple):
    """Where a bucket lies among the parameters that a rank holds: elements [start, start + size), with these slots."""

    bucket: Bucket
    slots: tuple[Slot, ...]
    start: int
    size: int


def bucket_places(plan: ModelPlan, strategy: Strategy, twins: Twins) -> Iterator[BucketPlace]:
    """The places of all buckets on each of these twins, one after the other [Note: gaps]."""
    rank = twins.ranks[0]
    stage, start = strategy.stage_of(rank), 0
    for bucket in plan.buckets:
        slots = plan.slots(bucket, stage, stage.holder(rank))
        size = twins.padded(end_of_slots(slots), plan.alignment)
        yield BucketPlace(bucket, slots, start, size)
        start += size * (2 if bucket.wide else 1)  # elements of 16 bit


def bucket_kinds(plan: ModelPlan) -> tuple[int, ...]:
    """For each bucket the number of the first one with equal parameters, as those of layers are."""
    first: dict[object, int] = {}
    alike = (tuple((p.shape, p.rule) for p in bucket.params) for bucket in plan.buckets)
    return tuple(first.setdefault(one, index) for index, one in enumerate(alike))


def bucket_sizes(plan: ModelPlan, strategy: Strategy, twins: Twins, kinds: Sequence[int]) -> tuple[int, ...]:
    """The sizes of all `bucket_places`; of buckets of one kind [`bucket_kinds`] found once."""
    rank = twins.ranks[0]
    stage = strategy.stage_of(rank)
    needed, holder = plan.needed(stage), stage.holder(rank)
    known: dict[object, int] = {}
    sizes = []
    for bucket, kind in zip(plan.buckets, kinds, strict=True):
        held = (kind, *(param.name in needed for param in bucket.params))
        if held not in known:
            known[held] = twins.padded(end_of_slots(plan.slots(bucket, stage, holder)), plan.alignment)
        sizes.append(known[held])
    return tuple(sizes)


class GradientPlaces(NamedTuple):
    """Where a rank has what it pushes and the sums that it owns [Note: where sums lie]; of each trainable bucket."""

    gradients: tuple[Place, ...]
    sums: tuple[Place, ...]

    @property
    def pushed_bytes(self) -> int:
        """Bytes of the gradients."""
        return max((place.stop for place in self.gradients), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes that hold both."""
        return max((place.stop for places in self for place in places), default=0)


def gradient_places(
    plan: ModelPlan, strategy: Strategy, twins: Twins, *, grad_bytes: int, master_bytes: int
) -> GradientPlaces:
    """The places on each of these twins, with so many bytes for an element of a gradient and of a sum."""
    sizes, order = bucket_sizes(plan, strategy, twins, bucket_kinds(plan)), push_order(plan, strategy)
    return places_by_size(plan, sizes, order, strategy.num_ranks, grad_bytes=grad_bytes, master_bytes=master_bytes)


def places_by_size(
    plan: ModelPlan, sizes: Sequence[int], order: Sequence[int], num_ranks: int, *, grad_bytes: int, master_bytes: int
) -> GradientPlaces:
    """The same from the sizes of the buckets there, and the order of the pushes."""
    trained = [(bucket, size) for bucket, size in zip(plan.buckets, sizes, strict=True) if bucket.trainable]
    ends = [0, *accumulate(size * grad_bytes for _, size in trained)]
    gradients = [Place(start, stop) for start, stop in pairwise(ends)]
    # The largest shard of all owners, which differ by one element: so places are the same on many ranks.
    owners = (len(bucket.owners) or num_ranks for bucket, _ in trained)
    shards = [aligned(-(-one.numel // of) * master_bytes) for (one, _), of in zip(trained, owners, strict=True)]
    numbers = {index: at for at, index in enumerate(i for i, bucket in enumerate(plan.buckets) if bucket.trainable)}
    turns = [numbers[index] for index in order]
    found = places_of_sums(tuple(gradients[i] for i in turns), tuple(shards[i] for i in turns))
    sums = dict(zip(turns, found, strict=True))
    return GradientPlaces(tuple(gradients), tuple(sums[i] for i in range(len(trained))))


@lru_cache(maxsize=64)
def plan_transfers(plan: ModelPlan, strategy: Strategy, node_size: NodeSize) -> tuple[BucketTransfers, ...]:
    """The transfers of every bucket, among ranks on such nodes."""
    stages = [stage for pipeline in strategy.pipelines for stage in pipeline.stages]
    needs = [plan.needed(stage) for stage in {s.ranges: s for s in stages}.values()]
    known: dict[object, BucketTransfers] = {}
    found: list[BucketTransfers] = []
    for bucket in plan.buckets:
        # Layers of one stage travel alike: equal parameters, which the same stages need. So a few plans do for all.
        params = ((p.shape, p.rule, p.trainable, *(p.name in need for need in needs)) for p in bucket.params)
        alike = bucket.owners, *params
        if alike not in known:
            known[alike] = _plan_bucket(plan, bucket, strategy, node_size)
        found.append(known[alike])
    return tuple(found)


@lru_cache(maxsize=64)
def push_order(plan: ModelPlan, strategy: Strategy) -> tuple[int, ...]:
    """Trainable buckets in the order in which all ranks start their pushes.

    By the time when the last of those who hold a bucket can push it, counted back from the end of the step in last
    backwards of a stage, as [Note: order of pushes] has it: the first stage pushes within its last backward, stage s
    when its own is over, s of them before the end, but under a schedule that puts weights' gradients off all stages end
    together. The j-th of L buckets follows after j/L of one.
    """
    stages = {
        (1 if weighs(one.schedule) else max(1, index), stage.ranges): stage
        for one in strategy.pipelines
        for index, stage in enumerate(one.stages)
    }
    at: dict[int, Fraction] = {}
    for (before_end, _), stage in stages.items():
        needed = plan.needed(stage)
        held = [number for number, bucket in enumerate(plan.buckets) if any(p.name in needed for p in bucket.params)]
        for passed, number in enumerate(reversed(held), start=1):
            time = Fraction(passed, len(held)) - before_end
            at[number] = max(at.get(number, time), time)
    return tuple(sorted((i for i in at if plan.buckets[i].trainable), key=lambda number: (at[number], -number)))


def _plan_bucket(plan: ModelPlan, bucket: Bucket, strategy: Strategy, node_size: NodeSize) -> BucketTransfers:
    masters, held = bucket.masters(strategy.num_ranks), plan.pull_layout(bucket, strategy)
    twins = twins_of(strategy, node_size)
    contributed = plan.push_layout(bucket, strategy) if bucket.trainable else None
    if all(len(one.ranks) == 1 for one in twins):
        push = None if contributed is None else plan_transfer(masters, contributed).transposed()
        return BucketTransfers(plan_transfer(masters, held), push)
    pull = plan_twin_pull(masters, held, twins)
    return BucketTransfers(pull, None if contributed is None else plan_twin_push(masters, contributed, twins))


def room_for_pushes(held_bytes: int, most_stages: int) -> int:
    """Bytes of scratch memory that the open pushes of a rank may take [Note: scratch memory].

    `held_bytes`: parameters and gradients of its stage. With more room more pushes are on their way while earlier ones
    are summed; with less there is more for activations. Stages push in turn, so that each has one on its way only if
    there is room for as many as the longest pipeline has stages, `most_stages`.
    """
    return max(OPEN_AT_LEAST, held_bytes * most_stages // _OPEN_SHARE)
