"""A small model and costs in; stages whose layers compute nothing and let virtual time pass out.

[Note: counted gradients]
What an emulated stage hands on is made so that a mistake anywhere shows in two numbers. The loss of a token is its
weight, so the step's loss is the sum of the weights of all targets: 1. A layer hands its input on, and the gradient of
each of its elements is the sum of the weights that come back through it. Over all micro-batches, pipelines and sequence
parallel ranks that is 1 again, so once everything has been pushed, every master gradient is 1 (or 2, for an embedding
that the head shares). A micro-batch that runs twice, a message that is lost and a push that is added to the wrong place
all change the loss or the gradient's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.emulate.clock import VirtualClock
from ds_hydra.emulate.small_model import SmallModel
from ds_hydra.emulate.transport import ClockedTransport
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import ModelPlan, ShardRule
from ds_hydra.pipe.placement import Pipeline
from ds_hydra.pipe.rows import AT_ONCE, MicroBatch
from ds_hydra.pipe.schedules.registry import splits_backward, weighs
from ds_hydra.pipe.schedules.simulate import SHARES
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.plan.phase import MicroBatchPlan, Span
from ds_hydra.plan.works import stretch, work_of


class Cost(Protocol):
    """What a stage takes for a micro-batch."""

    def load_ms(self, lengths: Sequence[int], starts: Sequence[int], /) -> float:
        """Milliseconds of forward and backward of sequences, or slices, of these lengths that begin at these tokens."""


def at_rank_0(pipeline: Pipeline) -> Pipeline:
    """The same pipeline on the first ranks: composed strategies have a candidate's pipelines elsewhere, at its cost."""
    first = min(pipeline.ranks)
    stages = (replace(stage, ranks=tuple(rank - first for rank in stage.ranks)) for stage in pipeline.stages)
    return replace(pipeline, stages=tuple(stages))


class EmulatedSource:
    """A `ModelSource` of emulated stages.

    The engine is assembled from it, and then says what its pipelines cost (`prices`) and by which transport this rank
    pulls (`links`); only after that a stage can run.
    """

    vocab_size: int | None = None
    valued: bool = False
    notes: tuple[str, ...] = ()
    balances = False
    drawing: frozenset[str] = frozenset()
    options = AS_WRITTEN
    overlap = AT_ONCE

    def __init__(self, small: SmallModel, values: Mapping[str, Tensor], clock: VirtualClock):
        self.small, self.plan, self.clock = small, small.plan, clock
        self.values: Mapping[str, Tensor] = values
        self.aliases: Mapping[str, str] = {name: name for name in values}
        self.prices: dict[Pipeline, Sequence[Cost]] = {}  # by stage, of pipelines `at_rank_0`
        self.costs: dict[Pipeline, tuple[SchemeCost, Shares]] = {}  # what divides the time
        self.links: Sequence[ClockedTransport] = ()  # of pulls and pushes
        self.pace = 1.0  # how many times as long as its costs say this rank's device takes

    def width(self, layer: int) -> int:
        """Features of the hidden states that enter a layer: one that stands for all."""
        return 1

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule:
        """One rank's emulated stage."""
        return EmulatedStage(self, place)

    def with_options(self, options: StageOptions, why: str) -> EmulatedSource:
        """Nothing checks an emulated job."""
        raise AssertionError(why)


