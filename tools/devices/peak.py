"""Predicted memory of small models against the most that torch's allocator had given out at one time in a run.

Every mix trains on forked CPU ranks, one step of each strategy and one more of the first. The allocator tells torch's
profiler of each tensor's memory that it gives and takes back, those inside of operators too; their sum from before the
engine is made is what a device would need beside the model itself, whose parameters the user's script holds here. The
memory model is told the model, the strategies, and how many tokens the largest micro-batch of each scheme had;
activations of a layer it gets from one process that ran local shapes, as `ds-hydra profile` does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.costs.memory import JobMemory, Needs, Shape
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.profiling.stage_memory import Allocations, measure_activations
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.testing import rank_environment, run_ranks
from tools import aims
from tools.devices.table import Table

MIB = 2**20
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LENGTH = 128  # of all sequences, so that micro-batches differ only in how many they hold


@dataclass(frozen=True)
class Mix:
    """Candidate strategies of one job, in turn, and the types of its parameters and gradients."""

    strategies: tuple[str, ...]
    dtype: str = "bf16"
    grad_dtype: str = "fp32"
    sequences: int = 8  # of a step
    node_size: int | None = None
    token_sharding: bool = False
    functions: str = "off"

    @property
    def shapes(self) -> list[StrategyShape]:
        return [StrategyShape.parse(text) for text in self.strategies]

    @property
    def num_ranks(self) -> int:
        return self.shapes[0].num_ranks


MIXES = (
    Mix(("4*tp1", "tp4")),
    Mix(("tp2pp2", "tp2 + pp2"), grad_dtype="bf16"),
    Mix(("tp4 + 4*tp1",), sequences=16),
    Mix(("8*tp1", "2*tp4"), grad_dtype="bf16", sequences=16, node_size=4),
    Mix(("tp4 + 2*pp2", "2*tp2pp2"), "fp32", sequences=16),
    Mix(("2*sp2", "pp4"), node_size=2),
    Mix(("pp4/zb-h1",), sequences=16),
    Mix(("tp4", "2*tp2"), grad_dtype="bf16", token_sharding=True, functions="auto"),
    Mix(("2*tp2pp2", "tp4pp2"), sequences=16, token_sharding=True, functions="auto"),
)
_QUICK = 1  # mixes within a minute


def predicted_and_measured(quick: bool) -> Table:
    """The fullest rank's memory; quick: some mixes on 4 ranks."""
    rows: list[Sequence[object]] = []
    missed: list[str] = []
    for mix in MIXES[: _QUICK if quick else None]:
        peaks = run_ranks(_train, mix.num_ranks, mix, timeout=600)
        needs, length = _predict(mix, peaks[0].tokens)
        measured, predicted = max(one.peak for one in peaks), needs.total(length)
        off = predicted / measured - 1
        if abs(off) > aims.MEMORY:
            missed.append(f"{', '.join(mix.strategies)}: predicted {off:+.1%} (aim {aims.MEMORY:.0%})")
        print(f"{mix.strategies}: {predicted} bytes predicted, {measured} measured", file=sys.stderr, flush=True)
        states = needs.states / predicted
        tokens = "shared" if mix.token_sharding else "all"
        rows.append([", ".join(mix.strategies), mix.num_ranks, tokens, mix.dtype, mix.grad_dtype, mix.functions,
                     str(needs.scheme), round(predicted / MIB, 1), round(measured / MIB, 1), f"{off:+.1%}",
                     f"{states:.0%}"])  # fmt: skip
    headers = ["candidates", "ranks", "tokens", "type", "gradients", "functions", "fullest", "predicted", "measured",
               "off", "states"]  # fmt: skip
    return Table("memory predicted and measured: MiB of the fullest rank, small model, CPU", headers, rows, missed)


@dataclass(frozen=True)
class _Peak:
    peak: int  # bytes
    tokens: dict[Shape, int]  # of the largest micro-batch of each scheme


def _train(rank: int, mix: Mix) -> _Peak:
    """One rank's run."""
    peak, plans = train_and_measure(rank, CONFIG, _settings(mix), _sequences(mix), len(mix.strategies) + 1)
    tokens: dict[Shape, int] = {}
    for scheme, numel in (one for plan in plans for one in _micro_batches(plan)):
        tokens[scheme] = max(tokens.get(scheme, 0), numel)
    return _Peak(peak, tokens)


