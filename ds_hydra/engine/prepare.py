"""Before step 0: a job and its ranks in; cost table and candidate strategies out, checked against model and data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.analytic import ModelShape, analytic_cost_table, model_shape
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shape_costs import used_schemes, with_shapes
from ds_hydra.costs.table_file import JobFingerprint, TableFile, check_job, read_table_file
from ds_hydra.engine.fingerprint import describe_job
from ds_hydra.engine.fits import check_memory, job_memory, rank_memory, within_memory
from ds_hydra.engine.job import Job
from ds_hydra.engine.simulated import exposed_of
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.options import StageOptions
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.rows import AT_ONCE
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.schemes import SCHEDULE_CHOICES, feasible_schemes
from ds_hydra.planner.proposal.propose import Wider, propose_strategies
from ds_hydra.planner.proposal.spaces import wider_shapes
from ds_hydra.ranks.together import together
from ds_hydra.ranks.world import World
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import CheckResult
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

# Rough speeds for the analytic table, of one rank: FLOP/s and bytes/s between ranks.
_SPEEDS = {"cuda": (1.5e14, 1.5e11), "cpu": (2e10, 1e9)}


@dataclass(frozen=True)
class Prepared:
    """The decisions that are made before anything is allocated."""

    found: TableFile  # the table that plans are made from, and how it was measured
    strategies: Mapping[StrategyShape, Strategy]  # candidates placed on the ranks, in the order of the config
    num_elements: int  # parameters that each rank owns
    no_slices: str  # why plans must hold whole sequences only; empty: slices of them too are run
    hidden: int  # features of a token between layers

    @property
    def table(self) -> CostTable:
        return self.found.table


def prepare(job: Job, world: World) -> Prepared:
    """Decide cost table and candidates. Every rank must call it; ConfigError or PlanError is raised on all of them."""
    config, plan = job.config, job.source.plan
    for note in job.source.notes if world.rank == 0 else ():
        logger.warning("%s", note)
    lengths = [] if job.data is None else [int(n) for n in job.data.lengths if n]
    longest = max(lengths, default=config.context_length or config.tokens_per_step)
    shape = model_shape(plan, max(job.source.width(i) for i in range(1, plan.num_layers)), job.source.vocab_size)
    device_bytes = _least_memory(world)
    with together(world.channel, "estimating the job's costs and memory"):
        found, memory = _costs(job, world, shape, longest, device_bytes)
    # Strategies are proposed by the limited table: one that does not fit must not be proposed.
    candidates, checked = _candidates(job, world, found, lengths)
    if job.source.plan is not plan:  # its stages keep more than was thought: costs and memory are others
        return prepare(job, world)
    strategies = {c: place_strategy(c, world.num_ranks, plan.num_layers) for c in candidates}
    if world.rank == 0:
        _tell_token_sharding(plan, candidates)
        if isinstance(job.source, CausalLM) and config.functions != "off":
            logger.info("%s", job.source.functions)
    no_slices = 'hydra.chunks is "off"' if config.chunks == "off" else plan.no_slices or checked.no_slices
    planned_whole = no_slices or _planned_whole(found.table)
    with together(world.channel, "counting the memory of all strategies together"):
        memory = replace(memory.together(strategies), slices=not planned_whole)
        if not config.shapes:
            memory = _without_the_largest(memory, found.table, longest)
        found = _limited(job, world, found, memory)
    where = "sequences may have" if job.data is None else f"sequence {int(job.data.lengths.argmax())} has"
    whole = no_slices if config.choose == "replay" else planned_whole  # recorded plans may hold slices all the same
    check_memory(found.table, memory, tuple(memory.strategies), longest, where, no_slices=whole)
    return Prepared(found, memory.strategies, shape.params // world.num_ranks, no_slices, shape.hidden)


def _tell_token_sharding(plan: ModelPlan, candidates: Sequence[StrategyShape]) -> None:
    """Whether tensor parallel ranks share tokens, where there are any."""
    if not any(stage.tp > 1 for shape in candidates for pipeline in shape.pipelines for stage in pipeline.stages):
        return
    if plan.token_sharding:
        logger.info("tensor parallel ranks share the tokens between the blocks")
    else:
        logger.info("each tensor parallel rank holds all tokens between the blocks: %s", plan.no_token_sharding)


def _least_memory(world: World) -> float:
    """Bytes that every rank may use."""
    # Devices of one kind may differ by some MiB. MaxLen must not: schedules are made from it, the same on every rank.
    mine = torch.tensor([rank_memory(world.device, world.node_size)], dtype=torch.float64)
    return float(world.channel.rows(mine).min())


def _planned_whole(table: CostTable) -> str:
    """Why the planner cuts no sequence though it may; empty: it does."""
    if any(cost.shares is not None for cost in table.costs):
        return ""
    return "the cost table has no measured shares of forward and backward; `ds-hydra profile` measures them"


def _costs(job: Job, world: World, shape: ModelShape, longest: int, device_bytes: float) -> tuple[TableFile, JobMemory]:
    """The cost table, its MaxLen within memory, and the memory model."""
    config = job.config
    schemes = used_schemes(config.shapes) or feasible_schemes(job.source.plan, world.num_ranks, world.node_size)
    fingerprint = describe_job(job.source, world.device, job.types.compute, world.num_ranks)
    found = job_cost_table(config, shape, schemes, longest, fingerprint)
    memory = _memory(job, world, found, device_bytes)
    found = replace(found, table=with_shapes(found.table, config.shapes, memory))
    return _limited(job, world, found, memory), memory


def _limited(job: Job, world: World, found: TableFile, memory: JobMemory) -> TableFile:
    """The table with MaxLen within memory. ConfigError when no scheme is left."""
    # A measured MaxLen holds for the number of ranks that shared the masters when it was measured. Masters and Adam's
    # states take 12 bytes per parameter over all ranks: of 1e9 parameters a rank keeps 1.5 GB with 8 ranks but 3 GB
    # with 4, and has that much less for activations. Nor does it know the job's other strategies, for which each rank
    # keeps room. Only a table that comes without figures of activations, such as a published one, knows better than
    # the memory model, which could but estimate them.
    same_ranks = found.job is None or found.job.num_ranks in (0, world.num_ranks)
    if job.config.cost_table and same_ranks and not found.activations:
        return found
    return replace(found, table=within_memory(found.table, memory))


def _without_the_largest(memory: JobMemory, table: CostTable, longest: int) -> JobMemory:
    """Of proposed strategies those that fit together: the one that needs the most memory is left out while they do not.

    A rank keeps room for the most demanding of them in every step. So a strategy that fits by itself may leave the
    others too little, or none of them enough for the longest sequence.
    """
    while len(memory.strategies) > 1:
        schemes = {pipeline.cost_key for shape in memory.strategies for pipeline in shape.pipelines}
        alone = memory.together({})
        limits = [memory.max_length(scheme) for scheme in schemes]
        wanted = min(longest, max(min(table[scheme].max_length, alone.max_length(scheme)) for scheme in schemes))
        if min(limits) >= 1 and max(limits) >= wanted:
            break
        largest = max(memory.strategies, key=memory.demand)
        logger.info("%s is left out: beside the others it needs more memory than there is", largest)
        memory = memory.together({one: at for one, at in memory.strategies.items() if one != largest})
    return memory


def _candidates(
    job: Job, world: World, found: TableFile, lengths: Sequence[int]
) -> tuple[tuple[StrategyShape, ...], CheckResult]:
    """The config's strategies, or proposed ones: they fit the model, and train it as one process does, as the
    self-check that comes with them says."""
    config, plan = job.config, job.source.plan
    while True:
        candidates = config.shapes or _propose(job, found, lengths, world)
        for candidate in candidates:
            plan.check(place_strategy(candidate, world.num_ranks, plan.num_layers))
        checked = _checked(job, world, candidates)
        if config.shapes:
            checked.require(candidates)
        left = tuple(cost for cost in found.table.costs if checked.allows(cost.scheme))
        if len(left) == len(found.table.costs):
            return candidates, checked
        if not left:
            checked.require(candidates)
        logger.info("%s", "\n  ".join(["the self-check leaves out:", *checked.objections()]))
        found = replace(found, table=CostTable(left, found.table.source))


def _checked(job: Job, world: World, candidates: Sequence[StrategyShape]) -> CheckResult:
    """What the self-check says of the candidates. Where it finds wrong what is right without shared tokens, computed as
    the model's code says, or with all heads exchanged at once, the source of the job does so from then on."""
    source = job.source

    def check(options: StageOptions) -> CheckResult:
        return check_strategies(
            job.model,
            candidates,
            mode=job.config.self_check,
            **options._asdict(),
            channel=world.channel,
            node_size=world.node_size,
        )

    stages = {stage for shape in candidates for pipeline in shape.pipelines for stage in pipeline.stages}
    asked = StageOptions(sp_overlap=source.overlap.groups > 1 and any(stage.sp > 1 for stage in stages))
    if isinstance(source, CausalLM):
        asked = asked._replace(
            activation_checkpointing=source.activation_checkpointing,
            token_sharding=source.plan.token_sharding,
            functions=source.functions.asked,
        )
    checked = check(asked)
    objections = checked.objections()
    bare = asked._replace(token_sharding=False, functions="off", sp_overlap=False)
    if not objections or bare == asked:
        return checked
    # Most models to which it objects are none that can be trained: that takes one more check, not four.
    best, found = bare, check(bare)
    if len(found.objections()) == len(objections):
        return checked
    single = ({"functions": "off"}, {"token_sharding": False}, {"sp_overlap": False})
    for more in (asked._replace(**change) for change in single):
        if more not in (asked, bare) and len((other := check(more)).objections()) == len(found.objections()):
            best, found = more, other
            break
    why = f"the self-check refuses it ({objections[0]})"
    if isinstance(source, CausalLM) and best.functions != asked.functions:
        source.compute_as_written(why)
    if isinstance(source, CausalLM) and best.token_sharding != asked.token_sharding:
        source.hold_all_tokens(why)
    if best.sp_overlap != asked.sp_overlap:
        source.overlap = AT_ONCE
        if world.rank == 0:
            logger.info("sequence parallel ranks exchange all heads of a layer at once: %s", why)
    return found


