"""CPU time and operators of packs whose sequences meet in boxes, against plain transformers one at a time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.pipe.in_process import InProcessRanks
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data, RankOfPipeline, _flat_values, uneven_data
from ds_hydra.self_check.schemes import BASE, uneven_pipeline
from tools import aims

_VIEWS = frozenset({"view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "detach",
                    "alias", "as_strided", "_unsafe_view", "split", "split_with_sizes", "unbind", "narrow",
                    "_reshape_alias", "unfold"})  # fmt: skip
_FLOOR = ("mm", "addmm", "addmm_", "bmm", "baddbmm")  # operators whose arithmetic packing can only make wider
_MALLOC = {-1: (1 << 31) - 1, -3: 1 << 25, -8: 1}  # glibc's options: bytes to trim and to map at, arenas
_LAYERS, _SHORT, _TURNS = 4, 64, 9
# What is measured -> model type and what its config has beside the sizes.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "interface": ("llama", {}),
    "boxes": ("stablelm", {}),
    "hybrid": (
        "qwen3_next",
        {"head_dim": 32, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
         "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
         "shared_expert_intermediate_size": 96, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
}  # fmt: skip


class _Count(TorchDispatchMode):
    """Counts the operators that compute, and the CPU seconds of those that no pack can save."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.floor = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.number += name not in _VIEWS
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if name in _FLOOR or "attention" in name:
            self.floor += time.thread_time() - began
        return result


def costs(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each kind of layers and each pack: CPU seconds of a step over those of plain transformers."""
    torch.set_num_threads(1)
    _hold_memory()
    rows = []
    for sequences, length, width in ((16, _SHORT, 192),) if quick else ((32, _SHORT, 192), (32, 256, 512)):
        for kind in _MODELS:
            row = _row(kind, sequences, length, width)
            rows.append(row)
            aim = aims.PACKS_OVER_PLAIN[kind] if length == _SHORT else aims.LONGER_PACKS_OVER_PLAIN
            if row["over plain"] > aim:
                missed.append(f"{kind}, {sequences} x {length}: {row['over plain']:.2f} of plain, not <= {aim}")
    return rows


def _hold_memory() -> None:
    """Let this process hold what it frees, in one place, as a GPU's allocator does: what glibc gives back and asks for
    again is touched for the first time again, up to 47,000 pages and 0.1 s of a pack's 0.35 s in the first turns."""
    libc = ctypes.CDLL(None)
    for option, value in _MALLOC.items():
        if libc.mallopt(option, value) != 1:
            raise OSError(f"glibc's allocator refuses {value} as option {option}")


def _row(kind: str, sequences: int, length: int, width: int) -> dict[str, Any]:
    model_type, own = _MODELS[kind]
    config = AutoConfig.for_model(
        model_type, vocab_size=96, hidden_size=width, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=6 if width % 6 == 0 else 8, num_key_value_heads=3 if width % 6 == 0 else 4,
        max_position_embeddings=4096, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    extra = {"experts_implementation": "eager"} if model_type == "qwen3_next" else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **extra).double()
    data = uneven_data(96, [(length,) * sequences])
    pairs, floor, operators = _pairs(CausalLM(model, by_one_rank=True), Plain(model), data)
    packs, alone = (min(column) for column in zip(*pairs, strict=True))
    each = operators / (sequences * _LAYERS)
    return {"layers": kind, "sequences": sequences, "tokens": length, "width": width, "packs, s": packs,
            "plain, s": alone, "products and attention over plain": floor / alone, "over plain": packs / alone,
            "operators a sequence and layer": each}  # fmt: skip


def _pairs(source: CausalLM, plain: Plain, data: Data) -> tuple[list[tuple[float, float]], float, int]:
    """CPU seconds of training steps as one stage and plainly, those of a stage's products and attention, operators.

    The two take turns, since what else the machine does moves either by a fifth from second to second. The ratio of the
    least of each varies less than the median of their ratios.
    """
    ranks = InProcessRanks(1)
    found: list[tuple[list[tuple[float, float]], float, int]] = []

    def body(rank: int) -> None:
        worker = RankOfPipeline(source, uneven_pipeline(BASE, source.plan.num_layers), rank, ranks)
        worker.install(_flat_values(source), {})
        order = range(len(data.sequences))
        turns = [(_seconds(lambda: worker.train(data)), _seconds(lambda: plain._train(data, order)))
                 for _ in range(1 + _TURNS)]  # fmt: skip
        with _Count() as count:
            worker.train(data)
        found.append((turns[1:], count.floor, count.number))  # the first is warm-up

    ranks.run(body)
    return found[0]


def _seconds(run: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    run()
    return time.thread_time() - began
