"""Part one: a step of a large model on measured costs, as a fixed layout takes it and as ds-hydra does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds_hydra.commands.preview import comparison, print_bars
from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.table_file import read_table_file
from ds_hydra.data.length_sources import read_lengths
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import PlannerOptions
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.llama import shipped_cluster
from ds_hydra.simulate.preview import preview_steps

GPUS, TOKENS, CONTEXT, STEPS = 64, 200_000, 32768, 12
# Of those that `ds-hydra preview` proposes for these lengths, whole sequences under 1F1B.
STRATEGIES = ("tp8 + 14*tp4", "2*tp8 + 12*tp4", "3*tp8 + 10*tp4", "tp16 + tp8 + 10*tp4", "tp16 + 12*tp4", "4*tp16")


def preview() -> dict[str, Any]:
    """Print the comparison; returns mean ms of a step by what runs it."""
    print(f"\n1. LLaMA 32B on {GPUS} A800 GPUs: measured costs, simulated steps of {TOKENS:,} tokens, web-like lengths")
    name = "a800-32b"
    found = read_table_file(shipped(name))
    cluster = shipped_cluster(name, found, LinkModel(8), GPUS)
    sample = read_lengths("lognormal:6.22,1.233", CONTEXT)
    short = float(np.mean(sample.lengths <= 4096))
    print(f"   {short:.0%} of the sequences have at most 4,096 tokens, but one of {CONTEXT:,} must fit. Compared is")
    print("   the fastest layout of TP and PP that holds it; 25 GB/s for each GPU between nodes.\n")
    strategies = [StrategyShape.parse(text) for text in STRATEGIES]
    options = PlannerOptions(kernels="compiled", layers=60)
    steps = preview_steps(
        found.table, strategies, sample.lengths.tolist(), TOKENS, CONTEXT, STEPS, options, cluster=cluster
    )
    rows = comparison(steps)
    print_bars(rows)
    return dict(rows)
