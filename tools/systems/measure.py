"""What ours and every other system take for the batches of a cell, by one simulator for all. Pulls and pushes are in,
and what noise of machines adds. Ours is set up with other data than the batches that are reported.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.chunked import ChunkedSpace
from ds_hydra.planner.exact import continuous_ms, scheme_of
from ds_hydra.planner.kernels.problem import Batch, scheme_arrays
from ds_hydra.planner.propose import Wider, propose_strategies, wider_shapes
from ds_hydra.rivals.costs import NODE, cluster_of, measured, with_ulysses
from ds_hydra.rivals.dynamic_cp import AS_MADE, as_made
from ds_hydra.rivals.preview import Messages
from ds_hydra.rivals.systems import (
    Chosen,
    Configuration,
    Lengths,
    StepMs,
    balanced,
    batch_rebalance,
    deepspeed,
    hindsight,
    infinipipe,
    megatron,
    planned_by,
)
from ds_hydra.rivals.waits import WaitingCost
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError
from tools.systems.cells import LONG_CELLS, SEEN_BEFORE, Cell, tflops
from tools.systems.rivals import (
    dealt,
    dealt_out_ms,
    dynamic_context_parallel,
    flexsp,
    hetu_b,
    hotspa,
    hybrid_data_parallel,
    hydraulis,
)

NOISE = 0.03  # standard deviation of a pipeline's time, of the whole of it
_DRAWS, _SEED = 512, 3


@lru_cache(maxsize=64)
def _noise(pipelines: int) -> NDArray[np.float64]:
    """The same draws for every system, so that what two take differs by their times alone."""
    drawn = np.random.default_rng(_SEED).standard_normal((_DRAWS, pipelines))
    return 1.0 + NOISE * (drawn - drawn.mean(axis=0))


def jitter_ms(pipeline_ms: Sequence[float]) -> float:
    """How much longer the last of these is expected to take, if each is longer or shorter by a few percent.

    Sixteen equal ones take 1.77 * 3 % longer, one alone nothing.
    """
    times = np.asarray(pipeline_ms, dtype=np.float64)
    return float((_noise(len(times)) * times).max(axis=1).mean() - times.max())


_TRIED = 3  # batches by which ours is set up
_CLOSE, _MIXES = 1.08, 3  # layouts of one shape that are looked at: so many times the best on one batch; and mixes
_MOST = 60  # of whole sequences, which are quick to plan


class Ours(NamedTuple):
    """A way to set our planner up: its candidates, and layers of the model where it may cut sequences and compute
    layers again (0: it may not)."""

    configuration: Configuration
    strategies: tuple[StrategyShape, ...]
    layers: int


def ds_hydra(cell: Cell, ms: StepMs) -> Ours:
    """The best of what `"strategies": "auto"` can be asked for, by steps of other data, simulated with their transfers.

    Whole sequences under 1F1B, or with slices, split backwards and V's besides; on the measured schemes of TP and PP,
    and with Ulysses on them: of up to two nodes where there are several stages. One stage may be three nodes that share
    queries.
    """
    tried = list(settings(cell, all_schemes(cell), ms))
    best = hindsight((one.configuration for one in tried), cell.batches(_TRIED, SEEN_BEFORE), ms).configuration
    return next(one for one in tried if one.configuration is best)


def settings(cell: Cell, table: CostTable, ms: StepMs) -> Iterator[Ours]:
    """What a job may choose from: plans of whole sequences only, or chunked pipelines besides."""
    layers = layers_of(cell)
    whole: tuple[StrategyShape, ...] = ()
    if max(cost.max_length for cost in table.costs) >= cell.context:
        whole = proposed(cell, table, count=_MOST)
        yield Ours(_configured(cell, table, whole, ms, layers=0), whole, 0)
    wider = Wider(wider_shapes(table, num_layers=layers), layers=layers, plain=False)
    more = tuple(dict.fromkeys((*whole, *proposed(cell, table, wider=wider))))
    yield Ours(_configured(cell, table, more, ms, layers=layers), more, layers)


def composed(cell: Cell, ours: Ours, ms: StepMs) -> Configuration:
    """The same with HiGHS, which composes strategies for the very batch, as a job has it."""
    table = ours.configuration.table
    return _configured(cell, table, ours.strategies, ms, layers=ours.layers, highs="composes")


def one_mix(cell: Cell, ours: Ours, plans: Sequence[StepPlan], ms: StepMs) -> Iterator[Configuration]:
    """The same with one and the same mix of pipelines in every step: those that it chose most often."""
    chosen = Counter(plan.phases[0].shape for plan in plans)
    for strategy, _ in chosen.most_common(_MIXES):
        one = _configured(cell, ours.configuration.table, (strategy,), ms, layers=ours.layers)
        yield one._replace(text=str(strategy))


def layers_of(cell: Cell) -> int:
    """Of the cell's model."""
    return cell.of_model.shape.layers


