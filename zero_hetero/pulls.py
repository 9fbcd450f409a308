"""Pulled parameters: all buckets' pulls start with the step and each is waited for before its first use.

[Note: order of pulls] All ranks start the steps of all pulls in one order, in which the first buckets, which a forward
needs first, are complete while later ones travel. Of three buckets that enter (e) and are gathered (g) it is

    e0 e1 g0 e2 g1 g2        where later steps are issued at once [Note: lanes]
    e0 e1 e2 | g0 g1 g2      where a wait holds up the host: at the bar a rank waits for e0, and everybody has sent it

A gather needs what has entered. So the next bucket's first step comes before it, and fills the time until then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ds_hydra.zero_hetero.checksum import checksums_of
from ds_hydra.zero_hetero.layout import padded
from ds_hydra.zero_hetero.mover import Movement, PullMover
from ds_hydra.zero_hetero.scratch import Scratch
from ds_hydra.zero_hetero.scratch_plan import end_of, side_by_side


class Pulls:
    """Pulls one strategy's buckets from the master shards, in ascending bucket index on every rank.

    `links[b]` pulls bucket b from `shards[b]`, the rank's master shard, into `buffers[b]`, the rank's flat local
    parameters (empty where it holds nothing). The buffers' dtype is the compute dtype: of shards of another one what
    is sent is cast to it once, into scratch memory.
    """

    def __init__(
        self,
        links: Sequence[PullMover],
        shards: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        first_tag: int = 0,
        early: bool = False,
        scratch: Scratch | None = None,
    ):
        """Bucket b is pulled with tag `first_tag + b`; `early`: later steps are issued at once [Note: lanes].

        `scratch` is the rank's, of which the pulls take the first `scratch_bytes` until `finish`; None: memory of their
        own.
        """
        self.links = tuple(links)
        self.shards = tuple(shards)
        self.buffers = tuple(buffers)
        self.first_tag = first_tag
        self.early = early
        self._handles: dict[int, Movement] = {}  # by bucket; empty between `finish` and the next `start`
        pairs = list(zip(self.shards, self.buffers, strict=True))
        casts = [padded(shard.numel()) * (shard.dtype != buffer.dtype) for shard, buffer in pairs]
        sizes = zip([*casts, *(link.pull_scratch for link in self.links)], [*self.buffers, *self.buffers], strict=True)
        windows = side_by_side([numel * buffer.dtype.itemsize for numel, buffer in sizes])
        self._casts, self._spaces = windows[: len(pairs)], windows[len(pairs) :]
        self.scratch_bytes = end_of(windows)
        self._scratch = scratch or Scratch(self.shards[0].device, self.scratch_bytes)

    def start(self, kept: Collection[int] = ()) -> None:
        """Start all pulls; from now on no buffer may be read before `wait` of its bucket, and no shard may change.

        Buckets in `kept`, the same on all ranks, are not pulled: their buffers hold what the shards do.
        """
        if self._handles:
            raise RuntimeError(f"pulls of buckets {sorted(self._handles)} are still under way; call finish() first")
        before: Movement | None = None
        with torch.no_grad():
            for index, link in enumerate(self.links):
                if index in kept:
                    continue
                shard, buffer = self.shards[index].detach(), self.buffers[index]
                space = self._scratch.at(self._spaces[index], buffer.dtype)
                cast = self._scratch.at(self._casts[index], buffer.dtype)[: shard.numel()]
                handle = link.pull(shard, buffer, tag=self.first_tag + index, scratch=space, cast=cast)
                if self.early and before is not None:
                    finish_steps([before])
                self._handles[index] = before = handle
            finish_steps(list(self._handles.values()))

    def wait(self, bucket: int) -> None:
        """Return when this rank's parameters of `bucket` are complete; more calls do nothing."""
        handle = self._handles.get(bucket)
        if handle is not None:
            handle.wait_arrived()

    def arrive(self) -> None:
        """Return when this rank's parameters of all buckets are complete."""
        for handle in self._handles.values():
            handle.wait_arrived()

    def finish(self) -> None:
        """Wait for all that is left, of buckets that this rank only sends too: shards may change again."""
        # First all receives, then all sends: a send ends when its receiver has opened the receive, and ranks open
        # theirs by waiting for receives [Note: bounded receives].
        self.arrive()
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.wait()

    def checksums(self, num_ranks: int) -> Tensor:
        """`checksums_of` the pulls that have finished, as long as neither shards nor buffers have changed."""
        totals, count = torch.zeros(2, num_ranks, dtype=torch.int64), 0
        for link, shard, buffer in zip(self.links, self.shards, self.buffers, strict=True):
            # What was on the wire is the cast, with other bits than the shard; others have written over it since. It
            # is made once more, in memory of its own, one bucket at a time: gradients are in the scratch memory now.
            hops = link.hops(shard.detach().to(buffer.dtype), buffer)
            totals += checksums_of(hops, num_ranks, first=count)
            count += len(hops)
        return totals


def finish_steps(handles: Sequence[Movement]) -> None:
    """Begin all steps that are left, one of each at a time."""
    while handles:
        handles = [handle for handle in handles if handle.advance()]
