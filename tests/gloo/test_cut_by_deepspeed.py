"""Models that deepspeed.zero.Init has cut, and the contexts of deepspeed.zero, before and after ds_hydra.initialize."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hydra.zero
from ds_hydra.host import user_model
from ds_hydra.host.user_model import make_whole
from ds_hydra.ranks.together import first_channel
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import same, small_config, small_engine, small_model

ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def start(rank: int) -> None:
    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


def from_pretrained(folder: Path) -> Any:
    """As scripts load under a ZeRO-3 config: transformers cuts it."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    kept = HfDeepSpeedConfig(ZERO_3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    del kept
    return model


def from_config() -> Any:
    with deepspeed.zero.Init(config_dict_or_path=ZERO_3):
        return small_model()


def whole_again(rank: int, folder: Path, ways: list[str]) -> list[str]:
    """What is left of the cuts, or differs from a model that was never cut."""
    start(rank)
    wrong = []
    for way in ways:
        model = from_config() if way == "Init" else from_pretrained(folder)
        kept = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(kept.values()):  # Init draws other random numbers
            drawn = {name: one.detach().clone() for name, one in kept.items()}
        right = drawn if way == "Init" else dict(small_model().named_parameters())
        cut = sum(hasattr(one, "ds_id") for one in kept.values())
        with first_channel() as channel:
            make_whole(model, channel)
        for name, one in model.named_parameters():
            if one is not kept[name] or type(one) is not nn.Parameter or not torch.equal(one, right[name]):
                wrong.append(f"{way}: {name} is another")
            if left := {key for key in vars(one) if not key.startswith("_")}:
                wrong.append(f"{way}: {name} has {left}")
        if cut != len(right) or model.lm_head.weight is not model.model.embed_tokens.weight:
            wrong.append(f"{way}: {cut} of {len(right)} were cut, or weights are not tied")
        if "zero3" in torch.nn.functional.linear.__name__:
            wrong.append(f"{way}: linear is DeepSpeed's")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_was_cut_is_whole_again(num_ranks: int, tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    run = functools.partial(whole_again, folder=tmp_path, ways=["Init", "from_pretrained"])
    assert run_ranks(run, num_ranks) == [[]] * num_ranks


def trained(rank: int, folder: Path | None) -> dict[str, Tensor]:
    start(rank)
    engine = small_engine(rank, from_pretrained(folder) if folder else small_model())
    for _ in range(2):
        engine.train_batch()
    return engine.fp32_state_dict()


def test_a_cut_model_trains_as_a_whole_one(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    runs = [run_ranks(functools.partial(trained, folder=folder), 2)[0] for folder in (tmp_path, None)]
    assert same(*runs)


def refused(rank: int) -> list[str]:
    start(rank)
    found = []
    user_model.available_bytes = lambda: 100_000 if rank == 1 else 2**40
    with pytest.raises(ConfigError) as told:
        small_engine(rank, from_config())
    found.append(str(told.value))
    model = small_model()
    deepspeed.initialize(model=model, config={**ZERO_3, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}})
    with pytest.raises(ConfigError) as told:
        small_engine(rank, model)
    return [*found, str(told.value)]


def test_what_no_memory_holds_is_refused_with_the_line_to_remove() -> None:
    for large, trains in run_ranks(refused, 2):
        assert "takes 0.0 GiB whole: for 2 ranks" in large
        assert "take out `with deepspeed.zero.Init()`" in large
        assert "an engine of ZeRO stage 3" in trains


def gathered(rank: int) -> dict[str, Any]:
    """Reading and writing within `GatheredParameters`, by one rank and by all."""
    start(rank)
    with ds_hydra.zero.Init(config_dict_or_path=small_config(2)):
        model = small_model()
    with ds_hydra.zero.GatheredParameters(model.lm_head.weight, modifier_rank=1):
        if rank == 1:
            nn.init.constant_(model.lm_head.weight, 0.25)
    former = list(model.parameters())
    engine = small_engine(rank, model)
    weight = engine.module.model.norm.weight
    found: dict[str, Any] = {}
    found["cut"] = any(hasattr(one, "ds_id") for one in former)
    with ds_hydra.zero.GatheredParameters(list(engine.module.parameters())):
        if rank == 1:  # alone
            found["read"] = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with ds_hydra.zero.GatheredParameters(former):
        found["former"] = None if rank else former[0].sum().item()
    with pytest.raises(ConfigError) as told, ds_hydra.zero.GatheredParameters(weight, modifier_rank=0):
        nn.init.zeros_(weight)
    found["written"] = str(told.value)
    found["right"] = engine.fp32_state_dict()
    dist.barrier()
    return found


def test_gathered_parameters_are_read_by_any_rank_and_written_before_initialize() -> None:
    zero, one = run_ranks(gathered, 2)
    assert same(one["read"], one["right"])
    assert not one["cut"]
    assert (one["right"]["lm_head.weight"] == 0.25).all()
    assert zero["former"] == pytest.approx(0.25 * one["right"]["lm_head.weight"].numel())
    assert "engine.load_16bit_model(folder)" in one["written"]


def test_without_the_block_cutting_is_deepspeeds() -> None:
    def cuts(rank: int) -> bool:
        start(rank)
        with ds_hydra.zero.Init(config_dict_or_path=ZERO_3):
            layer = nn.Linear(4, 4)
        with ds_hydra.zero.GatheredParameters(layer.weight, modifier_rank=0):
            if rank == 0:
                layer.weight.data.fill_(3.0)
        with ds_hydra.zero.GatheredParameters(layer.weight):
            return hasattr(layer.weight, "ds_id") and bool((layer.weight == 3.0).all())

    assert run_ranks(cuts, 2) == [True, True]
