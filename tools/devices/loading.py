"""Memory of each rank's process while a model on the meta device gets its first values.

A Llama of 3 GB in FP32 is written as a folder of safetensors, a layer a file, and an engine made from it on forked CPU
ranks; then another whose values are drawn. What counts is by how much the peak of a process's resident memory rises
until the masters have their values; they are FP32 parameters. Beside it stands the rise until the whole engine is
there, with gradients and the parameters of its strategy, whatever the values come from.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch
from safetensors.torch import save_file
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.engine.job import Job
from ds_hydra.ranks.world import World
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.testing import rank_environment, run_ranks
from tools import aims
from tools.devices.table import Table

_RANKS = 4
_LAYERS, _QUICK_LAYERS = 12, 2
_MIB = 2**20


def _model(layers: int) -> Any:
    """7.5e8 parameters with 12 layers, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _write(folder: Path, layers: int) -> int:
    """The weights' folder, written piece by piece; its bytes."""
    pieces: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in _model(layers).named_parameters():
        pieces.setdefault(".".join(name.split(".")[:3]), []).append((name, parameter.shape))
    places: dict[str, str] = {}
    for number, params in enumerate(pieces.values()):
        file = f"model-{number:05d}.safetensors"
        tensors = {name: torch.full(shape, 0.02) for name, shape in params}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _resident(which: str) -> int:
    """Bytes of this process's resident memory: "VmRSS" now, "VmHWM" at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def _rise(rank: int, initial_weights: str, layers: int) -> tuple[int, int, int, int]:
    """Bytes: rise of the peak; masters; largest parameter in FP32; rise with the whole engine."""
    import ds_hydra
    from ds_hydra.engine import crew

    rank_environment(rank)
    model = _model(layers)
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "hydra": {
            "tokens_per_step": 64,
            "strategies": ["tp4"],
            "initial_weights": initial_weights,
            "self_check": "off",
            "steps_file": None,
            "planner": {"ahead": 0},
            "faults": {"frozen_seconds": 0},
        },
    }
    data: list[Tensor] = [torch.arange(3, 35) for _ in range(4)]
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    peak, give = [], crew.give_masters

    def measured(masters: ModelMasters, job: Job, world: World) -> None:
        give(masters, job, world)
        peak.append(_resident("VmHWM"))

    crew.give_masters = measured
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident("VmRSS")
    engine = ds_hydra.initialize(model=model, training_data=data, config=config)[0]
    masters = 4 * engine.crew.masters.trained.flat.numel()
    return peak[0] - before, masters, largest, _resident("VmHWM") - before


def memory_of_loading(quick: bool) -> Table:
    """The rank whose memory rises most, beside its masters and the largest parameter.

    Quick: of a small model from a folder only, since what a process takes once counts too much beside random values.
    """
    layers = _QUICK_LAYERS if quick else _LAYERS
    table = Table(
        f"peak of resident memory while a model of {layers} layers gets its first values, MiB, {_RANKS} ranks",
        ["values from", "model, FP32", "rise", "masters", "largest", "rise / both", "aim", "whole engine"],
    )
    with tempfile.TemporaryDirectory() as scratch:
        size = _write(Path(scratch), layers)
        sources = ((f"{size / _MIB:.0f} MiB of safetensors", scratch), ("random", "random"))
        for name, where in sources[:1] if quick else sources:
            rises = run_ranks(_rise, _RANKS, where, layers, timeout=1800)
            rise, masters, largest, engine = max(rises)
            ratio = rise / (masters + largest)
            whole = sum(row[1] for row in rises)
            sizes = [round(number / _MIB) for number in (whole, rise, masters, largest)]
            table.rows.append([name, *sizes, round(ratio, 3), aims.LOADING, round(engine / _MIB)])
            if ratio > aims.LOADING:
                table.missed.append(
                    f"values from {name}: {ratio:.3f} of masters and largest parameter, not <= {aims.LOADING}"
                )
    return table
