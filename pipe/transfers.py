"""A strategy in, the transfers of the pulls and pushes of all buckets out. Pure: no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ds_hydra.pipe.model_plan import Bucket, ModelPlan
from ds_hydra.pipe.placement import Strategy
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.relay_plan import RelayPlan, plan_relay
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer

OPEN_AT_LEAST = 64 << 20
"""Bytes that open pushes may always take."""
_OPEN_SHARE = 32  # and this part of the parameters and gradients that a rank holds


class BucketTransfers(NamedTuple):
    """How one bucket travels under one strategy, between the masters and those who compute with it.

    Buckets that travel alike share these plans, the same objects.
    """

    pull: TransferPlan | RelayPlan
    push: TransferPlan | None  # None: frozen parameters have no gradients


@lru_cache(maxsize=64)
def plan_transfers(plan: ModelPlan, strategy: Strategy, node_size: int) -> tuple[BucketTransfers, ...]:
    """The transfers of every bucket; `node_size` consecutive ranks are a node."""
    stages = [stage for pipeline in strategy.pipelines for stage in pipeline.stages]
    needs = [plan.needed(stage) for stage in {s.ranges: s for s in stages}.values()]
    known: dict[object, BucketTransfers] = {}
    found: list[BucketTransfers] = []
    for bucket in plan.buckets:
        # Layers of one stage travel alike: equal parameters, which the same stages need. So a few plans do for all.
        alike = tuple((p.shape, p.rule, p.trainable, *(p.name in need for need in needs)) for p in bucket.params)
        if alike not in known:
            known[alike] = _plan_bucket(plan, bucket, strategy, node_size)
        found.append(known[alike])
    return tuple(found)


def _plan_bucket(plan: ModelPlan, bucket: Bucket, strategy: Strategy, node_size: int) -> BucketTransfers:
    # Between nodes pulls are relayed. Pushes are not: a relay would need a second buffer of all gradients.
    masters, layout = even_layout(bucket.numel, strategy.num_ranks), plan.pull_layout(bucket, strategy)
    relayed = 1 < node_size < strategy.num_ranks
    pull = plan_relay(masters, layout, node_size) if relayed else plan_transfer(masters, layout)
    if not bucket.trainable:
        return BucketTransfers(pull, None)
    return BucketTransfers(pull, plan_transfer(masters, plan.push_layout(bucket, strategy)).transposed())


def room_for_pushes(held_bytes: int, pull_bytes: int) -> int:
    """Bytes of scratch memory that the open pushes of a rank may take [Note: scratch memory].

    `held_bytes`: parameters and gradients of its stage; `pull_bytes`: scratch memory of its pulls, which are over when
    pushes begin. With more room more pushes are on their way while earlier ones are summed; with less there is more
    for activations.
    """
    return max(OPEN_AT_LEAST, held_bytes // _OPEN_SHARE, pull_bytes)
