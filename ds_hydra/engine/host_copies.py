"""A rank's copy of another rank's masters in the host's memory: `hydra.elastic.redundancy` "host".

[Note: copies on the host]
An update on the host would be made by other instructions than the device's, so it would not be equal to the bit. So
each run of elements that the optimizer knows as one parameter goes to the device with its states, is updated there by
the same optimizer, and goes back. Its gradient has come to the device, and stays there. With Adam that moves 12 bytes a
parameter each way, and takes no more of the device than the gradients and one run. It has a stream of its own, so the
next step's forward runs beside it; who reads the copy, and the next gradient, waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.engine.copies import Copy, like, wait
from ds_hydra.ranks.host_memory import available_bytes
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.masters import MasterShards, OptimizerSpan
from ds_hydra.zero_hetero.nodes import node_of
from ds_hydra.zero_hetero.transport import DeviceLane, HostLane, Lane

if TYPE_CHECKING:
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.ranks.world import World

_STATES = 2  # of each element, such as Adam's moments: as many as the memory model counts


class HostCopy(Copy):
    """Updated on the device, kept on the host [Note: copies on the host]."""

    def __init__(
        self,
        source: ModelSource,
        groups: Sequence[Mapping[str, Any]],
        masters: ModelMasters,
        optimizer: Optimizer,
        world: World,
        shift: int,
    ):
        """As a `Copy`. ConfigError where the host has no memory for those of its ranks."""
        self._pinned = world.device.type == "cuda"
        self._lane: Lane = DeviceLane(world.device) if self._pinned else HostLane()
        self._updated: Any = None  # a mark of the lane: when the last update is done
        super().__init__(source, groups, masters, optimizer, world, shift)
        vars(self.optimizer)["step"] = self._step

    def settle(self) -> None:
        if self._updated is not None:
            self._updated.synchronize()
            self._updated = None

    def leave(self, bucket: int) -> None:
        if self._updated is not None:  # by gradients that lie where the next ones come
            self._lane.wait(self._updated)
        super().leave(bucket)

    def _allocated(self, source: ModelSource) -> ModelMasters:
        own, world = self._own, self._world
        trained, frozen = own.trained.flat, own.frozen.flat
        _check_room((1 + _STATES) * trained.nbytes + frozen.nbytes, world)
        host, dtypes = torch.device("cpu"), (trained.dtype, frozen.dtype)
        return ModelMasters(source, self.ward, world.num_ranks, host, *dtypes, pinned=self._pinned)

    def _put_grads(self, masters: MasterShards) -> None:
        sizes, dtype = [shard.numel() for shard in masters.shards], masters.flat.dtype
        masters.grads = list(torch.zeros(sum(sizes), dtype=dtype, device=self._world.device).split(sizes))

    def _beside(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(shard, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def _take(self, sent: Sequence[Tensor], came: Sequence[Tensor]) -> None:
        # One after the other: messages pass between devices, which may have no room for all of a copy.
        for at, (mine, place) in enumerate(zip(sent, came, strict=True)):
            passed = torch.empty_like(place, device=self._world.device)
            wait([self.exchange(mine, passed, self.tag_of(at))])
            place.copy_(passed)

    def _step(self) -> None:
        """A step of the optimizer, one of its parameters after the other."""
        spans = {id(span.param): span for span in self.masters.trained.spans}
        with self._lane.aside():
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    self._update(group, spans[id(param)])
            self._updated = self._lane.mark()

    def _update(self, group: Mapping[str, Any], span: OptimizerSpan) -> None:
        masters, kept = self.masters.trained, self.optimizer.state[span.param]
        home = masters.shards[span.bucket][span.start : span.stop]
        value = self._there(home)
        param = nn.Parameter(value)
        param.grad = masters.grads[span.bucket][span.start : span.stop]
        made = like(self.optimizer, [[] for _ in self.optimizer.param_groups])
        made.param_groups = [{**group, "params": [param]}]
        # torch keeps numbers of a whole parameter on the host, but for kernels that read them on the device.
        numbers_too = bool(group.get("fused") or group.get("capturable"))
        made.state[param] = {
            key: self._there(held) if isinstance(held, Tensor) and (held.dim() or numbers_too) else held
            for key, held in kept.items()
        }
        made.step()
        home.copy_(value, non_blocking=True)
        for key, new in made.state[param].items():
            if isinstance(new, Tensor) and new.dim():
                if not isinstance(kept.get(key), Tensor):
                    kept[key] = self._beside(new, new.dtype)
                kept[key].copy_(new, non_blocking=True)
            else:
                kept[key] = new

    def _there(self, held: Tensor) -> Tensor:
        """A copy on the device, for which the host does not wait."""
        return held.to(self._world.device, non_blocking=True, copy=True)


def _check_room(each: int, world: World) -> None:
    """ConfigError where the ranks of this node cannot keep so many bytes each."""
    node = node_of(world.rank, world.node_size)
    ranks = sum(node_of(rank, world.node_size) == node for rank in range(world.num_ranks))
    free = available_bytes()
    if ranks * each > free:
        raise ConfigError(
            f'hydra.elastic.redundancy "host": the copies of the {ranks} ranks of rank {world.rank}\'s node take '
            f"{ranks * each / 2**30:.1f} GiB of its memory, of which {free / 2**30:.1f} are free: set it to "
            '"device" or "off", or use more nodes'
        )
