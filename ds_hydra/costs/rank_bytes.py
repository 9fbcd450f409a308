"""A strategy in; bytes of parameters, gradients and transfers on each rank, and which pushes wait, out. Pure: no torch.

They are counted from the plans that the transfers follow, message by message, and not from a formula: contributors to a
shard differ from rank to rank where pipelines do. Example, a model of 7B parameters on 64 ranks: under `4*tp16` each
owner receives 4 contributions, under `tp16 + 48*tp1` 49 of them, with 12 times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_hydra.pipe.model_plan import Bucket, ModelPlan
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.transfers import (
    BucketTransfers,
    bucket_kinds,
    bucket_sizes,
    places_by_size,
    plan_transfers,
    push_order,
    room_for_pushes,
    twins_of,
)
from ds_hydra.zero_hetero.intervals import Column
from ds_hydra.zero_hetero.layout import even_layout, padded
from ds_hydra.zero_hetero.nodes import NodeSize
from ds_hydra.zero_hetero.scratch_plan import Window, end_of, in_turn, pull_scratch, push_scratch, twin_push_bytes
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.twin_plan import TwinPull


class ElementBytes(NamedTuple):
    """Bytes of one element of what a rank holds."""

    param: int  # as it is computed with, and as it is pulled
    grad: int  # where micro-batches add up
    master: int = 4
    wire: int | None = None  # of a gradient that is pushed; None: as `param`

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
    cast: dict[int, list[int]] = {}  # by elements of a bucket
    # By the plan's identity: equal buckets share their plans, which `transfers` keeps.
    known: dict[int, Column] = {}
    for index, (bucket, (pull, push)) in enumerate(zip(plan.buckets, transfers, strict=True)):
        param, wire = element.pulled(bucket), element.pulled(bucket) if bucket.wide else element.wire or element.param
        if param != (element.master if bucket.trainable else kept):  # masters are cast, frozen ones are kept cast
            if bucket.numel not in cast:
                cast[bucket.numel] = [padded(size) for size in even_layout(bucket.numel, num_ranks).sizes]
            pulls += param * np.array(cast[bucket.numel])
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
