"""The scripts of examples/swap with the lines of their diffs changed: losses of their updates, evaluations among them,
beside one process; of the loop of GRPO losses and norms, beside plain DeepSpeed on 2 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest

from tests.support.swapped import accelerated, grpo, lora, sft, three_calls, trainer
from tools import aims


@pytest.mark.parametrize(
    ("script", "steps"),
    [pytest.param(script, 4, marks=pytest.mark.drawn) for script in (three_calls, trainer, grpo)]
    + [pytest.param(one, 10, marks=pytest.mark.long) for one in (three_calls, lora, trainer, sft, accelerated, grpo)],
)
def test_losses_after_the_swap_are_those_before(script: Callable[[int], Any], steps: int) -> None:
    found, expected, *saved = script(steps)
    assert found == pytest.approx(expected, rel=aims.SWAP_LOSS)
    assert all(apart <= aims.SWAP_WEIGHTS for apart in saved), "of the file that it saves"
