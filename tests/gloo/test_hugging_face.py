"""transformers' Trainer on the engine: a plain one's losses, stopping and resuming, folders, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import EvalPrediction

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.hugging_face import HydraTrainer
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.case import focal
from tests.support.ends import all_told, codes, ends, mark_fault
from tests.support.small_job import same, sequences, shared_source, small_model
from tests.support.trainers import STEPS, adapted, config, logged, settings, trainer_of

RELEASE = Version(transformers.__version__).release


class StopAfter(TrainerCallback):
    """Ends training as a user would, after the second update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step == STEPS // 2
        return control


def planned(
    rank: int, folder: Path, more: dict[str, Any], make: Callable[[], Any] = small_model
) -> tuple[list[Any], list[Any], bool]:
    """The whole run; the same stopped in the middle and resumed; whether both end with the same parameters."""
    rank_environment(rank)
    whole = trainer_of(HydraTrainer, settings(folder / "whole", 2, config(), **more), make())
    whole.train()
    stopping = {"callbacks": [StopAfter()]}
    halted = trainer_of(HydraTrainer, settings(folder / "parts", 2, config(), **more), make(), **stopping)
    halted.train()
    if rank == 0:  # as a rank that is lost leaves it while Trainer saves
        (folder / "parts" / "checkpoint-99").mkdir()
    resumed = trainer_of(HydraTrainer, settings(folder / "parts", 2, config(), **more), make())
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    equal = same(whole.deepspeed.fp32_state_dict(), resumed.deepspeed.fp32_state_dict())
    return logged(whole), logged(resumed), equal


def plain(rank: int, folder: Path, more: dict[str, Any], make: Callable[[], Any] = small_model) -> list[Any]:
    rank_environment(rank)
    del os.environ["LOCAL_RANK"]  # by which Accelerate tells a job of several processes
    trainer = trainer_of(Trainer, settings(folder / "plain", 1, None, **more), make())
    trainer.train()
    return logged(trainer)


def compare(folder: Path, more: dict[str, Any], make: Callable[[], Any] = small_model) -> None:
    """A planned Trainer on 2 ranks with a plain one in one process, and with itself after a stop."""
    expected = run_ranks(plain, 1, folder, more, make)[0]
    assert len(expected) == STEPS + STEPS // 2
    with shared_source(make()):
        results = run_ranks(planned, 2, folder, more, make, timeout=200)
    for whole, resumed, equal in results:
        for found, aim in zip(whole, expected, strict=True):
            assert found[0] == pytest.approx(aim[0], rel=1e-6)
            assert found[1:] == pytest.approx(aim[1:], rel=1e-4), "norms of gradients in FP32"
        assert resumed == whole
        assert equal


@pytest.mark.drawn
@pytest.mark.skipif(RELEASE < (5, 17), reason="a plain one adds up accumulated batches' smoothed losses")
def test_a_planned_trainer_is_a_plain_one_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    compare(tmp_path, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"})
    assert len(list((tmp_path / "parts").glob("unfinished-checkpoint-99-*"))) == 1
    saved = tmp_path / "parts" / f"checkpoint-{STEPS}"
    state = json.loads((saved / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == STEPS
    one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "parts", saved))
    assert same(dict(one.named_parameters()), dict(other.named_parameters()))


def interrupted(
    folder: Path, killed: int, nth: int, rank: int, place: Path
) -> tuple[int, list[Any], dict[str, Tensor]]:
    """Train to the end, or until that rank is killed where it opens, makes or renames the `nth` path of the last save;
    how many there were on this rank, what was logged, and the masters."""
    rank_environment(rank)
    trainer, name, seen = trainer_of(HydraTrainer, settings(folder, 2, config())), f"checkpoint-{STEPS}", 0

    def watch(event: str, values: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename") and isinstance(values[0], str) and name in values[0]:
            seen += 1
            if rank == killed and seen == nth:
                mark_fault(place)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return seen, logged(trainer), trainer.deepspeed.fp32_state_dict()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, list[Any], dict[str, Tensor]]]:
    with shared_source(small_model()):
        return run_ranks(partial(interrupted, tmp_path_factory.mktemp("whole") / "run", -1, 0), 2, Path(), timeout=200)


@pytest.mark.drawn
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("killed", [0, 1])
def test_it_goes_on_from_a_whole_save_after_a_rank_was_killed_in_one(
    killed: int, part: float, undisturbed: list[tuple[int, list[Any], dict[str, Tensor]]], tmp_path: Path
) -> None:
    nth = 1 + round(part * (undisturbed[killed][0] - 1))
    with shared_source(small_model()):
        found = ends(partial(interrupted, tmp_path / "run", killed, nth), 2, limit_s=200.0)
        assert codes(found) == [-9 if rank == killed else 75 for rank in range(2)], all_told(found)
        again = run_ranks(partial(interrupted, tmp_path / "run", -1, 0), 2, tmp_path, timeout=200)
    for (_, losses, masters), (_, right, expected) in zip(again, undisturbed, strict=True):
        assert losses == right
        assert same(masters, expected)


@pytest.mark.drawn
@pytest.mark.skipif(RELEASE < (5, 11), reason="a plain one divides by the first tokens of rows too")
def test_so_is_one_of_adapters(tmp_path: Path) -> None:
    compare(tmp_path, {}, adapted)
    loaded = PeftModel.from_pretrained(small_model(tied=False), tmp_path / "parts")
    weights = [value for name, value in loaded.named_parameters() if "lora_B" in name]
    assert weights
    assert all(weight.abs().max() > 0 for weight in weights)


