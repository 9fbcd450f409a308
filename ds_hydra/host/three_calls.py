"""DeepSpeed's loop of three calls, engine(batch), engine.backward(loss), engine.step(), over whole planned steps.

[Note: three calls]
A step can only be planned when all its batches are there. So `engine(batch)` collects, `backward` says what the batch's
loss counts, and the `step` at the gradient accumulation boundary plans and runs all that was collected since the last
one, on all ranks, as one `train_batch`. With 2 ranks and gradient_accumulation_steps 2, four batches make an update.

What their losses count follows hydra.loss_norm. Let the four batches have 10, 30, 5 and 5 targets:

  "token"   each target counts 1/50, as with train_batch: the mean over all targets
  "batch"   each batch counts 1/4, each target of the first 1/40 and each of the third 1/20: the mean of the batches'
            means, as DeepSpeed's own loop computes it (backward() divides by gradient_accumulation_steps, and the
            gradients are averaged over the ranks). It does so as well in an update of fewer or more batches: of two
            batches each still counts 1/4, so that the gradient is half of their mean

The two agree where all updates have as many batches as configured, of equally many targets. A batch without any has no
mean: under "batch" it is refused, on all ranks. A factor that the script puts on a loss multiplies what its batch
counts: with `loss / 2` the first batch's targets count half of this. `backward(loss, scale_wrt_gas=False)` says that
the script has divided by gradient_accumulation_steps itself, as Accelerate does.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.host import refusals
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.modes import refuse_without_gradients, tell_modes
from ds_hydra.host.own_updates import refuse_dropping
from ds_hydra.host.pending import Collected, PendingLoss, Term
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_NOT_DATA = frozenset(("use_cache", "return_dict", "return_loss", "num_items_in_batch"))
"""Arguments of a Hugging Face model's forward that say nothing about what is trained on, or that "token" makes so."""


