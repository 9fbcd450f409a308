"""Runs one rank's stage through a schedule.

[Note: what is sent]
A tensor that is sent keeps its memory until the send is over. Where exchanges end in the order of their start, all
before one that was waited for are over, and are given back without a wait. Elsewhere a rank keeps a bounded number of
sends open, two for each stage, and waits for the oldest beyond it. That cannot stand still: slots come to their end
even if every message is waited for where it begins (`schedules/check.py`). The bound only has to be so large that
the wait is a short one: a receiver is seldom more than a few micro-batches behind.

The runtime decides nothing: the schedule says what comes next, the plan says every shape and peer. A stage has one or
two parts, which are ranges of layers [Note: virtual stages]; the last rank of a V hands over from one to the other
without a message, what goes forward as well as its gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.rows import MicroBatch, Pack, Rows, edge
from ds_hydra.pipe.schedules.actions import (
    Action,
    Slot,
    backward_of_first_push,
    first_backward,
    forward_of_last_layers,
    last_weight_gradient,
    turns,
)
from ds_hydra.pipe.schedules.registry import open_sends
from ds_hydra.pipe.stage import StageModule
from ds_hydra.pipe.weight_gradients import SplitBackward
from ds_hydra.zero_hetero.clock import Kind, Stopwatch
from ds_hydra.zero_hetero.transport import Transport, Work


class Moments(Protocol):
    """Who is told of moments of a run: it owns the parameters' memory and that of their gradients."""

    def forwarded(self) -> None:
        """All layers have run a forward."""

    def before_gradients(self) -> None:
        """The first gradients are computed next."""

    def before_last_gradients(self, waiting: Collection[nn.Parameter]) -> None:
        """Pushes may start as soon as gradients are final: that of each parameter given, when autograd or the stage's
        queue of weight gradients has added the last to it, and of others at once. It is not told where messages follow
        the last gradients."""


_At = tuple[int, int]
"""A micro-batch and a part of the stage."""

_TAG = 1 << 20  # apart from the tags of pull and push


@dataclass
class _Run:
    """The tensors of one run of a schedule, by micro-batch and part.

    They are kept from the action that makes them to the last one that uses them. Without backward actions (`trains`
    False) a tensor is freed as soon as the forward no longer needs it.
    """

    batches: Sequence[MicroBatch]
    loss: Tensor  # () of this rank's micro-batches, FP64
    trains: bool
    split: frozenset[_At]  # those whose backward comes as I and W [Note: split backward]
    inputs: dict[_At, Tensor | None] = field(default_factory=dict)  # (1, T_local, width); None on the first stage
    outputs: dict[_At, Tensor] = field(default_factory=dict)
    gradients: dict[_At, Tensor] = field(default_factory=dict)  # of the outputs
    sending: deque[tuple[Work, list[Tensor]]] = field(default_factory=deque)  # see [Note: what is sent]


class Doing(Protocol):
    """Where a rank writes its present activity (`watchdog.Activity`)."""

    now: str

    def __call__(self, name: str) -> AbstractContextManager[None]: ...


