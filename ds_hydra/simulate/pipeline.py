"""One pipeline's stages and messages in time: its schedule, its loads, and the layers that are pulled. Pure: no torch.

It answers what `pipe.schedules.simulate` asks about time, as the runtime would: the first forward waits before each
layer for its parameters, messages go over ports, and the last backward hands over the gradients of layer after layer,
as the last weight gradients do where backwards are split. And what a stage holds meanwhile, by the memory model
[Note: memory over time].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.costs.memory import ElementBytes, JobMemory, Needs, push_turns
from ds_hydra.pipe.model_plan import BucketTransfers, ModelPlan, plan_transfers, push_order
from ds_hydra.pipe.placement import Pipeline, Stage, Strategy, whole_layers
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.schedules.actions import Action, Slot, backward_of_first_push
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.simulate import SHARES, TimedAction, beside_of, simulate_slots
from ds_hydra.plan.step_plan import PipelinePlan
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


# [Note: memory over time]
# A sequence in slices has keys and values of all its tokens from the first slice's forward to that slice's backward,
# and the sums of their gradients from the last slice's backward on [Note: contexts]. Example of four slices of one
# token, each with keys and values of one byte within what it keeps and sums of two: after the first forward there is
# room for three tokens more, 3 bytes, after the last one 0. The last slice's backward, which is the first, makes sums
# of 8 bytes and leaves its keys and values behind, 9 bytes beside what the other three keep; the first slice's gives
# all back. States that layers carry on [Note: carried states] are made by the forward of a slice that others follow,
# their gradients by the backward of the next one, and both are given back by the slice's own backward.


def memory_over_time(memory: JobMemory, plan: PipelinePlan, times: StageTimes) -> list[tuple[float, float]]:
    """(time in s, bytes held from then on) of the fullest rank of a stage: its states, and the micro-batches alive.

    While it computes a micro-batch it holds that one's transient too, and beside slices what their contexts take. Of
    layers that are computed again it holds a share, and where that is all of them, one as a whole in the backward.
    ConfigError as `JobMemory.needs`.
    """
    needs = memory.needs(plan.shape.cost_key, times.index)
    # The model counts the most micro-batches that the schedule ever keeps; here each counts while it is kept.
    layers = [last - first for first, last in times.stage.ranges]
    ends = (needs.per_token / needs.alive - sum(layers) * needs.layer) / len(layers)
    contexts = _Contexts(plan, needs, memory.param_bytes)
    head = _Head(contexts, needs, alone=not memory.plain_head)
    # Costs have one key for a V and for plain pipelines, whose last stage has the head, as a V's first one has.
    ends_model = times.stage.ranges[-1].last == memory.plan.num_layers
    sizes = [batch.num_tokens for batch in plan.microbatches]
    held = float(needs.states)
    curve = [(times.start, held)]
    for (kind, microbatch, part), start, stop in times.actions:
        size, kept = sizes[microbatch], layers[part] * needs.layer
        again = whole_layers(plan.microbatches[microbatch].recompute, layers[part]) / layers[part]
        alive = size * (ends + kept * (1.0 - again * (1.0 - needs.recomputed)))
        waiting = size * kept * (1.0 - again) * needs.until_weight
        freed = {"backward": alive, "input_gradient": alive - waiting, "weight_gradient": waiting}.get(kind, 0.0)
        made, given_back = (layers[part] * one for one in contexts.of(kind, microbatch))
        held += alive if kind == "forward" else 0.0
        # Where some layers are not computed again, what they kept is free by the time of those that are. The embeddings
        # come last, in the backward of the first part.
        back = kind in ("backward", "input_gradient")
        end = freed if back and part == 0 else math.inf
        own = head.of(kind, microbatch) if ends_model and part == len(layers) - 1 else _NONE
        on_top = needs.on_top(size, again=back and again == 1.0, given_back=end, head=own.made, logits=own.logits)
        # Contexts grow layer by layer, while a backward gives back what these kept.
        curve.append((start, held + on_top + max(0.0, made - freed)))
        held += made - freed - given_back + own.kept
        curve.append((stop, held))
    return curve


class _Contexts:
    """What the contexts of one layer take beside what slices keep."""

    def __init__(self, plan: PipelinePlan, needs: Needs, param_bytes: int):
        self._plan, self._totals = plan, dict[int, int]()
        for sequence, _, stop in (span for batch in plan.microbatches for span in batch.spans):
            self._totals[sequence] = max(self._totals.get(sequence, 0), stop)
        # Sums are of 4 bytes at least. Layers that are all computed again keep no keys and values of their own, and
        # their figure is of both; else it is of the sums.
        wide = max(4, param_bytes)
        self._cut = [tuple(self._slices(number)) for number in range(len(plan.microbatches))]
        self._kept = 0.0 if needs.until_weight == 0.0 else 1.0
        self._sums = needs.context * needs.layer * (1.0 if self._kept else wide / (wide + param_bytes))
        self._rows = self._sums * param_bytes / wide
        self._state = needs.state / 2

    def of(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Bytes of one layer that an action makes, and that are free after it."""
        made = given_back = 0.0
        for start, stop, total in self._cut[microbatch]:
            own = self._kept * self._rows * (stop - start)
            if kind == "forward":
                made += self._rows * total * (start == 0)
                given_back += own  # it counts among what the slice keeps
                made += self._state * (stop < total)
            elif kind in ("backward", "input_gradient"):
                made += self._sums * total * (stop == total) + own
                given_back += (self._sums + self._rows) * total * (start == 0)
                made += self._state * (start > 0)
                given_back += 2 * self._state * (stop < total)
        return made, given_back

    def followed(self, microbatch: int) -> bool:
        """Whether a micro-batch holds a slice that others of its sequence follow."""
        return any(stop < total for _, stop, total in self._cut[microbatch])

    def _slices(self, microbatch: int) -> Iterator[tuple[int, int, int]]:
        """Where slices begin and end, and how long their sequences are; whole sequences are none."""
        for sequence, start, stop in self._plan.microbatches[microbatch].spans:
            if (start, stop) != (0, self._totals[sequence]):
                yield start, stop, self._totals[sequence]


class _OfHead(NamedTuple):
    """What an action does at the head."""

    made: bool  # a gradient of its weight, beside those that are kept
    logits: bool
    kept: int  # bytes of such gradients that are kept from then on, or given back


_NONE = _OfHead(False, False, 0)


class _Head:
    """Which micro-batch has made the gradient of the head's weight in its forward [Note: head and loss as one]."""

    def __init__(self, contexts: _Contexts, needs: Needs, *, alone: bool):
        """`alone`: head and loss are not one, so each backward makes its own."""
        self._contexts, self._bytes, self._alone = contexts, needs.head, alone
        self._holder: int | None = None

    def of(self, kind: str, microbatch: int) -> _OfHead:
        """What an action does at the head, in the order of the actions."""
        if kind == "weight_gradient":
            return _NONE
        if kind == "forward":
            if self._alone or self._holder is not None or self._contexts.followed(microbatch):
                return _OfHead(self._alone, True, 0)
            self._holder = microbatch
            return _OfHead(True, True, self._bytes)
        if self._holder == microbatch:
            self._holder = None
            return _OfHead(False, False, -self._bytes)
        return _OfHead(True, True, 0)
