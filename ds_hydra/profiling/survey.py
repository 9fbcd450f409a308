"""Measures the schemes of a model, an entry of a cost table each [Note: how an entry is made]; and links of ranks.

All ranks of the job take part. A scheme whose TP and SP degrees fit into them is measured with its collectives
running, one copy of the stage per group, all at once as in training; a wider one by local shapes, one copy per rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ds_hydra.pipe.head_sharing import near_ranks
from ds_hydra.pipe.placement import place_strategy, split_layers
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.profiling.fit import (
    How,
    Point,
    Rung,
    SchemeEntry,
    SplitPoint,
    StageEntry,
    beyond_block,
    beyond_floor,
    fit_points,
    fit_split,
    nonnegative_least_squares,
    split_rungs,
)
from ds_hydra.profiling.links import Counted, LinkFigure, Links, exposed_ms
from ds_hydra.profiling.stage_timer import StageTimer, Timing, free_unused, within_memory
from ds_hydra.ranks.groups import GroupCache, Ranks, make_groups, needed_groups
from ds_hydra.zero_hetero.clock import Clock, HostClock, clock_of
from ds_hydra.zero_hetero.transport import TorchTransport

_STEADY = 0.05  # spread of repeats
_CLEAR = 3.0  # times of a floor that may be in the shortest micro-batch: from there on it has no part in a time


@dataclass(frozen=True, slots=True)
class RepeatBudget:
    """How often to measure: each micro-batch is repeated for about `seconds`, within the bounds on repeats."""

    seconds: float = 0.5
    least: int = 3
    most: int = 15

    def repeats(self, once_ms: float) -> int:
        """Repeats of a micro-batch that takes `once_ms`."""
        return max(self.least, min(self.most, int(1e3 * self.seconds / max(once_ms, 1e-3))))


class _Sampled(NamedTuple):
    """One part of a micro-batch: milliseconds of each repeat, and what collectives add that were counted, not run."""

    ms: list[float]
    collectives_ms: float


def distinct_stages(num_layers: int, scheme: ParallelScheme) -> tuple[int, ...]:
    """The stages that can be the slowest: the first, the last, and of those between the one with the most layers."""
    counts = split_layers(num_layers, scheme.pp)
    between = [i for i in range(1, scheme.pp - 1) if counts[i] == max(counts[1:-1])][:1]
    return tuple(dict.fromkeys((0, *between, scheme.pp - 1)))


class Survey:
    """Measures schemes of one model on the ranks at hand; every rank must make the same calls."""

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        dtype: torch.dtype,
        links: Links,
        rungs: Sequence[Rung],
        *,
        budget: RepeatBudget | None = None,
        clock: Literal["wall", "cpu"] = "wall",
        most_tokens: int | None = None,
        node_size: int | None = None,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        self._links, self._rungs = links, tuple(rungs)
        self._budget = budget or RepeatBudget()
        self._most_tokens = most_tokens or 8 * max(max(rung.lengths) for rung in self._rungs)
        self._clock_name = clock
        self._launched = device.type == "cuda"  # a host launches what is measured, and may be slower than the device
        self._clock: Clock = clock_of(device) if clock == "wall" else HostClock(time.process_time)
        self._node_size, self._control = node_size, control
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._groups = GroupCache(self._rank, _make)

    def how(self, scheme: ParallelScheme) -> How:
        """Which way a scheme is measured. CPU time does not see waiting, so it goes with local shapes."""
        width = scheme.tp * scheme.sp
        alone = width == 1 or self._clock_name == "cpu" or width > self._world or self._world % width
        return "local shapes" if alone and width > 1 else "ranks"

    def measure(self, scheme: ParallelScheme) -> SchemeEntry | None:
        """Measure the stages of a scheme that can be the slowest, on every micro-batch of the ladder.

        The ladder stops where a rank runs out of memory. None if it stops before there are two lengths to fit.
        """
        how = self.how(scheme)
        stages: list[StageEntry] = []
        for index in distinct_stages(self._source.plan.num_layers, scheme):
            stage = self._stage(scheme, index, how)
            if stage is None:
                return None
            stages.append(stage)
        degrees = [(op, n) for op, n in (("all_reduce", scheme.tp), ("all_to_all", scheme.sp)) if n > 1]
        scaled = how == "local shapes" and any(self._links.is_scaled(op, n) for op, n in degrees)
        return SchemeEntry(scheme, tuple(stages), self._clock_name, scaled)

    def _stage(self, scheme: ParallelScheme, index: int, how: How) -> StageEntry | None:
        timer = within_memory(self._builder(scheme, index, how), self._control)
        if timer is None:
            return None
        block = timer.block_tokens if scheme.pp == 1 else None  # with more, micro-batches are kept small
        # Training runs short micro-batches among long ones, so memory that a long one needed is at hand. Without the
        # longest one first, the C library gives memory back after each run and gets it again, page by page: of 384
        # tokens beside a vocabulary of 8192 that took 12% of the time. Later rungs need no warm-up: the median drops a
        # slow first run.
        for rung in (self._rungs[0], self._rungs[-1]):
            self._run(partial(_warm_up, timer, rung))
        points: list[Point] = []
        no_room: int | None = None
        further = beyond_floor(self._rungs, self._most_tokens) if self._launched else ()
        for rung in (*self._rungs, *beyond_block(self._rungs, block, self._most_tokens), *further):
            if rung in further and points[-1].ms > _CLEAR * points[0].ms:
                break
            point = self._point(timer, rung)
            if point is None:
                no_room = sum(rung.lengths)
                break
            points.append(point)
        if len({sum(point.lengths) for point in points if not point.held_out}) < 2:
            return None
        num_layers = timer.place.stage.last_layer - timer.place.stage.first_layer
        fit, in_parts = fit_points(points, floor=self._launched), self._split_points(timer, no_room)
        split = fit_split(in_parts, fit)
        return StageEntry(index, num_layers, how, tuple(points), fit, block, no_room, in_parts, split)

    def _builder(self, scheme: ParallelScheme, index: int, how: How) -> Callable[[], StageTimer]:
        """What builds the stage, without communication."""
        near = near_ranks(scheme.sp, scheme.tp, self._node_size)
        timer = partial(
            StageTimer, self._source, scheme, index, self._device, self._dtype, near=near, clock=self._clock
        )
        if how == "local shapes" or scheme.tp * scheme.sp == 1:
            return timer
        # As many copies of the stage as the ranks hold run side by side, as in training, where they share memory and
        # links: eight ranks measure TP2 on four pairs at once.
        width = scheme.tp * scheme.sp
        copies = place_strategy(
            StrategyShape.of([ParallelScheme(scheme.tp, 1, scheme.sp, scheme.ep)] * (self._world // width)),
            self._world,
            1,
        )
        self._groups.create(needed_groups(copies))
        mine = copies.pipelines[self._rank // width].stages[0]
        tp_rank, sp_rank = mine.coordinates(self._rank)
        tp_group, sp_group = (self._groups.get(of(self._rank)) for of in (mine.tp_ranks, mine.sp_ranks))
        return partial(timer, tp_group=tp_group, sp_group=sp_group, tp_rank=tp_rank, sp_rank=sp_rank)

    def _samples(
        self, timer: StageTimer, measure: Callable[[], tuple[Timing, ...]], num_parts: int, most: int | None = None
    ) -> tuple[_Sampled, ...] | None:
        """Each part's times of one micro-batch: the slowest rank's in each repeat, of which there are `most`, if given.

        None on all ranks where one has no memory for it. (Ranks of a tensor or sequence parallel group allocate alike,
        so one of them does not wait in a collective for another that has failed.)
        """
        # The first run tells how many there are time for. All ranks must agree on that number, or some would wait in a
        # collective for ever, so it follows from the slowest rank's time.
        rows: list[list[float]] = []
        added = [0.0] * num_parts
        repeats, most = 1, most or self._budget.most
        while len(rows) < repeats:
            self._meet()
            timings = self._run(measure)
            rows.append(self._over_ranks([math.inf] * num_parts if timings is None else [part.ms for part in timings]))
            if timings is None or math.inf in rows[-1]:
                return None
            added = [self._collectives_ms(timer, part.calls) for part in timings]
            if len(rows) == 1:
                repeats = min(self._budget.repeats(sum(rows[0])), most)
            if self._launched and len(rows) == repeats and _spread(rows) > _STEADY:
                repeats = min(2 * repeats, most)  # a host that does other things too disturbs some repeats, not most
        # How much is hidden depends on what a rank has measured, and all are to know the same.
        return tuple(_Sampled([row[part] for row in rows], ms) for part, ms in enumerate(self._over_ranks(added)))

    def _run(self, measure: Callable[[], tuple[Timing, ...]]) -> tuple[Timing, ...] | None:
        """Time one micro-batch on this rank; None if it has no memory for it."""
        try:
            return measure()
        except torch.OutOfMemoryError:
            pass  # here the traceback still holds the tensors of the run
        free_unused()
        return None

    def _point(self, timer: StageTimer, rung: Rung) -> Point | None:
        """One micro-batch, forward and backward; None where there is no memory for it."""
        found = self._samples(timer, lambda: (timer.time(rung.lengths, warm_up=0),), 1)
        if found is None:
            return None
        (whole,), tokens = found, sum(rung.lengths)
        compute, least = statistics.median(whole.ms), min(whole.ms)
        comm = whole.collectives_ms + self._message_ms(timer, tokens)
        chunked = self._in_blocks(timer, tokens)
        return Point(rung.lengths, compute + comm, compute, comm, compute / least - 1.0, rung.held_out, chunked)

    def _split_points(self, timer: StageTimer, no_room: int | None) -> tuple[SplitPoint, ...]:
        """Micro-batches with the backward split, and slices, as far as the model can be cut and there is memory."""
        found: list[SplitPoint] = []
        most = math.inf if no_room is None else no_room
        for rung in split_rungs(self._rungs, timer.block_tokens):
            tokens = sum(rung.lengths)
            if rung.start + tokens >= most or (rung.start and timer.source.plan.no_slices):
                continue
            parts = self._samples(timer, partial(timer.time_parts, rung.lengths, rung.start), 3, self._budget.least)
            if parts is None:
                most = rung.start + tokens  # split, it keeps more than in one
                continue
            forward, backward, weight = (statistics.median(part.ms) + part.collectives_ms for part in parts)
            message = self._message_ms(timer, tokens) / 2  # the hidden states, and then their gradients
            found.append(
                SplitPoint(
                    rung.lengths, rung.start, forward + message, backward + message, weight, rung.held_out,
                    self._in_blocks(timer, tokens),
                )
            )  # fmt: skip
        return tuple(found)

    @staticmethod
    def _in_blocks(timer: StageTimer, tokens: int) -> bool:
        """Whether a micro-batch computes its head twice."""
        return timer.block_tokens is not None and tokens > timer.block_tokens

    def _collectives_ms(self, timer: StageTimer, counted: Sequence[Counted]) -> float:
        """Milliseconds that collectives which were counted and not run add: what is computed meanwhile hides them."""
        # A TP group stands in a row; an SP group, which alone makes all-to-alls, has a rank of each of its TP groups.
        # From rank to rank it sends only between nodes.
        tp, sp = timer.scheme.tp, timer.scheme.sp
        calls = [one.call for one in counted]
        widths = [
            tp * (call.group_size if call.operation == "all_to_all" else sp if call.operation == "p2p" else 1)
            for call in calls
        ]
        ms = [self._links.ms(call, inter_node=self._crosses(w)) for call, w in zip(calls, widths, strict=True)]
        return exposed_ms(counted, ms)

    def _message_ms(self, timer: StageTimer, tokens: int) -> float:
        """Milliseconds of a micro-batch's messages to the neighbours in its pipeline."""
        if timer.scheme.pp == 1:
            return 0.0
        return timer.message_ms(tokens, self._links, inter_node=self._crosses(timer.scheme.num_ranks))

    def _crosses(self, width: int) -> bool:
        """Whether so many neighbouring ranks lie on more than one node, and the links know of that."""
        wide = self._node_size is not None and width > self._node_size
        return wide and any(figure.inter_node for figure in self._links.figures)

    def _meet(self) -> None:
        if self._world > 1:
            dist.barrier(self._control)

    def _over_ranks(self, ms: list[float]) -> list[float]:
        """Times of all ranks' times; infinite where one of them is."""
        if self._world == 1:
            return ms
        # Ranks wait for each other, so the slowest one's wall time counts. CPU time does not see waiting: there the
        # mean evens out what the operating system gave to one rank and took from another.
        wall = self._clock_name == "wall"
        shared = torch.tensor(ms, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX if wall else dist.ReduceOp.SUM, group=self._control)
        found: list[float] = (shared if wall else shared / self._world).tolist()
        return found


