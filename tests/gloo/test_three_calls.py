"""DeepSpeed's own face: three calls, fewer or more batches than configured, getters, and models that it has cut."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

import ds_hydra
import ds_hydra.engine.engine
import ds_hydra.zero
from ds_hydra.host import user_model
from ds_hydra.host.settings import batch_sizes
from ds_hydra.host.user_model import make_whole
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.ranks.channel import first_channel
from ds_hydra.testing import Sample, rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model, reference_model, vocab_size
from tests.support.small_job import (
    QUIET,
    collated,
    lines_of,
    prompted,
    same,
    shared_source,
    small_config,
    small_engine,
    small_model,
    start_deepspeed,
    told,
)

# --- engine(batch), backward, step; what they train is compared in test_early_losses.py.
FAMILY, RANKS, ACCUMULATION = "llama", 2, 2
LENGTHS = (((9, 30), (12,)), ((5, 7, 3), (20, 4)))  # of each rank's batches in a step


def batch_of(step: int, rank: int, number: int) -> list[Sample]:
    return prompted(LENGTHS[rank][number], vocab_size(FAMILY), 100 * step + 10 * rank + number)


def engine_of(rank: int, **hydra: Any) -> Any:
    rank_environment(rank)
    config = small_config(RANKS, tokens_per_step=100, **hydra) | {"gradient_accumulation_steps": ACCUMULATION}
    return ds_hydra.initialize(model=build_model(FAMILY, torch.float64), config=config)[0]


# --- training_data in batches: the loader is DeepSpeed's.
SIZES = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
ITEMS = [dict(sample, number=torch.tensor(number)) for number, sample in enumerate(prompted([4] * 13, 90, 5))]


def of_items(items: Sequence[Any]) -> dict[str, Tensor]:
    return {**collated([{name: item[name] for name in ("input_ids", "labels")} for item in items]),
            "number": torch.stack([item["number"] for item in items])}  # fmt: skip


def loaded(rank: int) -> list[list[int]]:
    """Numbers of the items in each batch of two epochs."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # the loader has workers
    rank_environment(rank)
    hydra = {"context_length": 64, "strategies": ["2*tp1"], "self_check": "off", "steps_file": None}
    config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, **SIZES, "hydra": hydra}
    model = build_model(FAMILY, torch.float32)
    engine, _, loader, _ = ds_hydra.initialize(
        model=model, model_parameters=model.parameters(), training_data=ITEMS, collate_fn=of_items, config=config
    )
    found = []
    for _ in range(2):
        for batch in loader:
            found.append(batch.pop("number").tolist())
            engine.backward(engine(**batch).loss)
            engine.step()
    assert engine.global_steps == len(found)
    return found


@pytest.mark.drawn
def test_training_data_are_read_in_the_batches_that_deepspeed_makes() -> None:
    for rank, found in enumerate(run_ranks(loaded, RANKS)):
        own: list[int] = list(DistributedSampler(ITEMS, RANKS, rank))  # type: ignore[arg-type]  # a list is a dataset
        assert found == [own[:3], own[3:6], own[6:]] * 2


def evaluated(rank: int) -> list[Any]:
    engine = engine_of(rank, strategies=["tp2"])
    engine.eval()
    with torch.no_grad():
        own = engine(collated(batch_of(0, rank, 0))).loss
        mean = own.detach().clone().float()
        torch.distributed.all_reduce(mean)
        alone = engine(collated(batch_of(0, 0, 0)) if rank == 0 else [])
    engine.train()
    engine.tput_timer.update_epoch_count()  # as DeepSpeed-Chat's scripts do
    handed_out = []
    for number in range(ACCUMULATION):
        handed_out.append(engine(collated(batch_of(0, rank, number))).loss)
        engine.backward(handed_out[-1])
        engine.step()
    trained = sum(handed_out) / ACCUMULATION
    torch.distributed.all_reduce(trained)
    return [type(own), own.item(), (mean / RANKS).item(), alone.item(), trained.item() / RANKS]


