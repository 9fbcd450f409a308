"""A rank's copy of another one's masters, on devices or hosts; what a rank holds when others are lost; the new cut.

[Note: copies] Of each step the owner sends its summed gradient, one message a bucket, and who keeps the copy makes the
same update: of the same spans, by the same optimizer, with the same numbers, which all ranks know. That moves 4 bytes a
parameter where sending the updated state would move 12, and it is equal to the bit: an optimizer whose vector
instructions treat the end of an interval otherwise ends it at the same place here. A bucket's sum leaves as soon as its
last push of the step is over, while others are still pushed [Note: order of pushes]; of a step in parts nobody knows
which push is the last, so there all leave before the update. The whole state moves only when the masters have got their
values from elsewhere: at the start, from a checkpoint, after a loss.

[Note: copies on the host]
An update on the host would be made by other instructions than the device's, so it would not be equal to the bit. So
each run of elements that the optimizer knows as one parameter goes to the device with its states, is updated there by
the same optimizer, and goes back. Its gradient has come to the device, and stays there. With Adam that moves 12 bytes a
parameter each way, and takes no more of the device than the gradients and one run. It has a stream of its own, so the
next step's forward runs beside it; who reads the copy, and the next gradient, waits for it.

[Note: cutting anew]
The source are the shards of the survivors and, of lost ranks alone, the copies that survivors keep; the target is the
even cut among those left. Each bucket of values and of every optimizer state moves by one transfer plan, into masters
of a new crew: what was held stays as it was until all ranks have all of the new. A rank that knows this proves it for
all others, so a further loss meanwhile leaves no mix of two cuts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hydra.checkpoint.format import SavedGroup
from ds_hydra.checkpoint.optimizer_state import (
    build_state,
    collect_groups,
    element_wise_states,
    install_optimizer,
    merge_groups,
)
from ds_hydra.elastic.messages import NOTHING_HELD, Report, View, newest_layout, to_apply, usable
from ds_hydra.engine.calls import end_lost
from ds_hydra.ranks.host_memory import available_bytes
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.buddies import check_nothing_lost, held_layout, wards_first
from ds_hydra.zero_hetero.errors import ConfigError, NumericsError, PlanError
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.link import Link
from ds_hydra.zero_hetero.masters import MasterShards, OptimizerSpan
from ds_hydra.zero_hetero.nodes import node_of
from ds_hydra.zero_hetero.norm_table import NormTable
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from ds_hydra.zero_hetero.transport import DeviceLane, HostLane, Lane

if TYPE_CHECKING:
    from ds_hydra.elastic.messages import View
    from ds_hydra.engine.crew import Crew
    from ds_hydra.pipe.stage import ModelSource
    from ds_hydra.ranks.channel import Channel
    from ds_hydra.ranks.world import World
    from ds_hydra.step.update import Update
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

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """(sender, receiver) of the messages of all ranks' copies."""
        ranks, shift = self._world.num_ranks, self.keeper - self._world.rank
        return {(rank, (rank + shift) % ranks) for rank in range(ranks)}

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
    groups = merge_groups([[SavedGroup.of_record(group) for group in own] for _, own in everyone])
    return {key: getattr(torch, names[key]) for key in sorted(names)}, groups


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
        vars(param).update(vars(span.param))  # what an optimizer of whole parameters has fetched, if any
        vars(span.param).clear()
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


def keeper_of(redundancy: str) -> type[Copy]:
    """What keeps the copies, by `hydra.elastic.redundancy`."""
    return HostCopy if redundancy == "host" else Copy


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


