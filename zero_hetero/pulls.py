"""Pulled parameters: all buckets' pulls start with the step and each is waited for before its first use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hydra.zero_hetero.checksum import checksums_of
from ds_hydra.zero_hetero.mover import Hop, Movement, Mover


class Pulls:
    """Pulls one strategy's buckets from the master shards, in ascending bucket index on every rank.

    `links[b]` pulls bucket b from `shards[b]`, the rank's master shard, into `buffers[b]`, the rank's flat local
    parameters (empty where it holds nothing). The buffers' dtype is the compute dtype: shards are cast to it once,
    before they are sent.
    """

    def __init__(
        self,
        links: Sequence[Mover],
        shards: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        first_tag: int = 0,
    ):
        """Bucket b is pulled with tag `first_tag + b`."""
        self.links = tuple(links)
        self.shards = tuple(shards)
        self.buffers = tuple(buffers)
        self.first_tag = first_tag
        self._handles: dict[int, Movement] = {}  # by bucket; empty between `finish` and the next `start`
        self._casts: list[Tensor] = []  # by bucket; made with the first step

    def start(self) -> None:
        """Start all pulls; from now on no buffer may be read before `wait` of its bucket, and no shard may change."""
        if self._handles:
            raise RuntimeError(f"pulls of buckets {sorted(self._handles)} are still under way; call finish() first")
        with torch.no_grad():
            for index, link in enumerate(self.links):
                wire = self._cast(index)
                self._handles[index] = link.pull(wire, self.buffers[index], tag=self.first_tag + index)
            # Second hops of relays begin when everything has started: a rank that waited for its neighbours between
            # two buckets would keep the others waiting for the buckets that it has not started.
            for handle in self._handles.values():
                handle.advance()

    def wait(self, bucket: int) -> None:
        """Return when this rank's parameters of `bucket` are complete; more calls do nothing."""
        handle = self._handles.get(bucket)
        if handle is not None:
            handle.wait_arrived()

    def finish(self) -> None:
        """Wait for all that is left, of buckets that this rank only sends too: shards may change again."""
        # First all receives, then all sends: a send ends when its receiver has opened the receive, and ranks open
        # theirs by waiting for receives [Note: bounded receives].
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.wait_arrived()
        for handle in handles.values():
            handle.wait()

    def checksums(self, num_ranks: int) -> Tensor:
        """`checksums_of` the pulls that have finished, as long as neither shards nor buffers have changed."""
        hops: list[Hop] = []
        for index, (link, shard, buffer) in enumerate(zip(self.links, self.shards, self.buffers, strict=True)):
            # What was on the wire is the cast, which outlives the step; the shard itself has other bits.
            wire = shard.detach() if shard.dtype == buffer.dtype else self._casts[index]
            hops += link.hops(wire, buffer)
        return checksums_of(hops, num_ranks)

    def _cast(self, index: int) -> Tensor:
        """The shard in the compute dtype; the buffer for it is kept from step to step."""
        shard, dtype = self.shards[index].detach(), self.buffers[index].dtype
        if shard.dtype == dtype:
            return shard
        if not self._casts:
            self._casts = [
                torch.empty_like(shard, dtype=buffer.dtype)
                for shard, buffer in zip(self.shards, self.buffers, strict=True)
            ]
        return self._casts[index].copy_(shard)
