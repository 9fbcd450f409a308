"""TRL's trainers of preferences and policies on the engine: GRPO, RLOO and DPO; importing this needs the extra `trl`.

[Note: TRL's losses of log-probabilities]
These trainers call the model once for a batch, on padded rows with `fused_lm_head=True`, and make their loss and all
that they log of the log-probabilities and entropies that come back. So the engine runs the batches of all ranks as one
planned step, whose loss is the trainer's own `compute_loss`, called with what the engine has found in the place of the
model [Note: losses of log-probabilities]:

    training_step(batch)   1  compute_loss is begun, to learn what it asks of the model, and left there
                           2  the engine computes these scores forward only, for the batches of all ranks
                           3  compute_loss runs to its end on the scores of this rank's own rows
                           4  the engine trains by the gradients of that loss by the scores

The reference of an adapter is the model without it: the engine scores the same rows with adapters switched off, between
1 and 2, and they stand for what the loss asks of `self.model`. GRPO and RLOO score their references before.

The sum over the batches of an update is applied at its end. Generation, rewards, advantages, losses and metrics are the
trainer's own and know nothing of it. Under `no_grad`, as for the scores of an older policy, the engine only computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_hydra.config.versions import refuse_older
from ds_hydra.hugging_face.accelerator import without_engine
from ds_hydra.hugging_face.trainer import HydraTrainer
from ds_hydra.pipe.models.adapted import adds_nothing, is_peft_model
from ds_hydra.zero_hetero.errors import ConfigError

refuse_older("trl")

from trl import DPOTrainer, GRPOTrainer, RLOOTrainer  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # what stands above a trainer of TRL's must not stand between it and Trainer

_OF_LOGITS = ("logits/chosen", "logits/rejected", "mean_token_accuracy")  # metrics for which logits would be needed
_COPY = "ref"  # TRL's name of the copy of an adapter that a model came with
_ROUTERS = "output_router_logits"
_READ = frozenset(("input_ids", "attention_mask", "labels", "fused_lm_head", "use_cache"))


@dataclass(frozen=True)
class Scores:
    """What a call of the model gives back, for `rows` of `length` tokens; place i is about token i + 1."""

    log_probs: Tensor  # (rows, length - 1), 0 where no label says that the token is scored
    entropy: Tensor
    aux_loss: None = None

    @property
    def mean_logits(self) -> Tensor:
        """Zeros: no rank has the logits, of which TRL only logs something; see `_ScoresTrainer.log`."""
        return torch.zeros_like(self.log_probs)

    @property
    def is_top1(self) -> Tensor:
        """As `mean_logits`."""
        return torch.zeros_like(self.log_probs, dtype=torch.bool)


@dataclass(frozen=True)
class _Rows:
    """The padded rows of one call of the model."""

    input_ids: Tensor  # (rows, length)
    labels: Tensor
    kept: Tensor  # tokens that are no padding
    images: dict[str, Any]  # columns of the images of all rows; of a job that trains images

    @classmethod
    def of(cls, named: dict[str, Any], *, images: bool) -> _Rows:
        """ConfigError for inputs that the engine does not read; `images`: whether it reads those."""
        others = {name: value for name, value in named.items() if name not in _READ and value is not None}
        if others and (not images or _ROUTERS in others):
            raise ConfigError(
                f"the model is called with {', '.join(sorted(others))}, but log-probabilities are computed of tokens "
                "alone: leave the loss of routers (output_router_logits) out; for images set hydra.images"
            )
        ids, mask = named["input_ids"], named.get("attention_mask")
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        return cls(ids, named["labels"], kept, others)

    @property
    def sequences(self) -> dict[str, Any]:
        """The rows without padding, as the engine takes them."""
        ids, labels = (
            [row[kept].cpu() for row, kept in zip(rows, self.kept, strict=True)]
            for rows in (self.input_ids, self.labels)
        )
        return {"input_ids": ids, "labels": labels, **self.images}

    @property
    def scored(self) -> Tensor:
        """Which tokens are learnt, (rows, length): those with a label, but the first of a row, which follows none."""
        first = self.kept.long().cumsum(dim=1) == 1
        return self.kept & (self.labels != -100) & ~first

    def padded(self, places: Tensor, values: Tensor) -> Tensor:
        """The values of the tokens at these places of the rows, as the model would give them."""
        rows = values.new_zeros(self.input_ids.shape)
        return rows.masked_scatter(places.to(values.device), values)[:, 1:]


class _CalledModel(Exception):
    """Ends a loss where it calls the model."""

    def __init__(self, rows: _Rows):
        super().__init__("the loss calls the model")
        self.rows = rows


class _InPlaceOfModel(_Base):
    """Above a trainer of TRL's: what it hands on as the model that is trained becomes what the engine has found."""

    def __init__(self, *args: Any, **kwargs: Any):
        with without_engine():
            super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's own, of scores by the engine."""
        return super().compute_loss(self._called(model), *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(self._called(model), *args, **kwargs)  # type: ignore[misc]

    def _called(self, model: Any) -> Any:
        me: Any = self
        engine = me.deepspeed if me.plans_steps else None
        return (me._scores or me._evaluated) if engine is not None and (model is me.model or model is engine) else model


class _ScoresTrainer(HydraTrainer):
    """Below a trainer of TRL's: see [Note: TRL's losses of log-probabilities]."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._scores: Any = None
        self._reference: Scores | None = None  # of the batch that is trained on, by the model without its adapter

    def _refuse_unfit(self) -> None:
        super()._refuse_unfit()
        settings: Any = self.args
        if getattr(settings, "cast_lm_head_to_fp32", False):
            raise ConfigError("cast_lm_head_to_fp32=True: scores are computed in FP32 here; leave it at False")
        if getattr(settings, "use_vllm", False):
            raise ConfigError(
                "use_vllm=True reads the weights of a whole model on this rank, which the engine does not hold: "
                "generate with transformers, or write a loop of engine.full_parameters()"
            )

    @property
    def _temperature(self) -> float:
        return float(getattr(self, "temperature", 1.0))

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.plans_steps:
            model: Any = self.model
            if self._is_own_reference and _COPY in model.peft_config:
                if not adds_nothing(model, _COPY):
                    raise ConfigError(
                        "the reference of a model whose adapter is trained already is a copy of that adapter, which no "
                        "stage has: merge the adapter (merge_and_unload) and pass peft_config=, or set "
                        "precompute_ref_log_probs=True (DPO) or beta=0 (GRPO, RLOO)"
                    )
                model.delete_adapter(_COPY)  # then TRL asks for the model without adapters, which is the same
            for module in _with_fused_head(model):
                del module.forward  # the class's own, which generation calls, and which the engine knows
        return super()._prepare_for_training(*args, **kwargs)

    @property
    def _is_own_reference(self) -> bool:
        """Whether the loss compares the model with what it is without its adapter."""
        compared = getattr(self, "beta", 0.0) != 0.0 and not getattr(self, "precompute_ref_logps", False)
        return compared and getattr(self, "ref_model", None) is None and is_peft_model(self.model)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Train on a batch of each rank's; the last one of an update applies it. Returns this rank's loss, ()."""
        if not self.plans_steps:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        try:
            self._loss_of(self._tell_rows, model, inputs, num_items_in_batch)
        except _CalledModel as called:
            rows = called.rows
        else:
            raise ConfigError(f"{type(self).__name__}.compute_loss does not call the model: there is nothing to train")
        if not bool(rows.scored.any()):
            raise ConfigError(
                "no token of a batch of this rank is scored: leave rows without an answer out of the data"
            )
        if self._scores_references and self._is_own_reference:
            adapted: Any = self.model
            with adapted.disable_adapter():
                self._reference = self._scored(rows)

        def loss(log_probs: Tensor, entropy: Tensor, _: Any) -> Tensor:
            once = iter([Scores(rows.padded(rows.scored, log_probs), rows.padded(rows.scored, entropy))])
            return self._loss_of(lambda **named: _next(once), model, inputs, num_items_in_batch)

        found = self._train_on(model, rows.sequences, loss, temperature=self._temperature)
        self._reference = None
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's own; what TRL would need the logits for is left out."""
        unknown = _OF_LOGITS if self.plans_steps else ()
        super().log(
            {name: of for name, of in logs.items() if name.removeprefix("eval_") not in unknown}, *args, **kwargs
        )

    def _loss_of(self, scores: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """The trainer's own loss of a batch, with `scores` called in the place of the model; divided as Trainer does
        where it is not of the whole update."""
        self._scores = scores
        try:
            loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        finally:
            self._scores = None
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (
                self.model_accepts_loss_kwargs and num_items_in_batch is not None
            ) or self.compute_loss_func is not None
        return loss if scaled else loss / self.current_gradient_accumulation_steps

    _scores_references = False
    """Whether the loss itself asks the model for its reference."""

    def _evaluated(self, **named: Any) -> Scores:
        """The scores of some rows, without gradients; every rank must ask at the same time."""
        return self._scored(self._rows(named))

    def _tell_rows(self, **named: Any) -> Scores:
        raise _CalledModel(self._rows(named))

    def _rows(self, named: dict[str, Any]) -> _Rows:
        return _Rows.of(named, images=bool(self._deepspeed_config["hydra"].get("images")))

    def _scored(self, rows: _Rows) -> Scores:
        engine: Any = self.deepspeed
        if engine is None:
            raise ConfigError("log-probabilities are asked for before train(), which makes the engine")
        found = engine.log_probs(rows.sequences, entropy=True, temperature=self._temperature)
        log_probs, entropy = (rows.padded(rows.kept, torch.cat(list(one))) for one in found)
        return Scores(log_probs, entropy)


def _next(scores: Iterator[Scores]) -> Scores:
    found = next(scores, None)
    if found is None:
        raise ConfigError("the loss calls the model twice for one batch, which is not supported: call it once")
    return found


def _with_fused_head(model: nn.Module) -> list[nn.Module]:
    """Modules whose `forward` TRL has replaced by one that returns log-probabilities."""
    found = []
    for module in model.modules():
        own = vars(module).get("forward")
        code = getattr(getattr(own, "__func__", None), "__code__", None)
        if code is not None and code.co_name == "_fused_forward":
            found.append(module)
    return found


class HydraGRPOTrainer(_InPlaceOfModel, GRPOTrainer, _ScoresTrainer):  # type: ignore[misc]  # TRL gives no default
    """A `GRPOTrainer` on the engine of the block "hydra" [Note: TRL's losses of log-probabilities].

    Takes the arguments of `GRPOTrainer`. transformers generates on whole weights, which each rank gathers. Raises
    ConfigError for `use_vllm`.
    """


class HydraRLOOTrainer(_InPlaceOfModel, RLOOTrainer, _ScoresTrainer):  # type: ignore[misc]  # TRL gives no default
    """An `RLOOTrainer` on the engine of the block "hydra" [Note: TRL's losses of log-probabilities].

    Takes the arguments of `RLOOTrainer`. transformers generates on whole weights, which each rank gathers. Raises
    ConfigError for `use_vllm`.
    """


class HydraDPOTrainer(_InPlaceOfModel, DPOTrainer, _ScoresTrainer):
    """A `DPOTrainer` on the engine of the block "hydra" [Note: TRL's losses of log-probabilities].

    Takes the arguments of `DPOTrainer`. With `precompute_ref_log_probs` each rank computes its share of the reference
    by the whole model, before the engine is made. What TRL logs of the logits is left out: their means, and
    `mean_token_accuracy`. Raises ConfigError for an adapter trained before, without `precompute_ref_log_probs`.
    """

    _scores_references = True

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's own, of scores by the engine; the reference too, where `self.model` without its adapter is asked."""
        me: Any = self  # TRL says nothing of its model
        called, own = self._called(model), me.model
        if called is model or not self._is_own_reference:
            return super().compute_loss(model, *args, **kwargs)
        lent: Any = copy.copy(own)  # shares all that it is made of
        lent.forward = lambda **named: self._reference or self._evaluated(**named)
        me.model = lent
        try:
            return super().compute_loss(called, *args, **kwargs)
        finally:
            me.model = own

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        with without_engine():
            return super()._precompute_ref_logps(*args, **kwargs)
