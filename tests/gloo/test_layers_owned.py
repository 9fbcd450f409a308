"""Masters owned by the stages that compute them, in whole jobs: chosen for slow links, saved, and loaded by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.engine import prepare
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.links import LinkFigure, Links
from ds_hydra.testing import run_ranks
from tests.support.small_job import same, small_engine, whole_state

PIPELINE, REPLICAS = "pp4", "4*tp1"


def table(path: Path, bytes_per_s: float) -> str:
    """Costs, and links of this speed between nodes."""
    shape = ModelShape(32, 4, 8, 4, 48, 97, 50_000)
    costs = analytic_cost_table(shape, [ParallelScheme(), ParallelScheme(pp=4)], 512, device_flops=1e9)
    figures = [LinkFigure("p2p", 2, 1.0, speed, across) for across, speed in ((False, 1e10), (True, bytes_per_s))]
    TableFile(costs, links=Links(tuple(figures)).to_record()).save(path)
    return str(path)


def engine_of(rank: int, costs: str) -> Any:
    """With a rank on each node."""
    return small_engine(rank, strategies=[PIPELINE, REPLICAS], cost_table=costs, node_size=1)


def owners(engine: Any) -> list[tuple[int, ...]]:
    return [bucket.owners for bucket in engine.crew.masters.buckets]


def trained(rank: int, slow: str, folder: Path) -> tuple[list[tuple[int, ...]], dict[str, Tensor], dict[str, Tensor]]:
    """Owners, and what four steps have made, in one job and in a job that goes on after two."""
    engine = engine_of(rank, slow)
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder)
    for _ in range(2):
        engine.train_batch()
    whole = whole_state(engine)
    again = engine_of(rank, slow)
    again.load_checkpoint(folder)
    for _ in range(2):
        again.train_batch()
    return owners(engine), whole, whole_state(again)


def loaded(rank: int, slow: str, fast: str, folder: Path) -> list[bool]:
    """Whether each kind of job has the same to the bit that the other one has saved."""
    found = []
    for number, (first, second) in enumerate(((slow, fast), (fast, slow))):
        one = engine_of(rank, first)
        one.train_batch()
        one.save_checkpoint(folder / str(number))
        other = engine_of(rank, second)
        other.load_checkpoint(folder / str(number))
        found += [any(owners(one)) != any(owners(other)), same(whole_state(one), whole_state(other))]
    return found


@pytest.mark.drawn
def test_a_job_with_slow_links_owns_layers_by_stages_and_trains_the_same(tmp_path: Path) -> None:
    slow = table(tmp_path / "slow.json", 1e6)
    own, whole, again = run_ranks(trained, 4, slow, tmp_path / "own", timeout=200)[0]
    layers = [one for one in own if one]
    assert sorted(layers) == [(0,), (1,), (2,), (3,)]
    assert same(whole, again)
    with mock.patch.object(prepare, "_owners_by", return_value=None):
        even, other, _ = run_ranks(trained, 4, slow, tmp_path / "even", timeout=200)[0]
    assert not any(even)
    for name, value in whole.items():  # the norm of gradients adds up in another order
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)


@pytest.mark.drawn
def test_checkpoints_of_either_load_in_the_other(tmp_path: Path) -> None:
    slow, fast = table(tmp_path / "slow.json", 1e6), table(tmp_path / "fast.json", 1e12)
    assert run_ranks(loaded, 4, slow, fast, tmp_path, timeout=200) == [[True] * 4] * 4
