"""verl's own worker, unpatched, trains by the engine on two ranks: it comes to what a plain loop in one process does.

Runs where verl is installed: `make check-verl` makes such an environment.
"""

# ruff: noqa: E402  verl is told of its platform before its workers are imported
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from ds_hydra.testing import float64_throughout, rank_environment, run_ranks
from tests.support.image_models import IMAGE, columns_of, image_model, sample
from tests.support.pages import blocks
from tests.support.small_job import small_model

pytest.importorskip("verl", reason="verl is not installed: make check-verl")
from tests.support.verl_on_cpu import on_cpu

on_cpu()
import numpy as np
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, CriticConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import no_padding_2_padding

from ds_hydra.hosts import verl as hosted
from ds_hydra.hosts.verl import HydraEngineConfig
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.verl_batches import answers, jagged, policy_batch, save_model, tokens

ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
LENGTHS = (9, 31, 4, 17)
RESPONSES = (4, 20, 2, 9)  # of the tokens, the last ones
CLIP = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return place


def batch(step: int, **more: Any) -> TensorDict:
    """Of supervised training: the responses are learnt."""
    rows = tokens(step, LENGTHS)
    learnt = [torch.arange(len(row)) >= len(row) - count for row, count in zip(rows, RESPONSES, strict=True)]
    tensors = {
        "input_ids": jagged(rows),
        "position_ids": jagged([torch.arange(len(row)) for row in rows]),
        "loss_mask": jagged([mask.long() for mask in learnt]),
    }
    return tu.get_tensordict(tensors, {
        "temperature": 1.0, "global_batch_size": len(rows), "global_token_num": list(LENGTHS), **more,
    })  # fmt: skip


def policy(step: int, **more: Any) -> TensorDict:
    """Of reinforcement: with advantages and what the old policy gave, at a temperature."""
    rows = tokens(step, LENGTHS)
    generator = torch.Generator().manual_seed(100 + step)
    old = answers([-torch.rand(len(row), generator=generator) - 3.5 for row in rows], RESPONSES)
    advantages = answers([torch.randn(len(row), generator=generator) for row in rows], RESPONSES)
    return policy_batch(rows, RESPONSES, {"old_log_probs": old, "advantages": advantages}, **more)


def actor() -> ActorConfig:
    return ActorConfig(
        strategy="hydra", entropy_coeff=0.01, rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False
    )


def worker_of(
    folder: Path, strategies: list[str], kind: str = "language_model", *, images: bool = False, **engine: Any
) -> Any:
    block = {"strategies": strategies, "choose": "cycle", "context_length": 64, "steps_file": None, "images": images,
             "planner": {"ahead": 0}}  # fmt: skip
    engine = {"dtype": "float32", "deepspeed_config": {"hydra": block}, **engine}
    worker = TrainingWorker(TrainingWorkerConfig(
        model_type=kind,
        model_config=HFModelConfig(path=str(folder), override_config={"attn_implementation": "sdpa"}),
        engine_config=HydraEngineConfig(use_dynamic_bsz=False, micro_batch_size_per_gpu=1, **engine),
        optimizer_config=FSDPOptimizerConfig(**ADAMW, clip_grad=CLIP, total_training_steps=4, lr_warmup_steps=2),
        checkpoint_config=CheckpointConfig(),
    ))  # fmt: skip
    worker.reset()
    return worker


def hosted_run(rank: int, folder: Path) -> dict[str, Any]:
    rank_environment(rank)
    worker = worker_of(folder, ["tp2", "2*tp1", "pp2"])
    worker.set_loss_fn(partial(sft_loss, None))
    first = worker.train_batch(batch(0, update_lr_scheduler=True))
    inferred = worker.infer_batch(policy(1, compute_loss=False))
    worker.set_loss_fn(partial(ppo_loss, actor()))
    second = worker.train_mini_batch(policy(1, mini_batch_size=len(LENGTHS), update_lr_scheduler=True))
    worker.engine.to("cpu")
    found: dict[str, Any] = {"weights": dict(worker.engine.get_per_tensor_param()[0])}
    worker.engine.save_checkpoint(str(folder / "saved"), global_step=2)
    worker.engine.load_checkpoint(str(folder / "saved"))
    again = dict(worker.engine.get_per_tensor_param()[0])
    found["reloaded"] = all(torch.equal(value, again[name]) for name, value in found["weights"].items())
    if rank == 0:
        found["log_probs"], found["entropy"] = (inferred[key].values() for key in ("log_probs", "entropy"))
        found["metrics"] = [tu.get(out, "metrics") for out in (first, second)]
    return found


