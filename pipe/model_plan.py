"""Model plan: parameter names, shapes and shard rules in; buckets and layouts for any strategy out. Pure.

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
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import PlainSerializer

from ds_hydra.pipe.head_sharing import Boxes
from ds_hydra.pipe.placement import Stage, Strategy, check_experts, check_heads
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import ALIGNMENT, Layout, Piece, even_layout, padded

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
