"""Predicted memory of stages under slices and split backward against the most that the allocator had given out.

Each case replays a plan of its own on forked CPU ranks, twice, since the optimizer's state comes with the first step.
What a stage keeps at once follows from the plan's schedule and the shares of memory that were measured by local shapes,
as `ds-hydra profile` does; the memory model makes bytes of it. A CPU's attention keeps the mask of each slice, which a
device's has none of: the measured share of contexts has them in it, as sequences are about as long there as here. The
model has eight layers, so that what one of them needs for a moment is not most of what is measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shares import Shares
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.registry import orders
from ds_hydra.pipe.schedules.simulate import peak_units
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.simulate import UNITS, batches_of, has_formula, simulate_pipeline, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, Span, StepPlan, save_plans
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.testing import run_ranks
from tools import aims
from tools.devices.peak import MIB, quiet_settings, source_of, train_and_measure

SIZES: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_STEPS = 2
_ROOM = 1 << 16  # MaxLen of the job's table: what fits is not what is asked here


@dataclass(frozen=True)
class Case:
    """A pipeline, and what its micro-batches hold."""

    shape: str
    slices: tuple[int, ...]  # tokens of the slices of one sequence, each alone in a micro-batch
    whole: tuple[tuple[int, ...], ...]  # tokens of the whole sequences of each micro-batch that follows
    dtype: str = "fp32"
    kv_heads: int = 8
    checkpointing: bool = False
    recompute: float = 0.0  # of the layers of slices

    @property
    def pipeline(self) -> PipelineShape:
        return PipelineShape.parse(self.shape)

    @property
    def lengths(self) -> list[int]:
        return [*([sum(self.slices)] if self.slices else []), *(n for batch in self.whole for n in batch)]

    @property
    def sizes(self) -> dict[str, Any]:
        return {**SIZES, "num_key_value_heads": self.kv_heads}


_SHORT = ((64, 64), (48, 80), (128,))
CASES = (
    Case("pp2/zb-h1", (128, 128, 128, 128), _SHORT),
    Case("pp2", (128, 128, 128, 128), (), recompute=0.75),
    Case("pp2", (128, 128, 128, 128), _SHORT, checkpointing=True),
    Case("pp2/zb-h1", (128, 128, 128, 128), _SHORT, recompute=0.5),
    Case("pp2/list", (128, 128, 128, 128, 128), (), recompute=1.0),
    Case("pp2", (128, 128, 128, 64), _SHORT),
    Case("pp2/zb-h1", (), _SHORT * 2),
    Case("pp2/zb-h1", (128, 128, 128, 64), _SHORT, "bf16", 2),
    Case("tp2", (128, 128, 128, 128), _SHORT),
    Case("sp2", (128, 128, 128, 128), _SHORT),
    Case("tp2pp2/zb-h1", (128, 128, 128, 128), _SHORT),
)
_QUICK = 2


def predicted_and_measured(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """The memory of every stage's fullest rank in each case; quick: some cases on 2 ranks."""
    torch.set_num_threads(1)  # bytes are measured, not times, and on small tensors a second thread mostly spins
    rows = []
    for case in CASES[: _QUICK if quick else None]:
        shares, memory = _model(case)
        plan = _plan(case, _table(case, shares))
        peaks = run_ranks(_train, case.pipeline.num_ranks, case, shares, timeout=600)
        (placed,) = (placed for strategy in memory.strategies.values() for placed in strategy.pipelines)
        for index, (predicted, kept) in enumerate(_predicted(case, plan, shares, memory)):
            measured = max(peaks[rank] for rank in placed.stages[index].ranks)
            off = predicted / measured - 1
            name = f"stage {index} of {case.shape}, {len(case.slices) or 'no'} slices"
            if abs(off) > aims.MEMORY:
                missed.append(f"{name}: memory predicted {off:+.1%} (aim {aims.MEMORY:.0%})")
            print(f"{name}: {predicted} bytes predicted, {measured} measured", file=sys.stderr, flush=True)
            rows.append({
                "pipeline": case.shape, "stage": index, "slices": len(case.slices), "type": case.dtype,
                "kv heads": case.kv_heads, "recomputes": 1.0 if case.checkpointing else case.recompute,
                "until weight": shares.until_weight, "recomputed": shares.recomputed,
                "context": shares.context, "predicted MiB": predicted / MIB, "measured MiB": measured / MIB,
                "off": off, "activations": kept / predicted,
            })  # fmt: skip
    return rows


