"""The memory check before step 0: limits a cost table to what fits, or raises ConfigError."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ds_hydra.costs.analytic import estimate_activations, layer_sizes
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import EXPERT_IMBALANCE, Activations, JobMemory, Shape, gibibytes
from ds_hydra.pipe.shape import ParallelScheme, StageShape, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.planner.cutting import counts_more, longest_of
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import NodeSize

logger = logging.getLogger(__name__)


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
    measured: Mapping[tuple[int, int], Activations] | None = None,
    serial: bool = True,
    phases: bool = False,
    copies: bool = False,
    copies_on_host: bool = False,
    expert_imbalance: float = EXPERT_IMBALANCE,
) -> JobMemory:
    """The memory model of a job for all (tp, sp) of the schemes, with activations measured or else estimated.

    `dtype` is computed in, gradients add up in `grad_dtype` (None: FP32 or wider) and travel in `wire_dtype` (None: as
    computed in); `serial` as in `Transport`; `phases`: whether a step may have several; `copies`: whether a rank keeps
    another one's masters, too, and whether on its host; `expert_imbalance` as in `JobMemory`. The layers of a pipeline
    module do not say what is inside them, so their activations count as 0 bytes.
    """
    config, functions = (getattr(source, name, None) for name in ("text_config", "functions"))
    figures: dict[tuple[int, int], Activations] = {}
    for tp, sp in {(scheme.tp, scheme.sp) for scheme in schemes}:
        if measured and (tp, sp) in measured:
            figures[tp, sp] = measured[tp, sp]
            continue
        if config is None:
            figures[tp, sp] = Activations(0.0, 0.0, 0.0)
            continue
        heads, hidden = max(1, source.plan.num_heads), config.hidden_size
        sizes = layer_sizes(source.plan, hidden, config)
        figures[tp, sp] = estimate_activations(
            hidden, sizes.inner, heads, source.plan.num_kv_heads or heads, dtype.itemsize, tp, sp,
            width=sizes.width, boxes=source.plan.boxes,
            checkpointing=source.options.activation_checkpointing, token_sharding=source.plan.token_sharding,
            short_norms=bool(getattr(functions, "norms", None)), short_gates=bool(getattr(functions, "gates", None)),
            node_size=node_size,
        )  # fmt: skip
    return JobMemory(
        source.plan, num_ranks, figures, dtype.itemsize, max(4, dtype.itemsize), optimizer_states,
        device_bytes=device_bytes, vocab=source.vocab_size or 1, outputs=1 if source.valued else None,
        grad_bytes=grad_dtype.itemsize if grad_dtype else None,
        wire_bytes=wire_dtype.itemsize if wire_dtype else None, node_size=node_size,
        plain_head=getattr(source, "token_loss", None) is None, serial=serial, phases=phases,
        copies=copies, copies_on_host=copies_on_host, expert_imbalance=expert_imbalance,
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
