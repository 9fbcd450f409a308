"""What a rank holds of a model under one cut of its masters; after a loss, the same under the cut of those left.

[Note: cutting anew]
The source are the shards of the survivors and, of lost ranks alone, the copies that survivors keep; the target is the
even cut among those left. Each bucket of values and of every optimizer state moves by one transfer plan, into masters
of a new crew: what was held stays as it was until all ranks have all of the new. A rank that knows this proves it for
all others, so a further loss meanwhile leaves no mix of two cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.checkpoint.optimizer_state import build_state, install_optimizer
from ds_hydra.elastic.buddies import held_layout, wards_first
from ds_hydra.elastic.resume import newest_layout
from ds_hydra.engine.copies import Copy, told_state
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.link import Link
from ds_hydra.zero_hetero.transfer_plan import plan_transfer

if TYPE_CHECKING:
    from ds_hydra.elastic.view import View
    from ds_hydra.ranks.world import World
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.zero_hetero.masters import MasterShards


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
