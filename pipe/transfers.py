"""A strategy in, the transfers of the pulls and pushes of all buckets out. Pure: no torch.

Ranks that hold the same shards of the same layers are twins, and share the work [Note: twins].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ds_hydra.pipe.model_plan import Bucket, ModelPlan, Slot, end_of_slots
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.zero_hetero.contributions import Place, aligned, places_of_sums
from ds_hydra.zero_hetero.nodes import NodeSize
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from ds_hydra.zero_hetero.twin_plan import TwinPull, TwinPush, Twins, plan_twin_pull, plan_twin_push

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