def _spread(rows: Sequence[Sequence[float]]) -> float:
    """How much longer than the fastest repeat the median one takes, as a share."""
    times = [sum(row) for row in rows]
    return statistics.median(times) / min(times) - 1.0


def _warm_up(timer: StageTimer, rung: Rung) -> tuple[Timing, ...]:
    return (timer.time(rung.lengths, warm_up=0),)


def _make(groups: Sequence[Ranks]) -> dist.ProcessGroup | None:
    assert dist.group.WORLD is not None, "only schemes of several ranks need groups"
    return make_groups(dist.group.WORLD, groups)


SIZES = (4096, 65536, 1 << 19, 1 << 21, 1 << 23)  # bytes
_WARM_UP = 2  # calls that open connections
_LARGE_REPEATS = 5  # of a message beyond SIZES: its time scatters little

Call = Callable[[], object]
Prepare = Callable[[int], Call]
"""Allocates tensors of that many FP32 elements on this rank; the call that it returns is what is timed."""


def message_sizes(largest: int) -> tuple[int, ...]:
    """Bytes of the messages to time, up to `largest`, the largest of the job, and up to 8 MiB in any case.

    Libraries send long messages in another way than short ones, so what was seen at 8 MiB says little of 300.
    """
    sizes = list(SIZES)
    while 4 * sizes[-1] < largest:
        sizes.append(4 * sizes[-1])
    return (*sizes, largest) if largest > sizes[-1] else tuple(sizes)


