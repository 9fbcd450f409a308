"""The memory model against the most that torch's allocator gave out in a run, and memory while a model gets its values.

A job of four forked CPU ranks trains a small model, a step of each of its strategies and one more, in which optimizers
have their states; the allocator tells torch's profiler of each tensor's memory that it gives and takes back. Predicted
is the most that the model says a rank holds at one time, followed through the schedule of each stage, by activations of
a layer that one process measured, as `ds-hydra profile` does.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from safetensors.torch import save_file

import ds_hydra
import ds_hydra.engine.engine  # (the same)
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.engine import crew
from ds_hydra.host.kept_model import KeptModel
from ds_hydra.pipe.placement import place_pipeline, place_strategy
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.schedules.simulate import TimedAction
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.simulate import schedule_batches, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.plan.validate import modelled_ms
from ds_hydra.profiling.stage_memory import Allocations, measure_activations
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.simulate.pipeline import StageTimes, memory_over_time
from ds_hydra.step import host_states
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.planner_cases import in_slices, recomputing
from tools import aims

NUM_RANKS, LENGTH = 4, 128
STRATEGIES = (
    "4*tp1", "2*tp2", "tp4", "tp2 + 2*tp1", "2*sp2", "tp2sp2", "2*pp2", "pp4", "tp2pp2", "tp2 + pp2", "sp2pp2",
    "pp4/list", "2*pp2/list", "tp2pp2/list", "sp2pp2/list", "2*pp2/v", "tp2pp2/v", "tp4/list", "pp4/zb-h1",
    "tp2pp2/zb-h1",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES: dict[str, Any] = {
    "model_type": "llama", "intermediate_size": 704, "num_attention_heads": 8, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


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
    run: int = 0  # elements that are updated at once, of states on the host; 0: they are not there

    @property
    def shapes(self) -> list[StrategyShape]:
        return [StrategyShape.parse(text) for text in self.strategies]

    @cached_property
    def table(self) -> CostTable:
        """Costs of the pipelines, of which only the room counts."""
        schemes = {pipeline.cost_key for shape in self.shapes for pipeline in shape.pipelines}
        return CostTable(tuple(SchemeCost(scheme, 0.0, 1.0, 1.0, 8 * LENGTH) for scheme in sorted(schemes, key=str)))

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
    sizes = SIZES | {
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


def train(rank: int, layout: Layout, cost_table: str) -> tuple[int, list[str]]:
    """One rank's most bytes at one time beside the model, and the steps' plans."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rank_environment(rank)
    os.environ["KINETO_LOG_LEVEL"] = "9"  # it prints that it starts
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    torch.manual_seed(0)
    sizes = dict(layout.sizes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes))
    kept = [parameter.data for parameter in model.parameters()]  # what it frees was not given out by then
    draw = torch.Generator().manual_seed(layout.number)
    data = [torch.randint(3, sizes["vocab_size"], (length,), generator=draw) for length in layout.lengths]
    paths = layout.options.as_paths() or "off"
    settings = quiet(layout.tokens, layout.strategies, fast_paths=paths, cost_table=cost_table)
    settings |= {"bf16": {"enabled": layout.dtype == "bf16"}, "data_types": {"grad_accum_dtype": layout.grad_dtype}}
    settings["hydra"]["offload"] = ["optimizer"] * (layout.run > 0)
    plans = []
    with (
        mock.patch.object(host_states, "RUN", layout.run or host_states.RUN),
        # The twin runs 128 tokens when activations are gone, which only of packs as short as these are fewer.
        mock.patch.object(KeptModel, "_compared", return_value=("", frozenset())),
        Allocations(torch.device("cpu"), sends=True) as found,
    ):
        engine = ds_hydra.initialize(model=model, training_data=data, config=settings, pre_step_callback=layout.plan)[0]
        for _ in range(len(layout.strategies) + 1):
            engine.train_batch()
            plans.append(engine.last_step.plan)
    del kept
    return found.peak, plans


def quiet(tokens: int, strategies: Sequence[str], **hydra: Any) -> dict[str, Any]:
    """Settings of a job that does nothing but train; `hydra` adds to its block."""
    block = {"tokens_per_step": tokens, "strategies": list(strategies), "self_check": "off", "steps_file": None,
             "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}, **hydra}  # fmt: skip
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "hydra": block}