@dataclass
class Held:
    """A rank's masters and its copy of another one's, as they were cut in `epoch` for `members`, ids by rank."""

    epoch: int
    members: tuple[int, ...]
    shift: int
    masters: ModelMasters | None  # None, as the optimizer: of a process that joins
    optimizer: Optimizer | None
    copy: Copy | None

    @classmethod
    def of_joiner(cls, view: View, shift_of: Callable[[Sequence[str]], int]) -> Held:
        """What a process holds that joins: nothing of a cut that the others have."""
        former = view.former
        shift = shift_of([one.host for one in former])
        return cls(newest_layout(view.reports.values()), tuple(one.id for one in former), shift, None, None, None)

    def cut_anew(
        self, own: int, members: Sequence[int], masters: ModelMasters, optimizer: Optimizer, world: World
    ) -> None:
        """Give the masters of the present world, and their optimizer, what those left hold; every rank must call it.

        `own` is this rank's id, `members` those of all ranks of the world.
        """
        held, states_of = self.masters or masters, self.optimizer or optimizer
        keys, groups = told_state(held.trained, states_of, world.channel)
        with_copy = len(wards_first(own, self.members, members, self.shift)) > 1
        copied = self.copy if with_copy else None
        if copied is not None:
            copied.settle()
        states: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for new, old, kept in (
                (masters.trained, held.trained, copied and copied.masters.trained),
                (masters.frozen, held.frozen, copied and copied.masters.frozen),
            ):
                values = self._moved(members, old.shards, kept.shards if kept else None, new, world)
                for shard, value in zip(new.shards, values, strict=True):
                    shard.copy_(value)
            for key, dtype in keys.items():
                mine = [state.to(dtype) for state in held.trained.optimizer_state(states_of, key)]
                theirs = None
                if copied is not None:
                    theirs = [s.to(dtype) for s in copied.masters.trained.optimizer_state(copied.optimizer, key)]
                states[key] = self._moved(members, mine, theirs, masters.trained, world)
        masters.revision += 1
        install_optimizer(optimizer, build_state(masters.trained, optimizer, states, groups))

    def _moved(
        self,
        members: Sequence[int],
        own: Sequence[Tensor],
        copied: Sequence[Tensor] | None,
        new: MasterShards,
        world: World,
    ) -> list[Tensor]:
        """Values per bucket as the present ranks hold them."""
        moved = []
        for index, bucket in enumerate(new.buckets):
            source = own[index].detach() if self.masters is not None else own[index].new_empty(0)
            if copied is not None:
                source = torch.cat((source, copied[index].detach().to(source.device)))
            plan = plan_transfer(
                held_layout(bucket.numel, self.members, members, self.shift), even_layout(bucket.numel, len(members))
            )
            target = torch.empty(new.layouts[index].sizes[world.rank], dtype=source.dtype, device=source.device)
            Link(plan, world.rank, world.links).pull(source.contiguous(), target).wait()
            moved.append(target)
        return moved


class SurvivingState:
    """Masters and their update, and those of a further cut that may not be whole on all ranks; none where it joins."""

    def __init__(self, shift_of: Callable[[Sequence[str]], int]) -> None:
        """`shift_of` tells who keeps whose copy, of the hosts by rank [Note: buddies]."""
        self._shift_of = shift_of
        self.held: Held | None = None
        self.update: Update | None = None
        self._aside: tuple[Held, Update] | None = None

    def report(self) -> Report:
        """What is told to the others while training stands still."""
        update, held = self.update, self.held
        if update is None or held is None:
            return Report()
        whole = held.copy is None or not held.copy.stale
        table, last = (one.name if one else None for one in (update.table, update.last))
        return Report(update.committed, table, last, held.epoch if whole else NOTHING_HELD)

    def tables(self) -> dict[str, NormTable]:
        """Those that the report names."""
        held = () if self.update is None else (self.update.table, self.update.last)
        return {one.name: one for one in held if one is not None}

    def settle(self, view: View, own: int, ids: Sequence[int]) -> Held:
        """Hold the newest cut, at the newest step, as all other ranks of the view. Ends the process where that was lost
        with the ranks that are gone."""
        newest = newest_layout(view.reports.values())
        if newest == NOTHING_HELD:
            end_lost("ranks were lost before each rank's share of the model had a copy")
        if self._aside is not None and self._aside[0].epoch == newest:
            self.take_aside()
        held, update = self.held or Held.of_joiner(view, self._shift_of), self.update
        assert held.epoch == newest, "a cut that was taken is there"
        try:
            check_nothing_lost(held.members, ids, held.shift)
        except PlanError as error:
            end_lost(str(error))
        if update is not None:
            steps = [report.committed for report in view.reports.values()]
            name, behind = to_apply(view.reports[own], view.reports.values()), max(steps) - update.committed
            assert behind <= (name is not None), f"{behind} steps behind others, with table {name}"
            table = usable({**self.tables(), **view.tables}[name]) if name is not None else None
            if table is not None:
                update.complete(table)
            update.table = None
        return held

    def put_aside(self, view: View, crew: Crew) -> None:
        """Keep what has been cut for a view: whether all have theirs, only the next message tells."""
        members = tuple(member.id for member in view.members)
        assert crew.copy is None or isinstance(crew.copy, Copy), "the plug has made it"
        held = Held(view.epoch, members, crew.shift, crew.masters, crew.update.optimizer, crew.copy)
        self._aside = held, crew.update

    def take_aside(self) -> None:
        """Hold what was put aside, and nothing else."""
        assert self._aside is not None, "it was made"
        (self.held, self.update), self._aside = self._aside, None
