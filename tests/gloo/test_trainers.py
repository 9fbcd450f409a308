"""What scripts give a Trainer on the engine, change while it trains, and do afterwards; an epoch's last update."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.hugging_face import HydraAccelerator, HydraTrainer
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import sequences, small_model
from tests.support.trainers import adapted, collate, config, logged, settings, trainer_of, word_tokenizer


# --- What scripts give a Trainer on the engine, change while it trains, and do with it afterwards.
def with_given(rank: int, folder: Path, kind: Any, num_ranks: int) -> Any:
    """What a run logs whose optimizer and schedule the script has made."""
    rank_environment(rank)
    if num_ranks == 1:
        del os.environ["LOCAL_RANK"]
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    arguments = settings(folder / str(num_ranks), num_ranks, config() if num_ranks > 1 else None, save_strategy="no")
    trainer = trainer_of(kind, arguments, model, optimizers=given)
    trainer.train()
    found = logged(trainer)
    if num_ranks > 1:
        with pytest.raises(ConfigError, match="the optimizer that it was given goes on from there: make another"):
            trainer.train()
    return found


@pytest.mark.drawn
def test_an_optimizer_and_a_schedule_that_are_given_are_used(tmp_path: Path) -> None:
    found, right = (run_ranks(with_given, n, tmp_path, kind, n)[0] for kind, n in ((HydraTrainer, 2), (Trainer, 1)))
    assert [entry[2] for entry in right if len(entry) == 3] == [0.1, 0.1, 0.05, 0.05]
    for mine, its in zip(found, right, strict=True):
        assert mine == pytest.approx(its, rel=1e-4)


def trained_twice(rank: int, folder: Path, kind: Any, num_ranks: int) -> Any:
    """What a trainer logs that evaluates, trains, and trains again for longer."""
    rank_environment(rank)
    if num_ranks == 1:
        del os.environ["LOCAL_RANK"]
    arguments = settings(folder / str(num_ranks), num_ranks, config() if num_ranks > 1 else None, save_strategy="no")
    trainer = trainer_of(kind, arguments)
    found = [[trainer.evaluate()["eval_loss"]]]
    for steps in (2, 3):
        trainer.args.max_steps = steps
        trainer.train()
        found += logged(trainer)
        if num_ranks == 1:
            trainer.optimizer = None  # as transformers does where DeepSpeed trains
    return found


@pytest.mark.drawn
def test_a_second_training_begins_with_the_models_present_values(tmp_path: Path) -> None:
    found, right = (run_ranks(trained_twice, n, tmp_path, kind, n)[0] for kind, n in ((HydraTrainer, 2), (Trainer, 1)))
    for mine, its in zip(found, right, strict=True):
        assert mine == pytest.approx(its, rel=2e-4)


def changed_afterwards(rank: int, folder: Path) -> list[float]:
    """Losses of an evaluation after training, of the merged model, of one whose weights are set to 0 after training,
    and of one that has trained on from there; what is saved of it."""
    rank_environment(rank)

    def made(*model: Any) -> Any:
        once = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
        return trainer_of(HydraTrainer, settings(folder, 2, config(), **once), *model)

    trainer = made(adapted())
    trainer.train()
    found = [trainer.evaluate()["eval_loss"]]
    merged = trainer.model.merge_and_unload()
    batches = [collate(sequences()[at : at + 4]) for at in (0, 4)]
    with torch.no_grad():
        found.append(sum(float(merged(**batch).loss) for batch in batches) / len(batches))
    trainer = made()
    trainer.train()
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(0.0)
    found.append(trainer.evaluate()["eval_loss"])
    trainer.train()
    found.append(trainer.evaluate()["eval_loss"])
    trainer.model.half()
    trainer.save_model()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float16}
    assert trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False).shape[0] == 1
    return found


def test_after_training_the_model_is_the_scripts(tmp_path: Path) -> None:
    for evaluated, merged, zeroed, again in run_ranks(changed_afterwards, 2, tmp_path, timeout=200):
        assert merged == pytest.approx(evaluated, rel=1e-5)
        assert zeroed == again == pytest.approx(math.log(97), rel=1e-6)


def with_noise(rank: int, folder: Path) -> list[list[list[float]]]:
    """What is logged with noise under one strategy and under others, and without."""
    rank_environment(rank)
    found = []
    for alpha, strategies in ((40.0, ["2*tp1"]), (40.0, ["tp2", "pp2"]), (None, ["2*tp1"])):
        block = config(strategies=strategies)
        trainer = trainer_of(HydraTrainer, settings(folder, 2, block, save_strategy="no", neftune_noise_alpha=alpha))
        trainer.train()
        found.append(logged(trainer))
    return found


@pytest.mark.drawn
def test_noise_of_embeddings_is_the_same_under_every_strategy(tmp_path: Path) -> None:
    one, others, without = run_ranks(with_noise, 2, tmp_path, timeout=200)[0]
    for mine, its in zip(one, others, strict=True):
        assert mine == pytest.approx(its, rel=1e-4)
    assert abs(one[0][0] - without[0][0]) > 1e-3 * without[0][0]


def with_a_bad_row(rank: int, folder: Path) -> list[dict[str, Any]]:
    """What is logged of steps that all meet an embedding that is no number."""
    rank_environment(rank)
    model = small_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[3:] = math.nan
    trainer = trainer_of(
        HydraTrainer, settings(folder, 2, config(), max_steps=2, eval_strategy="no", save_strategy="no"), model
    )
    trainer.train()
    return trainer.state.log_history[:2]  # type: ignore[no-any-return]


def test_a_log_of_steps_that_were_all_skipped_has_no_loss_of_zero(tmp_path: Path) -> None:
    for entries in run_ranks(with_a_bad_row, 2, tmp_path):
        assert [math.isnan(entry["loss"]) for entry in entries] == [True, True]
        assert [entry["hydra/skipped_steps"] for entry in entries] == [1, 2]


class OfGradients(TrainerCallback):
    """Scales gradients before the optimizer's step, as a script may."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        for parameter in given["model"].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class OfArguments(TrainerCallback):
    """Changes an argument of the training after the first step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        setattr(args, self.name, 0.25)


CHANGES = {
    "was read before the update": OfGradients(),
    "max_grad_norm was changed from 1.0 to 0.25 while training": OfArguments("max_grad_norm"),
    "label_smoothing_factor was changed from 0.0 to 0.25 while training": OfArguments("label_smoothing_factor"),
}


def with_changes(rank: int, folder: Path) -> list[str]:
    rank_environment(rank)
    texts = []
    for callback in CHANGES.values():
        trainer = trainer_of(HydraTrainer, settings(folder, 2, config()), callbacks=[callback])
        with pytest.raises(ConfigError) as error:
            trainer.train()
        texts.append(str(error.value))
        trainer.model_wrapped.destroy()
    return texts


@pytest.mark.drawn
def test_a_callback_that_changes_gradients_or_what_updates_are_made_by_is_refused(tmp_path: Path) -> None:
    for texts in run_ranks(with_changes, 2, tmp_path):
        for text, words in zip(texts, CHANGES, strict=True):
            assert words in text


def test_rewards_need_a_head_of_one_output() -> None:
    from ds_hydra.hugging_face.reward import for_tokens

    for model in (small_model(), adapted()):
        with pytest.raises(ConfigError, match="has no head `score` of one output"):
            for_tokens(model)


def test_gradients_are_clipped_by_the_configs_norm_alone() -> None:
    accelerator: Any = object.__new__(HydraAccelerator)
    accelerator._engine = lambda: SimpleNamespace(gradient_clipping=lambda: 1.0)
    for asked in ((0.5,), (1.0, 1)):
        with pytest.raises(ConfigError, match=r"comes when the update is made, by the config's gradient_clipping, 1.0"):
            accelerator.clip_grad_norm_([], *asked)


# What SFTConfig has, hydra.context_length, and the line of sequences of 3, 8, 9 and 40 tokens.
CUT: dict[str, tuple[dict[str, Any], int | None, str | None]] = {
    "cut": ({"max_length": 8}, 64, r"3 of 4 sequences have exactly max_length=8 .* or 64 \(hydra.context_length\)$"),
    "without a context": ({"max_length": 8}, None, r"3 of 4 .* write SFTConfig\(max_length=None\)$"),
    "as long as the context": ({"max_length": 8}, 8, None),
    "whole": ({"max_length": None}, 64, None),
    "by default": ({}, 4096, None),
    "packed": ({"max_length": 8, "packing": True}, 64, None),
}


def told_of_cuts(rank: int, folder: Path) -> dict[str, list[str]]:
    import trl
    from datasets import Dataset

    from ds_hydra.hugging_face import sft

    rank_environment(rank)
    data, found = Dataset.from_list([{"input_ids": [5] * length} for length in (3, 8, 9, 40)]), {}
    for name, (own, context, _) in CUT.items():
        more: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, **own}
        arguments = trl.SFTConfig(str(folder), deepspeed=config(context_length=context), **more)
        with mock.patch.object(sft.logger, "warning") as warning:
            sft.HydraSFTTrainer(small_model(), arguments, train_dataset=data, processing_class=word_tokenizer())
        found[name] = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return found


def test_sequences_that_trl_has_cut_are_told_once(tmp_path: Path) -> None:
    first, second = run_ranks(told_of_cuts, 2, tmp_path, timeout=200)
    assert not any(second.values())
    for name, (_, _, words) in CUT.items():
        assert len(first[name]) == (words is not None), name
        assert words is None or re.search(words, first[name][0])


# --- An epoch's last update, of fewer batches, under Trainer and Accelerate: that of the plain ones on as many
# ranks.
ACCUMULATION, RANKS, RATE = 4, 2, 0.5
HYDRA: dict[str, Any] = {"strategies": ["2*tp1", "pp2"], "loss_norm": "batch"}

Parameters = dict[str, Tensor]


def by_accelerate(rank: int, hydra: bool) -> Parameters:
    """Six batches of each rank, in updates of four and two."""
    rank_environment(rank)
    if hydra:
        block = config(**HYDRA) | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION}
        block["zero_allow_untested_optimizer"] = True
        accelerator: Any = HydraAccelerator(deepspeed_plugin=DeepSpeedPlugin(block))
    else:
        accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model: Any = small_model(tied=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    loader: Any = DataLoader(sequences()[:24], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
    assert updates == 2
    if hydra:
        return dict(model.fp32_state_dict())
    return {name: value.detach() for name, value in accelerator.unwrap_model(model).named_parameters()}


def by_trainer(rank: int, hydra: bool, folder: Path) -> Parameters:
    """Seven batches of each rank, in updates of four and three; each batch counts by its own mean."""
    rank_environment(rank)
    many: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATION, "optim": "sgd", "learning_rate": RATE}
    many |= {"max_steps": -1, "num_train_epochs": 1, "weight_decay": 0.0, "max_grad_norm": 0.0, "save_strategy": "no"}
    many |= {"eval_strategy": "no", "lr_scheduler_type": "constant"}
    block = config(**HYDRA) | {"zero_allow_untested_optimizer": True}
    arguments = settings(folder / str(hydra), RANKS, block if hydra else None, **many)
    trainer = trainer_of(HydraTrainer if hydra else Trainer, arguments, small_model(tied=False))
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert trainer.state.global_step == 2
    if hydra:
        return dict(trainer.deepspeed.fp32_state_dict())
    return {name: value.detach() for name, value in trainer.model.named_parameters()}


@pytest.mark.drawn
@pytest.mark.parametrize("host", [by_accelerate, by_trainer])
def test_the_last_update_of_an_epoch_is_that_of_the_plain_host(host: Any, tmp_path: Path) -> None:
    given = (tmp_path,) if host is by_trainer else ()
    plain, own = (run_ranks(host, RANKS, hydra, *given)[0] for hydra in (False, True))
    start = {name: value.detach() for name, value in small_model(tied=False).named_parameters()}
    for name, value in plain.items():
        moved = float((value - start[name]).abs().max())
        assert moved > 0, name
        assert float((own[name] - value).abs().max()) < 1e-4 * moved, name


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of the script's own, of logits, as Trainer asks for it."""
    flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    summed = torch.nn.functional.cross_entropy(*flat, label_smoothing=0.2, reduction="sum")
    return summed / num_items_in_batch


