"""Memory of large models by count: ours beside what ZeRO-1 and ZeRO-2 hold with the same TP, PP and gradients."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ds_hydra.costs.memory import Activations, JobMemory, Needs
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.profiling.stage_timer import hollow_source
from tools import aims
from tools.devices.table import Table

NUM_RANKS, NODE_SIZE = 64, 8
GIB = 2**30
MODELS = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "28B": {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 60, "num_attention_heads": 48},
}
# Candidate strategies of one job. The aims are for 7B: the most that a rank may hold, as a multiple of ZeRO-1.
JOBS: tuple[tuple[tuple[str, ...], float | None], ...] = (
    (("4*tp16",), 1.05),
    (("8*tp8",), 1.05),
    (("8*tp4pp2",), 1.05),
    (("64*tp1",), 1.05),
    (("tp16 + 48*tp1",), None),
    (("4*tp16", "64*tp1"), None),
)
GRADIENTS = {2: "16 bit", 4: "FP32"}


def by_count(quick: bool) -> Table:
    """Model states and messages of the fullest rank, without activations; quick: the 7B model."""
    rows: list[Sequence[object]] = []
    missed: list[str] = []
    for model in list(MODELS)[: 1 if quick else None]:
        plan = plan_of(model)
        for job, aim in JOBS:
            found = {size: list(needs_of(plan, job, size)) for size in GRADIENTS}
            for size, name in GRADIENTS.items():
                for needs in found[size]:
                    *parts, ratio = _row(plan, needs, size)
                    limit = aim if model == "7B" else None
                    rows.append([model, ", ".join(job), name, str(needs.scheme), *parts, ratio, limit or "-"])
                    if limit is not None and ratio > limit:
                        missed.append(f"{model} {job[0]}, {name} gradients: {ratio:.3f} of ZeRO-1 (aim {limit})")
            missed += [f"{model} {job[0]}: {line}" for line in _beside_gradients(*found.values())]
    headers = ["model", "candidates", "gradients", "on a rank of", "params", "grads", "scratch", "masters", "sum",
               "ZeRO-1", "ZeRO-2", "to ZeRO-1", "aim"]  # fmt: skip
    title = f"memory by count: GiB of the fullest of {NUM_RANKS} ranks, without activations"
    return Table(title, headers, rows, missed)


def plan_of(model: str) -> ModelPlan:
    config = {"model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": False, **MODELS[model]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return hollow_source(path).plan


def needs_of(plan: ModelPlan, job: tuple[str, ...], grad_bytes: int, num_ranks: int = NUM_RANKS) -> Iterator[Needs]:
    """The fullest stage of every scheme of a job."""
    shapes = [StrategyShape.parse(text) for text in job]
    schemes = dict.fromkeys(pipeline.cost_key for shape in shapes for pipeline in shape.pipelines)
    nothing = {(tp, 1): Activations(0.0, 0.0, 0.0) for tp in (1, 4, 8, 16)}
    memory = JobMemory(plan, num_ranks, nothing, 2, grad_bytes=grad_bytes, node_size=NODE_SIZE)
    memory = memory.together({one: place_strategy(one, num_ranks, plan.num_layers) for one in shapes})
    return (max(memory.stages(scheme), key=lambda needs: needs.states) for scheme in schemes)


def _row(plan: ModelPlan, needs: Needs, grad_bytes: int) -> list[float]:
    """Ours, and what ZeRO holds on the ranks of this scheme if all pipelines are of it: 12 bytes of FP32 parameter and
    moments for each parameter over all ranks, which sums gradients without a buffer."""
    assert isinstance(needs.scheme, ParallelScheme)
    alone = StrategyShape.of([needs.scheme] * (NUM_RANKS // needs.scheme.num_ranks))
    (own,) = needs_of(plan, (str(alone),), grad_bytes)
    moments = 12 * sum(bucket.numel for bucket in plan.buckets) / NUM_RANKS
    summed = own.params // 2 * grad_bytes
    zero_1 = own.params + summed + moments
    zero_2 = own.params + summed / len(alone.pipelines) + moments
    parts = (needs.params, needs.grads, needs.scratch, needs.masters + needs.optimizer, needs.states, zero_1, zero_2)
    return [*(round(part / GIB, 2) for part in parts), round(needs.states / zero_1, 3)]


def _beside_gradients(narrow: list[Needs], wide: list[Needs]) -> Iterator[str]:
    """What FP32 gradients change beside the gradients themselves."""
    for one, other in zip(narrow, wide, strict=True):
        beside = replace(other, grads=one.grads).states - one.states
        if abs(beside) > aims.GRADIENTS_BESIDE * one.states:
            yield f"FP32 gradients change {beside / GIB:.2f} GiB beside the gradients' own memory"
