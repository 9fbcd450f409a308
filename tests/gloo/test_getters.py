"""Every public attribute and call without arguments of a DeepSpeed engine, asked of a plain one and of ours."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn
from torch.optim import Optimizer

import ds_hydra
from ds_hydra.host.settings import batch_sizes
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import small_model

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


def engine_of(module: Any, config: dict[str, Any]) -> Any:
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
        config["hydra"] = {
            "tokens_per_step": 400, "strategies": [f"{num_ranks}*tp1"], "loss_norm": "batch", "self_check": "off",
            "steps_file": None, "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0},
        }  # fmt: skip
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
    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    engine = engine_of(ds_hydra if hydra else deepspeed, config_of(hydra, num_ranks, **precision))
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
    "sizes",
    [(8, 2, 4), (8, 2, None), (8, None, 4), (None, 2, 4), (8, None, None), (None, 2, None)],
)
def test_batch_sizes_follow_from_each_other_as_in_deepspeed(sizes: tuple[int | None, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    theirs = DeepSpeedConfig(dict(config))
    assert batch_sizes(config, 1) == tuple(getattr(theirs, name) for name in names)


def test_batch_sizes_are_set_where_batches_are_handed_in() -> None:
    def run(rank: int) -> list[Any]:
        rank_environment(rank)
        engine = engine_of(ds_hydra, config_of(True, 2, 1, False))
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
