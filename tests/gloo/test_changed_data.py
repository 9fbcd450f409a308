"""Data that a script changes between steps: read when a step begins, or refused where they were read ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import LENGTHS, same, sequences, small_engine, whole_state


class Staged:
    """Tokens that follow from a stage, which may be the script's or an attribute of the data."""

    def __init__(self, held: dict[str, int] | None) -> None:
        self.items, self.lengths, self.stage, self.noted, self._held = sequences(), LENGTHS, 0, 0, held

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        stage = self.stage if self._held is None else self._held["stage"]
        return torch.as_tensor(self.items[index]) // (1 + stage)


def trained(rank: int, ahead: int, outside: bool, stages: tuple[int, ...]) -> Any:
    held: dict[str, int] | None = {"stage": 0} if outside else None
    data = Staged(held)
    engine = small_engine(rank, data=data, planner={"ahead": ahead})
    for stage in stages:
        data.noted += 1  # which changes no sequence
        if held is None:
            data.stage = stage
        else:
            held["stage"] = stage
        if ahead and stage:
            with pytest.raises(ConfigError) as error:
                engine.train_batch()
            return str(error.value)
        engine.train_batch()
    return whole_state(engine)


@pytest.mark.parametrize("outside", [False, True])
def test_a_stage_that_comes_too_late_is_refused(outside: bool) -> None:
    (text,) = run_ranks(trained, 1, 1, outside, (0, 0, 1))
    assert "were changed before step 3, whose sequences are read while the step before it runs" in text
    assert '"planner": {"ahead": 0}' in text
    assert outside or "noted is 3 now" in text or "stage is 1 now" in text


@pytest.mark.drawn
def test_without_reading_ahead_a_stage_begins_with_its_step() -> None:
    one, other = (run_ranks(trained, 2, 0, outside, (0, 1, 2)) for outside in (False, True))
    still = run_ranks(trained, 2, 1, False, (0, 0, 0))
    assert all(map(same, one, other))
    assert not any(map(same, one, still))
