"""A rank that has no memory left says for which tokens, what was predicted, and which setting needs less."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.step.strategy_runtime import PeakMemory
from ds_hydra.step.update import Update
from ds_hydra.testing import run_ranks
from tests.support.small_job import LENGTHS, small_engine

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB"


def told(rank: int, where: tuple[type, str], peak: int) -> str:
    """What a rank says whose device is full when it comes to a method for the second time, in its second step."""
    engine, calls = small_engine(rank, tokens_per_step=130), 0
    engine.train_batch()
    method = getattr(*where)

    def full(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (2 if where[0] is StageRuntime else 1):
            raise torch.OutOfMemoryError(FULL)
        return method(*args, **options)

    allocated = mock.patch.object(PeakMemory, "read", return_value=peak)
    with mock.patch.object(*where, full), allocated, pytest.raises(torch.OutOfMemoryError) as found:
        engine.train_batch()
    return str(found.value)


@pytest.mark.parametrize(
    ("peak", "remedy"),
    [
        (1 << 20, "Others hold memory of this device, or it is in pieces"),
        (1 << 40, "The prediction is too low: measure this model with `ds-hydra profile`"),
    ],
)
def test_the_micro_batch_its_tokens_both_peaks_and_the_setting_are_named(peak: int, remedy: str) -> None:
    (text,) = run_ranks(told, 1, (StageRuntime, "_backward"), peak, timeout=120)
    # The second step has the sequences 3 to 6, of 33, 90, 64 and 9 tokens, in micro-batches as the table allows.
    found = text.partition("in the backward of micro-batch 1 (")[2]
    tokens, _, rest = found.partition(" tokens, sequences ")
    ids = [int(number) for number in rest.partition(")")[0].split(", ")]
    assert int(tokens) == sum(LENGTHS[number] for number in ids)
    assert "), in stage 0 of tp1 under tp1: " in text
    assert f"{'1.0 MiB' if peak == 1 << 20 else '1024.00 GiB'} were given out at the most" in text
    assert re.search(
        r"[\d.]+ MiB are predicted for its micro-batches of up to \d+ tokens, [\d.]+ MiB of them for", text
    )
    assert remedy in text
    assert "hydra.activation_checkpointing and a larger tp, sp or pp in hydra.strategies need less" in text
    assert text.endswith(FULL)


def test_what_does_not_depend_on_tokens_says_so() -> None:
    (text,) = run_ranks(told, 1, (Update, "apply"), 0, timeout=120)
    assert text.startswith("rank 0 has no memory left between the passes of a step")
    assert "Take the most demanding strategy out of hydra.strategies" in text
