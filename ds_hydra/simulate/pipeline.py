"""One pipeline's stages and messages in time: its schedule, its loads, and the layers that are pulled. Pure: no torch.

It answers what `pipe.schedules.simulate` asks about time, as the runtime would: the first forward waits before each
layer for its parameters, messages go over ports, and the last backward hands over the gradients of layer after layer,
as the last weight gradients do where backwards are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.costs.memory import ElementBytes, push_turns
from ds_hydra.pipe.model_plan import BucketTransfers, ModelPlan, plan_transfers, push_order
from ds_hydra.pipe.placement import Pipeline, Stage, Strategy
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.schedules.actions import Action, Slot, backward_of_first_push
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.simulate import SHARES, TimedAction, beside_of, simulate_slots
from ds_hydra.simulate.links import LinkModel, Parcels, Port, Routes, Speed
from ds_hydra.zero_hetero.buddies import copy_plan
from ds_hydra.zero_hetero.layout import Column
from ds_hydra.zero_hetero.transfer_plan import TransferPlan

SUM_BYTES = 4  # of an element of twins' sums on their way to the masters, which are FP32


class BucketUse(NamedTuple):
    """A bucket that a part of a stage needs, in the order of its forward; the layers that follow until the next one."""

    bucket: int
    share: float  # of the part's computing, between this bucket's arrival and the next one's


@dataclass(frozen=True)
class StrategyTransfers:
    """By bucket: the steps of its pull and of its push (None: it is frozen). Equal buckets share their messages.

    `order` is that of the pushes [Note: order of pushes].
    `copies`: what brings each bucket's sums to who keeps a copy of them, if anybody does.
    `turns`: how many pushes must be over on a rank before it has memory for one, (pushes, ranks), in their order.
    """

    pulls: tuple[tuple[Parcels, ...], ...]
    pushes: tuple[tuple[Parcels, ...] | None, ...]
    order: tuple[int, ...]
    turns: Column
    copies: Mapping[int, Parcels]

    @classmethod
    def of(
        cls, plan: ModelPlan, strategy: Strategy, links: LinkModel, element: ElementBytes, *, shift: int = 0
    ) -> StrategyTransfers:
        """Layers that travel alike have the same transfers, of which each is looked at once. `shift` as of a job."""
        planned = plan_transfers(plan, strategy, links.node_size)
        sizes = element.param, element.wire or element.param
        known: list[Routes] = []
        made = {id(one): _parcels(one, links, sizes, known) for one in {id(one): one for one in planned}.values()}
        pulls, pushes = zip(*(made[id(one)] for one in planned), strict=True)
        order = push_order(plan, strategy)
        numels = {index: plan.buckets[index].numel for index in order if shift}
        of = {numel: Parcels.of_plan(copy_plan(numel, strategy.num_ranks, shift), links, element.master, known)
              for numel in set(numels.values())}  # fmt: skip
        turns = push_turns(plan, strategy, element, node_size=links.node_size)
        return cls(pulls, pushes, order, turns, {index: of[numel] for index, numel in numels.items()})


def bucket_uses(plan: ModelPlan, stage: Stage) -> tuple[BucketUse, ...]:
    """The buckets of a stage in the order in which its forward needs them; layers take equal shares of its time.

    Embeddings and head count as no time of their own.
    """
    uses: dict[int, float] = {}
    bucket_of = {param.name: index for index, bucket in enumerate(plan.buckets) for param in bucket.params}
    groups = [plan.first] if stage.first_layer == 0 else []
    groups += plan.layers[stage.first_layer : stage.last_layer]
    groups += [plan.last] if stage.last_layer == plan.num_layers else []
    for names in groups:
        found = sorted({bucket_of[name] for name in names if name in bucket_of})
        for index in found:
            uses.setdefault(index, 0.0)
        if found and names is not plan.first and names is not plan.last:
            uses[found[-1]] += 1.0 / (stage.last_layer - stage.first_layer)
    return tuple(BucketUse(index, share) for index, share in uses.items())


def _parcels(
    transfers: BucketTransfers, links: LinkModel, element_bytes: tuple[int, int], known: list[Routes]
) -> tuple[tuple[Parcels, ...], tuple[Parcels, ...] | None]:
    pull, push = transfers
    pulled, pushed = element_bytes
    hops = (pull,) if isinstance(pull, TransferPlan) else pull.hops
    pulls = tuple(Parcels.of_plan(hop, links, pulled, known) for hop in hops)
    if push is None or isinstance(push, TransferPlan):
        return pulls, None if push is None else (Parcels.of_plan(push, links, pushed, known),)
    trade, leave = push.hops
    return pulls, (Parcels.of_plan(trade, links, pushed, known), Parcels.of_plan(leave, links, SUM_BYTES, known))


class Hop(NamedTuple):
    """A message while it holds a stage's port."""

    action: Action
    start: float
    stop: float


