"""What `ds-hydra init` finds out about a job: what its layouts hold, and what a step takes now and here.

Costs are estimated from the model's FLOPs, or those of a file; memory is counted as `ds-hydra memory` counts it, with
the job's own options. Where layers are recomputed, a second forward is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from ds_hydra.commands.init import Times
from ds_hydra.commands.job_config import JobConfig, job_of
from ds_hydra.commands.translated import OwnLayout, Setting, now_ms
from ds_hydra.costs.analytic import ASSUMED, AssumedDevice, ModelShape, analytic_cost_table, assumed_device, model_shape
from ds_hydra.costs.cost_table import MOST_TOKENS, CostTable, TableFile, peak_tflops, read_table_file, told
from ds_hydra.costs.loads import loaded
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shape_costs import RECOMPUTED_WORK
from ds_hydra.engine.costs import job_memory, within_memory
from ds_hydra.engine.plugs import plugged
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.propose import QUICK, propose_strategies
from ds_hydra.rivals.costs import JobSetting, OwnModel, Recomputed
from ds_hydra.rivals.preview import preview_steps
from ds_hydra.simulate.links import BETWEEN, INSIDE, LinkModel
from ds_hydra.zero_hetero.errors import ConfigError

_SPEEDS = (0.5, 2.0)  # of the assumed device: how much an estimate hangs on it
_STEPS = 6  # that are planned
_MOST_STAGES = 8
_ADAM_BYTES = 12  # of a parameter: FP32 value and two moments
UNLIMITED = 2**20  # positions of a model that states none


def gpus_here() -> int:
    """Of this machine; 0 where there is none."""
    return torch.cuda.device_count()


def memory_here() -> float | None:
    """GiB of the first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if gpus_here() else None


def device_here(named: str | None) -> AssumedDevice:
    """The GPU of this name; without one that of this machine, if its data sheet is known, or a usual one. ConfigError
    for a name whose data sheet is not known."""
    if named is None and gpus_here() and peak_tflops(own := torch.cuda.get_device_name(0)):
        named = own
    return ASSUMED["cuda"] if named is None else assumed_device(named)


