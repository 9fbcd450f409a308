"""What a script calls that makes a step of parts, and computes losses of log-probabilities or of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from ds_hydra.engine.calls import Call, gathered, taken_once
from ds_hydra.engine.scoring import RoutedScores, TokenScores
from ds_hydra.engine.steps import Steps
from ds_hydra.engine.weights import EngineWithWeights
from ds_hydra.pipe.loss import ScoreLoss
from ds_hydra.zero_hetero.errors import CheckpointError

if TYPE_CHECKING:
    from ds_hydra.engine.going_on import GoingOn

Result = TypeVar("Result")


class EngineInParts(EngineWithWeights):
    """An engine whose steps a script may make in parts [Note: a step in parts]. Every rank must make the same calls."""

    steps: Steps
    going_on: GoingOn | None = None  # without lost ranks, where hydra.elastic asks for it

    def on_all(self, name: str, call: Call[Result], *, meets: bool = False) -> Result:
        """What a call of all ranks returns; where some are lost in it, for those that are left [Note: calls].

        `meets`: first with a message of its own that compares the calls of all ranks [Note: one call on all ranks].
        """

        def met() -> Result:
            self.meet()
            return call.part()

        made = replace(call, part=met) if meets else call
        with self.crew.calling(name):
            return made.part() if self.going_on is None else self.going_on.call(made)

    def forward_backward(
        self,
        sequences: Any,
        loss: ScoreLoss | None = None,
        *,
        normaliser: float | None = None,
        temperature: float | None = None,
        mixes_tokens: bool | None = None,
    ) -> Tensor:
        """Add the gradient of the loss of some sequences to those that wait for `optimizer_step`; returns the loss, a
        scalar in FP32, equal on all ranks.

        `sequences` are this rank's, a list or a collated batch as for `train_batch`, or an empty list; it may be called
        any number of times before an update. `loss` is called as loss(log_probs, entropy, fields) and returns one loss
        for each token [Note: losses of log-probabilities]: `log_probs` (T,) are those of the tokens that are learnt,
        `entropy` (T,) that of the distribution which each is drawn from, and `fields` the items' other columns by name,
        (T,) or (T, k) [Note: fields]. Without one it is the job's own, such as the cross entropy. Of a model whose head
        gives one number for each token it is called as loss(values, fields), and there must be one.

        Their sum over all ranks is divided by `normaliser`, a number that is equal on all of them; without one by the
        number of targets that all ranks hand in with this call, or by what the loss names (`ds_hydra.losses`). So a
        step of several calls gives them the count of all its tokens. `temperature` divides the logits; a column of that
        name does so for each sequence or token.

        A loss that needs other tokens too, of the sequence or of its group, says so by `mixes_tokens`, or by an
        attribute of that name: it is called once on each rank, with all targets of the sequences that the rank hands
        in, `fields["sequence"]` numbering these, and may return any number of losses (n,); their number on all ranks is
        the normaliser, unless one is given. It costs one more forward.

        A column `routed_experts`, (tokens, routers, chosen), has the experts that the routers are to use in place of
        their own choices, of each token at its own place, as `log_probs` gives them [Note: replayed routers]; no loss
        sees it.

        Where a step has several calls, or an evaluation follows one of them, each rank keeps its 1/N of the gradients
        in memory of their own from then on, one number a parameter, which predictions of memory do not count.

        ConfigError on all ranks, which names rank and item, and nothing has changed: for sequences that cannot be
        trained on; for a field of another length than the tokens, that some items or ranks lack, or that is not finite;
        and for a loss that looks at other tokens and does not say so, reads the model, or draws random numbers.
        """
        self.steps.begin_training("forward_backward()")
        with self.crew.calling("forward_backward()"):
            found = self.steps.parts.forward_backward(sequences, loss, normaliser, temperature, mixes_tokens)
        return torch.tensor(found, dtype=torch.float32, device="cpu")

    def optimizer_step(self) -> float:
        """Update the parameters by the gradients of all `forward_backward` calls since the last update; returns their
        norm before clipping. If that is not finite, nothing changes and the step counts as skipped.

        It counts as a step and is recorded as one; the LR schedule moves by `lr_scheduler.step()` alone. ConfigError if
        there are no gradients.
        """
        self.lent.take_back()
        with self.crew.calling("optimizer_step()"):
            outcome = self.steps.parts.optimizer_step()
        self.saving.when_due(outcome.request)
        return outcome.grad_norm

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Drop the gradients of `forward_backward` calls since the last update; a step of `train_batch` or of the three
        calls begins with gradients of its own."""
        super().zero_grad()
        self.steps.parts.forget()

    def gradients_wait(self) -> bool:
        """See `ThreeCallEngine`."""
        return super().gradients_wait() or self.steps.parts.count > 0

    @overload
    def log_probs(
        self,
        sequences: Any,
        *,
        entropy: bool = False,
        temperature: float | None = None,
        routed_experts: Literal[False] = False,
    ) -> TokenScores: ...

    @overload
    def log_probs(
        self, sequences: Any, *, entropy: bool = False, temperature: float | None = None, routed_experts: Literal[True]
    ) -> RoutedScores: ...

    def log_probs(
        self, sequences: Any, *, entropy: bool = False, temperature: float | None = None, routed_experts: bool = False
    ) -> TokenScores | RoutedScores:
        """The log-probability of each token of this rank's sequences, given those before it, and the entropy of what it
        is drawn from, in the mode of an evaluation; see `TokenScores`.

        `sequences` and `temperature` as of `forward_backward`; other columns than those for tokens, labels and masks
        are not read, but for `routed_experts`. With that argument it returns `RoutedScores`, which has the experts that
        the routers of a mixture have chosen. ConfigError where a sequence would be truncated or left out, and for
        routers that choose by other means than `torch.topk` [Note: replayed routers].
        """
        score = partial(self.steps.parts.scoring.log_probs, entropy=entropy, routed_experts=routed_experts)
        return self.on_all("log_probs()", Call(lambda: score(sequences, temperature), once="log_probs"))

    def values(self, sequences: Any) -> list[Tensor]:
        """Of a model whose head has one output: the value of each of this rank's sequences before each of its tokens,
        in the mode of an evaluation; one tensor (tokens,) each, in FP32 or, for a model in FP64, in that.

        At place i stands what the head makes of the tokens before i; 0 at the first, and where `labels` or a mask say
        that nothing is to be learnt. `sequences` as of `log_probs`.
        """
        scoring = self.steps.parts.scoring
        return self.on_all("values()", Call(lambda: scoring.values(sequences), once="values"))

    def full_parameters(
        self, *, dtype: torch.dtype | None = None, ranks: Sequence[int] | None = None, adapters: str = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights for an inference engine: (name, whole tensor on the device) one after the other, in the type that
        the model is computed in, or in `dtype`; no rank has more than one bucket (some layers) at a time.

        Names are those of the model's Hugging Face folder, as `save_16bit_model` writes it, with experts one by one;
        tied parameters come once. The order is the same on all ranks, and all must take all of them; `ranks` are those
        that get them (default: all), others get none. Of a PEFT model `adapters` are "merged" into their layers, under
        the names of the model without them, or come "alone", as a folder of adapters holds them. ConfigError for
        adapters that cannot be merged.
        """

        def every() -> Iterator[tuple[str, Tensor]]:
            with self.crew.calling("full_parameters()"):
                self.meet()
            return self.saving.full_parameters(dtype, ranks, adapters)

        return every() if self.going_on is None else taken_once(every, "full_parameters", self.going_on.by_fault)

    def fp32_state_dict(self) -> dict[str, Tensor]:
        """See `EngineWithWeights`."""
        whole = super().fp32_state_dict
        part = Call(whole) if self.going_on is None else gathered(whole, self.meet)
        return self.on_all("fp32_state_dict()", part, meets=True)

    def meet(self) -> None:
        """Return when all ranks have come to it."""
        self.crew.world.channel.texts("")

    def save_checkpoint(self, save_dir: str | Path, *arguments: Any, **named: Any) -> bool:
        """See `EngineWithWeights`. CheckpointError while gradients wait for an update, which no checkpoint holds."""
        self.steps.parts.refuse_if_any("save_checkpoint()", CheckpointError)
        return self.on_all(
            "save_checkpoint()", Call(partial(super().save_checkpoint, save_dir, *arguments, **named)), meets=True
        )

    def load_checkpoint(self, load_dir: str | Path, *arguments: Any, **named: Any) -> tuple[str | None, dict[str, Any]]:
        """See `EngineWithWeights`. CheckpointError while gradients wait for an update."""
        self.steps.parts.refuse_if_any("load_checkpoint()", CheckpointError)
        part = partial(super().load_checkpoint, load_dir, *arguments, **named)
        return self.on_all("load_checkpoint()", Call(part, once="load_checkpoint"), meets=True)

    def load_16bit_model(self, load_dir: str | Path) -> None:
        """See `EngineWithWeights`. CheckpointError while gradients wait for an update."""
        self.steps.parts.refuse_if_any("load_16bit_model()", CheckpointError)
        self.on_all(
            "load_16bit_model()", Call(partial(super().load_16bit_model, load_dir), once="load_16bit_model"), meets=True
        )

    def save_16bit_model(self, save_dir: str | Path, *arguments: Any, **named: Any) -> bool:
        """See `EngineWithWeights`."""
        part = partial(super().save_16bit_model, save_dir, *arguments, **named)
        return self.on_all("save_16bit_model()", Call(part), meets=True)