class EmulatedStage(StageModule):
    """A stage of parts, in order: what comes before the layers, each layer, what follows them."""

    def __init__(self, source: EmulatedSource, place: StagePlace):
        plan, stage = source.plan, place.stage
        held = {"first": plan.first} if place.is_first else {}
        held |= {str(index): plan.layers[index] for index in range(stage.first_layer, stage.last_layer)}
        held |= {"last": plan.last} if place.is_last else {}
        rules = {param.name: param.rule for bucket in plan.buckets for param in bucket.params}
        scales = {name: _scale(rule.of(stage.tp), stage.tp) for name, rule in rules.items()}
        # Of whole experts that all ranks of a stage share out, a rank's are reached by the tokens of all of them.
        over_all = stage.ep > stage.tp
        self.shared_out = frozenset(name for name, rule in rules.items() if over_all and rule.by_width is not None)
        # Layers take equal shares of the time of the whole stage; the cost table does not tell embeddings and
        # head apart.
        share = 1.0 / place.pipeline.stages[place.index].num_layers
        parts = {name: _Part(self, share if name.isdigit() else 0.0, scales) for name in held}
        names = {f"{part}.{name}": name for part, members in held.items() for name in members}
        super().__init__(nn.ModuleDict(parts), place, names)
        self.queue = _Queue(source.clock) if splits_backward(place.schedule) else None
        self.weight_gradients = self.queue
        self.clock, self._source, self._parts = source.clock, source, tuple(parts.values())
        self._priced = at_rank_0(place.pipeline)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """See `StageModule.forward`; takes a share of the time that the cost table gives the micro-batch."""
        links, seconds = self._source.links, self._seconds(batch)
        assert links, "a stage runs when the engine is assembled"
        # Only while parameters are still on their way can ranks of a stage differ from layer to layer.
        apart = self.meet(sum(one.unread for one in links))
        x = torch.zeros_like(batch.position_ids, dtype=torch.float32).unsqueeze(-1) if hidden is None else hidden
        for part in self._parts:
            x = part(x, seconds, apart)
        if not self.place.is_last:
            return x
        assert batch.weights is not None, "the last stage was given no weights"
        assert batch.labels is not None, "the last stage was given no labels"
        return ((1.0 + x[0, :, 0].double()) * batch.weights * (batch.labels != IGNORED)).sum()

    def _seconds(self, batch: MicroBatch) -> dict[str, float]:
        """What each kind of action takes of all layers of the stage."""
        pack = batch.pack
        starts = (pack.past, *[0] * (len(pack.lengths) - 1))
        load_s = self._source.prices[self._priced][self.place.index].load_ms(pack.lengths, starts) / 1e3
        load_s *= self._source.pace
        if not weighs(self.place.schedule) and not batch.recompute:
            return {kind: share * load_s for kind, share in SHARES.items()}
        spans = tuple(Span(0, start, start + length) for start, length in zip(starts, pack.lengths, strict=True))
        planned, (cost, shares) = MicroBatchPlan(spans, batch.recompute), self._source.costs[self._priced]
        load_s *= stretch(planned, cost, shares)
        work = work_of(planned, cost, shares, parts=1, followed=False)
        return {kind: load_s * work.takes(kind) / (work.forward + work.takes("backward")) for kind in SHARES}

    def meet(self, unread: int = 0) -> bool:
        """All ranks of the stage go on at the latest of their times; whether any of them has `unread` pulls."""
        latest = torch.tensor([self.clock.now(), unread], dtype=torch.float64)
        for group in (self.place.tp_group, self.place.sp_group):
            if group is not None:
                dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
        self.clock.wait_until(float(latest[0]))
        return bool(latest[1])

    def begins_backward(self, part: _Part) -> bool:
        """Whether a backward of this stage comes to this part first."""
        return part is self._parts[-1]


class _Part(nn.Module):
    """Parameters that are used together, their `share` of the stage's time, and scales of gradients by name."""

    def __init__(self, stage: EmulatedStage, share: float, scales: Mapping[str, float | Tensor]):
        super().__init__()
        self._stage, self._share, self._scales = stage, share, scales

    def forward(self, x: Tensor, seconds: Mapping[str, float], apart: bool) -> Tensor:
        """Hooks that ran before this have waited for the pulls of the parameters."""
        if apart:
            self._stage.meet()
        self._stage.clock.compute(self._share * seconds["forward"])
        params = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        return _CountedGradient.apply(x, self, seconds, [self._scales[name] for name in params], *params.values())

    def shared_out(self) -> list[bool]:
        """For each parameter, whether it is of experts that all ranks of the stage share out."""
        return [name in self._stage.shared_out for name, parameter in self._parameters.items() if parameter is not None]

    def over_sequence_ranks(self, counted: Tensor) -> Tensor:
        """The sum of what sequence parallel ranks have, ()."""
        total = counted.clone()
        dist.all_reduce(total, group=self._stage.place.sp_group)
        return total

    def backward(self, seconds: Mapping[str, float]) -> None:
        """The time that the backward takes, or its input gradient where it is split."""
        if self._stage.begins_backward(self):
            self._stage.meet()
        queue = self._stage.queue
        put_off = queue is not None and queue.put(self, self._share * seconds["weight_gradient"])
        self._stage.clock.compute(self._share * seconds["input_gradient" if put_off else "backward"])


