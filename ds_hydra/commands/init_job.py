"""What `ds-hydra init` finds out about a job: the model's limits, and the gain that estimated costs promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_hydra.costs.analytic import analytic_cost_table, model_shape
from ds_hydra.engine.fits import job_memory, within_memory
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.plan.schemes import feasible_schemes
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.proposal.propose import QUICK, propose_strategies
from ds_hydra.profiling.hollow import hollow_source
from ds_hydra.simulate.preview import preview_steps

_BETWEEN = 2.5e10  # bytes a second of a GPU to other nodes
_MOST_STAGES = 8
UNLIMITED = 2**20  # positions of a model that states none


def gpus_here() -> int:
    """Of this machine; 0 where there is none."""
    return torch.cuda.device_count()


def memory_here() -> float | None:
    """GiB of the first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if gpus_here() else None


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

    def expected(self, lengths: Sequence[int], tokens: int, context: int, steps: int) -> str:
        """What a preview of these lengths says, in a sentence or two. PlanError where nothing holds the longest."""
        # A first figure: of all schemes those that jobs are usually run with.
        schemes = [
            scheme
            for scheme in feasible_schemes(self.source.plan, self.gpus, self.node_size)
            if scheme.pp <= _MOST_STAGES and scheme.num_ranks & (scheme.num_ranks - 1) == 0
        ]
        source: Any = self.source
        width = source.width(min(1, source.plan.num_layers - 1))
        shape = model_shape(source.plan, width, source.text_config.vocab_size)
        memory = job_memory(
            source, schemes, self.gpus, self.memory_gib * 2**30, self.dtype, node_size=self.node_size,
        )  # fmt: skip
        estimated = analytic_cost_table(
            shape, schemes, max(context, tokens), node_size=self.node_size, between_bytes_per_second=_BETWEEN
        )
        table = within_memory(estimated, memory)
        options = PlannerOptions(kernels="compiled", layers=source.plan.num_layers)
        strategies = propose_strategies(
            table, self.gpus, lengths, tokens, context, node_size=self.node_size, count=8, effort=QUICK
        )
        preview = preview_steps(table, strategies, lengths, tokens, context, steps, options)
        ours, uses = float(preview.step_ms.mean()), next(iter(preview.wins))
        where = f"{steps} steps on {self.gpus} GPUs of {self.memory_gib:.0f} GiB"
        told = f"{where}, by costs estimated from FLOPs, without transfers: mostly {uses}"
        if preview.fixed is None:
            return f"{told}; no layout of one scheme holds {context} tokens, so there is nothing to compare with."
        gain, full = (float(ms.mean()) / ours for ms in (preview.assigned_ms, preview.packed_full_ms))
        little = " Little is to be gained on these lengths." if gain < 1.05 else ""
        return (
            f"{told}, {gain:.2f} times as fast as {preview.fixed} with balanced sequences, and {full:.2f} times "
            f"as fast as packed full and dealt out.{little} ds-hydra profile measures the costs."
        )
