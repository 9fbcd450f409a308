"""The record of a step tells how uneven the routing to spread experts was, as one process counts it."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe import expert_parallel
from ds_hydra.pipe.expert_parallel import RowsComputed, _own_experts
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.families import build_model
from tests.support.small_job import small_config, small_engine

EXPERTS = 4
TOKENS = torch.randint(3, 90, (24,), generator=torch.Generator().manual_seed(2))


def trained(rank: int, folder: Path, strategies: list[str], one_gets_all: bool) -> None:
    def to_first(
        forward: Any, first: int, count: int, hidden: Tensor, chosen: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        return _own_experts(forward, first, count, hidden, torch.zeros_like(chosen), *rest, **more)

    rank_environment(rank)
    with mock.patch.object(expert_parallel, "_own_experts", to_first if one_gets_all else _own_experts):
        steps_file = str(folder / "steps.jsonl")
        config = small_config(dist.get_world_size(), strategies=strategies, tokens_per_step=96, steps_file=steps_file)
        config["scheduler"]["params"]["warmup_max_lr"] = 0.0  # so that all steps route alike
        engine = small_engine(rank, build_model("qwen3_moe", torch.float32), config, data=[TOKENS] * 32)
        for _ in strategies:
            engine.train_batch()


def records(folder: Path, strategies: list[str], *, ranks: int, one_gets_all: bool = False) -> list[dict[str, Any]]:
    run_ranks(partial(trained, folder=folder, strategies=strategies, one_gets_all=one_gets_all), ranks)
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def plain_shares(groups: int) -> list[float]:
    """For each layer of the plain model, the routes to the largest of so many equal groups of experts over the mean."""
    model = build_model("qwen3_moe", torch.float32)
    counts: dict[int, Tensor] = defaultdict(lambda: torch.zeros(EXPERTS))

    def note(layer: int, module: Any, given: tuple[Tensor, ...]) -> None:
        counts[layer] += torch.bincount(given[1].flatten(), minlength=EXPERTS)

    for layer, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(partial(note, layer))
    model(TOKENS[None])
    found = [each.view(groups, -1).sum(1) for _, each in sorted(counts.items())]
    return [float(each.max() / each.mean()) for each in found]


@pytest.mark.drawn
def test_a_record_has_the_largest_ranks_share_of_each_layer(tmp_path: Path) -> None:
    """By stages of two and of four ranks; a step whose experts nobody shares has none."""
    strategies = ["tp4ep4", "2*tp2ep2", "tp2sp2ep4", "tp2ep2pp2", "4*tp1"]
    *spread, alone = records(tmp_path, strategies, ranks=4)
    for record, groups in zip(spread, (4, 2, 4, 2), strict=True):
        right = plain_shares(groups)
        assert record["expert_imbalance"] == pytest.approx(sum(right) / len(right), abs=1e-6)
        assert record["worst_expert_imbalance"] == pytest.approx(max(right), abs=1e-6)
        assert record["worst_expert_imbalance"] > record["expert_imbalance"] > 1.0
    assert alone["expert_imbalance"] == alone["worst_expert_imbalance"] == 0.0


def test_all_tokens_to_one_expert(tmp_path: Path) -> None:
    (record, other) = records(tmp_path, ["tp2ep2", "sp2ep2"], ranks=2, one_gets_all=True)
    assert record["expert_imbalance"] == record["worst_expert_imbalance"] == 2.0
    assert other["expert_imbalance"] == 2.0


def test_rows_are_counted_since_they_were_taken() -> None:
    routed = RowsComputed(4)
    assert routed.take() == 0.0
    routed.add(30, 80)
    assert routed.take() == 1.5
    routed.add(0, 80)
    routed.add(20, 80)
    assert (routed.take(), routed.take()) == (0.5, 0.0)
