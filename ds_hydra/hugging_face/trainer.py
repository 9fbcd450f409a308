"""A `transformers.Trainer` whose loop runs planned steps.

[Note: Trainer]
`Trainer` goes through its batches, and after every `gradient_accumulation_steps` of them makes an update. Here a batch
is collected and the last one of an update runs them all, of all ranks, as one planned step [Note: three calls]. What
surrounds that is Trainer's own and knows nothing of it: order of the data, callbacks, logging, schedules, saving,
resuming. With 2 ranks, batches of 4 and two batches an update:

    training_step(batch 1)   collects 4 sequences on each rank          returns 0
    training_step(batch 2)   collects 4 more; plans and runs all 16     returns the mean over all their targets

Trainer adds up what comes back, which is then the loss of the update. A plain Trainer logs the same figure: it divides
each token's loss by the number of targets of the whole update (`average_tokens_across_devices`, its default).

[Note: counted targets]
`Trainer` counts the targets of an update's batches on all ranks and gives their number to its loss, which the model
divides by: that is the mean over all targets, as here. A subclass that calls `model(**inputs)` without it gets the mean
over each batch, and a plain Trainer trains on the sum of these over an update; one that changes labels after they were
counted divides by the former number. Of 2 batches with 10 and 30 targets whose losses add up to 40 and 60:

    num_items_in_batch handed on   (40 + 60) / 40            = 2.5
    not handed on                  40 / 10 + 60 / 30         = 6
    half of the labels masked      (20 + 30) / 40            = 1.25, where the mean over the targets left is 2.5

Of a model that takes no such number (`accepts_loss_kwargs` is false, as most image-text classes have it) Trainer counts
nothing, and trains on the mean of the batches' means: that is the default of `loss_norm` then, too.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from ds_hydra.checkpoint.folder import other_checkpoint
from ds_hydra.engine.rounds import in_rows, places_of
from ds_hydra.host.released import give_back
from ds_hydra.host.three_calls import Collected, PendingLoss
from ds_hydra.hugging_face.accelerator import in_place_of_deepspeed
from ds_hydra.pipe.loss import TokenFunction, TokenLoss
from ds_hydra.report.record import StepRecord
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError


class Counted:
    """What Trainer has counted of the update that begins, on this rank and on all."""

    def __init__(self) -> None:
        self.of_all: Any = None
        self._here = self._seen = 0

    def count(self, batches: Sequence[Any], of_all: Any) -> None:
        """An update begins, of these batches of this rank; `of_all` is what Trainer makes of them."""
        self.of_all, self._here, self._seen = of_all, sum(map(_targets, batches)), 0

    def check(self, loss: Any, given: Any, *, owner: str, norm: str, batches: int, last: bool) -> None:
        """ConfigError where a plain Trainer would divide a batch's loss by another number than the engine does.

        `given` is what its training_step got, `owner` the class of the trainer, `norm` hydra.loss_norm, `batches` how
        many of all ranks make an update; `last`: whether this one is the update's last on this rank.
        """
        entries = [term.entry for term in loss.terms] if isinstance(loss, PendingLoss) else []
        if not all(isinstance(entry.batch, Mapping) and "labels" in entry.batch for entry in entries):
            return
        if given is None:
            if norm != "batch" and batches > 1:
                raise ConfigError(
                    f"{owner} has no num_items_in_batch (model_accepts_loss_kwargs is False), so a plain Trainer "
                    'trains on the mean over the means of batches: set "loss_norm": "batch" in the block "hydra", or '
                    "let the trainer count"
                )
            return
        if norm == "batch":
            return
        if not _same(given, self.of_all):
            raise ConfigError(
                f"num_items_in_batch of {owner} is {float(given):g}, but the targets of the update's batches are "
                f"{'not counted' if self.of_all is None else f'{float(self.of_all):g}'}, by which a planned step "
                "divides: leave get_batch_samples as it is, and scale the loss in compute_loss"
            )
        self._check_entries(entries, given, owner, alone=batches == 1)
        if last and self._seen != self._here:
            raise ConfigError(
                f"the labels that {owner} gave the model have {int(self._seen)} targets on this rank in an update, but "
                f"Trainer counted {int(self._here)} in its batches, by which a plain one divides the loss: change "
                "labels in the data or in the data_collator"
            )

    def _check_entries(self, entries: Sequence[Collected], given: Any, owner: str, *, alone: bool) -> None:
        for entry in entries:
            if entry.num_items is None and alone:  # the mean over this batch is that over all targets
                self._here = self._seen = 0
                return
            if entry.num_items is None:
                raise ConfigError(
                    f"compute_loss of {owner} calls the model without num_items_in_batch, so a plain Trainer trains on "
                    "the sum of the means of an update's batches in place of the mean over all targets: call "
                    "model(**inputs, num_items_in_batch=num_items_in_batch), or super().compute_loss() with it"
                )
            if not _same(entry.num_items, given):
                raise ConfigError(
                    f"compute_loss of {owner} gives the model num_items_in_batch {float(entry.num_items):g}, where the "
                    f"update has {float(given):g} targets: hand that on, and scale the loss instead"
                )
            self._seen += _targets(entry.batch)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and float(one) == float(other))


def _targets(batch: Any) -> Any:
    """Labels of a batch that are learnt, as Trainer counts them; 0 where it has none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return 0 if labels is None else (labels[..., 1:] != -100).sum()


