"""What `ds-hydra init` finds out about a job: the model's limits, and the gain that estimated costs promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_hydra.costs.analytic import ASSUMED, AssumedDevice, analytic_cost_table, assumed_device, model_shape
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.peak import peak_tflops
from ds_hydra.costs.table_file import read_table_file, told
from ds_hydra.engine.fits import job_memory, within_memory
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.plan.schemes import feasible_schemes
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.kernels.arrays import Floats
from ds_hydra.planner.proposal.propose import QUICK, propose_strategies
from ds_hydra.profiling.hollow import hollow_source
from ds_hydra.simulate.preview import Preview, preview_steps

_SPEEDS = (1.0, 0.5, 2.0)  # of the assumed device: how much an estimate hangs on it
_LITTLE = 1.05  # times as fast
_MOST_STAGES = 8
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
    """A model on so many GPUs."""

    source: ModelSource
    positions: int
    dtype: torch.dtype
    gpus: int
    node_size: int
    memory_gib: float

    @classmethod
    def of(cls, model: str, config: Mapping[str, Any], gpus: int, node_size: int, memory_gib: float) -> Job:
        """Read the model's config. ConfigError for what is no causal language model."""
        source: Any = hollow_source(model)
        enabled = [kind for kind in ("bf16", "fp16") if (config.get(kind) or {}).get("enabled") in (True, "auto")]
        positions = getattr(source.text_config, "max_position_embeddings", None) or UNLIMITED
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled[0]] if enabled else torch.float32
        return cls(source, int(positions), dtype, gpus, min(node_size, gpus), memory_gib)

    def expected(
        self, lengths: Sequence[int], tokens: int, context: int, steps: int, device: AssumedDevice, measured: str | None
    ) -> str:
        """What a preview of these lengths says, in a sentence or two: by the costs of a file, or by what the model's
        FLOPs take a device that is assumed. PlanError where nothing holds the longest."""
        if measured is not None:
            tables = [told(read_table_file(measured)).table]
            whose = f"By the costs of {measured}, without transfers of parameters"
        else:
            tables = [self._estimated(max(context, tokens), replace(device, flops=device.flops * by)) for by in _SPEEDS]
            whose = "AN ESTIMATE from FLOPs, nothing was measured"
        previews = [self._preview(table, lengths, tokens, context, steps) for table in tables]
        preview = previews[0]
        said = f"{whose}: {steps} steps on {self.gpus} GPUs take mostly {next(iter(preview.wins))}"
        if preview.fixed is None:
            return f"{said}; no layout of one scheme holds {context} tokens, so there is nothing to compare with."
        gains = [_gain(one, one.assigned_ms) for one in previews]
        said += f", {gains[0]:.2f} times as fast as {preview.fixed} with balanced sequences"
        if measured is None:
            said += f" ({min(gains):.2f} to {max(gains):.2f} on a device half to twice as fast)"
        said += f", and {_gain(preview, preview.packed_full_ms):.2f} times as fast as packed full and dealt out."
        if gains[0] < _LITTLE:
            said += " Little is to be gained on these lengths."
        if measured is None:
            said += (
                f" It assumes {self.memory_gib:.0f} GiB and {device} for each GPU, and counts no transfers of "
                "parameters; ds-hydra profile measures the costs, and --cost-table takes its file."
            )
        return said

    def _estimated(self, longest: int, device: AssumedDevice) -> CostTable:
        """Of all schemes those that jobs are usually run with, as far as they fit the memory."""
        schemes = [
            scheme
            for scheme in feasible_schemes(self.source.plan, self.gpus, self.node_size)
            if scheme.pp <= _MOST_STAGES and scheme.num_ranks & (scheme.num_ranks - 1) == 0
        ]
        source: Any = self.source
        width = source.width(min(1, source.plan.num_layers - 1))
        shape = model_shape(source.plan, width, source.text_config.vocab_size, source.text_config)
        memory = job_memory(
            source, schemes, self.gpus, self.memory_gib * 2**30, self.dtype, node_size=self.node_size,
        )  # fmt: skip
        estimated = analytic_cost_table(
            shape, schemes, longest, device_flops=device.flops, link_bytes_per_second=device.inside,
            between_bytes_per_second=device.between, node_size=self.node_size,
        )  # fmt: skip
        return within_memory(estimated, memory)

    def _preview(self, table: CostTable, lengths: Sequence[int], tokens: int, context: int, steps: int) -> Preview:
        options = PlannerOptions(kernels="compiled", layers=self.source.plan.num_layers)
        strategies = propose_strategies(
            table, self.gpus, lengths, tokens, context, node_size=self.node_size, count=8, effort=QUICK
        )
        return preview_steps(table, strategies, lengths, tokens, context, steps, options)


def _gain(preview: Preview, others_ms: Floats) -> float:
    return float(others_ms.mean() / preview.step_ms.mean())