def time_links(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
) -> list[LinkFigure]:
    """Figures of one group's size, the same on every rank of it. Every rank of the group must call it.

    A line of latency and bandwidth is fitted to the medians over some sizes, relative errors counting alike. Sizes from
    the first on that some rank has no memory for are left out; `largest_bytes` tells how far a figure goes.
    """
    me = ranks.index(dist.get_rank())
    clock = clock_of(device)
    figures: list[LinkFigure] = []
    for operation, prepare in _calls(ranks, me, group, device).items():
        medians: list[float] = []
        for num_bytes in sizes:
            call = _prepared(prepare, num_bytes // 4, group, device)
            if call is None:
                break
            few = min(repeats, _LARGE_REPEATS) if num_bytes > SIZES[-1] else repeats
            medians.append(_median_ms(call, few, group, device, clock))
        figures.append(_figure(operation, len(ranks), sizes[: len(medians)], medians))
    return figures


def _calls(ranks: Sequence[int], me: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Prepare]:
    """Each operation, by its name."""
    size = len(ranks)
    transport = TorchTransport(group)

    def all_reduce(numel: int) -> Call:
        whole = torch.zeros(numel, device=device)  # summed in place again and again, so not ones
        return lambda: dist.all_reduce(whole, group=group)

    def all_gather(numel: int) -> Call:
        share = torch.ones(max(1, numel // size), device=device)
        parts = [torch.empty_like(share) for _ in ranks]
        return lambda: dist.all_gather(parts, share, group=group)

    def all_to_all(numel: int) -> Call:
        whole = torch.ones(max(1, numel // size) * size, device=device)
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)

    def p2p(numel: int) -> Call:
        whole = torch.ones(numel, device=device)
        sends = [(1, whole)] if me == 0 else []
        receives = [(0, whole)] if me == 1 else []
        return lambda: transport.exchange(sends, receives).wait()

    return {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all, "p2p": p2p}


def _prepared(prepare: Prepare, numel: int, group: dist.ProcessGroup, device: torch.device) -> Call | None:
    """The call of one size, or None on all ranks of the group where one of them has no memory for it."""
    call: Call | None = None
    try:
        call = prepare(numel)
    except torch.OutOfMemoryError:
        free_unused()
    ready = torch.tensor([float(call is not None)], device=device)
    dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=group)
    return call if float(ready) else None


def _median_ms(call: Call, repeats: int, group: dist.ProcessGroup, device: torch.device, clock: Clock) -> float:
    """Median milliseconds of a call on the slowest rank."""
    samples: list[float] = []
    for _ in range(repeats + _WARM_UP):
        dist.barrier(group)
        began = clock.now()
        call()
        ended = clock.now()
        clock.wait()
        samples.append(1e3 * clock.seconds(began, ended))
    slowest = torch.tensor([statistics.median(samples[_WARM_UP:])], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _figure(operation: str, size: int, sizes: Sequence[int], ms: Sequence[float]) -> LinkFigure:
    """Latency and bandwidth of a line through (bytes, ms)."""
    # Divided by the times, so that relative errors count alike: 10 % off is as bad at 4 KB as at 8 MB.
    times = np.array(ms)
    terms = np.column_stack((np.ones(len(sizes)), np.array(sizes, dtype=np.float64))) / times[:, None]
    latency, per_byte = nonnegative_least_squares(terms, np.ones(len(sizes)))
    # Noise can make the line fall; then all of the longest message's time counts as bandwidth.
    slope = per_byte if per_byte > 0 else float(times.max()) / max(sizes)
    return LinkFigure(operation, size, round(1e3 * float(latency), 3), 1e3 / float(slope), largest_bytes=max(sizes))
