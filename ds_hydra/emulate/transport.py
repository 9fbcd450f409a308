"""A real transport in; one whose messages carry virtual time, and take the time of the true model's bytes, out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hydra.emulate.clock import VirtualClock
from ds_hydra.emulate.small_model import SmallModel
from ds_hydra.simulate.links import LinkModel, Port
from ds_hydra.step.strategy_runtime import PULL_TAG, PUSH_TAG
from ds_hydra.zero_hetero.transport import Parcel, Transport, Work
from ds_hydra.zero_hetero.twin_link import LEAVE_TAG

_HEAD_BYTES = 16  # two FP64 before each message: when its first byte is at the receiver, and how much later than alone


class CabledPort(Port):
    """A port whose transfers between nodes may share their cable with those of another communicator. [Note: ports]"""

    def __init__(self) -> None:
        super().__init__()
        self.beside: CabledPort | None = None
        self._busy: list[tuple[float, float]] = []

    def passes(self, ready_s: float, wire_s: float, *, crosses: bool, known_s: float = 0.0) -> tuple[float, float]:
        """When a transfer has passed, and by how much it is later for the other communicator; `known_s` is what the
        other end has made it later."""
        begin_s, late_s = max(ready_s, self.free_s), 0.0
        if crosses and self.beside is not None:
            for start_s, stop_s in self.beside._busy:
                first_s = max(start_s, begin_s)
                if first_s < begin_s + wire_s + late_s:
                    late_s += max(stop_s - first_s, 0.0)
            late_s = min(late_s, wire_s)
            self.beside.free_s += late_s
        self.free_s = begin_s + wire_s + max(late_s - known_s, 0.0)
        if crosses and self.beside is not None:
            self._busy.append((begin_s, self.free_s))
        return self.free_s, late_s


class ClockedTransport:
    """One rank's side of one communicator, with ports of its own, and perhaps a cable with another [Note: ports]."""

    @property
    def serial(self) -> bool:
        """See `Transport`."""
        return self.inner.serial

    def __init__(self, inner: Transport, rank: int, clock: VirtualClock, links: LinkModel, small: SmallModel):
        self.inner, self.rank, self.clock, self.links, self._small = inner, rank, clock, links, small
        self.incoming, self.outgoing = CabledPort(), CabledPort()
        self.unread = 0  # exchanges whose receives have not been waited for

    def share_cable(self, other: ClockedTransport) -> None:
        """What goes between nodes over the other communicator takes half of the cable while both have some."""
        self.incoming.beside, self.outgoing.beside = other.incoming, other.outgoing
        other.incoming.beside, other.outgoing.beside = self.incoming, self.outgoing

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        """As `Transport.exchange`; the messages leave one after the other, from the rank's present time on."""
        element_bytes = self._element_bytes(tag)
        letters: list[Parcel] = []
        left_s = self.clock.now()
        for peer, message in sends:
            speed = self.links.speed(self.rank, peer)
            wire_s = speed.wire_s(message.numel() * element_bytes)
            crosses = self.links.crosses((self.rank, peer))
            left_s, late_s = self.outgoing.passes(self.clock.now(), wire_s, crosses=crosses)
            letters.append((peer, _letter(left_s - wire_s + speed.latency_s, late_s, message)))
        mail = [(peer, torch.empty(_HEAD_BYTES + _num_bytes(buffer), dtype=torch.uint8)) for peer, buffer in recvs]
        self.unread += bool(recvs)
        work = self.inner.exchange(letters, mail, tag)
        return _Delivery(self, work, recvs, mail, element_bytes=element_bytes, left_s=left_s)

    def _element_bytes(self, tag: int) -> float:
        """The true bytes that an element of the messages with this tag stands for."""
        small = self._small
        if 0 <= tag - PUSH_TAG - LEAVE_TAG < len(small.summed_bytes):
            return small.summed_bytes[tag - PUSH_TAG - LEAVE_TAG]
        if 0 <= tag - PUSH_TAG < len(small.pushed_bytes):
            return small.pushed_bytes[tag - PUSH_TAG]
        if 0 <= tag - PULL_TAG < len(small.pulled_bytes):
            return small.pulled_bytes[tag - PULL_TAG]
        return small.feature_bytes


class _Delivery:
    """One exchange under way. What it brings is read, and the clock set, when it is waited for."""

    def __init__(
        self,
        transport: ClockedTransport,
        work: Work,
        recvs: Sequence[Parcel],
        mail: Sequence[Parcel],
        *,
        element_bytes: float,
        left_s: float,
    ):
        self._transport, self._work, self._element_bytes, self._left_s = transport, work, element_bytes, left_s
        self._recvs, self._mail = list(recvs), list(mail)

    def wait_receives(self) -> None:
        """As `Work.wait_receives`; the rank goes on when the last message has passed its port."""
        if not self._recvs:
            return
        self._work.wait_receives()
        transport = self._transport
        came: list[tuple[float, float, float, bool]] = []  # when the first byte is here, and the wire time
        for (peer, buffer), (_, letter) in zip(self._recvs, self._mail, strict=True):
            buffer.view(torch.uint8).copy_(letter[_HEAD_BYTES:])
            speed = transport.links.speed(peer, transport.rank)
            wire_s = speed.wire_s(buffer.numel() * self._element_bytes)
            head_s, late_s = letter[:_HEAD_BYTES].view(torch.float64).tolist()
            came.append((head_s, wire_s, late_s, transport.links.crosses((peer, transport.rank))))
        self._recvs, self._mail = [], []
        transport.unread -= 1
        # Within an exchange the port serves messages as they come. Exchanges it serves in the order in which they are
        # waited for, which is that of their start: nobody can know what others will still send at an earlier time.
        for head_s, wire_s, late_s, crosses in sorted(came):
            transport.clock.wait_until(transport.incoming.passes(head_s, wire_s, crosses=crosses, known_s=late_s)[0])

    def wait(self) -> None:
        """As `Work.wait`; the rank goes on when its own messages have passed its port too."""
        self.wait_receives()
        self._work.wait()
        self._transport.clock.wait_until(self._left_s)


def _letter(head_s: float, late_s: float, message: Tensor) -> Tensor:
    head = torch.tensor([head_s, late_s], dtype=torch.float64).view(torch.uint8)
    return torch.cat((head, message.detach().view(torch.uint8)))


def _num_bytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()