class _Queue:
    """The weight gradients of an emulated stage, a `SplitBackward`: time that is still to pass, and nothing to add."""

    def __init__(self, clock: VirtualClock):
        self.finished: Callable[[nn.Parameter], None] = lambda _: None
        self._clock = clock
        self._microbatch: int | None = None
        self._waiting: dict[int, dict[_Part, float]] = {}  # seconds by micro-batch and part, last part first

    def add_to(self, parameter: nn.Parameter, total: Tensor) -> None:
        """See `SplitBackward`."""

    @contextmanager
    def of(self, microbatch: int, *, backward: bool = False) -> Iterator[None]:
        """See `SplitBackward`."""
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    def put(self, part: _Part, seconds: float) -> bool:
        """Keep a part's time for later, if the backward is split; whether it is."""
        if self._microbatch is None:
            return False
        self._waiting.setdefault(self._microbatch, {})[part] = seconds
        return True

    def run(self, microbatches: Sequence[int]) -> None:
        """See `SplitBackward`."""
        taken = [self._waiting.pop(microbatch) for microbatch in microbatches]
        for part in taken[0]:
            self._clock.compute(sum(seconds[part] for seconds in taken))
            for parameter in _trained([part]) - self.unfinished:
                self.finished(parameter)

    @property
    def unfinished(self) -> frozenset[nn.Parameter]:
        """See `SplitBackward`."""
        return _trained(part for seconds in self._waiting.values() for part in seconds)

    def forget(self) -> None:
        """See `SplitBackward`."""
        self._waiting.clear()


def _trained(parts: Iterable[_Part]) -> frozenset[nn.Parameter]:
    return frozenset(parameter for part in parts for parameter in part.parameters() if parameter.requires_grad)


class _CountedGradient(torch.autograd.Function):
    """Hands its input on; the backward lets the part's time pass and counts weights [Note: counted gradients]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: _Part, seconds: Mapping[str, float], scales: list[float | Tensor], *params: Tensor
    ) -> Tensor:
        ctx.part, ctx.seconds, ctx.scales = part, seconds, scales
        ctx.shapes = [param.shape for param in params]
        ctx.shared_out = part.shared_out()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.part.backward(ctx.seconds)
        counted = grad[..., 0].sum()
        of_all = ctx.part.over_sequence_ranks(counted) if any(ctx.shared_out) else counted
        each = zip(ctx.scales, ctx.shapes, ctx.shared_out, strict=True)
        gradients = [(scale * (of_all if shared else counted)).expand(shape) for scale, shape, shared in each]
        return (grad, None, None, None, *gradients)


def _scale(rule: ShardRule, tp: int) -> float | Tensor:
    """What a tensor parallel rank contributes to the gradient of an element that it holds, so that the sum counts once;
    of blocks by row, (rows, 1).

    Of 2 heads on 8 ranks each is held, and its gradient contributed, by 4: each contributes a quarter.
    """
    if rule.dim is None:
        return 1.0 / tp if rule.gradient == "partial" else 1.0
    if rule.blocks and tp > 1:
        rows = [torch.full((max(1, units // tp), 1), min(1.0, units / tp)) for _, units in rule.blocks]
        return torch.cat(rows)
    return min(1.0, rule.units / tp) if rule.units else 1.0


def counted_norm(plan: ModelPlan) -> float:
    """The norm of a step's gradient [Note: counted gradients]: of as many ones as the model has trained elements."""
    users = [plan.first, *plan.layers, plan.last]
    return math.sqrt(
        sum(
            param.numel * sum(param.name in names for names in users) ** 2
            for bucket in plan.buckets
            if bucket.trainable
            for param in bucket.params
        )
    )