def metrics(given: EvalPrediction) -> dict[str, float]:
    """Share of the tokens that were foretold, and the number of those that were to be."""
    labels, predictions = np.asarray(given.label_ids), np.asarray(given.predictions)
    if predictions.ndim == 3:  # logits
        predictions = predictions.argmax(-1)
    known = labels[:, 1:] != -100
    right = predictions[:, :-1] == labels[:, 1:]
    return {"right": float((right & known).sum() / known.sum()), "tokens": float(known.sum())}


def most_likely(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def twice(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of a script's own."""
    flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return 2 * torch.nn.functional.cross_entropy(*flat, reduction="sum") / num_items_in_batch


def measured(rank: int, folder: Path, kind: Any, num_ranks: int, own: dict[str, Any]) -> list[Any]:
    rank_environment(rank)
    if kind is Trainer:
        del os.environ["LOCAL_RANK"]
    engine = config() if kind is HydraTrainer else None
    arguments = settings(folder, num_ranks, engine, max_steps=1, save_strategy="no", eval_strategy="no")
    trainer = trainer_of(kind, arguments, compute_metrics=metrics, **own)
    found = trainer.evaluate()
    predicted = trainer.predict(sequences()[8:15])
    figures = [found["eval_right"], found["eval_tokens"], found["eval_loss"]]
    return [figures, None, predicted.predictions, predicted.label_ids, predicted.metrics]


@pytest.mark.drawn
@pytest.mark.parametrize("own", [{"preprocess_logits_for_metrics": most_likely}, {}, {"compute_loss_func": twice}])
def test_metrics_and_predictions_are_those_of_a_plain_trainer(own: dict[str, Any], tmp_path: Path) -> None:
    expected = run_ranks(measured, 1, tmp_path, Trainer, 1, own)[0]
    with shared_source(small_model()):
        results = run_ranks(measured, 2, tmp_path, HydraTrainer, 2, own, timeout=200)
    for found in results:
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        known = expected[3] != -100
        assert found[2].shape == expected[2].shape
        assert np.allclose(found[2][known], expected[2][known], atol=1e-4)
        assert "preprocess_logits_for_metrics" not in own or (found[2][~known] == -100).all()
        assert (found[3] == expected[3]).all()
        assert found[4]["test_right"] == pytest.approx(expected[4]["test_right"])


def refusals(rank: int, folder: Path) -> list[str]:
    rank_environment(rank)
    found = []

    def note(call: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            call()
        found.append(str(caught.value))

    def made(**more: Any) -> Any:
        once = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
        return trainer_of(HydraTrainer, settings(folder, 1, config(strategies=["tp1"]), **once), **more)

    over_tokens = {"compute_metrics": metrics, "preprocess_logits_for_metrics": lambda logits, labels: logits.mean(1)}
    before = made(loss_fn=focal).evaluate()["eval_loss"]
    note(made(**over_tokens).evaluate)
    return [*found, f"{before:.4f}"]


def test_what_mixes_tokens_is_refused_and_a_loss_of_ones_own_is_not(tmp_path: Path) -> None:
    found = run_ranks(refusals, 1, tmp_path)[0]
    assert "(1, T) or (1, T, k), but for 3 tokens it returned (1, 97)" in found[0]
    data = sequences()[:8]
    model = small_model()
    with torch.no_grad():
        losses = [focal(model(one[None]).logits[0, :-1], one[1:]) for one in data]
    means = [float(torch.cat(losses[at : at + 4]).mean()) for at in (0, 4)]
    assert float(found[-1]) == pytest.approx(sum(means) / 2, abs=1e-4)


def test_without_the_block_it_is_a_plain_trainer(tmp_path: Path) -> None:
    def job(rank: int) -> list[Any]:
        rank_environment(rank)
        del os.environ["LOCAL_RANK"]

        def metrics(given: EvalPrediction) -> dict[str, float]:
            return {"words": float(np.shape(given.predictions)[-1])}

        arguments = settings(tmp_path, 1, None, max_steps=1, save_strategy="no")
        trainer = trainer_of(HydraTrainer, arguments, compute_metrics=metrics)
        trainer.train()
        return [trainer.evaluate()["eval_words"], *logged(trainer)[0][:1]]

    words, loss = run_ranks(job, 1)[0]
    assert words == 97
    assert loss == pytest.approx(run_ranks(plain, 1, tmp_path, {"max_steps": 1, "eval_strategy": "no"})[0][0][0])


class Evaluates:
    """An engine whose ranks' batches have another mean than this rank's."""

    def eval(self) -> None: ...

    def evaluate_collected(self, batch: Any) -> tuple[float, float]:
        return 1.0, 2.0


def test_an_evaluation_counts_targets_as_the_trainer_that_is_swapped_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer takes the mean over the targets of all ranks, TRL's the mean of the ranks' means."""
    from ds_hydra.hugging_face.sft import HydraSFTTrainer

    monkeypatch.setattr(HydraTrainer, "plans_steps", True)
    found = []
    for kind in (HydraTrainer, HydraSFTTrainer):
        trainer: Any = kind.__new__(kind)
        trainer.deepspeed, trainer.args = Evaluates(), SimpleNamespace(device="cpu")
        trainer.compute_loss_func, trainer.model_accepts_loss_kwargs = None, True
        found.append(trainer.prediction_step(None, {}, prediction_loss_only=True)[0].item())
    assert found == [2.0, 1.0]
