"""Tensors under way to other stages: a rank holds a few of them, however many micro-batches a step has."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.testing import run_ranks
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.clock import Stopwatch
from ds_hydra.zero_hetero.transport import TorchTransport, Transport
from tests.support.strict import StrictTransport

STAGES, COUNT, WIDTH = 4, 32, 3


class Part:
    """A range of layers that multiplies what it gets by a weight; no gradient is put off."""

    leaves: frozenset[Any] = frozenset()

    def __init__(self, place: StagePlace) -> None:
        self.place, self.weight = place, torch.full((WIDTH,), 1.5, requires_grad=True)
        put_off = nullcontext()
        self.weight_gradients = mock.Mock(unfinished=frozenset(), of=lambda *_, **__: put_off)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        out = (torch.ones(1, 2, WIDTH) if hidden is None else hidden) * self.weight
        return out.sum() if self.place.is_last else out

    def take_router_loss(self) -> None:
        """It has no routers."""

    def take_imbalances(self) -> tuple[float, ...]:
        """Nor experts."""
        return ()


class Watched(StageRuntime):
    """Notes after each turn's messages how many sends are open."""

    most = 0

    def _communicate(self, run: Any, messages: Any) -> None:
        super()._communicate(run, messages)
        self.most = max(self.most, len(run.sending))


@pytest.mark.drawn
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schedule", ["v", "list", "zb-h1"])
def test_a_rank_holds_as_many_sent_tensors_as_two_for_each_stage(schedule: str, strict: bool) -> None:
    pipeline = place_pipeline(PipelineShape.parse(f"pp{STAGES}/{schedule}"), 0, 2 * STAGES)
    work = Work(forward=10, backward=12, weight=8, kept=2, until_weight=1)
    works = (work,) * COUNT if schedule != "zb-h1" else ()
    known = Batches((-1,) * COUNT, pipeline.parts, works, room=2 * STAGES * pipeline.parts)

    def run(rank: int) -> tuple[int, float]:
        transport: Transport = TorchTransport()
        if strict:
            transport = StrictTransport(dist.new_group())
        parts: list[Any] = [Part(place) for place in StagePlace.all_of(pipeline, rank, lambda _: None)]
        runtime = Watched(
            parts, pipeline, rank, transport, [(WIDTH, WIDTH)] * pipeline.parts, torch.device("cpu"), torch.float32,
            activity=Activity(), watch=Stopwatch(None),
        )  # fmt: skip
        batches = [MicroBatch(Pack((2,)), torch.zeros(1, 2))] * COUNT
        runtime.run(training_slots(schedule, known, STAGES, rank), batches)
        return runtime.most, float(sum(part.weight.grad.sum() for part in parts))

    found = run_ranks(run, STAGES, timeout=60)
    expected = COUNT * 2 * WIDTH * 1.5 ** (STAGES * pipeline.parts - 1)
    assert [total for _, total in found] == [pytest.approx(expected * pipeline.parts)] * STAGES
    assert max(most for most, _ in found) <= 2 * STAGES
