"""Training in one process, in plain torch, one sequence at a time: what a run on ranks is compared with.

It knows nothing of packs, plans or ranks: only which sequences a step has and what a token's loss counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.loss import IGNORED, TokenLoss
from ds_hydra.plan.step_plan import Span
from ds_hydra.testing.drawing import drawing

Sample = Mapping[str, Tensor]  # input_ids and labels, both (length,), labels not shifted; perhaps sequence_weight
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """What one step did; gradients by parameter name, as the optimizer got them (clipped)."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    router_loss: float = 0.0  # the part of the loss that routers have


class OneProcess:
    """A model and its optimizer in one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float,
        masters: nn.Module | None = None,
        token_loss: TokenLoss | None = None,
    ):
        """`model` maps (1, T) token ids to (1, T, vocab) logits, or to an output that has them.

        `optimizer` is made of the model whose parameters it moves: `masters`, with the same values in another type, if
        that is not the model itself. `token_loss`: logits (T, V) and labels (T,) to the loss of each token, if not the
        cross entropy.
        """
        self.model, self.clip, self.token_loss = model, clip, token_loss
        self.router_loss = RouterLoss.of(model)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = self.parameters
        if masters is not None:
            self.masters = {name: p for name, p in masters.named_parameters() if p.requires_grad}
        self.optimizer = optimizer(model if masters is None else masters)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take parameters from elsewhere."""
        with torch.no_grad():
            for name, parameter in self.masters.items():
                parameter.copy_(values[name])

    def gradients(
        self, samples: Sequence[Sample], weights: Sequence[Tensor], keys: Sequence[Tensor] | None = None
    ) -> Step:
        """Loss, norm and clipped gradients, left in the masters; `weights[i]` is what the tokens of sample i count.

        `keys[i]` are what its random numbers follow from; None: nothing is drawn.
        """
        if self.masters is not self.parameters:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.masters[name])
        sums = {name: torch.zeros_like(parameter) for name, parameter in self.masters.items()}
        self.model.zero_grad()
        total = of_routers = 0.0
        drawn_with: Sequence[Any] = keys or [None] * len(samples)
        for sample, weight, drawn in zip(samples, weights, drawn_with, strict=True):
            with drawing(self.model, drawn):
                losses = token_losses(self.model, sample, self.token_loss)
                loss = losses @ weight.to(losses.dtype)
                if self.router_loss is not None:
                    counts = weight[sample["labels"][1:] != IGNORED].sum()
                    routers = float(counts) * self.router_loss.taken()
                    loss, of_routers = loss + routers, of_routers + float(routers.detach())
            loss.backward()
            total += float(loss.detach())
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad
                    parameter.grad = None
        for name, parameter in self.masters.items():
            parameter.grad = sums[name]
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip if self.clip > 0 else float("inf"))
        gradients = {name: p.grad.clone() for name, p in self.masters.items() if p.grad is not None}
        return Step(total, float(norm), gradients, of_routers)

    def step(self, samples: Sequence[Sample], weights: Sequence[Tensor], keys: Sequence[Tensor] | None = None) -> Step:
        """`gradients`, and an update by them."""
        result = self.gradients(samples, weights, keys)
        self.optimizer.step()
        return result

    def moments(self, key: str) -> dict[str, Tensor]:
        """A state of the optimizer by parameter name."""
        return {name: self.optimizer.state[parameter][key] for name, parameter in self.masters.items()}


class RouterLoss:
    """The load balancing loss of one sequence that a model runs, by plain torch: the mean of its routers'."""

    def __init__(self, model: Any):
        self._coefficient, self._top_k = model.config.router_aux_loss_coef, model.config.num_experts_per_tok
        self._losses: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(("mlp.gate", "moe.gate")):
                module.register_forward_hook(lambda _module, _args, out: self._losses.append(self._of(out[0])))

    @classmethod
    def of(cls, model: Any) -> RouterLoss | None:
        """None for a model whose routers have none."""
        asked = getattr(getattr(model, "config", None), "output_router_logits", False)
        return cls(model) if asked else None

    def _of(self, logits: Tensor) -> Tensor:
        """E * sum of (share of the tokens that chose an expert) * (mean probability of it); logits (tokens, E)."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = F.softmax(wide, dim=-1)
        chosen = F.one_hot(probabilities.topk(self._top_k, dim=-1).indices, logits.shape[-1]).sum(dim=1).to(wide)
        return logits.shape[-1] * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum()

    def taken(self) -> Tensor:
        """That of the sequence that ran last, times the model's coefficient."""
        losses, self._losses = self._losses, []
        assert losses, "the model has routers"
        return self._coefficient * torch.stack(losses).mean()


def token_losses(model: nn.Module, sample: Sample, token_loss: TokenLoss | None = None) -> Tensor:
    """(tokens - 1,) losses of one sequence, cross entropies unless it is said; 0 where nothing is to be learnt."""
    token_ids = sample["input_ids"][None]
    out = model(token_ids) if not hasattr(model, "config") else model(input_ids=token_ids, use_cache=False).logits
    logits = out[0, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    labels = sample["labels"][1:]
    if token_loss is not None:
        known = labels != IGNORED
        return torch.zeros_like(wide[:, 0]).masked_scatter(known, token_loss(wide[known], labels[known]))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")


def token_weights(samples: Sequence[Sample], microbatches: Sequence[Sequence[Span]], loss_norm: str) -> list[Tensor]:
    """What each token of each sample, (tokens - 1,), counts in the step's loss: the last one has no target.

    `microbatches` lists the spans of every micro-batch of the step, their sequences by position in `samples`.
    """
    learnt = [sample["labels"][1:] != IGNORED for sample in samples]
    weights = [torch.zeros(len(one), dtype=torch.float64) for one in learnt]
    if loss_norm == "token":
        total = max(1, sum(int(one.sum()) for one in learnt))
        return [one + 1.0 / total for one in weights]
    if loss_norm == "sequence":
        some = max(1, sum(bool(one.any()) for one in learnt))
        return [one + 1.0 / (max(1, int(known.sum())) * some) for one, known in zip(weights, learnt, strict=True)]
    counts = [sum(int(learnt[i][start:stop].sum()) for i, start, stop in batch) for batch in microbatches]
    some = max(1, sum(count > 0 for count in counts))
    for batch, count in zip(microbatches, counts, strict=True):
        for i, start, stop in batch:
            weights[i][start:stop] = 1.0 / (max(1, count) * some)
    return weights
