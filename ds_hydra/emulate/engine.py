"""The engine that trains real models, with stages that compute nothing, on virtual time.

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
from ds_hydra.costs.memory import push_turns
from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.costs.shares import Shares
from ds_hydra.emulate.clock import SmallModel, VirtualClock, VirtualLane, small_model
from ds_hydra.engine.engine import HydraEngine
from ds_hydra.engine.guard import Guard
from ds_hydra.engine.job import Job
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import ModelPlan, ShardRule
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.pipe.rows import AT_ONCE, MicroBatch
from ds_hydra.pipe.schedules.registry import splits_backward, weighs
from ds_hydra.pipe.schedules.simulate import FORWARD_SHARE, SHARES
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.plan.simulate import stretch, work_of
from ds_hydra.plan.step_plan import MicroBatchPlan, Span
from ds_hydra.ranks.world import World
from ds_hydra.report.calibration import StepCosts, folded, stage_loads
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Port
from ds_hydra.step.strategy_runtime import PULL_TAG, PUSH_TAG
from ds_hydra.zero_hetero.link import LEAVE_TAG
from ds_hydra.zero_hetero.transport import MessageCollectives, Parcel, Transport, Work


class ClockedGroup(dist.ProcessGroup):
    """What `torch.distributed` calls for a collective of all ranks; the real group does it.

    A broadcast takes no time: the engine broadcasts before the first step only.
    """

    def __init__(self, inner: dist.ProcessGroup, clock: VirtualClock, links: LinkModel):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner: Any = inner  # whose overloads say less than what torch passes on
        self._clock, self._links = clock, links

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        self._pass("all_reduce", tensors[0].numel() * tensors[0].element_size())
        return self._inner.allreduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        self._pass("all_gather", self.size() * inputs[0].numel() * inputs[0].element_size())
        return self._inner.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        self._pass("all_gather", output.nbytes)
        gather = getattr(self._inner, "all_gather_single", None) or self._inner._allgather_base
        return gather(output, source, opts)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # what torch before 2.13 calls it

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._inner.broadcast(tensors, opts)

    def _pass(self, operation: str, num_bytes: int) -> None:
        """All go on at the latest of their times, later by the collective's own."""
        latest = torch.tensor([self._clock.now()], dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._inner)
        seconds = self._links.collective_s(operation, range(self.size()), num_bytes)
        self._clock.wait_until(float(latest) + seconds)


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
        parts = {name: _Part(self, share if name.isdigit() else 0.0, scales, begins=name == "first") for name in held}
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
        """What each kind of action takes of all layers of the stage, and what both take besides."""
        beside_s = self._source.pace * batch.beside_us / 1e6
        return {**self._of_layers(batch), "beside": beside_s}

    def _of_layers(self, batch: MicroBatch) -> dict[str, float]:
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

    def __init__(self, stage: EmulatedStage, share: float, scales: Mapping[str, float | Tensor], *, begins: bool):
        super().__init__()
        self._stage, self._share, self._scales, self._begins = stage, share, scales, begins

    def forward(self, x: Tensor, seconds: Mapping[str, float], apart: bool) -> Tensor:
        """Hooks that ran before this have waited for the pulls of the parameters."""
        if apart:
            self._stage.meet()
        beside = FORWARD_SHARE * seconds["beside"] if self._begins else 0.0
        self._stage.clock.compute(self._share * seconds["forward"] + beside)
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
        beside = (1.0 - FORWARD_SHARE) * seconds["beside"] if self._begins else 0.0
        self._stage.clock.compute(self._share * seconds["input_gradient" if put_off else "backward"] + beside)


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


class EmulatedModel(nn.Module):
    """Small parameters, all of them 1, in the place of the model of a job; it has no forward of its own."""

    def __init__(self, cluster: SimulatedJob):
        super().__init__()
        sizes = cluster.element_bytes, cluster.gradient_bytes
        self.cluster, self.small = cluster, small_model(cluster.plan, cluster.hidden, *sizes)
        for bucket in self.small.plan.buckets:
            for param in bucket.params:
                value = nn.Parameter(torch.ones(param.shape), requires_grad=param.trainable)
                self.register_parameter(param.name, value)


