"""Costs and memory of a job: tables before step 0, MaxLen within the memory, and errors of memory that is full."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.analytic import (
    ASSUMED,
    ModelShape,
    analytic_cost_table,
    estimate_activations,
    layer_sizes,
    twin_bytes,
)
from ds_hydra.costs.cost_table import CostTable, TableFile, check_job, read_table_file
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import EXPERT_IMBALANCE, Activations, JobMemory, Shape, gibibytes
from ds_hydra.costs.shape_costs import of_one_kind, spreading_rows, used_schemes, with_shapes
from ds_hydra.engine.plugs import plugged
from ds_hydra.host.kept_model import TWIN_TOKENS
from ds_hydra.host.optimizers import update_bytes
from ds_hydra.pipe.attention.backends import NAME as FLASH_3
from ds_hydra.pipe.attention.backends import choose_backend, flash_3_runs, torch_varlen
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.recomputed import TILE_ROWS
from ds_hydra.pipe.shape import ParallelScheme, StageShape, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.planner.cutting import counts_more, longest_of
from ds_hydra.ranks.groups import ROOM_FOR_COMMUNICATORS
from ds_hydra.ranks.host_memory import available_bytes
from ds_hydra.step import host_states
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize, largest_node

if TYPE_CHECKING:
    from ds_hydra.engine.job import Job
    from ds_hydra.pipe.models.causal_lm import CausalLM
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.ranks.world import World
    from ds_hydra.step.stepper import Running

logger = logging.getLogger(__name__)

HOST_SHARE = 0.9  # of what a host has free; data, checkpoints and the system take the rest


def describe_job(source: ModelSource, device: torch.device, dtype: torch.dtype, num_ranks: int) -> JobFingerprint:
    """The fingerprint of a job on this machine."""
    return JobFingerprint(
        model=model_fingerprint(source.plan),
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention_name(source, device, dtype),
        stages=source.options,
        num_ranks=num_ranks,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        versions=_versions(),
    )


def device_name(device: torch.device) -> str:
    """The device's model, as its driver or the operating system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def attention_name(source: ModelSource, device: torch.device, dtype: torch.dtype) -> str:
    """The attention backend that a layer of this model would choose."""
    config = getattr(source, "text_config", None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    head = getattr(config, "__dict__", {}).get("head_dim")  # some configs refuse to be asked where layers differ
    if head is None:
        heads = max(1, source.plan.num_heads)
        head = max(1, source.width(min(1, source.plan.num_layers - 1)) // heads)
    # An empty tensor has what the choice depends on, device, type and head size, and takes no memory to speak of.
    probe = torch.empty((1, 1, head), device=device, dtype=dtype)
    name = choose_backend(probe, probe, softcap).__name__
    return f"{name} ({FLASH_3})" if name == torch_varlen.__name__ and flash_3_runs() else name


def may_keep_attention(source: CausalLM, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether what this model's attention makes may be kept in layers that are computed again [Note: kept attention].
    Not of one with modules that run once for each sequence, of which it is not known what their kernels keep."""
    config = getattr(source.text_config, "__dict__", {})
    others = (config.get(name) for name in ("attn_logit_softcapping", "qk_nope_head_dim"))
    if any(others) or source.flow.attention_dropout or source.plan.boxes:
        return False
    name = attention_name(source, device, dtype)
    return device.type == "cpu" or name.startswith(torch_varlen.__name__)


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import PackageNotFoundError, version

    found: list[tuple[str, str]] = [("python", platform.python_version())]
    for name in ("torch", "transformers", "deepspeed", "flash_attn"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def model_fingerprint(plan: ModelPlan) -> str:
    """Hash of names, shapes and shard rules of all parameters, and of the heads: equal for equally shaped models."""
    rules = ((p, *(p.rule.by_width or (p.rule.dim, p.rule.parts))) for b in plan.buckets for p in b.params)
    shapes = [(p.name, p.shape, p.trainable, dim, parts) for p, dim, parts in rules]
    text = repr((shapes, plan.num_heads, plan.num_kv_heads, plan.num_layers))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def job_memory(
    source: ModelSource,
    schemes: Sequence[ParallelScheme | StageShape],
    num_ranks: int,
    device_bytes: float,
    dtype: torch.dtype,
    *,
    grad_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    node_size: NodeSize | None = None,
    optimizer_states: int = 2,
    for_update: int = 0,
    measured: Mapping[tuple[int, int], Activations] | None = None,
    serial: bool = True,
    phases: bool = False,
    copies: bool = False,
    copies_on_host: bool = False,
    expert_imbalance: float = EXPERT_IMBALANCE,
    host_bytes: float = math.inf,
    states_on_host: bool = False,
    saves: bool = False,
) -> JobMemory:
    """The memory model of a job for all (tp, sp) of the schemes, with activations measured or else estimated.

    `dtype` is computed in, gradients add up in `grad_dtype` (None: FP32 or wider) and travel in `wire_dtype` (None: as
    computed in); `serial` as in `Transport`; `phases`: whether a step may have several; `copies`: whether a rank keeps
    another one's masters, too, and whether on its host; `states_on_host`: whether the host has masters and states;
    `expert_imbalance`, `host_bytes`, `saves`, and `for_update` as `update_bytes`, as in `JobMemory`. The layers of a
    pipeline module do not say what is inside them, so their activations count as 0 bytes.
    """
    config, functions = (getattr(source, name, None) for name in ("text_config", "functions"))
    figures: dict[tuple[int, int], Activations] = {}
    sum_bytes = grad_dtype.itemsize if grad_dtype else max(4, dtype.itemsize)
    hidden, twin = getattr(config, "hidden_size", 0), 0  # a layer list's runs beside no copy
    if config is not None:
        sizes = layer_sizes(source.plan, hidden, config)
        vocab = 1 if source.valued else source.vocab_size or 1
        twin = twin_bytes(source.plan, sizes, hidden, TWIN_TOKENS, vocab, dtype.itemsize)
    for tp, sp in {(scheme.tp, scheme.sp) for scheme in schemes}:
        if config is None or (tp, sp) in (measured or {}):
            figures[tp, sp] = (measured or {}).get((tp, sp), Activations(0.0, 0.0, 0.0))
            continue
        heads = max(1, source.plan.num_heads)
        figures[tp, sp] = estimate_activations(
            hidden, sizes.inner, heads, source.plan.num_kv_heads or heads, dtype.itemsize, tp, sp,
            width=sizes.width, boxes=source.plan.boxes, keep_attention=source.options.keep_attention,
            checkpointing=source.options.activation_checkpointing, token_sharding=source.plan.token_sharding,
            short_norms=bool(getattr(functions, "norms", None)), of_gates=getattr(functions, "of_gates", 4),
            node_size=node_size, fetched=source.options.host_activations, summed=dtype.itemsize < sum_bytes,
            tile_rows=TILE_ROWS if source.options.tiles and bool(getattr(functions, "by_rows", None)) else 0,
        )  # fmt: skip
    return JobMemory(
        source.plan, num_ranks, figures, dtype.itemsize, max(4, dtype.itemsize), optimizer_states, for_update,
        device_bytes=device_bytes, vocab=source.vocab_size or 1, outputs=1 if source.valued else None,
        grad_bytes=sum_bytes if grad_dtype else None,
        wire_bytes=wire_dtype.itemsize if wire_dtype else None, node_size=node_size,
        plain_head=getattr(source, "token_loss", None) is None, serial=serial, phases=phases,
        copies=copies, copies_on_host=copies_on_host, expert_imbalance=expert_imbalance, host_bytes=host_bytes,
        run=host_states.RUN if states_on_host else 0, saves=saves, twin_bytes=twin,
    )  # fmt: skip


def rank_memory(device: torch.device, ranks_per_node: int) -> float:
    """Bytes that one rank may use: of its GPU what is free or its own already, or its share of the node's memory."""
    if device.type == "cuda":
        # Not all that the device has: its context, kernels, communicators and other processes take theirs.
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    # On CPU the ranks of a node share its memory, where each GPU has its own.
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return float(pages * size) / max(1, ranks_per_node)


def within_memory(table: CostTable, memory: JobMemory) -> CostTable:
    """The table with MaxLen lowered to what the memory model allows, without the schemes whose states do not fit.

    Raises ConfigError when no scheme is left.
    """
    costs = []
    states = max(memory.fullest(cost.scheme, 1).host_states for cost in table.costs)
    if states > memory.host_bytes:
        raise ConfigError(
            f"what training keeps on the hosts whatever the layout takes {gibibytes(states)} of the "
            f"{gibibytes(memory.host_bytes)} of a host's memory that a rank may use: use more hosts, save without "
            'hydra.checkpoint.asynchronous, or leave "optimizer" out of hydra.offload and offload_optimizer out of '
            "zero_optimization"
        )
    for cost in table.costs:
        limit = min(cost.max_length, memory.max_length(cost.scheme))
        if limit >= 1:
            costs.append(replace(cost, max_length=limit, util_length=min(cost.util_length, limit)))
    if not costs:
        least = min((cost.scheme for cost in table.costs), key=lambda scheme: memory.fullest(scheme, 1).total(1))
        needs = memory.fullest(least, 1)
        capacity = gibibytes(memory.capacity_of(least, needs.stage))
        raise ConfigError(
            f"no scheme fits: the least, {least}, needs {gibibytes(needs.total(1))} of a rank's {capacity} for its "
            "model states and one token; use more ranks or a smaller model"
        )
    return CostTable(tuple(costs), table.source)


def check_memory(
    table: CostTable,
    memory: JobMemory,
    strategies: Sequence[StrategyShape],
    longest: int,
    place: str,
    *,
    no_slices: str,
) -> None:
    """Refuse a job that cannot run: ConfigError names what does not fit, by how much, and the key to change.

    `place` says which sequence is the longest, `no_slices` why plans hold it whole; empty: they may cut it. The table's
    own MaxLen counts, measured or estimated.
    """
    lines = []
    for index, strategy in enumerate(strategies):
        for scheme in dict.fromkeys(pipeline.cost_key for pipeline in strategy.pipelines):
            needs = memory.fullest(scheme, 1)
            least, capacity = needs.total(1), memory.capacity_of(scheme, needs.stage)
            if least > capacity:
                lines.append(
                    f"hydra.strategies[{index}] {str(strategy)!r}: stage {needs.stage} of {scheme} needs "
                    f"{gibibytes(least)} for its model states and one token, {gibibytes(least - capacity)} more "
                    f"than the {gibibytes(capacity)} that a rank may use"
                )
    if lines:
        raise ConfigError(
            "these strategies do not fit the devices' memory:\n  " + "\n  ".join(lines) + "\nTake them out of "
            "hydra.strategies, use a larger tp or pp in them, or more ranks"
        )
    # One pipeline that holds the longest sequence is enough: the planner puts a sequence only where it fits, so the
    # other pipelines get the shorter ones.
    candidates = {pipeline.cost_key for strategy in strategies for pipeline in strategy.pipelines}
    num_layers = 0 if no_slices else memory.plan.num_layers
    limits = {scheme: _longest(table, scheme, num_layers, slices=not no_slices) for scheme in candidates}
    best = max(candidates, key=limits.__getitem__)
    if longest > limits[best]:
        raise ConfigError(
            f"{place} {longest} tokens but no candidate strategy holds more than {limits[best]} "
            + _too_long(table, memory, best, longest, no_slices)
        )


def _longest(table: CostTable, scheme: Shape, num_layers: int, *, slices: bool) -> int:
    """Tokens of the longest sequence that a pipeline can run: as a whole, or in slices if it may be cut, with layers of
    the model computed again."""
    cost = table[scheme]
    layers = num_layers // scheme.pp
    return max(int(cost.max_length), longest_of(cost, table.shares(scheme), layers=layers) if slices else 0)


def _too_long(table: CostTable, memory: JobMemory, best: Shape, longest: int, no_slices: str) -> str:
    """What a sequence would need under the scheme that holds the most, and the ways out."""
    max_length = int(table[best].max_length)
    if no_slices:
        needs = memory.fullest(best, longest)
        total = needs.total(longest)
        limit, what = "in one micro-batch", "that sequence"
        in_slices = _longest(table, best, memory.plan.num_layers, slices=True)
        hint = f"Sequences are not cut: {no_slices}. "
        hint += f"In slices that scheme would hold {in_slices} tokens. " if in_slices > max_length else ""
    else:
        shares = table.shares(best)
        kept = longest * (min(1.0, shares.recomputed) + counts_more(shares, max_length))
        needs = max(memory.stages(best), key=lambda needs: needs.held(kept, max_length))
        total = needs.held(kept, max_length)
        limit = f"in slices of up to {max_length}, which live together on each stage, with all layers computed again"
        states = ", and their states" if shares.state else ""
        what, hint = f"all slices of that sequence and the gradients of their keys and values{states}", ""
    capacity = memory.capacity_of(best, needs.stage)
    over = f", {gibibytes(total - capacity)} more than a rank may use" if total > capacity else ""
    return (
        f"{limit}: with {what} stage {needs.stage} of {best} needs about {gibibytes(total)}{over}. {hint}Add a "
        "strategy with larger tp, sp or pp, set hydra.activation_checkpointing, or lower hydra.context_length"
    )


def least_memory(world: World) -> tuple[float, dict[str, float]]:
    """Bytes that every rank may use; and those that every one of a class may, where devices are of several."""
    # Devices of one kind may differ by some MiB, and by what others use. MaxLen must not: schedules are made from it,
    # the same on every rank.
    mine = rank_memory(world.device, world.cluster.ranks_beside(world.rank))
    every = world.channel.rows(torch.tensor([mine], dtype=torch.float64)).flatten()
    least, classes = float(every.min()), world.cluster.classes if world.cluster.mixed else {}
    by_class = {device: float(every[list(ranks)].min()) for device, ranks in classes.items()}
    if world.device.type != "cuda":
        return least, by_class
    later = ROOM_FOR_COMMUNICATORS if world.num_ranks > 1 else 0
    if world.rank == 0:
        _, whole = torch.cuda.mem_get_info(world.device)
        logger.info(
            "of a device's %s rank 0 has %s, the rank that has least %s; %s of it are left to communicators",
            *map(gibibytes, (whole, mine, least, later)),
        )
    return least - later, {device: held - later for device, held in by_class.items()}


def least_host_memory(world: World) -> float:
    """Bytes of the host's memory that every rank may use: no more than its share of what is free on its node."""
    if world.device.type == "cpu":
        return math.inf  # counted as the device's
    mine = available_bytes() / world.cluster.ranks_beside(world.rank)
    return float(world.channel.rows(torch.tensor([mine], dtype=torch.float64)).min())


def costs_and_memory(
    job: Job,
    world: World,
    longest: int,
    shape: ModelShape,
    device_bytes: float,
    class_bytes: Mapping[str, float],
    host_bytes: float,
) -> tuple[TableFile, JobMemory]:
    """The cost table, its MaxLen within memory, and the memory model; `class_bytes` as `least_memory`."""
    config, cluster = job.config, world.cluster
    classes = cluster.mixed or isinstance(config.cost_table, Mapping) or any("@" in one for one in config.strategies)
    if classes:
        mixed = plugged("classes of devices", "hydra.cluster")
        mixed.check_classes(config, cluster, job.source.plan.num_layers)
    schemes = used_schemes(config.shapes) or feasible_schemes(job.source.plan, world.num_ranks, world.node_size)
    fingerprint = describe_job(job.source, world.device, job.types.compute, world.num_ranks)
    own = cluster.devices[world.rank] if cluster.devices else ""
    found = job_cost_table(config, shape, schemes, longest, fingerprint, own, cluster)
    memory = _memory(job, world, found, device_bytes, host_bytes)
    if classes:
        mixed.check_rows(found.table, cluster, repr(config.cost_table))
        memory = mixed.of_cluster(memory, cluster, class_bytes)
    found = replace(found, table=with_shapes(found.table, config.shapes, memory))
    return limited(job, world, found, memory), memory


def job_cost_table(
    config: HydraConfig,
    shape: ModelShape,
    schemes: Sequence[ParallelScheme],
    longest: int,
    job: JobFingerprint,
    own: str = "",
    cluster: Cluster | None = None,
) -> TableFile:
    """The measured table of the config, or an analytic one for sequences of up to `longest` tokens; `own` is the class
    of this rank's device.

    Raises ConfigError when the measured table was made for another job, or lacks a scheme that a strategy of the
    config uses.
    """
    if config.cost_table is None:
        assumed = ASSUMED["cpu" if job.threads else "cuda"]
        context = max(longest, config.tokens_per_step)
        table = analytic_cost_table(
            shape, schemes, context, device_flops=assumed.flops, link_bytes_per_second=assumed.inside,
            between_bytes_per_second=assumed.between,
            node_size=None if cluster is None else largest_node(cluster.node_size),
        )  # fmt: skip
        return TableFile(table)
    if isinstance(config.cost_table, Mapping):
        assert cluster is not None, "the engine knows it"
        mixed = plugged("classes of devices", "hydra.cost_table of several classes")
        tables: TableFile = mixed.class_tables(config.cost_table, job, own, cluster)
        return tables
    found = read_table_file(config.cost_table)
    check_job(found, job, repr(config.cost_table))
    listed = used_schemes(config.shapes)
    table = spreading_rows(found.table, listed) if listed else of_one_kind(found.table, schemes)
    missing = sorted(set(used_schemes(config.shapes)) - set(table.schemes))
    if missing:
        raise ConfigError(
            f"cost table {config.cost_table!r} has no entry for {', '.join(map(str, missing))}, which "
            f"hydra.strategies use; it has {', '.join(str(cost.scheme) for cost in table.costs)}. Measure them, or "
            "leave them out"
        )
    return replace(found, table=table)


def _memory(job: Job, world: World, found: TableFile, device_bytes: float, host_bytes: float) -> JobMemory:
    elastic = job.config.elastic
    # A CPU rank's device memory is the host's.
    on_host = elastic is not None and elastic.redundancy == "host" and world.device.type != "cpu"
    return job_memory(
        job.source,
        _degrees(found.table),
        world.num_ranks,
        device_bytes,
        job.types.compute,
        grad_dtype=job.types.grads,
        wire_dtype=job.types.wire,
        node_size=world.node_size,
        measured=found.activations,
        serial=world.edges.serial,
        phases=job.config.replay is not None or job.pre_step is not None,
        copies=elastic is not None and elastic.redundancy != "off" and world.num_ranks > 1,
        copies_on_host=on_host,
        expert_imbalance=job.config.expert_imbalance,
        for_update=update_bytes(job.recipe.name),
        host_bytes=host_bytes * HOST_SHARE,
        states_on_host=job.states_on_host and world.device.type != "cpu",  # whose memory is the host's
        saves=job.config.checkpoint is not None and job.config.checkpoint.asynchronous,
    )


def _degrees(table: CostTable) -> list[ParallelScheme | StageShape]:
    """What has each <TP, SP> of a table's stages."""
    shapes = (cost.scheme for cost in table.costs)
    each = ((one,) if isinstance(one, ParallelScheme) else one.stages for one in shapes)
    return [one for stages in each for one in stages]


def limited(job: Job, world: World, found: TableFile, memory: JobMemory) -> TableFile:
    """The table with MaxLen within memory. ConfigError when no scheme is left."""
    # A measured MaxLen holds for the number of ranks that shared the masters when it was measured. Masters and Adam's
    # states take 12 bytes per parameter over all ranks: of 1e9 parameters a rank keeps 1.5 GB with 8 ranks but 3 GB
    # with 4, and has that much less for activations. Nor does it know the job's other strategies, for which each rank
    # keeps room. Only a table that comes without figures of activations, such as a published one, knows better than
    # the memory model, which could but estimate them.
    same_ranks = found.job is None or found.job.num_ranks in (0, world.num_ranks)
    if not (job.config.cost_table and same_ranks and not found.activations):
        found = replace(found, table=within_memory(found.table, memory))
    if not job.config.images:
        return found
    with_images: TableFile = plugged("images", "hydra.images").with_room(
        job.source, found, memory, job.types.compute.itemsize
    )
    return with_images


def without_the_largest(memory: JobMemory, table: CostTable, longest: int) -> JobMemory:
    """Leaves out the proposed strategy that needs the most memory until the others fit together.

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


def planned_whole(table: CostTable) -> str:
    """Why the planner cuts no sequence though it may; empty: it does."""
    if any(cost.shares is not None for cost in table.costs):
        return ""
    return "the cost table has no measured shares of forward and backward; `ds-hydra profile` measures them"


@contextmanager
def explained(
    plan: StepPlan, memory: JobMemory, rank: int, running: Callable[[], Running | None], allocated: Callable[[], int]
) -> Iterator[None]:
    """Within it torch.OutOfMemoryError says what a step was about when it came.

    `running` is the phase that this rank is in, None: it is in none; `allocated` gives the most bytes that the
    allocator has given out in the step.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The same type: who catches it still does.
        raise torch.OutOfMemoryError(_text(plan, memory, rank, running(), allocated()) + f"\n{error}") from error


def _text(plan: StepPlan, memory: JobMemory, rank: int, running: Running | None, allocated: int) -> str:
    if running is None:
        where, pipeline = "between the passes of a step, where nothing depends on its tokens", None
    else:
        pipeline = plan.phases[running.phase].pipelines[running.pipeline]
        stage = f"stage {running.stage} of {pipeline.shape} under {plan.phases[running.phase].shape}"
        if running.action is None:
            where = f"outside of micro-batches, in {stage}"
        else:
            kind, number, _ = running.action
            batch = pipeline.microbatches[number]
            ids = [plan.sequence_ids[span.sequence] for span in batch.spans]
            more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
            where = (
                f"in the {kind.replace('_', ' ')} of micro-batch {number} ({batch.num_tokens} tokens, sequences "
                f"{', '.join(map(str, ids[:8]))}{more}), in {stage}"
            )
    lines = [f"rank {rank} has no memory left {where}: {gibibytes(allocated)} were given out at the most"]
    remedy = "Take the most demanding strategy out of hydra.strategies: its parameters and gradients have room always"
    if pipeline is not None and pipeline.microbatches:
        assert running is not None, "it has a pipeline"
        needs = memory.needs(pipeline.shape.cost_key, running.stage)
        most = max(batch.num_tokens for batch in pipeline.microbatches)
        predicted = needs.total(most)
        lines.append(
            f"{gibibytes(predicted)} are predicted for its micro-batches of up to {most} tokens, "
            f"{gibibytes(needs.states)} of them for parameters, gradients and optimizer"
        )
        if allocated > predicted:
            remedy = (
                "The prediction is too low: measure this model with `ds-hydra profile` and name its table in "
                "hydra.cost_table, or lower hydra.context_length"
            )
        else:
            remedy = (
                "Others hold memory of this device, or it is in pieces: end them, or set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower hydra.context_length"
            )
        remedy += "; hydra.activation_checkpointing and a larger tp, sp or pp in hydra.strategies need less"
    return "; ".join(lines) + f". {remedy}"
