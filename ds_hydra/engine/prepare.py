"""Before step 0: cost table and candidate strategies of a job on its ranks, checked against model and data."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ds_hydra.config.hydra_block import ACTIVATIONS, HydraConfig
from ds_hydra.costs.analytic import ModelShape, model_shape
from ds_hydra.costs.cost_table import CostTable, TableFile, read_table_file, told
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shape_costs import RECOMPUTED_WORK, least_work, less_work_recomputed, with_shapes
from ds_hydra.data.lengths import assumed_lengths, lengths_of_job, sample_batches
from ds_hydra.engine.checked import check_candidates, listed_for_others, taught
from ds_hydra.engine.costs import (
    check_memory,
    costs_and_memory,
    least_host_memory,
    least_memory,
    limited,
    may_keep_attention,
    planned_whole,
    without_the_largest,
)
from ds_hydra.engine.job import Job
from ds_hydra.engine.plugs import plugged
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.schedules.registry import proposed_schedules, weighs
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.plan.layouts import crossings, ordered
from ds_hydra.planner.composing import ArenaRoom, room_beside
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.propose import Wider, propose_strategies, wider_shapes
from ds_hydra.ranks.channel import together
from ds_hydra.ranks.world import World
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.owners import best_owners, nearest_exposed_ms, owned_by_stages
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

logger = logging.getLogger(__name__)

_BATCHES = 4  # typical ones, by which owners are chosen


def simulated_job(job: Job, world: World, found: TableFile) -> SimulatedJob:
    """The job as simulations see it, by these costs and the links that the table file holds."""
    links, types = LinkModel.of_table(found.links, world.node_size, devices=world.cluster.devices), job.types
    return SimulatedJob(
        job.source.plan,
        job.source.width(min(1, job.source.plan.num_layers - 1)),
        found,
        links,
        world.num_ranks,
        element_bytes=types.compute.itemsize,
        gradient_bytes=types.wire.itemsize,
        sum_bytes=types.grads.itemsize,
        lanes=world.lane.early,
        cluster=world.cluster if world.cluster.devices else None,
    )


def exposed_of(job: Job, world: World, found: TableFile) -> Callable[[StrategyShape], float] | None:
    """What the messages of a strategy add to a step, in ms; None where no links were measured."""
    if found.links is None:
        return None
    cluster, tokens = simulated_job(job, world, found), job.config.tokens_per_step
    return lambda strategy: exposed_ms(cluster, strategy, tokens)


def _exposed_at_best(job: Job, world: World, found: TableFile) -> Callable[[StrategyShape], float] | None:
    """The same before it is known which ranks own what: with the owners that suit each strategy best."""
    if not _may_choose_owners(job, world, found):
        return exposed_of(job, world, found)
    cluster, tokens = simulated_job(job, world, found), job.config.tokens_per_step
    return lambda strategy: nearest_exposed_ms(cluster, strategy, tokens)


def _may_choose_owners(job: Job, world: World, found: TableFile) -> bool:
    """Whether layers may have owners of their own [Note: owners]. Ranks that come and go share masters evenly."""
    return found.links is not None and job.config.elastic is None and not world.cluster.mixed


def _owners_by(
    job: Job, world: World, plan: ModelPlan, found: TableFile, candidates: Sequence[StrategyShape],
    lengths: Sequence[int],
) -> StrategyShape | None:  # fmt: skip
    """By the stages of which candidate masters are owned; None: all ranks own as much of each."""
    deep = any(pipeline.pp > 1 for one in candidates for pipeline in one.pipelines)
    if not deep or not _may_choose_owners(job, world, found):
        return None
    config, options = job.config, planner_options(job, world)
    longest = max(lengths, default=config.context_length or config.tokens_per_step)
    data = lengths or assumed_lengths(longest)
    drawn = sample_batches(data, config.tokens_per_step, _BATCHES, options.seed, longest)
    batches = [[int(length) for length in batch] for batch in drawn]
    cluster = replace(simulated_job(job, world, found), plan=plan)
    options = replace(options, choose="best", replay_file=None, layers=plan.num_layers)
    chosen = best_owners(cluster, candidates, batches, config.tokens_per_step, options)
    if chosen is None:
        return None
    logger.info(
        "FP32 parameters of layers are owned by the ranks that compute them under '%s': a typical step is predicted to "
        "take %.1f ms, with each cut over all ranks %.1f ms", chosen.by, chosen.ms, chosen.even_ms,
    )  # fmt: skip
    return chosen.by


def _owned(
    job: Job, world: World, source: ModelSource, found: TableFile, candidates: Sequence[StrategyShape],
    lengths: Sequence[int],
) -> ModelSource:  # fmt: skip
    """The source with the owners of its masters, which rank 0 chooses; every rank must call it."""
    plan, by = source.plan, None
    with together(world.channel, "choosing the owners of masters"):
        if world.rank == 0:
            by = _owners_by(job, world, plan, found, candidates, lengths)
    text = world.channel.tell("" if by is None else str(by))
    if not text:
        return source
    placed = place_strategy(StrategyShape.parse(text), world.num_ranks, plan.num_layers)
    other = copy.copy(source)
    other.plan = owned_by_stages(plan, placed)
    return other


def propose(
    job: Job, found: TableFile, memory: JobMemory, lengths: Sequence[int], world: World
) -> tuple[StrategyShape, ...]:
    """Every rank must call it. Rank 0 proposes them, so that only one process compiles and searches."""
    config, num_layers, table = job.config, job.source.plan.num_layers, found.table
    proposed: str | None = None
    if world.rank == 0 and world.cluster.mixed:
        mixed = plugged("classes of devices", "hydra.cluster")
        proposed = mixed.propose_for(world.cluster, table, memory, lengths, config)
    elif world.rank == 0:
        schedules = proposed_schedules()
        if any(map(weighs, schedules)) and all(cost.shares is None for cost in table.costs):
            logger.info(
                "sequences stay whole and backwards are not split: the costs have no measured shares of forward and "
                "backward. Measure them with `ds-hydra profile`"
            )
        shapes = wider_shapes(table, schedules, num_layers)
        slices = config.chunks == "auto" and not job.source.plan.no_slices
        strategies = propose_strategies(
            table,
            world.num_ranks,
            lengths,
            config.tokens_per_step,
            max(lengths),
            node_size=world.node_size,
            seed=config.planner_options().seed,
            wider=Wider(shapes, slices, num_layers, plain=not all(map(weighs, schedules))),
            exposed=_exposed_at_best(job, world, found),
        )
        proposed = "\n".join(str(strategy) for strategy in strategies)
    if proposed is not None:
        logger.info("strategies proposed for these lengths:\n  %s", proposed.replace("\n", "\n  "))
    return tuple(StrategyShape.parse(line) for line in world.channel.tell(proposed).split("\n"))


@dataclass(frozen=True)
class PreparedJob:
    """The decisions that are made before anything is allocated."""

    source: ModelSource  # the job's, or one that gives up options with which its stages would train otherwise
    found: TableFile  # the table that plans are made from, and how it was measured
    strategies: Mapping[StrategyShape, Strategy]  # candidates placed on the ranks, in the order of the config
    num_elements: int  # parameters that each rank owns
    no_slices: str  # why plans must hold whole sequences only; empty: slices of them too are run
    hidden: int  # features of a token between layers
    room: ArenaRoom  # the arena of each rank, and which strategies fit beside the candidates
    memory: JobMemory  # with all candidates
    checked: CheckResult

    @property
    def table(self) -> CostTable:
        return self.found.table


class _Given(NamedTuple):
    """What is known of a job before its costs are."""

    lengths: list[int]  # on rank 0 at least; none where strategies are listed and data not known
    longest: int
    shape: ModelShape
    device_bytes: float
    class_bytes: Mapping[str, float]
    host_bytes: float


def prepare(job: Job, world: World) -> PreparedJob:
    """Decide cost table and candidates. Every rank must call it; ConfigError or PlanError is raised on all of them.

    Where layers may be recomputed, they are if that is what it takes to run, or the faster way.
    """
    config = job.config
    if config.elastic is not None:
        job = taught(job, world.channel)
    given = _given(job, world)
    if not config.may_recompute or not isinstance(job.source, CausalLM):
        return _prepared(job, world, given)
    choices = _choices(job)
    with together(world.channel, "finding out whether layers are recomputed"):
        named = "\n".join(_ways(choices, world, given)) if world.rank == 0 else ""
    ways, why = world.channel.tell(named).split("\n"), ""
    for name in ways:
        try:
            found = _prepared(choices[name], world, given)
        except (ConfigError, PlanError) as error:
            if ways == [KEPT]:
                anew = 'with "activation_checkpointing": "all", measured anew, layers are recomputed'
                raise type(error)(f"{error}. The costs were measured with layers kept; {anew}") from None
            if name == ways[-1]:
                raise
            why += f": with layers {name}, {error}"
        else:
            holds = ", which holds the longest sequence" if name == KEPT else why
            if world.rank == 0:
                logger.info("activation_checkpointing: all layers are %s%s", name, holds)
            return found
    raise AssertionError("the last choice returns or raises")


KEPT, AGAIN = "kept", "computed again"
ATTENDED = f"{AGAIN} but for attention, whose output is kept"
_FETCHED = f"{AGAIN}, what they keep is on the host"


def _choices(job: Job) -> dict[str, Job]:
    """What may be done with what layers keep for the backward, in the order in which it is tried."""
    options, found = job.source.options, {}
    flags = {KEPT: (False, False, False), ATTENDED: (True, False, True), AGAIN: (True, False, False)}
    if ACTIVATIONS in job.config.offload:
        flags[_FETCHED] = (True, True, False)
    for name, (again, host, attention) in flags.items():
        asked = replace(options, activation_checkpointing=again, host_activations=host, keep_attention=attention)
        source = job.source if asked == options else job.source.with_options(asked, "layers are kept or recomputed")
        found[name] = job if source is job.source else replace(job, source=source)
    return found


def _ways(choices: Mapping[str, Job], world: World, given: _Given) -> list[str]:
    """Which choices to try, in order: layers run by the first by which candidates are found that hold the longest
    sequence.

    Recorded plans run with layers computed AGAIN, and measured costs as they were measured. Estimated ones are compared
    by the work of all sequences, each where it takes least; layers that are computed again are so but for attention
    where that is less work than all of them again.
    """
    kept, again = choices[KEPT], [name for name in choices if name not in (KEPT, ATTENDED)]
    if kept.config.replay is not None or world.cluster.mixed:
        return again
    if isinstance(kept.config.cost_table, str) and (found := read_table_file(kept.config.cost_table).job) is not None:
        measured = found.stages
        return [ATTENDED] if measured.keep_attention else again if measured.activation_checkpointing else [KEPT]

    def work(name: str, but_attention: float = 1.0) -> float:
        try:
            found, _ = costs_and_memory(choices[name], world, *given[1:])
        except (ConfigError, PlanError):
            return math.inf
        return least_work(found.table, given.lengths or [given.longest], but_attention=but_attention)

    assert isinstance(kept.source, CausalLM), "layers of no other source are computed again"
    may, of_again = may_keep_attention(kept.source, world.device, kept.types.compute), work(AGAIN)
    attended = work(ATTENDED, RECOMPUTED_WORK) if may else math.inf
    ways = [] if less_work_recomputed(work(KEPT), of_again) else [KEPT]
    return ways + [ATTENDED] * (attended < RECOMPUTED_WORK * of_again) + again


def _given(job: Job, world: World) -> _Given:
    config = job.config
    for note in job.source.notes if world.rank == 0 else ():
        logger.warning("%s", note)
    if job.states_stay and world.rank == 0:
        logger.warning("FP32 parameters and optimizer states stay on the devices, which offload_optimizer would have "
                       "in the host's memory: %s", job.states_stay)  # fmt: skip
    if world.device.type == "cpu" and world.rank == 0:
        tell_threads(world.cluster.ranks_beside(0), torch.get_num_threads(), os.cpu_count() or 1)
    lengths = [] if job.data is None else [int(n) for n in job.data.lengths if n]
    longest = max(lengths, default=config.context_length or config.tokens_per_step)
    if not lengths and not config.shapes:
        with together(world.channel, "reading hydra.lengths"):
            lengths = _lengths_to_come(config, longest) if world.rank == 0 else []
    elif config.lengths and not config.shapes and world.rank == 0:
        logger.warning("hydra.lengths has no effect: strategies are proposed for the lengths of training_data")
    config_of_model = getattr(job.source, "text_config", None)
    shape = model_shape(job.source.plan, hidden_size(job.source), job.source.vocab_size, config_of_model)
    host_bytes = least_host_memory(world) if config.offload else math.inf
    return _Given(lengths, longest, shape, *least_memory(world), host_bytes)


def _prepared(job: Job, world: World, given: _Given) -> PreparedJob:
    """The decisions for a job whose layers are kept or recomputed as its source has it."""
    config, (lengths, longest, shape, *_) = job.config, given
    source = None
    while source is not job.source:  # stages that give up an option keep more: costs and memory are others
        job = job if source is None else replace(job, source=source)
        with together(world.channel, "estimating the job's costs and memory"):
            found, memory = costs_and_memory(job, world, *given[1:])
        if world.rank == 0:
            told(found)
        # Strategies are proposed by the limited table: one that does not fit must not be proposed.
        candidates, checked, source = _candidates(job, world, found, memory, lengths)
    source = _owned(job, world, source, found, candidates, lengths)
    plan = source.plan
    if world.cluster.mixed and not config.shapes:
        with together(world.channel, "counting the costs of proposed strategies"):
            found = replace(found, table=with_shapes(found.table, candidates, memory))
    strategies = {c: place_strategy(c, world.num_ranks, plan.num_layers, world.cluster) for c in candidates}
    if world.rank == 0:
        _tell_crossings(strategies, world)
        _tell_token_sharding(plan, candidates)
        if isinstance(source, CausalLM) and (source.options.functions != "off" or source.functions.obstacle):
            logger.info("%s", source.functions)
    no_slices = 'hydra.chunks is "off"' if config.chunks == "off" else plan.no_slices or checked.no_slices
    uncut = no_slices or planned_whole(found.table)
    with together(world.channel, "counting the memory of all strategies together"):
        memory = replace(memory, plan=plan, _ranks={}).together(strategies)
        memory = replace(memory, slices=not uncut)
        if not config.shapes:
            memory = without_the_largest(memory, found.table, longest)
        found = limited(job, world, found, memory)
    where = "sequences may have" if job.data is None else f"sequence {int(job.data.lengths.argmax())} has"
    whole = no_slices if config.replay else uncut  # recorded plans may hold slices all the same
    check_memory(found.table, memory, tuple(memory.strategies), longest, where, no_slices=whole)
    with together(world.channel, "counting the room for composed strategies"):
        room = room_beside(memory, found.table, composing=planner_options(job, world).highs == "composes")
    elements = shape.params // world.num_ranks
    return PreparedJob(source, found, memory.strategies, elements, no_slices, shape.hidden, room, memory, checked)


def _lengths_to_come(config: HydraConfig, longest: int) -> list[int]:
    """Lengths to propose strategies for, where those of the job are not known yet. `longest` is among them."""
    if config.lengths is None:
        logger.info("lengths are not known yet: strategies are proposed for web pages of up to %d tokens", longest)
        return assumed_lengths(longest)
    cut = config.too_long == "truncate"
    sample = lengths_of_job(config.lengths, longest, cut=cut)
    logger.info(
        "strategies are proposed for %d lengths of %s, %d of them beyond %d tokens and %s",
        len(sample.lengths) - 1 + (0 if cut else sample.too_long), config.lengths, sample.too_long, longest,
        "cut" if cut else "left out",
    )  # fmt: skip
    return [int(n) for n in sample.lengths]


def planner_options(job: Job, world: World) -> PlannerOptions:
    """The settings that the planner works by. On devices of several classes nothing is composed: HiGHS's programs know
    how many ranks there are, and not how many of each class."""
    options = job.config.planner_options()
    return replace(options, highs="off") if world.cluster.mixed else options


def hidden_size(source: ModelSource) -> int:
    """Features of a token between layers, the most of any two; of a model of one layer, those that enter it."""
    num_layers = source.plan.num_layers
    return max(1, *(source.width(layer) for layer in range(min(1, num_layers - 1), num_layers)))


def _tell_crossings(strategies: Mapping[StrategyShape, Strategy], world: World) -> None:
    """Which strategies lay tensor parallel groups across nodes, and an order of their pipelines that does not."""
    if world.cluster.mixed:
        from ds_hydra.pipe.placement import crossing_groups

        for strategy, placed in strategies.items():
            if (group := next(crossing_groups(placed, world.node_size), None)) is not None:
                logger.warning("strategy '%s': the tensor parallel group of ranks %s lies on two nodes, where messages "
                               "are slow", strategy, ", ".join(map(str, group)))  # fmt: skip
        return
    for strategy in strategies if len(world.cluster.sizes) > 1 else ():
        across = next(crossings(strategy, world.node_size), None)
        if across is not None:
            better = ordered(strategy, world.node_size)
            hint = "" if better is None else f"; in the order '{better}' none would"
            logger.warning("strategy '%s': %s lie on two nodes, where messages are slow%s", strategy, across, hint)


def _tell_token_sharding(plan: ModelPlan, candidates: Sequence[StrategyShape]) -> None:
    """Whether tensor parallel ranks share layers and tokens, where there are any."""
    if not any(stage.tp > 1 for shape in candidates for pipeline in shape.pipelines for stage in pipeline.stages):
        return
    if not plan.cuts_layers:
        logger.warning(
            "no tensor parallel plan cuts this model's layers: each rank of a tp holds and computes them whole, which "
            "saves neither time nor memory; use pp or sp for it"
        )
    if plan.token_sharding:
        logger.info("tensor parallel ranks share the tokens between the blocks")
    else:
        logger.info("each tensor parallel rank holds all tokens between the blocks: %s", plan.no_token_sharding)


def _candidates(
    job: Job, world: World, found: TableFile, memory: JobMemory, lengths: Sequence[int]
) -> tuple[tuple[StrategyShape, ...], CheckResult, ModelSource]:
    """The config's strategies, or proposed ones: they fit the model, and train it as one process does, as the
    self-check that comes with them says. Of another source than the job's: then they are to be proposed anew."""
    config, plan = job.config, job.source.plan
    while True:
        candidates = config.shapes or propose(job, found, memory, lengths, world)
        for candidate in candidates:
            plan.check(place_strategy(candidate, world.num_ranks, plan.num_layers, world.cluster))
        for other in [] if world.cluster.mixed else listed_for_others(job):
            plan.check(place_strategy(other, other.num_ranks, plan.num_layers))
        checked, source = check_candidates(job, world, candidates)
        if config.shapes:
            checked.require(candidates)
        left = tuple(cost for cost in found.table.costs if checked.allows(cost.scheme))
        if source is not job.source or len(left) == len(found.table.costs):
            return candidates, checked, source
        if not left:
            checked.require(candidates)
        logger.info("%s", "\n  ".join(["the self-check leaves out:", *checked.objections()]))
        found = replace(found, table=CostTable(left, found.table.source))


def tell_threads(ranks: int, threads: int, cores: int) -> None:
    """Ranks on CPUs whose threads have no core each wait for each other's in every operator."""
    if threads > 1 and ranks * threads > cores:
        logger.warning(
            "%d ranks of this node compute with %d threads each on %d cores, which can make steps many times as long: "
            "set OMP_NUM_THREADS=%d", ranks, threads, cores, max(1, cores // ranks),
        )  # fmt: skip
