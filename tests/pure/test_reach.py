"""What stays of keys and values of a sequence in slices, where a token sees some of those before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from torch import Tensor

from ds_hydra.pipe.contexts import Context, computed_again
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.reach import Reach
from ds_hydra.profiling.stage_memory import measure_activations
from tests.support.families import build_model

FLOAT64 = torch.float64


def kept_bytes(total: int, size: int, window: int | None, again: Callable[[int], bool], *, train: bool = True) -> int:
    """Bytes of distinct storages that stay of keys and values of a sequence in slices, when all have run forward: what
    autograd keeps of slices that are not computed again, and what their context holds."""
    context, seen = Context(total), dict[int, int]()

    def note(x: Tensor) -> None:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

    alive = []
    for start in range(0, total, size):
        k, v = (torch.randn(size, 2, 4, dtype=FLOAT64, requires_grad=train) for _ in range(2))
        with torch.set_grad_enabled(train), computed_again() if again(start // size) else nullcontext():
            joined = context.join(k, v, start, Reach(window))
        if train and not again(start // size):
            alive.append(joined)
            for x in joined:
                note(x)
    held = vars(context)
    for x in (*held["_rows"], *chain.from_iterable(held["_before"].values())):
        note(x)
    return sum(seen.values())


ROW = 2 * 2 * 4 * 8  # bytes of keys and values of a token


@pytest.mark.parametrize(
    ("size", "window", "again", "most"),
    [
        (256, 17, "all", 15 * 16),  # 16 rows of each of 15 slices that others follow, in place of 4,096
        (256, 17, "others", 8 * 272 + 8 * 16),  # every other slice stays, with the rows in its reach
        (256, 17, "none", 16 * 272),
        (16, 257, "none", 4096 * 9 // 8),  # of slices shorter than the window an eighth is there twice
        (16, 257, "all", 4096 * 9 // 8),
        (256, None, "all", 4096),  # no window: later slices attend to all
        (256, None, "none", 4096),
    ],
)
def test_of_a_window_only_rows_in_reach_of_others_stay(size: int, window: int | None, again: str, most: int) -> None:
    rule = {"all": lambda i: True, "others": lambda i: i % 2 == 1, "none": lambda i: False}[again]
    assert kept_bytes(4096, size, window, rule) <= most * ROW


def test_an_evaluation_keeps_a_window() -> None:
    assert kept_bytes(4096, 256, 17, lambda i: False, train=False) == 0, "after the last slice"
    assert kept_bytes(4096, 16, 257, lambda i: False, train=False) <= 8 * 256 * ROW


def test_the_memory_model_knows_what_does_not_grow_with_a_slice() -> None:
    """Five rows before a slice, in a layer that is computed again; and what random numbers follow from on a CPU."""
    source = CausalLM(build_model("mistral", torch.float32))
    found = measure_activations(source, 1, 1, torch.device("cpu"), torch.float32, 512)
    rows, of_draws = 5 * 2 * 4 * 8 * 4, 2 * torch.get_rng_state().nbytes
    assert rows + of_draws <= found.state <= 4 * rows + of_draws
    inputs = 512 / found.layer  # what enters a layer and, of the stage's last, what leaves it
    assert found.recomputed == pytest.approx(inputs, rel=0.25)