def printed_run(rank: int, folder: Path, engine: dict[str, Any]) -> float:
    rank_environment(rank)
    worker = worker_of(folder, [], **engine)
    worker.set_loss_fn(partial(sft_loss, None))
    out = worker.train_batch(batch(0, update_lr_scheduler=True))
    return 0.0 if rank else float(tu.get(out, "metrics")["loss"])


def test_the_printed_config_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = (
        block.text for block in blocks() if (block.page, block.language) == ("docs/reinforcement-learning.md", "yaml")
    )
    engine = yaml.safe_load(text)["actor_rollout_ref"]["actor"]["engine"]
    assert engine.pop("_target_") == f"{HydraEngineConfig.__module__}.{HydraEngineConfig.__name__}"
    save_model(tmp_path, max_position_embeddings=engine["deepspeed_config"]["hydra"]["context_length"])
    monkeypatch.chdir(tmp_path)
    assert run_ranks(printed_run, 2, tmp_path, engine, timeout=300)[0] > 0


def shown(step: int, **more: Any) -> TensorDict:
    """Of supervised training on sequences with one, no and several images."""
    samples = [sample("qwen2_vl", widths, 6, 10 * step + i) for i, widths in enumerate(((0,), (), (1, 0), (2,)))]
    columns = [{**columns_of("qwen2_vl", [one]), "images_seqlens": torch.ones(len(one.pictures))} if one.pictures
               else None for one in samples]  # fmt: skip
    tensors = {
        "input_ids": jagged([one.input_ids for one in samples]),
        "position_ids": jagged([torch.arange(len(one.input_ids)) for one in samples]),
        "loss_mask": jagged([(one.labels != -100).long() for one in samples]),
        "multi_modal_inputs": columns,
    }
    lengths = [len(one.input_ids) for one in samples]
    return tu.get_tensordict(tensors, {"temperature": 1.0, "global_batch_size": 4, "global_token_num": lengths, **more})


def images_run(rank: int, folder: Path) -> dict[str, Any]:
    rank_environment(rank)
    worker = worker_of(folder, ["tp2", "pp2", "sp2"], images=True)
    worker.set_loss_fn(partial(sft_loss, None))
    inferred = worker.infer_batch(shown(3, compute_loss=False, calculate_entropy=True))
    told = [worker.train_batch(shown(step, update_lr_scheduler=True)) for step in range(3)]
    found: dict[str, Any] = {"weights": dict(worker.engine.get_per_tensor_param()[0])}
    if rank == 0:
        found |= {"log_probs": inferred["log_probs"].values(), "metrics": [tu.get(out, "metrics") for out in told]}
    return found


def unfit_run(rank: int, folder: Path) -> list[str]:
    """What is told of images where they are not trained, and of a critic's."""
    rank_environment(rank)
    told = []
    for kind, images in (("language_model", False), ("value_model", True)):
        with pytest.raises(ConfigError) as raised:
            worker_of(folder, ["tp1"], kind, images=images).infer_batch(shown(0, compute_loss=False))
        told.append(str(raised.value))
    return told


def returned(step: int, **more: Any) -> TensorDict:
    """Of a critic: with returns and what the old one gave."""
    rows = tokens(step, LENGTHS)
    generator = torch.Generator().manual_seed(100 + step)
    old = answers([torch.randn(len(row), generator=generator) for row in rows], RESPONSES)
    returns = answers([torch.randn(len(row), generator=generator) for row in rows], RESPONSES)
    return policy_batch(rows, RESPONSES, {"values": old, "returns": returns}, calculate_entropy=False, **more)