def test_a_loss_is_a_tensor_of_its_own_batch_in_collectives_too() -> None:
    model: Any = reference_model(FAMILY, torch.float64)
    with torch.no_grad():
        losses = [
            [
                float(model(**collated(batch_of(0, rank, number)), use_cache=False).loss)
                for number in range(ACCUMULATION)
            ]
            for rank in range(RANKS)
        ]
    with shared_source(build_model(FAMILY, torch.float64)):
        results = run_ranks(evaluated, RANKS)
    for rank, (kind, own, mean, alone, trained) in enumerate(results):
        assert kind is Tensor
        assert own == pytest.approx(losses[rank][0], rel=1e-6)
        assert mean == pytest.approx((losses[0][0] + losses[1][0]) / 2, rel=1e-6)
        assert alone == (own if rank == 0 else pytest.approx(float("nan"), nan_ok=True))
        assert trained == pytest.approx(sum(map(sum, losses)) / RANKS / ACCUMULATION, rel=1e-6)


def misused(rank: int) -> list[str]:
    engine = engine_of(rank, strategies=["2*tp1"])
    batch = collated(batch_of(0, rank, 0))
    found = list[str]()

    def note(call: Any) -> None:
        found.append(told(call))

    note(lambda: engine(batch, batch))
    note(lambda: engine.backward(torch.tensor(1.0)))
    engine(batch)  # without backward: left out
    engine.step()
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    note(lambda: engine.backward(loss))
    loss = engine(batch)
    note(lambda: engine.backward(loss.detach()))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    note(lambda: engine.backward(2 * loss))
    engine.backward(engine(batch if rank == 0 else {"input_ids": [[1, 2, 99999]]}))
    engine.step()
    note(engine.step)
    engine.eval()
    note(lambda: engine.backward(engine(batch).loss))
    note(lambda: engine.backward(torch.tensor(1.0)))
    engine.train()
    note(lambda: engine(**batch, num_items_in_batch=7))
    for _ in range(ACCUMULATION):  # nothing of the bad step is left
        engine.backward(engine(batch))
        engine.step()
    return [*found, f"{engine.global_steps} {engine.last_step.num_sequences}"]


def test_misuse_is_refused_on_all_ranks() -> None:
    with shared_source(build_model(FAMILY, torch.float64)):
        first, second = run_ranks(misused, RANKS)
    assert first == second
    assert "give one batch" in first[0]
    assert "given a Tensor that is not a loss of engine(batch)" in first[1]
    assert "has run already" in first[2]
    assert "without a gradient: give it before detach()" in first[3]
    assert "for the second time: add the losses up" in first[4]
    assert all("call engine.train() before engine(batch)" in found for found in first[6:8])
    assert "failed on rank 1: item 3 of the data holds the token id 99999" in first[5]
    assert "num_items_in_batch=7) would have no effect" in first[8]
    assert first[9] == f"2 {ACCUMULATION * sum(len(LENGTHS[rank][0]) for rank in range(RANKS))}"


def without_targets(rank: int) -> list[str]:
    """Of a step with a batch of which no mean can be taken, of another one, and of one of fewer batches."""
    engine, lines = engine_of(rank, strategies=["2*tp1"], loss_norm="batch"), lines_of("ds_hydra.engine.steps")
    found = []
    for empty, batches in ((True, ACCUMULATION), (False, ACCUMULATION), (False, 1)):
        for number in range(batches):
            batch = collated(batch_of(0, rank, number))
            if empty and rank == 1 and number == 1:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            engine.backward(engine(batch))
            engine.set_gradient_accumulation_boundary(number == batches - 1)
            found.append(told(engine.step))
    return [*found, str(engine.global_steps), *lines]


def test_each_batch_counts_by_its_own_mean() -> None:
    with shared_source(build_model(FAMILY, torch.float64)):
        first, second = run_ranks(without_targets, RANKS)
    assert first[:6] == second == ["no error", first[1], *["no error"] * 3, "2"]
    assert "failed on rank 1: batch 1 has no target" in first[1]
    (line,) = first[6:]
    assert "an update of 2 batches, where gradient_accumulation_steps and ranks make 4" in line
    assert "0.5 of their mean" in line


