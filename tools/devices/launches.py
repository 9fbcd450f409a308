"""Operators that a further layer of a Llama launches in a micro-batch's forward and backward, ours and plain.

Counted by torch's profiler on a CPU. An operator that computes or copies and calls no other one that does is a launch,
as it is one kernel on a GPU; so are the few that only a CPU takes apart, such as a mean. Views and allocations launch
nothing. Models of 2 and of 6 layers tell those of a layer from what stands beside the layers. Gradients add up, as from
the second micro-batch on.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_timer import StageTimer, hollow_source
from tools import aims
from tools.devices.table import Table

FEW, MORE = 2, 6  # layers
LENGTH = 48  # of the micro-batch's one sequence
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
_PLAIN, _OFF = "plain Hugging Face", 'ours, functions "off"'
# Operators that compute nothing by themselves; at times they call another one that does.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "expand_as",
        "as_strided", "slice", "narrow", "select", "split", "split_with_sizes", "chunk", "unbind", "squeeze",
        "unsqueeze", "detach", "detach_", "alias", "flatten", "unflatten", "movedim", "contiguous", "to", "lift_fresh",
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resolve_conj",
        "resolve_neg", "result_type", "promote_types", "is_nonzero", "item", "_local_scalar_dense",
        "set_", "view_as", "mT",
    )
)  # fmt: skip

_ONE = frozenset(
    {"aten::mean", "aten::rms_norm", "aten::_fused_rms_norm", "aten::scaled_dot_product_attention"}
    | {"aten::silu_backward", "aten::linalg_vector_norm", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"}
)


def launches(quick: bool) -> Table:
    """Launches a layer; quick: not of functions that compute again."""
    makers: dict[str, Callable[[int], Callable[[], object]]] = {
        _PLAIN: _plain,
        _OFF: lambda layers: _ours(layers, "off"),
        'ours, functions "auto"': lambda layers: _ours(layers, "auto"),
    }
    if not quick:
        makers['ours, functions "recompute"'] = lambda layers: _ours(layers, "recompute")
    found: dict[str, tuple[float, float]] = {}
    for name, make in makers.items():
        few, more = (_count(make(layers)) for layers in (FEW, MORE))
        per_layer = (more - few) / (MORE - FEW)
        found[name] = (per_layer, few - FEW * per_layer)
    rows: list[Sequence[object]] = []
    missed: list[str] = []
    for name, (per_layer, outside) in found.items():
        ratios = [per_layer / found[other][0] for other in (_PLAIN, _OFF)]
        rows.append([name, round(per_layer, 1), round(outside, 1), *(round(ratio, 2) for ratio in ratios)])
        if name.endswith('"auto"') and max(ratios) > aims.LAUNCHES:
            missed.append(
                f"{name}: {ratios[0]:.2f} of the plain model's launches, {ratios[1]:.2f} of ours (aim {aims.LAUNCHES})"
            )
    headers = ["who", "a layer", "beside layers", "of plain", "of ours without"]
    return Table("operators launched by a micro-batch, forward and backward, BF16", headers, rows, missed)


def _ours(layers: int, functions: str) -> Callable[[], object]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers, **SIZES}))
        source = hollow_source(path, StageOptions(functions=functions))
    timer = StageTimer(source, ParallelScheme(), 0, torch.device("cpu"), torch.bfloat16)
    batch = timer.batch((LENGTH,))
    return lambda: timer.run(batch)


def _plain(layers: int) -> Callable[[], object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {"num_hidden_layers": layers, "attn_implementation": "sdpa"}
    config = LlamaConfig(**SIZES, **settings)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (1, LENGTH))
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _count(run: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler would print that it starts
    for _ in range(2):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(_launches(event) for event in profiler.events() or () if event.cpu_parent is None)


def _launches(event: Any) -> int:
    """Of an operator with those it calls."""
    if event.name in _ONE:
        return 1
    called = sum(_launches(child) for child in event.cpu_children)
    return called or int(event.name.startswith("aten::") and event.name not in _FREE)