def predict(layout: Layout, plans: Sequence[StepPlan]) -> float:
    """The most bytes that the model says a rank holds in these steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(layout.sizes))
        source = hollow_source(path, layout.options)
    device, dtype = torch.device("cpu"), DTYPES[layout.dtype]
    stages = {stage for shape in layout.shapes for pipeline in shape.pipelines for stage in pipeline.stages}
    figures = {
        degrees: measure_activations(source, *degrees, device, dtype, LENGTH)
        for degrees in {(stage.tp, stage.sp) for stage in stages}
    }
    memory = JobMemory(
        source.plan, NUM_RANKS, figures, dtype.itemsize, vocab=layout.sizes["vocab_size"],
        grad_bytes=DTYPES[layout.grad_dtype].itemsize, serial=False, run=layout.run,
    )  # fmt: skip
    memory = memory.together({one: place_strategy(one, NUM_RANKS, source.plan.num_layers) for one in layout.shapes})
    first = replace(memory, optimizer_states=0, _cache={})  # optimizers make their states at the end of that step
    return max(
        of_stage(memory if plan.step else first, pipeline, layout.table, index)
        for plan in plans for pipeline in plan.pipelines for index in range(pipeline.shape.pp)
    )  # fmt: skip


def of_stage(memory: JobMemory, pipeline: PipelinePlan, table: CostTable, index: int) -> float:
    """The same of one stage in one step."""
    known, shape = schedule_batches(pipeline, table), pipeline.shape
    slots = training_slots(pipeline.schedule, known, shape.pp, index)
    actions = tuple(TimedAction(action, 0.0, 0.0) for slot in slots for action in slot if action.computes)
    stage = place_pipeline(shape, 0, memory.plan.num_layers).stages[index]
    times = StageTimes(stage, index, (), 0.0, (), 0.0, actions=actions)
    needs = memory.needs(shape.cost_key, index)
    held = max(needs.states + needs.update, *(held for _, held in memory_over_time(memory, pipeline, times)))
    return held + needs.host_states  # of CPU ranks, the same memory


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.drawn if n in (3, 12) else pytest.mark.long) for n in range(40)]
)
def test_drawn_layouts_take_the_memory_that_is_predicted(number: int, tmp_path: Path) -> None:
    compare(drawn(number), tmp_path / "table.json")


def compare(layout: Layout, table: Path) -> None:
    TableFile(layout.table).save(table)
    found = run_ranks(train, NUM_RANKS, layout, str(table), timeout=600)
    predicted = predict(layout, [StepPlan.from_json(plan) for plan in found[0][1]])
    assert predicted == pytest.approx(max(peak for peak, _ in found), rel=aims.LAYOUT_MEMORY), layout.strategies


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.drawn if n in (41, 46) else pytest.mark.long) for n in range(40, 52)]
)
def test_so_do_states_on_the_host_and_what_they_leave_on_the_device(number: int, tmp_path: Path) -> None:
    layout = replace(drawn(number), run=1 << random.Random(number).choice((12, 14, 16)))
    compare(layout, tmp_path / "table.json")


def on_meta(layers: int) -> Any:
    """7.5e8 parameters with 12 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
                         vocab_size=32000, max_position_embeddings=2048)  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def resident(which: str) -> int:
    """Bytes of this process's resident memory: "VmRSS" now, "VmHWM" at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def rise(rank: int, initial_weights: str, layers: int) -> float:
    """Of the peak of a rank's resident memory until its masters have their values, over these and the largest parameter
    in FP32."""
    rank_environment(rank)
    model, peak, give = on_meta(layers), list[int](), crew.give_masters

    def measured(*args: Any) -> None:
        give(*args)
        peak.append(resident("VmHWM"))

    settings = quiet(64, ["tp4"], initial_weights=initial_weights) | {"bf16": {"enabled": True}}
    data = [torch.arange(3, 35) for _ in range(4)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    with mock.patch.object(crew, "give_masters", measured):
        engine = ds_hydra.initialize(model=model, training_data=data, config=settings)[0]
    masters = 4 * engine.crew.masters.trained.flat.numel()
    return (peak[0] - before) / (masters + 4 * max(parameter.numel() for parameter in model.parameters()))


@pytest.mark.parametrize(
    ("layers", "source"),
    [
        pytest.param(2, "folder", marks=pytest.mark.drawn),
        pytest.param(12, "folder", marks=pytest.mark.long),
        pytest.param(12, "random", marks=pytest.mark.long),
    ],
)
def test_a_model_gets_its_values_in_little_more_than_its_masters(layers: int, source: str, tmp_path: Path) -> None:
    if source == "folder":  # a layer a file
        pieces: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in on_meta(layers).named_parameters():
            pieces.setdefault(".".join(name.split(".")[:3]), {})[name] = torch.full(parameter.shape, 0.02)
        places: dict[str, str] = {}
        for number, tensors in enumerate(pieces.values()):
            save_file(tensors, tmp_path / f"{number}.safetensors", {"format": "pt"})
            places |= dict.fromkeys(tensors, f"{number}.safetensors")
        del pieces
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    where = str(tmp_path) if source == "folder" else source
    assert max(run_ranks(rise, NUM_RANKS, where, layers, timeout=1800)) <= aims.LOADING
