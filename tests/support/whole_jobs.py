"""Jobs by optimizers of whole parameters that skip a step, or save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ds_hydra.zero_hetero.errors import CheckpointError
from tests.support.small_job import same, small_engine, whole_state


def trained(rank: int, folder: Path, optimizer: Any, steps: int, load: str = "") -> tuple[dict[str, Tensor], str]:
    """The state after so many steps, which is saved, and what a refused checkpoint says."""
    engine, said = small_engine(rank, optimizer=optimizer), ""
    if load:
        try:
            engine.load_checkpoint(str(folder), load)
        except CheckpointError as error:
            said = str(error)
    for _ in range(steps):
        engine.train_batch()
    if steps:
        engine.save_checkpoint(str(folder), f"of{engine.global_steps}")
        engine.wait_for_checkpoint()
    state = whole_state(engine)
    engine.destroy()
    return state, said


class Skipped(NamedTuple):
    """A rank whose second of three steps had a gradient that was not finite."""

    was_skipped: bool
    unchanged: bool  # by it
    moved: bool  # by the third
    before: dict[str, Tensor]  # the state after the first


def skipping(rank: int, exchange: type, **given: Any) -> Skipped:
    """Three steps, in the second of which this kind of exchange must not run."""
    engine = small_engine(rank, **given)
    engine.train_batch()
    before = whole_state(engine)
    with mock.patch.object(exchange, "run", side_effect=AssertionError("nothing is exchanged")):
        infinite = torch.tensor(float("inf"), dtype=torch.float64)
        with mock.patch("ds_hydra.step.update.norm_of", return_value=infinite):
            engine.train_batch()
    was, unchanged = engine.last_step.skipped, same(before, whole_state(engine))
    engine.train_batch()
    moved = not same(before, whole_state(engine))
    engine.destroy()
    return Skipped(was, unchanged, moved, before)