def _model(case: Case) -> tuple[Shares, JobMemory]:
    """Shares of memory as they are measured, and the memory model with them."""
    source = source_of(case.sizes, StageOptions(activation_checkpointing=case.checkpointing))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    stage = case.pipeline.stages[0]
    longest = max(case.lengths)
    figures = measure_activations(source, stage.tp, stage.sp, torch.device("cpu"), dtype, longest)
    memory = JobMemory(
        source.plan, case.pipeline.num_ranks, {(stage.tp, stage.sp): figures}, dtype.itemsize,
        vocab=SIZES["vocab_size"],
    )  # fmt: skip
    strategy = StrategyShape((case.pipeline,))
    placed = place_strategy(strategy, case.pipeline.num_ranks, source.plan.num_layers)
    usual = Shares.usual()
    return figures.shares(usual.forward, usual.weight), memory.together({strategy: placed})


def _table(case: Case, shares: Shares) -> CostTable:
    scheme = case.pipeline.cost_key
    return CostTable((SchemeCost(scheme, 1e-6, 0.01, 1.0, _ROOM, 1, shares),))


def _plan(case: Case, table: CostTable, step: int = 0) -> StepPlan:
    """The plan of a step: the sequences as the sampler draws them, in the micro-batches of the case."""
    ids = _sampler(case).batch(step)
    at = {case_id: position for position, case_id in enumerate(ids)}
    batches, start = [], 0
    for size in case.slices:
        batches.append(MicroBatchPlan((Span(at[0], start, start + size),), case.recompute))
        start += size
    following = int(bool(case.slices))
    for lengths in case.whole:
        spans = tuple(Span(at[following + i], 0, length) for i, length in enumerate(lengths))
        batches.append(MicroBatchPlan(spans))
        following += len(lengths)
    pipeline = PipelinePlan(case.pipeline, tuple(batches), 0.0)
    loads = [table[case.pipeline].load_ms(batch.lengths) for batch in batches]
    formula = table[case.pipeline].pipeline_ms(loads) if has_formula(pipeline) else simulate_pipeline(pipeline, table)
    phases = (Phase((replace(pipeline, predicted_ms=formula),)),)
    lengths = tuple(case.lengths[i] for i in ids)
    return StepPlan(step, tuple(ids), lengths, phases, simulated_ms(phases, table), source="replay")


def _sampler(case: Case) -> TokenBudgetSampler:
    return TokenBudgetSampler(case.lengths, sum(case.lengths))


def _predicted(case: Case, plan: StepPlan, shares: Shares, memory: JobMemory) -> list[tuple[int, float]]:
    """Bytes of each stage, and those of its activations."""
    (pipeline,) = plan.pipelines
    cost = _table(case, shares)[case.pipeline]
    batches = batches_of(pipeline.microbatches, pipeline.chain, cost, shares, parts=1)
    largest = max(batch.num_tokens for batch in pipeline.microbatches)
    found = []
    for index, order in enumerate(orders(case.pipeline.schedule, batches, case.pipeline.pp)):
        needs = memory.needs(case.pipeline, index)
        # While a layer is computed again it keeps everything.
        again = largest * (1.0 - shares.recomputed) * needs.layer * needs.alive / needs.per_token
        total = needs.held(peak_units(order, batches) / UNITS + again * pipeline.recomputes, largest)
        found.append((total, float(total - needs.states)))
    return found


def _train(rank: int, case: Case, shares: Shares) -> int:
    """One rank's peak."""
    with tempfile.TemporaryDirectory() as folder:
        table, plans = Path(folder) / "table.json", Path(folder) / "plans.jsonl"
        costs = _table(case, shares)
        TableFile(costs).save(table)
        save_plans([_plan(case, costs, step) for step in range(_STEPS)], plans)
        settings = quiet_settings(
            sum(case.lengths), [case.shape], cost_table=str(table),
            activation_checkpointing=case.checkpointing, planner={"ahead": 0}, replay=str(plans),
        )  # fmt: skip
        settings["bf16"] = {"enabled": case.dtype == "bf16"}
        return train_and_measure(rank, case.sizes, settings, _sequences(case.lengths), _STEPS)[0]


def _sequences(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]
