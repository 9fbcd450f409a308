"""LNK over two hops: each element crosses into a node once; see [Note: relay] in `relay_plan.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hydra.zero_hetero.link import Handle, Link
from ds_hydra.zero_hetero.mover import Hop
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.transport import Transport


class RelayHandle:
    """A pull or push of two hops; `advance()` waits for the first and begins the second. See `Movement`."""

    def __init__(self, first: Handle, second: Callable[[], Handle]):
        self._first = first
        self._begin_second = second  # reads what the first hop brings, so it may not start before
        self._second: Handle | None = None

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
        if self._second is not None:
            # The first hop has arrived long ago; waiting for it as well frees its sends and its scratch memory.
            self._second.wait()
            self._first.wait()


class RelayLink:
    """Runs one rank's part of two transfer plans, one after the other, as a `Link` runs one. See `Mover`.

    `hops`: of a pull the `RelayPlan` itself, of a push what its `transposed` returns. A pull gives the same bits as a
    `Link`. A push adds up inside each node first and then over the nodes, in rank order both times: the same bits
    each time, but rounded in another order than by a `Link`.
    """

    def __init__(self, hops: tuple[TransferPlan, TransferPlan], rank: int, transport: Transport):
        self.first, self.second = (Link(hop, rank, transport) for hop in hops)

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others, in both hops."""
        return self.first.sent_numel + self.second.sent_numel

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others, in both hops."""
        return self.first.received_numel + self.second.received_numel

    @property
    def pull_scratch(self) -> int:
        """Elements of scratch memory that a pull takes: the first hop's sends may still be on their way."""
        return self.first.pull_scratch + self.second.pull_scratch

    def pull(self, src: Tensor, dst: Tensor, *, tag: int = 0, scratch: Tensor | None = None) -> RelayHandle:
        """See `Mover.pull`; between the hops data lies in `dst`, already at its final places."""
        cut = self.first.pull_scratch
        one, other = (None, None) if scratch is None else (scratch[:cut], scratch[cut:])
        # Both hops may use one tag: a transport delivers what has one tag in the order in which it was sent.
        return RelayHandle(
            self.first.pull(src, dst, tag=tag, scratch=one), lambda: self.second.pull(dst, dst, tag=tag, scratch=other)
        )

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
    ) -> RelayHandle:
        """See `Mover.push`; the sums of a node lie in further memory of src's size, and travel as `wire_dtype` too.

        Only the second hop may accumulate: that memory holds nothing of the phases before.
        """
        # Without this, sums of 16 bit contributions, kept in FP32, would travel between the nodes in FP32.
        wire = wire_dtype or src.dtype
        sums = torch.empty(src.numel(), dtype=dst.dtype, device=dst.device)
        return RelayHandle(
            self.first.push(src, sums, wire_dtype=wire, tag=tag),
            lambda: self.second.push(sums, dst, wire_dtype=wire, accumulate=accumulate, tag=tag),
        )

    def hops(self, src: Tensor, dst: Tensor) -> tuple[Hop, ...]:
        """See `Mover.hops`; what the second hop passes on lies in `dst`."""
        return self.first.hops(src, dst) + self.second.hops(dst, dst)
