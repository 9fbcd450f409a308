"""The memory model against the allocator in drawn layouts: strategies, schedules, slices, types and sizes of models.

Every layout is a job of four forked CPU ranks, whose plans are drawn here: one or two strategies, micro-batches of up
to three sequences, sequences in slices, layers that are computed again. It is measured as in the table "peak".
Predicted is the most that the model says a rank holds at one time, followed through the schedule of each stage.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.placement import place_pipeline, place_strategy
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.schedules.simulate import TimedAction
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.simulate import schedule_batches, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.plan.validate import modelled_ms
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.simulate.memory import memory_over_time
from ds_hydra.simulate.pipeline import StageTimes
from ds_hydra.testing import run_ranks
from tests.support.planner_cases import in_slices, recomputing
from tools import aims
from tools.devices.peak import CONFIG, LENGTH, MIB, quiet_settings, source_of, train_and_measure
from tools.devices.table import Table

NUM_RANKS = 4
STRATEGIES = (
    "4*tp1", "2*tp2", "tp4", "tp2 + 2*tp1", "2*sp2", "tp2sp2", "2*pp2", "pp4", "tp2pp2", "tp2 + pp2", "sp2pp2",
    "pp4/list", "2*pp2/list", "tp2pp2/list", "sp2pp2/list", "2*pp2/v", "tp2pp2/v", "tp4/list", "pp4/zb-h1",
    "tp2pp2/zb-h1",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LAYOUTS, _QUICK = 40, (3,)
_ROOM = 8 * LENGTH  # tokens that a stage has room for, as its costs say


@dataclass(frozen=True)
class Layout:
    """A job."""

    number: int
    strategies: tuple[str, ...]
    sizes: dict[str, Any]  # of the model
    dtype: str
    grad_dtype: str
    options: StageOptions
    lengths: tuple[int, ...]  # of all sequences
    tokens: int  # of a step
    slices: bool
    recomputes: bool

    @property
    def shapes(self) -> list[StrategyShape]:
        return [StrategyShape.parse(text) for text in self.strategies]

    @cached_property
    def table(self) -> CostTable:
        """Costs of the pipelines, of which only the room counts."""
        schemes = {pipeline.cost_key for shape in self.shapes for pipeline in shape.pipelines}
        return CostTable(tuple(SchemeCost(scheme, 0.0, 1.0, 1.0, _ROOM) for scheme in sorted(schemes, key=str)))

    def plan(self, step: int, ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """A step's: sequences are dealt out to pipelines at random, in micro-batches of one to three."""
        draw, shape = random.Random(f"{self.number} {step}"), self.shapes[step % len(self.strategies)]
        held: list[list[MicroBatchPlan]] = [[] for _ in shape.pipelines]
        left = list(range(len(lengths)))
        while left:
            taken, left = left[: (size := draw.choice((1, 1, 2, 3)))], left[size:]
            draw.choice(held).append(MicroBatchPlan.of_whole(taken, lengths))
        pipelines = [PipelinePlan(one, tuple(own), 0.0) for one, own in zip(shape.pipelines, held, strict=True)]
        phase = Phase(tuple(replace(one, predicted_ms=modelled_ms(one, self.table)) for one in pipelines))
        plan = StepPlan(step, tuple(ids), tuple(lengths), (phase,), simulated_ms((phase,), self.table))
        if self.slices:
            plan = in_slices(plan, self.table, self.number)
        return recomputing(plan, self.table, self.number) if self.recomputes else plan


