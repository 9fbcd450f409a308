"""Runs phases of a step under one strategy on one rank, with the memory and connections that all strategies share.

[Note: connections]
On NCCL the first message of a pair of ranks connects the two, and the host of each waits until the other has come to
it; a communicator that is made at its first use needs all its ranks then. Neither may happen within a step, where ranks
come to their messages at different times. Example: `tp4pp2` on 8 ranks. In the last backward rank 6 pushes to rank 2
for the first time, and waits for it. Rank 2 is in the first stage and waits for the gradient that rank 6 sends after
that backward. So before step 0 all ranks come together and exchange one element over every pair that is listed here,
and in every team.

[Note: one strategy on one rank]
The order of a phase, for a stage with the layers 4 and 5 and three micro-batches (1F1B, last stage):

  pulls       start all | wait 4, wait 5 . | finish
  computing               F0               |        B0   F1   B1   F2    |       B2
  pushes                                                                 | arm   5 leaves, 4 leaves | finish

A layer waits for its own parameters only, so the first forward begins while later layers are still on their way. A
gradient leaves as soon as the last backward has passed its layer, while that backward goes on. Of a V the rank has two
parts, each a stage by itself but for what they share: pulls, pushes, and a tied weight that both use.

[Note: memory of pulls]
What a pull sends and receives apart from parameters lies where gradients come later, so a rank's pulls have to be over,
its sends too, before its first backward. That cannot stand still. A send ends when its receiver has opened the receive,
which it has at the latest when all its layers have run a forward. Take a rank that waits before its first backward: the
micro-batch of it has come through all layers of its pipeline, whose ranks have thus opened all their receives. So who
waits for it may be in any pipeline, but what he waits for needs forwards alone, and these wait for parameters, which
are sent whatever a rank waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.costs.memory import ElementBytes, held_elements
from ds_hydra.pipe.adapters import switched_off
from ds_hydra.pipe.model_plan import (
    ModelPlan,
    bucket_places,
    gradient_places,
    plan_transfers,
    push_order,
    room_for_pushes,
    twins_of,
    twins_with,
)
from ds_hydra.pipe.models.refusals import failing, refuse_misaligned_experts
from ds_hydra.pipe.placement import Stage, Strategy, place_strategy
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.runtime import Doing, StageRuntime
from ds_hydra.pipe.schedules.registry import evaluation_slots, training_slots
from ds_hydra.pipe.stage import ModelSource, StagePlace, dtype_of, install_bucket, widths
from ds_hydra.pipe.weight_gradients import accumulate_into
from ds_hydra.ranks.groups import ROOM_FOR_COMMUNICATORS
from ds_hydra.zero_hetero.clock import Laps, Stopwatch
from ds_hydra.zero_hetero.contributions import Place
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.link import Link, PullMover, PushMover, Scratch, TwinPullLink, TwinPushLink
from ds_hydra.zero_hetero.nodes import NodeSize
from ds_hydra.zero_hetero.pushes import Pulls, PushBucket, Pushes
from ds_hydra.zero_hetero.twin_plan import TwinPull, TwinPush

if TYPE_CHECKING:
    from ds_hydra.pipe.model_plan import Slot
    from ds_hydra.pipe.rows import MicroBatch
    from ds_hydra.pipe.schedules.batches import Batches
    from ds_hydra.plan.step_plan import Phase, StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.model_masters import ModelMasters
    from ds_hydra.zero_hetero.transfer_plan import TransferPlan

Pairs = frozenset[tuple[int, int]]
"""(sender, receiver), global ranks."""

logger = logging.getLogger(__name__)


class Connections(NamedTuple):
    """Pairs of ranks, by the communicator on which they exchange messages."""

    links: Pairs  # pulls and pushes
    edges: Pairs  # between the stages of pipelines
    teams: tuple[tuple[int, ...], ...]  # ranks that gather or trade in pulls and pushes [Note: twins]


def connections_of(plan: ModelPlan, strategies: Iterable[Strategy], node_size: NodeSize) -> Connections:
    """All pairs that steps under these strategies use, whatever their batches; see [Note: connections]."""
    links: set[tuple[int, int]] = set()
    edges: set[tuple[int, int]] = set()
    teams: dict[tuple[int, ...], None] = {}
    for strategy in strategies:
        links |= link_pairs(plan, strategy, node_size)
        edges |= edge_pairs(strategy, token_sharding=plan.token_sharding)
        teams |= dict.fromkeys(team for team in teams_of(strategy, node_size))
    return Connections(frozenset(links), frozenset(edges), tuple(teams))


def link_pairs(plan: ModelPlan, strategy: Strategy, node_size: NodeSize) -> Pairs:
    """Pairs of the pulls and pushes of all buckets under one strategy; teams talk apart from them."""
    found: set[tuple[int, int]] = set()
    distinct = {id(transfers): transfers for transfers in plan_transfers(plan, strategy, node_size)}
    for pull, push in distinct.values():
        found |= (pull.enter if isinstance(pull, TwinPull) else pull).pairs
        if push is not None:
            found |= (push.leave if isinstance(push, TwinPush) else push).pairs
    return frozenset(found)


def teams_of(strategy: Strategy, node_size: NodeSize) -> Iterator[tuple[int, ...]]:
    """Teams of the pulls and pushes under one strategy, in one order; those of one step have no rank in common."""
    found = [twins for twins in twins_of(strategy, node_size) if len(twins.ranks) > 1]
    yield from (one.ranks for twins in found for one in twins.pulling if len(one.ranks) > 1)
    yield from (one.ranks for twins in found for one in twins.pushing if len(one.ranks) > 1)


def edge_pairs(strategy: Strategy, *, token_sharding: bool = False) -> Pairs:
    """Pairs of the edges of all pipelines: activations go one way, gradients the other."""
    found: set[tuple[int, int]] = set()
    for pipeline in strategy.pipelines:
        for before, after in pairwise(pipeline.stages):
            for src, dst in ((before, after), (after, before)):
                found |= _senders(src, dst, token_sharding)
    return frozenset(found)


def _senders(src: Stage, dst: Stage, token_sharding: bool) -> set[tuple[int, int]]:
    """Who sends rows to whom from one stage to another, for any number of tokens.

    With this number both stages cut the row evenly, and each sender has a token of every receiver of its. Two parts
    that have no token in common then have none with any other number: their cuts are floors of the even ones.
    """
    num_tokens = len(src.ranks) * len(dst.ranks)
    receives = edge(src, dst, num_tokens, token_sharding=token_sharding)[1]
    return {(rows.peer, receiver) for receiver, parts in receives.items() for rows in parts}


@dataclass
class Arena:
    """Memory of one rank's pulled parameters, gradients, sums and messages; one strategy at a time uses it."""

    # A step computes with one strategy and pulls its parameters anew. So five strategies that need 6, 4, 4, 3 and 2 GiB
    # of a rank share 6 GiB, where buffers of their own would take 19. To change the strategy allocates neither, so it
    # cannot leave the allocator with blocks of sizes that no longer fit.

    params: Tensor  # compute dtype
    # Bytes, where the gradients of micro-batches add up. Before that pulls use them [Note: memory of pulls], and when
    # gradients have left sums lie there [Note: where sums lie].
    grads: Tensor
    scratch: Scratch  # as large as the present strategy needs
    filled: tuple[object, int] | None = None  # who has pulled all of `params`, from which revision of the masters

    @classmethod
    def for_strategies(
        cls,
        plan: ModelPlan,
        strategies: Sequence[Strategy],
        rank: int,
        device: torch.device,
        *,
        dtype: torch.dtype,
        element: ElementBytes,
        node_size: NodeSize,
        least: tuple[int, int] = (0, 0),
    ) -> Arena:
        """An arena as large as the largest need of any of the strategies on this rank, and at least for so many
        parameters and gradients."""
        sizes = [least, *(held_elements(plan, one, element, node_size=node_size)[rank] for one in strategies)]
        num_bytes = max(grads for _, grads in sizes) * element.grad
        return cls(
            torch.zeros(max(params for params, _ in sizes), dtype=dtype, device=device),
            torch.zeros(num_bytes, dtype=torch.uint8, device=device),
            Scratch(device),
        )

    def gradients_at(self, place: Place, dtype: torch.dtype) -> Tensor:
        """The bytes of a place in the memory for gradients, flat, as elements of `dtype`."""
        return self.grads[place.start : place.stop].view(dtype)