logger = logging.getLogger(__name__)

_TRAINING_ARGS, _STATE = "training_args.bin", "trainer_state.json"  # as Trainer names them


class HydraTrainer(Trainer):
    """A `Trainer` on the engine of the block "hydra" in `TrainingArguments(deepspeed=...)` [Note: Trainer].

    Takes the arguments of `Trainer`, and the `loss_fn` of `ds_hydra.initialize`. To give a subclass of your own the
    engine, write `class Mine(HydraTrainer, YourTrainer)`. Without the block it is the plain `Trainer`.

    `preprocess_logits_for_metrics` runs on the rank that has the logits, on any number of tokens. So it must treat each
    token by itself, as an argmax does. Its second argument are the labels that these logits are to predict.
    `compute_metrics` and `predict` get what it returns. Without it they get the logits of all words, as from a plain
    Trainer, which travel over the host.
    """

    # Trainer's own, of which the annotations are seen where transformers' are not.
    deepspeed: Any
    optimizer: Any
    lr_scheduler: Any
    preprocess_logits_for_metrics: Any

    def __init__(self, *args: Any, loss_fn: TokenLoss | None = None, **kwargs: Any):
        self._loss_fn = loss_fn
        self._token_function: TokenFunction | None = None
        self._counted = Counted()
        self._has_ended = False  # the engine, since the script has written to its model
        self._applied: bool | None = None  # whether an update since the last log was; None: there was none
        super().__init__(*args, **kwargs)
        self._given = self.optimizer, self.lr_scheduler
        if self.plans_steps:
            # Trainer would call it once more, on what it has returned.
            self._token_function, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
            self._refuse_unfit()

    evaluates_each_rank = False
    """Whether the loss of an evaluation is the mean over each rank's own targets, and then over ranks."""

    @property
    def plans_steps(self) -> bool:
        """Whether the config has a block "hydra"; else this is a plain Trainer."""
        return self.is_deepspeed_enabled and "hydra" in self._deepspeed_config

    @property
    def _deepspeed_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.accelerator.state.deepspeed_plugin.deepspeed_config
        return config

    def _refuse_unfit(self) -> None:
        if self._loss_fn is not None and self.args.label_smoothing_factor:
            raise ConfigError(
                f"HydraTrainer has a loss_fn and label_smoothing_factor {self.args.label_smoothing_factor}: smooth in "
                "the loss_fn, and set the factor to 0"
            )
        for name, given in zip(("optimizer", "scheduler"), self._given, strict=True):
            if given is not None and name in self._deepspeed_config:
                raise ConfigError(
                    f"HydraTrainer was given the {name} {type(given).__name__}, and the DeepSpeed config has a block "
                    f'"{name}" too: leave one of them out'
                )
        if not self.args.average_tokens_across_devices:
            raise ConfigError(
                "TrainingArguments(average_tokens_across_devices=False): the loss of a planned step is the mean over "
                "the targets of all ranks; leave it at True"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own. After it the model is the script's: what writes to its weights, such as merging adapters, gets
        them whole on each rank's CPU, and all ranks must do so alike; an evaluation after that has the new ones.

        A folder of Trainer's that a save has left without its end, since a rank was lost, is put aside first.
        """
        if self.plans_steps:
            if self.args.should_save:
                _put_aside_unfinished(Path(self.args.output_dir))
            self.accelerator.wait_for_everyone()
        found = super().train(*args, **kwargs)
        if self.plans_steps and self.deepspeed is not None:
            self.deepspeed.weights.lent.training_is_over = self._give_model_back
        return found

    def _give_model_back(self) -> Mapping[str, Any]:
        model: Any = self.model
        logger.info(
            "training is over, and the script writes to the model: each rank has it whole on its CPU now, and the "
            "engine ends"
        )
        found = give_back(model)
        self.deepspeed.destroy()
        self.deepspeed, self.model_wrapped, self._has_ended = None, model, True
        return found

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if not self.plans_steps:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            _refuse_without_engine(Path(resume_from_checkpoint))
        if self.deepspeed is not None or self._has_ended:
            self._end_engine()
        self._deepspeed_config.setdefault("gradient_clipping", self.args.max_grad_norm)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:  # then Trainer counts no targets
            self._deepspeed_config["hydra"].setdefault("loss_norm", "batch")
        self._taken = {name: getattr(self.args, name) for name in ("max_grad_norm", "label_smoothing_factor")}
        own, smoothing = self._loss_fn, self.args.label_smoothing_factor
        if smoothing:
            own = functools.partial(_smoothed, smoothing)
        with in_place_of_deepspeed(own):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.plans_steps:  # then Trainer writes its state, by which a whole checkpoint is known
            self.accelerator.wait_for_everyone()

    def _end_engine(self) -> None:
        """Before another training, which begins anew with the values that the model has now, as a plain Trainer's."""
        model: Any = self.model
        if self._given[0] is not None or self._deepspeed_config["hydra"].get("checkpoint") is not None:
            kept = "the optimizer that it was given" if self._given[0] is not None else "hydra.checkpoint"
            raise ConfigError(
                f"this trainer has trained or evaluated already, and {kept} goes on from there: make another "
                "HydraTrainer; TrainingArguments(eval_on_start=True) evaluates before the first step"
            )
        if self.deepspeed is not None:
            give_back(model)
            self.deepspeed.destroy()
        self.deepspeed, self.model_wrapped, self._has_ended = None, model, False

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, or the one that was given, which transformers would drop beside DeepSpeed."""
        if not self.plans_steps or self._given[0] is None:
            return super().create_optimizer(*args, **kwargs)
        self.optimizer = self._given[0]
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's, or the one that was given."""
        if not self.plans_steps or self._given[1] is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = self._given[1]
        return self.lr_scheduler

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, device)
        self._counted.count(batch_samples, found)
        return found

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Collect a batch; the last one of an update runs it. Returns the update's loss there and 0 before, ()."""
        if not self.plans_steps:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        model.three_calls.items_are_counted = True
        for name, value in self._taken.items():
            if getattr(self.args, name) != value:
                raise ConfigError(
                    f"TrainingArguments.{name} was changed from {value} to {getattr(self.args, name)} while training, "
                    "but the engine goes on with the first: set it before train()"
                )
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        updates, made = self.accelerator.sync_gradients, not isinstance(loss, PendingLoss)
        if not made:
            self._counted.check(
                loss, num_items_in_batch, owner=type(self).__name__, norm=model.hydra_config.loss_norm,
                batches=self.args.world_size * self.current_gradient_accumulation_steps, last=updates,
            )  # fmt: skip
        model.three_calls.accumulates = self.current_gradient_accumulation_steps  # fewer at an epoch's end
        model.set_gradient_accumulation_boundary(updates)
        if made:  # a loss of the trainer's own counts as Trainer lets it
            whole = self.compute_loss_func is not None or (
                self.model_accepts_loss_kwargs and num_items_in_batch is not None
            )
            loss = loss if whole else loss / self.current_gradient_accumulation_steps
        model.backward(loss, scale_wrt_gas=not made)
        model.step()
        if updates:
            self._applied = bool(self._applied) or not model.last_step.skipped
        return torch.tensor(model.last_step.loss if updates else 0.0, device=self.args.device)

    def _train_on(self, model: Any, rows: Any, loss_of: Callable[..., Tensor], **how: Any) -> Tensor:
        """Train on this rank's rows by a trainer's whole loss, made of the scores of their tokens; the last batch of an
        update applies it. Returns the loss, ()."""
        losses: list[Tensor] = []

        def loss(*given: Any) -> Tensor:
            losses.append(loss_of(*given))
            return losses[0].reshape(1)

        loss.watched = False  # type: ignore[attr-defined]  # it computes references and gathers metrics, as all ranks do
        model.forward_backward(rows, loss, mixes_tokens=True, **how)
        if self.accelerator.sync_gradients:
            model.optimizer_step()
            if model.lr_scheduler is not None:
                model.lr_scheduler.step()
        return losses[0].detach()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's own, with what ran in the last step where a training loss is logged."""
        engine: Any = self.deepspeed if self.plans_steps else None
        if engine is not None and engine.last_step is not None and "loss" in logs:
            if self._applied is False and self.args.logging_nan_inf_filter:
                logs["loss"] = math.nan  # Trainer leaves losses that are not finite out of its sum, which is 0 then
            self._applied = None
            logs.update(figures_of(engine.last_step))
        super().log(logs, *args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        found = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.plans_steps:
            model.three_calls.shows_gradients = True  # to callbacks, until Trainer drops them
        return found

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch, pending until the update has run or until it is read; it is the output, too."""
        if not self.plans_steps:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        found = loss = model(**inputs, num_items_in_batch=num_items_in_batch)
        if model.three_calls.evaluating and num_items_in_batch is not None and self.compute_loss_func is None:
            share = _targets(inputs) / num_items_in_batch * self.accelerator.num_processes
            loss = torch.nan_to_num(found.loss) * share
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(found, inputs.get("labels"), num_items_in_batch=num_items_in_batch)
            if num_items_in_batch is not None:
                loss = loss * self.accelerator.num_processes  # as Trainer, since gradients are averaged over ranks
        return (loss, found) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As Trainer's; the engine is made first where nothing has been trained."""
        if self.plans_steps and self.deepspeed is None:
            self._prepare_for_training(max(1, self.args.max_steps), None, None)
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The mean loss of the batches of all ranks, or of this rank's, or what a `compute_loss` of the script's own
        makes of them, (); and, unless that is all, what `preprocess_logits_for_metrics` gives for each token of this
        rank's rows, (rows, tokens) or (rows, tokens, k), without it their logits; and the labels."""
        if not self.plans_steps:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        engine: Any = self.deepspeed
        engine.eval()
        of_script = None
        if type(self).compute_loss is not HydraTrainer.compute_loss or self.compute_loss_func is not None:
            inputs, engine.three_calls.items_are_counted = self._prepare_inputs(inputs), True
            counted = super()._get_num_items_in_batch([inputs], self.args.device)
            with torch.no_grad():
                of_script, _ = self.compute_loss(engine, inputs, return_outputs=True, num_items_in_batch=counted)
            of_script = of_script.detach().mean().to(self.args.device)
        # Where Trainer counts no targets, it takes the mean of the batches' means.
        each = self.evaluates_each_rank or not self.model_accepts_loss_kwargs
        if of_script is None and (prediction_loss_only or each):
            own, mean = engine.evaluate_collected(inputs)
            of_script = torch.tensor(own if each else mean, device=self.args.device)
        if prediction_loss_only:
            return of_script, None, None
        loss, found = engine.predict(inputs, self._token_function)
        if self._token_function is None:
            rows = in_rows(places_of(inputs, len(found)), found)
        else:
            rows = in_rows(places_of(inputs, len(found), "predictions"), found, -100.0).squeeze(-1)
            rows = rows.long() if bool((rows == rows.round()).all()) else rows.float()
        loss = loss.to(self.args.device) if of_script is None else of_script
        return loss, rows.to(self.args.device), inputs.get("labels")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that `from_pretrained` loads. Every rank must call it."""
        if not self.plans_steps:
            return super().save_model(output_dir, _internal_call)
        folder = output_dir or self.args.output_dir
        if self.deepspeed is None:
            if self.args.should_save:
                self._save(folder)
            return
        self.deepspeed.save_16bit_model(folder, tokenizer=self.processing_class)
        if self.args.should_save:
            torch.save(self.args, os.path.join(folder, _TRAINING_ARGS))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def figures_of(step: StepRecord) -> dict[str, Any]:
    """What Trainer's log says of a step beside its loss: as on the step's own line, without the names' units."""
    found: dict[str, Any] = {"hydra/strategy": step.strategy, "hydra/step_ms": step.step_ms}
    if step.expected_ms is not None:
        found["hydra/predicted_ms"] = step.expected_ms
    if step.step_ms > 0:
        found["hydra/wait"] = step.slowest_wait_ms / step.step_ms
    if step.skipped_steps:
        found["hydra/skipped_steps"] = step.skipped_steps
    return found


def _put_aside_unfinished(folder: Path) -> None:
    """Rename those of Trainer's checkpoints that lack its state: `resume_from_checkpoint=True` takes the newest."""
    for saved in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"):
        if not saved.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-").isdigit():
            continue
        try:
            json.loads((saved / _STATE).read_text())
        except (OSError, ValueError):
            aside = saved.with_name(f"unfinished-{saved.name}-{secrets.token_hex(4)}")
            saved.rename(aside)
            logger.warning("%s was not saved to its end, and is not gone on from: it is %s now", saved, aside.name)


def _refuse_without_engine(folder: Path) -> None:
    """CheckpointError for a checkpoint of a Trainer that had no engine; Trainer itself would find nothing in it."""
    other = other_checkpoint(folder)
    if other is not None and not any(folder.glob("global_step*")):
        raise CheckpointError(f"resume_from_checkpoint={str(folder)!r} is {other}")
    if not (folder / _STATE).exists():
        raise CheckpointError(
            f"resume_from_checkpoint={str(folder)!r} has no {_STATE}: it was not saved to its end, or is no "
            "checkpoint of Trainer's; give the one before, or True for the newest that is whole"
        )


def _smoothed(factor: float, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, (T,), as `TrainingArguments(label_smoothing_factor=...)` means it."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=factor)
