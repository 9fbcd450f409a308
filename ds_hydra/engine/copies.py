"""A rank's copy of another rank's masters and optimizer state: made whole once, then updated as the owner updates.

[Note: copies] Of each step the owner sends its summed gradient, one message a bucket, and who keeps the copy makes the
same update: of the same spans, by the same optimizer, with the same numbers, which all ranks know. That moves 4 bytes a
parameter where sending the updated state would move 12, and it is equal to the bit: an optimizer whose vector
instructions treat the end of an interval otherwise ends it at the same place here. A bucket's sum leaves as soon as its
last push of the step is over, while others are still pushed [Note: order of pushes]; of a step in parts nobody knows
which push is the last, so there all leave before the update. The whole state moves only when the masters have got their
values from elsewhere: at the start, from a checkpoint, after a loss.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.checkpoint.format import SavedGroup, SavedScalar
from ds_hydra.checkpoint.optimizer_state import (
    build_state,
    collect_groups,
    element_wise_states,
    install_optimizer,
    merge_groups,
)
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import NumericsError

if TYPE_CHECKING:
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.ranks.channel import Channel
    from ds_hydra.ranks.world import World
    from ds_hydra.zero_hetero.masters import MasterShards
    from ds_hydra.zero_hetero.transport import Work

_TAG = 1 << 25  # of gradients; those of the state follow


class Copy:
    """The copy that this rank keeps, of the rank `shift` before it. Every rank must call the same methods."""

    def __init__(
        self,
        source: ModelSource,
        groups: Sequence[Mapping[str, Any]],
        masters: ModelMasters,
        optimizer: Optimizer,
        world: World,
        shift: int,
    ):
        """Allocates the copy: as much as the masters and their optimizer state take, and a gradient. `groups` are those
        of the optimizer, with the `names` of their parameters."""
        self._world, self._own, self._optimizer = world, masters, optimizer
        self.ward, self.keeper = (world.rank - shift) % world.num_ranks, (world.rank + shift) % world.num_ranks
        self.masters = self._allocated(source)
        self.optimizer = like(optimizer, [group["params"] for group in self.masters.trained.param_groups(groups)])
        self._put_grads(self.masters.trained)
        self._revision = -1
        self._leaving: dict[int, Work] = {}  # of this step, by bucket

    @classmethod
    def kept_on(cls, place: str) -> type[Copy]:
        """The kind of copies that `hydra.elastic.redundancy` asks for."""
        if place != "host":
            return cls
        from ds_hydra.engine.host_copies import HostCopy

        return HostCopy

    @property
    def stale(self) -> bool:
        """Whether masters have got other values than by updates since all copies were whole; equal on all ranks, but
        for a fault in `refresh`."""
        return self._revision != self._own.revision

    def settle(self) -> None:
        """Wait until values and states of the copy may be read."""

    def refresh(self) -> None:
        """Make the copy whole: values, states, and what the optimizer counts."""
        self.settle()
        keys, groups = told_state(self._own.trained, self._optimizer, self._world.channel)
        own, copies = self._own, self.masters
        sent = [*own.trained.shards, *own.frozen.shards]
        came = [*copies.trained.shards, *copies.frozen.shards]
        states: dict[str, list[Tensor]] = {}
        for key, dtype in keys.items():
            sent += [state.to(dtype) for state in own.trained.optimizer_state(self._optimizer, key)]
            states[key] = [self._beside(shard, dtype) for shard in copies.trained.shards]
            came += states[key]
        self._take(sent, came)
        install_optimizer(self.optimizer, build_state(copies.trained, self.optimizer, states, groups))
        # Who is past this message knows that all copies are whole.
        self._world.settle()
        self._world.channel.texts("")
        self._revision = self._own.revision

    def leave(self, bucket: int) -> None:
        """Begin to send this rank's summed gradient of a bucket to its keeper, and to get that of the copy."""
        own, copied = (masters.trained.grads[bucket] for masters in (self._own, self.masters))
        self._leaving[bucket] = self.exchange(own, copied, _TAG + bucket)

    def exchange_grads(self) -> None:
        """`leave` of all buckets that have not left in this step; all are here and there on return."""
        for bucket in range(len(self.masters.trained.grads)):
            if bucket not in self._leaving:
                self.leave(bucket)
        works, self._leaving = self._leaving, {}
        wait(list(works.values()))

    def side(self, optimizer: Optimizer) -> tuple[MasterShards, Optimizer]:
        """Masters and optimizer of the copy, with the options that the owner's optimizer has now."""
        self.settle()
        for own, copied in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
            copied.update({key: value for key, value in own.items() if key != "params"})
        return self.masters.trained, self.optimizer

    def compare(self, step: int) -> None:
        """NumericsError, on all ranks, where a copy differs from its owner's masters in a bit."""
        self.settle()
        own, copied = (_checksum(masters, by, self._world.device) for masters, by in
                       ((self._own, self._optimizer), (self.masters, self.optimizer)))  # fmt: skip
        rows = self._world.channel.rows(torch.tensor([own, copied])).tolist()
        wrong = [rank for rank, (_, kept) in enumerate(rows) if kept != rows[self.ward_of(rank)][0]]
        if wrong:
            raise NumericsError(
                f"step {step}: the copies that ranks {wrong[:8]} keep are not what the masters of ranks "
                f"{[self.ward_of(rank) for rank in wrong[:8]]} are: memory or network of these ranks has changed bits. "
                "Exchange the hardware and restart: the job resumes from the newest checkpoint"
            )

    def ward_of(self, rank: int) -> int:
        """Whose copy a rank keeps."""
        return (rank + self.ward - self._world.rank) % self._world.num_ranks

    def _allocated(self, source: ModelSource) -> ModelMasters:
        """Memory of the copy."""
        own, world = self._own, self._world
        dtypes = own.trained.flat.dtype, own.frozen.flat.dtype
        return ModelMasters(source, self.ward, world.num_ranks, world.device, *dtypes)

    def _put_grads(self, masters: MasterShards) -> None:
        """Give the copy memory of its own for gradients, on the device."""
        masters.put_grads(None)

    def _beside(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a state of a shard's elements."""
        return torch.empty_like(shard, dtype=dtype)

    def _take(self, sent: Sequence[Tensor], came: Sequence[Tensor]) -> None:
        """Send the own state to the keeper, and get the ward's."""
        wait([self.exchange(*both, self.tag_of(at)) for at, both in enumerate(zip(sent, came, strict=True))])

    def tag_of(self, at: int) -> int:
        """Of a tensor of the state; buckets' gradients have those before."""
        return _TAG + len(self._own.trained.shards) + at

    def exchange(self, sent: Tensor, came: Tensor, tag: int) -> Work:
        """One to the keeper, the other from the ward."""
        # Of one or no element, too: whether a shard is empty its owner and its keeper both know.
        return self._world.links.exchange(
            [(self.keeper, sent.detach())] if sent.numel() else [], [(self.ward, came)] if came.numel() else [], tag
        )


def wait(works: Sequence[Work]) -> None:
    """Until all that was exchanged is here and there."""
    for work in works:
        work.wait_receives()
    for work in works:
        work.wait()


def told_state(
    masters: MasterShards, optimizer: Optimizer, channel: Channel
) -> tuple[dict[str, torch.dtype], tuple[SavedGroup, ...]]:
    """The element-wise states that the optimizer keeps on any rank, with their types, and the numbers of its groups."""
    keys = {
        key: str(dtype).removeprefix("torch.") for key, dtype in element_wise_states(masters.spans, optimizer).items()
    }
    told = json.dumps([keys, [asdict(group) for group in collect_groups(optimizer)]])
    everyone = [json.loads(text) for text in channel.texts(told)]
    names: dict[str, str] = {}
    for found, _ in everyone:
        names |= found
    groups = merge_groups([[_group(group) for group in own] for _, own in everyone])
    return {key: getattr(torch, names[key]) for key in sorted(names)}, groups


def _group(record: Mapping[str, Any]) -> SavedGroup:
    return SavedGroup(record["options"], {key: SavedScalar(**scalar) for key, scalar in record["scalars"].items()})


def like(optimizer: Optimizer, shards: Sequence[Sequence[Tensor]]) -> Optimizer:
    """An optimizer of the same class and options over other shards, without state."""
    # Neither made anew, since a script may have made its own in any way, nor copied with its state. What a scheduler
    # has put around its `step` counts the owner's steps, and stays there.
    made: Any = object.__new__(type(optimizer))
    vars(made).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    made.state = defaultdict(dict)
    made.param_groups = [
        {**group, "params": list(own)} for group, own in zip(optimizer.param_groups, shards, strict=True)
    ]
    return made


def _checksum(masters: ModelMasters, optimizer: Optimizer, device: torch.device) -> int:
    """Over the bits of values and states, each element with a factor of its own [Note: checksum]."""
    total, at = 0, 1
    states = [value for span in masters.trained.spans for value in optimizer.state.get(span.param, {}).values()
              if isinstance(value, Tensor) and value.dim()]  # fmt: skip
    for values in (*masters.trained.shards, *masters.frozen.shards, *states):
        bits = values.detach().to(device).contiguous().view(torch.uint8).to(torch.int64)
        odd = torch.arange(at, at + 2 * len(bits), 2, device=bits.device)
        total, at = total + int(odd.mul_(bits).sum()), at + 2 * len(bits)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
