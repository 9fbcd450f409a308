"""The scripts of examples/swap in; their losses after the swap on 2 ranks, and those of one process, out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.support.ranks import run_ranks
from tests.support.small_job import rank_environment

SWAP = Path(__file__).resolve().parents[2] / "examples" / "swap"


def script(name: str, *, swapped: bool = True) -> ModuleType:
    """A script of examples/swap, after its diff or before it."""
    if str(SWAP) not in sys.path:
        sys.path.insert(0, str(SWAP))  # they import their task from there
    text = (SWAP / f"{name}.py").read_text()
    lines = (SWAP / f"{name}.diff").read_text().splitlines() if swapped else []
    for before, after in pairwise(lines):
        if before.startswith("-") and after.startswith("+") and not before.startswith("---"):
            assert text.count(before[1:]) == 1, f"the diff of {name}.py does not apply: {before}"
            text = text.replace(before[1:], after[1:])
    module = ModuleType(name)
    exec(compile(text, str(SWAP / f"{name}.py"), "exec"), module.__dict__)
    return module


def one_process(updates: Iterable[Sequence[Any]]) -> list[float]:
    """The losses of DeepSpeed's own loop in one process: the mean of the means of an update's batches."""
    task = script("three_calls", swapped=False)
    model = task.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    losses = []
    for batches in updates:
        optimizer.zero_grad()
        found = [model(**batch).loss / len(batches) for batch in batches]
        torch.autograd.backward(found)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in found))
    return losses


def three_calls(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the swapped script on 2 ranks, and of one process."""
    swapped = script("three_calls")

    def job(rank: int) -> list[float]:
        rank_environment(rank)
        arguments = ["--steps", str(steps), "--deepspeed_config", str(SWAP / "ds_three_calls.json")]
        return swapped.main(arguments)  # type: ignore[no-any-return]

    loaders = [iter(swapped.make_loader(rank, 2)) for rank in range(2)]
    updates = [[next(loader) for _ in range(2) for loader in loaders] for _ in range(steps)]
    return run_ranks(job, 2, timeout=300)[0], one_process(updates)