class Distilling(Trainer):
    """Reads its loss, and adds one of its own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        assert outputs.loss.item() > 0
        chosen, mask = outputs.get("logits").softmax(-1)[..., 7], inputs["attention_mask"]
        far = (chosen * mask).sum() / mask.sum()
        loss = 0.5 * outputs.loss + 0.5 * far
        return (loss, outputs) if return_outputs else loss


class HydraDistilling(Distilling, HydraTrainer):  # type: ignore[misc]
    """The same on the engine."""


def own_losses(rank: int, folder: Path, kind: Any, num_ranks: int, more: dict[str, Any]) -> list[list[float]]:
    rank_environment(rank)
    once = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "num_train_epochs": 1}
    engine = config(strategies=["tp2", "pp2"] if num_ranks > 1 else ["tp1"]) if issubclass(kind, HydraTrainer) else None
    arguments = settings(folder, num_ranks, engine, max_grad_norm=0.5, **once)
    trainer = trainer_of(kind, arguments, small_model(tied=False), **more)
    trainer.train()
    return logged(trainer)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("plain", "hydra", "num_ranks", "more"),
    [(Trainer, HydraTrainer, 2, {"compute_loss_func": smoothed}), (Distilling, HydraDistilling, 1, {})],
)
def test_losses_of_a_trainers_own_log_as_in_a_plain_trainer(
    plain: Any, hydra: Any, num_ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    right = run_ranks(own_losses, 1, tmp_path, plain, 1, more, timeout=200)[0]
    own = run_ranks(own_losses, num_ranks, tmp_path, hydra, num_ranks, more, timeout=200)[0]
    for expected, found in zip(right, own, strict=True):
        assert found == pytest.approx(expected, rel=2e-4)