class PeakMemory:
    """The peak of one step at a time; on a CPU nobody counts, and it is 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        """Count anew from what is held now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


# A bucket's number is added to these, so that pulls, pushes and the messages between stages (`pipe.runtime`) never have
# a tag in common: gloo matches messages by tag, and several of each kind are under way at once.
PULL_TAG, PUSH_TAG = 1 << 21, 1 << 22


class StrategyRuntime:
    """Runs phases under one strategy. Building it decides everything that does not depend on the batch.

    The world must be connected for the strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        source: ModelSource,
        masters: ModelMasters,
        arena: Arena,
        world: World,
        activity: Doing,
        *,
        grad_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        turns: Sequence[int] | None = None,
    ):
        """`grad_dtype`: of gradients where they add up; `wire_dtype`: on their way to the masters; `turns` as of
        `Pushes`."""
        rank, groups = world.rank, world.groups
        self.strategy = strategy
        self.pipeline_index, index = strategy.locate(rank)
        pipeline = strategy.pipelines[self.pipeline_index]
        self.stage_index, self.num_stages = index, len(pipeline.stages)
        places = StagePlace.all_of(
            pipeline, rank, groups.get, token_sharding=source.plan.token_sharding, overlap=source.overlap,
            node_size=world.node_size,
        )  # fmt: skip
        # The place of the loss, if the rank has it: of two parts the second one's. Else one is as good as the other.
        self.place = places[-1]
        self._arena, dtype = arena, arena.params.dtype
        self.parts = tuple(source.build(place, world.device, dtype) for place in places)
        self._queues = [part.weight_gradients for part in self.parts if part.weight_gradients is not None]
        self._bucket_of: dict[str, int] = {}
        self._grad_dtype, self._sums = grad_dtype, list[Tensor]()
        self._link(source.plan, masters, world, wire_dtype, turns)
        for part in self.parts:
            part.before_use = self._before_use
        for queue in self._queues:
            queue.finished = self._finished
        self._watch = Stopwatch(world.clock)
        self.stage_runtime = StageRuntime(
            self.parts, pipeline, rank, world.edges, [widths(source, place) for place in places], world.device, dtype,
            activity=activity, watch=self._watch,
        )  # fmt: skip
        self._accumulate = self._begun = False  # of this step: as `train` was told; whether it has come to gradients
        self._awaited: set[int] = set()  # buckets whose pull this step has not yet waited for
        self._masters = masters
        self._frozen = frozenset(i for i, bucket in enumerate(source.plan.buckets) if not bucket.trainable)
        self._kept: frozenset[int] = frozenset()  # buckets that the last start did not pull

    def _link(
        self,
        plan: ModelPlan,
        masters: ModelMasters,
        world: World,
        wire_dtype: torch.dtype,
        turns: Sequence[int] | None,
    ) -> None:
        """Cut the arena into buckets, make parameters their views, and link them with the masters."""
        # A bucket is one interval of the arena, and its parameters are views of it: a bucket with the weights q (8, 8)
        # and o (8, 8) takes 128 elements, and q's are the first 64. So one message per peer brings a whole bucket, and
        # the layers find their values there without a copy into parameters. The gradients lie in the same order in
        # the arena's other buffer, and leave it by the transposed plan.
        pull_links: list[PullMover] = []
        buffers: list[Tensor] = []
        pushes: list[PushBucket] = []
        rank, held, twins = world.rank, 0, twins_with(self.strategy, world.rank, world.node_size)
        places = bucket_places(plan, self.strategy, twins)
        sizes = self._grad_dtype.itemsize, masters.trained.flat.dtype.itemsize
        gradients = gradient_places(plan, self.strategy, twins, grad_bytes=sizes[0], master_bytes=sizes[1])
        transfers = plan_transfers(plan, self.strategy, world.node_size)
        for index, ((bucket, slots, start, size), (pull, push)) in enumerate(zip(places, transfers, strict=True)):
            dtype = dtype_of(bucket, self._arena.params.dtype)
            whole = self._arena.params[start : start + size * dtype.itemsize // self._arena.params.dtype.itemsize]
            buffer = whole.view(dtype)
            pull_links.append(pull_link(pull, rank, world))
            buffers.append(buffer)
            held += buffer.nbytes
            self._bucket_of |= {slot.param.name: index for slot in slots}
            if push is None:
                self._install(slots, buffer, None)
                continue
            at, shard = len(pushes), masters.trained.shards[len(pushes)]
            grads = self._arena.gradients_at(gradients.gradients[at], self._grad_dtype)
            self._sums.append(self._arena.gradients_at(gradients.sums[at], shard.dtype)[: shard.numel()])
            params = self._install(slots, buffer, grads)
            wire = dtype if bucket.wide else wire_dtype
            pushes.append(PushBucket(push_link(push, rank, world), tuple(params), grads, self._sums[at], wire))
        self._wire_dtype, scratch = wire_dtype, self._arena.scratch
        early, within = world.lane.early, Scratch.within(self._arena.grads)
        trained = [index for index, (_, push) in enumerate(transfers) if push is not None]
        apart, fill = ((), None) if masters.states is None else (trained, masters.states.fill)
        self.pulls = Pulls(
            pull_links, masters.shards, buffers, first_tag=PULL_TAG, early=early, scratch=within, apart=apart, fill=fill
        )
        self._pushed_bytes = gradients.pushed_bytes
        self.gradient_bytes = max(gradients.num_bytes, self.pulls.scratch_bytes)
        room = room_for_pushes(held + self._pushed_bytes, self.strategy.most_stages)
        order = [trained.index(index) for index in push_order(plan, self.strategy)]
        self.pushes = Pushes(
            pushes,
            first_tag=PUSH_TAG,
            order=order,
            lane=world.lane,
            room=room,
            turns=turns,
            scratch=scratch,
        )

    def _install(self, slots: Sequence[Slot], buffer: Tensor, grads: Tensor | None) -> list[nn.Parameter]:
        """Make the parameters of a bucket views of its buffer, and their gradients views of the gradient buffer;
        returns what autograd accumulates in."""
        installed: list[nn.Parameter] = []
        for leaf in install_bucket(self.parts, slots, buffer):
            parameter = leaf.parameter
            if grads is not None:
                total = leaf.view(grads)
                # Autograd accepts a gradient only in the parameter's own dtype. Where the sum is wider than that (BF16
                # parameters, FP32 sums), a hook adds each micro-batch's gradient to it instead.
                if total.dtype == parameter.dtype:
                    parameter.grad = total
                else:
                    parameter.register_post_accumulate_grad_hook(accumulate_into(total))
                for part in self.parts:
                    part.add_to(parameter, total)
                installed.append(parameter)
        return installed

    def forwarded(self) -> None:
        """See `Moments`."""
        # Parameters that no forward has read. With them every receive of this rank's pulls is open, so that nobody who
        # waits for his sends to end waits for this rank [Note: memory of pulls].
        with self._watch.lap("pull", stage=self.stage_index):
            self.pulls.arrive()

    def before_gradients(self) -> None:
        """See `Moments`."""
        if not self._begun:
            self._begun = True
            self._finish_pulls()
            self._arena.grads[: self._pushed_bytes].zero_()

    def before_last_gradients(self, waiting: Collection[nn.Parameter]) -> None:
        """See `Moments`."""
        self.pushes.arm(accumulate=self._accumulate, waiting=waiting)

    def _finished(self, parameter: nn.Parameter) -> None:
        # In a V both parts may use a weight, and each has a queue.
        if len(self._queues) == 1 or not any(parameter in queue.unfinished for queue in self._queues):
            self.pushes.final(parameter)

    def _start_pulls(self) -> None:
        self._watch.take()  # laps of a step that an error has ended, or of an evaluation
        # Frozen parameters stay what they are. If nobody else has used the memory since, they are still there.
        here = self._arena.filled == (self, self._masters.revision)
        self._arena.filled, self._kept = None, self._frozen if here else frozenset()
        self._awaited = set(self._bucket_of.values()) - self._kept
        self._arena.scratch.fit(self.pushes.scratch_bytes)
        with self._watch.lap("pull", stage=self.stage_index):
            self.pulls.start(self._kept)

    def _finish_pulls(self) -> None:
        with self._watch.lap("pull", stage=self.stage_index):
            self.pulls.finish()
        self._arena.filled = self, self._masters.revision

    def _before_use(self, name: str) -> None:
        # This is called for every use of every parameter, in every micro-batch; only the first waits.
        bucket = self._bucket_of[name]
        if bucket in self._awaited:
            self._awaited.remove(bucket)
            with self._watch.lap("pull", stage=self.stage_index):
                self.pulls.wait(bucket)

    def train(
        self,
        batches: Sequence[MicroBatch],
        known: Batches,
        *,
        accumulate: bool = False,
        alone: bool = True,
        summed: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Laps]:
        """Pull, run every micro-batch forward and backward, push.

        `known` is what the schedule has to know of the micro-batches. `accumulate`: add to what the master gradients
        hold, the sum of the step's earlier phases. `alone`: the step has no other phase, so the masters' gradients
        may lie in the arena. `summed` as of `Pushes.fill`. Returns this rank's share of the loss, and its laps, to be
        read when the device has passed them.
        """
        masters = self._masters.trained
        masters.put_grads(self._sums if alone else None)
        self.pushes.fill(masters.grads, summed)
        self._accumulate, self._begun = accumulate, False
        self._start_pulls()
        slots = training_slots(self.place.schedule, known, self.num_stages, self.stage_index)
        with self._watch.lap("run", stage=self.stage_index):
            loss = self.stage_runtime.run(slots, batches, self)
        # For a pipeline without micro-batches: it had no backward, but its rank owns masters that others pull, and must
        # receive what others push.
        self.before_gradients()
        with self._watch.lap("push", stage=self.stage_index):
            self.pushes.finish(accumulate=accumulate)
        return loss, self._watch.take()

    def evaluate(
        self, batches: Sequence[MicroBatch], known: Batches, *, training: bool = False, adapted: bool = True
    ) -> Tensor:
        """Pull and run every micro-batch forward, in the mode of `training` or of an evaluation, and with adapters or
        without. Returns this rank's share of the loss."""
        for part in self.parts:
            part.module.train(training)
        self._start_pulls()
        slots = evaluation_slots(known, self.num_stages, self.stage_index)
        off = () if adapted else (module for part in self.parts for module in part.module.modules())
        with switched_off(off):
            loss = self.stage_runtime.run(slots, batches)
        self._finish_pulls()
        for part in self.parts:
            part.module.train()
        return loss

    def close(self) -> None:
        """Let go of stage, links and groups, in whatever state an error has left them; it cannot be used afterwards."""
        self.pushes.close()
        for part in self.parts:
            part.close()
        for held in (self.pulls, self.pushes, self.stage_runtime, self):
            vars(held).clear()

    @property
    def pull_bytes(self) -> int:
        """Bytes that this rank received in the last pull."""
        size = self._arena.params.dtype.itemsize
        return size * sum(link.received_numel for i, link in enumerate(self.pulls.links) if i not in self._kept)

    @property
    def push_bytes(self) -> int:
        """Bytes that this rank sends in a push."""
        size = self._wire_dtype.itemsize
        return size * sum(bucket.link.sent_numel for bucket in self.pushes.buckets)


