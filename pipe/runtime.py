"""Runs one rank's stage through a schedule: actions and micro-batches in, accumulated gradients and the loss out.

The runtime decides nothing: the schedule says what comes next, the plan says every shape and peer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ds_hydra.pipe.p2p import Rows, edge
from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.schedules.actions import (
    Action,
    Slot,
    backward_of_first_push,
    last_weight_gradient,
    turns,
)
from ds_hydra.pipe.stage import StageModule
from ds_hydra.zero_hetero.clock import Kind, Stopwatch
from ds_hydra.zero_hetero.transport import Transport, Work

ArmPushes = Callable[[Collection[nn.Parameter] | None], None]
"""Called when pushes may start as soon as gradients are final: that of each parameter given, when the stage's queue of
weight gradients has finished it, and of others at once; None: of all, when autograd has accumulated into them."""

_TAG = 1 << 20  # apart from the tags of pull and push


@dataclass
class _Run:
    """The tensors of one run of a schedule, by micro-batch.

    They are kept from the action that makes them to the last one that uses them. Without backward actions (`trains`
    False) a tensor is freed as soon as the forward no longer needs it.
    """

    batches: Sequence[MicroBatch]
    loss: Tensor  # () of this rank's micro-batches, FP64
    trains: bool
    split: frozenset[int]  # micro-batches whose backward comes as I and W [Note: split backward]
    inputs: dict[int, Tensor | None] = field(default_factory=dict)  # (1, T_local, width); None on the first stage
    outputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of the outputs
    # What is sent must keep its memory until the send is done, which no later action of this rank says. So a tensor is
    # held here until the run's end; there are at most as many as the schedule has sends.
    sending: list[tuple[Work, list[Tensor]]] = field(default_factory=list)


class Doing(Protocol):
    """Where a rank writes its present activity (`watchdog.activity.Activity`)."""

    now: str


class StageRuntime:
    """Executes schedules for one rank of a pipeline; `widths` are the features that enter and leave its stage."""

    def __init__(
        self,
        module: StageModule,
        pipeline: Pipeline,
        rank: int,
        transport: Transport,
        widths: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        activity: Doing,
        watch: Stopwatch,
    ):
        self.module, self.pipeline, self.rank, self.transport = module, pipeline, rank, transport
        self.index = pipeline.stage_index(rank)
        self.widths, self.device, self.dtype = widths, device, dtype
        self._activity, self._watch = activity, watch
        self.losses: dict[int, Tensor] = {}  # of this stage's micro-batches in the last run, on the last stage

    def run(
        self,
        slots: Sequence[Slot],
        batches: Sequence[MicroBatch],
        arm_pushes: ArmPushes | None = None,
    ) -> Tensor:
        """Run a schedule over this pipeline's micro-batches and return this rank's share of the loss.

        The share is 0 on every stage except the last. Gradients accumulate in the parameters. A schedule without
        backward actions keeps nothing for one. `arm_pushes` is called before the backward that makes this stage's
        gradients final, or the first of the weight gradients that do, unless messages follow it
        [Note: the first push].
        """
        last, first_push = last_weight_gradient(slots), backward_of_first_push(slots)
        # In FP64, since losses of many micro-batches are added; gradients come from each loss itself, not from this.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        split = {action.microbatch for slot in slots for action in slot if action.kind == "input_gradient"}
        run = _Run(batches, loss, last is not None, frozenset(split))
        self.losses = {}
        if self.module.weight_gradients is not None:
            self.module.weight_gradients.forget()
        with torch.set_grad_enabled(run.trains):
            for messages, actions in turns(slots):
                self._communicate(run, messages)
                if first_push in actions and arm_pushes is not None:
                    arm_pushes(self._waiting(actions))
                if actions:
                    self._compute(run, actions)
        with self._lap("send"):
            for work, _ in run.sending:
                work.wait()
        self._activity.now = "push"
        return run.loss

    def _waiting(self, actions: Sequence[Action]) -> frozenset[nn.Parameter] | None:
        """The parameters whose gradients wait for these weight gradients; None where autograd computes them all."""
        queue = self.module.weight_gradients
        return queue.unfinished if queue is not None and actions[0].kind == "weight_gradient" else None

    def _compute(self, run: _Run, actions: Sequence[Action]) -> None:
        """Run an action, or several weight gradients together."""
        kind, microbatch, _ = actions[0]
        queue = self.module.weight_gradients
        if kind == "weight_gradient":
            assert queue is not None, "a stage is built for the schedule of its pipeline"
            self._activity.now = "backward"
            with self._lap(kind, microbatch if len(actions) == 1 else None):
                queue.run([action.microbatch for action in actions])
            return
        put_off: AbstractContextManager[None] = nullcontext()
        if microbatch in run.split:
            assert queue is not None, "a stage is built for the schedule of its pipeline"
            put_off = queue.of(microbatch, backward=kind == "input_gradient")
        if kind == "forward":
            with self._lap(kind, microbatch), put_off:
                self._forward(run, microbatch)
        elif kind == "backward" or kind == "input_gradient":
            with self._lap(kind, microbatch), put_off:
                self._backward(run, microbatch)
            _free_contexts(run, microbatch)

    def _lap(self, kind: Kind, microbatch: int | None = None) -> AbstractContextManager[None]:
        return self._watch.lap(kind, stage=self.index, microbatch=microbatch)

    def _forward(self, run: _Run, microbatch: int) -> None:
        self._activity.now = "forward"
        received = run.inputs.setdefault(microbatch, None)
        out = self.module.forward(received, run.batches[microbatch])
        run.outputs[microbatch] = out
        if self.module.place.is_last:
            run.loss += out.detach()
            self.losses[microbatch] = out.detach()
        if not run.trains:
            _free_contexts(run, microbatch)
            del run.inputs[microbatch]
            if self.module.place.is_last:
                del run.outputs[microbatch]

    def _backward(self, run: _Run, microbatch: int) -> None:
        self._activity.now = "backward"
        out = run.outputs.pop(microbatch)
        # A first stage that is frozen as a whole has nothing to differentiate. Its backward stays in the schedule: the
        # next stage sends its gradient in any case, and that must be received.
        if not out.requires_grad:
            run.gradients.pop(microbatch, None)
            return
        torch.autograd.backward(out, run.gradients.pop(microbatch, None))

    def _communicate(self, run: _Run, messages: Sequence[Action]) -> None:
        """Start all of a slot's messages together; wait for what is received, not for what is sent."""
        # Together: in 1F1B's steady state both neighbours send and receive in the same slot. Were each to finish its
        # send before it opened its receive, each would wait for the other for ever.
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for kind, microbatch, _ in messages:
            pack = run.batches[microbatch].pack
            if kind == "recv_activation":
                buffer = self._empty(pack, self.widths[0])
                receives += _slices(self._edge(-1, pack, incoming=True), buffer)
                run.inputs[microbatch] = buffer
            elif kind == "recv_gradient":
                buffer = self._empty(pack, self.widths[1])
                receives += _slices(self._edge(1, pack, incoming=True), buffer)
                run.gradients[microbatch] = buffer
            elif kind == "send_activation":
                # Detached: the graph ends here. The next stage sends the gradient of this tensor, and the backward
                # begins with it.
                out = run.outputs[microbatch].detach().contiguous()
                sends += _slices(self._edge(1, pack, incoming=False), out)
            else:
                received = run.inputs.pop(microbatch)
                assert received is not None, "a gradient is sent for a received activation"
                assert received.grad is not None, "the received activation took part in the forward"
                sends += _slices(self._edge(-1, pack, incoming=False), received.grad.contiguous())
        if not sends and not receives:
            return
        work = self.transport.exchange(sends, receives, tag=_TAG)
        if receives:
            with self._lap("receive"):
                work.wait()
            for kind, microbatch, _ in messages:
                if kind == "recv_activation":
                    received = run.inputs[microbatch]
                    assert received is not None, "just received"
                    # A leaf of this stage's graph, whose `.grad` is what the stage before is waiting for.
                    received.requires_grad_(run.trains)
        else:
            run.sending.append((work, [tensor for _, tensor in sends]))

    def _edge(self, side: int, pack: Pack, *, incoming: bool) -> list[Rows]:
        """Rows that this rank exchanges with the stage before (-1) or after (+1) it."""
        here, there = self.pipeline.stages[self.index], self.pipeline.stages[self.index + side]
        if incoming:
            return edge(there, here, pack.num_tokens)[1][self.rank]
        return edge(here, there, pack.num_tokens)[0][self.rank]

    def _empty(self, pack: Pack, width: int) -> Tensor:
        start, stop = pack.local
        return torch.empty((1, stop - start, width), device=self.device, dtype=self.dtype)


def _free_contexts(run: _Run, microbatch: int) -> None:
    """Free what slices of a sequence have kept, after the last action that needs it [Note: contexts].

    In training that is the backward of the first slice. It frees each layer's context by itself, but where keys and
    values have no gradient (frozen layers), and there a layer may still be recomputed until now.
    """
    chunk = run.batches[microbatch].pack.chunk
    if chunk is not None and (chunk.start == 0 if run.trains else chunk.is_last):
        chunk.contexts.free()


def _slices(rows: Sequence[Rows], hidden: Tensor) -> list[tuple[int, Tensor]]:
    return [(peer, hidden[0, start:stop].view(-1)) for peer, start, stop in rows]
