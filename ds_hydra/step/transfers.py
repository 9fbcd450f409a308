"""A bucket and a strategy in, the transfers of its pull and its push out. Pure: no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ds_hydra.pipe.model_plan import Bucket, ModelPlan
from ds_hydra.pipe.placement import Strategy
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.relay_plan import RelayPlan, plan_relay
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer

# Layers of one stage have equal layouts, so a strategy needs a few plans, not one per layer.
_transfer, _relay = lru_cache(maxsize=1024)(plan_transfer), lru_cache(maxsize=1024)(plan_relay)


class BucketTransfers(NamedTuple):
    """How one bucket travels under one strategy, between the masters and those who compute with it."""

    pull: TransferPlan | RelayPlan
    push: TransferPlan | None  # None: frozen parameters have no gradients


def plan_bucket(plan: ModelPlan, bucket: Bucket, strategy: Strategy, node_size: int) -> BucketTransfers:
    """The transfers of one bucket; `node_size` consecutive ranks are a node.

    Between nodes pulls are relayed. Pushes are not: a relay would need a second buffer of all gradients.
    """
    masters, layout = even_layout(bucket.numel, strategy.num_ranks), plan.pull_layout(bucket, strategy)
    relayed = 1 < node_size < strategy.num_ranks
    pull = _relay(masters, layout, node_size) if relayed else _transfer(masters, layout)
    if not bucket.trainable:
        return BucketTransfers(pull, None)
    return BucketTransfers(pull, _transfer(masters, plan.push_layout(bucket, strategy)).transposed())