def pull_link(plan: TransferPlan | TwinPull, rank: int, world: World) -> PullMover:
    """What runs a rank's part of a bucket's pull."""
    if isinstance(plan, TwinPull):
        return TwinPullLink(plan, rank, world.links, collectives=world.collectives, lane=world.lane)
    return Link(plan, rank, world.links)


def push_link(plan: TransferPlan | TwinPush, rank: int, world: World) -> PushMover:
    """What runs a rank's part of a bucket's push."""
    if isinstance(plan, TwinPush):
        return TwinPushLink(plan, rank, world.links, collectives=world.collectives, lane=world.lane)
    return Link(plan, rank, world.links)


_META = torch.device("meta")


class Runtimes:
    """The runtime of each strategy that was used. `strategies` are the candidates by their text; all ranks ask for the
    same ones in the same order."""

    def __init__(
        self,
        source: ModelSource,
        masters: ModelMasters,
        world: World,
        arena: Arena,
        activity: Doing,
        *,
        strategies: Mapping[str, Strategy],
        grad_dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ):
        self._source, self._masters, self._world, self._arena, self._activity = source, masters, world, arena, activity
        self._strategies, self._grad_dtype, self._wire_dtype = strategies, grad_dtype, wire_dtype
        self.built: dict[str, StrategyRuntime] = {}
        self.communicators = 0  # bytes of the device that groups and pairs have taken
        # Which pushes wait for which where the model is a small one that stands for another: the other's.
        self.turns_of: Callable[[Strategy], Sequence[int]] | None = None
        self.moved: Callable[[], Mapping[str, Tensor]] = dict  # buffers that a script has moved, by path

    def connect(self, beside: Collection[tuple[int, int]] = ()) -> None:
        """Connect what steps under the candidates use, and the pairs `beside` them over which masters travel otherwise;
        every rank must call it before the first step."""
        self._connect(self._strategies.values(), beside)

    def can_build(self, plan: StepPlan) -> bool:
        """Whether all strategies of a plan were used before, so that its micro-batches are built without a message;
        equal on all ranks."""
        return all(str(phase.shape) in self.built for phase in plan.phases)

    def strategy_of(self, phase: Phase) -> Strategy:
        """A phase's strategy, placed on the ranks."""
        placed = self._strategies.get(str(phase.shape))
        return placed or place_strategy(
            phase.shape, self._world.num_ranks, self._source.plan.num_layers, self._world.cluster
        )

    def of(self, phase: Phase) -> StrategyRuntime:
        """The runtime of a phase's strategy."""
        # A strategy that is no candidate, as HiGHS composes them and replayed plans may bring one, is connected at its
        # first use; that takes all ranks. They agree on the moment without a message: a plan is the same on all of
        # them, so they meet a strategy for the first time in the same step, before its first phase begins.
        name = str(phase.shape)
        if name not in self.built:
            strategy = self.strategy_of(phase)
            if name not in self._strategies:
                self._connect([strategy])
            self.built[name] = StrategyRuntime(
                strategy,
                self._source,
                self._masters,
                self._arena,
                self._world,
                self._activity,
                grad_dtype=self._grad_dtype,
                wire_dtype=self._wire_dtype,
                turns=None if self.turns_of is None else self.turns_of(strategy),
            )
        for path, value in self.moved().items():
            for part in self.built[name].parts:
                part.module.get_buffer(path).copy_(value)
        return self.built[name]

    def _connect(self, strategies: Collection[Strategy], beside: Collection[tuple[int, int]] = ()) -> None:
        """Connect what steps under these strategies use, so that none of them has to."""
        world = self._world
        pairs = connections_of(self._source.plan, strategies, world.node_size)
        before = world.device_bytes()
        links = pairs.links.union(beside)
        world.connect(strategies, links=links, edges=pairs.edges, teams=pairs.teams, naming=self._activity)
        self.communicators += world.device_bytes() - before
        if world.device.type != "cpu":
            tell_communicators(self.communicators, len(world.groups) + len(world.teams), world.rank)

    def close(self) -> None:
        """Let go of all strategies, their memory and their groups; it cannot be used afterwards."""
        for runtime in self.built.values():
            runtime.close()
        vars(self).clear()