def critic() -> CriticConfig:
    return CriticConfig(strategy="hydra", ppo_micro_batch_size_per_gpu=1, cliprange_value=0.2)


def critic_run(rank: int, folder: Path) -> dict[str, Any]:
    rank_environment(rank)
    torch.manual_seed(rank)
    worker = worker_of(folder, ["tp2", "2*tp1", "pp2"], "value_model")
    worker.set_loss_fn(partial(value_loss, critic()))
    found: dict[str, Any] = {"first": dict(worker.engine.get_per_tensor_param()[0])}
    inferred = worker.infer_batch(returned(0, compute_loss=False))
    if rank == 0:
        found["values"] = inferred["values"]
    mini = {"mini_batch_size": len(LENGTHS), "update_lr_scheduler": True}
    told = [worker.train_mini_batch(returned(step, **mini)) for step in range(3)]
    found["metrics"] = [] if rank else [tu.get(out, "metrics") for out in told]
    return found | {"weights": dict(worker.engine.get_per_tensor_param()[0])}


class Plain:
    """The same in one process, by verl's own losses of a plain model's log-probabilities, or of a critic's values."""

    def __init__(self, folder: Path, kind: Any = AutoModelForCausalLM, **settings: Any) -> None:
        self.model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa", **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def output(self, data: TensorDict) -> dict[str, Tensor]:
        ids, temperature = data["input_ids"], tu.get(data, "temperature")
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        seen = tu.get(data, "multi_modal_inputs") or [None] * len(ids)
        for row, columns in zip(ids.unbind(), seen, strict=True):
            own = {name: column for name, column in (columns or {}).items() if name != "images_seqlens"}
            if own:
                own["mm_token_type_ids"] = (row == IMAGE).long()[None]
            log_p = (self.model(input_ids=row[None], **own).logits[0] / temperature).log_softmax(-1)
            own = log_p[:-1].gather(-1, row[1:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
            for kept, values in zip(found, (own, entropy), strict=True):
                kept.append(torch.cat((values, values.new_zeros(1))))
        return {key: jagged(values) for key, values in zip(("log_probs", "entropy"), found, strict=True)}

    def values(self, data: TensorDict) -> dict[str, Tensor]:
        return {
            "values": jagged([self.model(input_ids=row[None]).logits[0, :, 0] for row in data["input_ids"].unbind()])
        }

    def step(self, data: TensorDict, loss_of: Any, rate: float) -> tuple[float, float]:
        tu.assign_non_tensor(data, batch_num_tokens=data["loss_mask"].sum().item(), dp_size=1)
        output = self.values(data) if "values" in data else self.output(data)
        loss, _ = loss_of(model_output=output, data=data, dp_group=None)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(loss.detach()), float(norm)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded in FP64."""
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification):
        double = partial(kind.from_pretrained)
        monkeypatch.setattr(
            kind,
            "from_pretrained",
            lambda *args, double=double, **named: double(*args, **named | {"dtype": torch.float64}),
        )


@pytest.mark.usefixtures("doubled")
def test_verls_worker_trains_a_critic_as_one_process(folder: Path) -> None:
    """From a language model's folder, which has no head of values: the ranks, whose seeds differ, draw the same."""
    with float64_throughout(small_model().double()):
        ranks = run_ranks(critic_run, 2, folder, timeout=300)
        plain = Plain(folder, AutoModelForTokenClassification, num_labels=1)
        for name, weight in plain.model.named_parameters():
            weight.data.copy_(ranks[1]["first"][name])
        with torch.no_grad():
            values = no_padding_2_padding(plain.values(returned(0))["values"], returned(0))
        found = no_padding_2_padding(ranks[0]["values"], returned(0))
        told = [
            plain.step(returned(step), partial(value_loss, critic()), rate)
            for step, rate in enumerate((0.0, ADAMW["lr"] / 2, ADAMW["lr"]))
        ]
    torch.testing.assert_close(found, values, rtol=1e-9, atol=1e-9)
    for (loss, norm), metrics in zip(told, ranks[0]["metrics"], strict=True):
        assert np.ravel(metrics["loss"]) == pytest.approx([loss], rel=1e-6)
        assert np.ravel(metrics["grad_norm"]) == pytest.approx([norm], rel=1e-6)
    for of in ranks:
        assert of["weights"].keys() == dict(plain.model.named_parameters()).keys()
        for name, weight in plain.model.named_parameters():
            assert not torch.equal(of["weights"][name], of["first"][name]), "it has learnt"
            torch.testing.assert_close(of["weights"][name], weight.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("doubled")
def test_verls_worker_trains_as_one_process(folder: Path) -> None:
    with float64_throughout(small_model().double()):
        ranks = run_ranks(hosted_run, 2, folder, timeout=300)
        plain = Plain(folder)
        first = plain.step(batch(0), partial(sft_loss, None), 0.0)
        with torch.no_grad():
            scores = plain.output(policy(1))
        second = plain.step(policy(1), partial(ppo_loss, actor()), ADAMW["lr"] / 2)
    torch.testing.assert_close(ranks[0]["log_probs"], scores["log_probs"].values(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ranks[0]["entropy"], scores["entropy"].values(), rtol=1e-9, atol=1e-9)
    for (loss, norm), metrics in zip((first, second), ranks[0]["metrics"], strict=True):
        assert np.ravel(metrics["loss"]) == pytest.approx([loss], rel=1e-6)  # verl makes them of 32 bit
        assert np.ravel(metrics["grad_norm"]) == pytest.approx([norm], rel=1e-6)
    expected = dict(plain.model.named_parameters())
    for found in ranks:
        assert found["reloaded"]
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("doubled")
def test_verls_worker_trains_on_images_as_one_process(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path, image_model("qwen2_vl"))
    with float64_throughout(image_model("qwen2_vl")):
        ranks = run_ranks(images_run, 2, tmp_path, timeout=300)
        plain = Plain(tmp_path, AutoModelForImageTextToText)
        with torch.no_grad():
            scores = plain.output(shown(3))
        rates = (0.0, ADAMW["lr"] / 2, ADAMW["lr"])
        told = [plain.step(shown(step), partial(sft_loss, None), rate) for step, rate in enumerate(rates)]
    torch.testing.assert_close(ranks[0]["log_probs"], scores["log_probs"].values(), rtol=1e-9, atol=1e-9)
    for (loss, norm), metrics in zip(told, ranks[0]["metrics"], strict=True):
        assert np.ravel(metrics["loss"]) == pytest.approx([loss], rel=1e-6)
        assert np.ravel(metrics["grad_norm"]) == pytest.approx([norm], rel=1e-6)
    plain.model.save_pretrained(tmp_path)  # whose names an inference engine asks for
    expected = load_file(tmp_path / "model.safetensors")
    for found in ranks:
        assert found["weights"].keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-9)
    told = run_ranks(unfit_run, 1, folder, timeout=300)[0]
    assert "multi_modal_inputs: the model trains on tokens alone" in told[0]
    assert "a critic's values are of tokens alone" in told[1]


def test_what_it_cannot_train_by_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no block"):
        hosted.job_config(HydraEngineConfig(deepspeed_config={"zero_optimization": {}}), None)
    with pytest.raises(ConfigError, match="dtype 'int8'"):
        hosted.job_config(HydraEngineConfig(dtype="int8"), None)
    with pytest.raises(ConfigError, match="optimizer 'AdamW8bit'"):
        hosted.job_config(HydraEngineConfig(), FSDPOptimizerConfig(lr=1.0, optimizer="AdamW8bit"))


def test_it_is_known_by_its_entry_point() -> None:
    from importlib.metadata import entry_points

    assert {one.name: one.value for one in entry_points(group="verl.plugins")}["hydra"] == "ds_hydra.hosts.verl"