def one_layout(cell: Cell, ms: StepMs, *, chunked: bool) -> Iterator[Configuration]:
    """Our engine with pipelines of one shape in every step, sequences dealt out and packed by our planner: of whole
    sequences, or in slices and V's. Those that are close to the best on one batch."""
    table, layers = all_schemes(cell), layers_of(cell) if chunked else 0
    shapes = wider_shapes(table, num_layers=layers) if chunked else map(PipelineShape.of, table.schemes)
    batch = max(cell.batches(_TRIED, SEEN_BEFORE), key=max)
    found: list[tuple[float, Configuration]] = []
    for shape in shapes:
        if cell.gpus % shape.num_ranks:
            continue
        strategy = StrategyShape((shape,) * (cell.gpus // shape.num_ranks))
        configuration = _configured(cell, table, (strategy,), ms, layers=layers)._replace(text=str(strategy))
        with contextlib.suppress(PlanError):  # it does not hold the batch
            found.append((ms(configuration.plan(0, batch), table), configuration))
    best = min((taken for taken, _ in found), default=0.0)
    return (one for taken, one in sorted(found, key=lambda row: row[0]) if taken <= _CLOSE * best)


def all_schemes(cell: Cell) -> CostTable:
    """The measured schemes, and Ulysses on them as ours runs it, by lengths of other data."""
    return with_ulysses(cell, cell.lengths(SEEN_BEFORE))


def proposed(cell: Cell, table: CostTable, **more: Any) -> tuple[StrategyShape, ...]:
    """Strategies that are proposed for other lengths of the same data."""
    return propose_strategies(
        table, cell.gpus, cell.lengths(SEEN_BEFORE), cell.tokens, cell.context, tp_across_nodes=True,
        exposed=partial(exposed_of, cell), **more,
    )  # fmt: skip


def _configured(
    cell: Cell, table: CostTable, strategies: tuple[StrategyShape, ...], ms: StepMs, *, layers: int, highs: str = "off"
) -> Configuration:
    """Our planner over these strategies; `layers` of the model where it may cut sequences and compute layers again."""
    planner = Planner(
        table, strategies, PlannerOptions(kernels="compiled", layers=layers, highs=highs),
        exposed_ms=[exposed_of(cell, one) for one in strategies], step_ms=partial(ms, table=table),
    )  # fmt: skip
    degrees = "TP, PP and SP" if any(cost.uniform.sp > 1 for cost in table.costs) else "TP and PP"
    kinds = "slices and V's" if layers else "whole sequences"
    return planned_by(f"{len(strategies)} strategies of {degrees}, {kinds}", table, planner)


@lru_cache(maxsize=1024)  # the ways to set ours up ask for many of the same strategies
def exposed_of(cell: Cell, strategy: StrategyShape) -> float:
    return exposed_ms(_cluster(cell), strategy, cell.tokens)


@lru_cache(maxsize=1)
def _cluster(cell: Cell) -> SimulatedJob:
    return cluster_of(cell, all_schemes(cell))


def chunked_bound_ms(cell: Cell, batches: Sequence[Lengths]) -> float:
    """Mean over the batches of the least time in which fractions of pipelines would do all work, with slices and the
    least layers computed again that each length asks for; without bubbles, with c as in full micro-batches.

    Over schemes with SP inside nodes on stages: over two nodes it takes more GPU-seconds than it saves.
    """
    table, layers = all_schemes(cell), layers_of(cell)
    inside = [s for s in wider_shapes(table, num_layers=layers) if scheme_of(s).tp * scheme_of(s).sp <= NODE]
    shapes = [*inside, *(PipelineShape.of(scheme) for scheme in table.schemes if scheme.pp == 1)]
    space = ChunkedSpace(table, [StrategyShape((shape,)) for shape in shapes], slices=True, layers=layers)
    ones = np.ones(len(shapes))
    arrays = space.bounding._replace(pp=ones, c=np.zeros(len(shapes)))
    sizes = np.array([shape.num_ranks for shape in shapes])
    found = []
    for lengths in batches:
        batch = space.batch(lengths)
        full = np.array([cost.c / cost.max_length for cost in space.costs])
        with_c = batch.with_work(batch.items.work + full[:, None] * batch.items.tokens)
        found.append(continuous_ms(with_c, arrays, sizes, cell.gpus))
    return statistics.fmean(found)


OURS, STATIC, FIXED = "ds-hydra", "Megatron-LM", "best fixed, balanced"
# Our engine with less: one layout in every step, of whole sequences or in slices and V's; one mix in every step; and
# with strategies that HiGHS composes, as a job has them.
ONE_WHOLE, ONE_CHUNKED, ONE_MIX, COMPOSED = "one layout, whole", "one layout, V", "one mix", "ds-hydra, composed"
OWN = (ONE_WHOLE, ONE_CHUNKED, ONE_MIX, COMPOSED)
System = Callable[[Cell, Sequence[Lengths]], Iterator[Configuration]]
# What nobody ships: groups of any units form without a wait, and short sequences are shared for nothing.
IDEAL = ("ideal dynamic CP", "ideal hybrid DP")
RIVALS: dict[str, System] = {
    STATIC: lambda cell, _: megatron(cell),
    FIXED: lambda cell, _: balanced(cell),
    "DeepSpeed": lambda cell, _: deepspeed(cell),
    "batch_rebalance": lambda cell, _: batch_rebalance(cell),
    "ideal dynamic CP": dynamic_context_parallel,
    "ideal hybrid DP": hybrid_data_parallel,
    "HotSPa": hotspa,
    "FlexSP": lambda cell, _: flexsp(cell),
    "Hetu-B": hetu_b,
    "Hydraulis": lambda cell, _: hydraulis(cell),
    "InfiniPipe": lambda cell, _: infinipipe(cell),
}
# The same plans with short sequences dealt out whole, beside those that share them for nothing [Note: dealt out].
DEALT = {name: f"{name}, dealt out" for name in IDEAL}
NAMES = (OURS, *RIVALS, *DEALT.values(), *AS_MADE, *OWN)
_WITH_OTHERS = {*DEALT.values(), ONE_CHUNKED, ONE_MIX, COMPOSED}
BY_THEMSELVES = tuple(name for name in NAMES if name not in _WITH_OTHERS)
_TASKS_OF_A_WORKER = 48  # then another process takes its place, without what it has kept


@dataclass(frozen=True)
class Measured:
    """A system's steps in a cell: simulated times in ms, one of each step, and shares of them."""

    system: str
    configuration: str
    step_ms: tuple[float, ...]
    run_ms: float  # mean of the same without pulls, pushes and the update: propagation
    gap: float  # median of slowest minus fastest pipeline over slowest
    bubbles: float  # mean
    strategies: dict[str, int]
    seconds: float  # that planning took here
    tflops: float = 0.0  # of each GPU, as `cells.tflops`; 0 in files written before it was told
    waits_ms: float = 0.0  # mean of what messages of shared sequences, and groups' remainders, add; 0 in older files

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.step_ms)

    @property
    def deviation_ms(self) -> float:
        return statistics.pstdev(self.step_ms)


class Simulated(NamedTuple):
    """One step as its plan's system takes it."""

    ms: float
    bubble_share: float
    waits_ms: float = 0.0  # of `ms`, if transfers took no time


class Simulators:
    """Simulates plans on a cell's cluster, by any cost table; each plan once."""

    def __init__(self, cell: Cell) -> None:
        self._messages = Messages(cluster_of(cell, measured(cell)), cell.tokens)
        self._done: dict[int, tuple[StepPlan, Simulated]] = {}  # the plans too, so that no other gets the id of one

    def simulated(self, plan: StepPlan, table: CostTable) -> Simulated:
        """One step of a plan that these costs hold for."""
        if id(plan) not in self._done:
            self._done[id(plan)] = plan, self._simulated(plan, table)
        return self._done[id(plan)][1]

    def ms(self, plan: StepPlan, table: CostTable) -> float:
        """The same, its time only."""
        return self.simulated(plan, table).ms

    def _simulated(self, plan: StepPlan, table: CostTable) -> Simulated:
        step = self._messages.of(table).step(plan)
        times = iter(simulate_plan(plan, table))
        noise = sum(jitter_ms(list(itertools.islice(times, len(phase.pipelines)))) for phase in plan.phases)
        waits = 0.0
        if any(isinstance(cost, WaitingCost) for cost in table.costs):
            with_waits, without = (CostTable(tuple(map(of, table.costs))) for of in (_in_rows, _without_waits))
            waits = plan.total_ms(simulate_plan(plan, with_waits)) - plan.total_ms(simulate_plan(plan, without))
        return Simulated(1e3 * step.step_s + noise, step.bubble_share, waits)


def measure(cell: Cell, steps: int, name: str) -> dict[str, Measured]:
    """What a system takes for the batches of a cell; nothing where it cannot be set up. Groups that share everything
    come with the same dealt out, and ours with what it has less of, or more."""
    batches, simulators = cell.batches(steps), Simulators(cell)
    found: dict[str, Measured] = {}
    began = time.thread_time()
    if name == OURS:
        return _ours(cell, batches, simulators)
    if name == ONE_WHOLE:
        return _one_layouts(cell, batches, simulators)
    if name not in BY_THEMSELVES:
        return {}
    try:
        if name in AS_MADE:
            return {name: _made(name, cell, batches)}
        chosen = hindsight(RIVALS[name](cell, batches), batches, simulators.ms)
    except PlanError as error:
        print(f"  {cell}: {name} is left out: {error}", flush=True)
        return {}
    found[name] = _measured(name, chosen, simulators, cell, time.thread_time() - began)
    if name in DEALT:
        found[DEALT[name]] = _dealt_out(found[name], chosen, cell)
    return found


def _ours(cell: Cell, batches: Sequence[Lengths], simulators: Simulators) -> dict[str, Measured]:
    """Ours; with one mix in every step; and with strategies that HiGHS composes."""
    began = time.thread_time()
    ours = ds_hydra(cell, simulators.ms)
    chosen = _all_planned(ours.configuration, batches)
    found = {OURS: _measured(OURS, chosen, simulators, cell, time.thread_time() - began)}
    with contextlib.suppress(PlanError):  # none of the mixes that it chose most holds all batches
        mix = hindsight(one_mix(cell, ours, chosen.plans, simulators.ms), batches, simulators.ms)
        found[ONE_MIX] = _measured(ONE_MIX, mix, simulators, cell, 0.0)
    with_highs = _all_planned(composed(cell, ours, simulators.ms), batches)
    return found | {COMPOSED: _measured(COMPOSED, with_highs, simulators, cell, 0.0)}


def _one_layouts(cell: Cell, batches: Sequence[Lengths], simulators: Simulators) -> dict[str, Measured]:
    """The best layouts of pipelines of one shape, those that hold the batches."""
    found = {}
    for name, chunked in ((ONE_WHOLE, False), (ONE_CHUNKED, True)):
        began = time.thread_time()
        with contextlib.suppress(PlanError):
            chosen = hindsight(one_layout(cell, simulators.ms, chunked=chunked), batches, simulators.ms)
            found[name] = _measured(name, chosen, simulators, cell, time.thread_time() - began)
    return found


def measure_cells(
    asked: Sequence[tuple[Cell, Sequence[str]]], steps: int, workers: int
) -> Iterator[dict[str, Measured]]:
    """What each of the cells' systems take in it, in order; several systems at a time."""
    tasks = [(cell, steps, name) for cell, systems in asked for name in systems]
    with ExitStack() as stack:
        found: Iterator[dict[str, Measured]] = itertools.starmap(measure, tasks)
        if workers > 1:
            spawned = multiprocessing.get_context("spawn")
            pool = stack.enter_context(spawned.Pool(workers, maxtasksperchild=_TASKS_OF_A_WORKER))
            found = pool.imap(_measure_task, tasks)
        for _, systems in asked:
            of_cell = [next(found) for _ in systems]
            yield {name: one for some in of_cell for name, one in some.items()}


def _measure_task(task: tuple[Cell, int, str]) -> dict[str, Measured]:
    return measure(*task)


def _in_rows(cost: SchemeCost) -> SchemeCost:
    return cost.in_rows if isinstance(cost, WaitingCost) else cost


def _without_waits(cost: SchemeCost) -> SchemeCost:
    return cost.without_waits if isinstance(cost, WaitingCost) else cost


def pipeline_gap(plan: StepPlan, table: CostTable) -> float:
    """Slowest minus fastest pipeline over the slowest, each summed over the phases."""
    return gap_of(plan, simulate_plan(plan, table))


def gap_of(plan: StepPlan, pipeline_ms: Sequence[float]) -> float:
    """The same where the plan's pipelines take these times."""
    times = iter(pipeline_ms)
    phases = [list(itertools.islice(times, len(phase.pipelines))) for phase in plan.phases]
    return 1.0 - sum(map(min, phases)) / sum(map(max, phases))


def _all_planned(configuration: Configuration, batches: Sequence[Lengths]) -> Chosen:
    return Chosen(configuration, tuple(configuration.plan(step, batch) for step, batch in enumerate(batches)))


def _measured(name: str, chosen: Chosen, simulators: Simulators, cell: Cell, seconds: float) -> Measured:
    """Every plan is checked against the memory and the costs that it was made with, and simulated."""
    table = chosen.configuration.table
    for plan in chosen.plans:
        validate_plan(plan, table, cell.gpus)
    steps = [simulators.simulated(plan, table) for plan in chosen.plans]
    return Measured(
        name, chosen.configuration.text,
        tuple(step.ms for step in steps),
        statistics.fmean(plan.predicted_ms for plan in chosen.plans),
        statistics.median(pipeline_gap(plan, table) for plan in chosen.plans),
        statistics.fmean(step.bubble_share for step in steps),
        dict(Counter(plan.strategy for plan in chosen.plans).most_common()),
        seconds,
        tflops(cell, [plan.lengths for plan in chosen.plans], statistics.fmean(step.ms for step in steps)),
        statistics.fmean(step.waits_ms for step in steps),
    )  # fmt: skip


def _dealt_out(shared: Measured, chosen: Chosen, cell: Cell) -> Measured:
    """A system's steps with short sequences of its groups dealt out: only what its pipelines take differs."""
    table = chosen.configuration.table
    of_dealt, in_rows = dealt(table), CostTable(tuple(map(_in_rows, table.costs)))
    times = [dealt_out_ms(plan, of_dealt) for plan in chosen.plans]
    run = [plan.total_ms(ms) for plan, ms in zip(chosen.plans, times, strict=True)]
    before = [plan.total_ms(simulate_plan(plan, in_rows)) for plan in chosen.plans]
    more = [now - then for now, then in zip(run, before, strict=True)]
    step_ms = tuple(ms + added for ms, added in zip(shared.step_ms, more, strict=True))
    return replace(
        shared, system=DEALT[shared.system], step_ms=step_ms, run_ms=statistics.fmean(run), seconds=0.0,
        waits_ms=shared.waits_ms + statistics.fmean(more),
        gap=statistics.median(gap_of(plan, ms) for plan, ms in zip(chosen.plans, times, strict=True)),
        tflops=tflops(cell, [plan.lengths for plan in chosen.plans], statistics.fmean(step_ms)),
    )  # fmt: skip


def _made(name: str, cell: Cell, batches: Sequence[Lengths]) -> Measured:
    """A system whose steps are no plans of ours. PlanError where nothing holds the batches."""
    began, made = time.thread_time(), as_made(cell, batches, name)
    step_ms = tuple(one.ms + made.exposed_ms + jitter_ms(one.busy) for one in made.ran)
    return Measured(
        name, str(made.units), step_ms, statistics.fmean(one.ms for one in made.ran), made.gap, made.idle,
        {f"{made.units.count}*{made.units.unit}": len(step_ms)}, time.thread_time() - began,
        tflops(cell, batches, statistics.fmean(step_ms)),
    )  # fmt: skip


def bound_ms(cell: Cell, batches: Sequence[Lengths]) -> float:
    """Mean over the batches of the least time in which fractions of pipelines would do all work (GPU-seconds bound)."""
    if cell.context >= LONG_CELLS[0].context:
        return chunked_bound_ms(cell, batches)
    table = all_schemes(cell)
    sizes = np.array([scheme.num_ranks for scheme in table.schemes])
    # Without bubbles, of which pipelines that cut sequences or split their backwards have less than others.
    schemes = scheme_arrays(table)._replace(pp=np.ones(len(sizes), dtype=np.int64))
    return statistics.fmean(continuous_ms(Batch.of(batch, table), schemes, sizes, cell.gpus) for batch in batches)