def _memory(job: Job, world: World, found: TableFile, device_bytes: float) -> JobMemory:
    return job_memory(
        job.source,
        found.table.schemes,
        world.num_ranks,
        device_bytes,
        job.types.compute,
        activation_checkpointing=job.config.activation_checkpointing,
        grad_dtype=job.types.grads,
        wire_dtype=job.types.wire,
        node_size=world.node_size,
        measured=found.activations,
    )


def job_cost_table(
    config: HydraConfig, shape: ModelShape, schemes: Sequence[ParallelScheme], longest: int, job: JobFingerprint
) -> TableFile:
    """The measured table of the config, or an analytic one for sequences of up to `longest` tokens.

    Raises ConfigError when the measured table was made for another job, or lacks a scheme that a strategy of the
    config uses.
    """
    if config.cost_table is None:
        flops, link = _SPEEDS["cpu" if job.threads else "cuda"]
        context = max(longest, config.tokens_per_step)
        return TableFile(analytic_cost_table(shape, schemes, context, device_flops=flops, link_bytes_per_second=link))
    found = read_table_file(config.cost_table)
    check_job(found, job, repr(config.cost_table))
    table = found.table
    missing = sorted(set(used_schemes(config.shapes)) - set(table.schemes))
    if missing:
        raise ConfigError(
            f"cost table {config.cost_table!r} has no entry for {', '.join(map(str, missing))}, which "
            f"hydra.strategies use; it has {', '.join(map(str, table.schemes))}. Measure them, or leave them out"
        )
    return found


def _propose(job: Job, found: TableFile, lengths: Sequence[int], world: World) -> tuple[StrategyShape, ...]:
    """Strategies for `strategies: "auto"`. Rank 0 proposes them, so that only one process compiles and searches."""
    config, num_layers, table = job.config, job.source.plan.num_layers, found.table
    if not lengths:
        raise ConfigError(
            'hydra.strategies "auto" needs training_data to propose strategies for; list strategies instead'
        )
    proposed: str | None = None
    if world.rank == 0:
        schedules = config.schedules or SCHEDULE_CHOICES
        if "list" in schedules and all(cost.shares is None for cost in table.costs):
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
            wider=Wider(shapes, slices, num_layers, plain="1f1b" in schedules),
            exposed=exposed_of(job, world, found),
        )
        proposed = "\n".join(str(strategy) for strategy in strategies)
        logger.info("strategies proposed for these lengths:\n  %s", proposed.replace("\n", "\n  "))
    return tuple(StrategyShape.parse(line) for line in world.channel.tell(proposed).split("\n"))
