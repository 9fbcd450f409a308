"""Runs one rank's stage through a schedule: actions and micro-batches in, accumulated gradients and the loss out.

The runtime decides nothing: the schedule says what comes next, the plan says every shape and peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ds_hydra.pipe.p2p import Rows, edge
from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.schedules.actions import Action, Slot, backward_of_first_push, last_weight_gradient
from ds_hydra.pipe.stage import StageModule
from ds_hydra.zero_hetero.clock import Kind, Stopwatch
from ds_hydra.zero_hetero.transport import Transport, Work

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
        before_last_backward: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run a schedule over this pipeline's micro-batches and return this rank's share of the loss.

        The share is 0 on every stage except the last. Gradients accumulate in the parameters. A schedule without
        backward actions keeps nothing for one. `before_last_backward` is called before the backward that makes this
        stage's gradients final, unless messages follow it [Note: the first push].
        """
        last, first_push = last_weight_gradient(slots), backward_of_first_push(slots)
        # In FP64, since losses of many micro-batches are added; gradients come from each loss itself, not from this.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        run = _Run(batches, loss, trains=last is not None)
        self.losses = {}
        with torch.set_grad_enabled(run.trains):
            for slot in slots:
                self._communicate(run, [action for action in slot if not action.computes])
                for action in slot:
                    if action == first_push and before_last_backward is not None:
                        before_last_backward()
                    if action.kind == "forward":
                        with self._lap("forward", action.microbatch):
                            self._forward(run, action.microbatch)
                    elif action.kind == "backward":
                        with self._lap("backward", action.microbatch):
                            self._backward(run, action.microbatch)
                        _free_contexts(run, action.microbatch)
                    else:
                        assert not action.computes, f"{action}: no schedule of the registry splits a backward"
        with self._lap("send"):
            for work, _ in run.sending:
                work.wait()
        self._activity.now = "push"
        return run.loss

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