@dataclass
class StageTimes:
    """One stage of one phase. Buckets are those of each part, in the order of its forward; all times in seconds."""

    stage: Stage
    index: int  # in its pipeline
    uses: tuple[tuple[BucketUse, ...], ...]
    start: float  # when it may begin: all pulls have been started
    arrived: tuple[tuple[float, ...], ...]  # when the parameters of each of its buckets are there
    pulls_done: float  # when its ranks have also sent all that others pull from them
    waits: list[tuple[float, float]] = field(default_factory=list)  # for pulls: from, until
    waited_computing: float = 0.0  # those that lie within the first forward
    actions: tuple[TimedAction, ...] = ()
    stop: float = 0.0  # when its slots are done and its messages have left
    armed: float | None = None  # when the last backward may push; None: pushes start after `stop`
    gradients: dict[int, float] = field(default_factory=dict)  # bucket: when the last backward has passed it
    out: list[Hop] = field(default_factory=list)
    into: list[Hop] = field(default_factory=list)

    def wait(self, now: float, until: float) -> float:
        """The later of the two; the time between counts as waiting for pulls."""
        if until > now:
            self.waits.append((now, until))
        return max(now, until)


class PipelineTiming:
    """The `Timing` of one pipeline in one phase."""

    def __init__(
        self,
        pipeline: Pipeline,
        slots: Sequence[Sequence[Slot]],
        loads: Sequence[Sequence[float]],
        stages: Sequence[StageTimes],
        *,
        batches: Batches,
        links: LinkModel,
        token_bytes: Sequence[float],
        token_sharding: bool = False,
        beside: Sequence[float] = (),
    ):
        """`loads[s][m]`: seconds of forward and backward of micro-batch m in stage s, which its works divide if it has
        some; `token_bytes[m]`: bytes of its whole hidden state, of which ranks send less when they share tokens;
        `beside[m]`: seconds that the first stage takes for it besides its layers, if it does for any."""
        self._batches, self._beside = batches, beside
        self._slots, self._loads, self.stages, self._token_bytes = slots, loads, tuple(stages), token_bytes
        self._first_push = [backward_of_first_push(of_stage) for of_stage in slots]
        self._last_seconds = [self._from_first_push(stage) for stage in range(len(self.stages))]
        self._begun: set[tuple[int, int]] = set()  # stage and part
        self._backward: set[int] = set()  # stages that have come to their first
        # The two edges of a stage share its ports: activations and gradients leave one after the other.
        self._out, self._in = [[Port() for _ in self.stages] for _ in range(2)]
        self._edges = {
            (src, dst): _Edge.between(pipeline.stages[src], pipeline.stages[dst], links, token_sharding=token_sharding)
            for src in range(len(self.stages)) for dst in (src - 1, src + 1) if 0 <= dst < len(self.stages)
        }  # fmt: skip

    def run(self) -> None:
        """Fill in the stages' times."""
        simulation, stops = simulate_slots(self._slots, self, [stage.start for stage in self.stages])
        for stage, actions, stop in zip(self.stages, simulation.stages, stops, strict=True):
            stage.actions, stage.stop = actions, stop

    def compute(self, stage: int, action: Action, ready: float) -> tuple[float, float]:
        """See `Timing`. The first forward and the last gradients go layer by layer."""
        times, duration = self.stages[stage], self._share(action) * self._loads[stage][action.microbatch]
        beside = beside_of(action, self._beside) if self._beside and stage == 0 else 0.0
        if action.kind == "forward" and (stage, action.part) not in self._begun:
            self._begun.add((stage, action.part))
            now, first = ready, beside  # which waits for the first bucket alone
            for (_, share), arrived in zip(times.uses[action.part], times.arrived[action.part], strict=True):
                if arrived > now:
                    times.waited_computing += arrived - now
                    now = times.wait(now, arrived)
                now += share * duration + first
                first = 0.0
            return ready, max(now, ready + duration + beside)
        if action.kind != "forward" and stage not in self._backward:
            self._backward.add(stage)
            ready = times.wait(ready, times.pulls_done)  # [Note: memory of pulls]
        if action == self._first_push[stage]:
            times.armed = now = ready
            seconds, gradients = self._last_seconds[stage] / len(times.uses), times.gradients
            for part in reversed(times.uses):
                for bucket, share in reversed(part):
                    gradients[bucket] = now = now + share * seconds
            if beside:
                gradients[times.uses[0][0].bucket] += beside
        return ready, ready + duration + beside

    def _from_first_push(self, stage: int) -> float:
        """Seconds in which a stage's gradients become final: of its last backward, or of all weight gradients that
        follow its last input gradient, which run together."""
        first = self._first_push[stage]
        computed = [action for slot in self._slots[stage] for action in slot if action.computes]
        last = computed[computed.index(first) :] if first is not None else []
        return sum(self._share(action) * self._loads[stage][action.microbatch] for action in last)

    def _share(self, action: Action) -> float:
        """Of a micro-batch's time, what an action takes."""
        if not self._batches.works:
            return SHARES[action.kind]
        work = self._batches.works[action.microbatch]
        return work.takes(action.kind) / (self._batches.parts * (work.forward + work.backward + work.weight))

    def send(self, stage: int, message: Action, ready: float) -> tuple[float, float]:
        """See `Timing`."""
        link = self._edges[stage, stage + message.side]
        wire = link.out_share * self._token_bytes[message.microbatch] / link.speed.bytes_per_s
        begin = self._out[stage].serve(ready, wire)
        self.stages[stage].out.append(Hop(message, begin, begin + wire))
        return begin + wire, begin + link.speed.latency_s

    def receive(self, stage: int, message: Action, head: float) -> float:
        """See `Timing`."""
        link = self._edges[stage + message.side, stage]
        wire = link.in_share * self._token_bytes[message.microbatch] / link.speed.bytes_per_s
        begin = self._in[stage].serve(head, wire)
        self.stages[stage].into.append(Hop(message, begin, begin + wire))
        return begin + wire


