"""A recurrent layer whose heads ranks share, against one that each of them computes whole: CPU time, what is kept."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.pipe.models import find_boxes
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.stage_memory import kept_bytes
from ds_hydra.profiling.stage_timer import StageTimer
from tools import aims

_SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
# A layer that is recurrent, and one that is not and does not run.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta rule": (
        "qwen3_5_text",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Mamba-2": (
        "nemotron_h",
        {"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 4, "chunk_size": 64,
         "layers_block_type": ["mamba", "attention"]},
    ),
}  # fmt: skip
_SCHEMES = ((2, 1), (1, 2), (1, 4), (2, 2))  # tp, sp
_TURNS = 3


def heads(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each kind of layer and degrees: rank 0's forward and backward of one sequence in FP32 on one thread,
    messages left out, by heads over whole."""
    torch.set_num_threads(1)
    tokens, rows = 512 if quick else 1024, []
    for kind in list(_MODELS)[: 1 if quick else None]:
        by_heads = _source(kind)
        with mock.patch.object(find_boxes, "with_heads", lambda alone, boxes, calls: boxes):
            whole = _source(kind)
        for tp, sp in _SCHEMES[:2] if quick else _SCHEMES:
            row = _row(by_heads, whole, tp, sp, tokens)
            rows.append({"layer": kind, "scheme": f"tp{tp}sp{sp}", "tokens": tokens} | row)
            for what, aim in (("time", aims.HEADS_TIME[tp * sp]), ("kept", aims.HEADS_KEPT[tp * sp])):
                if row[f"{what} ratio"] > aim:
                    missed.append(f"{kind}, tp{tp}sp{sp}: {what} {row[f'{what} ratio']:.2f} of whole, not <= {aim}")
    return rows


def _source(kind: str) -> CausalLM:
    model_type, own = _MODELS[kind]
    torch.manual_seed(0)
    return CausalLM(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SIZES, **own)))


def _row(by_heads: CausalLM, whole: CausalLM, tp: int, sp: int, tokens: int) -> dict[str, Any]:
    scheme = ParallelScheme(tp, 2, sp)
    timers = [StageTimer(source, scheme, 0, torch.device("cpu"), torch.float32) for source in (by_heads, whole)]
    for timer in timers:
        assert timer.module.place.stage.num_layers == 1, "the recurrent layer"
    kept = [kept_bytes(timer, (tokens,)) for timer in timers]
    batches = [timer.batch((tokens,)) for timer in timers]
    turns = [[_seconds(partial(t.run, b)) for t, b in zip(timers, batches, strict=True)] for _ in range(_TURNS)]
    mine, all_of_it = (min(column) for column in zip(*turns, strict=True))
    return {"ms": 1e3 * mine, "whole, ms": 1e3 * all_of_it, "kept KiB a token": kept[0] / tokens / 1024,
            "whole, KiB": kept[1] / tokens / 1024, "time ratio": mine / all_of_it,
            "kept ratio": kept[0] / kept[1]}  # fmt: skip


def _seconds(run: Any) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    run()
    return time.thread_time() - began
