"""Many updates of recorded rollouts by verl's worker: on this engine they come to what they come to on verl's FSDP2.

Runs where verl is installed: `make check-verl` makes such an environment.
"""

# ruff: noqa: E402  verl is told of its platform before its workers are imported
from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hydra.testing import rank_environment, run_ranks

pytest.importorskip("verl", reason="verl is not installed: make check-verl")
from tests.support.verl_on_cpu import on_cpu

on_cpu()
import numpy as np
from safetensors.torch import load_file
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from ds_hydra.hosts.verl import HydraEngineConfig
from tests.support.verl_batches import answers, policy_batch, save_model, tokens

UPDATES, PROMPTS, GROUP, MINI_BATCH = 30, 4, 4, 8  # rollouts: 4 of each prompt, two mini-batches an update
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
NAMES = ("hydra", "fsdp2")
ROUNDING = 2e-4  # FP32: of how far a weight has moved; 5e-5 is seen, most of it where Adam divides by little
STRATEGIES = ["tp2", "2*tp1", "pp2", "sp2"]


def rollouts(update: int, which: list[int], **more: Any) -> TensorDict:
    """These rollouts of an update: one in four is long. Rewards are drawn, as all that they decide are advantages."""
    draw = np.random.default_rng(update)
    asked = np.repeat(draw.integers(2, 8, PROMPTS), GROUP)
    responses = np.where(draw.random(PROMPTS * GROUP) < 0.25, draw.integers(25, 50, PROMPTS * GROUP),
                         draw.integers(2, 9, PROMPTS * GROUP))  # fmt: skip
    rows = tokens(update, (asked + responses).tolist())
    mask = answers([torch.ones(len(row)) for row in rows], responses.tolist())
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = torch.from_numpy(draw.random(len(rows)))
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.repeat(np.arange(PROMPTS), GROUP))
    reference = answers([torch.full((len(row),), -4.6) for row in rows], responses.tolist())
    mine = torch.tensor(which)
    return policy_batch(
        [rows[at] for at in which], [int(responses[at]) for at in which],
        {name: value[mine, : int(responses[which].max())]
         for name, value in (("advantages", advantages), ("ref_log_prob", reference))},
        global_batch_size=MINI_BATCH, mini_batch_size=MINI_BATCH, **more,
    )  # fmt: skip


def worker_of(folder: Path, name: str) -> Any:
    if name == "hydra":
        block = {"strategies": STRATEGIES, "choose": "cycle", "context_length": 64, "steps_file": None}
        engine: Any = HydraEngineConfig(dtype="float32", deepspeed_config={"hydra": block})
    else:
        types = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        engine = FSDPEngineConfig(
            strategy=name, use_torch_compile=False, mixed_precision=types, use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1, infer_micro_batch_size_per_gpu=1,
        )  # fmt: skip
    worker = TrainingWorker(TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(folder), override_config={"attn_implementation": "sdpa"}),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(**ADAMW, clip_grad=1.0, total_training_steps=UPDATES),
        checkpoint_config=CheckpointConfig(),
    ))  # fmt: skip
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, ActorConfig(
        strategy=name, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.05, rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False,
    )))  # fmt: skip
    return worker


def updated(rank: int, folder: Path, name: str) -> dict[str, Tensor]:
    """The weights after all updates."""
    rank_environment(rank)
    torch.manual_seed(0)
    worker = worker_of(folder, name)
    parts, part = (1, 0) if name == "hydra" else (2, rank)  # of a mini-batch among verl's data parallel ranks
    own = MINI_BATCH // parts
    which = [first + part * own + at for first in range(0, PROMPTS * GROUP, MINI_BATCH) for at in range(own)]
    for update in range(UPDATES):
        data = rollouts(update, which)
        found = worker.infer_batch(rollouts(update, which, compute_loss=False))
        # Ranks without outputs hand nothing in that the engine reads.
        data["old_log_probs"] = (
            torch.zeros_like(data["advantages"]) if found is None else no_padding_2_padding(found["log_probs"], data)
        )
        worker.train_mini_batch(data)
    return {key: value.detach().clone() for key, value in worker.engine.get_per_tensor_param()[0]}


def test_thirty_updates_end_in_the_weights_of_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    # verl's FSDP engine is registered for devices that it does not run on here, and asks TRL for a class of the past.
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    gone = SimpleNamespace(AutoModelForCausalLMWithValueHead=type("Gone", (), {"forward": None}))
    monkeypatch.setitem(sys.modules, "trl.experimental.ppo", gone)
    found = {name: run_ranks(updated, 2, tmp_path, name, timeout=300)[0] for name in NAMES}
    first = load_file(tmp_path / "model.safetensors")
    for name, weight in found["hydra"].items():
        other = found["fsdp2"][name]
        moved = (other - first[name].float()).abs().max()
        assert moved > 1e-2
        assert (weight - other).abs().max() <= ROUNDING * moved, name