class _Edge(NamedTuple):
    """One direction between two stages; shares are those of the busiest rank, of the whole hidden state."""

    out_share: float
    in_share: float
    speed: Speed

    @classmethod
    def between(cls, src: Stage, dst: Stage, links: LinkModel, *, token_sharding: bool) -> _Edge:
        shares = _shares(src.tp, src.sp, dst.tp, dst.sp, token_sharding)
        return cls(*shares, links.slowest([*src.ranks, *dst.ranks]))


@lru_cache(maxsize=4096)
def _shares(src_tp: int, src_sp: int, dst_tp: int, dst_sp: int, token_sharding: bool) -> tuple[float, float]:
    """The largest share of a hidden state that one rank sends, and that one receives."""
    # From one stage of tp2 to one of sp2: each receiver gets half of the tokens, and both come from rank 0 and rank 1
    # of the sender, half of the tokens each. With this number of tokens both stages cut the row evenly.
    src = Stage(tuple(range(src_tp * src_sp)), 0, 1, src_tp, src_sp)
    dst = Stage(tuple(range(len(src.ranks), len(src.ranks) + dst_tp * dst_sp)), 0, 1, dst_tp, dst_sp)
    tokens = len(src.ranks) * len(dst.ranks)
    both = [max(sum(rows.stop - rows.start for rows in of_rank) for of_rank in side.values())
            for side in edge(src, dst, tokens, token_sharding=token_sharding)]  # fmt: skip
    return both[0] / tokens, both[1] / tokens