def drawn(number: int) -> Layout:
    """The same layout for the same number."""
    draw = random.Random(number)
    count, dtype = draw.choice((4, 6, 8)), draw.choice(("bf16", "bf16", "bf16", "fp32"))
    strategies = tuple(draw.sample(STRATEGIES, draw.choice((1, 1, 2))))
    sizes = CONFIG | {
        "num_key_value_heads": draw.choice((8, 4)), "vocab_size": draw.choice((2048, 8192)),
        "hidden_size": draw.choice((256, 256, 384)), "num_hidden_layers": draw.choice((4, 4, 6)),
        "tie_word_embeddings": draw.random() < 0.2,
    }  # fmt: skip
    return Layout(
        number, strategies, sizes, dtype, draw.choice(("fp32", "bf16")) if dtype == "bf16" else "fp32",
        StageOptions(functions=draw.choice(("off", "auto", "recompute")), token_sharding=draw.random() < 0.5),
        tuple(draw.choice((LENGTH // 2, LENGTH, 2 * LENGTH)) for _ in range(6 * count)), count * LENGTH,
        slices=draw.random() < 0.5, recomputes=draw.random() < 0.2,
    )  # fmt: skip


def drawn_layouts(quick: bool) -> Table:
    """Predicted over measured; quick: a few of them."""
    table = Table(
        f"memory predicted and measured in drawn layouts: MiB of the fullest of {NUM_RANKS} ranks, CPU",
        ["number", "candidates", "slices", "again", "tokens", "type", "gradients", "functions", "predicted", "measured",
         "off", "aim", "states"],
    )  # fmt: skip
    for number in _QUICK if quick else range(_LAYOUTS):
        layout = drawn(number)
        measured, plans = measure(layout)
        predicted, states = predict(layout, plans)
        off, what = predicted / measured - 1, ", ".join(layout.strategies)
        print(f"{number} {what}: {predicted:.0f} bytes predicted, {measured} measured, {off:+.1%}", file=sys.stderr,
              flush=True)  # fmt: skip
        pipelines = [pipeline for plan in plans for pipeline in plan.pipelines]
        table.rows.append(
            [number, what, *("yes" if any(each) else "no" for each in zip(
                *((one.in_slices, one.recomputes) for one in pipelines), strict=True)),
             "shared" if layout.options.token_sharding else "all", layout.dtype, layout.grad_dtype,
             layout.options.functions, round(predicted / MIB, 1), round(measured / MIB, 1), f"{off:+.1%}",
             f"{aims.LAYOUT_MEMORY:.0%}", f"{states / predicted:.0%}"]
        )  # fmt: skip
        if abs(off) > aims.LAYOUT_MEMORY:
            table.missed.append(f"{number}, {what}: predicted {off:+.1%} (aim {aims.LAYOUT_MEMORY:.0%})")
    return table


def measure(layout: Layout) -> tuple[int, list[StepPlan]]:
    """Train a step of each strategy and one more, in which optimizers have their states: bytes of the fullest rank at
    its peak, and the steps' plans."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        TableFile(layout.table).save(path)
        found = run_ranks(train, NUM_RANKS, layout, str(path), timeout=600)
    return max(peak for peak, _ in found), [StepPlan.from_json(plan) for plan in found[0][1]]


def train(rank: int, layout: Layout, cost_table: str) -> tuple[int, list[str]]:
    """One rank's peak, and the steps' plans."""
    settings = quiet_settings(
        layout.tokens, layout.strategies, fast_paths=layout.options.as_paths() or "off", cost_table=cost_table
    ) | {"bf16": {"enabled": layout.dtype == "bf16"}, "data_types": {"grad_accum_dtype": layout.grad_dtype}}
    return train_and_measure(
        rank, layout.sizes, settings, list(_sequences(layout)), len(layout.strategies) + 1,
        pre_step_callback=layout.plan,
    )  # fmt: skip


def _sequences(layout: Layout) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(layout.number)
    for length in layout.lengths:
        yield torch.randint(3, layout.sizes["vocab_size"], (length,), generator=generator)


def predict(layout: Layout, plans: Sequence[StepPlan]) -> tuple[float, float]:
    """The most bytes that the model says a rank holds in these steps, and how many of them are states."""
    source, device, dtype = source_of(layout.sizes, layout.options), torch.device("cpu"), DTYPES[layout.dtype]
    shapes = layout.shapes
    stages = {stage for shape in shapes for pipeline in shape.pipelines for stage in pipeline.stages}
    figures = {
        degrees: measure_activations(source, *degrees, device, dtype, LENGTH)
        for degrees in {(stage.tp, stage.sp) for stage in stages}
    }
    memory = JobMemory(
        source.plan, NUM_RANKS, figures, dtype.itemsize, vocab=layout.sizes["vocab_size"],
        grad_bytes=DTYPES[layout.grad_dtype].itemsize, serial=False,
    ).together({shape: place_strategy(shape, NUM_RANKS, source.plan.num_layers) for shape in shapes})  # fmt: skip
    first = replace(memory, optimizer_states=0, _cache={})  # optimizers make their states at the end of that step
    return max(
        _of_stage(memory if plan.step else first, pipeline, layout.table, index)
        for plan in plans for pipeline in plan.pipelines for index in range(pipeline.shape.pp)
    )  # fmt: skip


def _of_stage(memory: JobMemory, pipeline: PipelinePlan, table: CostTable, index: int) -> tuple[float, float]:
    """The same of one stage in one step."""
    known, shape = schedule_batches(pipeline, table), pipeline.shape
    slots = training_slots(pipeline.schedule, known, shape.pp, index)
    actions = tuple(TimedAction(action, 0.0, 0.0) for slot in slots for action in slot if action.computes)
    stage = place_pipeline(shape, 0, memory.plan.num_layers).stages[index]
    times = StageTimes(stage, index, (), 0.0, (), 0.0, actions=actions)
    held = max(held for _, held in memory_over_time(memory, pipeline, times))
    return held, memory.needs(shape.cost_key, index).states