def test_batches_means_need_batches() -> None:
    def job(rank: int) -> str:
        return told(lambda: small_engine(rank, loss_norm="batch"))

    assert "of the batches that a script hands in" in run_ranks(job, 1)[0]


# --- Every public attribute and call without arguments of a DeepSpeed engine, asked of a plain one and of ours.
DIFFERENT = {
    "buffered_allreduce_fallback": "refused: sums gradients of the model's parameters, which have none here",
    "checkpoint_engine": "DeepSpeed's writer of its own files; checkpoints have another form here",
    "clip_fp32_gradients": "refused: clips gradients of the model's parameters, which have none here",
    "collect_python_gc": "counts what the garbage collector found in this process",
    "config": "has the block hydra in it",
    "enable_backward_allreduce": "true: no collective runs in backward()",
    "flatten": "a helper of DeepSpeed's own gradient buckets",
    "get_global_grad_norm": "told under FP32 with ZeRO stage 0 too, where DeepSpeed has None",
    "module_forward_post_hook": "a hook of DeepSpeed's own forward, which is not run",
    "module_forward_pre_hook": "a hook of DeepSpeed's own forward, which is not run",
    "no_sync": "a context of another class",
    "optimizer": "torch's own over the masters, where DeepSpeed wraps it",
    "param_names": "the same names, of parameters of another class",
    "save_non_zero_checkpoint": "which rank writes DeepSpeed's files; every rank writes one here",
    "save_zero_checkpoint": "which rank writes DeepSpeed's files; every rank writes one here",
    "unflatten": "a helper of DeepSpeed's own gradient buckets",
}
"""What may be another, and why."""

WITH_EFFECTS = frozenset((
    "allreduce_gradients", "backward", "destroy", "empty_partition_cache", "offload_states", "reload_states", "step",
))  # fmt: skip
"""Calls without arguments that are no questions."""


