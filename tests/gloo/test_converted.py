"""Checkpoints of DeepSpeed and folders of Hugging Face, into ours and out of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from ds_hydra.checkpoint.universal import from_universal, to_universal
from ds_hydra.commands import convert
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError
from tests.support.small_job import same, sequences, small_engine, small_model

TOKENS = sequences()[2]


def test_hugging_face_folders_go_out_and_in(tmp_path: Path) -> None:
    """Export in shards, load by from_pretrained; load into an engine on other ranks: the same parameters."""
    from transformers import AutoModelForCausalLM

    def export(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.train_batch()
        engine.save_16bit_model(tmp_path / "hf", max_shard_size="20KB")
        return engine.fp32_state_dict()

    trained = run_ranks(export, 2)[0]
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items() if name in trained)
    assert model.config.tie_word_embeddings

    def back(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.load_16bit_model(tmp_path / "hf")
        with pytest.raises(CheckpointError, match="safetensors"):
            engine.load_16bit_model(tmp_path)
        return engine.fp32_state_dict()

    assert same(run_ranks(back, 4)[0], trained)


def deepspeed_engine(rank: int, universal: bool = False, stage: int = 1, bf16: bool = False) -> Any:
    """Plain DeepSpeed with ZeRO on the same model."""
    import deepspeed

    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = small_model(tied=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 1.0,
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def deepspeed_step(engine: Any, tokens: Tensor) -> float:
    logits = engine(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
    engine.backward(loss)
    engine.step()
    return loss.item()


def our_config(**hydra: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "hydra": {"tokens_per_step": 100, "strategies": ["pp2"], "steps_file": None, "planner": {"ahead": 0},
                  "self_check": "off", "faults": {"frozen_seconds": 0}, **hydra},
    }  # fmt: skip


def our_engine(rank: int, tokens: Tensor, **hydra: Any) -> Any:
    import ds_hydra

    rank_environment(rank)
    return ds_hydra.initialize(model=small_model(tied=False), training_data=[tokens], config=our_config(**hydra))[0]


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [(1, False), pytest.param(2, True, marks=pytest.mark.drawn), pytest.param(3, False, marks=pytest.mark.drawn)],
)
def test_from_deepspeed_and_on(tmp_path: Path, stage: int, bf16: bool) -> None:
    """DeepSpeed trains, and we go on as the errors say: FP32 weights are equal to the bit, the next losses equal."""

    def theirs(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = deepspeed_engine(rank, stage=stage, bf16=bf16)
        for _ in range(2):
            deepspeed_step(engine, TOKENS)
        engine.save_checkpoint(str(tmp_path / "ds"), tag="t", client_state={"best": 1.5})
        weights = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
        return [deepspeed_step(engine, TOKENS) for _ in range(2)], weights

    losses, weights = run_ranks(theirs, 2)[0]

    def refused(rank: int) -> list[Any]:
        engine = our_engine(rank, TOKENS)
        found: list[Any] = []
        with pytest.raises(CheckpointError) as told:
            engine.load_checkpoint(tmp_path / "ds")
        found.append(str(told.value))
        if stage < 3:
            found.append(engine.load_checkpoint(tmp_path / "ds", load_module_only=True))
            found.append((engine.fp32_state_dict(), engine.global_steps))
        with pytest.raises(CheckpointError, match=f"names as its latest, is a checkpoint of .*{stage}"):
            our_engine(rank, TOKENS, checkpoint={"dir": str(tmp_path / "ds")})
        return found

    told, *loaded = run_ranks(refused, 2)[0]
    if loaded:
        right = {name: value.bfloat16().float() if bf16 else value for name, value in weights.items()}
        assert loaded[0] == (str(tmp_path / "ds/t"), {"best": 1.5})
        assert same(loaded[1][0], right)
        assert loaded[1][1] == 0
    (command,) = re.findall("`ds-hydra convert ([^`]+)`", told)
    assert convert.main(command.split()) == 0

    def ours(rank: int) -> tuple[dict[str, Tensor], list[float], int]:
        engine = our_engine(rank, TOKENS)
        engine.load_checkpoint(tmp_path / "ds")
        return engine.fp32_state_dict(), [float(engine.train_batch()) for _ in range(2)], engine.global_steps

    state, mine, step = run_ranks(ours, 2)[0]
    assert same(state, weights)
    assert step == 4
    assert mine == pytest.approx(losses, rel=2e-2 if bf16 else 1e-5)


@pytest.mark.drawn
def test_to_deepspeed_and_on(tmp_path: Path) -> None:
    """We train, DeepSpeed goes on."""

    def ours(rank: int) -> tuple[dict[str, Tensor], list[float]]:
        engine = our_engine(rank, TOKENS)
        for _ in range(2):
            engine.train_batch()
        engine.save_checkpoint(tmp_path / "ours")
        return engine.fp32_state_dict(), [float(engine.train_batch()) for _ in range(2)]

    weights, losses = run_ranks(ours, 2)[0]
    to_universal(tmp_path / "ours", None, tmp_path / "ds", "t_universal")

    def theirs(rank: int) -> tuple[dict[str, Tensor], list[float], int]:
        engine = deepspeed_engine(rank, universal=True)
        path, _ = engine.load_checkpoint(str(tmp_path / "ds"))
        assert path is not None
        loaded = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        return loaded, [deepspeed_step(engine, TOKENS) for _ in range(2)], engine.global_steps

    loaded, mine, step = run_ranks(theirs, 2)[0]
    assert same(loaded, weights)
    assert step == 4
    assert mine == pytest.approx(losses, rel=1e-5)


def test_a_pickle_with_a_payload_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    place = tmp_path / "uni" / "zero" / "w"
    place.mkdir(parents=True)
    torch.save({"param": Payload()}, place / "fp32.pt")
    torch.save({"global_steps": 1}, tmp_path / "uni" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"fp32\.pt"):
        from_universal(tmp_path / "uni", tmp_path / "out", "a")
    assert not (tmp_path / "executed").exists()