def train_and_measure(
    rank: int, sizes: dict[str, Any], settings: dict[str, Any], sequences: Sequence[Tensor], steps: int, **more: Any
) -> tuple[int, list[str]]:
    """Train a model of these sizes on this rank: the most bytes at one time beside the model, and the steps' plans.

    `more` is given to `ds_hydra.initialize`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_hydra

    rank_environment(rank)
    os.environ["KINETO_LOG_LEVEL"] = "9"  # it prints that it starts
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = dict(sizes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    kept = [parameter.data for parameter in model.parameters()]  # what it frees was not given out by then
    plans = []
    with Allocations(torch.device("cpu"), sends=True) as found:
        engine = ds_hydra.initialize(model=model, training_data=sequences, config=settings, **more)[0]
        for _ in range(steps):
            engine.train_batch()
            plans.append(engine.last_step.plan)
    del kept
    return found.peak, plans


def _micro_batches(plan: str) -> Iterator[tuple[Shape, int]]:
    """Scheme and tokens of all micro-batches of a step."""
    phases = StepPlan.from_json(plan, "the step's plan").phases
    for pipeline in (pipeline for phase in phases for pipeline in phase.pipelines):
        for batch in pipeline.microbatches:
            yield pipeline.shape.cost_key, sum(span.stop - span.start for span in batch.spans)


def _sequences(mix: Mix) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = (len(mix.strategies) + 1) * mix.sequences
    return [torch.randint(3, CONFIG["vocab_size"], (LENGTH,), generator=generator) for _ in range(count)]


def _settings(mix: Mix) -> dict[str, Any]:
    return {
        "bf16": {"enabled": mix.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": mix.grad_dtype},
        **quiet_settings(
            mix.sequences * LENGTH,
            mix.strategies,
            choose="cycle",
            node_size=mix.node_size,
            fast_paths=StageOptions(token_sharding=mix.token_sharding, functions=mix.functions).as_paths(),
        ),
    }


def quiet_settings(tokens: int, strategies: Sequence[str], **hydra: Any) -> dict[str, Any]:
    """Settings of a job that does nothing but train, as `source_of` measures it; `hydra` adds to its block."""
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "hydra": {
            "tokens_per_step": tokens,
            "strategies": list(strategies),
            "self_check": "off",
            "steps_file": None,
            "planner": {"ahead": 0},
            "faults": {"frozen_seconds": 0},
            "fast_paths": "off",
            **hydra,
        },
    }


def _predict(mix: Mix, tokens: dict[Shape, int]) -> tuple[Needs, int]:
    """What the memory model says of the fullest stage, and the tokens of its micro-batches."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[mix.dtype]
    source = source_of(CONFIG, StageOptions(token_sharding=mix.token_sharding, functions=mix.functions))
    figures = {
        (stage.tp, stage.sp): measure_activations(source, stage.tp, stage.sp, torch.device("cpu"), dtype, LENGTH)
        for stage in _stages(mix.shapes)
    }
    memory = JobMemory(
        source.plan, mix.num_ranks, figures, dtype.itemsize, vocab=CONFIG["vocab_size"],
        grad_bytes={"bf16": 2, "fp32": 4}[mix.grad_dtype], node_size=mix.node_size, serial=False,
    )  # fmt: skip
    layers = source.plan.num_layers
    memory = memory.together({shape: place_strategy(shape, mix.num_ranks, layers) for shape in mix.shapes})
    needs = [(memory.fullest(scheme, numel), numel) for scheme, numel in tokens.items()]
    return max(needs, key=lambda one: one[0].total(one[1]))


def source_of(sizes: dict[str, Any], options: StageOptions = AS_WRITTEN) -> CausalLM:
    """Stages of a model of these sizes, to be measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(sizes))
        return hollow_source(path, options)


def _stages(shapes: Sequence[StrategyShape]) -> set[Any]:
    return {stage for shape in shapes for pipeline in shape.pipelines for stage in pipeline.stages}