def tell_communicators(taken: int, groups: int, rank: int) -> None:
    """Log what groups and pairs have taken of a device, beside what was left for them."""
    room, what = ROOM_FOR_COMMUNICATORS / 2**30, f"{groups} groups took {taken / 2**30:.2f}"
    if taken > ROOM_FOR_COMMUNICATORS:
        logger.warning(
            "rank %d: communicators of %s GiB of its device, and %.1f are left for them: steps near the limit may run "
            "out of memory. List fewer hydra.strategies, or lower hydra.context_length", rank, what, room,
        )  # fmt: skip
    elif rank == 0:
        logger.info("communicators of %s of the %.1f GiB that are left for them", what, room)


def build_stages(source: ModelSource, strategies: Iterable[Strategy], rank: int, dtype: torch.dtype) -> int:
    """Build each stage that `rank` will have once, without memory and without a message; how many there are.

    A strategy may be used for the first time after hours. ConfigError for an error of the model's own code, and for
    experts that the kernel which they run by cannot take.
    """
    built: set[object] = set()
    for strategy in strategies:
        pipeline = strategy.pipelines[strategy.locate(rank)[0]]
        sharding = source.plan.token_sharding
        for place in StagePlace.all_of(pipeline, rank, lambda members: None, token_sharding=sharding):
            kind = (*place.stage.ranges, place.stage.tp, place.stage.ep, place.holder)
            if kind not in built:
                try:
                    module = source.build(place, _META, dtype).module
                except (ConfigError, PlanError):
                    raise
                except Exception as error:
                    raise ConfigError(f"no stage of {strategy} can be built: {failing(error)}") from error
                needed = source.plan.needed(place.stage)
                specs = (param for bucket in source.plan.buckets for param in bucket.params if param.name in needed)
                refuse_misaligned_experts(module, specs, place.stage.tp, dtype)
                built.add(kind)
    return len(built)
