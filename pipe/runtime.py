"""Runs one rank's stage through a schedule: actions and micro-batches in, accumulated gradients and the loss out.

The runtime decides nothing: the schedule says what comes next, the plan says every shape and peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from ds_hydra.pipe.p2p import Rows, edge
from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.rows import MicroBatch
from ds_hydra.pipe.schedules.one_f_one_b import Action, Step
from ds_hydra.pipe.stage import StageModule
from ds_hydra.zero_hetero.transport import Transport, Work

_TAG = 1 << 20  # apart from the tags of pull and push


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
    ):
        self.module, self.pipeline, self.rank, self.transport = module, pipeline, rank, transport
        self.index = pipeline.stage_index(rank)
        self.widths, self.device, self.dtype = widths, device, dtype
        self.phase = "forward"  # or "backward": for reports of what a rank was doing
        self.losses: dict[int, Tensor] = {}  # of this stage's micro-batches in the last run, on the last stage

    def run(
        self,
        steps: Sequence[Step],
        batches: Sequence[MicroBatch],
        before_last_backward: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run a schedule over this pipeline's micro-batches; returns this rank's share of the loss, 0 but on the
        last stage. Gradients accumulate in the parameters. Without backward actions nothing is kept for one.

        `before_last_backward` is called when the gradients of this stage are about to become final.
        """
        self._batches = batches
        self._inputs: dict[int, Tensor | None] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._sending: list[tuple[Work, list[Tensor]]] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.losses = {}
        self.compute_s = 0.0
        last_backward = max((i for i, step in enumerate(steps) if _has(step, "backward")), default=-1)
        with torch.set_grad_enabled(last_backward >= 0):
            for position, step in enumerate(steps):
                self._communicate([action for action in step if action.kind not in ("forward", "backward")])
                began = perf_counter()
                for kind, microbatch in step:
                    if kind == "forward":
                        self._forward(microbatch, keep=last_backward >= 0)
                    elif kind == "backward":
                        if position == last_backward and before_last_backward is not None:
                            before_last_backward()
                        self._backward(microbatch)
                self.compute_s += perf_counter() - began
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        self.phase = "push"
        return self._loss

    def _forward(self, microbatch: int, *, keep: bool) -> None:
        self.phase = "forward"
        received = self._inputs.setdefault(microbatch, None)
        out = self.module.forward(received, self._batches[microbatch])
        self._outputs[microbatch] = out
        if self.module.place.is_last:
            self._loss += out.detach()
            self.losses[microbatch] = out.detach()
        if not keep:
            del self._inputs[microbatch]
            if self.module.place.is_last:
                del self._outputs[microbatch]

    def _backward(self, microbatch: int) -> None:
        self.phase = "backward"
        out = self._outputs.pop(microbatch)
        if not out.requires_grad:  # everything up to here is frozen
            self._gradients.pop(microbatch, None)
            return
        torch.autograd.backward(out, self._gradients.pop(microbatch, None))

    def _communicate(self, actions: Sequence[Action]) -> None:
        """Start all of a step's messages together; wait for what is received, not for what is sent."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for kind, microbatch in actions:
            if kind == "recv_activation":
                buffer = self._empty(microbatch, self.widths[0])
                receives += _slices(self._edge(-1, microbatch, incoming=True), buffer)
                self._inputs[microbatch] = buffer
            elif kind == "recv_gradient":
                buffer = self._empty(microbatch, self.widths[1])
                receives += _slices(self._edge(1, microbatch, incoming=True), buffer)
                self._gradients[microbatch] = buffer
            elif kind == "send_activation":
                out = self._outputs[microbatch].detach().contiguous()
                sends += _slices(self._edge(1, microbatch, incoming=False), out)
            else:
                received = self._inputs.pop(microbatch)
                assert received is not None, "a gradient is sent for a received activation"
                assert received.grad is not None, "the received activation took part in the forward"
                sends += _slices(self._edge(-1, microbatch, incoming=False), received.grad.contiguous())
        if not sends and not receives:
            return
        work = self.transport.exchange(sends, receives, tag=_TAG)
        if receives:
            work.wait()
            for kind, microbatch in actions:
                if kind == "recv_activation":
                    received = self._inputs[microbatch]
                    assert received is not None, "just received"
                    received.requires_grad_(torch.is_grad_enabled())
        else:
            self._sending.append((work, [tensor for _, tensor in sends]))

    def _edge(self, side: int, microbatch: int, *, incoming: bool) -> list[Rows]:
        """Rows that this rank exchanges with the stage before (-1) or after (+1) it."""
        here, there = self.pipeline.stages[self.index], self.pipeline.stages[self.index + side]
        num_tokens = self._batches[microbatch].pack.num_tokens
        if incoming:
            return edge(there, here, num_tokens)[1][self.rank]
        return edge(here, there, num_tokens)[0][self.rank]

    def _empty(self, microbatch: int, width: int) -> Tensor:
        start, stop = self._batches[microbatch].pack.local
        return torch.empty((1, stop - start, width), device=self.device, dtype=self.dtype)


def _slices(rows: Sequence[Rows], hidden: Tensor) -> list[tuple[int, Tensor]]:
    return [(peer, hidden[0, start:stop].view(-1)) for peer, start, stop in rows]


def _has(step: Step, kind: str) -> bool:
    return any(action.kind == kind for action in step)