@dataclass(frozen=True)
class Job:
    """A model on so many GPUs, as a config has it."""

    model: str
    source: Any
    config: JobConfig
    gpus: int
    node_size: int
    memory_gib: float
    patches: tuple[tuple[int, ...], ...] = ()  # of the images of the data, by sequence

    @classmethod
    def of(cls, model: str, config: Mapping[str, Any], gpus: int, node_size: int, memory_gib: float) -> Job:
        """Of a config with its block. ConfigError for what is no causal language model."""
        job = job_of(config)
        shapes = job.hydra.shapes if job.hydra else ()
        source = job.source(model, job.stage_options, shapes)
        return cls(model, source, job, gpus, min(node_size, gpus), memory_gib)

    @property
    def positions(self) -> int:
        """Of the model, for one sequence."""
        return int(getattr(self.source.text_config, "max_position_embeddings", None) or UNLIMITED)

    def memory(
        self, recomputed: bool, gpus: int = 0, *, as_written: bool = False
    ) -> tuple[tuple[ParallelScheme, ...], JobMemory]:
        """Schemes, and the memory of each, as `ds-hydra memory` counts it; on another number of GPUs than the job's,
        if one is given."""
        source, ranks = self._source(recomputed, as_written), gpus or self.gpus
        node = self.node_size if ranks == self.gpus else min(ranks, max(self.node_size, 8))
        schemes = feasible_schemes(source.plan, ranks, node)
        return schemes, job_memory(
            source, schemes, ranks, self.memory_gib * 2**30, self.config.dtype, node_size=node, **self.config.of_memory
        )

    def limits(self, recomputed: bool, gpus: int = 0) -> dict[ParallelScheme, int]:
        """MaxLen of each scheme, in tokens."""
        schemes, memory = self.memory(recomputed, gpus)
        return {scheme: memory.max_length(scheme) for scheme in schemes}

    def _source(self, recomputed: bool, as_written: bool) -> Any:
        """The model with layers recomputed or not; `as_written`: without operators of this engine."""
        source = copy.copy(self.source)
        source.options = replace(source.options, activation_checkpointing=recomputed)
        source.functions = None if as_written else source.functions
        return source

    def both(
        self, lengths: Sequence[int], settings: Sequence[Setting], layout: OwnLayout, costs: AssumedDevice | str
    ) -> dict[bool, Times]:
        """What a step takes with layers kept and recomputed. ConfigError where neither holds the longest sequence."""
        times = {again: self.times(lengths, settings, layout, costs, again) for again in (False, True)}
        if all(one.ours is None for one in times.values()):
            self._refuse(_value(settings, "context_length"), times[True].holds)
        return times

    def times(
        self, lengths: Sequence[int], settings: Sequence[Setting], layout: OwnLayout, costs: AssumedDevice | str,
        recomputed: bool,
    ) -> Times:  # fmt: skip
        """What a step takes, now and here; `costs` is a device, or a file of measured costs."""
        tokens, context = (_value(settings, name) for name in ("tokens_per_step", "context_length"))
        schemes, memory = self.memory(recomputed)
        table = self.table(costs, schemes, max(context, tokens), recomputed)
        now_holds = self._now_holds(recomputed, layout)
        given = self._with_images(lengths, table, costs)
        known = now_holds >= context and given is lengths  # how DeepSpeed runs images is not
        now = now_ms(table, layout, self.gpus, lengths, tokens, context, _STEPS) if known else None
        holds = max(min(one.max_length, memory.max_length(one.scheme)) for one in table.costs)
        if holds < context:
            return Times(now, now_holds=now_holds, holds=holds)
        table = within_memory(table, memory)
        strategies = propose_strategies(
            table, self.gpus, lengths, tokens, context, node_size=self.node_size, count=8, effort=QUICK
        )
        options = PlannerOptions(kernels="compiled", layers=self.source.plan.num_layers)
        preview = preview_steps(table, strategies, given, self._setting(costs, table, tokens, context), _STEPS, options)
        rivals = {name: (one.layout, float(one.step_ms.mean())) for name, one in preview.rivals.items()}
        return Times(now, float(preview.step_ms.mean()), rivals, tuple(preview.wins), now_holds, holds)

    def _with_images(self, lengths: Sequence[int], table: CostTable, costs: AssumedDevice | str) -> Sequence[int]:
        """Lengths with what encoding their images takes, by a measured table's price or by FLOPs."""
        if not self.patches:
            return lengths
        found = TableFile(table, images=read_table_file(costs).images if isinstance(costs, str) else None)
        price = plugged("images", "hydra.images").price_of(self.source, found, self.config.dtype.itemsize)
        return loaded(lengths, self.patches, price.a, price.b)

    def _setting(self, costs: AssumedDevice | str, table: CostTable, tokens: int, context: int) -> JobSetting:
        """What other systems are set up for: with these costs, as layers are kept or recomputed in them."""
        if isinstance(costs, str):
            links = LinkModel.of_table(read_table_file(costs).links, self.node_size, place=f"links of {costs}")
        else:
            inside, between = INSIDE._replace(bytes_per_s=costs.inside), BETWEEN._replace(bytes_per_s=costs.between)
            links = LinkModel(self.node_size, inside, between)
        shape = self._shape()
        model = OwnModel.of(TableFile(table), links, shape, (Recomputed.NOTHING,))
        speed = links.between.bytes_per_s / 1e9
        return JobSetting(model, self.gpus, context, tokens, shape.kv_heads / shape.heads, speed)

    def _shape(self) -> ModelShape:
        width = self.source.width(min(1, self.source.plan.num_layers - 1))
        return model_shape(self.source.plan, width, self.source.text_config.vocab_size, self.source.text_config)

    def assumed(
        self, best: bool, lengths: Sequence[int], settings: Sequence[Setting], layout: OwnLayout,
        costs: AssumedDevice | str,
    ) -> str:  # fmt: skip
        """Where the seconds come from, and how much the gain hangs on that."""
        if isinstance(costs, str):
            return f"By the costs of {costs}, without transfers of parameters."
        gains = [
            one.fixed / one.ours
            for by in _SPEEDS
            for one in [self.times(lengths, settings, layout, replace(costs, flops=by * costs.flops), best)]
            if one.fixed is not None and one.ours is not None
        ]
        spread = ""
        if gains:
            spread = (
                f"On a device half to twice as fast ds-hydra is {min(gains):.2f} to {max(gains):.2f} times as fast as "
            )
            spread += "the best fixed layout, balanced.\n"
        return (
            f"AN ESTIMATE from FLOPs, nothing was measured.\n"
            f"Assumed for each GPU: {self.memory_gib:.0f} GiB and {costs}.\n{spread}"
            "Transfers of parameters are not counted. ds-hydra profile measures costs, and --cost-table takes its file."
        )

    def _refuse(self, context: int, holds: int) -> NoReturn:
        """Nothing holds the longest sequence: with how many GPUs would something?"""
        for factor in (2, 4, 8, 16):
            if (more := max(self.limits(True, factor * self.gpus).values(), default=0)) >= context:
                way = f"on {factor * self.gpus} of them {more:,}"
                break
        else:
            way = f"on {16 * self.gpus} no more than {more:,}"
        raise ConfigError(
            f"no layout of {self.gpus} GPUs of {self.memory_gib:.0f} GiB holds {context:,} tokens, the longest of the "
            f"lengths, though layers are recomputed: the most is {holds:,}, {way}. Use more GPUs, or leave longer "
            f'sequences out of --lengths and set "context_length" and "too_long" in a block "hydra" of the config'
        )

    def _now_holds(self, recomputed: bool, layout: OwnLayout) -> int:
        """Tokens of the longest micro-batch on DeepSpeed, about: its states, and what the model's own code keeps."""
        _, memory = self.memory(recomputed, as_written=True)
        scheme = ParallelScheme(layout.tp, layout.pp, layout.sp)
        needs = memory.fullest(scheme, 1) if (layout.tp, layout.sp) in memory.activations else None
        if needs is None:
            return 0
        params = sum(bucket.numel for bucket in self.source.plan.buckets) / (layout.tp * layout.pp)
        width, ranks = self.config.dtype.itemsize, self.gpus / (layout.tp * layout.pp)
        sharded = [layout.stage >= least for least in (3, 2, 1)]  # values, gradients, states
        held = params * sum(
            size / (ranks if cut else 1) for size, cut in zip((width, width, _ADAM_BYTES), sharded, strict=True)
        )
        return needs.max_length(memory.capacity + needs.states - held)

    def table(
        self, costs: AssumedDevice | str, schemes: Sequence[ParallelScheme], longest: int, recomputed: bool
    ) -> CostTable:
        """Of a file, or estimated for those schemes that jobs are usually run with; forwards that run twice count."""
        if isinstance(costs, str):
            found = told(read_table_file(costs))
            known = tuple(one for one in found.table.costs if one.scheme in schemes)
            if not known:
                raise ConfigError(f"{costs} has costs of no scheme that {self.model} can be cut by on {self.gpus} GPUs")
            measured = found.job is not None and found.job.stages.activation_checkpointing
            return _with_forwards(replace(found.table, costs=known), measured, recomputed)
        usual = [one for one in schemes if one.pp <= _MOST_STAGES and one.num_ranks & (one.num_ranks - 1) == 0]
        table = analytic_cost_table(
            self._shape(), usual, longest, device_flops=costs.flops, link_bytes_per_second=costs.inside,
            between_bytes_per_second=costs.between, node_size=self.node_size,
        )  # fmt: skip
        return _with_forwards(table, False, recomputed)


def _with_forwards(table: CostTable, measured: bool, recomputed: bool) -> CostTable:
    """Costs with layers recomputed or not, from those that were `measured` so or not; MaxLen is then the memory's."""
    if measured == recomputed:
        return table
    by = RECOMPUTED_WORK if recomputed else 1 / RECOMPUTED_WORK
    changed = (
        replace(one, a=by * one.a, b=by * one.b, c=by * one.c, floor=by * one.floor, max_length=MOST_TOKENS)
        for one in table.costs
    )
    return replace(table, costs=tuple(changed))


def _value(settings: Sequence[Setting], name: str) -> int:
    return int(next(one.value for one in settings if one.name == name))
