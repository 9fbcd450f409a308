"""LNK over two hops: each element crosses into a node once; see [Note: relay] in `relay_plan.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hydra.zero_hetero.buffer_pool import BufferPool
from ds_hydra.zero_hetero.link import Handle, Link
from ds_hydra.zero_hetero.mover import Hop
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.transport import Transport


class RelayHandle:
    """A pull or push of two hops; `advance()` waits for the first and begins the second. See `Movement`."""

    def __init__(self, first: Handle, second: Callable[[], Handle], finish: Callable[[], None] | None = None):
        self._first = first
        self._begin_second = second  # reads what the first hop brings, so it may not start before
        self._finish = finish
        self._second: Handle | None = None
        self._done = False

    def advance(self) -> None:
        """Wait for the first hop and begin the second; more calls do nothing."""
        if self._second is None:
            self._first.wait_arrived()
            self._second = self._begin_second()

    def wait_arrived(self) -> None:
        """Return when the destination is complete; the source may still be on its way."""
        self.advance()
        if self._second is not None:
            self._second.wait_arrived()

    def wait(self) -> None:
        """Return when the destination is complete and the source is free again. Repeats do nothing."""
        self.advance()
        if self._second is not None and not self._done:
            self._done = True
            # The first hop has arrived long ago; waiting for it as well frees its sends and its scratch memory.
            self._second.wait()
            self._first.wait()
            if self._finish is not None:
                self._finish()


class RelayLink:
    """Runs one rank's part of two transfer plans, one after the other, as a `Link` runs one. See `Mover`.

    `hops`: of a pull the `RelayPlan` itself, of a push what its `transposed` returns. A pull gives the same bits as a
    `Link`. A push adds up inside each node first and then over the nodes, in rank order both times: the same bits
    each time, but rounded in another order than by a `Link`.
    """

    def __init__(
        self,
        hops: tuple[TransferPlan, TransferPlan],
        rank: int,
        transport: Transport,
        *,
        buffers: BufferPool | None = None,
    ):
        self.buffers = BufferPool() if buffers is None else buffers
        self.first, self.second = (Link(hop, rank, transport, buffers=self.buffers) for hop in hops)

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others, in both hops."""
        return self.first.sent_numel + self.second.sent_numel

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others, in both hops."""
        return self.first.received_numel + self.second.received_numel

    def pull(self, src: Tensor, dst: Tensor, *, tag: int = 0) -> RelayHandle:
        """See `Mover.pull`; between the hops data lies in `dst`, already at its final places."""
        # Both hops may use one tag: a transport delivers what has one tag in the order in which it was sent.
        return RelayHandle(self.first.pull(src, dst, tag=tag), lambda: self.second.pull(dst, dst, tag=tag))

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
    ) -> RelayHandle:
        """See `Mover.push`; the sums of a node lie in scratch memory of src's size and travel as `wire_dtype` too.

        Only the second hop may accumulate: the scratch memory holds nothing of the phases before.
        """
        # Without this, sums of 16 bit contributions, kept in FP32, would travel between the nodes in FP32.
        wire = wire_dtype or src.dtype
        lent = self.buffers.take(src.numel(), dst.dtype, dst.device)
        sums = lent[: src.numel()]
        return RelayHandle(
            self.first.push(src, sums, wire_dtype=wire, tag=tag),
            lambda: self.second.push(sums, dst, wire_dtype=wire, accumulate=accumulate, tag=tag),
            lambda: self.buffers.give(lent),
        )

    def hops(self, src: Tensor, dst: Tensor) -> tuple[Hop, ...]:
        """See `Mover.hops`; what the second hop passes on lies in `dst`."""
        return self.first.hops(src, dst) + self.second.hops(dst, dst)
