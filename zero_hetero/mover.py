"""What moves data from one layout to another: `Link` in one step, the twins' links in several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hydra.zero_hetero.envelope import Envelope
from ds_hydra.zero_hetero.transfer_plan import Slice


class Hop(NamedTuple):
    """One rank's part of one transfer between two flat buffers, for those who check what was moved."""

    rank: int
    sends: tuple[Envelope, ...]
    recvs: tuple[Envelope, ...]
    local: tuple[Slice, ...]
    src: Tensor
    dst: Tensor


class Operations(NamedTuple):
    """What a rank asks of the network to move something once."""

    messages: int  # sends and receives, each run of a message by itself
    teams: tuple[int, ...] = ()  # the members of each collective

    @property
    def number(self) -> int:
        """Operations; a collective is one."""
        return self.messages + len(self.teams)

    @property
    def alone(self) -> int:
        """Sends and receives, if there were no collectives."""
        return self.messages + 2 * sum(members - 1 for members in self.teams)


class Movement(Protocol):
    """A pull or a push under way. Until `wait()` returns, neither of its buffers may be written.

    A movement that is over ignores further calls.
    """

    def advance(self) -> bool:
        """Begin the next step, which needs what the one before brings; False if there is none. See [Note: lanes]."""

    def wait_arrived(self) -> None:
        """Return when the destination is complete; the source may still be on its way."""

    def wait(self) -> None:
        """Return when the destination is complete and the source may be written again."""


class Mover(Protocol):
    """One rank's part of a transfer from a source layout to a destination layout, to be run any number of times.

    A link of twins pulls or pushes; a plain one does either.
    """

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others, in all steps."""

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others, in all steps."""

    @property
    def operations(self) -> Operations:
        """Messages and collectives that this rank takes part in."""


class PullMover(Mover, Protocol):
    """A mover that pulls."""

    @property
    def pull_scratch(self) -> int:
        """Elements of scratch memory that a pull takes."""

    def pull(
        self, src: Tensor, dst: Tensor, *, tag: int = 0, scratch: Tensor | None = None, cast: Tensor | None = None
    ) -> Movement:
        """Start to copy everybody's `src` to everybody's `dst`, the local buffers of the two layouts.

        Both are flat and contiguous; dst's dtype is also the one on the wire. Elements of `dst` outside the plan stay
        as they are. `scratch` is flat memory of that dtype with at least `pull_scratch` elements, the transfer's until
        it has been waited for; None: memory of its own. `cast`, where src has another dtype: memory of its shape and
        the wire's dtype, likewise the transfer's. Raises `PlanError` for buffers that do not fit the plan.
        """

    def hops(self, src: Tensor, dst: Tensor) -> Sequence[Hop]:
        """The transfers that `pull(src, dst)` consists of, in order."""


class PushMover(Mover, Protocol):
    """A mover that pushes."""

    def push_bytes(self, src: torch.dtype, wire: torch.dtype, dst: torch.dtype) -> int:
        """Bytes of scratch memory that a push takes, for the dtypes of source, wire and destination."""

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
        scratch: Tensor | None = None,
    ) -> Movement:
        """Start to sum everybody's `src`, the contributions, into everybody's `dst`.

        Waiting fills the whole of `dst`, with zeros where nobody contributes. With `accumulate` it adds to what
        `dst` holds, as a later phase of a step must: see [Note: order of a sum]. `dst` is not touched before one
        waits, so pushes into one `dst` add up in the order in which they are waited for.

        Sums are taken in dst's dtype and in an order that the plan fixes, so they are the same to the bit each
        time. Messages travel as `wire_dtype` (default: src's own). `scratch`: `push_bytes` bytes, the transfer's
        until it has been waited for; None: memory of its own. Raises `PlanError` for buffers that do not fit the plan.
        """
