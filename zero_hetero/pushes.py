"""Pulled parameters and pushed gradients: when each bucket travels in a step.

[Note: order of pushes] All ranks start their pushes in one order, because a transport may match messages by the order
in which they were started (NCCL does). A backward runs through the layers from last to first, so of one stage bucket
N - 1 is the first and bucket 0 the last. Stages push side by side: with 6 layers in two stages the order is not 5 4 3 2
1 0, in which the first stage would wait with layer 2, and with the memory for it, until the other is done, but 5 2 4 1
3 0. The last stage is done earlier, but it has messages to send until the first stage begins its last backward, within
which that one pushes; so both begin at the same time. Where weights' gradients are put off, all stages end with them.

Example: buckets 0 (embeddings), 1 and 2 (layers), 3 (head) on a rank that holds 0 to 2. With `arm()` bucket 3 leaves
at once: the rank holds no parameter of it, but may own a part of its master gradient, and keeps its place in the order.
When autograd has accumulated into the last parameter of layer 2, bucket 2 leaves, while the backward goes on in layer
1. Were layer 1 ready before layer 2, it would wait. What is left at `finish()`, such as a bucket whose parameters this
backward did not reach, leaves then.

A push of several steps, of which the last sends what the others have brought [Note: twins], goes through all of them
before the next push starts, where later steps are issued at once: steps of two pushes that some ranks start in one
order and others in another could wait for each other. Elsewhere later steps begin in `finish()`, push by push.

A gradient that autograd does not compute itself, but others later from what it leaves them, is final when they say so
by `final()`; `arm()` is told which ones.

Where a job wants each bucket's sum as soon as it is taken, to send it on, it is told of it at the same place of the
order on every rank: of a push after the next one has started, on a device, whose queue beside computing takes the sum
there; on a host in `finish()`.

A push may have to wait for memory, too, until earlier ones are over [Note: scratch memory]. Nobody asks whether they
are over: two ranks of a tensor parallel group may get different answers, and the one would start its next push before
their next collective, the other after it. So the program alone says where a push starts. On a device each starts in
its own hook, and a queue beside computing waits for the memory [Note: lanes]. On a host a wait would hold up the
backward, while another rank may have nothing to push before it has received what this very backward computes: there
only those that find free memory from the start begin in a hook, and all others in `finish()`.

[Note: order of pulls] All ranks start the steps of all pulls in one order, in which the first buckets, which a forward
needs first, are complete while later ones travel. Of three buckets that enter (e) and are gathered (g) it is

    e0 e1 g0 e2 g1 g2        where later steps are issued at once [Note: lanes]
    e0 e1 e2 | g0 g1 g2      where a wait holds up the host: at the bar a rank waits for e0, and everybody has sent it

A gather needs what has entered. So the next bucket's first step comes before it, and fills the time until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.zero_hetero.layout import padded
from ds_hydra.zero_hetero.link import Movement, PullMover, PushMover, Scratch, checksums_of
from ds_hydra.zero_hetero.scratch_plan import end_of, in_turn, side_by_side
from ds_hydra.zero_hetero.transport import HostLane, Lane


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
        apart: Collection[int] = (),
        fill: Callable[[Tensor, Tensor], None] | None = None,
    ):
        """Bucket b is pulled with tag `first_tag + b`; `early`: later steps are issued at once [Note: lanes].

        Shards of the buckets `apart` are in another memory than the buffers: `fill(shard, memory)` casts one into
        memory of the device.

        `scratch` is the rank's, of which the pulls take the first `scratch_bytes` until `finish`; None: memory of their
        own.
        """
        self.links = tuple(links)
        self.shards = tuple(shards)
        self.buffers = tuple(buffers)
        self.first_tag = first_tag
        self.early, self._apart, self._fill = early, frozenset(apart), fill
        self._handles: dict[int, Movement] = {}  # by bucket; empty between `finish` and the next `start`
        pairs = list(zip(self.shards, self.buffers, strict=True))
        casts = [
            padded(shard.numel()) * (shard.dtype != buffer.dtype or index in self._apart)
            for index, (shard, buffer) in enumerate(pairs)
        ]
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
                if index in self._apart and self._fill is not None:
                    self._fill(shard, cast)
                    shard = cast
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
            hops = link.hops(shard.detach().to(buffer), buffer)
            totals += checksums_of(hops, num_ranks, first=count)
            count += len(hops)
        return totals


def finish_steps(handles: Sequence[Movement]) -> None:
    """Begin all steps that are left, one of each at a time."""
    while handles:
        handles = [handle for handle in handles if handle.advance()]


@dataclass(frozen=True, slots=True)
class PushBucket:
    """One bucket as this rank sees it in one strategy.

    `grads` is the flat local gradient buffer (empty where the rank holds nothing), of which the `.grad` of `params`
    are views; `masters` is the rank's master gradient, which the push fills. `link` has the transposed plan; `wire` is
    its `wire_dtype`.
    """

    link: PushMover
    params: tuple[nn.Parameter, ...]
    grads: Tensor
    masters: Tensor
    wire: torch.dtype | None = None


class Pushes:
    """Issues the pushes of one strategy in one order, the same on all ranks; see [Note: order of pushes].

    Life of a phase: `arm()` before the last backward, gradient hooks issue what is ready, `finish()` issues the rest
    and waits. Gradients of earlier micro-batches stay in the local buffers until then: a push sends the sum of all.
    """

    def __init__(
        self,
        buckets: Sequence[PushBucket],
        *,
        first_tag: int = 0,
        order: Sequence[int] | None = None,
        lane: Lane | None = None,
        room: int | None = None,
        turns: Sequence[int] | None = None,
        scratch: Scratch | None = None,
    ):
        """Bucket b is pushed with tag `first_tag + b`; `lane` is the rank's, None: that of a host. `order`: of the
        buckets' pushes, the same on all ranks; None: the last one first.

        `room`: bytes of scratch memory that open pushes may take together, if none of them alone needs more; None:
        as many as all of them need. `turns`, in the order of starting: how many pushes must be over before each, as if
        there were as little room for them; None: as follows from `room`. `scratch` is the rank's, of which the pushes
        take the first `scratch_bytes`; None: memory of their own.
        """
        self.buckets = tuple(buckets)
        self.first_tag = first_tag
        self._lane = lane or HostLane()
        self._order = tuple(reversed(range(len(self.buckets)))) if order is None else tuple(order)
        sizes = tuple(self._needed(self.buckets[index]) for index in self._order)
        self._windows = in_turn(sizes, sum(sizes) if room is None or turns is not None else room)
        if turns is not None:
            self._windows = tuple(w._replace(after=after) for w, after in zip(self._windows, turns, strict=True))
        self.scratch_bytes = end_of(self._windows)
        self._scratch = scratch or Scratch(self.buckets[0].grads.device, self.scratch_bytes)
        self._armed = self._accumulate = False
        self._unready: list[set[int]] = [set() for _ in self.buckets]  # per bucket: parameters still to come
        self._handles: list[Movement] = []  # of the pushes that have started, in their order
        self._over = 0  # how many of them are over: their sums are taken, their memory is free
        self._told = 0  # of how many sums `_summed` was told
        self._summed: Callable[[int], None] | None = None
        self._mark: Any = None  # of the lane: all that was started in it
        self._places = {
            param: (index, position)
            for index, bucket in enumerate(self.buckets)
            for position, param in enumerate(bucket.params)
        }
        self._hooks = [param.register_post_accumulate_grad_hook(self._hook()) for param in self._places]

    def arm(self, *, accumulate: bool = False, waiting: Collection[nn.Parameter] | None = None) -> None:
        """From now on a gradient is final once autograd has accumulated into it: this backward is the last.

        `accumulate`: add to what the master gradients hold, the sum of the step's earlier phases; the same on all
        ranks. Else they are overwritten. `waiting`: only the gradients of these parameters are not final yet, each
        until autograd has accumulated into it or `final` names it; None: of all.
        """
        if self._armed or self._handles:
            raise RuntimeError("pushes are armed twice in one phase; call finish() before the next phase")
        self._armed = True
        self._accumulate = accumulate
        self._unready = [set() for _ in self.buckets]
        for param in self._places if waiting is None else waiting:
            index, position = self._places[param]
            self._unready[index].add(position)
        self._issue_ready()  # those that this rank holds nothing of, as far as nothing comes before them

    def fill(self, masters: Sequence[Tensor], summed: Callable[[int], None] | None = None) -> None:
        """From now on the pushes of the buckets fill these master gradients. `summed` is told the number of each bucket
        whose sum is taken, all ranks in one order among their pushes, so it may begin to send the sum on."""
        self.buckets = tuple(replace(one, masters=to) for one, to in zip(self.buckets, masters, strict=True))
        self._summed = summed

    def finish(self, *, accumulate: bool = False) -> None:
        """Issue every push that is left, then wait for all: the master gradients are complete.

        Parameters that the last backward did not reach, and ranks that had no backward at all, are final now.
        `accumulate` as in `arm`; give the same to both.
        """
        if not self._armed:
            self.arm(accumulate=accumulate)
        if accumulate != self._accumulate:
            raise RuntimeError(
                f"pushes were armed with accumulate={self._accumulate} but finish with accumulate={accumulate}; some "
                "buckets may have left already, so give both the same"
            )
        self._unready = [set() for _ in self.buckets]
        self._issue_ready(ending=True)
        self._armed = False
        if self._mark is not None:
            self._lane.wait(self._mark)
            self._mark = None
        # Each is over before the sum of the next is taken, which may lie where this one's gradients were sent from. All
        # its steps come before any of the next: a rank without memory for that one starts it only then.
        for count in range(1, len(self._handles) + 1):
            self._tell(count)
        self._handles, self._over, self._told = [], 0, 0

    def close(self) -> None:
        """Take the hooks off; no push is waited for."""
        for handle in self._hooks:
            handle.remove()

    def final(self, parameter: nn.Parameter) -> None:
        """Nothing more is added to the gradient of a parameter in this phase, if the pushes are armed."""
        if self._armed:
            index, position = self._places[parameter]
            self._unready[index].discard(position)
            self._issue_ready()

    def _hook(self) -> Callable[[Tensor], None]:
        # The hook keeps no hold on `self`. Python's garbage collector does not see through hooks of tensors: with a
        # ring parameter -> hook -> self -> parameter, no parameter of a strategy that is dropped would ever be freed.
        me = weakref.ref(self)

        def on_accumulated(parameter: Tensor) -> None:
            pushes = me()
            if pushes is not None:
                assert isinstance(parameter, nn.Parameter), "it was registered on one"
                pushes.final(parameter)

        return on_accumulated

    def _issue_ready(self, *, ending: bool = False) -> None:
        """Start pushes in their order, up to the first that lacks a gradient or, on a host before the end, memory."""
        while len(self._handles) < len(self.buckets):
            index = self._order[len(self._handles)]
            window = self._windows[len(self._handles)]
            if self._unready[index] or (window.after > 0 and not self._lane.early and not ending):
                return
            bucket = self.buckets[index]
            with self._lane.aside():
                self._end(window.after)
                handle = bucket.link.push(
                    bucket.grads,
                    bucket.masters,
                    wire_dtype=bucket.wire,
                    accumulate=self._accumulate,
                    tag=self.first_tag + index,
                    scratch=self._scratch.at(window, torch.uint8),
                )
                self._handles.append(handle)
                if self._lane.early:
                    finish_steps([handle])
                    if self._summed is not None:
                        # One behind, so that this push is on its way while the sum of the one before is taken.
                        self._tell(len(self._handles) - 1)
                self._mark = self._lane.mark()

    def _end(self, count: int) -> None:
        """Take the sums of the first `count` pushes, which are over then."""
        for handle in self._handles[self._over : count]:
            handle.wait()
        self._over = max(self._over, count)

    def _tell(self, count: int) -> None:
        """Take the sums of the first `count` pushes, and say so of those of which nobody was told."""
        self._end(count)
        if self._summed is not None:
            for index in self._order[self._told : count]:
                self._summed(index)
            self._told = max(self._told, count)

    def _needed(self, bucket: PushBucket) -> int:
        """Bytes of scratch memory that a bucket's push takes."""
        grads = bucket.grads.dtype
        return bucket.link.push_bytes(grads, bucket.wire or grads, bucket.masters.dtype)