class ThreeCallEngine(HostEngine):
    """A host engine that scripts written for DeepSpeed can drive batch by batch [Note: three calls].

    Every rank must make the same calls; a rank may have no batch left for a step, as long as it calls `step`.
    """

    _collected: list[Collected]
    _calls: int  # of step()
    _boundary: bool | None  # as set by hand
    shows_gradients: bool  # whether a plain loop would have gradients though the update is made, as within Trainer's
    accumulates: int | None  # batches of each rank in an update, where its caller counts them itself, as Trainer does
    items_are_counted: bool  # whether its caller compares num_items_in_batch with the step's targets, as Trainer's does
    _evaluating: bool  # since eval(); a model that from_pretrained made is in eval mode from the start, and trains

    @abstractmethod
    def train_collected(self, batches: Sequence[tuple[Any, float]]) -> list[float]:
        """Run one step of these batches of this rank and the factors of their losses; returns each batch's own loss:
        the mean over its targets, NaN where it has none."""

    @abstractmethod
    def evaluate_collected(self, batch: Any) -> tuple[float, float]:
        """Mean losses, without an update: over the targets of this rank's batch, and over those of all ranks."""

    def forward(self, *inputs: Any, **kwargs: Any) -> PendingLoss:
        """Collect a batch for the coming step and return its loss, which is pending until then.

        The batch is one argument, a mapping or anything else that `train_batch` takes, or the keyword arguments of a
        Hugging Face model. After `eval()` the batches of all ranks run at once, and the loss is there: the mean over
        the targets of this rank's batch. Then every rank must call it, with an empty list where it has no batch.
        """
        batch = _batch_of(inputs, kwargs)
        num_items = kwargs.get("num_items_in_batch")
        if num_items is not None and not self.items_are_counted:
            refusals.num_items(float(num_items))
        self.shows_gradients = False
        tell_modes("engine(batch)")
        if not self._evaluating:
            refuse_without_gradients("engine(batch)", "call engine.eval() before it, and engine.train() after it")
        number = torch.zeros((), device=self.device)
        if self._evaluating:
            return PendingLoss((), self.evaluate_collected(batch)[0], number)
        entry = Collected(_as_it_is(batch), self.backward, num_items=num_items)
        self._collected.append(entry)
        return PendingLoss([Term(entry, 1.0)], like=number)

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True, **unused: Any) -> Tensor:
        """Let a loss of `engine(batch)` count in the coming step, with the factors that were put on it.

        Returns what DeepSpeed's returns: the loss over gradient_accumulation_steps, unless `scale_wrt_gas` is False.
        """
        ours = isinstance(loss, PendingLoss)
        pending = ours and bool(loss.terms) and all(term.entry in self._collected for term in loss.terms)
        if self._evaluating and not pending:
            raise RuntimeError(
                "engine.backward() after engine.eval(), by which losses are there at once and nothing is trained on: "
                "call engine.train() before engine(batch)"
            )
        if not ours:
            raise ConfigError(
                f"engine.backward() was given a {type(loss).__name__} that is not a loss of engine(batch): nothing of "
                "the model runs in the script. Pass loss_fn(logits, labels) to ds_hydra.initialize() for a loss of "
                "your own"
            )
        if not pending:
            raise RuntimeError(
                "engine.backward(): the step of this loss has run already: call engine(batch) again for another one"
            )
        if not loss.requires_grad:
            raise RuntimeError("engine.backward() was given a loss without a gradient: give it before detach()")
        trained = [term for term in loss.terms if term.has_gradient]
        if any(term.entry.is_freed for term in trained):
            raise RuntimeError(
                "engine.backward() was given a loss of the same batch for the second time: add the losses up and give "
                "their sum, or say engine.backward(loss, retain_graph=True) the first time"
            )
        accumulation = self.batches_of_update()
        for term in trained:
            whole = term.factor if scale_wrt_gas else term.factor * accumulation
            term.entry.factor = whole + (term.entry.factor or 0.0)
            term.entry.is_freed = not retain_graph
        return loss / accumulation if scale_wrt_gas else loss

    def scale(self, loss: Any) -> Any:
        """The loss itself, for `engine.scale(loss).backward()`: losses are scaled in the step, where FP16 needs it."""
        return loss

    def step(self, lr_kwargs: Any = None) -> None:
        """At the gradient accumulation boundary plan and run all that was collected; elsewhere only count. `lr_kwargs`
        go to the LR schedule's step."""
        boundary = self.is_gradient_accumulation_boundary()
        self._calls += 1
        self.micro_steps += 1
        micro_steps = self.micro_steps
        self._step_applied = False
        if not boundary:
            return
        entries, self._collected = self._collected, []
        trained = [entry for entry in entries if entry.factor is not None]
        if len(trained) < len(entries):
            logger.warning(
                "%d of %d batches were given to engine() but their losses not to engine.backward(): they are not "
                "trained on", len(entries) - len(trained), len(entries),
            )  # fmt: skip
        self._lr_kwargs = dict(lr_kwargs or {})
        losses = self.train_collected([(entry.batch, entry.factor or 0.0) for entry in trained])
        self._lr_kwargs, self.micro_steps = {}, micro_steps
        for entry, loss in zip(trained, losses, strict=True):
            entry.settle(loss)

    def train(self, mode: bool = True) -> ThreeCallEngine:
        """From now on `engine(batch)` collects; with mode False it evaluates at once."""
        self._evaluating = not mode
        super().train(mode)
        return self

    def eval(self) -> ThreeCallEngine:
        """From now on `engine(batch)` evaluates at once."""
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` makes an update."""
        if self._boundary is not None:
            return self._boundary
        if self.config.get("managed_gradient_accumulation") is False:
            return True
        return (self._calls + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on `step` makes an update if this is true, and none if it is false."""
        self._boundary = is_boundary

    def batches_of_update(self) -> int:
        """Of each rank, by which DeepSpeed's loop divides losses."""
        return self.accumulates or self.gradient_accumulation_steps()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Nothing to do: a step begins with gradients of its own. ConfigError between `backward` and the boundary's
        `step`, where plain DeepSpeed would drop gradients."""
        self.before_dropping("engine.zero_grad()")
        self.shows_gradients = False

    def before_dropping(self, call: str) -> None:
        """ConfigError where a call would drop gradients of collected batches."""
        if ThreeCallEngine.gradients_wait(self):
            refuse_dropping(call)

    def gradients_wait(self) -> bool:
        """Whether some `backward` was called whose update has not been made."""
        return any(entry.factor is not None for entry in self._collected)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: batches are collected, and no gradient is computed before the boundary."""
        return nullcontext()

    compile = refusals.call("compile", "stages are not compiled as a whole; leave it out")
    allreduce_gradients = refusals.call("allreduce_gradients", "engine.step() sums gradients over all ranks")
    buffered_allreduce_fallback = refusals.call("buffered_allreduce_fallback", "engine.step() sums gradients")
    register_compile_pass = refusals.call("register_compile_pass", "stages are not compiled as a whole; leave it out")
    clip_fp32_gradients = refusals.call("clip_fp32_gradients", "set gradient_clipping in the config")
    set_data_post_process_func = refusals.call("set_data_post_process_func", "change items in the dataset")
    set_custom_curriculum_learning_schedule = refusals.call(
        "set_custom_curriculum_learning_schedule", "hand the sequences of each step in, by train_batch(sequences)"
    )

    def _set_deepspeed_defaults(self) -> None:
        super()._set_deepspeed_defaults()
        self._collected, self._calls, self._boundary, self._evaluating = [], 0, None, False
        self.accumulates = None
        self.shows_gradients = self.items_are_counted = False


def _as_it_is(value: Any) -> Any:
    """A copy of what a script may write its next batch into, or change otherwise, before the step runs."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _as_it_is(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        numbers = bool(value) and isinstance(value[0], int)
        return list(value) if numbers else [_as_it_is(one) for one in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _batch_of(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The one batch that `engine(...)` was called with."""
    data = {name: value for name, value in kwargs.items() if name not in _NOT_DATA}
    if len(inputs) + bool(data) != 1:
        raise ConfigError(
            f"engine() was given {len(inputs)} positional arguments and the keywords {sorted(data)}: give one batch, a "
            "mapping with input_ids, or its columns by keyword"
        )
    return inputs[0] if inputs else {name: value for name, value in data.items() if value is not None}