def asked_engine(module: Any, config: dict[str, Any]) -> Any:
    model = small_model(tied=False)
    return module.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def config_of(hydra: bool, num_ranks: int, stage: int, bf16: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    if hydra:
        config["hydra"] = QUIET | {
            "tokens_per_step": 400,
            "strategies": [f"{num_ranks}*tp1"],
            "loss_norm": "batch",
        }
    return config


def described(value: Any) -> Any:
    """A value that can be compared and leaves its process: numbers, texts and their containers, else a class's name."""
    if isinstance(value, Tensor):
        return ("tensor", str(value.dtype), value.device.type, described(value.tolist()))
    if isinstance(value, dict):
        return {key if isinstance(key, str) else type(key).__name__: described(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [described(one) for one in value]
    if inspect.ismethod(value):
        return value.__name__
    return value if isinstance(value, int | float | str | None) else type(value).__qualname__


def answers(engine: Any, names: list[str]) -> dict[str, Any]:
    """What it answers to each name: a value, or the error that it raises."""
    found = {}
    for name in names:
        try:
            value = getattr(engine, name)
            if inspect.ismethod(value) and not isinstance(value, nn.Module | Optimizer):
                needed = [one for one in inspect.signature(value).parameters.values() if one.default is one.empty]
                if any(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed):
                    continue
                value = value()
        except Exception as error:
            value = f"{type(error).__name__} of {name}"
        found[name] = described(value)
    return found


def asked(rank: int, names: list[str], num_ranks: int, **precision: Any) -> list[dict[str, Any]]:
    """Answers before the first step, within accumulation, and after two updates: of a plain engine to all names that it
    has, of ours to those `names`."""
    hydra = bool(names)
    start_deepspeed(rank)
    engine = asked_engine(ds_hydra if hydra else deepspeed, config_of(hydra, num_ranks, **precision))
    has = {name for name in dir(engine) if not name.startswith("_") and not hasattr(nn.Module, name)}
    names = names or sorted(has - WITH_EFFECTS)
    engine.train()
    generator = torch.Generator().manual_seed(rank)
    found = [answers(engine, names)]
    for batches in (1, 7):
        for _ in range(batches):
            ids = torch.randint(3, 97, (engine.train_micro_batch_size_per_gpu(), 16), generator=generator)
            loss = engine(input_ids=ids, labels=ids)
            engine.backward(loss if hydra else loss.loss)
            engine.step()
        found.append(answers(engine, names))
    return found


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-3)
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        return all(map(alike, one, other))
    return bool(one == other) and type(one) is type(other)


@pytest.mark.parametrize(("num_ranks", "stage", "bf16"), [(1, 0, False), (2, 1, True)])
def test_all_that_an_engine_is_asked_is_answered_as_deepspeed_answers(num_ranks: int, stage: int, bf16: bool) -> None:
    ask = functools.partial(asked, num_ranks=num_ranks, stage=stage, bf16=bf16)
    theirs = run_ranks(functools.partial(ask, names=[]), num_ranks)[-1]
    ours = run_ranks(functools.partial(ask, names=list(theirs[0])), num_ranks)[-1]
    for when, plain, own in zip(("before", "within", "after"), theirs, ours, strict=True):
        assert len(plain) > 170
        differing = {name: (value, own.get(name)) for name, value in plain.items() if not alike(value, own.get(name))}
        assert differing.keys() <= DIFFERENT.keys(), (when, differing)
    assert ours[2]["train_batch_size"] == 8 * num_ranks
    assert (ours[1]["micro_steps"], ours[2]["micro_steps"], ours[2]["global_steps"]) == (1, 8, 2)


@pytest.mark.parametrize(
    "sizes", [(8, 2, 4), (8, 2, None), (8, None, 4), (None, 2, 4), (8, None, None), (None, 2, None)]
)
def test_batch_sizes_follow_from_each_other_as_in_deepspeed(sizes: tuple[int | None, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    theirs = DeepSpeedConfig(dict(config))
    assert batch_sizes(config, 1) == tuple(getattr(theirs, name) for name in names)


def test_batch_sizes_are_set_where_batches_are_handed_in() -> None:
    def run(rank: int) -> list[Any]:
        rank_environment(rank)
        engine = asked_engine(ds_hydra, config_of(True, 2, 1, False))
        engine.set_train_batch_size(8)
        found: list[Any] = [[size() for size in engine.get_batch_info()]]
        ids = torch.arange(3, 19).view(1, 16)
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids))
            engine.step()
        found.append(engine.global_steps)
        with pytest.raises(ConfigError, match=r"a multiple of train_micro_batch_size_per_gpu 2 times 2 ranks"):
            engine.set_train_batch_size(6)
        engine.set_train_micro_batch_size(3)
        return [*found, [size() for size in engine.get_batch_info()]]

    assert run_ranks(run, 2) == [[[8, 2, 2], 1, [12, 3, 2]]] * 2


# --- Models that deepspeed.zero.Init has cut, and the contexts of deepspeed.zero, before and after
# ds_hydra.initialize.
ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


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
    start_deepspeed(rank)
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


def cut_and_trained(rank: int, folder: Path | None) -> dict[str, Tensor]:
    start_deepspeed(rank)
    engine = small_engine(rank, from_pretrained(folder) if folder else small_model())
    for _ in range(2):
        engine.train_batch()
    return engine.fp32_state_dict()


def test_a_cut_model_trains_as_a_whole_one(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    runs = [run_ranks(functools.partial(cut_and_trained, folder=folder), 2)[0] for folder in (tmp_path, None)]
    assert same(*runs)


def refused(rank: int) -> list[str]:
    start_deepspeed(rank)
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
    start_deepspeed(rank)
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
        start_deepspeed(rank)
        with ds_hydra.zero.Init(config_dict_or_path=ZERO_3):
            layer = nn.Linear(4, 4)
        with ds_hydra.zero.GatheredParameters(layer.weight, modifier_rank=0):
            if rank == 0:
                layer.weight.data.fill_(3.0)
        with ds_hydra.zero.GatheredParameters(layer.weight):
            return hasattr(layer.weight, "ds_id") and bool((layer.weight == 3.0).all())

    assert run_ranks(cuts, 2) == [True, True]
