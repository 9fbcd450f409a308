"""A small training job for tests of checkpoints and faults: model, sequences, config, engine."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_hydra
from ds_hydra.engine.costs import describe_job
from ds_hydra.engine.job import model_source
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.planner.selection import warm_up
from ds_hydra.self_check.cache import fingerprint
from ds_hydra.testing import rank_environment
from tests.support.sources import USUAL, in_place_of_looking

STRATEGIES = {
    1: ["tp1"],
    2: ["tp2", "pp2", "2*tp1"],
    3: ["3*tp1", "tp2 + tp1"],
    4: ["tp2 + 2*tp1", "2*sp2", "pp2 + sp2", "4*tp1"],
    6: ["tp2 + pp2 + 2*tp1", "6*tp1"],
    8: ["tp2pp2 + 2*sp2", "8*tp1", "tp2 + pp2 + sp2 + 2*tp1"],
}
"""Heterogeneous ones by number of ranks; with choose "cycle" the strategy changes in every step."""

_IMPORTED_LATE = (
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_config", "deepspeed.moe.ep_experts",
    "ds_hydra.engine.engine", "ds_hydra.entry",
)  # fmt: skip
LENGTHS = (3, 5, 120, 33, 90, 64, 9, 77, 31, 60, 50, 8, 90, 12, 45, 45) * 2


def small_model(tied: bool = True, hidden: int = 32) -> Any:
    """A Llama of four layers with fixed random weights in FP32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=97,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@functools.cache
def small_source() -> ModelSource:
    """Where the stages of the usual `small_model` come from; called before ranks are forked, it is found once."""
    return model_source(small_model(), USUAL)


@functools.cache
def find_before_forks() -> None:
    """What each rank of each job would load or find again, and shares if it is there before they are forked: modules,
    the planner's kernels, the source of the stages, versions of packages, and what our own sources hold."""
    for module in _IMPORTED_LATE:
        with contextlib.suppress(ModuleNotFoundError):  # of DeepSpeed, older releases have not all
            importlib.import_module(module)
    warm_up()
    describe_job(small_source(), torch.device("cpu"), torch.float32, 1)
    fingerprint(small_model())


def sequences() -> list[Tensor]:
    """The training data."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (n,), generator=generator) for n in LENGTHS]


def small_config(num_ranks: int, **hydra: Any) -> dict[str, Any]:
    """A config that cycles through STRATEGIES; `hydra` adds to its block."""
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
        "hydra": {
            "tokens_per_step": 250,
            "strategies": hydra.get("strategies") or STRATEGIES[num_ranks],
            "choose": "best" if hydra.get("replay") else "cycle",
            "self_check": "off",  # has tests of its own
            "steps_file": None,
            "planner": {"ahead": 0},
            "faults": {"frozen_seconds": 0},
            **hydra,
        },
    }


def small_engine(
    rank: int,
    model: Any = None,
    config: dict[str, Any] | None = None,
    *,
    data: Any = ...,
    pre_step_callback: Any = None,
    **hydra: Any,
) -> Any:
    """An engine on this rank, with `sequences()` or other training data."""
    rank_environment(rank)
    config = config or small_config(dist.get_world_size(), **hydra)
    shared: Any = contextlib.nullcontext()
    if model is None:
        model = small_model()
        shared = in_place_of_looking(small_source())
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n]},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    data = sequences() if data is ... else data
    with shared:
        return ds_hydra.initialize(
            model=model, training_data=data, config=config, model_parameters=groups, pre_step_callback=pre_step_callback
        )[0]


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Masters and moments in full, by name; every rank must call it."""
    masters, links = engine.crew.masters.trained, engine.crew.world.links
    found = {f"{name}/master": value for name, value in masters.gather_full(links).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        source = masters.optimizer_state(engine.optimizer, key)
        found |= {f"{name}/{key}": value for name, value in masters.gather_full(links, source=source).items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
