"""MaxLen of a 32B model on 64 GPUs by the job's own memory model, with shared tokens and without, beside the published.

The published figures are Hydraulis's (arXiv 2412.07894) for ranks of 80 GB; they are of 16 bit gradients. A model of 52
heads cannot be cut by 8 or 16, so these degrees are counted for one of 64 heads and the same widths.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ds_hydra.costs.memory import JobMemory
from ds_hydra.engine.costs import job_memory
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_timer import hollow_source
from tools.devices.table import Table

NUM_RANKS, NODE_SIZE = 64, 8
GIB = 2**30
DEVICE_BYTES = 79.25 * GIB  # what a GPU of 80 GB has for tensors
SIZES = {"hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60, "vocab_size": 32000}
# Heads, scheme, published MaxLen.
ROWS = (
    (52, "tp4", 7872),
    (52, "tp4pp2", 12447),
    (52, "tp4pp4", 14707),
    (64, "tp8", 21930),
    (64, "tp16", 43614),
    (64, "tp8pp2", 25961),
)
_QUICK = 1


class Way(NamedTuple):
    """How layers are computed, and what part of the published MaxLen is aimed at with 16 bit gradients."""

    token_sharding: bool
    functions: str
    aim: float | None


# Functions' norms keep less for the backward than the model's own.
WAYS = (Way(False, "off", None), Way(True, "off", 0.9), Way(True, "auto", 1.1))


def longest_sequences(quick: bool) -> Table:
    """Tokens that each scheme holds; quick: the first scheme, with shared tokens and functions only."""
    rows: list[Sequence[object]] = []
    missed: list[str] = []
    for heads, text, published in ROWS[: _QUICK if quick else None]:
        for name, grad_dtype in (("16 bit", torch.bfloat16), ("FP32", torch.float32)):
            scheme = ParallelScheme.parse(text)
            made = {
                way: _memory(heads, text, grad_dtype, token_sharding=way.token_sharding, functions=way.functions)
                for way in WAYS
                if not quick or way == WAYS[-1]
            }
            states = max(needs.states for needs in made[WAYS[-1]].stages(scheme)) / GIB
            lengths = {way: memory.max_length(scheme) for way, memory in made.items()}
            row = [heads, text, name, round(states, 1), published, *(lengths.get(way, "-") for way in WAYS)]
            for way in WAYS[1:]:
                ratio = lengths[way] / published if way in lengths else None
                aim = way.aim if name == "16 bit" and ratio is not None else None
                row += ["-" if ratio is None else round(ratio, 2), aim or "-"]
                if aim is not None and ratio is not None and ratio < aim:
                    missed.append(
                        f"{text}: {lengths[way]} tokens are {ratio:.2f} of the published {published} (aim {aim})"
                    )
            rows.append(row)
    headers = ["heads", "scheme", "gradients", "states GiB", "published", "all tokens", "shared", "with functions",
               "of published", "aim", "functions' of published", "aim of these"]  # fmt: skip
    return Table(f"MaxLen of a 32B Llama on {NUM_RANKS} GPUs of 80 GB, by the memory model", headers, rows, missed)


def _memory(heads: int, text: str, grad_dtype: torch.dtype, *, token_sharding: bool, functions: str) -> JobMemory:
    """The memory model of a job that has one strategy, of this scheme alone."""
    source, scheme = _source(heads, token_sharding, functions), ParallelScheme.parse(text)
    assert source.plan.token_sharding is token_sharding, source.plan.no_token_sharding
    memory = job_memory(
        source, [scheme], NUM_RANKS, DEVICE_BYTES, torch.bfloat16,
        grad_dtype=grad_dtype, node_size=NODE_SIZE,
    )  # fmt: skip
    alone = StrategyShape.of([scheme] * (NUM_RANKS // scheme.num_ranks))
    placed = place_strategy(alone, NUM_RANKS, source.plan.num_layers)
    return memory.together({alone: placed})


@cache
def _source(heads: int, token_sharding: bool, functions: str) -> CausalLM:
    config = {"model_type": "llama", "tie_word_embeddings": False, "num_attention_heads": heads,
              "num_key_value_heads": heads, **SIZES}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return hollow_source(path, StageOptions(token_sharding=token_sharding, functions=functions))