class StageRuntime:
    """Executes schedules for one rank of a pipeline; `widths` are the features that enter and leave each of its
    parts."""

    def __init__(
        self,
        parts: Sequence[StageModule],
        pipeline: Pipeline,
        rank: int,
        transport: Transport,
        widths: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
        *,
        activity: Doing,
        watch: Stopwatch,
    ):
        self.parts, self.pipeline, self.rank, self.transport = tuple(parts), pipeline, rank, transport
        self._queues = [part.weight_gradients for part in parts]
        self.index = pipeline.stage_index(rank)
        self.widths, self.device, self.dtype = widths, device, dtype
        self._activity, self._watch = activity, watch
        self.present: Action | None = None  # what it computes; of several weight gradients the first
        self.losses: dict[int, Tensor] = {}  # of this stage's micro-batches in the last run, on the last stage
        self.router_loss = torch.zeros((), dtype=torch.float64, device=device)  # of all of them, in the last run
        self.imbalances: tuple[tuple[float, ...], ...] = ()  # of spread experts in the last run, by part and layer

    def run(
        self,
        slots: Sequence[Slot],
        batches: Sequence[MicroBatch],
        moments: Moments | None = None,
    ) -> Tensor:
        """Run a schedule over this pipeline's micro-batches and return this rank's share of the loss.

        The share is 0 on every stage except the last, but for the losses of its routers, which `router_loss` has apart.
        Gradients accumulate in the parameters. A schedule without
        backward actions keeps nothing for one. `moments` is told of the last gradients before the backward that makes
        this stage's gradients final, or the first of the weight gradients that do, unless messages follow it
        [Note: the first push].
        """
        last, first_push = last_weight_gradient(slots), backward_of_first_push(slots)
        forwarded, begins = forward_of_last_layers(slots), first_backward(slots)
        # In FP64, since losses of many micro-batches are added; gradients come from each loss itself, not from this.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        split = {(microbatch, part) for slot in slots for kind, microbatch, part in slot if kind == "input_gradient"}
        run = _Run(batches, loss, last is not None, frozenset(split))
        self.losses, self.router_loss = {}, torch.zeros_like(loss)
        for part in self.parts:
            part.take_router_loss()  # of a run that an error has ended
            part.take_imbalances()
        for queue in self._queues:
            if queue is not None:
                queue.forget()
        with torch.set_grad_enabled(run.trains):
            for messages, actions in turns(slots):
                self._communicate(run, messages)
                if moments is not None and begins in actions:
                    moments.before_gradients()
                if moments is not None and first_push in actions:
                    moments.before_last_gradients(self._waiting(actions))
                self.present = actions[0] if actions else None
                if actions:
                    self._compute(run, actions)
                if moments is not None and forwarded in actions:
                    moments.forwarded()
        self.present = None
        with self._lap("send"):
            self._end_sends(run, 0)
        self._activity.now = "push"
        self.imbalances = tuple(part.take_imbalances() for part in self.parts)
        for taken in [part.take_router_loss() for part in self.parts]:
            if taken is not None:
                self.router_loss = self.router_loss + taken
        return run.loss + self.router_loss

    def _waiting(self, actions: Sequence[Action]) -> set[nn.Parameter]:
        """The parameters whose gradients lack what these actions add, after which nothing is added any more."""
        waiting = {parameter for queue in self._queues if queue is not None for parameter in queue.unfinished}
        if actions[0].kind == "backward":
            waiting |= self.parts[actions[0].part].leaves
        return waiting

    def _compute(self, run: _Run, actions: Sequence[Action]) -> None:
        """Run an action, or several weight gradients together."""
        kind, microbatch, part = actions[0]
        if kind == "weight_gradient":
            with self._lap(kind, *((microbatch, part) if len(actions) == 1 else (None, 0))):
                self._weight_gradients(actions)
            return
        put_off: AbstractContextManager[None] = nullcontext()
        if (microbatch, part) in run.split:
            put_off = self._queue(part).of(microbatch, backward=kind == "input_gradient")
        if kind == "forward":
            with self._lap(kind, microbatch, part), put_off:
                self._forward(run, (microbatch, part))
        elif kind == "backward" or kind == "input_gradient":
            with self._lap(kind, microbatch, part), put_off:
                self._backward(run, (microbatch, part))
            self._free_contexts(run, (microbatch, part))

    def _weight_gradients(self, actions: Sequence[Action]) -> None:
        self._activity.now = "backward"
        for part in reversed(range(len(self.parts))):  # the layers nearest to the loss first, as their pushes go
            of_part = [action.microbatch for action in actions if action.part == part]
            if of_part:
                self._queue(part).run(of_part)

    def _queue(self, part: int) -> SplitBackward:
        queue = self._queues[part]
        assert queue is not None, "a stage is built for the schedule of its pipeline"
        return queue

    def _lap(self, kind: Kind, microbatch: int | None = None, part: int = 0) -> AbstractContextManager[None]:
        return self._watch.lap(kind, stage=self.index, microbatch=microbatch, part=part)

    def _forward(self, run: _Run, at: _At) -> None:
        self._activity.now = "forward"
        microbatch, part = at
        place = self.parts[part].place
        if place.turns:
            handed = run.outputs[microbatch, 0] if run.trains else run.outputs.pop((microbatch, 0))
            run.inputs[at] = handed.detach().requires_grad_(run.trains)
        received = run.inputs.setdefault(at, None)
        out = self.parts[part].forward(received, run.batches[microbatch])
        run.outputs[at] = out
        if place.is_last:
            run.loss += out.detach()
            self.losses[microbatch] = out.detach()
        if not run.trains:
            self._free_contexts(run, at)
            del run.inputs[at]
            if place.is_last:
                del run.outputs[at]

    def _backward(self, run: _Run, at: _At) -> None:
        self._activity.now = "backward"
        microbatch, part = at
        out, gradient = run.outputs.pop(at), run.gradients.pop(at, None)
        # A first stage that is frozen as a whole has nothing to differentiate. Its backward stays in the schedule: the
        # next stage sends its gradient in any case, and that must be received.
        if out.requires_grad:
            torch.autograd.backward(out, gradient)
        if self.parts[part].place.turns:
            run.gradients[microbatch, 0] = _gradient(run, at)

    def _communicate(self, run: _Run, messages: Sequence[Action]) -> None:
        """Start all of a slot's messages together; wait for what is received, not for what is sent."""
        # Together: in 1F1B's steady state both neighbours send and receive in the same slot. Were each to finish its
        # send before it opened its receive, each would wait for the other for ever.
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for message in messages:
            kind, microbatch, part = message
            at, pack = (microbatch, part), run.batches[microbatch].pack
            rows = self._edge(message.side, pack, incoming=not message.sends)
            if kind == "recv_activation":
                buffer = self._empty(pack, self.widths[part][0])
                receives += _slices(rows, buffer)
                run.inputs[at] = buffer
            elif kind == "recv_gradient":
                buffer = self._empty(pack, self.widths[part][1])
                receives += _slices(rows, buffer)
                run.gradients[at] = buffer
            elif kind == "send_activation":
                # Detached: the graph ends here. The next stage sends the gradient of this tensor, and the backward
                # begins with it.
                sends += _slices(rows, run.outputs[at].detach().contiguous())
            else:
                sends += _slices(rows, _gradient(run, at).contiguous())
        if not sends and not receives:
            return
        work = self.transport.exchange(sends, receives, tag=_TAG)
        if receives:
            with self._lap("receive"):
                work.wait()
                if self.transport.serial:
                    self._end_sends(run, 0)
            for kind, microbatch, part in messages:
                if kind == "recv_activation":
                    received = run.inputs[microbatch, part]
                    assert received is not None, "just received"
                    # A leaf of this stage's graph, whose `.grad` is what the stage before is waiting for.
                    received.requires_grad_(run.trains)
        else:
            run.sending.append((work, [tensor for _, tensor in sends]))
            if len(run.sending) > (bound := open_sends(len(self.pipeline.stages))):
                with self._lap("send"):
                    self._end_sends(run, bound)

    def _end_sends(self, run: _Run, open_sends: int) -> None:
        """Wait for the oldest sends until this many are left, and give their memory back."""
        while len(run.sending) > open_sends:
            work, _ = run.sending.popleft()
            work.wait()

    def _edge(self, side: int, pack: Pack, *, incoming: bool) -> list[Rows]:
        """Rows that this rank exchanges with the stage before (-1) or after (+1) it."""
        here, there = self.pipeline.stages[self.index], self.pipeline.stages[self.index + side]
        sharding = self.parts[0].place.token_sharding
        if incoming:
            return edge(there, here, pack.num_tokens, token_sharding=sharding)[1][self.rank]
        return edge(here, there, pack.num_tokens, token_sharding=sharding)[0][self.rank]

    def _free_contexts(self, run: _Run, at: _At) -> None:
        """Free what slices of a sequence have kept, after the last action that needs it [Note: contexts].

        In training that is the backward of the first slice. It frees each layer's context by itself, but where keys and
        values have no gradient (frozen layers), and there a layer may still be recomputed until now.
        """
        microbatch, part = at
        chunk = run.batches[microbatch].pack.chunk
        if chunk is None:
            return
        # Of two parts the first one's backward comes last, and the second one's forward.
        if (chunk.start == 0 and part == 0) if run.trains else (chunk.is_last and part == len(self.parts) - 1):
            chunk.contexts.free()

    def _empty(self, pack: Pack, width: int) -> Tensor:
        start, stop = pack.local
        rows = (stop - start) // self.parts[0].place.shards
        return torch.empty((1, rows, width), device=self.device, dtype=self.dtype)


def _gradient(run: _Run, at: _At) -> Tensor:
    """The gradient of what a part has received, which is not kept any longer; zero where it was detached."""
    received = run.inputs.pop(at)
    assert received is not None, "a gradient is handed back for a received activation"
    return torch.zeros_like(received) if received.grad is None else received.grad


def _slices(rows: Sequence[Rows], hidden: Tensor) -> list[tuple[int, Tensor]]:
    return [(peer, hidden[0, start:stop].view(-1)) for peer, start, stop in rows]
