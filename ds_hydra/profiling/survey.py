"""Model, schemes and links in; one measured entry per scheme, for a cost table, out [Note: how an entry is made].

All ranks of the job take part. A scheme whose TP and SP degrees fit into them is measured with its collectives
running, one copy of the stage per group, all at once as in training; a wider one by local shapes, one copy per rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.pipe.placement import place_strategy, split_layers
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.profiling.fit import Fit, Point, fit_points
from ds_hydra.profiling.ladder import Rung, beyond_block
from ds_hydra.profiling.links import Collective, Links
from ds_hydra.profiling.stage_timer import StageTimer, Timing
from ds_hydra.profiling.within_memory import free_unused, within_memory
from ds_hydra.ranks.groups import GroupCache
from ds_hydra.zero_hetero.clock import Clock, HostClock, clock_of

How = Literal["ranks", "local shapes"]
UTILISED = 0.85  # of the best throughput: where UtilLen lies (Hydraulis, appendix D)


@dataclass(frozen=True, slots=True)
class RepeatBudget:
    """How often to measure: each micro-batch is repeated for about `seconds`, within the bounds on repeats."""

    seconds: float = 0.5
    least: int = 3
    most: int = 15

    def repeats(self, once_ms: float) -> int:
        """Repeats of a micro-batch that takes `once_ms`."""
        return max(self.least, min(self.most, int(1e3 * self.seconds / max(once_ms, 1e-3))))


@dataclass(frozen=True)
class StageEntry:
    """One stage of a scheme: what was measured of it and its own coefficients."""

    index: int
    num_layers: int
    how: How
    points: tuple[Point, ...]
    fit: Fit
    block_tokens: int | None = None  # a micro-batch of more computes its head twice
    no_room_tokens: int | None = None  # tokens of the micro-batch at which the device ran out of memory


@dataclass(frozen=True)
class SchemeEntry:
    """One scheme: its slowest stage's coefficients are the scheme's."""

    scheme: ParallelScheme
    stages: tuple[StageEntry, ...]
    clock: str
    scaled_links: bool  # some collective's time was scaled from a group of another size

    @property
    def slowest(self) -> StageEntry:
        """The stage with the largest load in the middle of the ladder, on a logarithmic scale."""
        # Which stage that is depends on the lengths: a large head weighs per token, c per micro-batch.
        probe = self.stages[0].points[len(self.stages[0].points) // 2]
        return max(self.stages, key=lambda stage: stage.fit.predict(probe))

    def cost(self, max_length: int) -> SchemeCost:
        """The scheme's row of a cost table.

        With PP = 1 a plan fills its micro-batches, so their heads are computed twice if any are; with more it keeps
        them small. Where the device ran out of memory MaxLen is smaller, whatever the memory model says.
        """
        max_length = min([max_length, *(s.no_room_tokens - 1 for s in self.stages if s.no_room_tokens is not None)])
        fit, block = self.slowest.fit, self.slowest.block_tokens
        filled = self.scheme.pp == 1 and block is not None and max_length > block
        a, b = fit.a, fit.b + (fit.r if filled else 0.0)
        b = b if a or b else 1e-9  # a table refuses costs that do not grow with the length
        return SchemeCost(self.scheme, a, b, fit.c, max_length, utilised_length(fit, max_length))

    def record(self) -> dict[str, Any]:
        """As the table file holds it."""
        slowest = self.slowest
        return {
            "how": slowest.how,
            "clock": self.clock,
            "scaled_links": self.scaled_links,
            "slowest_stage": slowest.index,
            "held_out_median": slowest.fit.held_out_median,
            "held_out_p90": slowest.fit.held_out_p90,
            "unidentified": list(slowest.fit.unidentified),
            "stages": [
                {
                    "index": stage.index,
                    "num_layers": stage.num_layers,
                    "chunk_tokens": stage.block_tokens,
                    "no_room_tokens": stage.no_room_tokens,
                    "fit": asdict(stage.fit),
                    "points": [asdict(point) for point in stage.points],
                }
                for stage in self.stages
            ],
        }


def utilised_length(fit: Fit, max_length: int) -> int:
    """UtilLen: the fewest tokens with 85% of the best throughput l / T(l) up to `max_length`."""
    lengths = np.unique(np.geomspace(1, max_length, 512).astype(np.int64))
    rate = lengths / (fit.a * lengths.astype(np.float64) ** 2 + fit.b * lengths + fit.c)
    return int(lengths[int(np.argmax(rate >= UTILISED * rate.max()))])


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
        on_point: Callable[[], None] | None = None,
    ) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        self._links, self._rungs = links, tuple(rungs)
        self._budget = budget or RepeatBudget()
        self._most_tokens = most_tokens or 8 * max(max(rung.lengths) for rung in self._rungs)
        self._clock_name = clock
        self._clock: Clock = clock_of(device) if clock == "wall" else HostClock(time.process_time)
        self._node_size, self._control = node_size, control
        self._on_point = on_point or (lambda: None)
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._groups = GroupCache(lambda members: dist.new_group(list(members)))

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
        self._run(timer, self._rungs[0])  # later rungs need no warm-up: the median drops a slow first run
        points: list[Point] = []
        no_room: int | None = None
        for rung in (*self._rungs, *beyond_block(self._rungs, block, self._most_tokens)):
            point = self._point(timer, rung)
            if point is None:
                no_room = sum(rung.lengths)
                break
            points.append(point)
        if len({sum(point.lengths) for point in points if not point.held_out}) < 2:
            return None
        num_layers = timer.place.stage.last_layer - timer.place.stage.first_layer
        return StageEntry(index, num_layers, how, tuple(points), fit_points(points), block, no_room)

    def _builder(self, scheme: ParallelScheme, index: int, how: How) -> Callable[[], StageTimer]:
        """What builds the stage, without communication."""
        timer = partial(StageTimer, self._source, scheme, index, self._device, self._dtype, clock=self._clock)
        if how == "local shapes" or scheme.tp * scheme.sp == 1:
            return timer
        # As many copies of the stage as the ranks hold run side by side, as in training, where they share memory and
        # links: eight ranks measure TP2 on four pairs at once.
        width = scheme.tp * scheme.sp
        copies = place_strategy(
            StrategyShape.of([ParallelScheme(scheme.tp, 1, scheme.sp)] * (self._world // width)), self._world, 1
        )
        self._groups.create(copies)
        mine = copies.pipelines[self._rank // width].stages[0]
        tp_rank, sp_rank = mine.coordinates(self._rank)
        tp_group, sp_group = (self._groups.get(of(self._rank)) for of in (mine.tp_ranks, mine.sp_ranks))
        return partial(timer, tp_group=tp_group, sp_group=sp_group, tp_rank=tp_rank, sp_rank=sp_rank)

    def _run(self, timer: StageTimer, rung: Rung) -> Timing | None:
        """Time one micro-batch on this rank; None if it has no memory for it."""
        try:
            return timer.time(rung.lengths, warm_up=0)
        except torch.OutOfMemoryError:
            pass  # here the traceback still holds the tensors of the run
        free_unused()
        return None

    def _point(self, timer: StageTimer, rung: Rung) -> Point | None:
        """One micro-batch: the slowest rank's time in each repeat, the median over the repeats.

        None on all ranks where one has no memory for it. (Ranks of a tensor or sequence parallel group allocate alike,
        so one of them does not wait in a collective for another that has failed.)
        """
        # The first run tells how many there are time for. All ranks must agree on that number, or some would wait in a
        # collective for ever, so it follows from the slowest rank's time.
        samples: list[float] = []
        calls: tuple[Collective, ...] = ()
        repeats = 1
        while len(samples) < repeats:
            self._meet()
            timing = self._run(timer, rung)
            samples.append(self._over_ranks(math.inf if timing is None else timing.ms))
            if timing is None or math.isinf(samples[-1]):
                return None
            calls = timing.calls
            if len(samples) == 1:
                repeats = self._budget.repeats(samples[0])
        compute, least = statistics.median(samples), min(samples)
        tokens = sum(rung.lengths)
        inter_tp = self._crosses(timer.scheme.tp)
        comm = self._links.total_ms(calls, inter_node=inter_tp) if calls else 0.0
        if timer.scheme.pp > 1:
            comm += timer.message_ms(tokens, self._links, inter_node=self._crosses(timer.scheme.num_ranks))
        self._on_point()
        chunked = timer.block_tokens is not None and tokens > timer.block_tokens
        return Point(rung.lengths, compute + comm, compute, comm, compute / least - 1.0, rung.held_out, chunked)

    def _crosses(self, width: int) -> bool:
        """Whether so many neighbouring ranks lie on more than one node, and the links know of that."""
        wide = self._node_size is not None and width > self._node_size
        return wide and any(figure.inter_node for figure in self._links.figures)

    def _meet(self) -> None:
        if self._world > 1:
            dist.barrier(self._control)

    def _over_ranks(self, ms: float) -> float:
        """One time of all ranks' times; infinite if one of them is."""
        if self._world == 1:
            return ms
        # Ranks wait for each other, so the slowest one's wall time counts. CPU time does not see waiting: there the
        # mean evens out what the operating system gave to one rank and took from another.
        wall = self._clock_name == "wall"
        shared = torch.tensor(ms, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX if wall else dist.ReduceOp.SUM, group=self._control)
        return float(shared) if wall else float(shared) / self._world


def entry_from_record(scheme: ParallelScheme, record: Mapping[str, Any]) -> SchemeEntry:
    """Inverse of `SchemeEntry.record`."""
    stages = tuple(
        StageEntry(
            stage["index"],
            stage["num_layers"],
            record["how"],
            tuple(Point(**{**point, "lengths": tuple(point["lengths"])}) for point in stage["points"]),
            Fit(
                **{
                    **stage["fit"],
                    "standard_errors": tuple(stage["fit"]["standard_errors"]),
                    "unidentified": tuple(stage["fit"]["unidentified"]),
                }
            ),
            stage.get("chunk_tokens"),
            stage.get("no_room_tokens"),
        )
        for stage in record["stages"]
    )
    return SchemeEntry(scheme, stages, record["clock"], record["scaled_links"])
