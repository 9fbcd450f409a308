"""TRL's `RewardTrainer` on the engine; importing this needs the extra `trl`.

[Note: rewards]
A model of rewards makes one number of a sequence: what its head says of the last token. The engine trains values, one
of each token, so it is given the same base model and head as a model for tokens, whose parameters are the script's own.
Each row is given one token more, at whose place the engine has the value of all before it: the reward. TRL's own
`compute_loss` runs on the rewards of this rank's rows, in the place of the model, as for losses of log-probabilities
[Note: TRL's losses of log-probabilities].
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from trl import RewardTrainer

from ds_hydra.hugging_face.trainer import HydraTrainer
from ds_hydra.pipe.adapters import trained_copy
from ds_hydra.pipe.models.adapted import base_of, is_peft_model
from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True)
class Rewards:
    """What a call of the model gives back; `logits` (rows, 1)."""

    logits: Tensor


def for_tokens(model: Any) -> Any:
    """A model with the base, the head and the config of one for sequences, which gives a value of each token; around
    one that PEFT has adapted the same adapters stand.

    Raises ConfigError for a head that is not one linear layer `score` of one output.
    """
    base = base_of(model)
    head = getattr(base, "score", None)
    linear = None if head is None else trained_copy(head)
    if not isinstance(linear, nn.Linear) or linear.out_features != 1:
        raise ConfigError(
            f"{type(base).__name__} has no head `score` of one output: rewards are trained of models that "
            "AutoModelForSequenceClassification makes with num_labels=1"
        )
    with torch.device("meta"):
        made: Any = AutoModelForTokenClassification.from_config(base.config, dtype=linear.weight.dtype)
    setattr(made, made.base_model_prefix, base.base_model)
    made.score, made.dropout = head, nn.Dropout(0.0)
    made.train(model.training)
    if base is model:
        return made
    made.peft_config = base.peft_config
    tuner = _with_child(model.base_model, "model", made)
    return _with_child(model, "base_model", tuner)


def _with_child(module: nn.Module, name: str, child: nn.Module) -> Any:
    """The module with another one in the place of a child; it shares all else."""
    other = copy.copy(module)
    other._modules = module._modules | {name: child}
    return other


class _OfRewards(HydraTrainer):
    """Below TRL's trainer: see [Note: rewards]."""

    model: Any  # Trainer's own, of which the annotation is seen where transformers' is not

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if not self.plans_steps:
            return super()._prepare_for_training(*args, **kwargs)
        with self._lent(for_tokens(self.model)):
            return super()._prepare_for_training(*args, **kwargs)

    @contextmanager
    def _lent(self, model: Any) -> Iterator[None]:
        """Within it this trainer's model is another."""
        own = self.model
        self.model = self.model_wrapped = model
        try:
            yield
        finally:
            self.model = own
            if self.deepspeed is None:
                self.model_wrapped = own

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Train on a batch of each rank's; the last one of an update applies it. Returns this rank's loss, ()."""
        if not self.plans_steps:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        self.model.train()  # TRL asks the script's model whether it trains
        inputs = self._prepare_inputs(inputs)
        return self._train_on(
            model,
            _rows(inputs),
            lambda values, _: self._loss_of(values, inputs) / self.current_gradient_accumulation_steps,
        )

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The mean loss of this rank's rows, (), and their rewards."""
        if not self.plans_steps:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        engine: Any = self.deepspeed
        engine.eval()
        self.model.eval()
        inputs = self._prepare_inputs(inputs)
        values = torch.stack([values[-1] for values in engine.values(_rows(inputs))])
        with torch.no_grad():
            loss = self._loss_of(values, inputs)
        return loss, None if prediction_loss_only else values[:, None], None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that `from_pretrained` loads as a model for sequences. Every rank must call it."""
        super().save_model(output_dir, _internal_call)
        if self.plans_steps and self.deepspeed is not None and self.args.should_save and not is_peft_model(self.model):
            config = copy.deepcopy(self.model.config)
            config.architectures = [type(self.model).__name__]
            config.save_pretrained(output_dir or self.args.output_dir)

    def _loss_of(self, values: Tensor, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = self.compute_loss(lambda **named: Rewards(values[:, None]), inputs)
        return loss


def _rows(inputs: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The rows without padding, each with one token more, which alone has a label."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        row = torch.cat((ids[mask != 0], ids[:1])).cpu()
        rows.append({"input_ids": row, "labels": torch.where(torch.arange(len(row)) == len(row) - 1, row, -100)})
    return rows


class HydraRewardTrainer(RewardTrainer, _OfRewards):
    """A `RewardTrainer` on the engine of the block "hydra" [Note: rewards].

    Takes the arguments of `RewardTrainer`. Raises ConfigError for a model whose head is not one linear layer of one
    output.
    """
