"""Experts of Qwen3-30B-A3B on eight ranks, cut by width or spread as whole ones: what one rank holds and sends."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ds_hydra.pipe.model_plan import end_of_slots
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_memory import kept_bytes
from ds_hydra.profiling.stage_timer import StageTimer, hollow_source
from ds_hydra.zero_hetero.clock import HostClock

# The sizes of its published config, in three layers: one is measured, between a first stage and a last one.
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "vocab_size": 151936, "num_hidden_layers": 3, "tie_word_embeddings": False,
}  # fmt: skip
BY_WIDTH, WHOLE = ("tp8", "tp2sp4", "sp8"), ("tp8ep8", "tp2sp4ep8", "sp8ep8")
TOKENS, QUICK_TOKENS = 256, 64
"""Of a micro-batch."""


def experts(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each scheme."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(CONFIG | {"architectures": ["Qwen3MoeForCausalLM"]}))
        for texts in (BY_WIDTH, WHOLE):
            shapes = [StrategyShape.parse(text) for text in (texts[:1] if quick else texts)]
            source = hollow_source(path, StageOptions(token_sharding=True), shapes)
            rows += [_row(source, shape, QUICK_TOKENS if quick else TOKENS) for shape in shapes]
    by_scheme = {row["scheme"]: row for row in rows}
    for row in rows:
        if row["scheme"] in WHOLE and (row["experts"], row["width"]) != (16, 768):
            missed.append(f"{row['scheme']} leaves {row['experts']} experts of width {row['width']}")
    if by_scheme["tp8"]["layer MiB"] != by_scheme["tp8ep8"]["layer MiB"]:
        missed.append("whole experts take another room than as many slivers")
    return rows


def _row(source: CausalLM, shape: StrategyShape, tokens: int) -> dict[str, Any]:
    (pipeline,) = shape.pipelines
    assert pipeline.scheme is not None, "it is uniform"
    tp, sp, ep = pipeline.scheme.tp, pipeline.scheme.sp, pipeline.scheme.ep
    plan, strategy = source.plan, place_strategy(shape, 8, source.plan.num_layers)
    bucket = next(bucket for bucket in plan.buckets if bucket.name == "layers.1")
    slots = plan.slots(bucket, strategy.stage_of(0), 0)
    held = next(slot for slot in slots if slot.param.name.endswith("experts.down_proj")).shape
    timer = StageTimer(
        source, ParallelScheme(tp, 3, sp, ep), 1, torch.device("cpu"), torch.float32, clock=HostClock(time.process_time)
    )
    timings = [timer.time((tokens,)) for _ in range(2)]
    moved = sum(counted.call.num_bytes for counted in timings[0].calls)
    return {
        "scheme": str(PipelineShape.of(pipeline.scheme)),
        "experts": held[0],
        "width": held[2],
        "layer MiB": round(2 * end_of_slots(slots) / 2**20),  # of 16 bit parameters
        "intervals": len(plan.pull_layout(bucket, strategy).pieces[0]),
        "tokens": tokens,
        "collectives MiB": round(moved / 2**20, 1),
        "kept KiB a token": round(kept_bytes(timer, (tokens,)) / tokens / 2**10),
        "CPU ms": round(min(timing.ms for timing in timings)),
    }