class EmulatedEngine(HydraEngine):
    """Trains an `EmulatedModel` on the virtual time of `clock`. The config must name a cost table.

    A step begins for all ranks at once, when the last of them has ended the step before.
    """

    module: EmulatedModel

    def source_of(self, model: EmulatedModel, *_: Any, **__: Any) -> EmulatedSource:
        """See `HydraEngine`."""
        self.clock = VirtualClock()
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return EmulatedSource(model.small, values, self.clock)

    def world_of_process(self) -> World:
        """See `HydraEngine`: the same groups and transports, on virtual time."""
        world, speeds = super().world_of_process(), self.module.cluster.links

        def clocked(transport: Any) -> ClockedTransport:
            return ClockedTransport(transport, world.rank, self.clock, speeds, self.module.small)

        group = None if world.group is None else ClockedGroup(world.group, self.clock, speeds)
        self._moving = links, teams = clocked(world.links), clocked(world.links)
        if speeds.one_cable:
            links.share_cable(teams)
        return replace(
            world,
            links=links,
            edges=clocked(world.edges),
            collectives=MessageCollectives(teams, world.rank),
            lane=VirtualLane(self.clock),
            group=group,
            clock=self.clock,
        )

    def assemble(self, job: Job | None = None, *, guard: Guard | None = None) -> None:
        """See `HydraEngine`; then stages know what they cost."""
        super().assemble(job, guard=guard)
        source, crew, cluster = self._emulated, self.crew, self.module.cluster
        source.links = self._moving
        crew.stepper.runtimes.turns_of = self._turns_of
        # What stages that differ take, as the cluster's own table says it where it does.
        table = with_shapes(cluster.table, crew.prepared.strategies, crew.prepared.memory)
        for shape, strategy in crew.prepared.strategies.items():
            for piece, pipeline in zip(shape.pipelines, strategy.pipelines, strict=True):
                cost, shares = table[piece], table.shares(piece)
                loads = stage_loads(cost, source.plan.num_layers, cluster.found)
                source.prices[at_rank_0(pipeline)] = folded(loads, piece.parts)
                source.costs[at_rank_0(pipeline)] = cost, shares
        self._step_costs = StepCosts.of(cluster.found.step)
        update_s = self._step_costs.update_ms_per_element * cluster.owned / 1e3
        assert self.optimizer is not None, "the crew has installed it"
        self.optimizer.register_step_pre_hook(lambda *_: self.clock.compute(update_s))
        self._wait_for_all()

    @property
    def pace(self) -> float:
        """How many times as long as its costs say this rank's device takes from now on."""
        return self._emulated.pace

    @pace.setter
    def pace(self, pace: float) -> None:
        self._emulated.pace = pace

    @property
    def _emulated(self) -> EmulatedSource:
        source = self.job.source
        assert isinstance(source, EmulatedSource), "made by `source_of`"
        return source

    def _turns_of(self, strategy: Strategy) -> list[int]:
        """How many pushes each push of this rank waits for, with the memory of the job that is emulated."""
        cluster = self.module.cluster
        turns = push_turns(cluster.plan, strategy, cluster.elements, node_size=cluster.links.node_size)
        return [int(turn) for turn in turns[:, self.crew.world.rank]]

    def train_batch(self, data_iter: Any = None, **arguments: Any) -> Tensor:
        """See `HydraEngine`."""
        self.clock.compute(self._step_costs.fixed_ms / 1e3)
        loss = super().train_batch(data_iter, **arguments)
        self._wait_for_all()
        return loss

    def _wait_for_all(self) -> None:
        """All ranks go on at the latest of their times; `ended_s` keeps what each had come to."""
        mine = torch.tensor([self.clock.now()], dtype=torch.float64)
        self.ended_s: Sequence[float] = self.crew.world.channel.rows(mine).flatten().tolist()
        self.clock.wait_until(max(self.ended_s))
