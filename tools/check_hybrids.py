"""Models whose tokens meet otherwise than by the attention interface: what trains as one process does, and its cost.

  python -m tools.check_hybrids [--quick] [--json FILE] [--only PART ...]

ways     how tokens meet in each layer of some models, found by trying: by the interface, or in which boxes
classes  hybrids and models with attention of their own under TP 3, PP 3, SP 3 and a mix, against the plain model
slices   what recurrent layers carry from slice to slice of a sequence, and how near the whole that comes, in FP64
costs    CPU time of a training step on packs over that of plain transformers, one sequence at a time, in FP64; the
         share of it that products and attention alone take, below which no pack comes; operators a sequence and layer
experts  Qwen3-30B-A3B on eight ranks, experts cut by width and spread as whole ones: what a rank holds of a layer,
         intervals of its pull, bytes of its collectives, what it keeps, CPU time of a layer; counted and run, FP32
heads    a recurrent layer whose heads ranks share over one that each computes whole: CPU time, what is kept; FP32
sinks    attention with sinks by the log-sum-exp of a kernel over probabilities in memory: CPU time, what is kept; FP32
sizes    Qwen3-Next and Qwen3.5 in their real sizes on 64 GPUs, estimated and simulated: the longest sequence and a
         step's time in slices and without, beside the same with attention in every layer, and dense decoders

`--quick` takes fewer classes, models and turns, and the small packs. What stages with boxes must not do is a mutant in
`tests/test_states.py` and `tests/test_states.py`, each refused before step 0. Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from ds_hydra.commands.figures import guarded, run_parts
from tests.support.tiny_families import EQUAL, SHAPES, entry, judge
from tools.hybrids.costs import costs
from tools.hybrids.experts import experts
from tools.hybrids.heads import heads
from tools.hybrids.sinks import sinks
from tools.hybrids.sizes import sizes
from tools.hybrids.slices import slices
from tools.hybrids.ways import ways

# Delta rules, recurrences of Mamba-2's kind, short convolutions, lightning attention; and attention of their own.
QUICK = ("Lfm2ForCausalLM", "NemotronHForCausalLM", "BloomForCausalLM")
CLASSES = (*QUICK,
           "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM",
           "BambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM",
           "Zamba2ForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM", "Mamba2ForCausalLM",
           "RwkvForCausalLM", "RecurrentGemmaForCausalLM", "GPTJForCausalLM", "FalconForCausalLM",
           "DeepseekV32ForCausalLM")  # fmt: skip


def classes(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A verdict by class and shape."""
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=4) as pool:
        found = dict(pool.imap(judge, QUICK if quick else CLASSES))
    missed += [f"{name}: {entry(verdicts)}" for name, verdicts in found.items() if entry(verdicts) != EQUAL]
    return [{"class": name} | {shape: verdicts[shape][:40] for shape in SHAPES} for name, verdicts in found.items()]


PARTS: dict[str, Callable[[bool, list[str]], list[dict[str, Any]]]] = {
    "ways": ways,
    "classes": classes,
    "slices": slices,
    "costs": costs,
    "experts": experts,
    "heads": heads,
    "sinks": sinks,
    "sizes": sizes,
}


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    return run_parts("check_hybrids", __doc__, PARTS)


if __name__ == "__main__":
    sys.exit(guarded("check_hybrids", main))
