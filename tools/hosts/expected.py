"""A step's plan in; the bytes that cross between two hosts in it, by the plans that the engine follows, out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.transfers import plan_transfers
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.layout import Layout, even_layout
from ds_hydra.zero_hetero.transfer_plan import TransferPlan

ELEMENT = 4  # bytes of all that travels in an FP32 job


class Crossing(NamedTuple):
    """Bytes that enter host 0 and host 1."""

    pulls: tuple[int, int]
    pushes: tuple[int, int]
    messages: tuple[int, int]  # between stages

    @property
    def into(self) -> tuple[int, int]:
        """All of them."""
        return tuple(sum(column) for column in zip(*self, strict=True))  # type: ignore[return-value]


def crossing(model: ModelPlan, plan: StepPlan, hidden: int, node_size: int) -> Crossing:
    """Bytes of a step on two hosts of `node_size` ranks each, none of whose stages spans both."""
    pulls, pushes, messages = [0, 0], [0, 0], [0, 0]
    for phase in plan.phases:
        placed = place_strategy(phase.shape, 2 * node_size, model.num_layers)
        for pull, push in plan_transfers(model, placed, node_size):
            _add(pulls, (pull,) if isinstance(pull, TransferPlan) else pull.hops, node_size)
            if push is not None:
                _add(pushes, (push,) if isinstance(push, TransferPlan) else push.hops, node_size)
        for pipeline, planned in zip(placed.pipelines, phase.pipelines, strict=True):
            place = StagePlace(pipeline, 0, 0, 0, None, None, 0, model.token_sharding)
            for microbatch in planned.microbatches:
                rows = microbatch.num_tokens + place.padding(microbatch.num_tokens)
                for before, after in pairwise(pipeline.stages):
                    for src, dst in ((before, after), (after, before)):
                        received = edge(src, dst, rows, token_sharding=model.token_sharding)[1]
                        for receiver, parts in received.items():
                            for part in parts:
                                if part.peer // node_size != receiver // node_size:
                                    messages[receiver // node_size] += (part.stop - part.start) * hidden * ELEMENT
    return Crossing(*((into[0], into[1]) for into in (pulls, pushes, messages)))


def _add(into: list[int], hops: Iterable[TransferPlan], node_size: int) -> None:
    for hop in hops:
        for message in hop.messages:
            if message.src // node_size != message.dst // node_size:
                into[message.dst // node_size] += message.numel * ELEMENT


def least(model: ModelPlan, strategy: Strategy, node_size: int) -> int:
    """Bytes that must enter a host in a step, whatever the way; of the host that needs more.

    That is each parameter once that its stages need and none of its ranks owns, and one sum of the other host's
    gradients of each that they own.
    """
    into = [0, 0]
    for bucket in model.buckets:
        owned = _held(even_layout(bucket.numel, strategy.num_ranks), node_size)
        needed = _held(model.pull_layout(bucket, strategy), node_size)
        given = _held(model.push_layout(bucket, strategy), node_size) if bucket.trainable else np.zeros_like(needed)
        for host in range(2):
            into[host] += int((needed[host] & ~owned[host]).sum() + (given[1 - host] & owned[host]).sum()) * ELEMENT
    return max(into)


def _held(layout: Layout, node_size: int) -> NDArray[np.bool_]:
    """Which elements a rank of each host holds: (2, numel)."""
    held = np.zeros((2, layout.numel), dtype=np.bool_)
    for rank, pieces in enumerate(layout.pieces):
        for piece in pieces:
            held[rank // node_size, piece.start : piece.stop] = True
    return held
