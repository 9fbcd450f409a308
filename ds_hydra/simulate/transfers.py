"""A model and a strategy in; the messages of every bucket's pull and push, as the runtime plans them, out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ds_hydra.costs.rank_bytes import ElementBytes, push_turns
from ds_hydra.elastic.buddies import copy_plan
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Stage, Strategy
from ds_hydra.pipe.transfers import BucketTransfers, plan_transfers, push_order
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.wires import Parcels, Routes
from ds_hydra.zero_hetero.intervals import Column
from ds_hydra.zero_hetero.transfer_plan import TransferPlan

SUM_BYTES = 4  # of an element of twins' sums on their way to the masters, which are FP32


class BucketUse(NamedTuple):
    """A bucket that a part of a stage needs, in the order of its forward; the layers that follow until the next one."""

    bucket: int
    share: float  # of the part's computing, between this bucket's arrival and the next one's


@dataclass(frozen=True)
class StrategyTransfers:
    """By bucket: the steps of its pull and of its push (None: it is frozen). Equal buckets share their messages.

    `order` is that of the pushes [Note: order of pushes].
    `copies`: what brings each bucket's sums to who keeps a copy of them, if anybody does.
    `turns`: how many pushes must be over on a rank before it has memory for one, (pushes, ranks), in their order.
    """

    pulls: tuple[tuple[Parcels, ...], ...]
    pushes: tuple[tuple[Parcels, ...] | None, ...]
    order: tuple[int, ...]
    turns: Column
    copies: Mapping[int, Parcels]

    @classmethod
    def of(
        cls, plan: ModelPlan, strategy: Strategy, links: LinkModel, element: ElementBytes, *, shift: int = 0
    ) -> StrategyTransfers:
        """Layers that travel alike have the same transfers, of which each is looked at once. `shift` as of a job."""
        planned = plan_transfers(plan, strategy, links.node_size)
        sizes = element.param, element.wire or element.param
        known: list[Routes] = []
        made = {id(one): _parcels(one, links, sizes, known) for one in {id(one): one for one in planned}.values()}
        pulls, pushes = zip(*(made[id(one)] for one in planned), strict=True)
        order = push_order(plan, strategy)
        numels = {index: plan.buckets[index].numel for index in order if shift}
        of = {numel: Parcels.of_plan(copy_plan(numel, strategy.num_ranks, shift), links, element.master, known)
              for numel in set(numels.values())}  # fmt: skip
        turns = push_turns(plan, strategy, element, node_size=links.node_size)
        return cls(pulls, pushes, order, turns, {index: of[numel] for index, numel in numels.items()})


def bucket_uses(plan: ModelPlan, stage: Stage) -> tuple[BucketUse, ...]:
    """The buckets of a stage in the order in which its forward needs them; layers take equal shares of its time.

    Embeddings and head count as no time of their own.
    """
    uses: dict[int, float] = {}
    bucket_of = {param.name: index for index, bucket in enumerate(plan.buckets) for param in bucket.params}
    groups = [plan.first] if stage.first_layer == 0 else []
    groups += plan.layers[stage.first_layer : stage.last_layer]
    groups += [plan.last] if stage.last_layer == plan.num_layers else []
    for names in groups:
        found = sorted({bucket_of[name] for name in names if name in bucket_of})
        for index in found:
            uses.setdefault(index, 0.0)
        if found and names is not plan.first and names is not plan.last:
            uses[found[-1]] += 1.0 / (stage.last_layer - stage.first_layer)
    return tuple(BucketUse(index, share) for index, share in uses.items())


def _parcels(
    transfers: BucketTransfers, links: LinkModel, element_bytes: tuple[int, int], known: list[Routes]
) -> tuple[tuple[Parcels, ...], tuple[Parcels, ...] | None]:
    pull, push = transfers
    pulled, pushed = element_bytes
    hops = (pull,) if isinstance(pull, TransferPlan) else pull.hops
    pulls = tuple(Parcels.of_plan(hop, links, pulled, known) for hop in hops)
    if push is None or isinstance(push, TransferPlan):
        return pulls, None if push is None else (Parcels.of_plan(push, links, pushed, known),)
    trade, leave = push.hops
    return pulls, (Parcels.of_plan(trade, links, pushed, known), Parcels.of_plan(leave, links, SUM_BYTES, known))
